"""Keys that arrive together are done one after the other."""

from __future__ import annotations

import pytest
from textual import events
from textual.app import App, ComposeResult

from widgets.chat.prompt import Prompt
from widgets.terminal.ordered_input import OrderedInput, OrderedTextArea


class BoxApp(App[None]):
    def __init__(self, box: OrderedInput | OrderedTextArea) -> None:
        super().__init__()
        self.box = box

    def compose(self) -> ComposeResult:
        yield self.box


@pytest.mark.parametrize("kind", [OrderedInput, OrderedTextArea, Prompt])
async def test_editing_keys_come_before_what_is_typed_after_them(kind: type[OrderedInput | OrderedTextArea]):
    app = BoxApp(kind())
    async with app.run_test() as pilot:
        app.box.focus()
        await pilot.pause()
        for key in ("a", "b", "backspace", "c", "left", "left", "x", "end", "y", "👩", "\u200d", "🚀"):
            app.post_message(events.Key(key, key if len(key) == 1 else None))
        await pilot.pause()
        text = app.box.value if isinstance(app.box, OrderedInput) else app.box.text
        assert text == "xacy👩\u200d🚀"


async def test_a_key_without_a_meaning_here_is_the_applications():
    class Counting(BoxApp):
        BINDINGS = [("ctrl+c", "count")]  # noqa: RUF012
        counted = 0

        def action_count(self) -> None:
            self.counted += 1

    box = OrderedTextArea("text")
    app = Counting(box)
    async with app.run_test() as pilot:
        box.focus()
        await pilot.press("ctrl+c")
        assert app.counted == 1, "nothing is selected that could be copied"
        box.select_all()
        await pilot.press("ctrl+c")
        assert (app.counted, app.clipboard) == (1, "text")


@pytest.mark.parametrize("kind", [OrderedInput, OrderedTextArea, Prompt])
async def test_a_letter_with_alt_is_no_text_but_a_key(kind: type[OrderedInput | OrderedTextArea]):
    class Tinting(BoxApp):
        BINDINGS = [("alt+g", "tint")]  # noqa: RUF012
        tints = 0

        def action_tint(self) -> None:
            self.tints += 1

    app = Tinting(kind())
    async with app.run_test() as pilot:
        app.box.focus()
        await pilot.pause()
        for key, character in (("a", "a"), ("alt+g", "g"), ("b", "b")):  # as the parser reads ESC g
            app.post_message(events.Key(key, character))
            await pilot.pause()
        text = app.box.value if isinstance(app.box, OrderedInput) else app.box.text
        assert (text, app.tints) == ("ab", 1)
