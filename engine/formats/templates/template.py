"""Makes the tokens of a prompt from a conversation, with the chat template in the model file.

The template runs in a process of its own (`template_renderer`). Special tokens are those that the template writes; a
message that spells one is ordinary text (`ChatTemplate._disguise`).
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property, partial
from typing import Any, Self

import msgspec

from engine.errors import SHORTEN, ContextFullError, TemplateError
from engine.formats.channels import channel_marks
from engine.formats.gguf import GGUF, printable
from engine.formats.templates.fallback_templates import fallback_template
from engine.formats.templates.file_templates import FileTemplates
from engine.formats.templates.prompt_pictures import (
    PictureMarks,
    PictureProcessor,
    PlacedPicture,
    around_pictures,
    as_parts,
    cannot_see,
    with_marks,
    with_texts,
)
from engine.formats.templates.simple_calls import one_by_one, with_short_ids
from engine.formats.templates.template_renderer import Broken, Refused, TemplateRenderer
from engine.formats.thinking import HARMONY, MUSE, THINK, ThinkMarks, marks_of
from engine.formats.tokens.tokenizer import Tokenizer
from engine.formats.tools.forms import shown_form
from engine.formats.tools.told import joined, told, written
from engine.protocol.events import PICTURE_MARK, Effort, Message, Picture, ToolCall


@dataclass(frozen=True)
class Prompt:
    """The tokens that the model is given. `opens_thinking`: they end in the mark that opens thinking, so the reply
    begins with thinking. `marks` are those that the model writes; `channels` are those of gpt-oss by token id (see
    `ChannelSplitter`), empty for other models. `pictures`: those whose ids are among them."""

    ids: list[int]
    opens_thinking: bool = False
    marks: ThinkMarks = THINK
    channels: Mapping[int, str] = field(default_factory=dict)
    pictures: tuple[PlacedPicture, ...] = ()


class ChatTemplate:
    """Renders conversations for one model. `thinks`: whether the template supports thinking. `warning`: a sentence that
    says why another template than the file's is used, or ""; it may appear only after `encode`.
    `picture_processor`: how messages may have pictures, if they may."""

    def __init__(
        self, source: str | None, architecture: str, tokenizer: Tokenizer, for_tools: str = ""
    ) -> None:
        """`source`: the template in Jinja, None to use the one of the model's family. `for_tools`: another one for
        conversations with tools, if there is one."""
        fallback = fallback_template(architecture, tokenizer)
        self.warning = (
            "" if source else "The model file has no chat template; the format of its family is used."
        )
        self.now: Callable[[], datetime] = datetime.now  # templates may write the date
        self._tokenizer = tokenizer
        self._can_think = "can_think" in fallback and THINK.open in tokenizer.special_tokens
        self._marks = marks_of(source or fallback)
        self._channels = channel_marks(tokenizer.special_tokens) if self._marks in (HARMONY, MUSE) else {}
        opened = re.escape(self._marks.open)
        self._opens = re.compile(rf"{opened}\s*+(?:<[^<>]++>)*+\s*+$")
        signs = ("think>", "enable_thinking", self._marks.open, self._marks.close)
        self.thinks = any(sign in source for sign in signs) if source else self._can_think
        self._renderer, self._fallback = TemplateRenderer(source or fallback), TemplateRenderer(fallback)
        self._renderer.start()
        self._for_tools = TemplateRenderer(for_tools) if for_tools else self._renderer
        self._form = shown_form(for_tools or source or "")
        self._shows_calls = "tool_calls" in (for_tools or source or "")
        self._knows_pictures = "image" in (source or "")
        self.picture_processor: PictureProcessor | None = None

        self._edges = _edges(tokenizer.special_tokens)

    @cached_property
    def takes_effort(self) -> bool:
        """Whether the template reads how much the model should think."""
        with suppress(Broken, TemplateError):  # rendering tells the user
            return "reasoning_effort" in self._renderer.reads()
        return False

    @cached_property
    def _reads_only_parts(self) -> bool:
        """Whether the template leaves out contents that are no lists of parts (SmolVLM)."""
        if not self._knows_pictures:
            return False
        text = "something"
        asked = {"messages": [{"role": "user", "content": text}], "now": self.now().isoformat()}
        with suppress(Broken, Refused, TemplateError):
            return text not in self._renderer.render(asked)
        return False

    @cached_property
    def _leaves_out_system(self) -> bool:
        """Whether the template leaves out a system text without a word (Phi-3)."""
        roles, write = {"system": "something", "user": "else"}, as_parts if self._reads_only_parts else str
        asked = {
            "messages": [{"role": role, "content": write(text)} for role, text in roles.items()],
            "bos_token": "",
            "eos_token": "",
            "add_generation_prompt": True,
            "now": self.now().isoformat(),
        }
        with suppress(Broken, Refused, TemplateError):
            return roles["system"] not in self._renderer.render(asked)
        return False

    @classmethod
    def from_gguf(cls, gguf: GGUF, tokenizer: Tokenizer) -> Self:
        """The template of a model file, or that of the model's family if the file has none."""
        sources = FileTemplates.of(gguf)
        architecture = gguf.get("general.architecture", str, "")
        return cls(sources.chat or None, architecture, tokenizer, sources.tools)

    def encode(
        self,
        messages: Sequence[Message],
        *,
        think: bool = True,
        effort: Effort | None = None,
        tools: str = "",
        most: int | None = None,
    ) -> Prompt:
        """The conversation as a prompt, which ends where the model's reply begins; if the last message is the model's,
        it ends in that message, so that the model continues it. `think` asks a thinking model to think, or not to, and
        `effort` says how much (None: as the template has it). `tools` are those of `Chat`; if the template does not
        show them, the system text does (`tools.told`).

        If the template refuses the conversation, it gets a simpler one: turns of the same role joined, system texts in
        user turns but for those at the beginning. If it refuses this too, or leaves out system texts, all of them are
        in user turns. Calls get other ids then, and come one by one (`simple_calls`). If it does not work at all, the
        template of the model's family is used, unless there are tools. Raises TemplateError if the template refuses the
        simpler one too, or takes too much time or memory. `most` and what it raises: see `Tokenizer.encode_segments`.
        """
        if not messages:
            raise TemplateError("There is nothing to answer.", "Write a message first.")
        if most is not None:
            self._check_fewest(messages, most)
        if not think:
            effort = "low" if self._marks is HARMONY else None  # gpt-oss always thinks
        unfinished = None
        if len(messages) > 1 and _may_go_on(messages[-1]):
            *messages, unfinished = messages
        if not self._form and (tools or any(message.role == "tool" for message in messages)):
            messages, tools = told(messages, tools), ""
        messages = [with_marks(message) for message in messages]
        pictures = [picture for message in messages for picture in message.pictures]
        if pictures and not self.picture_processor:
            raise cannot_see()
        written = self.picture_processor.marks.written if self.picture_processor else ""
        functions = json.loads(tools) if tools else None
        edges = sorted({*self._edges, *_edges([written])}) if pictures else self._edges
        disguise = _disguise([functions, *(_as_variables(message) for message in messages)], edges)
        asked = self._asked(think, effort) | {"tools": _translated(functions, disguise)}
        render = partial(self._render, asked, messages, disguise)
        text = render(self._reads_only_parts or (bool(pictures) and self._knows_pictures))
        if (
            pictures
            and self._knows_pictures
            and not self._reads_only_parts
            and len(_around(text, disguise, written)) <= len(pictures)
        ):
            text = render(False)  # it leaves pictures out in some places
        last = text.rpartition(self._marks.close)[2]
        opens_thinking = bool(self._opens.search(last))
        runs = _around(text, disguise, written) if pictures else [[*_segments(text, disguise)]]
        if unfinished:
            runs[-1] += _unfinished_reply(unfinished, text, self._marks)
            opens_thinking = not unfinished.content and bool(unfinished.thinking or opens_thinking)
        if len(runs) != len(pictures) + 1:
            raise TemplateError(
                "The model's chat template leaves out a picture.",
                "Put pictures into messages of the user, or start a new chat.",
            )
        ids, placed = self._tokens(runs, pictures, most)
        return Prompt(ids, opens_thinking, self._marks, self._channels, placed)

    def _check_fewest(self, messages: Sequence[Message], most: int) -> None:
        """Raises ContextFullError for a conversation that has more than `most` tokens, whatever the template makes of
        it: to render it would hold others."""
        if len(messages) > most:  # each has a token
            raise ContextFullError(
                f"The conversation has {len(messages)} messages; the context holds {most:,} tokens.",
                SHORTEN,
                tokens=len(messages),
                most=most,
            )
        # Templates leave out neither; white space at the ends and earlier thoughts they may. A picture has a token.
        kept = [message.content.strip() for message in messages if message.role in ("user", "tool")]
        pictures = sum(len(message.pictures) for message in messages)
        texts = [text for each in kept if (text := each.replace(PICTURE_MARK, ""))]
        self._tokenizer.check_fewest(texts, most, pictures)

    def _asked(self, think: bool, effort: Effort | None) -> dict[str, Any]:
        """The variables that templates read beside the messages and the tools."""
        now = self.now()
        return {
            "enable_thinking": think,
            "thinking": think,
            **({"reasoning_effort": effort} if effort else {}),
            **({} if think else {"thinking_budget": 0}),  # Seed-OSS
            "can_think": self._can_think,
            "add_generation_prompt": True,
            "bos_token": self._tokenizer.text(self._tokenizer.bos_id),
            "eos_token": self._tokenizer.text(self._tokenizer.eos_id),
            "date_string": now.strftime("%d %b %Y"),
            "now": now.isoformat(),
        }

    def _tokens(
        self, runs: Sequence[Sequence[tuple[str, bool]]], pictures: Sequence[Picture], most: int | None
    ) -> tuple[list[int], tuple[PlacedPicture, ...]]:
        """The ids of the segments around pictures, and theirs."""
        processor, bos = self.picture_processor, self._tokenizer.bos_id
        marks = processor.marks if processor else PictureMarks("")
        ids, placed = list[int](), list[PlacedPicture]()
        for i, run in enumerate(runs):
            if i and processor:
                picture = with_texts(
                    processor.read(pictures[i - 1]),
                    marks,
                    lambda text: self._tokenizer.encode_segments([(text, True)], None),
                )
                placed.append(PlacedPicture(len(ids), picture))
                ids += picture.ids
                run = [(marks.after, True), *run]
            if i < len(pictures):
                run = [*run, (marks.before.format(picture=i), True)]
            if most is not None and len(ids) > most:
                n = f"{len(ids):,} tokens with its pictures"
                sentence = f"The conversation has over {n}; the context holds {most:,}."
                raise ContextFullError(sentence, SHORTEN, tokens=len(ids), most=most)
            ids += self._tokenizer.encode_segments(run, most, len(ids))
            if not i and self._tokenizer.add_bos and bos is not None and ids[:1] != [bos]:
                ids = [bos, *ids]
        return ids, tuple(placed)

    def _render(
        self,
        variables: dict[str, Any],
        messages: Sequence[Message],
        disguise: dict[int, str],
        in_parts: bool = False,
    ) -> str:
        """`in_parts`: messages with pictures are lists of their parts, for templates that know pictures, or all are."""
        renderer = self._for_tools if variables["tools"] else self._renderer

        def render(messages: Sequence[Message], renderer: TemplateRenderer = renderer, **more: Any) -> str:
            asked = [self._with_calls(m, self._variables(m, disguise, in_parts), disguise) for m in messages]
            return renderer.render(variables | {"messages": asked} | more)

        is_left_out = messages[0].role == "system" and renderer is self._renderer and self._leaves_out_system
        tried, refused = list[list[Message]](), ""
        try:
            for form in _forms(messages, keeps_system=not is_left_out):
                if form in tried:
                    continue
                tried.append(form)
                try:
                    return render(form)
                except Refused as refusal:
                    refused = str(refusal)
            raise TemplateError(
                f'The model\'s chat template refuses this conversation: "{printable(refused)}".',
                "Start a new chat, or use a model that supports this one.",
            )
        except Broken as broken:
            if variables["tools"] is None:  # one that is for conversations with tools
                with suppress(Broken, Refused):
                    return render(messages, tools=())
            reason = printable(str(broken))
            if variables["tools"] or any(message.tool_calls for message in messages):
                raise TemplateError(
                    f"The model's chat template does not work with these tools ({reason}).",
                    "Leave the tools out, or use a model that supports them.",
                ) from None
            self.warning = (
                f"The model's chat template does not work ({reason}); the format of its family is used."
            )
            in_parts = False
            return render(messages, self._fallback)

    def _variables(self, message: Message, disguise: dict[int, str], in_parts: bool) -> dict[str, Any]:
        return _as_variables(message, disguise, in_parts and bool(message.pictures or self._reads_only_parts))

    def _with_calls(
        self, message: Message, variables: dict[str, Any], disguise: dict[int, str]
    ) -> dict[str, Any]:
        """The variables of a message whose content has its calls, where the template leaves them out."""
        if self._shows_calls or not (self._form and message.tool_calls):
            return variables
        text = written(message.tool_calls, self._form).translate(disguise)
        return variables | {
            "content": f"{variables['content']}{self._form.opens[0]}[{text}]{self._form.close}"
        }


