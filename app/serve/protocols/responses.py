"""OpenAI's responses, as chats: https://platform.openai.com/docs/api-reference/responses.

The server remembers responses for as long as `Conversations` has room, so that the next request may name one, or single
items, as Vercel's AI SDK does. What a model thought is an item of its own. Clients that keep conversations themselves
(`store: false`) get it in `encrypted_content`, too, since that is what they send back.
"""

import base64
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from starlette.requests import Request

from app.serve.bodies import MAX_BODY_BYTES
from app.serve.errors import ApiError, wrong
from app.serve.protocols import chat, compaction
from app.serve.protocols.common.conversation import (
    FILES,
    TEXTS,
    Call,
    CalledFunction,
    ChatMessage,
    CustomInput,
    Part,
    conversation,
)
from app.serve.protocols.common.formats import JsonSchema, ResponseFormat
from app.serve.protocols.common.items import go_on, in_parts, page
from app.serve.protocols.common.json_values import converted
from app.serve.protocols.common.pictures import NOTHING_ELSE, PICTURES
from app.serve.protocols.common.remembered import Conversations, Remembered
from app.serve.protocols.common.reply import Asked, Json
from app.serve.protocols.common.thinking import Reasoning
from app.serve.protocols.common.tools import (
    Allowed,
    Choice,
    Function,
    Named,
    Tool,
    ToolChoice,
    Tools,
    nested,
)
from app.serve.protocols.response_body import ResponsesBody, ResponseToolChoice, Spaces, TextConfig, is_name
from app.serve.protocols.response_reply import SEALED, ResponseReply
from app.serve.protocols.shortening import shorten
from app.serve.service import Service


def asked(body: ResponsesBody, service: Service, kept: Conversations, owner: str) -> Asked:
    """May take as long as the text is. Raises ApiError."""
    made, spaces, items, new = as_chat(body, kept, owner)
    if compaction.is_asked(items):
        summary, note = compaction.summary_request(made, service)
        short = compaction.Compaction(
            body, service.model, service.file.tokenizer, Tools(), sampling=summary.sampling
        )
        short.keep = lambda: _keep(short, body, kept, owner, items[:-1], new[:-1])
        return Asked([summary], short, bool(body.stream), asker=body.asker, note=note)
    shortened = shorten(made, service) if body.truncation == "auto" else ""
    request, tools = chat.chat_request(made, service)
    reply = ResponseReply(
        body, service.model, service.file.tokenizer, tools, spaces, sampling=request.sampling
    )
    reply.keep = lambda: _keep(reply, body, kept, owner, items, new)
    one_call, note = body.parallel_tool_calls is False, "; ".join(filter(None, (tools.note, shortened)))
    return Asked([request], reply, bool(body.stream), asker=body.asker, note=note, one_call=one_call)


def _keep(
    reply: ResponseReply,
    body: ResponsesBody,
    kept: Conversations,
    owner: str,
    items: Sequence[Json],
    new: Sequence[Json],
) -> None:
    """`items` are all that it was asked with, of which the `new` ones came with the request."""
    if body.is_stored:
        remembered = Remembered(owner, [*items, *reply.output], len(items), reply.whole())
        kept.keep(reply.id, remembered, reply.output)
    if id := body.conversation_id:
        go_on(id, kept, owner, [*new, *reply.output])


def compacted(body: ResponsesBody, service: Service, kept: Conversations, owner: str) -> Asked:
    """A summary of the conversation. May take as long as the text is. Raises ApiError."""
    made, _, items, _ = as_chat(body, kept, owner)
    summary, note = compaction.summary_request(made, service)
    reply = compaction.Compaction(body, service.model, service.file.tokenizer, Tools(), repeats=items)
    reply.context = lambda: service.context_length
    return Asked([summary], reply, is_streamed=False, asker=body.asker, note=note)


def counted(body: ResponsesBody, service: Service, kept: Conversations, owner: str) -> Json:
    """How many tokens the prompt has. May take as long as the text is. Raises ApiError."""
    n = len(chat.encoded(as_chat(body, kept, owner)[0], service).ids)
    return {"object": "response.input_tokens", "input_tokens": n}


def remembered(known: Remembered, _: Request) -> Json:
    """Raises ApiError for what is no response."""
    if known.response.get("object") != "response":
        raise ApiError(
            404, "This is an answer in another protocol, such as /v1beta/interactions, and no response."
        )
    return known.response


def input_items(known: Remembered, request: Request) -> Json:
    """A page of what a response was asked with, the last item first. Raises ApiError."""
    remembered(known, request)
    items = known.items[: known.given]
    whole = [{"id": f"item_{i}", "type": "message"} | in_parts(item) for i, item in enumerate(items)]
    return page(whole, request.query_params)


def check(items: Sequence[Json]) -> None:
    """Raises ApiError for items that no request may have."""
    conversation(_Messages().of(items, 0))


