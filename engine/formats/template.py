"""From a conversation to the tokens that a model was trained to answer, by the chat template in its file.

The template runs in a process of its own (see `template_process`). Special tokens are those that it writes,
never those that a message spells: see `_disguise`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from threading import Timer
from typing import Any, Self

import msgspec

from engine.errors import TemplateError
from engine.events import Message
from engine.formats.gguf import GGUF, shown
from engine.formats.thinking import CLOSE, OPEN
from engine.formats.tokenizer import Tokenizer

START_S = 30.0  # for the process; a busy machine may take seconds
RENDER_S = 1.0  # a rendering takes about a millisecond
_NO_PROCESS = "The process that renders chat templates does not start."

# --- formats for files whose template is missing or does not work ----------------------------------------

_LLAMA_3 = (
    "{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if can_think and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
_LLAMA_2 = (
    "{% set ns = namespace(system='') %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.system = '<<SYS>>\n' + m.content + '\n<</SYS>>\n\n' %}"
    "{% elif m.role == 'user' %}{{ bos_token }}[INST] {{ ns.system + m.content | trim }} [/INST]"
    "{% set ns.system = '' %}{% else %} {{ m.content | trim }} {{ eos_token }}{% endif %}{% endfor %}"
)
_PLAIN = (
    "{% for m in messages %}{{ m.role | capitalize }}: {{ m.content | trim }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)


def _family_format(architecture: str, tokenizer: Tokenizer) -> str:
    known = tokenizer.special_tokens.keys()
    if {"<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"} <= known:
        return _LLAMA_3
    if {"<|im_start|>", "<|im_end|>"} <= known:
        return _CHATML
    return _LLAMA_2 if architecture == "llama" and tokenizer.sentencepiece else _PLAIN


# --- the template ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prompt:
    """What the model is given. `opens_thinking`: it ends in an open `<think>`, so the reply begins inside."""

    ids: list[int]
    opens_thinking: bool = False


class ChatTemplate:
    """Renders conversations for one model. `thinks` says whether its template knows of thinking, `warning`
    (perhaps only after a rendering) in a sentence why another format than the file's is used."""

    def __init__(self, source: str | None, architecture: str, tokenizer: Tokenizer) -> None:
        family = _family_format(architecture, tokenizer)
        self.warning = (
            "" if source else "The model file has no chat template; the format of its family is used."
        )
        self.now: Callable[[], datetime] = datetime.now  # what templates take the date from
        self._tokenizer = tokenizer
        self._can_think = family is _CHATML and OPEN in tokenizer.special_tokens
        self.thinks = "think>" in source or "enable_thinking" in source if source else self._can_think
        self._renderer, self._family = _Renderer(source or family), _Renderer(family)
        self._renderer.start()

        names = (name.strip() for name in tokenizer.special_tokens)
        self._edges = sorted({edge for name in names if name for edge in (name[0], name[-1])})

    @classmethod
    def from_gguf(cls, gguf: GGUF, tokenizer: Tokenizer) -> Self:
        """The template of a model file, or the format of its family if it has none."""
        source = gguf.get("tokenizer.chat_template", str, "")
        return cls(source if source.strip() else None, gguf.get("general.architecture", str, ""), tokenizer)

    def encode(
        self, messages: Sequence[Message], *, think: bool = True, add_generation_prompt: bool = True
    ) -> Prompt:
        """The conversation as a prompt, ready for the model to answer with `add_generation_prompt`. `think`
        asks a thinking model to think or not. Where the last message is the model's own, the prompt ends in
        it, so that the model goes on with it.

        Where the template refuses the conversation, it is given a simpler one: the system text in the first
        user turn, turns of the same role joined. Where it does not work at all, the family's format is used.
        Raises TemplateError if the template refuses that too, or takes too much time or memory.
        """
        if not messages:
            raise TemplateError("There is nothing to answer.", "Write a message first.")
        begun = None
        if add_generation_prompt and len(messages) > 1 and messages[-1].role == "assistant":
            *messages, begun = messages
        disguise = self._disguise(messages)
        text = self._render(
            {
                "enable_thinking": think,
                "thinking": think,
                "can_think": self._can_think,
                "add_generation_prompt": add_generation_prompt,
                "bos_token": self._tokenizer.text(self._tokenizer.bos_id),
                "eos_token": self._tokenizer.text(self._tokenizer.eos_id),
                "tools": None,
                "date_string": self.now().strftime("%d %b %Y"),
                "now": self.now().isoformat(),
            },
            [_translated(message, disguise) for message in messages],
        )
        opens_thinking = add_generation_prompt and text.rstrip().endswith(OPEN)
        segments = [*_segments(text, disguise)]
        if begun:
            segments += _as_it_was_said(begun, text)
            opens_thinking = not begun.content and bool(begun.thinking or opens_thinking)
        ids = self._tokenizer.encode_segments(segments)
        bos = self._tokenizer.bos_id
        if self._tokenizer.add_bos and bos is not None and ids[:1] != [bos]:
            ids = [bos, *ids]
        return Prompt(ids, opens_thinking)

    def _render(self, variables: dict[str, Any], messages: list[Message]) -> str:
        simpler = _simplified(messages)
        try:
            try:
                return self._renderer.render(variables, messages)
            except _Refused:
                if simpler == messages:
                    raise
                return self._renderer.render(variables, simpler)
        except _Refused as refused:
            raise TemplateError(
                f'The model\'s chat template refuses this conversation: "{shown(str(refused))}".',
                "Start a new chat, or use a model that supports this one.",
            ) from None
        except _Broken as broken:
            reason = shown(str(broken))
            self.warning = (
                f"The model's chat template does not work ({reason}); the format of its family is used."
            )
            return self._family.render(variables, messages)

    def _disguise(self, messages: Sequence[Message]) -> dict[int, str]:
        """For `str.translate`: each character that a special token begins or ends with -> a private-use one
        that no message has.

        Messages enter the template translated, and become what they were only after special tokens were
        looked for. So none is found that a message spells, whatever the template does with its text: cuts,
        strips, joins, changes of case. And what the template looks for in a message (`'</think>' in content`)
        is not there either: only its own marks are marks.
        """
        used = {c for m in messages for text in (m.content, m.thinking) for c in text}
        free = (chr(code) for code in range(0xF0000, 0x10FFFE) if chr(code) not in used)
        return {ord(edge): next(free) for edge in self._edges}


