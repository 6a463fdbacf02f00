"""The KV cache of a long conversation on disk: an engine that starts later goes on where it was."""

import errno
import os
from unittest import mock

import numpy as np
import pytest

from engine.formats.gguf import GGUF
from engine.model.text_model import TextModel
from engine.protocol.events import EngineOptions, Finished, Generate, Prefilling, Sampling, TokenIds
from engine.runtime import prefix_folder, prefix_keeper
from engine.runtime.prefix_store import CHUNK, PrefixStore
from engine.targets.cpu.export import quantized
from tests import generated_model
from tests.thorough import rarely, thorough

pytestmark = pytest.mark.usefixtures("optimizing_compiler")  # prompts are long

PROMPT = tuple(i * 7 % 200 for i in range(2 * 2048))
CONTEXT = len(PROMPT) + 64


@pytest.fixture(scope="module", params=[rarely("qwen3"), "gemma3"])
def path(request, tmp_path_factory):
    """A model without windows, and one with a window in most layers."""
    where = tmp_path_factory.mktemp("model") / "m.gguf"
    return generated_model.write(where, architecture=request.param, context=2 * CONTEXT, heads=2, kv_heads=1)


@pytest.fixture(autouse=True)
def slow_device(monkeypatch):
    """Computing takes longer than reading."""
    monkeypatch.setattr(prefix_keeper, "reads_faster", lambda read_s, compute_s: True)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tmp_path in prefix_folder.folder().parents
    return prefix_folder.folder()


def start(path, limit_bytes=1 << 30, **options):
    options = {"context_length": CONTEXT, "prefix_cache_bytes": limit_bytes, "speculate": "off"} | options
    return TextModel(EngineOptions(model_path=str(path), backend="CPU", **options), lambda _: None)


def answer(model, ids, **request) -> tuple[Finished, list[Prefilling]]:
    events = []
    request = {"sampling": Sampling(temperature=0), "max_tokens": 4, "ignore_eos": True} | request
    end = model.generate(
        Generate(request_id=7, prompt=TokenIds(ids=ids), **request), events.append, lambda: False
    )
    model.warm_up(lambda: False)
    return end, events


@pytest.mark.parametrize("kv", ["f16", rarely("q8_0")])
def test_a_later_engine_reads_what_an_earlier_one_kept(path, folder, kv):
    first, events = answer(start(path, kv=kv), PROMPT)
    assert first.cached_n == 0
    assert len(list(folder.iterdir())) == len(PROMPT) // CHUNK
    assert all(file.stat().st_mode & 0o077 == 0 for file in folder.iterdir())
    again, repeated = answer(start(path, kv=kv), PROMPT)
    # The first chunk is computed, the last not whole in the prompt.
    assert again.cached_n == len(PROMPT) - 2 * CHUNK
    tokens = [[e.id for e in run if hasattr(e, "id")] for run in (events, repeated)]
    assert tokens[0] == tokens[1]


@pytest.fixture(scope="module")
def recurrent(tmp_path_factory):
    where = tmp_path_factory.mktemp("recurrent") / "m.gguf"
    return generated_model.write(
        where, architecture="qwen35", layers=3, context=2 * CONTEXT, heads=2, kv_heads=1
    )


def tokens_of(events):
    return [event.id for event in events if hasattr(event, "id")]


@thorough  # tests/targets/test_states.py has states
def test_a_recurrent_state_is_kept_with_the_keys(recurrent, folder, monkeypatch):
    """Exactly, and one for a conversation, stored anew after a chunk or more."""
    text = tuple(np.random.default_rng(0).integers(0, 200, 3700).tolist())
    first = start(recurrent)
    for n, known in (2900, 2899), (3000, 2899), (3700, 3699):
        _, events = answer(first, text[:n])
        if n == 2900:
            continue
        later = start(recurrent)
        again, repeated = answer(later, text[:n])
        assert again.cached_n == known - CHUNK and tokens_of(events) == tokens_of(repeated)
        (file,) = folder.glob("*.state")
        states = [m._runner.export_state(m.scheduler._states.last(text, known)[1]) for m in (first, later)]
        assert np.array_equal(*states) and file.stat().st_size > states[0].size == later.ready.state_bytes
    monkeypatch.setattr(prefix_keeper, "reads_faster", lambda read_s, compute_s: False)
    again, repeated = answer(start(recurrent), text)
    assert again.cached_n == 0 and tokens_of(events) == tokens_of(repeated)
    file.write_bytes(file.read_bytes()[:-1] + b"!")
    assert answer(start(recurrent), text)[0].cached_n == 0 and file.exists()


