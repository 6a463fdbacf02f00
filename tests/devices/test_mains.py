import pytest

from engine.devices.mains import is_on_mains


@pytest.mark.parametrize(
    "supplies, on_mains",
    [
        ({}, True),  # a desktop, or a Jetson
        ({"AC": ("Mains", "", ""), "BAT0": ("Battery", "System", "Charging")}, True),
        ({"BAT0": ("Battery", "", "Full")}, True),
        ({"AC": ("Mains", "", ""), "BAT0": ("Battery", "", "Discharging")}, False),
        ({"mouse": ("Battery", "Device", "Discharging")}, True),
    ],
)
def test_a_battery_that_discharges_is_no_mains_power(supplies, on_mains, tmp_path):
    for name, texts in supplies.items():
        (tmp_path / name).mkdir()
        for file, text in zip(("type", "scope", "status"), texts, strict=True):
            if text:
                (tmp_path / name / file).write_text(text + "\n")
    assert is_on_mains(tmp_path) == on_mains
    assert is_on_mains(tmp_path / "none")
