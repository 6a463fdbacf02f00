"""Models in words and as JSON, for the commands that list, download and describe them."""

from pathlib import Path
from typing import Any

from app.chat.model_list import Entry
from engine.catalog.names import hub_hint
from widgets.text import as_bytes

UNKNOWN = "–"


def meant(name: str) -> str:
    """What to do about a model's name that is a path where nothing is."""
    return hub_hint(name) or "Check the path for a typing error."


def encoder_text(encoder: Path) -> str:
    """The encoder of pictures that belongs to a model."""
    return f"{encoder.name} ({as_bytes(encoder.stat().st_size)}): {encoder}"


def as_json(entry: Entry) -> dict[str, Any]:
    """A model as `--json` writes it; null where something is not known."""
    return {
        "name": entry.name,
        "source": str(entry.source),
        "path": None if entry.path is None else str(entry.path),
        "size_bytes": entry.size_bytes or None,
        "quantization": entry.quantization or None,
        "architecture": entry.architecture or None,
        "parameters": entry.parameters or None,
        "active_parameters": entry.active_parameters or None,
        "context_length": entry.context_length or None,
        "used_at": entry.record.used_at if entry.record else None,
        "tokens_per_s": entry.tokens_per_s,
        "backend": (entry.record.backend or None) if entry.record else None,
        "problem": entry.problem or None,
        "mmproj": None if entry.encoder is None else str(entry.encoder),
    }