def test_a_fast_device_computes(path, monkeypatch):
    _, events = answer(start(path), PROMPT)
    monkeypatch.setattr(prefix_keeper, "reads_faster", lambda read_s, compute_s: False)
    again, repeated = answer(start(path), PROMPT)
    assert again.cached_n in (0, 4 * CHUNK)  # what was read until that was known; nothing, with windows
    tokens = [[e.id for e in run if hasattr(e, "id")] for run in (events, repeated)]
    assert tokens[0] == tokens[1]


def test_another_beginning_reads_nothing(path):
    answer(start(path), PROMPT)
    assert answer(start(path), (5, *PROMPT[1:]))[0].cached_n == 0
    later = answer(start(path), (*PROMPT[:3000], 5, *PROMPT[3001:]))[0].cached_n
    assert later in (0, 2048)  # a window before that place was not kept


def test_nothing_is_kept_if_it_is_off_or_of_measurements(path, folder):
    answer(start(path, limit_bytes=0), PROMPT)
    assert not folder.exists()
    answer(start(path), PROMPT)
    assert answer(start(path), PROMPT, fresh=True)[0].cached_n == 0


def test_a_damaged_file_is_deleted_and_computed_again(path, folder):
    answer(start(path), PROMPT)
    files = sorted(folder.iterdir(), key=lambda file: file.stat().st_mtime_ns)
    data = bytearray(files[-2].read_bytes())
    data[-1] ^= 1
    files[-2].write_bytes(data)
    end, _ = answer(start(path), PROMPT)
    assert end.cached_n < len(PROMPT) - CHUNK
    assert len(list(folder.iterdir())) == len(files)


def test_the_oldest_files_make_room(path, folder):
    answer(start(path), PROMPT)
    size = next(folder.iterdir()).stat().st_size
    other = tuple(reversed(PROMPT))
    answer(start(path, limit_bytes=10 * size), other)
    assert len(list(folder.iterdir())) <= 10
    assert answer(start(path), other)[0].cached_n


def test_a_full_disk_does_no_harm(path, folder, monkeypatch):
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.write_text("a file where the folder should be")
    model = start(path)
    assert answer(model, PROMPT)[0].reason == "length"
    assert answer(model, PROMPT)[0].cached_n == len(PROMPT) - 1


def test_clearing(folder):
    folder.mkdir(parents=True)
    (folder / "x.kv").write_text("")
    prefix_folder.clear()
    assert not list(folder.iterdir())


def test_a_file_of_another_state_of_the_model_is_not_found(path):
    with GGUF(path) as file:
        store, other = PrefixStore(file, "a", 1 << 20), PrefixStore(file, "b", 1 << 20)
    assert store.write(PROMPT[:CHUNK], 0, np.zeros(8, np.uint8))
    assert store.find(PROMPT) and not other.find(PROMPT)


def test_a_changed_bit_anywhere_is_noticed(path):
    with GGUF(path) as file:
        store = PrefixStore(file, "", 1 << 20)
    chunk, export = PROMPT[:CHUNK], np.arange(8, dtype=np.uint8)
    assert store.write(chunk, 3, export)
    [stored] = store.find(chunk)
    assert np.array_equal(stored.read(chunk), export)
    whole = stored.path.read_bytes()
    for place in (*range(30), len(whole) - 1):
        stored.path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        assert all(found.read(chunk) is None for found in store.find(chunk)), place


def test_a_read_only_disk_is_read(path, monkeypatch):
    with GGUF(path) as file:
        store = PrefixStore(file, "", 1 << 20)
    assert store.write(PROMPT[:CHUNK], 0, np.zeros(8, np.uint8))
    monkeypatch.setattr(os, "utime", mock.Mock(side_effect=OSError(errno.EROFS, "read-only")))
    assert store.find(PROMPT)


def test_quantization_rounds_to_half_a_step():
    x = np.random.default_rng(0).normal(size=(3, 5, 64)).astype(np.float32)
    x[0, 0] = 0
    quants, scales = quantized(x)
    wide = np.repeat(scales.astype(np.float32), 32, axis=-1)
    assert (np.abs(quants * wide - x) <= 0.51 * wide + 1e-3 * np.abs(x)).all()
