"""What NVIDIA's compiler refuses of a kernel's CUDA C, as far as that is seen without it.

The simulated GPU's compiler is a C++ compiler that has read all headers, and has types that are no names in CUDA. Where
kernels are only rendered there is none. So both ask here first.
"""

from __future__ import annotations

import functools
import re
from math import prod
from pathlib import Path

_SIMULATED = Path(__file__).parent / "driver/cuda.hpp"
_MOST_THREADS = 1024
_WORDS = {"if", "for", "while", "return", "asm", "volatile"}
# Those of CUDA that the simulated GPU's compiler has in other ways, or for which it is given others.
_OTHERS = {"__launch_bounds__", "__align__", "__syncthreads", "__ldcs", "__cvta_generic_to_shared"}
_VECTORS = {f"make_{kind}{n}" for kind in ("float", "int", "uint", "long") for n in (2, 4)}
_HEADERS = {
    "cuda_fp16.h": re.compile(
        r"\b(?:half[248]?|__half2?|h(?:sqrt|trunc|exp2|log2|sin|rcp)|__\w*half\w*|__h\w+2)\b"
    ),
    "cuda_bf16.h": re.compile(r"\bnv_bfloat16[248]?\b"),
}
_DIMENSION = re.compile(r"= threadIdx\.[xyz]; /\* (\d+) \*/")


def refused(source: str) -> str:
    """Why CUDA has no such kernel, in words; "" if nothing is known against it."""
    text = re.sub(r'"[^"\n]*"|/\*.*?\*/', "", re.sub(r"#include.*", "", source))
    declared = set(re.findall(r"\b(\w+)\([^()]*\)\s*\{", text)) | set(re.findall(r"#define (\w+)\(", text))
    called = set(re.findall(r"\b([A-Za-z_]\w*)\(", text))
    if unknown := sorted(called - declared - _known()):
        return f"CUDA has no {', '.join(unknown)}"
    if types := sorted(set(re.findall(r"\b(?:un)?signed_char\d+\b", text))):
        return f"CUDA has no {', '.join(types)}"
    if missing := [name for name, names in _HEADERS.items() if names.search(text) and name not in source]:
        return f"{missing[0]} is not included"
    if (threads := prod(map(int, _DIMENSION.findall(source)))) > _MOST_THREADS:
        return f"a block has {threads} threads"
    return ""


@functools.cache
def _known() -> set[str]:
    """The functions of CUDA that kernels may call: those that the simulated GPU has."""
    text = _SIMULATED.read_text()
    functions = set(re.findall(r"\bINLINE [\w ]+? (\w+)\(", text)) | set(re.findall(r"#define (\w+)\(", text))
    return functions | _VECTORS | _OTHERS | _WORDS