def _translated(message: Message, table: dict[int, str]) -> Message:
    return msgspec.structs.replace(
        message, content=message.content.translate(table), thinking=message.thinking.translate(table)
    )


def _segments(text: str, disguise: dict[int, str]) -> Iterable[tuple[str, bool]]:
    """Rendered text as segments for `Tokenizer.encode_segments`, with the disguise taken off."""
    back = {ord(private): chr(edge) for edge, private in disguise.items()}
    private = re.compile(f"([{''.join(map(chr, back))}]+)" if back else "((?!))")
    for i, part in enumerate(private.split(text)):
        yield part.translate(back), i % 2 == 0


def _as_it_was_said(reply: Message, prompt: str) -> Iterable[tuple[str, bool]]:
    """The segments of a reply that was broken off, as the model wrote them after `prompt`."""
    if reply.thinking and not prompt.rstrip().endswith(CLOSE):
        if not prompt.rstrip().endswith(OPEN):
            yield OPEN + "\n", True
        yield reply.thinking, False
        if reply.content:
            yield f"\n{CLOSE}\n\n", True
    yield reply.content, False


def _simplified(messages: list[Message]) -> list[Message]:
    """The conversation for templates that know no system role, or that insist on turns taking turns."""
    joined: list[Message] = []
    for message in messages:
        role = "user" if message.role == "system" else message.role
        if joined and joined[-1].role == role:
            content = "\n\n".join(filter(None, (joined[-1].content, message.content)))
            joined[-1] = msgspec.structs.replace(joined[-1], content=content)
        else:
            joined.append(msgspec.structs.replace(message, role=role))
    return joined


# --- the process that renders ----------------------------------------------------------------------------


class _Refused(Exception):
    """The template called raise_exception with this message."""


class _Broken(Exception):
    """The template cannot be compiled, or fails on a conversation."""


class _Renderer:
    """A template in a process that ends with this object, and starts anew if it had to be ended."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Starts the process without waiting for it; it compiles the template while a model loads."""
        script = Path(__file__).with_name("template_process.py")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(script)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                encoding="ascii",
                start_new_session=True,  # Ctrl-C in the terminal is not for it
            )
        except OSError as error:
            hint = f"The system says: {error.strerror}. Free some memory and try again."
            raise TemplateError(_NO_PROCESS, hint) from None
        self._end = weakref.finalize(self, _end, self._process)
        self._ready = False
        self._write(json.dumps(self._source))

    def render(self, variables: dict[str, Any], messages: Sequence[Message]) -> str:
        """The text that the template makes of `messages`. Raises _Refused, _Broken, and TemplateError if it
        takes too much."""
        if self._process is None or self._process.poll() is not None:
            self.start()
        if not self._ready and self._read_line(START_S) != "ready\n":
            raise TemplateError(_NO_PROCESS, "Install orin-chat again.")
        self._ready = True
        self._write(json.dumps(variables | {"messages": [_as_template_sees_it(m) for m in messages]}))
        line = self._read_line(RENDER_S)
        if not line.endswith("\n"):  # it was ended
            self._end()
            self._process = None
            line = json.dumps({"limit": f"it takes longer than {RENDER_S:.0f} s"})
        match json.loads(line):
            case {"text": str(text)}:
                return text
            case {"refused": reason}:
                raise _Refused(reason)
            case {"broken": reason}:
                raise _Broken(reason)
            case {"limit": reason}:
                raise TemplateError(
                    f"The model's chat template was stopped: {reason}.",
                    "The model file is damaged or harmful: get another copy of the model.",
                )
        raise AssertionError(line)

    def _write(self, line: str) -> None:
        assert self._process and self._process.stdin
        with suppress(BrokenPipeError):  # then there is nothing to read either
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def _read_line(self, seconds: float) -> str:
        """A line, or what there is of one when the process ends or is ended after `seconds`."""
        assert self._process and self._process.stdout
        timer = Timer(seconds, self._process.kill)
        timer.start()
        try:
            return self._process.stdout.readline()
        finally:
            timer.cancel()


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    with suppress(OSError), process:  # closes its pipes and waits for it
        pass


def _as_template_sees_it(message: Message) -> dict[str, str]:
    seen = {"role": message.role, "content": message.content}
    return seen | {"reasoning_content": message.thinking} if message.thinking else seen
