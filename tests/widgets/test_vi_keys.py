"""The keys of vi in the prompt."""

import pytest
from textual.app import App

from widgets.chat.prompt import Prompt
from widgets.chat.vi_keys import ViKeys


class Box(App):
    def compose(self):
        self.prompt = Prompt()
        self.prompt.vi = ViKeys(self.prompt)
        yield self.prompt

    def on_mount(self):
        self.prompt.focus()


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ("one_two escape biX", "one Xtwo"),
        ("one escape 0x", "ne"),
        ("one_two escape 0dw", "two"),
        ("one_two escape ddiz", "z"),
        ("one escape otwo", "one\ntwo"),
        ("one escape Otwo", "two\none"),
        ("one escape zq", "one"),
        ("one_two escape 0cwa", "a two"),
        ("one escape As", "ones"),
        ("one escape 0lD", "o"),
        ("one escape otwo escape ggx", "ne\ntwo"),
        ("one escape d escape w", "one"),
        ("escape one", "one"),
    ],
)
async def test_commands_and_text(keys, text):
    app = Box()
    async with app.run_test(size=(40, 10)) as pilot:
        for word in keys.split():
            await pilot.press(*([word] if word == "escape" else word.replace("_", " ")))
        assert app.prompt.text == text
        assert bool(app.prompt.mode) is (not app.prompt.vi.is_inserting)
