"""The models, in the forms of OpenAI, Anthropic, llama-server, vLLM and OpenRouter at once."""

from collections.abc import Sequence
from datetime import UTC, datetime

from app.serve.model_pool import ModelPool
from app.serve.protocols.common.reply import Json
from app.serve.service import Service

OWNER = "orin-chat"
_PARAMETERS = [
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "seed", "max_tokens", "stop", "logit_bias", "logprobs", "top_logprobs", "response_format", "structured_outputs",
]  # fmt: skip


def listed(pool: ModelPool) -> Json:
    """The list of models: only the name of a model whose file has not been read."""
    known = {service.model: model(service) for service in pool.known}
    data = [known.get(name) or _named(name, pool.default.created) for name in pool.names]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]}
    return {"object": "list", "data": data, "has_more": False} | ends


def _named(name: str, created: int) -> Json:
    at = datetime.fromtimestamp(created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "id": name,
        "object": "model",
        "type": "model",
        "created": created,
        "created_at": at,
        "owned_by": OWNER,
        "display_name": name,
        "lifecycle": "active",
    }


def model(service: Service) -> Json:
    """A model. What is only known once it has been loaded is left out before."""
    can, parameters = capabilities(service), [*_PARAMETERS]
    takes = ["text", "image"] if "vision" in can else ["text"]
    parameters += ["tools", "tool_choice"] if "tools" in can else []
    parameters += ["reasoning", "include_reasoning"] if "thinking" in can else []
    described: Json = {
        **_named(service.model, service.created),
        "capabilities": _as_anthropic_has_it(can, bool(service.ready and service.ready.model.takes_effort)),
        "architecture": {
            "input_modalities": takes,
            "output_modalities": ["text"],
            "modality": f"{'+'.join(takes)}->text",
        },
        "supported_parameters": parameters,
    }
    if ready := service.ready:
        info = ready.model
        described |= {
            "context_length": ready.context_length,
            "max_model_len": ready.context_length,
            "max_input_tokens": ready.context_length,
            "max_tokens": ready.context_length,
            "meta": {
                "n_ctx": ready.context_length,
                "n_ctx_train": info.trained_context,
                "n_vocab": service.file.tokenizer.vocab_size,
                "n_params": info.parameters,
                "size": info.file_bytes,
                "ftype": info.quantization,
            },
        }
    return described


def _as_anthropic_has_it(can: Sequence[str], takes_effort: bool) -> Json:
    """Clients with strict types need all of these."""
    thinks, effort = _supported("thinking" in can), _supported(takes_effort)
    elsewhere = {name: _supported(False) for name in ("batch", "citations", "code_execution", "pdf_input")}
    tools = {name: _supported(False) for name in ("code_execution", "web_search")}
    return {
        **elsewhere,
        "context_management": _supported(False),
        "effort": effort | dict.fromkeys(("low", "medium", "high", "max"), effort),
        "image_input": _supported("vision" in can),
        "server_tools": _supported(False) | tools,
        "structured_outputs": _supported(True),
        "thinking": thinks
        | {"types": dict.fromkeys(("adaptive", "between_tools", "disabled", "enabled"), thinks)},
        "tools": _supported("tools" in can),
    }


def _supported(is_so: bool) -> Json:
    return {"supported": is_so}


def capabilities(service: Service) -> list[str]:
    """What a model can do, in Ollama's words."""
    if service.file.pooling:
        return ["embedding"] if service.file.pooling != "rank" else []
    can = ["completion"]
    if service.file.form:
        can.append("tools")
    if service.file.fill_in:
        can.append("insert")
    if service.ready and service.ready.model.thinks:
        can.append("thinking")
    if service.ready and service.ready.model.sees:
        can.append("vision")
    return can
