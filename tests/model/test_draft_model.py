"""A draft model beside a model: the same text, and files that do not fit are refused."""

from pathlib import Path

import pytest

from engine.description.architectures import read_spec
from engine.errors import ModelFileError
from engine.formats.gguf import GGUF, StringArray
from engine.model.draft_head import head_of
from engine.model.text_model import TextModel
from engine.protocol.events import EngineOptions, Generate, Sampling, Token, TokenIds
from tests import generated_model


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    small = {"layers": 1, "dim": 32, "heads": 2, "kv_heads": 1, "ffn": 32}
    kinds = {
        "model": small,
        "draft": small | {"seed": 1},
        "hybrid": small | {"architecture": "qwen35", "layers": 4},
        "with a head": {"architecture": "qwen35", "layers": 4, "draft_head": True},
        "recurrent": small | {"architecture": "qwen35", "layers": 2},
    }
    return {name: str(generated_model.write(folder / f"{name}.gguf", **kind)) for name, kind in kinds.items()}


def answer(paths, draft, model="model", speculate=None):
    speculate = speculate or ("draft" if draft else "off")
    options = EngineOptions(model_path=paths[model], draft=draft, speculate=speculate, context_length=256)
    model, tokens = TextModel(options, lambda _: None), []
    model.warm_up(lambda: False)
    request = Generate(
        request_id=1,
        prompt=TokenIds(ids=tuple(range(40))),
        sampling=Sampling(temperature=0),
        max_tokens=40,
        ignore_eos=True,
    )
    end = model.generate(
        request, lambda e: tokens.append(e.id) if isinstance(e, Token) else None, lambda: False
    )
    assert model.ready.warnings == () or speculate == "heads"
    return end, tokens


def test_the_text_is_the_models(paths):
    (_, plain), (end, checked) = answer(paths, ""), answer(paths, paths["model"])
    assert plain == checked and end.draft_n == end.draft_n_accepted > 0
    end, checked = answer(paths, paths["draft"])  # its guesses are hardly ever right
    assert plain == checked and end.draft_n > 0


def test_states_go_back_to_where_guesses_were_right(paths):
    (_, plain), (end, checked) = (answer(paths, draft, "hybrid") for draft in ("", paths["model"]))
    assert plain == checked and end.draft_n > end.draft_n_accepted


def test_the_text_with_a_draft_head_is_the_models(paths):
    (_, plain), (end, checked) = (answer(paths, "", "with a head", who) for who in ("off", "heads"))
    assert plain == checked and end.draft_n > 0
    end, checked = answer(paths, "", "with a head", "auto")
    assert plain == checked


def test_a_head_that_is_not_there_is_told(paths):
    options = EngineOptions(model_path=paths["model"], speculate="heads", context_length=256)
    assert any("no draft head" in warning for warning in TextModel(options, lambda _: None).ready.warnings)


def test_files_that_do_not_fit_are_refused(paths, tmp_path):
    with pytest.raises(ModelFileError, match="cannot guess for this model: it has recurrent states"):
        answer(paths, paths["recurrent"])
    raw = GGUF(paths["draft"]).get("tokenizer.ggml.tokens", StringArray).raw(300)
    data = Path(paths["draft"]).read_bytes()
    entry = len(raw).to_bytes(8, "little") + raw
    other = tmp_path / "other.gguf"
    other.write_bytes(data.replace(entry, entry[:8] + b"~" * len(raw), 1))
    with pytest.raises(ModelFileError, match="cannot guess for this model: its token 300 is '~"):
        answer(paths, str(other))


def test_a_gpu_takes_a_head_only_if_asked(paths):
    spec = read_spec(GGUF(paths["with a head"]))
    auto, heads = (EngineOptions(model_path="", speculate=who) for who in ("auto", "heads"))
    assert spec.draft_head
    assert head_of(spec, auto, "cpu") and not head_of(spec, auto, "nvidia") and head_of(spec, heads, "nvidia")