def _edges(names: Iterable[str]) -> list[str]:
    """The characters that these names begin or end with."""
    stripped = (name.strip() for name in names)
    return sorted({edge for name in stripped if name for edge in (name[0], name[-1])})


def _disguise(values: list[Any], edges: Sequence[str]) -> dict[int, str]:
    """A table for `str.translate`: each of `edges`, the characters that special tokens begin or end with -> a character
    of a private-use area that is in no message. `values` are what the template gets.

    The template gets the messages translated, and they are translated back only after special tokens were searched.
    So a message can never spell a special token, whatever the template does with its text: cuts, strips, joins,
    changes of case. Nor does a template that searches messages for marks (`'</think>' in content`) find any: only
    marks that the template writes count. Raises TemplateError if there is no such character.
    """
    used = set(json.dumps(values, ensure_ascii=False))
    free = (chr(code) for code in range(0xF0000, 0x10FFFE) if chr(code) not in used)
    disguise = dict(zip(map(ord, edges), free, strict=False))
    if len(disguise) < len(edges):
        raise TemplateError("The conversation has all characters for private use.", "Leave them out.")
    return disguise


def _may_go_on(message: Message) -> bool:
    """Whether a reply can be continued: one that asked for tools has ended."""
    return message.role == "assistant" and not message.tool_calls


