import pytest

from engine.errors import UsageError
from engine.formats.kv_format import NAMES, KVFormat


def test_bytes_are_those_of_whole_blocks():
    assert KVFormat.F16.bytes(128) == 256
    assert KVFormat.Q8_0.bytes(128) == 4 * 34  # block_q8_0 of ggml-common.h has 34 bytes


def test_names_are_read_and_a_wrong_one_gets_a_list():
    assert [KVFormat.parse(name) for name in NAMES] == list(KVFormat)
    with pytest.raises(UsageError, match="Choose one of f16, q8_0"):
        KVFormat.parse("q3")


def test_heads_have_to_be_whole_blocks():
    assert KVFormat.F16.fits(80) and KVFormat.Q8_0.fits(96) and not KVFormat.Q8_0.fits(80)
