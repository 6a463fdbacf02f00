"""Markdown that arrives in pieces, split into blocks.

Only the last block can still change, so each piece of text is parsed together with that block alone. A block that grows
long is cut: its finished lines, rows or items are laid out once, and parsing goes on with its opening (a fence's
first line, a table's header) and what comes after. So the cost of a token does not grow with the length of a reply.
"""

import re
from collections.abc import Sequence

from markdown_it.tree import SyntaxTreeNode
from textual.content import Content

from widgets.markdown.blocks import (
    Block,
    CodeBlock,
    NodeBlock,
    TableBlock,
    first_number,
    list_symbol,
    table_parts,
)
from widgets.markdown.lines import Line
from widgets.markdown.parser import is_open, parser

CUT_LINES = 16
"""Lines of code or rows of a table that are parsed again with each piece of text, at most about."""
CUT_CHARS = 4_000
"""A longer paragraph is cut at the end of a line."""
MOST_CHARS = 8_000
"""A line of more characters is cut between words, or anywhere: some texts take 20 µs a character to parse."""
_UNDECIDED = re.compile(r"(?:^|\n)[ \t]*(?:\d{1,9}[.)]?|[-+*_=#>|`~]+)[ \t]*\Z")


class StreamedMarkdown:
    """A document that grows by `append`. `lines` are its rows; finished ones are laid out once for each width."""

    def __init__(self) -> None:
        self._source = ""  # from the start of the last block on, or of the part of it that is still parsed
        self._opening = ""  # what has to stand before `_source` so that it is a part of the same block
        self._finished: list[Block] = []
        self._last: list[Block] = []  # blocks that the next piece may change
        self._growing: CodeBlock | TableBlock | None = None  # the cut block that `_opening` belongs to
        self._list: tuple[str, str, int] | None = None  # type, mark and next number of the list that was cut
        self._follows = False  # whether the next block goes on with a cut paragraph
        self._rows: list[Line] = []
        self._width = self._laid_out = self._n_final_rows = 0

    def append(self, text: str) -> None:
        """Adds cleaned text."""
        while len(text) > MOST_CHARS:
            end = text.rfind("\n", 0, MOST_CHARS) + 1 or MOST_CHARS
            self._append(text[:end])
            text = text[end:]
        self._append(text)

    def _append(self, text: str) -> None:
        self._source += text
        self._parse()
        if len(self._source) > MOST_CHARS and self._growing is None:
            self._cut_anywhere()

    def lines(self, width: int) -> Sequence[Line]:
        """The rows of the document in `width` cells, with a blank one between blocks."""
        if width != self._width:
            self._width, self._laid_out, self._n_final_rows = width, 0, 0
            self._rows = []
        del self._rows[self._n_final_rows :]
        for block in self._finished[self._laid_out :]:
            self._add_rows(block)
        self._laid_out, self._n_final_rows = len(self._finished), len(self._rows)
        for block in self._last:
            self._add_rows(block)
        return self._rows

    def _add_rows(self, block: Block) -> None:
        if self._rows and not block.follows:
            self._rows.append(Line(Content("")))
        self._rows += block.lines(self._width)

    # --- parsing ------------------------------------------------------------------------------------------------

    def _parse(self) -> None:
        source = self._opening + self._source
        nodes = SyntaxTreeNode(parser().parse(source)).children
        if not nodes:
            self._last = []
            return
        for node in nodes[:-1]:
            self._finished += self._blocks(node)
            self._growing, self._list, self._follows = None, None, False
        shift = 0
        if len(nodes) > 1 or not self._opening:
            shift = _first_line(nodes[-1])
            self._opening, self._source = "", _from_line(source, shift)
            source = self._source
        self._last = self._blocks(nodes[-1])
        self._cut(nodes[-1], source, shift)

    def _blocks(self, node: SyntaxTreeNode) -> list[Block]:
        """The blocks of a node: one, or one for each item of a list."""
        follows = self._follows
        match node.type:
            case "fence" | "code_block":
                code = (
                    self._growing
                    if isinstance(self._growing, CodeBlock)
                    else CodeBlock(node.info, follows=follows)
                )
                code.pending = node.content.removesuffix("\n").split("\n") if node.content else []
                code.is_open = node.token is not None and is_open(node.token)
                return [code]
            case "table":
                header, aligns, rows = table_parts(node)
                table = self._growing if isinstance(self._growing, TableBlock) else TableBlock(header, aligns)
                table.pending = rows
                return [table]
            case "bullet_list" | "ordered_list":
                is_continued, number = self._numbering(node)
                return [
                    NodeBlock(
                        item, symbol=list_symbol(node, number + i), follows=is_continued or i > 0 or follows
                    )
                    for i, item in enumerate(node.children)
                ]
        return [NodeBlock(node, follows=follows)]

    def _cut(self, node: SyntaxTreeNode, source: str, shift: int) -> None:
        """Leaves out of `_source` what is finished of the last block. `source` begins at line `shift` of what was
        parsed."""
        match node.type:
            case "fence":
                self._cut_code(source)
            case "table":
                self._cut_table(node, source, shift)
            case "bullet_list" | "ordered_list" if len(node.children) > 1:
                _, number = self._numbering(node)
                self._finished += self._last[:-1]
                self._last = self._last[-1:]
                self._list = node.type, node.markup, number + len(node.children) - 1
                self._source = _from_line(source, _first_line(node.children[-1]) - shift)
            case "paragraph" | "blockquote" if len(source) > CUT_CHARS:
                self._cut_lines(source, mark=">" if node.type == "blockquote" else "")

    def _numbering(self, node: SyntaxTreeNode) -> tuple[bool, int]:
        """Whether a list goes on with the one that was cut, and the number of its first item."""
        if self._list is not None and self._list[:2] == (node.type, node.markup):
            return True, self._list[2]
        return False, first_number(node)

    def _cut_code(self, source: str) -> None:
        [code] = self._last
        assert isinstance(code, CodeBlock)
        if code.is_open and len(code.pending) > CUT_LINES:
            opening, rest = (
                source.split("\n", 1) if self._growing is None else (self._opening[:-1], self._source)
            )
            complete = rest.count("\n")
            code.add(code.pending[:complete])
            del code.pending[:complete]
            self._growing, self._opening = code, opening + "\n"
            self._source = rest.rpartition("\n")[2]

    def _cut_table(self, node: SyntaxTreeNode, source: str, shift: int) -> None:
        [table] = self._last
        assert isinstance(table, TableBlock)
        if len(table.pending) > CUT_LINES:
            row = node.children[-1].children[-1]
            header = source.split("\n", 2)[:2]
            table.add(table.pending[:-1])
            del table.pending[:-1]
            self._growing, self._opening = table, "\n".join(header) + "\n"
            self._source = _from_line(source, _first_line(row) - shift)

    def _cut_lines(self, source: str, mark: str) -> None:
        """Cuts a paragraph or a quote before its last line, if that begins with `mark` as the others do."""
        before, _, after = source.rpartition("\n")
        if not before or not after.strip() or not after.startswith(mark):
            return
        for node in SyntaxTreeNode(parser().parse(before)).children:
            self._finished += self._blocks(node)
            self._follows = True
        self._source = after
        self._parse()

    def _cut_anywhere(self) -> None:
        """Ends the last block between two words. What comes after is a paragraph that follows it without a gap."""
        place = self._source.rfind(" ", MOST_CHARS // 2) + 1 or len(self._source)
        rest = self._source[place:]
        if rest:
            self._source = self._source[:place]
            self._parse()
        self._finished += self._last
        self._last, self._source, self._opening = [], "", ""
        self._growing, self._list, self._follows = None, None, True
        if rest:
            self._append(rest)


def _first_line(node: SyntaxTreeNode) -> int:
    return node.map[0] if node.map else 0


def _from_line(text: str, line: int) -> str:
    """What `text` holds from a line on, counted from 0."""
    start = 0
    for _ in range(line):
        start = text.index("\n", start) + 1
    return text[start:]


def decided(text: str) -> int:
    """How many characters of a stream's text so far can be drawn: not a last line of which it is open what it begins.

    A block that has ended stays as it is: a `3` that is drawn before its `. third point` arrives would be a paragraph,
    and tear the list in two.
    """
    match = _UNDECIDED.search(text, max(0, text.rfind("\n", 0, -1) if text else 0))
    return match.start() if match else len(text)
