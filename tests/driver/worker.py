"""The engine's worker on a simulated board that fails.

python -m tests.driver.worker CALL ERRNO FD      the driver's call number CALL fails so
python -m tests.driver.worker gpu N FD           the GPU loses a page that the kernels of its N-th launch use
"""

from __future__ import annotations

import errno
import os
import socket
import sys

from engine.backends import prepare
from engine.protocol.served_model import Model, Report
from engine.protocol.worker import _load_text_model, serve


def main(kind: str, which: str, fd: str) -> None:
    def load(options: object, report: Report) -> Model:
        prepare(options)
        from tests.driver import gpu
        from tests.driver.simulate import simulated

        board = simulated()
        kernel = board.__enter__()  # for the life of the process
        if kind == "gpu":
            launch = gpu.Gpu._launch

            def faulty(self: gpu.Gpu, qmd: gpu.Qmd) -> None:
                if self.launches == int(which):
                    raise gpu.Unmapped(qmd.address("CONSTANT_BUFFER_ADDR", 0))
                launch(self, qmd)

            gpu.Gpu._launch = faulty
        else:
            kernel.fail(int(kind), getattr(errno, which))
        print("simulated board in process", os.getpid(), file=sys.stderr)
        return _load_text_model(options, report)

    serve(socket.socket(fileno=int(fd)), load)


if __name__ == "__main__":
    main(*sys.argv[1:])
