"""Models that run all their layers several times, each time with keys and values of their own (Nanbeige 4.2).

Source of the keys and of the norm between: src/models/nanbeige.cpp of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from engine.description.altup import has_streams
from engine.description.checked_file import CheckedFile
from engine.description.hyper_connections import has_connections
from engine.description.spec import Sublayer
from engine.description.sublayers import Vector
from engine.errors import ModelFileError
from engine.formats.gguf import damaged

_MOST = 512  # layers that run: LLAMA_MAX_LAYERS in src/llama-hparams.h


def looped(
    file: CheckedFile, layers: Iterable[Iterable[Sublayer]], norm: Vector
) -> Iterator[Iterable[Sublayer]]:
    """The layers as often as the file says. Unless it leaves that out, `norm`, the last one of the model, is also
    between two times. Raises ModelFileError."""
    times = file.size("num_loops", 1)
    if times == 1:
        yield from layers
        return
    if has_connections(file) or has_streams(file):
        raise ModelFileError(
            f"{file.name} runs its layers {times} times over several residual streams, which orin-chat does not do.",
            "Choose another model.",
        )
    once = [list(layer) for layer in layers]
    if len(once) * times > _MOST:
        raise damaged(file.file.path, f"its layers run {times} times")
    between = None if file.file.get(file.key("skip_loop_final_norm"), bool, False) else norm
    (first, *others), *rest = once
    for time in range(times):
        yield [replace(first, renewed=between) if time else first, *others]
        yield from rest
