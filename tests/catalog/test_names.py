from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.catalog import cache
from engine.catalog.files import (
    PREFERRED,
    ModelFiles,
    is_safe,
    models_among,
    must_pick,
    pick,
    quantization_of,
)
from engine.catalog.names import (
    HubModel,
    WebFile,
    draft_for,
    known_models,
    parse,
    short_name,
    without_separators,
)
from engine.description.architectures import check_architecture
from engine.errors import ModelFileError
from engine.formats.ggml_types import GGML_TYPES
from engine.formats.quantization import READ_TYPES

# --- names ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, meant",
    [
        ("llama3.2:1b", HubModel("bartowski/Llama-3.2-1B-Instruct-GGUF", "Q6_K")),
        (" QWEN3:0.6B ", HubModel("Qwen/Qwen3-0.6B-GGUF", "Q8_0")),
        ("hf.co/user/repo", HubModel("user/repo")),
        ("hf.co/user/repo:Q4_K_M", HubModel("user/repo", "Q4_K_M")),
        ("https://hf.co/user/repo:q8_0", HubModel("user/repo", "Q8_0")),
        ("huggingface.co/user/repo/", HubModel("user/repo")),
        ("https://huggingface.co/user/repo/tree/main", HubModel("user/repo")),
        ("hf.co/user/repo/sub/x.gguf", HubModel("user/repo", file="sub/x.gguf")),
        ("https://huggingface.co/u/r/resolve/main/x.gguf?download=true", HubModel("u/r", file="x.gguf")),
        ("https://huggingface.co/u/r/blob/v1/x.gguf", HubModel("u/r", file="x.gguf", revision="v1")),
        ("https://example.org/models/x.gguf", WebFile("https://example.org/models/x.gguf")),
        ("http://localhost:8000/x", WebFile("http://localhost:8000/x")),
        ("file:///no/such%20folder/x.gguf", Path("/no/such folder/x.gguf")),
    ],
)
def test_what_names_mean(text, meant):
    assert parse(text) == meant


def test_the_address_of_a_mirror_is_the_hub(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "https://mirror.example")
    assert parse("https://mirror.example/user/repo/resolve/main/x.gguf") == HubModel(
        "user/repo", file="x.gguf"
    )


