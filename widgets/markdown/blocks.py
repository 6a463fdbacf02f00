"""Blocks of Markdown and their lines. A block keeps its lines until the width changes; a growing one adds to them."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Protocol

from markdown_it.tree import SyntaxTreeNode
from pygments.token import Token  # type: ignore[import-untyped]
from textual.content import Content
from textual.highlight import HighlightTheme, highlight

from widgets.markdown import table
from widgets.markdown.inline import styled
from widgets.markdown.lines import Line, filled, indented, wrapped

BULLETS = ("• ", "◦ ", "▪ ", "‣ ")
TASKS = {"[ ] ": "☐ ", "[x] ": "☑ ", "[X] ": "☑ "}
_CODE = "$text on $surface"
HIGHLIGHT_LIMIT_CHARS = 20_000
"""Longer code stays plain: highlighting takes 2 ms a kilobyte, on the thread that draws."""
_QUOTE_BAR = Content.styled("▌ ", ".quote")


class Block(Protocol):
    """A part of a document. `follows`: it goes on with the block before, without a blank line between them."""

    follows: bool

    def lines(self, width: int) -> Sequence[Line]:
        """The rows of the block in `width` cells."""


class NodeBlock:
    """A block that is laid out whole. A list's item has a `symbol`, its bullet or number."""

    def __init__(self, node: SyntaxTreeNode, *, symbol: str = "", follows: bool) -> None:
        self.follows = follows
        self._node, self._symbol = node, symbol
        self._lines: tuple[int, list[Line]] = (0, [])

    def lines(self, width: int) -> Sequence[Line]:
        if self._lines[0] != width:
            rows = _item(self._node, self._symbol, width, 0) if self._symbol else _laid_out(self._node, width)
            self._lines = width, rows
        return self._lines[1]


class CodeBlock:
    """Code that may still grow: `add` brings lines that are complete, `pending` are those after them."""

    def __init__(self, info: str, *, follows: bool = False) -> None:
        self.follows = follows
        self.info = info
        self.pending: list[str] = []
        self.is_open = True
        self._code: list[str] = []
        self._width, self._is_highlighted = 0, False
        self._lines: list[Line] = []

    def add(self, lines: list[str]) -> None:
        self._code += lines
        if self._width:
            self._lines += _code_rows(map(Content, lines), self._width)

    def lines(self, width: int) -> Sequence[Line]:
        if not self.is_open:
            if not self._is_highlighted or self._width != width:
                code = "\n".join([*self._code, *self.pending])
                self._lines = _code_rows(code_lines(code, self.info), width)
                self._width, self._is_highlighted = width, True
            return self._lines
        if self._width != width:
            self._width, self._lines = width, _code_rows(map(Content, self._code), width)
        return [*self._lines, *_code_rows(map(Content, self.pending), width)]


class TableBlock:
    """A table that may still grow: `add` brings rows that are complete, `pending` are those after them."""

    def __init__(self, header: table.Row, aligns: Sequence[str]) -> None:
        self.follows = False
        self.pending: list[table.Row] = []
        self._header, self._aligns = header, aligns
        self._rows: list[table.Row] = []
        self._needed = table.column_widths([header])
        self._key: tuple[int, list[int] | None] = (0, None)
        self._lines: list[Line] = []

    def add(self, rows: Sequence[table.Row]) -> None:
        self._rows += rows
        self._needed = _widest(self._needed, table.column_widths(rows))
        width, widths = self._key
        needed = _widest(self._needed, table.column_widths(self.pending))
        if width and widths == table.fitting_widths(needed, width):
            self._lines += self._row_lines(rows, width, widths)

    def lines(self, width: int) -> Sequence[Line]:
        needed = _widest(self._needed, table.column_widths(self.pending))
        widths = table.fitting_widths(needed, width)
        if self._key != (width, widths):
            self._key = width, widths
            self._lines = [*self._top(widths), *self._row_lines(self._rows, width, widths)]
        bottom = [table.rule(widths, *"└┴┘")] if widths else []
        return [*self._lines, *self._row_lines(self.pending, width, widths), *bottom]

    def _top(self, widths: list[int] | None) -> list[Line]:
        if widths is None:
            return []
        header = table.row_lines(self._header, widths, self._aligns, ".table_header")
        return [table.rule(widths, *"┌┬┐"), *header, table.rule(widths, *"├┼┤")]

    def _row_lines(self, rows: Sequence[table.Row], width: int, widths: list[int] | None) -> list[Line]:
        if widths is None:
            return [line for row in rows for line in table.field_lines(self._header, row, width)]
        return [line for row in rows for line in table.row_lines(row, widths, self._aligns)]


