"""Whether a model is to think before it answers, and how much: each provider of models has fields of its own for that,
and clients send those of the one that they were made for."""

from typing import Any, Literal

import msgspec

from app.serve.protocols.common.requests import Body
from engine.protocol.events import Effort

ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
_EFFORTS: dict[Any, Effort] = {
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}
_THOUGHTLESS = ("none", "minimal")


class Reasoning(msgspec.Struct):
    """OpenRouter's, and that of OpenAI's responses."""

    effort: ReasoningEffort | None = None
    summary: str | None = None
    enabled: bool | None = None
    max_tokens: int | None = None


class ThinkingKind(msgspec.Struct):
    """`type` is "enabled", "disabled" or "adaptive"."""

    type: str = ""


class ThinkingBody(Body, kw_only=True):
    """The fields of a request that say so."""

    reasoning_effort: ReasoningEffort | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM, llama-server
    reasoning: Reasoning | None = None
    enable_thinking: bool | None = None  # Qwen's own service
    thinking: bool | ThinkingKind | None = None  # DeepSeek, GLM
    think: bool | str | None = None  # Ollama
    thinking_budget: int | None = None  # Qwen's own service
    thinking_budget_tokens: int | None = None  # llama-server
    reasoning_budget: int | None = None


def wanted(fields: ThinkingBody, default: bool) -> tuple[bool, Effort | None]:
    """Whether to think, and how much (None: as the template has it). What is said outright counts before an effort."""
    variables, reasoning = fields.chat_template_kwargs or {}, fields.reasoning or Reasoning()
    kind = (
        fields.thinking.type != "disabled" if isinstance(fields.thinking, ThinkingKind) else fields.thinking
    )
    budgets = (
        fields.thinking_budget,
        fields.thinking_budget_tokens,
        fields.reasoning_budget,
        reasoning.max_tokens,
    )
    said = (
        variables.get("enable_thinking"),
        variables.get("thinking"),
        fields.enable_thinking,
        kind,
        fields.think,
        reasoning.enabled,
        False if 0 in budgets else None,
    )
    efforts = (fields.reasoning_effort, reasoning.effort, fields.think, variables.get("reasoning_effort"))
    effort = next((each for each in efforts if isinstance(each, str)), None)
    thinks = next((each for each in said if isinstance(each, bool)), default and effort not in _THOUGHTLESS)
    return thinks, _EFFORTS.get(effort)
