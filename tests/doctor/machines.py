"""Machines as files, for the doctor to look at."""

from __future__ import annotations

from pathlib import Path


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def bare(root: Path, free_kb: int = 8_000_000) -> Path:
    cores = "cpu  1 1 1 1 1 1 1 1\n" + "".join(f"cpu{i} 1 1 1 1 1 1 1 1\n" for i in range(12))
    return write(
        root,
        {
            "etc/os-release": 'NAME="Ubuntu"\nPRETTY_NAME="Ubuntu 22.04.5 LTS"\n',
            "proc/sys/kernel/osrelease": "5.15.148-tegra\n",
            "proc/stat": cores,
            "proc/meminfo": f"MemTotal: 64000000 kB\nMemAvailable: {free_kb} kB\nSwapTotal: 0 kB\n",
        },
    )


def jetson(
    root: Path, release: str = "# R36 (release), REVISION: 4.4, GCID: 41062509, BOARD: generic"
) -> Path:
    gpu = "sys/class/devfreq/17000000.gpu"
    return write(
        bare(root),
        {
            "etc/nv_tegra_release": release + "\n",
            "proc/device-tree/model": "NVIDIA Jetson AGX Orin Developer Kit\0",
            "dev/nvmap": "",
            "dev/nvgpu/igpu0/ctrl": "",
            f"{gpu}/device/of_node/name": "gpu\0",
            f"{gpu}/device/load": "0\n",
            f"{gpu}/cur_freq": "306000000\n",
            f"{gpu}/max_freq": "1300500000\n",
            "sys/devices/virtual/thermal/thermal_zone0/type": "gpu-thermal\n",
            "sys/class/thermal/thermal_zone0/type": "gpu-thermal\n",
            "sys/class/thermal/thermal_zone0/temp": "41000\n",
            "usr/local/cuda-12.6/targets/aarch64-linux/lib/libnvrtc.so.12": "",
            "usr/local/cuda-12.6/targets/aarch64-linux/include/cuda_fp16.h": "",
            "usr/local/cuda-12.6/targets/aarch64-linux/include/cuda.h": "#define CUDA_VERSION 12060\n",
        },
    )


def desktop(root: Path, gpu: str = "NVIDIA GeForce RTX 4090") -> Path:
    return write(
        bare(root),
        {
            "dev/nvidiactl": "",
            "proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.105.08  Thu\n",
            "proc/driver/nvidia/gpus/0000:01:00.0/information": f"Model: \t\t {gpu}\nGPU UUID: \t GPU-7c\n",
        },
    )
