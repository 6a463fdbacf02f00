from pathlib import Path

import pytest

from tests import synthetic


@pytest.fixture
async def engines():
    """Makes engines, and closes them afterwards: `engines(rate=…)` or `engines.add(engine)`."""
    made = _Engines()
    yield made
    for engine in made:
        await engine.close()


class _Engines(list):
    def __call__(self, **behaviour):
        return self.add(synthetic.engine(**{"load_s": 0.0, "prefill_s": 0.0, "rate": 0, **behaviour}))

    def add(self, engine):
        self.append(engine)
        return engine


def running(pid: int) -> bool:
    """Whether the process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):  # it may end between opening and reading
        return False
