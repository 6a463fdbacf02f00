"""A draft model beside a model: the same text, and files that do not fit are refused."""

from pathlib import Path

import pytest

from engine.description.architectures import read_spec
from engine.errors import ModelFileError
from engine.formats.gguf import GGUF
from engine.formats.string_array import StringArray
from engine.model.draft_head import head_of
from engine.model.text_model import TextModel
from engine.protocol.events import EngineOptions, Generate, Sampling, Token, TokenIds
from tests import generated_model
from tests.generated_assistant import write_assistant
from tests.thorough import thorough


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    small = {"layers": 1, "dim": 32, "heads": 2, "kv_heads": 1, "ffn": 32}
    kinds = {
        "model": small,
        "draft": small | {"seed": 1},
        "hybrid": small | {"architecture": "qwen35", "layers": 4},
        "with a head": {"architecture": "qwen35", "layers": 4, "draft_head": True},
        "narrow": small | {"architecture": "gemma4", "layers": 4},
        "recurrent": small | {"architecture": "qwen35", "layers": 2},
    }
    written = {name: generated_model.write(folder / f"{name}.gguf", **kind) for name, kind in kinds.items()}
    assistant = {"width": 32, "heads": 2, "kv_heads": 1}
    written["assistant"] = write_assistant(folder / "assistant.gguf", quant="Q8_0", **assistant)
    return {name: str(path) for name, path in written.items()}


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
    end = model.generate(request, lambda e: tokens.append(e) if isinstance(e, Token) else None, lambda: False)
    assert sum(token.guessed for token in tokens) == end.draft_n_accepted
    assert model.ready.warnings == () or speculate == "heads"
    return end, [token.id for token in tokens]


def test_the_text_is_the_models(paths):
    (_, plain), (end, checked) = answer(paths, ""), answer(paths, paths["model"])
    assert plain == checked and end.draft_n == end.draft_n_accepted > 0
    end, checked = answer(paths, paths["draft"])  # its guesses are hardly ever right
    assert plain == checked and end.draft_n > 0


@thorough
def test_states_go_back_to_where_guesses_were_right(paths):
    (_, plain), (end, checked) = (answer(paths, draft, "hybrid") for draft in ("", paths["model"]))
    assert plain == checked and end.draft_n > end.draft_n_accepted


@thorough  # tests/targets/test_draft_head.py has its drafts
def test_the_text_with_a_draft_head_is_the_models(paths):
    (_, plain), (end, checked) = (answer(paths, "", "with a head", who) for who in ("off", "heads"))
    assert plain == checked and end.draft_n > 0
    end, checked = answer(paths, "", "with a head", "auto")
    assert plain == checked


@thorough  # tests/targets/test_assistant.py has its drafts
@pytest.mark.parametrize("who", ["draft", "heads", "auto"])
def test_the_text_with_an_assistant_is_the_models(paths, who):
    (_, plain), (end, checked) = (
        answer(paths, draft, "narrow", speculate)
        for draft, speculate in (("", "off"), (paths["assistant"], who))
    )
    assert plain == checked and (end.draft_n > 0 or who == "auto")


def test_an_assistant_of_another_model_is_refused(paths):
    with pytest.raises(ModelFileError, match="cannot guess for this model: it reads 32 numbers of a token"):
        answer(paths, paths["assistant"], "with a head")


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
    file = GGUF(paths["with a head"])
    spec = read_spec(file)
    of_auto, of_heads = (
        {
            target: head_of(file, spec, None, EngineOptions(model_path="", speculate=who), target)
            for target in ("cpu", "nvidia")
        }
        for who in ("auto", "heads")
    )
    assert spec.draft_head
    assert of_auto["cpu"] and not of_auto["nvidia"] and of_heads["nvidia"]
