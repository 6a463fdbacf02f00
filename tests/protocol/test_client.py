"""LocalEngine against the real worker with a synthetic model: streams, stopping, closing."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from engine.cache import candidate_trial
from engine.errors import LOG_IS, ModelFileError
from engine.protocol.client import LocalEngine
from engine.protocol.events import (
    Chat,
    EngineOptions,
    Failed,
    Finished,
    Generate,
    Loading,
    Message,
    Prefilling,
    RawText,
    Ready,
    Sampling,
    Thinking,
    Token,
    TokenIds,
    Warming,
)
from engine.protocol.worker import _load_text_model
from tests.formats.vocabularies import NORMAL, write
from tests.waiting import until as until_holds
from tests.waiting import wait_until

pytestmark = pytest.mark.usefixtures("forked_engines")


def ask(request_id=1, text="hello", **fields):
    return Generate(request_id=request_id, prompt=RawText(text=text), **fields)


async def collect(stream):
    return [event async for event in stream]


async def until(stream, condition):
    """Reads on to the first event that meets `condition`."""
    async for event in stream:
        if condition(event):
            return event
    raise AssertionError("the stream ended before")


def token_ids(events):
    return [event.id for event in events if isinstance(event, Token)]


async def test_these_engines_are_forked(engines, fork_server):
    """Otherwise each pays for a start of Python, here and in all tests of the screens."""
    engine = engines()
    await collect(engine.start())
    assert Path(f"/proc/{engine.pid}/stat").read_text().rpartition(")")[2].split()[1] == str(fork_server.pid)


async def test_start_shows_progress_and_ends_with_ready(engines):
    engine = engines()
    events = await collect(engine.start())
    assert [type(e) for e in events] == [Loading] * 10 + [Warming] * 10 + [Ready]
    assert events[-1].load_ms > 0
    assert await collect(engine.start()) == events[-1:], "a started engine is ready at once"


async def test_an_answer_arrives_whole_and_in_order(engines):
    engine = engines(tokens=100, thinking=10, text="<{prompt}>")
    ready = (await collect(engine.start()))[-1]
    prompt = Chat(messages=(Message(role="user", content="naïve 漢字 😀"),))
    events = await collect(engine.generate(Generate(request_id=7, prompt=prompt, sampling=Sampling(seed=5))))
    kinds = [type(e) for e in events]
    assert kinds == [Prefilling] * 11 + [Thinking] * 12 + [Token] * 88 + [Finished]
    assert {e.request_id for e in events} == {7}
    assert token_ids(events) == list(range(100))
    assert "".join(e.text for e in events if type(e) is Token).startswith("<naïve 漢字 😀><naïve")
    last = events[-1]
    assert (last.reason, last.predicted_n, last.seed, last.load_ms) == ("stop", 100, 5, ready.load_ms)


async def test_requests_made_while_the_engine_loads_are_answered_in_turn(engines):
    engine = engines(load_s=0.2, tokens=5)
    start, first, second = await asyncio.gather(
        collect(engine.start()),
        collect(engine.generate(ask(1))),
        collect(engine.generate(ask(1, "the same id again"))),
    )
    assert isinstance(start[-1], Ready)
    for events in (first, second):
        assert any(isinstance(e, Loading) for e in events)
        assert token_ids(events) == [0, 1, 2, 3, 4]


async def test_high_rates_lose_nothing(engines):
    engine = engines(rate=5000, tokens=1000, send_interval_s=0.01)  # fifty in each parcel
    events = await collect(engine.generate(ask(logprobs=2)))
    assert token_ids(events) == list(range(1000))
    assert all(len(e.top) == 2 for e in events if isinstance(e, Token))


async def test_a_client_that_does_not_read_holds_up_no_answer(engines, tmp_path):
    answered = tmp_path / "answered"
    engine = engines(tokens=4000, when_answered=answered)  # far more than a socket buffer holds
    await collect(engine.start())
    stream = engine.generate(ask(max_tokens=3900))
    await anext(stream)
    wait_until(answered.exists)  # the whole event loop stands still
    assert token_ids(await collect(stream)) == list(range(3900))


async def test_long_requests_are_sent_one_after_the_other_and_short_ones_between(engines):
    engine = engines(tokens=3, context_length=1 << 20)
    await collect(engine.start())
    os.kill(engine.pid, signal.SIGSTOP)
    stat = Path(f"/proc/{engine.pid}/stat")  # until it has stopped, it may read what has come meanwhile
    await until_holds(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T")
    asked = [("long " * 100_000, "a"), ("long " * 100_000, "a"), ("long " * 100_000, "b"), ("short", "a")]
    answers = [
        asyncio.ensure_future(collect(engine.generate(ask(i, text, client=client))))
        for i, (text, client) in enumerate(asked)
    ]
    streams = engine._streams
    await until_holds(
        lambda: len(streams) == 4 and [s.joined for s in streams.values()] == [True, False, False, True],
        lambda: str([(s.joined, s.ended.is_set()) for s in streams.values()]),
    )
    answers[1].cancel()
    os.kill(engine.pid, signal.SIGCONT)
    for i in (0, 2, 3):
        assert token_ids(await answers[i]) == [0, 1, 2]


# --- stopping ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("behaviour", [{}, {"hang_at": 5}], ids=["listens", "hangs"])
async def test_stop_ends_the_answer_at_once(engines, behaviour, tmp_path):
    """It does not wait for a worker that hangs: that one goes on when the answer has ended."""
    resume = tmp_path / "resume"
    engine = engines(rate=200, until=resume, **behaviour)
    if not behaviour:
        resume.touch()
    await collect(engine.start())
    stream = engine.generate(ask(3))
    seen = [await until(stream, lambda e: isinstance(e, Token) and e.id == 4)]
    await engine.stop()
    events = await collect(stream)
    resume.touch()
    seen += [e for e in events if isinstance(e, Token)]
    last = events[-1]
    assert isinstance(last, Finished) and last.reason == "cancelled" and last.request_id == 3
    assert last.predicted_n == seen[-1].id + 1
    assert last.prompt_n == 2 and last.context_used == 1 + last.predicted_n
    assert last.predicted_ms > 0 and last.prompt_ms > 0 and last.load_ms > 0
    # The next answer waits for a hanging one to end, and shows nothing of it.
    events = await collect(engine.generate(ask(3, max_tokens=8)))
    assert token_ids(events) == list(range(8))
    assert events[-1].reason == "length"


async def test_stop_while_the_engine_loads_keeps_it_loading(engines, tmp_path):
    engine = engines(until=tmp_path / "loaded", tokens=3)
    stream = engine.generate(ask())
    await anext(stream)
    pid = engine.pid
    await engine.stop()
    events = await collect(stream)
    assert events[-1].reason == "cancelled" and events[-1].predicted_n == 0
    (tmp_path / "loaded").touch()
    assert token_ids(await collect(engine.generate(ask()))) == [0, 1, 2]
    assert engine.pid == pid


async def test_stop_with_nothing_to_stop(engines):
    engine = engines()
    await engine.stop()
    await collect(engine.start())
    await engine.stop()


@pytest.mark.parametrize("how", ["aclose", "task"])
async def test_an_abandoned_answer_is_cancelled(engines, how):
    engine = engines(rate=40, tokens=4000)
    await collect(engine.start())
    stream = engine.generate(ask())
    await until(stream, lambda e: isinstance(e, Token))
    if how == "aclose":
        await stream.aclose()
    else:
        task = asyncio.create_task(collect(stream))
        await asyncio.sleep(0.02)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    async with asyncio.timeout(60):  # the abandoned answer would take 100 s
        assert token_ids(await collect(engine.generate(ask(max_tokens=3)))) == [0, 1, 2]


# --- failures that the engine survives -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("failure", "kind", "message"),
    [
        ("ContextFullError", "context", "This is a ContextFullError in answer to hello."),
        ("TemplateError", "template", "This is a TemplateError in answer to hello."),
        ("BackendError", "backend", "This is a BackendError in answer to hello."),
        ("UsageError", "usage", "This is a UsageError in answer to hello."),
        ("MemoryError", "backend", "There is not enough memory for this model and context."),
        ("ValueError", "internal", "The engine failed: ValueError: in answer to hello."),
    ],
)
async def test_a_request_that_fails_leaves_the_engine_serving(engines, failure, kind, message):
    engine = engines(failure=failure, fail_at=2)
    await collect(engine.start())
    pid = engine.pid
    events = await collect(engine.generate(ask(9)))
    assert token_ids(events) == [0, 1]
    last = events[-1]
    assert (last.kind, last.message, last.request_id) == (kind, message, 9)
    if kind == "internal":
        assert last.hint == f"{LOG_IS} {engine.log_path}"
        assert "_misbehave" in engine.log_path.read_text(), "the log says where"
    assert token_ids(await collect(engine.generate(ask(10, max_tokens=2)))) == [0, 1]
    assert engine.pid == pid


async def test_a_device_that_failed_ends_the_engine(engines):
    """A driver refuses all that a process asks after a fault, so the next prompt needs another process."""
    engine = engines(failure="RuntimeError", fail_at=2, device_fails=True)
    await collect(engine.start())
    pid, gone = engine.pid, asyncio.Event()
    engine.on_event = lambda event: isinstance(event, Failed) and event.request_id is None and gone.set()
    events = await collect(engine.generate(ask(9)))
    assert token_ids(events) == [0, 1] and isinstance(events[-1], Failed)
    await asyncio.wait_for(gone.wait(), 60)
    assert token_ids(await collect(engine.generate(ask(10, max_tokens=2)))) == [0, 1]
    assert engine.pid != pid


def test_a_failure_of_the_gpu_is_a_sentence():
    failed = Failed.from_error(RuntimeError("CUDA Error 719, unspecified launch failure"))
    assert (failed.kind, failed.message) == (
        "backend",
        "The GPU failed: CUDA Error 719, unspecified launch failure.",
    )
    assert "Send the prompt again" in failed.hint


async def test_no_prompt_is_logged(engines):
    engine = engines(failure="ValueError")
    events = await collect(engine.generate(ask(text="my secret")))
    assert "my secret" in events[-1].message, "the screen shows what the log must not keep"
    log = engine.log_path.read_text()
    assert "ValueError" in log and "secret" not in log
    assert engine.log_path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (ask(text="\udc80"), "not valid Unicode"),
        (ask(sampling=Sampling(seed=1 << 80)), "The request is not valid"),
        (Generate(request_id=1, prompt=TokenIds(ids=("a",))), "The request is not valid"),
    ],
)
async def test_a_request_that_cannot_be_sent_is_refused(engines, request_, says):
    engine = engines()
    [event] = await collect(engine.generate(request_))
    assert event.kind == "usage" and says in event.message and event.request_id == 1
    assert engine.pid is None


# --- starting and closing ------------------------------------------------------------------------------


async def test_a_model_that_does_not_load(engines):
    engine = engines(load_failure="ModelFileError")
    last = (await collect(engine.start()))[-1]
    assert last == Failed(
        kind="model", message="This is a ModelFileError while it loads.", hint="Ask for something else."
    )
    assert engine.pid is None
    events = await collect(engine.generate(ask()))
    assert isinstance(events[0], Loading) and events[-1] == last, "the next prompt tries again"


def test_a_tokenizer_that_is_not_known_is_refused_before_the_weights_load(monkeypatch, tmp_path):
    monkeypatch.setattr("engine.backends.prepare", lambda *_: "CPU")
    monkeypatch.setattr("engine.backends.install", lambda device: None)
    monkeypatch.setattr("engine.model.text_model.TextModel", lambda *_: pytest.fail("it loads"))
    monkeypatch.setattr(candidate_trial, "restart", candidate_trial.restart)
    write(tmp_path / "model.gguf", "ugly", [("a", NORMAL)])
    with pytest.raises(ModelFileError, match='has a tokenizer of the kind "ugly"'):
        _load_text_model(EngineOptions(model_path=str(tmp_path / "model.gguf")), lambda event: None)
    write(tmp_path / "model.gguf", "ugly", [("a", NORMAL)], architecture="dream")
    with pytest.raises(ModelFileError, match="makes all tokens of a reply at once"):
        _load_text_model(EngineOptions(model_path=str(tmp_path / "model.gguf")), lambda event: None)


async def test_an_engine_that_fails_once_it_is_ready(engines):
    engine, seen = engines(load_s=0.0, warm_up_fails=True), []
    failed = asyncio.Event()
    engine.on_event = lambda event: (seen.append(event), isinstance(event, Failed) and failed.set())
    assert isinstance((await collect(engine.start()))[-1], Ready)
    await asyncio.wait_for(failed.wait(), 60)
    assert (seen[-1].kind, seen[-1].message, seen[-1].hint) == (
        "backend", "The GPU stopped.", "Restart the engine.",
    )  # fmt: skip


async def test_a_loader_with_a_bug(engines):
    engine = engines(load_failure="KeyError")
    last = (await collect(engine.start()))[-1]
    assert last.kind == "internal" and "KeyError" in last.message and str(engine.log_path) in last.hint
    assert "Traceback" in engine.log_path.read_text()


@pytest.mark.parametrize(
    ("options", "command", "message"),
    [
        (
            EngineOptions(model_path="m"),
            ("/nonexistent/python",),
            "could not be started: No such file or directory. See whether /nonexistent/python is there",
        ),
        (EngineOptions(model_path="\udc80"), (sys.executable,), "not valid UTF-8"),
        (EngineOptions(model_path="m"), (sys.executable, "-c", "raise SystemExit(3)"), "exit status 3"),
    ],
)
async def test_a_process_that_does_not_start(engines, options, command, message):
    engine = engines.add(LocalEngine(options, command=command))
    [event] = await collect(engine.start())
    assert (
        isinstance(event, Failed) and event.request_id is None and message in f"{event.message} {event.hint}"
    )
    [event] = await collect(engine.generate(ask()))
    assert isinstance(event, Failed) and message in f"{event.message} {event.hint}"


async def test_close_does_not_wait_when_idle_loading_or_answering(engines, tmp_path):
    idle, loading, answering = engines(), engines(until=tmp_path / "never"), engines(rate=1)
    await collect(idle.start())
    start = loading.start()
    await anext(start)
    answer = answering.generate(ask())
    await until(answer, lambda e: isinstance(e, Token))
    async with asyncio.timeout(60):
        for engine in engines:
            await engine.close()
            assert engine.pid is None
            await engine.close()
    assert isinstance((await collect(start))[-1], Failed)
    assert (await collect(answer))[-1].reason == "cancelled"


async def test_an_engine_can_be_started_again_after_close(engines):
    engine = engines(tokens=2)
    await collect(engine.start())
    await engine.close()
    assert isinstance((await collect(engine.start()))[-1], Ready)


async def test_a_home_that_cannot_be_written_has_no_log_but_a_chat(engines, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "/proc")
    assert token_ids(await collect(engines(tokens=2).generate(ask()))) == [0, 1]


@pytest.mark.parametrize("failure", ["ValueError", "ContextFullError"])
async def test_a_log_on_a_full_disk_ends_nothing(engines, failure):
    engine = engines(failure=failure, fail_at=1, tokens=2)
    engine.log_path.parent.mkdir(parents=True)
    engine.log_path.symlink_to("/dev/full")
    events = await collect(engine.generate(ask()))
    assert isinstance(events[-1], Failed) and f"{failure}" in events[-1].message
    pid = engine.pid
    await collect(engine.generate(ask(10)))
    assert engine.pid == pid


def test_import_stays_light():
    heavy = "[m for m in ('numpy', 'tinygrad', 'textual') if m in sys.modules]"
    code = f"import sys, engine.protocol.client; print({heavy})"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
