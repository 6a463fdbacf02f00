"""Tools on the full screen: what the user sees of a call, and the keys that answer it."""

from __future__ import annotations

import pytest

from app.tools.toolbox import Returned
from engine.formats.tools.forms import HERMES
from tests.app.chat.test_tool_use import READ, called
from tests.app.driver import chat
from tests.app.fake_engine import FakeEngine, reply
from tests.app.hostile_text import ATTACK, acting
from tests.app.tools.fake_toolbox import FakeToolbox


@pytest.fixture
def driver(history):
    def driver(*replies, box=None, size=(100, 30)):
        box = box or FakeToolbox(lambda *_: Returned("the [b]text[/b] of it"))
        return chat(FakeEngine(*replies), history, size=size, tools=box)

    return driver


async def ask(driver) -> None:
    driver.app.session.tools.form = lambda: HERMES
    await driver.idle()
    await driver.say("What is in a.txt?")


async def test_a_call_is_shown_asks_runs_and_folds(driver):
    async with driver(called(READ), reply("It has a text.")) as seen:
        await ask(seen)
        await seen.sees("▾ files.read · asks whether it may run")
        await seen.sees('"path": "a.txt"')
        await seen.sees("May files.read run? Alt+Y once Alt+C always in this chat Alt+A always for this tool")
        await seen.press("h", "i")  # stays in the prompt
        await seen.press("alt+y")
        await seen.sees("It has a text.")
        assert '▸ files.read {"path": "a.txt"} · 21 characters' in seen.screen()
        assert "May files.read" not in seen.screen() and seen.app.prompt.text == "hi"
        assert "the [b]text" not in seen.screen()
        await seen.click("files.read {")
        await seen.sees("the [b]text[/b] of it")


@pytest.mark.parametrize(("key", "outcome"), [("alt+n", "not allowed"), ("escape", "no result yet")])
async def test_a_call_that_may_not_run(driver, key, outcome):
    box = FakeToolbox(lambda *_: Returned("never"))
    async with driver(called(READ), reply("A pity."), box=box, size=(40, 14)) as seen:
        await ask(seen)
        await seen.sees("May files.read run?")
        await seen.press(key)
        await seen.idle()
        await seen.sees(outcome)
        assert not box.called
        assert "stopping" not in seen.screen()
        if key == "escape":
            assert "stopped" in seen.screen()
            await seen.press("ctrl+g")
            await seen.sees("May files.read run?")
            assert "stopped" not in seen.screen()


async def test_a_hostile_call_and_result_act_on_nothing(driver):
    hostile = "files.read", {"path": ATTACK}
    async with driver(called(hostile), reply("So."), box=FakeToolbox(lambda *_: Returned(ATTACK))) as seen:
        await ask(seen)
        await seen.sees("May files.read run?")
        assert acting(seen.screen()) == acting("")
        await seen.press("alt+y")
        await seen.idle()
        await seen.press("ctrl+t")
        assert acting(seen.screen()) == acting("")


async def test_the_page_of_tools_and_a_chat_without_servers(driver, history):
    async with driver() as seen:
        await seen.say("/mcp")
        await seen.sees("files 2 tools")
        await seen.sees("files.write Writes a file")
    async with chat(FakeEngine(), history) as seen:
        await seen.say("/mcp")
        await seen.sees("There are no tools. A table [mcp.NAME] in settings.toml")
