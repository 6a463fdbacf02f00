"""What llama-server tells of itself (llama.cpp, tools/server/README.md): properties, slots, and texts of chats."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from app.serve.errors import ApiError, unavailable, wrong
from app.serve.protocols import chat
from app.serve.protocols.common.reply import Json
from app.serve.protocols.llama_settings import defaults
from app.serve.protocols.models import capabilities
from app.serve.service import Service


def props(service: Service) -> Json:
    """What llama-server tells of itself and its model (GET /props)."""
    file, can = service.file, capabilities(service)
    return {
        "default_generation_settings": {
            "n_ctx": service.context_length,
            "params": defaults(service.sampling),
        },
        "total_slots": service.parallel,
        "model_alias": service.model,
        "model_path": service.model,
        "model_ftype": service.ready.model.quantization if service.ready else "",
        "modalities": {"vision": "vision" in can, "audio": False, "video": False},
        "endpoint_slots": True,
        "endpoint_props": False,
        "endpoint_metrics": True,
        "chat_template": file.templates.chat,
        "chat_template_caps": {
            "supports_tools": "tools" in can,
            "supports_tool_calls": "tools" in can,
            "supports_parallel_tool_calls": "tools" in can,
            "supports_system_role": True,
        },
        "bos_token": file.tokenizer.text(file.tokenizer.bos_id),
        "eos_token": file.tokenizer.text(file.tokenizer.eos_id),
        "build_info": "orin-chat",
        "is_sleeping": False,
    }


def slots(service: Service, *, must_be_free: bool) -> list[Json]:
    """What each slot does: counts, nothing that is asked or said. Raises ApiError if none is free that must be."""
    at_work = service.slots.slots if service.slots else (None,) * service.parallel
    if must_be_free and service.open >= service.parallel:
        raise unavailable("No slot is free.")
    return [
        {
            "id": i,
            "n_ctx": service.context_length,
            "speculative": False,
            "is_processing": slot is not None,
            "n_prompt_tokens": slot.prompt_n if slot else 0,
            "n_prompt_tokens_processed": slot.prompt_done if slot else 0,
            "next_token": {"n_decoded": slot.predicted_n if slot else 0},
        }
        for i, slot in enumerate(at_work)
    ]


def slot_action(service: Service, slot: int, action: str) -> Json:
    """Slots keep nothing of their own: what prompts begin with is kept for all, as long as there is room, and on disk.
    So there is nothing to erase. Raises ApiError for what else llama-server does with slots."""
    if not 0 <= slot < service.parallel:
        raise wrong(f"Slots are from 0 to {service.parallel - 1}.", "id_slot")
    match action:
        case "erase":
            return {"id_slot": slot, "n_erased": 0}
        case "save" | "restore":
            message = (
                "This server keeps the beginnings of prompts by itself, in memory and on disk, for all slots."
            )
            raise ApiError(501, message, "not_supported_error", code=501)
    raise wrong("The action of a slot is erase.", "action")


def applied_template(body: chat.ChatBody, service: Service) -> Json:
    """The text that the model gets. May take as long as it is. Raises ApiError."""
    ids = [id for id in chat.encoded(body, service).ids if id >= 0]  # without those of pictures
    return {"prompt": service.file.tokenizer.decode(ids)}


def counted(body: chat.ChatBody, service: Service) -> Json:
    """How many tokens a chat has. May take as long as it is. Raises ApiError."""
    n = len(chat.encoded(body, service).ids)
    return {"object": "response.input_tokens", "input_tokens": n}


class Adapter(msgspec.Struct):
    """How much an adapter is asked to count."""

    id: int
    scale: float


def adapters(lora: str) -> list[Json]:
    """The adapters of a server with these options (`EngineOptions.lora`)."""
    named = (name.rpartition(":") for name in lora.split(",") if name)
    return [
        {"id": i, "path": Path(path).name, "scale": float(scale)} for i, (path, _, scale) in enumerate(named)
    ]


def check_adapters(lora: str, asked: Sequence[Adapter]) -> None:
    """Raises ApiError unless what is asked for is so: adapters are part of the weights. What is left out is 0."""
    scales = {adapter["id"]: adapter["scale"] for adapter in adapters(lora)}
    if scales != dict.fromkeys(scales, 0.0) | {adapter.id: adapter.scale for adapter in asked}:
        what = (
            "are those that it was started with (--lora FILE:SCALE)"
            if lora
            else "have to be named at its start"
        )
        raise ApiError(501, f"The LoRA adapters of this server {what}.", "not_supported_error", code=501)
