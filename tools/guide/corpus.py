r"""Writes the guide's training data: its tokenizer, conversations as tokens, and the questions that judge it.

    python -m tools.guide.corpus build/guide

The same call writes the same files, and `train.py` needs nothing else. To teach a trained guide new facts or new ways
to ask, write a smaller refresher. Training on it takes less than an hour on a CPU:

    python -m tools.guide.corpus build/refresher --conversations 5000 --singles 40000 --copies 40000 \
        --tokenizer tokenizer.json
"""

import argparse
import json
import multiprocessing
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import tokenizers

from tools.guide import facts
from tools.guide.bpe import trained
from tools.guide.conversations import Conversations
from tools.guide.questions import DEVELOPMENT, HELD_OUT, excluded_turns
from tools.guide.shape import SHAPE
from tools.guide.template import Message, rendered

CONVERSATIONS = 1_000_000
SINGLE_TOKENS = 12
"""How much of the answer to a single question a refresher contains: the first words already tell the answers apart."""
SHARDS = 16
KNOWN = "known.json"
"""A file: for each fact about the program, by its id, the texts that the guide must say."""


@cache
def excluded() -> frozenset[str]:
    """The questions that must not be in the training data, normalized."""
    return frozenset(excluded_turns((*HELD_OUT, *DEVELOPMENT), facts.load().grammar["noise"]["dropped"]))


def conversations(count: int, seed: str, singles: int = 0, copies: int = 0) -> Iterator[list[Message]]:
    """`count` conversations, then `copies` questions with names to copy, then `singles` single questions, both with
    their answers."""
    source = Conversations(facts.load(), random.Random(seed), excluded())
    yield from (source.draw() for _ in range(count))
    yield from (source.copied() for _ in range(copies))
    yield from (source.single() for _ in range(singles))


def _shard(task: tuple[str, int, int, int, str]) -> list[np.ndarray]:
    """One array of tokens, uint16 (tokens,), for each of `conversations`; the single questions are cut short."""
    seed, count, singles, copies, tokenizer_json = task
    bpe = tokenizers.Tokenizer.from_str(tokenizer_json)
    texts = [rendered(messages) for messages in conversations(count, seed, singles, copies)]
    tokens = [
        np.array(encoding.ids, np.uint16) for encoding in bpe.encode_batch(texts, add_special_tokens=False)
    ]
    start = bpe.token_to_id("<|im_start|>")
    header = len(bpe.encode("assistant\n", add_special_tokens=False).ids)
    for i, ids in enumerate(tokens[count + copies :], count + copies):
        tokens[i] = ids[: int(np.flatnonzero(ids == start)[-1]) + 1 + header + SINGLE_TOKENS]
    return tokens


def write(
    folder: Path,
    count: int = CONVERSATIONS,
    singles: int = 0,
    copies: int = 0,
    tokenizer: Path | None = None,
) -> None:
    """Writes tokenizer.json (a new one, or `tokenizer`), train.npz with `ids` uint16 (tokens,) and `lengths` int32
    (conversations,), questions.json with the development and held-out questions, and KNOWN."""
    folder.mkdir(parents=True, exist_ok=True)
    if tokenizer:
        bpe = tokenizers.Tokenizer.from_file(str(tokenizer))
    else:
        bpe = trained(
            (m.content for messages in conversations(40_000, "tokenizer") for m in messages), SHAPE.vocab
        )
    (folder / "tokenizer.json").write_text(bpe.to_str(), "utf-8")
    counts = (count // SHARDS, singles // SHARDS, copies // SHARDS)
    tasks = [(f"train {n}", *counts, bpe.to_str()) for n in range(SHARDS)]
    with multiprocessing.get_context("spawn").Pool() as pool:
        parts = [part for shard in pool.map(_shard, tasks) for part in shard]
    fitting = [part[: SHAPE.context] for part in parts]
    lengths = np.array([len(part) for part in fitting], np.int32)
    np.savez(folder / "train.npz", ids=np.concatenate(fitting), lengths=lengths)
    questions = {"development": DEVELOPMENT, "held-out": HELD_OUT}
    text = json.dumps({name: [question._asdict() for question in items] for name, items in questions.items()})
    (folder / "questions.json").write_text(text, "utf-8")
    (folder / KNOWN).write_text(json.dumps(facts.load().snapshot), "utf-8")
    print(
        f"{len(fitting)} conversations, {lengths.sum():,} tokens, {lengths.mean():.0f} each, at most {lengths.max()}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--conversations", type=int, default=CONVERSATIONS)
    parser.add_argument("--singles", type=int, default=0, help="single questions, with shortened answers")
    parser.add_argument("--copies", type=int, default=0, help="questions with names to copy")
    parser.add_argument("--tokenizer", type=Path, help="the tokenizer.json of the guide to teach more")
    arguments = parser.parse_args()
    write(arguments.folder, arguments.conversations, arguments.singles, arguments.copies, arguments.tokenizer)
