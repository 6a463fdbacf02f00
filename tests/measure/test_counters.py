"""The machine's figures, from files that stand in for a Jetson, a PC and a machine that tells nothing."""

import os
import subprocess
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from engine.devices import cuda_driver
from engine.measure import memory, patience
from engine.measure.counters import Counters
from engine.measure.process_times import all_times, family_of, ticks_between
from tests.waiting import wait_until


def lay(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(str(text))


def read(root, **options):
    counters = Counters(root, **options)
    lay(root, {"proc/stat": "cpu 180 0 40 300 20 0 0 0 0 0\n"})
    return {counter.name: counter for counter in counters.read()}


@pytest.fixture
def pc(tmp_path):
    lay(tmp_path, {
        "proc/stat": "cpu 100 0 20 200 20 0 0 0 0 0\ncpu0 1 2 3 4 5\n",
        "proc/meminfo": "MemTotal: 1000000 kB\nMemFree: 1 kB\nMemAvailable: 750000 kB\n",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": 2_000_000,
        "sys/devices/system/cpu/cpu1/cpufreq/scaling_cur_freq": 3_000_000,
        "sys/devices/system/cpu/cpu0/cpufreq/cpuinfo_max_freq": 4_000_000,
        "sys/class/hwmon/hwmon0/temp1_input": 51_000,
        "sys/class/hwmon/hwmon0/name": "coretemp",
    })  # fmt: skip
    return tmp_path


@pytest.fixture
def jetson(pc):
    gpu, rail = "sys/class/devfreq/17000000.gpu", "sys/bus/i2c/devices/1-0040/hwmon/hwmon3"
    lay(pc, {
        "etc/nv_tegra_release": "# R36 (release)",
        "sys/class/devfreq/other/device/of_node/name": "nvenc\0",
        f"{gpu}/device/of_node/name": "gpu\0", f"{gpu}/device/load": 873,
        f"{gpu}/cur_freq": 1_300_500_000, f"{gpu}/max_freq": 1_300_500_000, f"{gpu}/min_freq": 1_300_500_000,
        "sys/class/thermal/cooling_device0/type": "gpu-throttle-alert",
        "sys/class/thermal/cooling_device0/cur_state": 1,
        "sys/class/thermal/cooling_device1/type": "pwm-fan", "sys/class/thermal/cooling_device1/cur_state": 3,
        "sys/kernel/debug/bpmp/debug/clk/emc/rate": 3_199_000_000,
        "sys/kernel/debug/bpmp/debug/clk/emc/max_rate": 3_199_000_000,
        "sys/kernel/debug/cactmon/mc_all": 1_599_500,
        "sys/class/thermal/thermal_zone0/type": "gpu-thermal", "sys/class/thermal/thermal_zone0/temp": 61_500,
        "sys/class/thermal/thermal_zone1/type": "cv0-thermal",
        "sys/class/thermal/thermal_zone1/temp": -256_000,
        f"{rail}/in1_label": "VDD_GPU_SOC", f"{rail}/in1_input": 20_000, f"{rail}/curr1_input": 1_000,
        f"{rail}/in2_label": "VDD_CPU_CV", f"{rail}/in2_input": 20_000, f"{rail}/curr2_input": 250,
    })  # fmt: skip
    return pc


def test_a_pc(pc):
    figures = read(pc)
    assert (figures["CPU load"].value, figures["CPU load"].maximum) == (50.0, 100)
    assert (figures["CPU clock"].value, figures["CPU clock"].maximum) == (2500, 4000)
    assert figures["memory"].value == pytest.approx(0.256)
    assert (figures["temperature"].value, figures["temperature"].parts) == (51, ("coretemp 51 °C",))
    assert "GPU load" not in figures


STAT = "{} (a ) name) S {} " + "0 " * 9 + "{} {} {} {} 20 0 1\n"


def processes(root, *tree):
    """Lays down processes: each its id, its parent's, and ticks in user and system mode, of itself and of children
    that it waited for. What else was there has ended."""
    for gone in (root / "proc").glob("[0-9]*"):
        (gone / "stat").unlink()
    lay(root, {f"proc/{process[0]}/stat": STAT.format(*process) for process in tree})


def other_load(pc, before, after):
    """In percent, of 200 ticks of which 100 were busy."""
    processes(pc, *before)
    counters = Counters(pc, process_id=7)
    processes(pc, *after)
    lay(pc, {"proc/stat": "cpu 180 0 40 300 20 0 0 0 0 0\n"})
    return {c.name: c.value for c in counters.read()}["other load"]


APP, OTHER = (7, 1, 100, 10, 0, 0), (60, 1, 5, 5, 900, 90)


def test_other_load_is_what_is_not_ours(pc):
    busy = (7, 1, 120, 20, 0, 0), (60, 1, 50, 30, 900, 90)
    assert other_load(pc, [APP, OTHER], busy) == 35, "50 % less 30 of 200 ticks"


def test_all_that_our_processes_started_is_ours(pc):
    engine, compiler = (8, 7, 40, 0, 0, 0), (10, 9, 30, 10, 0, 0)  # which 9 started for the engine
    after = APP, engine, (9, 8, 0, 0, 0, 0), compiler, OTHER
    assert other_load(pc, [APP, (8, 7, 20, 0, 0, 0), OTHER], after) == 20


def test_what_ended_is_ours_as_long_as_it_was(pc):
    """Its parent has waited for it, and it for its own children; what was counted before is not counted again."""
    before = APP, (8, 7, 20, 0, 0, 0), (9, 8, 25, 15, 0, 0), OTHER
    after = APP, (8, 7, 20, 0, 65, 35), OTHER
    assert other_load(pc, before, after) == 20, "60 of 200 ticks since"


def test_a_family_that_ended_is_counted_once(pc):
    """The compilers of an engine, which waited for them before it ended."""
    before = APP, (8, 7, 20, 0, 30, 0), (9, 8, 25, 15, 0, 0), OTHER
    after = (7, 1, 100, 10, 130, 0), OTHER
    assert other_load(pc, before, after) == 30, "130 less 90 that were known"


def test_what_others_used_is_told_where_no_one_waited_for_one_that_ended(pc):
    before = APP, (8, 7, 20, 0, 0, 0), (9, 8, 5000, 0, 0, 0)
    assert other_load(pc, before, [APP, (8, 7, 60, 0, 0, 0)]) == 30


def test_cores_other_programs_by_name_and_what_the_engine_holds(pc):
    line = "{} ({}) S {} " + "0 " * 9 + "{} 0 0 0 20 0 1 0 0 0 {}\n"

    def lay_down(*tree):
        lay(pc, {f"proc/{each[0]}/stat": line.format(*each) for each in tree})

    lay(pc, {"proc/stat": "cpu 100 0 0 100 0\ncpu0 50 0 0 50 0\ncpu1 50 0 0 50 0\n"})
    lay_down((7, "orin", 1, 0, 9), (8, "engine", 7, 0, 500), (60, "cc1 (a)", 1, 10, 9), (61, "sh", 1, 0, 9))
    counters = Counters(pc, process_id=7)
    lay(pc, {"proc/stat": "cpu 250 0 0 150 0\ncpu0 150 0 0 50 0\ncpu1 100 0 0 100 0\n"})
    lay_down((7, "orin", 1, 0, 9), (8, "engine", 7, 100, 500), (60, "cc1 (a)", 1, 60, 9), (61, "sh", 1, 1, 9))
    figures = {counter.name: counter for counter in counters.read()}
    assert (figures["busiest core"].value, figures["busiest core"].parts) == (100, ("100 %", "50 %"))
    assert figures["other load"].parts == ("cc1 (a) 25 %",) and figures["other load"].value == 25
    assert figures["engine memory"].value == 500 * os.sysconf("SC_PAGE_SIZE") / 1e9


def test_a_jetson(jetson):
    figures = read(jetson)
    assert figures["GPU load"].value == 87.3
    assert (figures["GPU clock"].value, figures["GPU clock"].maximum) == (1300.5, 1300.5)
    assert figures["EMC clock"].value == 3199
    assert figures["EMC activity"].value == 50.0
    assert (figures["temperature"].value, figures["temperature"].parts) == (61.5, ("gpu 62 °C",))
    assert (figures["power"].value, figures["power"].parts) == (
        25.0,
        ("VDD_GPU_SOC 20.0 W", "VDD_CPU_CV 5.0 W"),
    )
    assert figures["power mode"].absent == "nvpmodel does not answer"
    assert figures["jetson_clocks"].text == "on" and figures["throttled"].parts == ("gpu-throttle-alert",)


def test_a_jetson_whose_debugfs_is_closed(jetson, monkeypatch):
    real = Path.read_text

    def closed(path, *args, **kwargs):
        if "debug" in path.parts:
            raise PermissionError
        return real(path, *args, **kwargs)

    monkeypatch.setattr(Path, "read_text", closed)
    figures = read(jetson)
    for name in ("EMC clock", "EMC activity"):
        assert figures[name].value is None and figures[name].absent.startswith("no permission")


def test_the_board_is_the_rail_vdd_in(jetson):
    rail = "sys/bus/i2c/devices/1-0040/hwmon/hwmon3"
    lay(jetson, {f"{rail}/in3_label": "VDD_IN", f"{rail}/in3_input": 20_000, f"{rail}/curr3_input": 2_000})
    assert read(jetson)["power"].value == 40


def test_a_machine_that_tells_nothing(tmp_path):
    for counter in read(tmp_path).values():
        assert counter.value is not None or counter.absent
        assert counter.value is None or "load" in counter.name, "the file is laid afterwards"


def nvml(**changes):
    """A module that answers as nvidia-ml-py does."""
    module = ModuleType("fake_nvml")
    answers = {
        "nvmlInit": None, "nvmlDeviceGetHandleByIndex": "gpu",
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=97, memory=62),
        "nvmlDeviceGetClockInfo": 1700, "nvmlDeviceGetMaxClockInfo": 1980, "nvmlDeviceGetTemperature": 71,
        "nvmlDeviceGetPowerUsage": 512_000, "nvmlDeviceGetEnforcedPowerLimit": 700_000,
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=12e9, total=140e9),
        "nvmlDeviceGetCurrentClocksThrottleReasons": 0x20 | 0x40 | 0x1,
    } | changes  # fmt: skip

    def answering(answer):
        def ask(*_):
            if isinstance(answer, Exception):
                raise answer
            return answer

        return ask

    for name, answer in answers.items():
        setattr(module, name, answering(answer))
    module.NVML_CLOCK_SM, module.NVML_CLOCK_MEM, module.NVML_TEMPERATURE_GPU = 1, 2, 0
    return module


