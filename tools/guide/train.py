"""Trains the guide on the output of corpus.py. It needs PyTorch, which nothing else in this project needs, and one GPU
for some minutes. A CPU is enough for a try.

    python -m tools.guide.train build/guide out --seconds 240

It writes weights-*.npz (float16, with the names of GGUF files), report.json, and copies of the corpus's tokenizer.json
and known.json. export.py reads all of these.
"""

from __future__ import annotations

import argparse
import json
import math
import queue
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
from torch import Tensor

from tools.guide.network import Guide, Sequences, greedy
from tools.guide.questions import Question, judge
from tools.guide.shape import SHAPE, Shape
from tools.guide.template import SPECIALS, Message, rendered

PART_BYTES = 15 << 20
USER_WEIGHT = 0.1
"""The weight of the loss on the user's words. The guide's own words have 1."""


class Batches:
    """Endless flat batches of `size` tokens. Each pass through the data shuffles the conversations."""

    def __init__(self, folder: Path, size: int, shape: Shape, seed: int) -> None:
        data = np.load(folder / "train.npz")
        self._ids, lengths = data["ids"], data["lengths"].astype(np.int64)
        self._starts = np.concatenate(([0], lengths.cumsum()))
        bpe = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._weights = _token_weights(self._ids, bpe)
        self._size, self._shape, self._rng = size, shape, np.random.default_rng(seed)
        self._ready: queue.Queue[tuple[Tensor, ...]] = queue.Queue(8)
        self.tokens = len(self._ids)
        threading.Thread(target=self._fill, daemon=True).start()

    def next(self, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """ids, targets, positions int64 (size,), weights float32 (size,), starts int32 (conversations + 1,)."""
        ids, targets, positions, weights, starts = (
            part.to(device, non_blocking=True) for part in self._ready.get()
        )
        return ids, targets, positions, weights, starts

    def _fill(self) -> None:
        for order in self._orders():
            self._ready.put(self._batch(order))

    def _orders(self) -> Iterator[list[int]]:
        taken: list[int] = []
        tokens = 0
        while True:
            for i in self._rng.permutation(len(self._starts) - 1):
                length = int(self._starts[i + 1] - self._starts[i])
                if tokens + length > self._size:
                    yield taken
                    taken, tokens = [], 0
                taken.append(int(i))
                tokens += length

    def _batch(self, order: list[int]) -> tuple[Tensor, ...]:
        spans = [slice(self._starts[i], self._starts[i + 1]) for i in order]
        ids = np.concatenate([self._ids[span] for span in spans]).astype(np.int64)
        weights = np.concatenate([self._weights[span] for span in spans])
        lengths = np.array([span.stop - span.start for span in spans])
        positions = np.concatenate([np.arange(n) for n in lengths])
        pad = self._size - len(ids)  # a last conversation of padding, with weight 0
        ids, positions = (
            np.pad(ids, (0, pad)),
            np.concatenate((positions, np.arange(pad) % self._shape.context)),
        )
        targets, weights = np.roll(ids, -1), np.roll(np.pad(weights, (0, pad)), -1)
        ends = lengths.cumsum()
        weights[ends - 1] = 0
        fixed = self._size // 32 + 2  # every batch has the same shapes
        starts = np.concatenate(([0], ends, np.arange(ends[-1], self._size, self._shape.context)[1:]))
        starts = np.pad(starts, (0, fixed - len(starts)), constant_values=self._size).astype(np.int32)
        parts = (ids, targets, positions, weights.astype(np.float32), starts)
        return tuple(_pinned(torch.from_numpy(part)) for part in parts)


def _pinned(part: Tensor) -> Tensor:
    return part.pin_memory() if torch.cuda.is_available() else part


def _token_weights(ids: np.ndarray, bpe: tokenizers.Tokenizer) -> np.ndarray:
    """Weights of the loss, float32 (tokens,): 1 in the guide's answers and at their end, else USER_WEIGHT."""
    start, end = (bpe.token_to_id(name) for name in SPECIALS[1:])
    header = bpe.encode("assistant\n", add_special_tokens=False).ids
    begins = np.flatnonzero(ids == start)
    answers = np.all(
        [ids[np.minimum(begins + 1 + i, len(ids) - 1)] == id for i, id in enumerate(header)], axis=0
    )
    turn = np.cumsum(ids == start) - 1
    within = np.arange(len(ids)) - begins[turn]
    after_end = np.concatenate(([False], ids[:-1] == end))
    return np.where(answers[turn] & (within > len(header)) & ~after_end, 1.0, USER_WEIGHT).astype(np.float32)


def train(
    guide: Guide,
    batches: Batches,
    out: Path,
    seconds: float,
    *,
    rate: float,
    drop: float,
    steps: int,
    device: str,
) -> dict[str, Any]:
    """Trains for `steps` or `seconds`, whichever ends first, while the learning rate falls to zero. Saves the moving
    average of the weights to `out`, now and then and at the end, and loads it into `guide`. Returns figures."""
    matrices = [p for p in guide.parameters() if p.dim() == 2]
    others = [p for p in guide.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=device == "cuda")
    average = {name: p.detach().clone() for name, p in guide.named_parameters()}

    def loss_of(ids: Tensor, targets: Tensor, positions: Tensor, weights: Tensor, starts: Tensor) -> Tensor:
        vectors = guide(ids, positions, Sequences(starts, guide.shape.context), drop)
        losses = F.cross_entropy(guide.logits(vectors).float(), targets, reduction="none")
        return (losses * weights).sum() / weights.sum()

    step_loss = torch.compile(loss_of) if device == "cuda" else loss_of
    guide.train()
    started = began = time.perf_counter()
    step, shown = 0, []
    while True:
        now = time.perf_counter()
        if step == 5:  # compiled by now
            began = now
        progress = max(step / steps, (now - started) / seconds)
        if progress >= 1:
            break
        warm = min(1.0, (step + 1) / 200)
        for group in optimizer.param_groups:
            group["lr"] = rate * warm * (0.5 + 0.5 * math.cos(math.pi * progress))
        with torch.autocast(device, torch.bfloat16):
            loss = step_loss(*batches.next(device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(guide.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        keep = min(0.998, (step + 1) / (step + 10))
        torch._foreach_lerp_(list(average.values()), [p.detach() for p in guide.parameters()], 1 - keep)
        step += 1
        if step % 200 == 0 or step in (1, 5, 20, 50, 100):
            shown.append((step, round(loss.item(), 4)))
            print(f"step {step}, {time.perf_counter() - started:.0f} s, loss {shown[-1][1]}", flush=True)
        if step % 1000 == 0 or (device == "cpu" and step % 100 == 0):
            save(average, out)
    took = time.perf_counter() - began
    save(average, out)
    load(guide, out)  # it is judged with the saved weights
    guide.eval()
    return {
        "steps": step,
        "seconds": time.perf_counter() - started,
        "tokens_per_s": max(0, step - 5) * batches._size / took,
        "losses": shown,
    }


def answers(guide: Guide, questions: list[Question], bpe: tokenizers.Tokenizer) -> list[str]:
    """The greedy answer to the last turn of each question. The guide also answers the turns before."""
    end = bpe.token_to_id("<|im_end|>")
    chats: list[list[Message]] = [[] for _ in questions]
    for turn in range(max(len(question.turns) for question in questions)):
        now = [i for i, question in enumerate(questions) if turn < len(question.turns)]
        for i in now:
            chats[i].append(Message("user", questions[i].turns[turn]))
        prompts = [
            bpe.encode(rendered(chats[i], add_generation_prompt=True), add_special_tokens=False).ids
            for i in now
        ]
        for i, reply in zip(now, greedy(guide, prompts, end), strict=True):
            chats[i].append(Message("assistant", bpe.decode(reply)))
    return [chat[-1].content for chat in chats]


def save(weights: Mapping[str, Tensor], folder: Path) -> None:
    """Writes weights-0.npz and further parts: float16, with the names of GGUF files."""
    parts: list[dict[str, Any]] = [{}]
    for name, data in weights.items():
        half = data.detach().cpu().half().numpy()
        if sum(kept.nbytes for kept in parts[-1].values()) + half.nbytes > PART_BYTES:
            parts.append({})
        parts[-1][name] = half
    for number, part in enumerate(parts):
        np.savez(folder / f"weights-{number}.npz", **part)


def load(guide: Guide, folder: Path) -> None:
    parameters = dict(guide.named_parameters())
    for path in folder.glob("weights-*.npz"):
        with np.load(path) as weights, torch.no_grad():
            for name in weights.files:
                parameters[name].copy_(torch.from_numpy(weights[name].astype(np.float32)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=240)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--tokens", type=int, default=65_536, help="tokens in a batch")
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--start", type=Path, help="a folder of an earlier training, to continue from")
    for name in ("layers", "dim", "heads", "kv_heads", "ffn"):
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=getattr(SHAPE, name))
    given = parser.parse_args()
    shape = replace(
        SHAPE, **{name: getattr(given, name) for name in ("layers", "dim", "heads", "kv_heads", "ffn")}
    )
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(given.seed)
    torch.set_float32_matmul_precision("high")

    batches = Batches(given.data, given.tokens, shape, given.seed)
    guide = Guide(shape, device)
    if given.start:
        load(guide, given.start)
    print(
        f"{shape}, {shape.weights:,} weights, {batches.tokens:,} tokens of training on {device}", flush=True
    )
    given.out.mkdir(parents=True, exist_ok=True)
    options = {"rate": given.rate, "drop": given.dropout, "steps": given.steps, "device": device}
    figures = train(guide, batches, given.out, given.seconds, **options)
    for name in ("tokenizer.json", "known.json"):
        shutil.copy(given.data / name, given.out)
    bpe = tokenizers.Tokenizer.from_file(str(given.data / "tokenizer.json"))
    report: dict[str, Any] = {"shape": asdict(shape), "figures": figures}
    for name, items in json.loads((given.data / "questions.json").read_text("utf-8")).items():
        questions = [Question(item["topic"], tuple(item["turns"]), item["must"]) for item in items]
        with torch.autocast(device, torch.bfloat16):
            report[name] = judge(questions, answers(guide, questions, bpe))
        print(
            name,
            json.dumps({key: report[name][key] for key in ("right", "of", "looping", "topics")}),
            flush=True,
        )
    (given.out / "report.json").write_text(json.dumps(report, indent=1), "utf-8")
    print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
