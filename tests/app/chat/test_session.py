"""A session without a screen: what happens when several things want to happen at once."""

from __future__ import annotations

import asyncio

import pytest
from msgspec.structs import replace

from app.chat import saver
from app.chat.history import History
from app.chat.session import Session
from engine.protocol.events import Failed, Ready, Sampling, Search, Warming
from tests.app.fake_engine import READY, STARTED, TOO_LONG, FakeEngine, reply, tokens
from tests.waiting import until


class SilentView:
    """Remembers what it is told."""

    def __init__(self) -> None:
        self.notices: list[str] = []
        self.given_back: list[str] = []

    async def added(self, turn):
        await asyncio.sleep(0)

    changed = cut = added

    async def opened(self):
        await asyncio.sleep(0)

    def queue_changed(self):
        pass

    def give_back(self, text):
        self.given_back.append(text)

    def notice(self, text, *, warning=False):
        self.notices.append(text)

    def problem_changed(self, problem):
        assert problem is None


@pytest.fixture
def begin():
    tasks = []

    def begin(engine: FakeEngine, history: History | None = None) -> tuple[Session, SilentView]:
        view = SilentView()
        session = Session(
            engine,
            history or History(":memory:"),
            view,
            spawn=lambda work: tasks.append(asyncio.ensure_future(work)),
            sampling=Sampling(),
            system="",
            max_tokens=None,
            think=True,
        )
        session.start()
        return session, view

    yield begin
    for task in tasks:
        if task.done() and not task.cancelled():
            task.result()  # raises what it raised
        task.cancel()


def said(session: Session) -> list[str]:
    return [turn.content for turn in session.conversation.turns]


async def test_two_prompts_at_the_same_moment_are_answered_one_after_the_other(begin):
    engine = FakeEngine(reply("A"), reply("B"))
    session, _ = begin(engine)
    await until(lambda: not session.is_busy)
    await asyncio.gather(session.send("a"), session.send("b"))
    await until(lambda: len(engine.requests) == 2 and not session.is_busy)
    assert said(session) == ["a", "A", "b", "B"]


async def test_what_a_full_disk_did_not_take_is_saved_when_it_has_room(begin, monkeypatch):
    monkeypatch.setattr(saver, "RETRY_S", 0.01)
    session, view = begin(FakeEngine(reply("A" * 10_000)))
    problems = []
    view.problem_changed = problems.append
    pages = session.history._db.execute("PRAGMA page_count").fetchone()[0]
    session.history._db.execute(f"PRAGMA max_page_count = {pages}")
    await session.send("a" * 10_000)
    await until(lambda: not session.is_busy and len(problems) > 3)
    assert all(problems)
    session.history._db.execute("PRAGMA max_page_count = 1000000")
    await until(lambda: problems[-1] is None)
    [prompt, answer] = session.history.messages(session.conversation.chat_id)
    assert (prompt.message.content, answer.message.content) == ("a" * 10_000, "A" * 10_000)


async def test_a_chat_that_is_left_while_the_disk_is_full_is_saved_too(begin, monkeypatch):
    monkeypatch.setattr(saver, "RETRY_S", 0.01)
    session, view = begin(FakeEngine(reply("A" * 10_000), reply("B" * 10_000)))
    problems = []
    view.problem_changed = problems.append
    pages = session.history._db.execute("PRAGMA page_count").fetchone()[0]
    session.history._db.execute(f"PRAGMA max_page_count = {pages}")
    for text in ("a", "b"):
        await session.send(text)
        await until(lambda: not session.is_busy and problems[-1])
        await session.open(None)
    session.history._db.execute("PRAGMA max_page_count = 1000000")
    await until(lambda: problems[-1] is None)
    saved = [session.history.messages(chat.id) for chat in session.history.chats()]
    assert sorted(len(each[1].message.content) for each in saved) == [10_000, 10_000]


