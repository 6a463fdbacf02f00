"""Blocks of the KV cache on disk that another process changes while they are read and written."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from engine.backends import prepare
from engine.protocol.events import EngineOptions, Generate, Sampling, Token, TokenIds
from engine.runtime.prefix_folder import folder
from tests import environment, generated_model
from tests.paths import ROOT
from tests.soak.child import follow, report
from tests.soak.counts import Counts

_CONTEXT, _TEXTS, _PAUSE_S = 4096, 4, 0.01


def run(tries: int, number: int = 0) -> Counts:
    """Each reply is that of the model which reads nothing from the disk."""
    counts = Counts("blocks on disk that another process changes")
    follow(counts, "tests.soak.changed_blocks", number, tries)
    return counts


def spoil(place: Path, number: int) -> None:
    """Changes, cuts, swaps and deletes files, until it is killed."""
    choose = random.Random(number)
    while True:
        time.sleep(choose.random() * _PAUSE_S)
        with contextlib.suppress(OSError, IndexError):
            path, other = (choose.choice(sorted(place.iterdir())) for _ in range(2))
            match choose.randrange(7):
                case 0:
                    path.unlink()
                case 1:
                    os.truncate(path, choose.randrange(path.stat().st_size + 1))
                case 2:
                    with path.open("r+b") as file:
                        file.seek(choose.randrange(path.stat().st_size))
                        file.write(choose.randbytes(choose.choice((1, 100))))
                case 3:
                    shutil.copyfile(other, path)
                case 4:
                    other.replace(path)
                case 5:
                    path.unlink()
                    path.mkdir()
                case _:
                    with path.open("ab") as file:
                        file.write(choose.randbytes(1000))
            for left in place.iterdir():
                if left.is_dir() and choose.random() < 0.3:
                    left.rmdir()


def _answer(model: Any, ids: tuple[int, ...], **request: Any) -> tuple[list[int], int]:
    said: list[int] = []
    take = lambda event: said.append(event.id) if isinstance(event, Token) else None
    asked = Generate(
        request_id=1,
        prompt=TokenIds(ids=ids),
        sampling=Sampling(temperature=0),
        max_tokens=6,
        ignore_eos=True,
        **request,
    )
    end = model.generate(asked, take, lambda: False)
    return said, end.cached_n


def main(number: int, tries: int) -> None:
    environment.enter()
    prepare(EngineOptions(model_path="", backend="CPU"))
    from engine.model.text_model import TextModel  # tinygrad reads the environment when it is imported

    with tempfile.TemporaryDirectory() as place:
        path = generated_model.write(
            Path(place, "model.gguf"), architecture="qwen3", layers=1, heads=2, kv_heads=1, context=_CONTEXT
        )
        options = EngineOptions(
            model_path=str(path), context_length=_CONTEXT, kv="q8_0", prefix_cache_bytes=1 << 30
        )
        model, choose = TextModel(options, lambda _: None), random.Random(number)
        texts = [
            tuple(choose.randrange(200) for _ in range(choose.randint(2700, 3500))) for _ in range(_TEXTS)
        ]
        wanted = [_answer(model, text, fresh=True)[0] for text in texts]
        command = [sys.executable, "-c", _SPOILER, str(folder()), str(number)]
        with subprocess.Popen(command, cwd=ROOT) as spoiler:
            try:
                n = 0
                for i in range(tries):
                    n = (n + choose.randint(1, _TEXTS - 1)) % _TEXTS  # the cache holds one
                    report(i, partial(_try, model, texts[n], wanted[n]))
            finally:
                spoiler.kill()


_SPOILER = (
    "import sys; from pathlib import Path; from tests.soak.changed_blocks import spoil; "
    "spoil(Path(sys.argv[1]), int(sys.argv[2]))"
)


def _try(model: Any, text: tuple[int, ...], wanted: list[int]) -> str:
    said, cached = _answer(model, text)
    assert said == wanted, "another text"
    model.scheduler.keep(lambda: False)
    return "read whole" if cached > 2500 else "read in part" if cached >= 512 else "computed"


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
