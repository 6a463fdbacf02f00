"""Models whose weights are damaged and whose heads are whole: numbers that are none, huge ones, tensors elsewhere."""

from __future__ import annotations

import os
import random
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from engine.backends import prepare
from engine.errors import ModelFileError
from engine.protocol.events import EngineOptions, Generate, Sampling, Token, TokenIds
from tests import environment, generated_model
from tests.soak.child import follow, report
from tests.soak.counts import Counts

MODELS = (("llama", "Q8_0"), ("gemma3", "F32"), ("qwen3moe", "Q4_0"), ("gpt-oss", "MXFP4"), ("qwen35", "F16"))
_BAD = {2: (0x7E00, 0x7C00, 0xFC00, 0x7BFF), 4: (0x7FC00000, 0x7F800000, 0xFF800000, 0x7F7FFFFF)}
"""NaN, infinities and the largest number, as half and single precision."""
_OF_A_PROCESS = 100  # models; an engine loads one
_PROMPTS = ((5, 6, 7), (8,) * 40)


def run(tries: int, number: int = 0) -> Counts:
    """A prompt is answered, or refused in a sentence that names a layer, and the process lives on: it loads the next
    model."""
    counts, done = Counts("models with damaged weights"), 0
    while done < tries:
        end = min(tries, done + _OF_A_PROCESS)
        done += follow(counts, "tests.soak.damaged_weights", number, done, end)
    return counts


def _try(path: Path, choose: random.Random) -> str:
    """How it went."""
    architecture, quant = choose.choice(MODELS)
    generated_model.write(path, architecture=architecture, quant=quant, tied=False)
    _damage(path, choose)
    from engine.model.text_model import TextModel  # tinygrad reads the environment when it is imported

    try:
        model = TextModel(EngineOptions(model_path=str(path), context_length=128, parallel=2), lambda _: None)
    except ModelFileError:
        return "refused at once"
    outcomes = {_answer(model, ids) for ids in _PROMPTS for _ in range(2)}
    return "refused" if "refused" in outcomes else outcomes.pop()


def _answer(model: Any, ids: tuple[int, ...]) -> str:
    said: list[int] = []
    report = lambda event: said.append(event.id) if isinstance(event, Token) else None
    sampling = Sampling(temperature=0 if len(ids) > 9 else 0.8)
    request = Generate(
        request_id=1, prompt=TokenIds(ids=ids), sampling=sampling, max_tokens=4, ignore_eos=True
    )
    try:
        model.generate(request, report, lambda: False)
    except ModelFileError as error:
        assert "weights of this model are damaged: the output of " in str(error), error
        return "refused"
    assert len(said) == 4 and min(said) >= 0
    return "answered"


def _damage(path: Path, choose: random.Random) -> None:
    reader = gguf.GGUFReader(path, "r+")
    tensors = [tensor.data.reshape(-1).view(np.uint8) for tensor in reader.tensors]
    sizes = [tensor.n_bytes // tensor.n_elements or 1 for tensor in reader.tensors]
    for _ in range(choose.choice((1, 1, 2, 5))):
        which = choose.randrange(len(tensors))
        data, width = tensors[which], 4 if sizes[which] == 4 else 2
        match choose.randrange(3):
            case 0:  # the tensor's place is moved
                other = tensors[choose.randrange(len(tensors))]
                n = min(data.size, other.size)
                data[:n] = other[:n].copy()
            case 1:
                data[:] = np.frombuffer(choose.randbytes(data.size), np.uint8)
            case _:
                numbers = data[: data.size // width * width].view(f"u{width}")
                for _ in range(choose.choice((1, 10, 300))):
                    numbers[choose.randrange(numbers.size)] = choose.choice(_BAD[width])
    reader.data.flush()


def main(number: int, first: int, end: int) -> None:
    environment.enter()
    os.environ["PARALLEL"] = "0"  # compilers: the kernels are small
    prepare(EngineOptions(model_path="", backend="CPU"))
    with tempfile.TemporaryDirectory() as folder:
        for i in range(first, end):
            report(i, partial(_try, Path(folder, "model.gguf"), random.Random(f"{number} {i}")))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
