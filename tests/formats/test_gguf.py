import os
import resource
import struct
from pathlib import Path

import gguf as peer
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import ModelFileError
from engine.formats import gguf
from engine.formats.ggml_types import GGML_TYPES
from engine.formats.gguf import GGUF
from engine.formats.string_array import StringArray
from tests.paths import SHARED

STRING, ARRAY = 8, 9

WEIGHTS = np.arange(6 * 64, dtype=np.float32).reshape(6, 64)
QUANTIZED = np.arange(4 * 2 * 34, dtype=np.uint8).reshape(4, 68)  # 4 x 64 in Q8_0


# --- files made for the tests ---------------------------------------------------------------------------


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def entry(key: str | bytes, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def header(tensors: int, entries: list[bytes], version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, len(entries)) + b"".join(entries)


def tensor(name: str, sizes: list[int], kind: int, offset: int) -> bytes:
    return string(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, offset)


def padded(head: bytes, data: bytes, alignment: int = 32) -> bytes:
    return head + b"\0" * (-len(head) % alignment) + data


@pytest.fixture
def write(tmp_path):
    def write(content: bytes, name: str = "model.gguf") -> Path:
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return write


def write_with_peer(path: Path) -> Path:
    """A file with every value type, written by llama.cpp's own gguf package."""
    w = peer.GGUFWriter(str(path), "llama")
    w.add_name("tiny")
    for number, add in enumerate(
        (
            w.add_uint8,
            w.add_int8,
            w.add_uint16,
            w.add_int16,
            w.add_uint32,
            w.add_int32,
            w.add_uint64,
            w.add_int64,
        )
    ):
        add(f"test.{number}", 100 + number)
    w.add_float32("test.f32", 0.5)
    w.add_float64("test.f64", 1e-300)
    w.add_bool("test.yes", True)
    w.add_bool("test.no", False)
    w.add_string("test.text", "größe\n你好")
    w.add_array("test.ints", [1, -2, 3])
    w.add_array("test.floats", [0.25, -1.0])
    w.add_array("test.bools", [True, False, True])
    w.add_array("test.strings", ["", "a", "ß", "long " * 100])
    w.add_array("test.nested", [[1, 2], [3]])
    w.add_tensor("f32.weight", WEIGHTS)
    w.add_tensor("f16.weight", WEIGHTS[:, :3].astype(np.float16))
    w.add_tensor("q8.weight", QUANTIZED, raw_dtype=peer.GGMLQuantizationType.Q8_0)
    w.write_header_to_file()
    w.write_kv_data_to_file()
    w.write_tensors_to_file()
    w.close()
    return path


def read_all(path: Path) -> None:
    """Opens the file and touches everything in it."""
    with GGUF(path) as g:
        for value in g.metadata.values():
            if isinstance(value, StringArray):
                assert [s.encode() for s in value] == [
                    r.decode("utf-8", "replace").encode() for r in value.raws()
                ]
        for t in g.tensors.values():
            assert t.data.nbytes == t.n_bytes
            total = t.data.sum()
            for keep_cached in (True, False):
                t.release(0, t.n_bytes, keep_cached)
                assert t.data.sum() == total, "it is read again"


# --- what is read ---------------------------------------------------------------------------------------


def test_every_value_type_reads_as_written(tmp_path):
    g = GGUF(write_with_peer(tmp_path / "all.gguf"))
    assert [g.metadata[f"test.{i}"] for i in range(8)] == [100 + i for i in range(8)]
    assert (g.metadata["test.f32"], g.metadata["test.f64"]) == (0.5, 1e-300)
    assert (g.metadata["test.yes"], g.metadata["test.no"]) == (True, False)
    assert g.metadata["test.text"] == "größe\n你好"
    assert g.get("test.ints", np.ndarray).tolist() == [1, -2, 3]
    assert g.get("test.floats", np.ndarray).tolist() == [0.25, -1.0]
    assert g.get("test.bools", np.ndarray).tolist() == [True, False, True]
    strings = g.get("test.strings", StringArray)
    assert list(strings) == ["", "a", "ß", "long " * 100] == [strings[i] for i in range(-4, 0)]
    assert strings[1:3] == ["a", "ß"] and strings.raw(2) == "ß".encode() and len(strings) == 4
    with pytest.raises(IndexError):
        strings[4]
    assert [part.tolist() for part in g.metadata["test.nested"]] == [[1, 2], [3]]


def test_agrees_with_llama_cpp_reader(tmp_path):
    path = write_with_peer(tmp_path / "all.gguf")
    g, other = GGUF(path), peer.GGUFReader(path)
    fields = {k: f.contents() for k, f in other.fields.items() if not k.startswith("GGUF.")}
    assert set(fields) == set(g.metadata)
    for key, value in fields.items():
        if key != "test.nested":  # which the other reader flattens
            ours = g.metadata[key]
            assert (
                ours.tolist()
                if isinstance(ours, np.ndarray)
                else list(ours)
                if isinstance(value, list)
                else ours
            ) == value
    assert list(g.tensors) == [t.name for t in other.tensors]
    for theirs in other.tensors:
        ours = g.tensors[theirs.name]
        assert ours.shape == tuple(int(n) for n in reversed(theirs.shape))
        assert (ours.type, ours.n_bytes) == (theirs.tensor_type, theirs.n_bytes)
        assert ours.data.tobytes() == theirs.data.tobytes()


def test_tensors_are_views_of_the_file_with_rows_first(tmp_path):
    path = write_with_peer(tmp_path / "all.gguf")
    with GGUF(path) as g:
        f32, q8 = g.tensors["f32.weight"], g.tensors["q8.weight"]
        assert g.file_bytes == path.stat().st_size
    assert f32.shape == (6, 64) and f32.type_name == "F32"
    assert q8.shape == (4, 64) and q8.type_name == "Q8_0" and q8.n_bytes == 4 * 2 * 34
    assert not f32.data.flags.owndata and not f32.data.flags.writeable and f32.data.dtype == np.uint8
    assert (f32.data.view(np.float32).reshape(f32.shape) == WEIGHTS).all()  # valid after the file is closed
    assert q8.data.tobytes() == QUANTIZED.tobytes()


def test_parts_of_a_tensor_are_read_until_the_file_is_cut_short(tmp_path):
    path, out = write_with_peer(tmp_path / "all.gguf"), bytearray(80)
    tensor = GGUF(path).tensors["f32.weight"]
    tensor.read_into(20, memoryview(out))
    assert bytes(out) == WEIGHTS.tobytes()[20:100]
    os.truncate(path, 100)
    with pytest.raises(ModelFileError, match="cut short"):
        tensor.read_into(20, memoryview(out))


def test_a_file_that_is_cut_short_while_its_metadata_are_read_is_refused(valid, write, monkeypatch):
    path, opened = write(valid), gguf._MappedFile.open

    def cut(path):
        mapped = opened(path)
        os.truncate(path, 0)
        return mapped

    monkeypatch.setattr(gguf._MappedFile, "open", cut)
    with pytest.raises(ModelFileError, match="cut short"):  # reading the map would end the process
        GGUF(path)


def test_version_2_and_an_alignment_of_its_own(write):
    head = header(1, [entry("general.alignment", 4, struct.pack("<I", 128))], version=2)
    g = GGUF(write(padded(head + tensor("t", [4], 0, 0), WEIGHTS[0, 4:8].tobytes(), 128)))
    assert g.tensors["t"].data.view(np.float32).tolist() == [4, 5, 6, 7]


def test_a_vocabulary_alone_is_a_file(write):
    assert GGUF(write(header(0, [entry("a", 0, b"\7")]))).metadata == {"a": 7}


def test_block_table_is_ggmls():
    for kind, size in peer.GGML_QUANT_SIZES.items():
        assert GGML_TYPES[kind] == (kind.name, *size)


def test_bad_utf8_is_read_and_its_bytes_kept(write):
    tokens = struct.pack("<IQ", STRING, 2) + string(b"\xff\xfe") + string("ok")
    g = GGUF(write(header(0, [entry("tokens", ARRAY, tokens), entry("name", STRING, string(b"a\xff"))])))
    assert g.metadata["name"] == "a\ufffd"
    strings = g.get("tokens", StringArray)
    assert list(strings) == ["\ufffd\ufffd", "ok"] and strings.raws() == [b"\xff\xfe", b"ok"]


def test_lengths_are_found_between_all_kinds_of_strings(write):
    random = np.random.default_rng(0)
    lengths = random.choice(
        [0, 1, 7, 30, 255, 256, 257, 3000, 70_000], 2500, p=[0.3, *[0.11] * 6, 0.03, 0.01]
    )
    kinds = b"\0", b"<", b"ab", b"\5\0\0\0\0\0\0\0"
    texts = [kinds[random.integers(4)] * n for n in lengths]
    tokens = struct.pack("<IQ", STRING, len(texts)) + b"".join(map(string, texts))
    strings = GGUF(write(header(0, [entry("tokens", ARRAY, tokens), entry("a", 0, b"\7")]))).get(
        "tokens", StringArray
    )
    assert (
        strings.raws() == texts and strings.head(None).raws() == texts and strings.head(9).raws() == texts[:9]
    )
    assert strings.head(9000).raws() == texts and not strings.head(0).raws()
    found = [i for i, text in enumerate(texts) if text[:1] in (b"<", b"a")]
    assert strings.beginning_with(b"a<") == strings.head(None).beginning_with(b"<a") == found
    assert not strings.head(0).beginning_with(b"<")


def test_get_checks_types_and_names_the_key(tmp_path):
    g = GGUF(write_with_peer(tmp_path / "all.gguf"))
    assert g.get("test.4", int) == 104 and g.get("test.4", float) == 104.0 and g.get("test.yes", bool) is True
    assert g.get("none", int, 5) == 5 and g.get("none", str, None) is None
    for key, kind in (
        ("none", int),
        ("test.text", int),
        ("test.yes", int),
        ("test.f32", int),
        ("test.ints", str),
    ):
        with pytest.raises(
            ModelFileError, match=f'metadata key "{key}" is (missing|\\w+, not {kind.__name__})'
        ):
            g.get(key, kind)
    with pytest.raises(ModelFileError, match="is str, not int"):
        g.get("test.text", int, 5)


# --- what is refused ------------------------------------------------------------------------------------

LAYER = header(1, [])
REFUSED = {
    "empty": (b"", "is empty"),
    "too short": (b"GG", "is not a GGUF model"),
    "noise": (b"\x93\x12" * 40, "is not a GGUF model"),
    "a text": (b"Access to this model is restricted.\n", "is a text, not a GGUF model"),
    "zeros": (bytes(4096), "file of zeros"),
    "web page": (b"\n<!DOCTYPE html><html>404</html>", "is a web page, not a GGUF model"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab", "Git LFS pointer"),
    "safetensors": (struct.pack("<Q", 20) + b'{"a": {"dtype":  1}}', "safetensors"),
    "zip": (b"PK\x03\x04" + bytes(30), "zip archive"),
    "gzip": (b"\x1f\x8b\x08" + bytes(30), "compressed archive"),
    "json": (b'{"error": "not found"}', "JSON"),
    "ggml": (b"lmgg" + bytes(30), "older than GGUF"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "version 1": (b"GGUF" + struct.pack("<III", 1, 0, 0), "has GGUF version 1"),
    "version 4": (header(0, [], version=4), "has GGUF version 4"),
    "version 0": (header(0, [], version=0), "has GGUF version 0"),
    "header cut": (header(0, [])[:12], "truncated"),
    "entries": (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 63),
        "promises 9223372036854775808 metadata entries",
    ),
    "tensors": (b"GGUF" + struct.pack("<IQQ", 3, 1 << 40, 0), "promises 1099511627776 tensors"),
    "key length": (header(0, [struct.pack("<Q", 1 << 62) + bytes(9)]), "truncated"),
    "value kind": (header(0, [entry("k", 77, bytes(8))]), 'key "k" has a value of unknown kind 77'),
    "twice": (header(0, [entry("k", 0, b"1")] * 2), '"k" twice'),
    "array": (header(0, [entry("k", ARRAY, struct.pack("<IQ", 6, 1 << 61))]), "array elements"),
    "strings": (header(0, [entry("k", ARRAY, struct.pack("<IQ", STRING, 1 << 61))]), "strings"),
    "string in array": (
        header(0, [entry("k", ARRAY, struct.pack("<IQQQ", STRING, 2, (1 << 64) - 8, 0))]),
        "truncated",
    ),
    "arrays": (header(0, [entry("k", ARRAY, struct.pack("<IQ", ARRAY, 1 << 60))]), "arrays"),
    "nesting": (
        header(0, [entry("k", ARRAY, struct.pack("<IQ", ARRAY, 1) * 9 + bytes(12))]),
        "unknown kind 9",
    ),
    # What a file of this size can hold, but what would take long to read:
    "many entries": (header(0, [b""] * 20_000) + bytes(13 * 20_000), "has 20,000 metadata entries"),
    "many tensors": (header(20_000, []) + bytes(24 * 20_000), "has 20,000 tensors"),
    "many arrays": (  # in two lists
        header(0, [entry(key, ARRAY, struct.pack("<IQ", ARRAY, 9000) + bytes(12 * 9000)) for key in "ab"]),
        "has 18,000 arrays in arrays",
    ),
    "many strings": (
        header(0, [entry("k", ARRAY, struct.pack("<IQ", STRING, 1 << 21))]) + bytes(1 << 24),
        "has 2,097,152 strings in lists",
    ),
    "alignment": (header(0, [entry("general.alignment", 4, struct.pack("<I", 24))]), "general.alignment"),
    "alignment type": (header(0, [entry("general.alignment", STRING, string("32"))]), "general.alignment"),
    "dimensions": (LAYER + string("t") + struct.pack("<I", 5) + bytes(60), '"t" has 5 dimensions'),
    "unknown type": (
        padded(LAYER + tensor("t", [32], 999, 0), bytes(128)),
        'tensor "t" in a type .number 999',
    ),
    "half a block": (
        padded(LAYER + tensor("t", [33], 8, 0), bytes(128)),
        "cannot have the shape .33,. as Q8_0",
    ),
    "type of a fork": (
        padded(LAYER + tensor("t", [64], 139, 0), bytes(128)),
        r"type \(number 139\) .* does not know. It may be made for ik_llama.cpp alone",
    ),
    "no scale": (padded(LAYER + tensor("t", [256], 36, 0), bytes(64)), "is truncated"),
    "no elements": (padded(LAYER + tensor("t", [0, 4], 0, 0), bytes(128)), "cannot have the shape"),
    "misaligned": (padded(LAYER + tensor("t", [4], 0, 8), bytes(128)), "cannot have the shape"),
    "huge": (padded(LAYER + tensor("t", [1 << 63] * 4, 0, 0), bytes(128)), "is truncated"),
    "offset": (padded(LAYER + tensor("t", [4], 0, 1 << 63), bytes(128)), "is truncated"),
    "data cut": (padded(LAYER + tensor("t", [64], 0, 0), bytes(255)), "is truncated: it has 319 bytes"),
    "same name": (padded(header(2, []) + tensor("t", [4], 0, 0) * 2, bytes(128)), 'second tensor named "t"'),
    "escapes": (header(0, [entry("\x1b[2J\n", 0, b"1")] * 2), r'"\ufffd\[2J\ufffd" twice'),
}


def test_the_scale_of_a_tensor_of_bitnets_program_is_one_of_its_own(write):
    content = padded(LAYER + tensor("t.weight", [256], 36, 0), bytes(64) + struct.pack("<f", 0.5) + bytes(28))
    tensors = GGUF(write(content)).tensors
    assert tensors["t.weight"].n_bytes == 64
    assert tensors["t.scale"].shape == (1,)
    assert tensors["t.scale"].data.view(np.float32) == 0.5


def test_a_tensor_without_sizes_is_a_number(write):
    content = padded(LAYER + tensor("t.scale", [], 0, 0), struct.pack("<f", 0.5) + bytes(28))
    assert GGUF(write(content)).tensors["t.scale"].shape == (1,)


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_a_sentence_and_a_hint(write, case):
    content, match = REFUSED[case]
    with pytest.raises(ModelFileError, match=match) as e:
        GGUF(write(content))
    assert e.value.message.startswith("model.gguf ") and e.value.message.endswith(".")
    assert e.value.hint.endswith(".") and str(e.value).isprintable()


@pytest.mark.parametrize("name", ["m.i1-Q6_K.gguf.part1of2", "m.Q8_0.gguf-split-a"])
@pytest.mark.parametrize("content", [padded(LAYER + tensor("t", [64], 0, 0), bytes(255)), bytes(range(99))])
def test_a_piece_of_a_file_that_was_cut_is_to_be_joined(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ModelFileError, match="Join all pieces"):
        GGUF(tmp_path / name)


def test_missing_file_folder_and_unreadable(tmp_path):
    # Who starts the program with a wrong path is told before: here it is a file that vanished meanwhile.
    with pytest.raises(
        ModelFileError, match=r"There is no model file .* moved or deleted\? .* choose another"
    ):
        GGUF(tmp_path / "none.gguf")
    with pytest.raises(ModelFileError, match="is a folder"):
        GGUF(tmp_path)
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelFileError, match="is not a file, but a pipe"):
        GGUF(tmp_path / "pipe.gguf")
    with pytest.raises(ModelFileError, match="There is no model file"):
        GGUF(tmp_path / "bad\x1b[0m")
    with pytest.raises(ModelFileError, match="cannot be read"):
        GGUF("\0")


# --- damage ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def valid(tmp_path_factory) -> bytes:
    return write_with_peer(tmp_path_factory.mktemp("gguf") / "valid.gguf").read_bytes()


def test_truncated_anywhere_is_refused(valid, write):
    header_end = valid.index(WEIGHTS.tobytes())
    data_end = valid.rindex(QUANTIZED.tobytes()) + QUANTIZED.nbytes  # padding follows
    for length in [*range(0, header_end, 3), *range(header_end, data_end, 97), data_end - 1]:
        with pytest.raises(ModelFileError):
            read_all(write(valid[:length]))
    read_all(write(valid))


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_flipped_bytes_raise_nothing_else_and_take_no_memory(valid, write, data):
    damaged = bytearray(valid)
    for _ in range(data.draw(st.integers(1, 6))):
        damaged[data.draw(st.integers(4, len(valid) - 1))] = data.draw(
            st.sampled_from([0, 1, 8, 9, 127, 128, 255])
        )
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        read_all(write(bytes(damaged)))
    except ModelFileError as error:
        assert error.message and error.hint and str(error).isprintable()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10  # KiB


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    body=st.binary(max_size=200), version=st.sampled_from([2, 3]), counts=st.tuples(*[st.integers(0, 5)] * 2)
)
def test_noise_after_a_good_start_raises_nothing_else(write, body, version, counts):
    path = write(b"GGUF" + struct.pack("<IQQ", version, *counts) + body)
    try:
        read_all(path)
    except ModelFileError as error:
        assert error.message and error.hint


# --- size ----------------------------------------------------------------------------------------------


def test_a_large_vocabulary_in_a_large_file(tmp_path):
    tokens = struct.pack("<IQ", STRING, 400_000) + b"".join(string(f"token{i}") for i in range(400_000))
    head = header(1, [entry("tokenizer.ggml.tokens", ARRAY, tokens)]) + tensor("t", [1 << 28], 0, 0)
    path = tmp_path / "large.gguf"
    with path.open("wb") as file:
        file.write(padded(head, b""))
        file.truncate(file.tell() + (4 << 28))  # a hole: no disk is used
    g = GGUF(path)
    assert g.get("tokenizer.ggml.tokens", StringArray)[399_999] == "token399999"
    assert g.tensors["t"].n_bytes == 1 << 30


@pytest.mark.skipif(not SHARED.is_dir(), reason="no shared folder with real vocabularies")
@pytest.mark.parametrize(("name", "tokens"), [("llama-bpe", 128_256), ("qwen2", 151_936)])
def test_real_vocabularies(name, tokens):
    g = GGUF(SHARED / f"models/vocab/{name}.gguf")
    assert len(g.get("tokenizer.ggml.tokens", StringArray)) == tokens