@pytest.fixture
def gpu_pc(pc):
    lay(pc, {"dev/nvidiactl": ""})
    return pc


def test_an_nvidia_gpu(gpu_pc, monkeypatch):
    not_supported = RuntimeError("Not Supported")
    module = nvml(nvmlDeviceGetPowerUsage=not_supported, nvmlDeviceGetMaxClockInfo=not_supported)
    monkeypatch.setitem(sys.modules, "fake_nvml", module)
    figures = read(gpu_pc, nvml_module="fake_nvml")
    assert (figures["GPU load"].value, figures["memory activity"].value) == (97, 62)
    assert (figures["GPU clock"].value, figures["GPU clock"].maximum) == (1700, None)
    assert figures["power"].absent == "NVML: Not Supported"
    assert figures["throttled"].parts == ("too hot", "too hot (hardware)")
    assert figures["GPU memory"].parts == ()
    running = [
        SimpleNamespace(pid=os.getpid(), usedGpuMemory=3e9),
        SimpleNamespace(pid=2**22 + 1, usedGpuMemory=4e9),
    ]
    module.nvmlDeviceGetComputeRunningProcesses = lambda _: running
    programs = read(gpu_pc, nvml_module="fake_nvml")["GPU memory"].parts
    assert programs[0] == f"process {2**22 + 1} 4.0 GB" and programs[1].endswith(" 3.0 GB")


