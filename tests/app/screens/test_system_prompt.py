"""The system prompt of a chat, and how much its model thinks, as a user sees and changes them."""

from __future__ import annotations

from msgspec.structs import replace

from engine.protocol.events import Sampling
from tests.app.driver import chat, stored
from tests.app.fake_engine import MODEL, READY, FakeEngine, reply
from tests.thorough import thorough


async def test_the_system_prompt_is_seen_and_changed_while_the_prompt_waits(history):
    engine = FakeEngine(reply("Yes, it is so."), reply("Yes."), reply("Sí."))
    async with chat(engine, history, system="Be polite.", size=(60, 20)) as user:
        await user.say("Is it?")
        await user.sees("Yes, it is so.")
        await user.idle()
        await user.press(*"Now?", "f12")
        await user.sees("Be polite.")
        await user.press("enter", *"Be brief.", "ctrl+s")
        await user.sees("holds from the next prompt on")
        assert user.app.prompt.text == "Now?"
        assert user.app.focused is user.app.prompt
        await user.press("enter")
        await user.idle()
        await user.until(lambda: len(engine.requests) == 2)
        chat_id = user.app.session.conversation.chat_id
        await user.press("ctrl+n")
        await user.until(lambda: not user.app.session.conversation.turns)
        await user.say("And here?")
        await user.until(lambda: len(engine.requests) == 3)
        await user.idle()
    systems = [request[0] for request in engine.prompts()]
    changed = ("system", "Be polite.\nBe brief.")
    assert systems == [("system", "Be polite."), changed, ("system", "Be polite.")]
    assert stored(history, chat_id)[0] == (*changed, True)
    engine = FakeEngine()
    async with chat(engine, history, system="Be polite.", chat_id=chat_id) as user:
        await user.sees("ready")
        await user.press("ctrl+r")
        await user.idle()
        await user.until(lambda: engine.requests)
        assert engine.prompts()[0][0] == changed
        await user.press("f12", "f7", "delete", "ctrl+s")
        await user.sees("There is no system prompt now")
        await user.idle()
    assert [role for role, _, _ in stored(history, chat_id)] == ["user", "assistant", "user", "assistant"]


@thorough
async def test_the_effort_is_chosen_beside_the_system_prompt(history):
    ready = replace(READY, model=replace(MODEL, takes_effort=True))
    engine = FakeEngine(start=[ready])
    async with chat(engine, history, size=(60, 20)) as user:
        await user.sees("ready")
        await user.press("f12")
        await user.sees("Effort: default")
        await user.press("tab", "enter", "down", "enter", "escape")
        await user.sees("This is not saved.")
        await user.press("ctrl+s")
        await user.sees("The new effort holds from the next prompt on")
        await user.say("Is it?")
        await user.idle()
        await user.press("f12")
        await user.sees("Effort: low")
        await user.press("escape")
    assert [request.sampling.effort for request in engine.requests] == ["low"]


@thorough
async def test_a_model_without_effort_shows_none(history):
    async with chat(FakeEngine(), history, sampling=Sampling(effort="high")) as user:
        await user.sees("The chat template of Qwen3 0.6B reads no effort")
        await user.press("f12")
        await user.sees("None. For example")
        assert "Effort" not in user.screen()


@thorough
async def test_a_system_prompt_that_is_not_saved_is_left_by_a_second_key(history):
    async with chat(FakeEngine(), history, size=(60, 20)) as user:
        await user.press("f12")
        await user.sees("None. For example: Answer briefly.")
        await user.press("escape")
        await user.until(lambda: user.app.screen is user.app.page)
        await user.press("f12", *"Hm", "escape")
        await user.sees("This is not saved.")
        await user.press("ctrl+q")
        await user.sees("Ctrl+Q again leaves it")
        await user.press("escape", "escape")
        await user.until(lambda: user.app.screen is user.app.page)
        assert user.app.session.conversation.system == ""