def as_chat(
    body: ResponsesBody, kept: Conversations, owner: str
) -> tuple[chat.ChatBody, Spaces, list[dict[str, Any]], list[dict[str, Any]]]:
    """The request as a chat, all of its items, with those before, and those that came with it. Raises ApiError."""
    for name, instead in (("background", "stream the response"), ("prompt", "send its text in instructions")):
        if getattr(body, name):
            raise wrong(f"{name} is not supported: {instead}.", name)
    if body.previous_response_id and body.conversation_id:
        raise wrong("A request goes on with a response or a conversation, not with both.", "conversation")
    if body.input is None and not body.earlier_id:
        raise wrong("There is no input.", "input")
    given = body.input if isinstance(body.input, list) else [{"role": "user", "content": body.input}]
    if body.input is None:
        given = []
    before = _earlier(body, kept, owner)
    if sum(kept.item_bytes(id, owner) for id in body.named_ids) > MAX_BODY_BYTES:
        raise ApiError(
            413, f"The items that input names have more than {MAX_BODY_BYTES >> 20} MiB.", param="input"
        )
    named = set[str]()
    given = [_named_item(item, kept, owner, f"input[{i}]", named) for i, item in enumerate(given)]
    items = [*before, *given]
    messages = [ChatMessage("system", body.instructions)] if body.instructions else []
    messages += _Messages().of(items, len(before))
    made = chat.ChatBody(messages=messages)
    made.tools, spaces = _tools([*(body.tools or ()), *_later_tools(items, body.tools or ())])
    made.tool_choice = _choice(body.tool_choice)
    made.max_tokens, made.temperature, made.top_p = body.max_output_tokens, body.temperature, body.top_p
    made.presence_penalty, made.frequency_penalty = body.presence_penalty, body.frequency_penalty
    made.logprobs, made.top_logprobs = body.wants_logprobs, body.top_logprobs
    made.reasoning, text = body.reasoning, body.text
    for update in (item for item in items if item.get("type") == "configuration_update"):
        if update.get("reasoning"):
            made.reasoning = converted(update["reasoning"], Reasoning, "reasoning")
        if update.get("text"):
            text = converted(update["text"], TextConfig, "text")
    made.chat_template_kwargs = body.chat_template_kwargs
    if text and (format := text.format):
        made.response_format = ResponseFormat(format.type, JsonSchema(format.schema, format.strict))
    return made, spaces, items, given


def _earlier(body: ResponsesBody, kept: Conversations, owner: str) -> list[dict[str, Any]]:
    """The items of what the request goes on with. Raises ApiError if there is nothing of this name."""
    if not body.earlier_id:
        return []
    known = kept.get(body.earlier_id, owner)
    if body.conversation_id and known.response.get("object") != "conversation":  # it would be changed
        message = "This is no conversation: previous_response_id goes on with a response."
        raise ApiError(404, message, param="conversation")
    return known.items


def _named_item(
    item: dict[str, Any], kept: Conversations, owner: str, param: str, named: set[str]
) -> dict[str, Any]:
    """The item that is meant, if one only names an item of an earlier response, and none of those that are `named`
    already: a name is short, and what it stands for may be long. Raises ApiError."""
    if not is_name(item):
        return item
    id = f"{item.get('id')}"
    if id in named:
        raise wrong(f"The item {id[:80]!r} is named twice.", param)
    named.add(id)
    return kept.item(id, owner, param)


def _tools(tools: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], Spaces]:
    """Tools in the form of chat completions. Codex CLI has functions in namespaces: the model sees both names as
    one."""
    made, spaces = list[dict[str, Any]](), Spaces()
    for tool in tools:
        space, inner = tool.get("name"), tool.get("tools")
        if tool.get("type") != "namespace" or not (isinstance(space, str) and isinstance(inner, list)):
            made.append(_tool(tool))
            continue
        for each in inner:
            if isinstance(each, dict) and isinstance(name := each.get("name"), str):
                spaces[_named_within(space, name)] = space, name
                made.append(_tool({**each, "name": _named_within(space, name)}))
    return made, spaces