def test_the_gpu_that_is_read_is_cuda_s_first_one(gpu_pc, monkeypatch):
    """With CUDA_VISIBLE_DEVICES=1 it is not NVML's first one."""
    place, module = "0000:1B:00.0", nvml()
    module.nvmlDeviceGetHandleByPciBusId = lambda place: place
    module.nvmlDeviceGetClockInfo = lambda gpu, _: {"gpu": 1980, place: 345}[gpu]
    monkeypatch.setitem(sys.modules, "fake_nvml", module)
    for visible, mhz in ("", 1980), (place, 345):
        monkeypatch.setattr(cuda_driver, "pci_bus_id", lambda visible=visible: visible)
        assert read(gpu_pc, nvml_module="fake_nvml")["GPU clock"].value == mhz


def test_the_free_memory_of_a_gpu_is_that_of_cuda_s_first_one(monkeypatch):
    def found(name, gpu):
        gpu._obj.value = 2 if name == b"0000:1B:00.0" else 1 + name
        return 0

    def told(gpu, figures):
        figures._obj.free = figures._obj.used = gpu.value * 10**9
        return 0

    def counted(count):
        count._obj.value = 2
        return 0

    nvml = SimpleNamespace(
        nvmlDeviceGetHandleByPciBusId_v2=found, nvmlDeviceGetHandleByIndex_v2=found,
        nvmlDeviceGetMemoryInfo=told, nvmlDeviceGetCount_v2=counted,
    )  # fmt: skip
    monkeypatch.setattr(memory, "_nvml", lambda: nvml)
    for visible, free in ("", 1e9), ("0000:1B:00.0", 2e9):
        monkeypatch.setattr(cuda_driver, "pci_bus_id", lambda visible=visible: visible)
        assert memory.gpu_free_bytes() == free and memory.gpu_used_bytes() == 3e9


