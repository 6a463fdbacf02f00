"""Separates the channels of a reply of gpt-oss or Muse Glimmer.

A reply is one or several messages. Each is a header, `<|message|>`, and its text up to `<|end|>`. The header of the
first is `<|channel|>` with the name of the channel; the later ones have `<|start|>assistant` before it. A header may
also name a recipient (`to=functions.search`), which makes the message a tool call. The last message ends with
`<|return|>`, or a tool call with `<|call|>`. Source: docs/format.md of https://github.com/openai/harmony.

Muse Glimmer has no channels but recipients: itself (`to=self`), the user, or a tool. Its messages end with `<|eom|>`,
and the last one with `<|eot|>`. Source: its chat template.
"""

import re
from collections.abc import Mapping

_BEGIN, _TEXT = ("<|start|>", "<|channel|>"), "<|message|>"
_END = "<|end|>", "<|return|>", "<|call|>", "<|eom|>", "<|eot|>"
_NEEDED = {*_BEGIN, _TEXT, _END[0]}, {_BEGIN[0], _TEXT, *_END[3:]}  # of gpt-oss, of Muse Glimmer
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w*)")
_CALL = re.compile(r" to=functions\.[\w.-]+")
_TO = re.compile(r" to=([\w.-]+)")
_RECIPIENT = re.compile(r"\s*(t|to|to=\S*)?\s*")  # the beginning of one, too


def channel_marks(special_tokens: Mapping[str, int]) -> dict[int, str]:
    """The marks of headers and messages, by token id; empty if the vocabulary does not have those that must be."""
    marks = {special_tokens[mark]: mark for mark in (*_BEGIN, _TEXT, *_END) if mark in special_tokens}
    return marks if any(needed <= {*marks.values()} for needed in _NEEDED) else {}


class ChannelSplitter:
    """Takes a reply token by token (see `ReplySplitter`). The channel `analysis` and tool calls are thinking. All other
    channels are the answer: `final`, `commentary` without a recipient (which tells the user what comes next), and those
    that are not known. So is text without a header. Messages of the same kind are separated by an empty line. In a
    conversation with tools, calls of these are the answer, too, gpt-oss's with the recipient before them
    (`tool_calls.HARMONY`). A message to the user is the answer.

    The marks are known by their ids. So a reply may spell them out.
    """

    def __init__(self, marks: Mapping[int, str], *, inside: bool = False, with_tools: bool = False) -> None:
        """`marks`: of `channel_marks`. `inside`: the prompt ended within the text of `analysis`."""
        self._marks = marks
        self._with_tools = with_tools
        self._thinking = inside
        self._header: str | None = None if inside else ""  # what has come of a header; None within a text
        self._has_mark = False  # a mark has begun the header
        self._written: set[bool] = {True} if inside else set()  # the kinds that have some text
        self._gap = ""  # comes before the next text

    @property
    def may_open(self) -> bool:
        return False  # a header tells: no single token does

    @property
    def answers_next(self) -> bool:
        return self._header is None and not self._thinking

    def feed(self, text: str, id: int = -1) -> tuple[bool, str]:
        """(whether the token is thinking, the text that can be shown now)."""
        mark = self._marks.get(id)
        if mark in _BEGIN:
            self._header, self._has_mark = f"{self._header or ''}{mark}", True
        elif mark in _END:
            self._header, self._has_mark = "", False
        elif mark == _TEXT:
            self._begin_text(self._header or "")
        elif self._header is None:
            return self._thinking, self._shown(text)
        else:
            self._header += text
            if not self._has_mark and not _RECIPIENT.fullmatch(self._header):
                return self.flush()
        return self._thinking, ""

    def flush(self) -> tuple[bool, str]:
        """The text that is still held back at the end of the reply, as `feed` returns it. A header that was broken off
        is no text."""
        text = self._header
        if not text or self._has_mark:
            return self._thinking, ""
        self._begin_text("")
        return False, self._shown(text)

    def _begin_text(self, header: str) -> None:
        channel = _CHANNEL.search(header)
        call = _CALL.search(header) if self._with_tools else None
        recipient = _TO.search(header)
        if recipient and "<|channel|>" not in self._marks.values():
            self._thinking = recipient[1] == "self" or (recipient[1] != "user" and not self._with_tools)
        else:
            is_analysis = channel is not None and channel[1] == "analysis"
            self._thinking = not call and ("to=" in header or is_analysis)
        self._header, self._has_mark = None, False
        self._gap = f"{call[0]}{_TEXT}" if call else "\n\n" if self._thinking in self._written else ""

    def _shown(self, text: str) -> str:
        if not text:
            return ""
        text, self._gap = self._gap + text, ""
        self._written.add(self._thinking)
        return text
