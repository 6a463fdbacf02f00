"""An engine process that answers several requests at a time over `FakeBatchRunner`: all of the engine but a model.

python -m tests.parallel_worker FD    FD: this end of the socket pair
"""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from typing import Any

from engine.formats.gguf import GGUF
from engine.formats.templates.prompt import PromptEncoder
from engine.protocol import worker
from engine.protocol.events import EngineOptions, Measure, Measured, ModelInfo, Ready
from engine.protocol.served_model import Report
from engine.runtime.answer import Answers
from engine.runtime.scheduler import Scheduler
from tests.runtime.fake_batch_runner import FakeBatchRunner

CONTEXT = 500


class ParallelModel:
    """A worker's `Model` with a scheduler. Only the tokenizer is of the model file."""

    def __init__(self, options: EngineOptions, report: Report) -> None:
        self.begin = Answers(PromptEncoder(GGUF(options.model_path)), CONTEXT).begin
        self.scheduler = Scheduler(FakeBatchRunner(options.parallel), report)
        info = ModelInfo(
            name="fake", architecture="llama", quantization="F32", parameters=1, file_bytes=1,
            trained_context=CONTEXT, thinks=False,
        )  # fmt: skip
        self.ready = Ready(
            model=info, backend="CPU", device_name="no device", context_length=CONTEXT, load_ms=0.0,
            parallel=options.parallel,
        )  # fmt: skip

    def read_pictures(self, request: Any) -> Iterator[object]:
        return iter(())

    def warm_up(self, interrupted: Any) -> None:
        pass

    def check_device(self) -> None:
        pass

    def measure(self, request: Measure) -> Measured:
        assert not self.scheduler.busy
        return Measured(request_id=request.request_id, copy_gbps=1.0, kernels_per_token=1, device_bytes=0)


if __name__ == "__main__":
    model: Any = ParallelModel
    worker.serve(socket.socket(fileno=int(sys.argv[-1])), model)
