"""The prompt box: keys, paste, and the walk through earlier prompts."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from textual import events
from textual._xterm_parser import XTermParser
from textual.app import App, ComposeResult

from widgets.chat.prompt import Prompt


class PromptApp(App[None]):
    def __init__(self) -> None:
        super().__init__()
        self.submitted: list[str] = []

    def compose(self) -> ComposeResult:
        yield Prompt("Ask [b]anything[/b]")

    def on_prompt_submitted(self, event: Prompt.Submitted) -> None:
        self.submitted.append(event.text)


@contextlib.asynccontextmanager
async def prompting():
    app = PromptApp()
    async with app.run_test(size=(40, 20)) as pilot:
        app.query_one(Prompt).focus()
        yield app.query_one(Prompt), pilot


async def test_enter_sends_and_what_is_typed_after_it_is_the_next_prompt():
    async with prompting() as (prompt, pilot):
        await pilot.press("a", "enter", "b", "enter", "c")
        assert pilot.app.submitted == ["a", "b"]
        assert prompt.text == "c" and prompt.draft == "a\nb\nc"
        prompt.sent("a")
        prompt.keep()
        assert prompt.text == prompt.draft == "b\nc"


async def test_blank_text_is_not_sent():
    async with prompting() as (_, pilot):
        await pilot.press("enter", "space", "ctrl+j", "enter")
        assert pilot.app.submitted == []


async def test_the_placeholder_is_no_markup():
    async with prompting() as (prompt, pilot):
        await pilot.pause()
        assert "[b]anything[/b]" in prompt.render_line(0).text


@pytest.mark.parametrize("sequence", ["\x1b\r", "\x1b[13;2u", "\x1b[13;3u", "\n", "\x1b[27;2;13~"])
async def test_new_line_keys_of_all_terminals(sequence):
    parser = XTermParser()
    keys = [event for event in parser.feed(sequence) if isinstance(event, events.Key)]
    async with prompting() as (prompt, pilot):
        for key in keys:
            prompt.post_message(key)
        await pilot.pause()
        assert prompt.text == "\n"
        assert pilot.app.submitted == []


async def test_paste_never_sends_and_brings_no_control_characters():
    async with prompting() as (prompt, pilot):
        prompt.post_message(events.Paste("one\r\ntwo\rthree\n\x1b[31mred\x07"))
        await pilot.pause()
        assert prompt.text == "one\ntwo\nthree\n[31mred"
        assert pilot.app.submitted == []
        await pilot.press("ctrl+z")
        assert prompt.text == "", "one paste, one undo"


async def test_a_large_paste_is_whole():
    async with prompting() as (prompt, pilot):
        text = "some words of a log file that is pasted whole\n" * 4000
        prompt.post_message(events.Paste(text))
        await pilot.pause()
        assert len(prompt.text) == len(text)
        assert prompt.size.height <= 12


async def test_edits_on_the_walk_are_kept_and_the_draft_too():
    async with prompting() as (prompt, pilot):
        prompt.remember(["first", "second"])
        prompt.insert("draft")
        await pilot.press("up", "!", "up", "?")
        assert prompt.text == "first?"
        await pilot.press("up")
        assert prompt.text == "first?", "there is nothing before it"
        await pilot.press("down")
        assert prompt.text == "second!"
        await pilot.press("down")
        assert prompt.text == "draft"
        prompt.sent("draft")
        walk = []
        for _ in range(5):
            await pilot.press("up")
            walk.append(prompt.text)
        assert walk == ["draft", "second!", "first?", "second", "first"], (
            "as it was sent, and as it was edited"
        )


async def test_up_moves_within_a_long_line_first():
    async with prompting() as (prompt, pilot):
        prompt.remember(["earlier"])
        prompt.insert("word " * 20)  # three rows of this width
        await pilot.pause()
        await pilot.press("up")
        assert prompt.text.startswith("word")
        await pilot.press("up", "up", "up")
        assert prompt.text == "earlier"


async def test_what_put_displaces_is_an_earlier_prompt():
    async with prompting() as (prompt, pilot):
        prompt.insert("draft")
        prompt.put("from elsewhere")
        assert prompt.text == "from elsewhere"
        await pilot.press("up")
        assert prompt.text == "draft"


@settings(max_examples=20)
@given(st.lists(st.sampled_from(["up", "down", "x", "sent", "put"]), max_size=12))
async def test_no_draft_is_ever_lost(steps):
    """Whatever the user and the application do, every text that was in the box is in it or on the walk."""
    async with prompting() as (prompt, _):
        prompt.remember(["first", "second"])
        typed = set()
        for number, step in enumerate(steps):
            if step == "x":
                prompt.insert(f"<{number}>")
                typed.add(f"<{number}>")
            elif step == "sent" and prompt.text:
                prompt.sent(prompt.text)
            elif step == "put":
                prompt.put(f"put {number}")
            elif step == "up":
                prompt.action_cursor_up()
            elif step == "down":
                prompt.action_cursor_down()
        kept = "\n".join([*prompt._history._sent, *prompt._history._texts, prompt.text])
        assert all(text in kept for text in typed)


async def test_a_narrower_terminal_keeps_the_cursor_in_sight():
    async with prompting() as (prompt, pilot):
        prompt.insert("\n".join(f"a line of this width, number {i}" for i in range(100)))
        await pilot.resize_terminal(24, 20)
        for _ in range(600):
            shown = [prompt.render_line(y).text for y in range(prompt.size.height)]
            if any("99" in line for line in shown):
                break
            await pilot.pause(0.1)
        assert any("99" in line for line in shown)