def _around(text: str, disguise: dict[int, str], written: str) -> list[list[tuple[str, bool]]]:
    """See `around_pictures`."""
    return around_pictures(_segments(text, disguise), written)


def _as_variables(
    message: Message, disguise: Mapping[int, str] = {}, in_parts: bool = False
) -> dict[str, Any]:
    """A message under the names that templates use
    (https://huggingface.co/docs/transformers/chat_extras), with its texts translated."""
    fields: dict[str, Any] = {"content": message.content}
    if message.thinking:
        fields["reasoning_content"] = message.thinking
    if message.tool_calls:
        fields["thinking"] = message.thinking  # gpt-oss: only before calls
        fields["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": _value(call)}}
            for call in message.tool_calls
        ]
    if message.role == "tool":
        fields |= {"tool_call_id": message.tool_call_id, "name": message.name}
    variables = {"role": message.role, **_translated(fields, disguise)}
    if in_parts:
        variables["content"] = as_parts(variables["content"])
    return variables


def _value(call: ToolCall) -> Any:
    """The arguments as a value, as Hugging Face's templates expect them; text that is no JSON as it is."""
    try:
        return json.loads(call.arguments)
    except (ValueError, RecursionError):
        return call.arguments


def _translated(value: Any, table: Mapping[int, str]) -> Any:
    """A JSON value with all texts in it translated; the names of fields, too."""
    match value:
        case str():
            return value.translate(table)
        case list():
            return [_translated(item, table) for item in value]
        case dict():
            return {name.translate(table): _translated(item, table) for name, item in value.items()}
    return value