def test_a_mirror_whose_address_is_none_is_no_mirror(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://[")
    assert parse("hf.co/user/repo") == HubModel("user/repo")


def test_a_path_that_exists_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("llama3.2:1b", "mine"):
        Path(name).write_bytes(b"")
        assert parse(name, {"mine": "qwen3:4b"}) == tmp_path / name


def test_names_of_the_users_own_come_before_known_ones(tmp_path):
    own = {"llama3.2:1b": "hf.co/me/mine:Q8_0", "Work": "qwen3:8b", "file": str(tmp_path), "loop": "loop"}
    assert parse("llama3.2:1b", own) == HubModel("me/mine", "Q8_0")
    assert parse("work", own) == parse("qwen3:8b")
    assert parse("file", own) == tmp_path
    with pytest.raises(ModelFileError, match="no model called 'loop'"):
        parse("loop", own)


def test_what_looks_like_a_path_is_one(tmp_path):
    assert parse(f"{tmp_path}/nothing.bin") == tmp_path / "nothing.bin"
    assert parse("nothing.GGUF") == Path("nothing.GGUF").absolute()
    assert (
        parse("../x/nothing.gguf") == parse("../y/../x/nothing.gguf") == Path.cwd().parent / "x/nothing.gguf"
    )


@pytest.mark.parametrize(
    "text, near",
    [
        ("llama3.2:2b", "llama3.2:1b, llama3.2:3b"),
        ("lama3.2:1b", "llama3.2:1b"),
        ("qwen3", "qwen3:0.6b, qwen3:1.7b, qwen3:4b"),
        ("my-modle", "my-model"),
        ("", "hf.co/user/repository"),
        ("xyzzy", "hf.co/user/repository"),
        ("x" * 5000, "hf.co/user/repository"),
        ("a\0b", "hf.co/user/repository"),
        ("hf.co/alone", "hf.co/user/repository"),
        ("ftp://example.org/x.gguf", "https://"),
        ("http://[::1/x.gguf", "before the path"),
    ],
)
def test_unknown_names_suggest_the_nearest(text, near):
    with pytest.raises(ModelFileError) as caught:
        parse(text, {"my-model": "qwen3:4b"})
    assert near in caught.value.hint


def test_short_names_lead_back():
    for model in known_models():
        assert short_name(parse(model.name)) == model.name
    for source in (
        HubModel("u/r"), HubModel("u/r", "Q8_0"), HubModel("u/r", file="a/b.gguf"),
        HubModel("u/r", file="b.gguf", revision="v1"), WebFile("https://x.example/y.gguf"),
    ):  # fmt: skip
        assert parse(short_name(source)) == source
    own = {"broken": "nobody", "big": "hf.co/u/r:Q8_0"}
    assert short_name(HubModel("u/r", "Q8_0"), own) == "big"


def test_web_files_are_kept_under_a_name_that_a_folder_can_hold():
    assert WebFile("https://x.example/a%2F..%2Fb%20c.gguf?x=1").file == "b_c.gguf"
    assert WebFile("https://x.example/").file == "model.gguf"
    assert WebFile("https://x.example/..").file == "model.gguf"


def test_draft_models_are_known_too():
    sources = {model.name: parse(model.draft) for model in known_models() if model.draft}
    assert not any(isinstance(source, Path) for source in sources.values())
    assert sources["gemma4:e4b"] == HubModel("unsloth/gemma-4-E4B-it-GGUF", file="mtp-gemma-4-E4B-it.gguf")
    assert [draft_for(name) for name in ("qwen3:8b", "qwen3:0.6b", "model.gguf")] == ["qwen3:0.6b", "", ""]


def test_known_models_can_run():
    unique = {without_separators(model.name) for model in known_models()}
    assert len(unique) == len(known_models()) > 15
    for model in known_models():
        assert model.name == model.name.lower() and model.quantization in PREFERRED
        check_architecture(model.architecture, model.name)


def test_names_of_ollama_for_families():
    wanted = ("gemma3:1b", "gemma3:4b", "phi3.5", "phi4-mini", "smollm3", "granite3.3:2b", "granite3.3:8b")
    wanted += ("olmoe:7b", "qwen3:30b-a3b", "qwen3-coder:30b", "gpt-oss:20b")
    assert {*wanted, "ministral3:3b"} <= {model.name for model in known_models()}
    assert parse("llama-3.2:1b") == parse("Llama 3.2 1B") == parse("llama3.2:1b")


# --- files ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "file, quantization",
    [
        ("Llama-3.2-1B-Instruct-Q6_K.gguf", "Q6_K"),
        ("qwen2.5-7b-instruct-q4_k_m-00001-of-00002.gguf", "Q4_K_M"),
        ("tinyllama-1.1b-chat-v1.0.Q4_K_M.gguf", "Q4_K_M"),
        ("BF16/Qwen3-32B-BF16-00001-of-00002.gguf", "BF16"),
        ("Q8_0/model-00001-of-00002.gguf", "Q8_0"),
        ("Qwen3-8B-UD-Q4_K_XL.gguf", "UD-Q4_K_XL"),
        ("x-IQ4_XS.gguf", "IQ4_XS"),
        ("x-Q4_0_4_4.gguf", "Q4_0_4_4"),
        ("x-fp16.gguf", "F16"),
        ("x-mxfp4.gguf", "MXFP4"),
        ("x-nvfp4.gguf", "NVFP4"),
        ("model.gguf", ""),
    ],
)
def test_quantizations_by_file_name(file, quantization):
    assert quantization_of(file) == quantization


def test_what_is_preferred_can_run():
    runs = {GGML_TYPES[kind].name for kind in READ_TYPES}
    for quantization in PREFERRED:
        family = quantization.partition("_")[0]
        assert any(kind in (quantization, family) or kind.startswith(f"{family}_") for kind in runs)
        assert ModelFiles((), quantization).may_run
    for quantization in "UD-IQ1_S", "UD-Q2_K_XL", "Q1_0":
        assert ModelFiles((), quantization).may_run
    for quantization in "Q8_K", "Q4_0_4_8", "IQ4_NL_8_8":
        assert not ModelFiles((), quantization).may_run


def test_models_leave_out_parts_projectors_and_adapters():
    models = models_among(
        [
            "a-Q8_0.gguf", "b-Q4_K_M-00002-of-00002.gguf", "b-Q4_K_M-00001-of-00002.gguf",
            "c-F16-00001-of-00003.gguf", "mmproj-a-F16.gguf", "a.imatrix.gguf", "README.md", "../x-Q8_0.gguf",
        ]
    )  # fmt: skip
    assert [(model.file, model.quantization) for model in models] == [
        ("a-Q8_0.gguf", "Q8_0"),
        ("b-Q4_K_M-00001-of-00002.gguf", "Q4_K_M"),
    ]
    assert models[1].files == ("b-Q4_K_M-00001-of-00002.gguf", "b-Q4_K_M-00002-of-00002.gguf")


