"""Markdown as models write it: untrusted, streamed, with long code blocks."""

from __future__ import annotations

from functools import lru_cache

from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from markdown_it.token import Token
from textual.content import Content
from textual.highlight import HighlightTheme, highlight
from textual.widgets import Markdown
from textual.widgets._markdown import MarkdownBullet, MarkdownBulletList, MarkdownList, MarkdownOrderedList
from textual.widgets.markdown import MarkdownBlock, MarkdownFence

from widgets.text import clean

HIGHLIGHT_LIMIT_CHARS = 50_000
"""Longer code blocks stay plain: highlighting one takes 2 ms a kilobyte, on the thread that draws."""

_OPEN = "\0open"
"""Stands for the language of a code block whose end has not arrived."""


class CodeTheme(HighlightTheme):
    """Textual's, without its underlines: in a terminal those are links."""

    STYLES = {  # noqa: RUF012 (declared so by Textual)
        kind: style.replace(" underline", "") for kind, style in HighlightTheme.STYLES.items()
    }


def _as_meant(state: StateCore) -> None:
    """Cleans again what entities (`&#x202e;`) expanded to, and ends lines where the model did: it does not wrap
    its text, so that those are a poem's or an address's."""
    for token in state.tokens:
        for child in token.children or ():
            child.content = clean(child.content)
            if child.type == "softbreak":
                child.type = "hardbreak"


@lru_cache(maxsize=1)
def parser() -> MarkdownIt:
    """CommonMark with tables and strikethrough. HTML is shown as the text it is (a model that writes `<div>`
    means it), images as links to them, and bare addresses are left to the terminal. Definitions of links are shown
    too: they are mostly footnotes, and come when what refers to them has been drawn."""
    markdown = (
        MarkdownIt("commonmark", {"html": False})
        .enable(["table", "strikethrough"])
        .disable(["image", "reference"])
    )
    markdown.core.ruler.push("as_meant", _as_meant)
    return markdown


def code_blocks(text: str) -> list[str]:
    """The contents of the code blocks in `text`, in order, those not closed yet included."""
    return [token.content for token in parser().parse(text) if token.type in ("fence", "code_block")]


def is_open(fence: Token) -> bool:
    """Whether a fence's closing mark is missing: its lines are then the opening mark and the content only."""
    if fence.type != "fence" or fence.map is None:
        return False
    content_lines = len(fence.content.removesuffix("\n").split("\n")) if fence.content else 0
    return fence.map[1] - fence.map[0] <= content_lines + 1


class Fence(MarkdownFence):
    """A code block: plain while it grows (highlighting anew at every token is what makes terminals crawl),
    highlighted once when its end has arrived."""

    DEFAULT_CSS = """
    Fence {
        margin: 0 0 1 0;
        overflow: hidden;
        color: $text;
        background: $surface;
        & > Label { padding: 0 1; width: 1fr; }
    }
    Fence:ansi > Label { padding: 0 1; }
    """

    def __init__(self, markdown: Markdown, token: Token, code: str) -> None:
        super().__init__(markdown, token.copy(info=_OPEN) if is_open(token) else token, code)

    @classmethod
    def highlight(cls, code: str, language: str, ansi: bool = False, dark: bool = False) -> Content:
        if language == _OPEN or len(code) > HIGHLIGHT_LIMIT_CHARS:
            return Content(code)
        return _highlighted(code, (language.split() or ["text"])[0], ansi, dark)


@lru_cache(maxsize=64)
def _highlighted(code: str, language: str, ansi: bool, dark: bool) -> Content:
    if ansi:
        return MarkdownFence.highlight(code, language, ansi, dark)
    return highlight(code, language=language, theme=CodeTheme)


async def _grow(shown: MarkdownList, block: MarkdownBlock) -> bool:
    """Makes a list on the screen `block`, which is the same list grown, by drawing its last item and the new
    ones only. False where all have to be drawn: it is no list, or its numbers have got wider."""
    rows, items = list(shown.children), block._blocks
    if type(block) is not type(shown) or not 0 < len(rows) <= len(items):
        return False
    bullets = [row.query_children(MarkdownBullet).first().symbol for row in (rows[0], rows[-1])]
    if isinstance(block, MarkdownOrderedList):
        first, last = (int(bullet.strip(" .")) for bullet in bullets)
        if len(str(first + len(items) - 1)) != len(str(last)):
            return False
    drawn = list(block.compose())
    await shown.remove_children(rows[-1:])
    await shown.mount_all(drawn[len(rows) - 1 :])
    return True


class BulletList(MarkdownBulletList):
    async def _update_from_block(self, block: MarkdownBlock) -> None:
        if not await _grow(self, block):
            await super()._update_from_block(block)


class OrderedList(MarkdownOrderedList):
    async def _update_from_block(self, block: MarkdownBlock) -> None:
        if not await _grow(self, block):
            await super()._update_from_block(block)


class ReplyMarkdown(Markdown):
    """A reply's text. Links are never opened: `Markdown.LinkClicked` tells the application.

    The text comes by `append` alone: after an `update`, Textual's `append` takes the last line for the last
    block, and what goes on with a code block would be lost.
    """

    DEFAULT_CSS = """
    ReplyMarkdown {
        padding: 0 1 0 2;
        MarkdownHeader {
            margin: 0 0 1 0; content-align: left middle; text-style: bold;
            color: $text-primary; background: transparent;
        }
        MarkdownH1 { text-style: bold underline; }
        MarkdownBlockQuote { margin: 0 0 1 0; background: transparent; }
        MarkdownHorizontalRule {  /* on one line Textual draws the upper border alone */
            border-bottom: none; border-top: solid $foreground 20%; padding: 0;
        }
        MarkdownTableContent { keyline: thin $foreground 20%; }
    }
    """
    BULLETS = ["• ", "◦ ", "▪ ", "‣ "]  # noqa: RUF012 (declared so by Textual)
    BLOCKS = {  # noqa: RUF012
        **Markdown.BLOCKS,
        "fence": Fence,
        "code_block": Fence,
        "bullet_list_open": BulletList,
        "ordered_list_open": OrderedList,
    }

    def __init__(self) -> None:
        super().__init__(parser_factory=parser, open_links=False)
