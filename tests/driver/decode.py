"""Decodes a model as an engine process does and prints its tokens; on NV with the simulated driver below it.

python -m tests.driver.decode BACKEND KERNELS MODEL N_TOKENS [TOKEN...]
"""

from __future__ import annotations

import contextlib
import gc
import json
import sys
import time

from engine.backends import prepare
from engine.protocol.events import EngineOptions, Generate, Sampling, Token, TokenIds
from engine.protocol.worker import _load_text_model
from tests.tier import THOROUGH


def main(backend: str, kernels: str, model: str, n: str, *prompt: str) -> None:
    gc.disable()  # as the worker does while it loads
    options = EngineOptions(model_path=model, backend=backend, kernels=kernels, context_length=96)
    device = prepare(options)
    with contextlib.ExitStack() as stack:
        kernel = None
        if device.endswith("NV"):
            from tests.driver.simulate import simulated

            kernel = stack.enter_context(simulated())
        from tinygrad import Device

        started = time.perf_counter()
        text = _load_text_model(options, lambda _: None)
        loaded = time.perf_counter()
        tokens: list[int] = []
        ids = tuple(map(int, prompt))
        request = Generate(
            request_id=1,
            fresh=THOROUGH,  # with the kernels of prefill, which a first start does not wait for
            prompt=TokenIds(ids=ids),
            max_tokens=int(n),
            sampling=Sampling(temperature=0),
            ignore_eos=True,
        )
        end = text.generate(
            request, lambda e: tokens.append(e.id) if isinstance(e, Token) else None, lambda: False
        )
        found = {"tokens": tokens, "reason": end.reason, "load_s": loaded - started}
        found["decode_s"] = time.perf_counter() - loaded
        if kernel is not None:
            gpu = kernel.gpus[0]
            Device["NV"].finalize()
            found |= {
                "launches": gpu.launches,
                "chained": gpu.chained,
                "qmd_releases": gpu.qmd_releases,
                "submissions": gpu.submissions,
                "accesses": gpu.accesses,
                "warnings": kernel.warnings,
                "leaks": kernel.leaks(),
                "fault": str(gpu.fault or ""),
            }
        print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