def test_what_is_picked():
    models = models_among(["m-Q8_0.gguf", "m-Q4_K_M.gguf", "sub/m-Q4_K_M.gguf", "m-Q4_0_4_4.gguf"])
    assert pick(HubModel("u/r"), models).file == "m-Q4_K_M.gguf"
    assert pick(HubModel("u/r", "q8_0"), models).file == "m-Q8_0.gguf"
    assert pick(HubModel("u/r", file="sub/m-Q4_K_M.gguf"), models).file == "sub/m-Q4_K_M.gguf"
    assert pick(HubModel("u/r", "Q5_K_M"), models) is None
    beside = [
        "MTP/m-Q8_0-MTP.gguf",
        "mtp-m-Q8_0.gguf",
        "m-BF16-MTP.gguf",
        "m-MTP-Q8_0-large.gguf",
        "large-m-MTP-Q8_0.gguf",
    ]
    assert pick(HubModel("u/r", "Q8_0"), models_among(beside)).file == "large-m-MTP-Q8_0.gguf"
    assert pick(HubModel("u/r", file=beside[1]), models_among(beside)).file == beside[1]
    assert pick(HubModel("u/r"), models_among(beside[:1])).file == beside[0]
    assert pick(HubModel("u/r"), models_among(["model.gguf"])).file == "model.gguf"
    assert pick(HubModel("u/r"), models_among(["m-Q4_0_4_4.gguf"])) is None
    assert not pick(HubModel("u/r", "Q4_0_4_4"), models).may_run
    mixes = models_among(["m-UD-IQ1_S.gguf", "m-UD-Q4_K_XL.gguf", "m-BF16.gguf"])
    assert pick(HubModel("u/r"), mixes) is pick(HubModel("u/r", "Q4_K_XL"), mixes)
    assert pick(HubModel("u/r", "Q4_K_XL"), mixes).file == "m-UD-Q4_K_XL.gguf"


def test_a_file_that_cannot_run_is_refused_by_its_name():
    for file in ("m-Q4_0_4_4.gguf", "m-Q4_0_8_8.gguf", "m-IQ4_KSS.gguf", "m-IQ2_K.gguf", "m-Q4_K_R4.gguf"):
        with pytest.raises(
            ModelFileError, match=rf"no file of a type that .* \(it has {quantization_of(file)}\)"
        ):
            must_pick(HubModel("u/r"), models_among([file]))


def test_an_unusual_type_has_to_be_asked_for():
    models = models_among(["m-Q4_K_P.gguf"])
    with pytest.raises(ModelFileError, match="u/r has no file of a usual type") as caught:
        must_pick(HubModel("u/r"), models)
    assert caught.value.hint == "It has Q4_K_P: hf.co/u/r:Q4_K_P."
    assert must_pick(HubModel("u/r", "Q4_K_P"), models) is models[0]
    with pytest.raises(ModelFileError, match=r"u/r has no Q4_K_M\.") as caught:
        must_pick(HubModel("u/r", "Q4_K_M"), models_among(["sub/model.gguf"]))
    assert caught.value.hint == "It has sub/model.gguf: hf.co/u/r/sub/model.gguf."


@pytest.mark.parametrize("name", ["../x", "/x", "a/../b", "a//b", "a\\b", "a\0b", "."])
def test_names_that_lead_elsewhere_are_not_safe(name):
    assert not is_safe(name)


@given(st.text() | st.from_regex(r"(https?://|hf\.co/|~)?[\w./:\[\]@%#?-]*", fullmatch=True))
@example("hf.co/u/r/resolve/a%00b/f.gguf")
@example("hf.co/u/r/resolve/../f.gguf")
@example("https://example.org/\udcff.gguf")  # a byte of the command line that is no text
def test_whatever_is_typed_means_something_or_nothing(text):
    try:
        source = parse(text, {"mine": "qwen3:4b", text[:3]: text})
    except ModelFileError as error:
        assert error.message and error.hint
    else:
        assert isinstance(source, Path | HubModel | WebFile)
        assert isinstance(source, Path) or cache.find(source) is None
        if isinstance(source, WebFile):
            assert "/" not in source.file and is_safe(source.file)