async def test_chats_from_a_time_when_the_file_could_not_be_opened_are_saved_too(
    begin, monkeypatch, tmp_path
):
    monkeypatch.setattr(saver, "RETRY_S", 0.01)
    in_the_way = tmp_path / "folder"
    in_the_way.touch()
    session, view = begin(
        FakeEngine(*map(reply, ("A", "B", "A2"))), History.open(in_the_way / "history.sqlite3")
    )
    problems = []
    view.problem_changed = problems.append
    for text in ("a", "b"):
        await session.send(text)
        await until(lambda: not session.is_busy and problems and problems[-1])
        await session.open(None)
    session.history._run("UPDATE chats SET model = 'another' WHERE id = ?", session.history.chat_ids()[0])
    session.history.rename(session.history.chat_ids()[0], "Named")
    await session.open(session.history.chat_ids()[-1])  # the first of those in memory
    await until(lambda: len(problems) > 10)
    assert all(problems) and said(session) == ["a", "A"]
    in_the_way.unlink()
    await until(lambda: problems[-1] is None)
    await session.send("a2")
    await until(lambda: not session.is_busy)
    saved = History(in_the_way / "history.sqlite3")
    assert [[each.message.content for each in saved.messages(chat.id)] for chat in saved.chats()] == [
        ["a", "A", "a2", "A2"],
        ["b", "B"],
    ]
    assert [(chat.model, chat.title) for chat in saved.chats()] == [
        (READY.model.name, "a"),
        ("another", "Named"),
    ]
    saved.close()


async def test_a_save_that_is_late_comes_before_more_text(monkeypatch):
    saves = []
    monkeypatch.setattr(saver, "SAVE_S", 0.0)
    late = saver.Saver(None, None, None)
    monkeypatch.setattr(late, "now", lambda: saves.append(len(shown)))
    for n in range(3):  # the loop does nothing else meanwhile
        shown = "text" * n
        late.soon()
    assert saves == [4, 8]


async def test_what_is_wrong_with_a_model_is_said_when_it_is_ready(begin):
    odd = replace(READY, warnings=("Its template does not work.",))
    session, view = begin(FakeEngine(reply("A"), start=[odd]))
    await until(lambda: not session.is_busy)
    assert view.notices == ["Its template does not work."]
    session.switch(FakeEngine(reply("B"), start=[odd]), "other")
    await until(lambda: len(view.notices) == 2)
    assert view.notices[1] == "other answers now. Its template does not work."


async def test_regenerating_while_the_view_still_removes_the_old_reply(begin):
    session, _ = begin(FakeEngine(reply("A"), reply("B")))
    await session.send("a")
    await until(lambda: said(session) == ["a", "A"] and not session.is_busy)
    await session.regenerate()
    await until(lambda: not session.is_busy)
    assert said(session) == ["a", "B"]


async def test_a_reply_belongs_to_the_chat_it_was_asked_in(begin):
    engine = FakeEngine([*tokens("So far"), None], reply("Other"))
    session, _ = begin(engine)
    await session.send("a")
    await until(lambda: said(session) == ["a", "So far"])
    first = session.conversation
    await asyncio.gather(session.open(None), session.send("typed meanwhile"))
    await until(lambda: not session.is_busy)
    assert [turn.content for turn in first.turns][:2] == ["a", "So far"]
    assert first.turns[1].note.startswith("stopped")
    assert "So far" not in said(session)
    assert not session.queued


async def test_an_engine_that_does_not_stop_is_not_waited_for(begin, monkeypatch):
    monkeypatch.setattr("app.chat.session.STOP_S", 0.05)

    class Deaf(FakeEngine):
        async def stop(self) -> None:
            pass

    engine = Deaf([*tokens("So far"), None, *tokens(" and on")], reply("Other"))
    session, _ = begin(engine)
    await session.send("a")
    await until(lambda: said(session) == ["a", "So far"])
    first = session.conversation
    await session.open(None)
    assert said(session) == []
    engine.release()
    await asyncio.sleep(0.02)
    assert said(session) == [], "what still comes of it is dropped"
    assert [turn.content for turn in first.turns] == ["a", "So far"]
    await session.send("b")
    await until(lambda: not session.is_busy)
    assert said(session) == ["b", "Other"]


