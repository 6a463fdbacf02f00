"""The chat as it looks. After a change that is meant: pytest tests/app/test_snapshots.py --snapshot-update"""

import pytest

from tests.app.scenes import NOW, SCENES
from tests.thorough import rarely

# What they show, others show in another size or in other colours, or tests/app and tests/widgets read their lines.
ALIKE = (
    "answering",
    "comparison",
    "comparison-absent",
    "comparison-narrow",
    "dashboard-experts",
    "dashboard-light",
    "dashboard-low",
    "dashboard-narrow",
    "edit-preset",
    "full-context",
    "loading",
    "past-chats",
    "presets",
    "reply-light",
    "reply-narrow",
    "system",
    "system-tiny",
    "whole-experts",
    "whole-machine",
    "whole-kernels",
    "whole-throughput",
)


@pytest.mark.parametrize("name", [rarely(name) if name in ALIKE else name for name in SCENES])
def test_it_looks_as_it_did(name, snap_compare, monkeypatch):
    monkeypatch.setattr("app.screens.pages.chats.time.time", NOW.timestamp)
    scene = SCENES[name]
    assert snap_compare(scene.app(), terminal_size=scene.size, run_before=scene.play)