@pytest.mark.parametrize("reason", ["nvidia-ml-py is not installed", "NVML: Driver Not Loaded"])
def test_an_nvidia_gpu_that_cannot_be_asked(gpu_pc, monkeypatch, reason):
    if "Driver" in reason:
        module = nvml(nvmlInit=RuntimeError("Driver Not Loaded"))
        monkeypatch.setitem(sys.modules, "fake_nvml", module)
    figures = read(gpu_pc, nvml_module="fake_nvml")
    assert reason in figures["GPU"].absent
    assert figures["CPU load"].value == 50


def test_an_nvidia_gpu_whose_driver_does_not_answer_holds_nobody(gpu_pc, monkeypatch):
    """While the library starts, and in a later call. What comes late is not shown, but what is asked then."""
    monkeypatch.setattr(patience, "PATIENCE_S", 0.02)
    returns, module = threading.Event(), nvml()
    module.nvmlInit = returns.wait
    monkeypatch.setitem(sys.modules, "fake_nvml", module)
    counters = Counters(gpu_pc, nvml_module="fake_nvml")

    def gpu_load():
        return {c.name: c.value or c.absent for c in counters.read() if c.name in ("GPU", "GPU load")}

    hangs = {"GPU": "NVML does not answer: the driver may hang"}
    assert gpu_load() == gpu_load() == hangs
    returns.set()
    wait_until(lambda: gpu_load() == {"GPU load": 97})
    returns.clear()
    module.nvmlDeviceGetUtilizationRates = lambda _: returns.wait()
    before = threading.active_count()
    assert gpu_load() == gpu_load() == hangs and threading.active_count() == before + 1
    returns.set()


def test_what_this_process_started_is_not_the_load_of_others():
    before = family_of(os.getpid(), all_times(Path("/")))
    work = "import time\nwhile time.process_time() < 0.2: pass"
    subprocess.run([sys.executable, "-c", work], check=True)
    assert ticks_between(before, family_of(os.getpid(), all_times(Path("/")))) >= 15, "hundredths of a second"


def test_this_machine_is_read():
    counters = Counters()
    counters.read()
    figures = counters.read()
    assert all(
        figure.value is not None or figure.text or figure.absent or figure.name == "CPU load"
        for figure in figures
    )
