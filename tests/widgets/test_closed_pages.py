import weakref

from textual._styles_cache import StylesCache
from textual.color import Color

import widgets.terminal.paced_output  # noqa: F401 (changes Textual)


def test_what_drew_a_page_is_free_when_the_page_is():
    kept, closed = StylesCache(), StylesCache()
    colours = Color(1, 2, 3), Color(9, 9, 9, 0.5)
    inner, outer = closed.get_inner_outer(*colours)
    assert inner.background == colours[0] + colours[1] and outer.background == colours[0]
    there = weakref.ref(closed)
    del closed
    assert there() is None
    assert kept.get_inner_outer(*colours) == (inner, outer)
