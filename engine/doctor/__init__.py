"""What a machine has that the engine needs, and what it lacks: findings, each with what to do about it.

`host`, `jetson` and `nvidia` read files, below a `root` that a test can put in the place of a machine, and open no
device. `trials` starts processes of their own that do (`trial`).
"""

from __future__ import annotations

from typing import Literal

import msgspec

State = Literal["good", "note", "fair", "bad"]
"""good: as it should be; note: a fact; fair: works, could be better; bad: something does not work for it."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """`topic` is a word or two, `text` what is, `advice` what to do about it ("" for nothing)."""

    topic: str
    state: State
    text: str
    advice: str = ""


class Section(msgspec.Struct, frozen=True, kw_only=True):
    title: str
    findings: list[Finding]


def good(topic: str, text: str) -> Finding:
    return Finding(topic=topic, state="good", text=text)


def note(topic: str, text: str, advice: str = "") -> Finding:
    return Finding(topic=topic, state="note", text=text, advice=advice)


def fair(topic: str, text: str, advice: str) -> Finding:
    return Finding(topic=topic, state="fair", text=text, advice=advice)


def bad(topic: str, text: str, advice: str) -> Finding:
    return Finding(topic=topic, state="bad", text=text, advice=advice)