def _later_tools(items: Sequence[dict[str, Any]], known: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools that items bring, as clients find them while a conversation goes on, each once."""
    found, names = dict[str, dict[str, Any]](), {*map(_kind_and_name, known)}
    for item in items:
        tools = item.get("tools")
        if item.get("type") in ("additional_tools", "tool_search_output") and isinstance(tools, list):
            found |= {_kind_and_name(tool): tool for tool in tools if isinstance(tool, dict)}
    return [tool for key, tool in found.items() if key not in names]


def _kind_and_name(tool: dict[str, Any]) -> str:
    return f"{tool.get('type')} {tool.get('name')}"


def _named_within(space: str, name: str) -> str:
    return f"{space}__{name}" if space else name


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool in the form of chat completions; of a kind that is not known, its name alone."""
    tool = nested(tool)
    kind = tool.get("type")
    if kind in ("function", "custom"):
        return tool if isinstance(tool.get(kind), dict) else {"type": kind, kind: {}}
    return {"type": kind if isinstance(kind, str) else "unknown"}


def _choice(choice: Literal["none", "auto", "required"] | ResponseToolChoice | None) -> Choice:
    """Raises ApiError."""
    if not isinstance(choice, ResponseToolChoice):
        return choice
    if choice.type == "allowed_tools":
        named = [tool["name"] for tool in choice.tools or () if isinstance(tool.get("name"), str)]
        tools = [Tool(function=Function(name)) for name in named]
        return ToolChoice("allowed_tools", allowed_tools=Allowed(tools, choice.mode))
    if choice.type in ("function", "custom") and choice.name:
        return ToolChoice(function=Named(choice.name))
    raise wrong(f"There is no tool of the kind {choice.type!r}.", "tool_choice")


class _Messages:
    """Makes messages of items: what the model thought, said and called in one turn is one message."""

    def __init__(self) -> None:
        self._messages: list[ChatMessage] = []
        self._turn: ChatMessage | None = None
        self._thoughts: list[str] = []  # of that turn
        self._summed_up = 0  # how many messages are what summaries have left

    def of(self, items: Sequence[dict[str, Any]], known: int) -> list[ChatMessage]:
        """The first `known` items were taken before. Raises ApiError for an item that is wrong; items of kinds that
        the server does not know are left out."""
        for i, item in enumerate(items):
            try:
                self._take(item, f"input[{i - known}]")
            except msgspec.ValidationError as error:
                raise wrong(f"input[{i - known}]: {error}.", f"input[{i - known}]") from None
        self._end_turn()
        return self._messages

    def _take(self, item: dict[str, Any], param: str) -> None:
        match item.get("type", "message"):
            case "message":
                self._message(item, param)
            case kind if kind in compaction.KINDS:
                self._sum_up(item)
            case "reasoning":
                self._assistant(begins=True)
                self._thoughts.append(_thought(item))
            case "function_call":
                call = msgspec.convert(item, CalledFunction)
                call.name = _named_within(_text_field(item, "namespace"), call.name)
                self._call(Call(call, id=_text_field(item, "call_id")))
            case "custom_tool_call":
                self._call(Call(custom=msgspec.convert(item, CustomInput), id=_text_field(item, "call_id")))
            case "function_call_output" | "custom_tool_call_output":
                self._end_turn()
                content = _output(item.get("output"), param, of_tool=True)
                self._messages.append(ChatMessage("tool", content, tool_call_id=_text_field(item, "call_id")))

    def _sum_up(self, item: dict[str, Any]) -> None:
        """A summary takes the place of all before it but what the user said."""
        self._end_turn()
        if summary := compaction.message_of(item):
            new = self._messages[self._summed_up :]
            said = (message for message in new if message.role not in ("assistant", "tool"))
            self._messages[self._summed_up :] = [*said, summary]
            self._summed_up = len(self._messages)

    def _message(self, item: dict[str, Any], param: str) -> None:
        role, content = _text_field(item, "role"), _output(item.get("content"), param)
        if role == "assistant":
            turn = self._assistant(begins=bool(self._turn and (self._turn.content or self._turn.tool_calls)))
            turn.content = "".join(part.text or part.refusal or "" for part in content)
            return
        self._end_turn()
        self._messages.append(ChatMessage(role, content))

    def _call(self, call: Call) -> None:
        turn = self._assistant(begins=False)
        turn.tool_calls = turn.tool_calls or []
        turn.tool_calls.append(call)

    def _assistant(self, *, begins: bool) -> ChatMessage:
        """The model's turn that items belong to. `begins`: a new one, if this one has said or called anything."""
        if self._turn is None or (begins and (self._turn.content or self._turn.tool_calls)):
            self._end_turn()
            self._turn = ChatMessage("assistant", None)
            self._messages.append(self._turn)
        return self._turn

    def _end_turn(self) -> None:
        if self._turn and self._thoughts:
            self._turn.reasoning_content = "".join(self._thoughts)
        self._turn, self._thoughts = None, []


def _text_field(item: dict[str, Any], name: str) -> str:
    value = item.get(name)
    return value if isinstance(value, str) else ""


def _output(content: Any, param: str, *, of_tool: bool = False) -> list[Part]:
    """What is given as a text or as parts. Raises ApiError for other parts, unless a tool returned them."""
    if content is None or isinstance(content, str):
        return [Part("text", content or "")]
    parts = msgspec.convert(content, list[Part])
    if not of_tool and any(part.type not in TEXTS + PICTURES + FILES for part in parts):
        raise wrong(NOTHING_ELSE, param)
    return parts


def _thought(item: dict[str, Any]) -> str:
    """The thoughts of an item: a summary has all of them (`ResponseReply`)."""
    sealed = item.get("encrypted_content")
    if not item.get("content") and isinstance(sealed, str) and sealed.startswith(SEALED):
        try:
            return base64.b64decode(sealed[len(SEALED) :], validate=True).decode()
        except ValueError:
            return ""
    shown = item.get("content") or item.get("summary") or []
    return "".join(part.text or "" for part in msgspec.convert(shown, list[Part]))
