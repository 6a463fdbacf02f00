import pytest

from engine.catalog.memory_fit import fits


@pytest.mark.parametrize(
    "memory_bytes, model_bytes, need_bytes, expected",
    [
        (0, 100, 0, True),  # the memory is not known
        (111, 100, 0, True),
        (109, 100, 0, False),  # a file that is not here: a tenth more, roughly
        (109, 100, 105, True),  # its need is known
        (104, 100, 105, False),
    ],
)
def test_a_model_fits_by_what_it_needs(memory_bytes, model_bytes, need_bytes, expected):
    assert fits(memory_bytes, model_bytes, need_bytes) is expected
