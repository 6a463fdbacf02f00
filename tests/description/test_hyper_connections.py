"""Hashes of the last tokens, against a loop in Python's whole numbers, and files that cannot be."""

import numpy as np
import pytest

from engine.description.architectures import read_spec
from engine.description.spec import HashedRows
from engine.description.sublayers import Weight
from engine.errors import ModelFileError
from engine.formats.gguf import GGUF
from tests import generated_model
from tests.reference_connections import hashed_rows

OF = HashedRows(
    table=Weight("t", 300, 32, 0),
    multipliers=(6364136223846793005, (1 << 64) - 3, 3202034522624059733),
    offsets=(0, 90, 180, 240),
    sizes=(89, 83, 61, 59),
    each=2,
    end=7,
    picture=9,
)


def test_rows_depend_on_the_last_tokens_up_to_an_end():
    text = [3, 4, 7, 5, 7, 7, 6, 250, 9, 8, 7, 1]
    whole = OF.rows([], text)
    assert whole.tolist() == [hashed_rows(OF, text[: i + 1]) for i in range(len(text))]
    for at in range(1, len(text)):
        assert OF.rows(text[:at], text[at:]).tolist() == whole[at:].tolist()
        assert OF.rows(text[:at][-OF.kept :], text[at : at + 1]).tolist() == [whole[at].tolist()]
    assert OF.rows([], [-5]).tolist() == OF.rows([], [OF.picture]).tolist()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    where = tmp_path_factory.mktemp("model") / "model.gguf"
    return generated_model.write(where, architecture="qwen4exp", quant="F32")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("ple.eos_token_id", 1 << 63, "tokens"),
        ("ple.image_token_id", -3, "tokens"),
        ("ple.ngram_size", 1, "hashes are of 1 token"),
        ("ple.layer_multipliers", np.ones(2, np.uint64), "has no 3 numbers"),
        ("ple.head_offsets", np.array([0, 110], np.uint64), "do not fit a table"),
        ("ple.head_vocab_sizes", np.array([101, 0], np.uint64), "do not fit a table"),
        ("ple.conv_kernel", 1, "read 1 token"),
        ("embedding_length_per_layer_input", 16, "do not fit a table"),
        ("hyper_connection.count", 1, "with the shape"),
        ("hyper_connection.low_rank", 16, "with the shape"),
        ("attention.compress_ratios", 5, "in blocks of 5"),
        ("attention.compress_ratios", -4, "in blocks of -4"),
        ("attention.indexer.key_length", 33, "heads of 33"),
    ],
)
def test_files_that_cannot_be_are_refused(path, key, value, message):
    with GGUF(path) as file:
        file.metadata = {**file.metadata, f"qwen4exp.{key}": value}
        with pytest.raises(ModelFileError, match=message):
            read_spec(file)


def test_negative_multipliers_are_unsigned_numbers(path):
    with GGUF(path) as file:
        file.metadata = {**file.metadata, "qwen4exp.ple.layer_multipliers": np.array([-1, 2, 3])}
        hashed = read_spec(file).hashed
    assert hashed.multipliers == ((1 << 64) - 1, 2, 3)
