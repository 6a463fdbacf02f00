"""How Markdown is read: CommonMark with tables and strikethrough, as terminals can show it."""

from functools import lru_cache

from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from markdown_it.token import Token

from widgets.markdown.formulas import add_formulas
from widgets.text import clean

MOST_NESTED = 20
"""Marks of emphasis and links within each other. markdown-it counts blocks only, and its tree is made by recursion:
hundreds of stars before and after a word ended the program."""


def _flatten(state: StateCore) -> None:
    """Leaves out marks that are nested too deeply; what they hold stays."""
    for token in state.tokens:
        depth, kept = 0, []
        for child in token.children or ():
            depth += child.nesting == 1
            if not child.nesting or depth <= MOST_NESTED:
                kept.append(child)
            depth -= child.nesting == -1
        if token.children:
            token.children = kept


def _clean_entities(state: StateCore) -> None:
    """Cleans again what entities (`&#x202e;`) expanded to. Turns soft breaks into hard ones: models do not wrap their
    text, so a line's end is one of a poem or an address."""
    for token in state.tokens:
        for child in token.children or ():
            child.content = clean(child.content)
            if child.type == "softbreak":
                child.type = "hardbreak"


@lru_cache(maxsize=1)
def parser() -> MarkdownIt:
    """HTML is shown as text, since a model that writes `<div>` means it. Images are shown as links to them, and bare
    addresses are left to the terminal. Link definitions are shown too: they are mostly footnotes, and they arrive when
    the text that refers to them has been drawn."""
    markdown = (
        MarkdownIt("commonmark", {"html": False})
        .enable(["table", "strikethrough"])
        .disable(["image", "reference"])
    )
    add_formulas(markdown)
    markdown.core.ruler.push("flatten", _flatten)
    markdown.core.ruler.push("clean_entities", _clean_entities)
    return markdown


def code_blocks(text: str) -> list[str]:
    """The contents of the code blocks in `text`, in order, also of one that is not closed yet."""
    return [token.content for token in parser().parse(text) if token.type in ("fence", "code_block")]


def is_open(fence: Token) -> bool:
    """Whether a fence's closing mark is missing: its lines are then the opening mark and the content only."""
    if fence.type != "fence" or fence.map is None:
        return False
    content_lines = len(fence.content.removesuffix("\n").split("\n")) if fence.content else 0
    return fence.map[1] - fence.map[0] <= content_lines + 1
