"""Examines a machine: what the engine needs, what is missing, and how to get it. The result is a list of findings.

`host`, `jetson` and `nvidia` only read files below a `root`; tests pass a folder that looks like a machine.
`backend_checks` opens devices, in child processes that run `checks`.
"""

from typing import Literal

import msgspec

State = Literal["good", "note", "fair", "bad"]
"""good: as it should be; note: a fact; fair: works, could be better; bad: something does not work."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """`topic` is a word or two, `text` what was found, `advice` what to do about it ("" for nothing)."""

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
