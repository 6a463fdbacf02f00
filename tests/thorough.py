"""What a commit is not checked with, since it takes minutes: `make check-thorough` runs it too."""

import os

import pytest

THOROUGH = bool(os.environ.get("ORIN_THOROUGH"))
thorough = pytest.mark.skipif(
    not THOROUGH, reason="takes long: `make check-thorough` runs it (ORIN_THOROUGH=1)"
)
