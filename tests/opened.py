"""A model file, opened."""

from pathlib import Path

from engine.description.architectures import read_spec
from engine.formats.gguf import GGUF
from engine.loading.weights import Weights


def opened(path: Path) -> Weights:
    """Its weights and description. The file may be deleted then."""
    file = GGUF(path)
    return Weights(file, read_spec(file), lambda _: None)
