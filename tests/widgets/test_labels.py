"""Every label has a sentence, which a tooltip shows."""

import itertools
import re

import pytest
from textual.app import App

from engine.protocol.events import Counter
from tests.app.scenes import COUNTERS
from tests.paths import ROOT
from widgets.dashboard.machine_panel import MachinePanel, MachineState
from widgets.labels import LABELS, label_at


@pytest.mark.parametrize(
    ("line", "under", "label"),
    [
        ("wall 1,234 µs · gap 12", "gap", "gap"),
        ("median 84.1  best 90.0", "90.0", ""),
        ("12.1 GB/s modelled · copy 4,100 measured", "copy", "copy"),
        ("norm, element-wise   12", "element", "norm, element-wise"),
        ("gapless", "gap", ""),
    ],
)
def test_the_label_under_the_mouse(line, under, label):
    labels = {name: text for table in LABELS.values() for name, text in table.items()}
    assert label_at(line, line.index(under), labels) == (f"{label}: {labels[label]}" if label else "")


def test_every_counter_has_a_sentence():
    source = "".join(path.read_text("utf-8") for path in (ROOT / "engine/measure").glob("*.py"))
    names = {*re.findall(r'Counter\(name="([\w ]+)"|_counter\(\s*"([\w ]+)", ', source)}
    names = {*filter(None, itertools.chain(*names))} - {"GPU"} | {"GPU clock", "memory clock"}
    assert len(names) > 14 and names <= LABELS["machine"].keys()


def test_sentences_are_short_and_each_label_is_drawn_somewhere():
    source = "".join(
        path.read_text("utf-8") for path in (ROOT / "widgets").rglob("*.py") if path.name != "labels.py"
    )
    for pane, table in LABELS.items():
        for label, sentence in table.items():
            assert len(sentence) < 120 and sentence[0].isupper() and sentence.endswith(".")
            words = label.partition(" ")[2] if pane == "throughput" and label[1] == " " else label
            # app/screens/performance
            is_elsewhere = words in ("prompt", "engine", "search", "busy, measured")
            assert pane == "machine" or words in source or is_elsewhere, label


async def test_a_pane_shows_the_tooltip_of_a_label():
    class Panes(App):
        def compose(self):
            yield MachinePanel()

    async with Panes().run_test(size=(60, 12)) as pilot:
        panel = pilot.app.query_one(MachinePanel)
        panel.data = MachineState((*COUNTERS, Counter(name="other load", value=3, unit="%", maximum=100)))
        await pilot.pause()
        row = next(y for y, strip in enumerate(panel._strips) if "GPU clock" in strip.text)
        await pilot.hover(MachinePanel, offset=(4 + panel._strips[row].text.index("GPU clock"), row + 1))
        assert panel.tooltip == f"GPU clock: {LABELS['machine']['GPU clock']}"
        await pilot.hover(MachinePanel, offset=(1, 0))
        assert panel.tooltip is None