def _segments(text: str, disguise: dict[int, str]) -> Iterable[tuple[str, bool]]:
    """Rendered text as segments for `Tokenizer.encode_segments`, with the characters of messages translated back."""
    back = {ord(private): chr(edge) for edge, private in disguise.items()}
    private = re.compile(f"([{''.join(map(chr, back))}]+)" if back else "((?!))")
    for i, part in enumerate(private.split(text)):
        yield part.translate(back), i % 2 == 0


def _unfinished_reply(reply: Message, prompt: str, marks: ThinkMarks) -> Iterable[tuple[str, bool]]:
    """The segments of a reply that was stopped, as the model wrote them after `prompt`."""
    after_open, before_close, after_close = marks.breaks
    if reply.thinking and not prompt.rstrip().endswith(marks.close):
        if not prompt.rstrip().endswith(marks.open):
            yield marks.open + after_open, True
        yield reply.thinking, False
        if reply.content:
            yield before_close + marks.close + after_close + "".join(marks.begin[:1]), True
    elif reply.content:
        yield "".join(marks.begin[1:]), True
    yield reply.content, False


def _forms(messages: Sequence[Message], keeps_system: bool) -> Iterator[list[Message]]:
    """The conversation, and simpler ones for a template that refuses it, each made when it is asked for. Without
    `keeps_system`, all of them have system texts in user turns."""
    makers: list[Callable[[Sequence[Message]], list[Message]]] = [_simplified]
    if keeps_system:
        makers = [list, partial(_simplified, keeps_system=True), *makers]
    forms = list[list[Message]]()
    for make in makers:
        forms.append(make(messages))
        yield forms[-1]
    for simpler in (with_short_ids, lambda form: one_by_one(with_short_ids(form))):
        yield from map(simpler, forms)


def _simplified(messages: Sequence[Message], keeps_system: bool = False) -> list[Message]:
    """The conversation for templates that require alternating roles, that refuse replies without an answer (they were
    stopped while the model was thinking), and that have no system role, or only one at the beginning
    (`keeps_system`)."""
    turns: list[list[Message]] = []
    for message in messages:
        keeps_system = keeps_system and message.role == "system"
        if message.role == "assistant" and not message.content and not message.tool_calls:
            continue
        role = "user" if message.role == "system" and not keeps_system else message.role
        before = turns[-1][0] if turns else None
        if before and before.role == role and (role in ("system", "user") or _may_go_on(before)):
            turns[-1].append(message)
        else:
            turns.append([msgspec.structs.replace(message, role=role)])
    return [joined(turn, "\n\n") for turn in turns]
