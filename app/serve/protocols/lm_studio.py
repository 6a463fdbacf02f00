"""The models in the forms of LM Studio's own paths (https://lmstudio.ai/docs/developer/rest), which editors ask for the
context of a model and what it can."""

import msgspec

from app.serve.model_pool import ModelPool
from app.serve.protocols.common.reply import Json
from app.serve.protocols.models import OWNER, capabilities
from app.serve.service import Service


class LoadBody(msgspec.Struct):
    model: str


def loaded(body: LoadBody, service: Service) -> Json:
    """`/api/v1/models/load`. A model that is not there yet is loaded when it is asked."""
    kind = "llm" if "completion" in capabilities(service) else "embedding"
    return {"type": kind, "instance_id": service.model, "load_time_seconds": 0.0, "status": "loaded"}


def listed(pool: ModelPool) -> Json:
    """`/api/v0/models`. If a model's file has not been read, only its name is known."""
    known = {service.model: model(service) for service in pool.known}
    data = [known.get(name) or _named(name) | {"type": "llm", "state": "not-loaded"} for name in pool.names]
    return {"object": "list", "data": data}


def model(service: Service) -> Json:
    """`/api/v0/models/{id}`. What is only known once it has been loaded is left out before."""
    can, ready = capabilities(service), service.ready
    told = {"tools": "tool_use", "vision": "vision"}
    described: Json = _named(service.model) | {
        "type": "vlm" if "vision" in can else "llm" if "completion" in can else "embeddings",
        "arch": service.file.architecture,
        "state": "loaded" if ready else "not-loaded",
        "capabilities": [told[each] for each in can if each in told],
    }
    if ready:
        described |= {
            "quantization": ready.model.quantization,
            "max_context_length": ready.model.trained_context,
            "loaded_context_length": ready.context_length,
        }
    return described


def _named(name: str) -> Json:
    return {"id": name, "object": "model", "publisher": OWNER, "compatibility_type": "gguf"}


def newer_listed(pool: ModelPool) -> Json:
    """`/api/v1/models`, which has other names for the same."""
    known = {service.model: service for service in pool.known}
    return {"models": [_newer(name, known.get(name)) for name in pool.names]}


def _newer(name: str, service: Service | None) -> Json:
    can = capabilities(service) if service else ["completion"]
    described: Json = {
        "type": "llm" if "completion" in can else "embedding",
        "publisher": OWNER,
        "key": name,
        "display_name": name,
        "format": "gguf",
        "loaded_instances": [],
        "capabilities": {"vision": "vision" in can, "trained_for_tool_use": "tools" in can},
    }
    if service and (ready := service.ready):
        info = ready.model
        bits = round(8 * info.file_bytes / max(1, info.parameters), 2)
        described |= {
            "architecture": service.file.architecture,
            "quantization": {"name": info.quantization, "bits_per_weight": bits},
            "size_bytes": info.file_bytes,
            "params_string": f"{info.parameters / 1e9:.1f}B",
            "max_context_length": info.trained_context,
            "loaded_instances": [{"id": name, "config": {"context_length": ready.context_length}}],
        }
    return described
