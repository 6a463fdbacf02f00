"""The models, in the forms of OpenAI, Anthropic, llama-server, vLLM and OpenRouter at once."""

from datetime import UTC, datetime

from app.serve.protocols.reply import Json
from app.serve.service import Service

OWNER = "orin-chat"
_PARAMETERS = [
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "seed", "max_tokens", "stop", "logit_bias", "logprobs", "top_logprobs", "response_format", "structured_outputs",
]  # fmt: skip


def listed(services: list[Service]) -> Json:
    data = [model(service) for service in services]
    ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
    return {"object": "list", "data": data, "has_more": False} | ends


def model(service: Service) -> Json:
    """A model. What is only known once it has been loaded is left out before."""
    made = datetime.fromtimestamp(service.created, UTC)
    can, parameters = capabilities(service), [*_PARAMETERS]
    parameters += ["tools", "tool_choice"] if "tools" in can else []
    parameters += ["reasoning", "include_reasoning"] if "thinking" in can else []
    described: Json = {
        "id": service.model,
        "object": "model",
        "type": "model",
        "created": service.created,
        "created_at": made.strftime("%Y-%m-%dT%H:%M:%SZ"),
        "owned_by": OWNER,
        "display_name": service.model,
        "lifecycle": "active",
        "capabilities": {
            "tools": _supported("tools" in can),
            "thinking": _supported("thinking" in can),
            "structured_outputs": _supported(True),
            "image_input": _supported(False),
        },
        "architecture": {
            "input_modalities": ["text"],
            "output_modalities": ["text"],
            "modality": "text->text",
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


def _supported(is_so: bool) -> Json:
    return {"supported": is_so}


def capabilities(service: Service) -> list[str]:
    """In Ollama's words."""
    can = ["completion"]
    if service.file.form:
        can.append("tools")
    if service.file.fill_in:
        can.append("insert")
    if service.ready and service.ready.model.thinks:
        can.append("thinking")
    return can