def table_parts(node: SyntaxTreeNode) -> tuple[table.Row, list[str], list[table.Row]]:
    """The header, the columns' alignments and the rows of a table."""
    cells = [row.children for part in node.children for row in part.children]
    rows: list[table.Row] = [[_inline(cell) for cell in row] for row in cells]
    aligns = [str(cell.attrs.get("style", "")).rpartition(":")[2] for cell in cells[0]]
    return rows[0], aligns, rows[1:]


def list_symbol(node: SyntaxTreeNode, number: int, depth: int = 0) -> str:
    """What stands before an item of a list: its number, or the bullet of this depth."""
    return f"{number}. " if node.type == "ordered_list" else BULLETS[depth % len(BULLETS)]


def first_number(node: SyntaxTreeNode) -> int:
    """The number of a list's first item."""
    return int(node.attrs.get("start", 1))


def _laid_out(node: SyntaxTreeNode, width: int, depth: int = 0) -> list[Line]:
    match node.type:
        case "paragraph":
            return wrapped(_inline(node), width)
        case "heading":
            style = ".heading1" if node.tag == "h1" else ".heading"
            return wrapped(_inline(node).stylize_before(style), width)
        case "hr":
            return [Line(Content.styled("─" * width, "$foreground 20%"), width)]
        case "fence" | "code_block":
            return _code_rows(code_lines(node.content.removesuffix("\n"), node.info), width)
        case "blockquote":
            return indented(_stacked(node.children, width - 2, depth), _QUOTE_BAR, _QUOTE_BAR)
        case "bullet_list" | "ordered_list":
            first = first_number(node)
            rows: list[Line] = []
            for number, item in enumerate(node.children, first):
                rows += _item(item, list_symbol(node, number, depth), width, depth)
            return rows
        case "table":
            header, aligns, cells = table_parts(node)
            block = TableBlock(header, aligns)
            block.add(cells)
            return list(block.lines(width))
    return wrapped(Content(node.content or ""), width)


def _stacked(nodes: Sequence[SyntaxTreeNode], width: int, depth: int) -> list[Line]:
    """Blocks inside of another, with a blank line between two unless one of them is a list."""
    rows: list[Line] = []
    before = ""
    for node in nodes:
        if before and not before.endswith("_list") and not node.type.endswith("_list"):
            rows.append(Line(Content("")))
        rows += _laid_out(node, max(1, width), depth)
        before = node.type
    return rows


def _item(node: SyntaxTreeNode, symbol: str, width: int, depth: int) -> list[Line]:
    """A list's item behind its symbol; that of a task is its box."""
    inner_depth = depth + (symbol in BULLETS)
    rows = _stacked(node.children, width - len(symbol), inner_depth) or [Line(Content(""))]
    mark = rows[0].content.plain[:4]
    if mark in TASKS:
        rows[0].content = rows[0].content[4:]
        symbol = TASKS[mark]
    return indented(rows, Content.styled(symbol, ".bullet"), " " * len(symbol))


def _code_rows(lines: Iterable[Content], width: int) -> list[Line]:
    rows = [row for line in lines for row in wrapped(line, width - 2)]
    return filled(rows, width, _CODE)


def _inline(node: SyntaxTreeNode) -> Content:
    return styled(node.children[0].token) if node.children and node.children[0].token else Content("")


def _widest(first: Sequence[int], second: Sequence[int]) -> list[int]:
    return [
        max(first[i] if i < len(first) else 0, second[i] if i < len(second) else 0)
        for i in range(max(len(first), len(second)))
    ]


class CodeTheme(HighlightTheme):
    """Textual's, without its underlines: in a terminal those are links. And the lines of a diff."""

    STYLES = {kind: style.replace(" underline", "") for kind, style in HighlightTheme.STYLES.items()} | {
        Token.Generic.Inserted: "$text-success",
        Token.Generic.Deleted: "$text-error",
    }


def code_lines(code: str, info: str) -> list[Content]:
    """The lines of a complete block of code, highlighted as `info`, the words after its opening mark, says. Tabs become
    spaces first: colours would stay where the text before them was."""
    code = code.expandtabs(8)
    if len(code) > HIGHLIGHT_LIMIT_CHARS:
        return [Content(line) for line in code.split("\n")]
    return _highlighted(code, (info.split() or ["text"])[0])


@lru_cache(maxsize=64)
def _highlighted(code: str, language: str) -> list[Content]:
    content = highlight(code, language=language, theme=CodeTheme)
    lines = content.split("\n", allow_blank=True)
    return lines[: len(code.split("\n"))]