async def test_a_prompt_that_waits_goes_back_when_the_chat_changes(begin):
    session, view = begin(FakeEngine(start=[None]))
    await session.send("a")
    assert session.queued == "a"
    await session.open(None)
    assert view.given_back == ["a"]
    assert not session.queued


# --- a full context ------------------------------------------------------------------------------------

CUT = reply("So much", reason="length", prompt_n=8189)  # the context of 8,192 tokens is full then


async def asked(session: Session, *prompts: str) -> None:
    for prompt in prompts:
        await session.send(prompt)
        await until(lambda: not session.is_busy)


async def test_the_oldest_turns_are_left_out_and_the_reply_goes_on(begin):
    engine = FakeEngine(reply("A"), reply("B"), CUT, reply(" more"))
    session, view = begin(engine)
    await asked(session, "a", "b", "c")
    assert session.is_full and session.conversation.turns[-1].note.endswith("Ctrl+G offers how to go on")
    await session.leave_out()
    await until(lambda: not session.is_busy)
    assert engine.prompts()[-1] == [("user", "c"), ("assistant", "So much")]
    assert said(session) == ["a", "A", "b", "B", "c", "So much more"] and not session.is_full
    assert "4 turns left out: the model reads the rest, the chat keeps all" in view.notices
    await session.leave_out()
    assert view.notices[-1].startswith("There are no older turns to leave out")


async def test_the_prompt_that_did_not_fit_is_answered_without_the_oldest_turns(begin):
    engine = FakeEngine(reply("A"), [TOO_LONG], reply("B"))
    session, _ = begin(engine)
    await asked(session, "a", "b")
    assert session.is_full
    await session.leave_out()
    await until(lambda: not session.is_busy)
    assert engine.prompts()[-1] == [("user", "b")] and said(session) == ["a", "A", "b", "B"]


@pytest.mark.parametrize("before, helps", [(100, False), (4000, True)])
async def test_a_prompt_that_is_too_long_alone_is_said_to_be(begin, before, helps):
    """To leave out what stands before it would not help then."""
    session, _ = begin(FakeEngine(reply("A", prompt_n=before), [TOO_LONG]))
    await asked(session, "a", "b")
    assert session.is_full and session.is_too_long == (not helps)
    note = "Ctrl+G offers how to go on" if helps else "The prompt alone is too long: F2"
    assert f"9,000 tokens and the context holds 8,192. · {note}" in session.conversation.turns[-1].note


async def test_a_new_chat_begins_with_a_summary(begin):
    engine = FakeEngine(reply("A"), [TOO_LONG], reply("It was about a."), reply("B"), reply("Shorter."))
    session, _ = begin(engine)
    session.set_system("Be brief.")
    await asked(session, "a", "b")
    first = session.conversation
    await session.summarize()
    await until(lambda: not session.is_busy and not session.queued)
    request = engine.requests[2]
    assert request.max_tokens == 2048 and not request.prompt.think
    system, *source, summary = engine.prompts()[2]
    assert (system, source) == (("system", "Be brief."), [("user", "a"), ("assistant", "A")])
    assert summary[1].startswith("Summarize our chat “a”") and "600 words" in summary[1]
    assert said(session) == [summary[1], "It was about a.", "b", "B"], "which was not answered before"
    assert engine.prompts()[3] == [system, summary, ("assistant", "It was about a."), ("user", "b")]
    assert [stored.message.content for stored in session.history.messages(first.chat_id)][1:] == [
        "a",
        "A",
        "b",
    ]
    assert len(session.history.chats()) == 2
    session.conversation.cut(2)
    await session.regenerate()
    await until(lambda: not session.is_busy)
    assert engine.prompts()[4] == [system, *source, summary], "the summary is written again"


