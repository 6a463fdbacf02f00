"""What a commit is not checked with, since it takes minutes: `make check-thorough` runs it too."""

from typing import Any

import pytest

from tests.tier import THOROUGH

thorough = pytest.mark.skipif(
    not THOROUGH, reason="takes long: `make check-thorough` runs it (ORIN_THOROUGH=1)"
)


def rarely(*values: Any) -> Any:
    """Values of `parametrize` that only `make check-thorough` takes."""
    return pytest.param(*values, marks=thorough)
