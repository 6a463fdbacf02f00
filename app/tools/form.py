"""How the model of a chat writes calls of tools."""

from functools import lru_cache
from pathlib import Path

from engine.formats.tools.forms import HERMES, ToolForm


def form_of(model: Path | None) -> ToolForm | None:
    """How the model of a file does; None if its context is too short for tools. `model` None is the server of
    --engine: its calls are written as Hermes does. Raises ModelFileError. Takes up to a second for the first time."""
    return HERMES if model is None else _read(model)


@lru_cache(4)
def _read(model: Path) -> ToolForm | None:
    from engine.formats.gguf import GGUF  # with numpy, which the screen's start does not wait for
    from engine.formats.templates.file_templates import tool_form

    with GGUF(model) as file:
        return tool_form(file)