async def test_what_does_not_fit_is_left_out_of_the_summary(begin):
    engine = FakeEngine(reply("A"), reply("B"), reply("C"), [TOO_LONG], CUT, reply("About b and c."))
    session, view = begin(engine)
    await asked(session, "a", "b", "c")
    await session.summarize()
    await until(lambda: not session.is_busy)
    assert [len(prompt) for prompt in engine.prompts()[3:]] == [7, 5, 3]
    assert "The oldest 4 messages did not fit into the context" in said(session)[0]
    assert said(session)[1:] == ["About b and c."] and not session.is_full
    assert session.history.messages(session.conversation.chat_id)[0].message.content == said(session)[0]
    assert session.status.snapshot().context_used is None and not session.status.snapshot().is_nearly_full
    assert sum("older messages are left out of the summary" in notice for notice in view.notices) == 2


async def test_a_summary_that_cannot_be_had_says_why(begin):
    session, view = begin(FakeEngine(reply("A"), [TOO_LONG]))
    await session.summarize()
    assert view.notices == ["There is nothing to summarize yet"]
    await asked(session, "a")
    await session.summarize()
    await until(lambda: not session.is_busy)
    assert session.conversation.turns[-1].note.startswith("⚠ The prompt has 9,000 tokens")
    await session.summarize()
    assert view.notices[-1] == "There is nothing to summarize yet" and len(said(session)) == 1


async def test_a_context_that_is_nearly_full_is_said_to_be(begin):
    session, view = begin(FakeEngine(reply("A", prompt_n=5000), reply("B", prompt_n=7000)))
    session.ways_on = "make room."
    await asked(session, "a")
    assert not any(view.notices)
    await asked(session, "b")
    assert view.notices[-1] == "The context is nearly full: make room."


# --- another engine ------------------------------------------------------------------------------------

NO_DRIVER = Failed(kind="backend", message="There is no NVIDIA driver.", hint="Choose CPU.")
NO_MEMORY = Failed(kind="backend", message="Large 16B needs 17.2 GB of memory: …. 12.0 GB are free.")


async def test_going_over_to_another_engine_keeps_the_conversation(begin):
    old, new = FakeEngine(reply("Old.")), FakeEngine(reply("New."))
    session, view = begin(old)
    await session.send("first")
    await until(lambda: not session.is_busy)
    adopted, seen = [], []
    session.watch = seen.append
    session.switch(new, "cuda", lambda: adopted.append(session.engine))
    await until(lambda: session.engine is new and old.closed)
    assert adopted == [new] and session.candidate is None
    assert isinstance(seen[0], Ready) and session.status.is_ready
    assert "cuda answers now" in view.notices
    await session.send("second")
    await until(lambda: not session.is_busy)
    assert said(session) == ["first", "Old.", "second", "New."]
    assert [content for _, content in new.prompts()[0]] == ["first", "Old.", "second"]


async def test_the_longest_context_has_the_memory_of_the_engine_before(begin):
    old, new = FakeEngine(reply("Old.")), FakeEngine(start=[replace(READY, is_squeezed=True)])
    session, _ = begin(old)
    await until(lambda: not session.is_busy)
    starts = []
    new.on_event = lambda event: starts.append(old.closed)
    session.switch(new, "context max")
    await until(lambda: session.engine is new)
    assert starts == [0, 1] and new.closed == 1, "it started once more, alone"


def product(what, before_us, after_us, **changes):
    return Search(
        what=what,
        choice="",
        tried=9,
        total=9,
        refused=0,
        before_us=before_us,
        after_us=after_us,
        left_s=1,
        **changes,
    )


