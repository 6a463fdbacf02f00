"""Tints what was guessed of a reply: drawn text, whose characters are found in what the model wrote."""

from collections.abc import Sequence

from widgets.markdown.lines import Line

GUESSED = "on $accent 25%"
_AHEAD = 24
"""A drawn character is looked for among so many that follow in the text: marks of Markdown are not drawn, and what is
drawn otherwise than written (bullets, formulas) is not found."""


def tinted(lines: Sequence[Line], text: str, guessed: Sequence[tuple[int, int]]) -> list[Line]:
    """The lines, which show `text`, with the parts of it that were `guessed` tinted: from and to a character."""
    if not guessed:
        return list(lines)
    parts, part, place = iter(guessed), (-1, -1), 0
    rows = []
    for line in lines:
        content, plain, start, end = line.content, line.content.plain, -1, -1
        for at, character in enumerate(plain):
            if at < line.decoration or character.isspace():
                continue
            is_guessed = False
            if (found := text.find(character, place, place + _AHEAD)) >= 0:
                place = found + 1
                while part[1] < place:
                    part = next(parts, (len(text), len(text) + 1))
                is_guessed = part[0] < place
            if is_guessed:
                start, end = at if start < 0 else start, at + 1
            elif start >= 0:
                content, start = content.stylize(GUESSED, start, end), -1
        if start >= 0:
            content = content.stylize(GUESSED, start, end)
        rows.append(
            Line(content, line.decoration, line.end, line.is_prompt) if content is not line.content else line
        )
    return rows
