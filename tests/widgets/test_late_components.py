import pytest
from textual.app import App
from textual.widget import Widget

from widgets.late_components import LateComponents


class Parts(LateComponents, Widget):
    COMPONENT_CLASSES = frozenset({"one", "other"})
    DEFAULT_CSS = """
    Parts {
        & > .one { color: red; }
        &:light > .one { color: blue; }
        & > .other { color: green; }
    }
    """


class Parted(App):
    def compose(self):
        yield Parts()


async def test_a_part_that_was_read_has_the_style_of_today():
    app = Parted()
    async with app.run_test() as pilot:
        widget, painted = app.query_one(Parts), []
        assert not widget._component_styles, "nobody has asked"
        assert widget.get_component_rich_style("one").color.name == "#ff0000"
        assert [*widget._component_styles] == ["one"]
        widget.refresh = lambda *_, **__: painted.append(True)
        app.theme = "textual-light"
        await pilot.pause()
        assert widget.get_component_rich_style("one").color.name == "#0000ff" and painted
        assert widget.get_component_rich_style("other").color.name == "#008000"
        with pytest.raises(KeyError):
            widget.get_component_styles("none")