@pytest.mark.parametrize(
    ("searches", "said"),
    [
        (
            [product("qkv", 500, 500), product("qkv", 500, 400), product("down", 400, 375)],
            "made a step 33% faster",
        ),
        ([product("qkv", 500, 500), product("down", 500, 499)], "found nothing faster"),
        ([product("qkv", 0, 0, found=True), product("down", 500, 400)], "made a step 25% faster"),
        ([product("qkv", 0, 0, found=True)], "was known from an earlier start"),
    ],
)
async def test_what_a_search_was_good_for_is_said(begin, searches, said):
    session, view = begin(FakeEngine())
    await until(lambda: not session.is_busy)
    warming = [Warming(done=1, total=2, search=search) for search in searches]
    session.switch(FakeEngine(start=[*warming, READY]), "cuda-beam2")
    await until(lambda: view.notices)
    assert view.notices == [f"cuda-beam2 answers now, its search {said}"]


@pytest.mark.parametrize(("model", "used"), [("Qwen3 0.6B", 97), ("Llama 3.2 1B", None)])
async def test_how_full_the_context_is_is_known_of_the_same_model_only(begin, model, used):
    ready = replace(READY, model=replace(READY.model, name=model))
    old, new = FakeEngine(reply("Old.")), FakeEngine(start=[ready])
    session, _ = begin(old)
    await session.send("first")
    await until(lambda: not session.is_busy)
    session.switch(new, "cuda")
    await until(lambda: session.engine is new)
    assert session.status.snapshot().context_used == used


async def test_a_reply_in_progress_ends_before_another_engine_takes_over(begin):
    old, new = FakeEngine([*reply("A long reply.")[:3], None, *reply("A long reply.")[3:]]), FakeEngine()
    session, _ = begin(old)
    await session.send("first")
    await until(lambda: session.reply is not None)
    session.switch(new, "cuda")
    await asyncio.sleep(0.02)
    assert session.engine is old and not old.closed
    old.release()
    await until(lambda: session.engine is new)
    assert said(session)[-1] == "A long reply."


async def test_an_engine_that_does_not_start_leaves_the_other_in_use(begin):
    old, new = FakeEngine(reply("Old.")), FakeEngine(start=[NO_DRIVER])
    session, view = begin(old)
    await until(lambda: not session.is_busy)
    session.switch(new, "cuda")
    await until(lambda: new.closed)
    assert session.engine is old and not old.closed and session.candidate is None
    assert view.notices[-1] == "cuda did not start: There is no NVIDIA driver. Choose CPU."
    await session.send("first")
    await until(lambda: not session.is_busy)
    assert said(session) == ["first", "Old."]


async def test_where_there_is_no_room_for_two_it_starts_alone(begin):
    old, new = FakeEngine(), FakeEngine()
    starts = [[NO_MEMORY], STARTED]

    async def start():
        async for event in new._play(starts.pop(0)):
            yield event

    new.start = start
    session, _ = begin(old)
    await until(lambda: not session.is_busy)
    session.switch(new, "cuda")
    await until(lambda: session.engine is new)
    assert old.closed and not starts


@pytest.mark.parametrize("by", ["key", "another"])
async def test_a_switch_is_given_up(begin, by):
    old, slow, third = FakeEngine(), FakeEngine(start=[*STARTED[:1], None, *STARTED[1:]]), FakeEngine()
    session, _ = begin(old)
    await until(lambda: not session.is_busy)
    session.switch(slow, "slow")
    await until(lambda: session.candidate.status.snapshot().done)
    if by == "key":
        session.cancel_switch()
    else:
        session.switch(third, "third")
    slow.release()
    await until(lambda: slow.closed)
    await asyncio.sleep(0.02)
    assert session.engine is (old if by == "key" else third)
    assert session.candidate is None


async def test_another_engine_takes_over_from_one_that_does_not_get_ready(begin):
    stuck, new = FakeEngine(start=[*STARTED[:1], None]), FakeEngine(reply("New."))
    session, view = begin(stuck)
    await session.send("first")
    session.switch(new, "cuda")
    await until(lambda: said(session) == ["first", "New."] and not session.is_busy)
    stuck.release()
    await asyncio.sleep(0.02)
    assert not any("did not start" in notice for notice in view.notices)
    await session.close()
    assert new.closed == 1
