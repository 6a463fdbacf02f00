"""Whole steps of models on a GPU, as `test_numbers.py` has single kernels."""

import pytest

from tests.kernels.gpu.test_numbers import errors, selected

__all__ = ["errors"]


@pytest.mark.parametrize("check", selected(of_steps=True))
def test_steps(errors: dict[str, str], check: str) -> None:
    assert not errors[check], errors[check]
