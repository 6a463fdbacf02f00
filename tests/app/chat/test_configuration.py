"""Settings, preset and command line: which of them holds."""

import struct
from pathlib import Path

import gguf
import pytest
from msgspec.structs import replace

from app.chat.configuration import configure, sampling_with_other_model, with_other_model, without_effect
from app.chat.settings import SamplingSettings, Settings
from engine.errors import UsageError
from engine.formats.kv_format import KVFormat
from engine.protocol.events import EngineOptions, Sampling
from presets.loader import parse
from tests.app.fake_engine import READY

SETTINGS = Settings(
    backend="CUDA",
    context=1000,
    keep_packed=True,
    prefix_cache_gb=1.0,
    sampling=SamplingSettings(top_k=1, seed=1, temperature=1),
)
PRESET = parse(
    'title = "x"\nbackend = "NV"\njitbeam = 2\ncontext = 2000\n[sampling]\ntop_k = 2\ntemperature = 2\n'
)
COMMAND_LINE = {"context_length": 3000, "search_width": 0, "temperature": 3.0, "backend": None, "top_p": None}


def test_what_was_named_beside_a_model_stays_with_it_alone():
    options = EngineOptions(model_path="/m.gguf", lora="/pirate.gguf:1", draft="/small.gguf")
    assert with_other_model(options, Path("/m.gguf")) == options
    other = with_other_model(options, Path("/other.gguf"))
    assert (other.model_path, other.lora, other.draft) == ("/other.gguf", "", "")


def test_what_nobody_chose_of_sampling_is_the_models(tmp_path):
    def model(name, **suggested):
        writer = gguf.GGUFWriter(tmp_path / name, "llama")
        writer.add_array("general.languages", ["en", "de"])
        for key, value in suggested.items():
            add = writer.add_float32 if isinstance(value, float) else writer.add_int32
            add(f"general.sampling.{key}", value)
        writer.add_string("tokenizer.ggml.model", "gpt2")
        for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.close):
            write()
        return tmp_path / name

    thinking, other = model("a", temp=0.5, top_k=20, penalty_repeat=1.25), model("b", temp=1.0, min_p=0.0)
    assert configure(str(thinking)).sampling == Sampling(temperature=0.5, top_k=20, repeat_penalty=1.25)
    chosen = configure("", Settings(sampling=SamplingSettings(temperature=0.7)))
    assert chosen.with_model(thinking).sampling == Sampling(top_k=20, repeat_penalty=1.25)
    now = Sampling(temperature=0.5, top_k=5, repeat_penalty=1.25)
    assert sampling_with_other_model(now, thinking, other) == Sampling(temperature=1.0, top_k=5, min_p=0.0)
    assert configure(str(model("c", temp=-1.0, top_k=20))).sampling == Sampling()
    assert configure(str(model("d", temp=0.6))).sampling.temperature == 0.6
    nested = tmp_path / "nested"  # an array of arrays, 20,000 deep
    nested.write_bytes(
        b"GGUF" + struct.pack("<IQQQcI", 3, 0, 1, 1, b"x", 9) + struct.pack("<IQ", 9, 1) * 20_000
    )
    assert configure(str(nested)).sampling == Sampling()
    nested.write_bytes(b"GGUF" + struct.pack("<IQQQcIIQ", 3, 0, 2, 1, b"x", 9, 10, 1 << 62))
    assert configure(str(nested)).sampling == Sampling()
    cut = tmp_path / "cut"
    for n in range(0, 200, 7):
        cut.write_bytes(thinking.read_bytes()[:n])
        assert configure(str(cut)).sampling.temperature in (0.5, 0.7)


def test_nothing_is_asked_for():
    options = EngineOptions(model_path="m", backend="auto", prefix_cache_bytes=None)
    assert configure("m")[:3] == (options, Sampling(), 0.0)


def test_the_command_line_overrides_the_preset_and_that_the_settings():
    engine, sampling, *_ = configure("m", SETTINGS, PRESET, COMMAND_LINE)
    assert engine == EngineOptions(
        prefix_cache_bytes=10**9,
        model_path="m",
        backend="NV",
        context_length=3000,
        search_width=0,
        keep_packed=True,
    )
    assert sampling == Sampling(seed=1, top_k=2, temperature=3)


def test_a_preset_that_is_chosen_in_the_chat_overrides_the_command_line():
    engine, sampling, *_ = configure("m", SETTINGS, PRESET, COMMAND_LINE, chosen_in_chat=True)
    assert engine == EngineOptions(
        prefix_cache_bytes=10**9,
        model_path="m",
        backend="NV",
        context_length=2000,
        context_at_most=True,
        search_width=2,
        keep_packed=True,
    )
    assert sampling == Sampling(seed=1, top_k=2, temperature=2)
    engine, sampling, *_ = configure("m", SETTINGS, parse('title = "x"'), COMMAND_LINE, chosen_in_chat=True)
    assert (engine.context_length, sampling.temperature) == (3000, 3), "which this preset leaves open"


def test_the_format_of_the_kv_cache_is_an_option_of_the_engine():
    settings, q8_0 = Settings(kv=KVFormat.Q8_0), parse('title = "x"\nkv = "q8_0"')
    assert [configure("m", *given).engine.kv for given in ((), (settings,), (Settings(), q8_0))] == [
        "f16",
        "q8_0",
        "q8_0",
    ]
    assert configure("m", settings, q8_0, {"kv": "f16"}).engine.kv == "f16"
    with pytest.raises(ValueError, match=r"kv"):
        parse('title = "x"\nkv = "q5"')


def test_an_effort_is_an_option_of_sampling():
    low = parse('title = "x"\n[sampling]\neffort = "low"\n')
    assert configure("m", SETTINGS, low).sampling.effort == "low"
    assert configure("m", SETTINGS, low, {"effort": "high"}).sampling.effort == "high"
    with pytest.raises(ValueError, match="effort"):
        parse('title = "x"\n[sampling]\neffort = "much"\n')


def test_sampling_out_of_its_range_is_refused():
    with pytest.raises(UsageError, match=r"^min-p must be from 0 to 1, not 2\.$"):
        configure("m", command_line={"min_p": 2})


def test_only_chosen_options_are_said_to_have_no_effect():
    ready = replace(READY, unheeded=("top_k", "min_p"))
    assert without_effect(Sampling(temperature=0.1), ready) == ()
    [sentence] = without_effect(Sampling(top_k=3, min_p=0.2), ready)
    assert sentence == "Without effect, as the server's protocol lacks it: top_k, min_p."
    assert without_effect(Sampling(top_k=3), READY) == ()
