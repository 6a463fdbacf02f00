"""Power and clocks while something is measured."""

import pytest

from app.bench.results import Result, power_fields
from engine.devices import power_modes
from engine.devices.power_modes import PowerMode, kept_mode, set_mode
from engine.errors import UsageError
from engine.measure.power import PowerMeter, Samples, merged, with_efficiency
from engine.protocol.events import Counter


def reading(watts=20.0, gpu=1300.0, mode="MAXN", throttled=()):
    return (
        Counter(name="power", value=watts, unit="W"),
        Counter(name="GPU clock", value=gpu, unit="MHz", maximum=1300.0),
        Counter(name="EMC clock", absent="no permission"),
        Counter(name="power mode", text=mode),
        Counter(name="throttled", text=", ".join(throttled) or "no", parts=throttled),
    )


def test_a_meter_reads_at_least_once_and_averages():
    meter = PowerMeter(iter([reading(10), reading(30)]).__next__, each_s=60)
    with meter.running() as first:
        pass
    with meter.running() as second:
        pass
    both = merged([first, second])
    assert (both.watts, both.value("GPU clock"), both.maximum("GPU clock")) == (20, 1300, 1300)
    assert both.value("EMC clock") is None and both.text("power mode") == "MAXN"
    assert both.below_full() == ""
    assert Samples().watts is None and Samples().below_full() == ""


def test_what_keeps_a_board_below_full_speed_is_said():
    low = Samples([reading(gpu=612, mode="MODE_30W", throttled=("gpu-throttle-alert",))])
    assert low.below_full() == (
        "Below full speed: the GPU clock was 612 of 1,300 MHz and the clocks were throttled (gpu-throttle-alert) and "
        "the power mode was MODE_30W, which limits clocks and cores. "
        "For full clocks: sudo nvpmodel -m 0 && sudo jetson_clocks"
    )
    card = (Counter(name="GPU clock", value=1150, unit="MHz", maximum=1300),)
    assert Samples([card]).below_full() == "", "cards choose their clocks"


def test_tokens_a_joule_are_a_counter():
    *_, last = with_efficiency(reading(20), 50)
    assert (last.value, last.unit) == (2.5, "tok/J")
    assert with_efficiency(reading(20), None) == reading(20)
    assert len(with_efficiency(reading(20), 50, is_on_cpu=True)) == 6, "a board's power is also the CPU's"
    card = reading(20)[:2]
    assert with_efficiency(card, 50, is_on_cpu=True) == card


def test_a_saved_result_has_power_and_clocks():
    saved = Result(**power_fields(Samples([reading(20, gpu=612, mode="15W")]), 50))
    assert (saved.watts, saved.tokens_per_joule, saved.power_mode) == (20, 2.5, "15W")
    assert (saved.gpu_mhz, saved.gpu_max_mhz, saved.memory_mhz, saved.throttled) == (612, 1300, None, "")
    assert "612 of 1,300 MHz" in saved.below_full


NVPMODEL = """\
#!/bin/sh
cd "$(dirname "$0")"
case $1 in
-q) echo "NV Power Mode: SOME"; cat mode ;;
-m) [ "$2" = 2 ] && echo "REBOOT required to change to this mode" || echo "$2" >mode ;;
esac
"""


@pytest.fixture
def board(tmp_path, monkeypatch):
    """The folder of a Jetson's files and of its programs."""
    (tmp_path / "etc").mkdir()
    modes = "".join(f"< POWER_MODEL ID={i} NAME={name} >\n" for i, name in enumerate(("MAXN", "15W", "30W")))
    (tmp_path / "etc/nvpmodel.conf").write_text(modes)
    (tmp_path / "mode").write_text("1\n")
    for name, text in (("nvpmodel", NVPMODEL), ("jetson_clocks", '#!/bin/sh\necho "$1" >>"$0.log"')):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    return tmp_path


def test_power_modes_are_set_and_set_back(board):
    modes = power_modes.power_modes(board)
    assert modes == [PowerMode(0, "MAXN"), PowerMode(1, "15W"), PowerMode(2, "30W")]
    with kept_mode(modes, is_root=True):
        assert set_mode(0) == "" and (board / "mode").read_text() == "0\n"
        assert set_mode(2) == "it needs a restart"
    assert (board / "mode").read_text() == "1\n"
    assert (board / "jetson_clocks.log").read_text().split() == ["--store", "--restore"]


def test_power_modes_that_cannot_be_set(board, monkeypatch):
    with pytest.raises(UsageError, match="Only root"), kept_mode([PowerMode(0, "MAXN")], is_root=False):
        pass
    with pytest.raises(UsageError, match="no power modes"), kept_mode([], is_root=True):
        pass
