"""The fields of a request for a response: https://platform.openai.com/docs/api-reference/responses/create."""

from typing import Any, Literal

import msgspec

from app.serve.protocols.common.requests import MAX_USER, StreamOptions
from app.serve.protocols.common.thinking import Reasoning


class TextFormat(msgspec.Struct):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def shown(self) -> dict[str, Any]:
        """As a response shows it again."""
        if self.type != "json_schema":
            return {"type": self.type}
        return msgspec.structs.asdict(self) | {"name": self.name or "", "strict": bool(self.strict)}


class TextConfig(msgspec.Struct):
    format: TextFormat | None = None


class ResponseToolChoice(msgspec.Struct):
    type: str
    name: str | None = None
    mode: Literal["auto", "required"] = "auto"
    tools: list[dict[str, Any]] | None = None


class ConversationName(msgspec.Struct):
    id: str


class ResponsesBody(msgspec.Struct, kw_only=True):
    input: str | list[dict[str, Any]] | None = None
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto", "required"] | ResponseToolChoice | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    max_tool_calls: int | None = None
    top_logprobs: int | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    include: list[str] | None = None
    truncation: str | None = None
    metadata: dict[str, str] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    background: bool | None = None
    conversation: str | ConversationName | None = None
    prompt: Any = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())

    @property
    def asker(self) -> str:
        """The user for whom a client asks, by its word; "" if it does not say."""
        return (self.safety_identifier or self.user or "")[:MAX_USER]

    @property
    def earlier_id(self) -> str | None:
        """The id of the response or the conversation that it goes on with."""
        return self.previous_response_id or self.conversation_id

    @property
    def conversation_id(self) -> str | None:
        return self.conversation.id if isinstance(self.conversation, ConversationName) else self.conversation

    @property
    def named_ids(self) -> list[str]:
        """The ids of the items of earlier responses that `input` only names."""
        given = self.input if isinstance(self.input, list) else ()
        return [f"{item.get('id')}" for item in given if is_name(item)]

    @property
    def is_stored(self) -> bool:
        return self.store is not False


Spaces = dict[str, tuple[str, str]]
"""Of functions that are in a namespace: that, and their own name, by the name that the model sees."""


def is_name(item: dict[str, Any]) -> bool:
    """Whether an item of an input stands for one of an earlier response."""
    return item.get("type") == "item_reference" or item.keys() == {"id"}
