"""Models that see: a picture from the message to the reply."""

import io
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image

from engine.errors import ModelFileError, PictureError, PreemptedError
from engine.model.text_model import TextModel
from engine.protocol.events import (
    PICTURE_MARK,
    Chat,
    EngineOptions,
    Generate,
    Message,
    Picture,
    Sampling,
    Seeing,
    Token,
)
from tests import generated_encoder, generated_model
from tests.thorough import rarely

SECTIONS = {"rope.dimension_sections": [3, 3, 2]}


def png(seed):
    pixels = np.random.default_rng(seed).integers(0, 255, (30, 40, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return Picture(data=file.getvalue())


@pytest.fixture(
    scope="module",
    params=[
        "mistral3",
        *map(rarely, ("qwen35", "gemma3", "gemma4-moe", "llama", "hunyuan_vl", "deepseek2-ocr")),
    ],
)
def model(request, tmp_path_factory):
    kinds = {"mistral3": "pixtral", "qwen35": "qwen3vl_merger", "gemma3": "gemma3", "gemma4-moe": "gemma4v"}
    kinds |= {"llama": "idefics3", "hunyuan_vl": "hunyuanvl", "deepseek2-ocr": "deepseekocr"}
    folder, keys = tmp_path_factory.mktemp("eyes"), SECTIONS if request.param == "qwen35" else None
    path = generated_model.write(folder / "m.gguf", architecture=request.param, keys=keys)
    encoder = generated_encoder.write(folder / "e.gguf", kinds[request.param], half=True)
    options = EngineOptions(model_path=str(path), mmproj=str(encoder), context_length=1024)
    return TextModel(options, lambda _: None)


def ask(model, text, *pictures, **request):
    events = []
    chat = Chat(messages=(Message(role="user", content=text, pictures=pictures),), think=False)
    request = {"sampling": Sampling(temperature=0), "max_tokens": 6, "ignore_eos": True} | request
    generate = Generate(request_id=1, prompt=chat, logprobs=1, **request)
    end = model.generate(generate, events.append, lambda: False)
    return (
        end,
        [e.logprob for e in events if isinstance(e, Token)],
        [e for e in events if isinstance(e, Seeing)],
    )


def test_a_picture_changes_the_reply_and_is_read_once(model):
    assert model.ready.model.sees
    end, first, seeing = ask(model, "What is it?", png(1), fresh=True)
    assert [e.done for e in seeing][-1] == seeing[-1].total
    assert seeing[-1].tokens < end.prompt_n and 0 < end.pictures_ms < end.prompt_ms
    again, same, seeing = ask(model, "What is it?", png(1))
    assert again.cached_n == again.prompt_n - 1 and again.pictures_ms == 0
    assert same == pytest.approx(first, abs=2e-3)
    assert [(e.done == e.total, e.tokens > 0) for e in seeing] == [(True, True)]
    _, other, _ = ask(model, "What is it?", png(2))
    assert other != pytest.approx(first, abs=1e-3)
    twice, _, seeing = ask(model, f"Is {PICTURE_MARK} like {PICTURE_MARK}?", png(1), png(2))
    assert {e.index for e in seeing} == {0, 1}
    assert twice.prompt_n > end.prompt_n
    with pytest.raises(PictureError, match=r"^a\.png: This is not a picture"):
        ask(model, "What is it?", Picture(data=b"nothing", name="/tmp/a.png"))


def test_an_idle_engine_prepares_for_pictures(model, monkeypatch):
    """It is interrupted once, and goes on."""
    ends = iter([PreemptedError("a request came in"), None])

    def prepare():
        if error := next(ends):
            raise error

    monkeypatch.setattr(model._capture, "_encoder", SimpleNamespace(preparations=lambda: [prepare]))
    assert len(list(model._capture._pictures())) == 2 and next(ends, "done") == "done"


def test_penalties_leave_pictures_alone(model):
    sampling = Sampling(temperature=0, repeat_penalty=1.3, repeat_last_n=200)
    assert ask(model, "What is it?", png(1), sampling=sampling)[0].predicted_n == 6


def test_a_model_of_texts_refuses_an_encoder(tmp_path):
    path = generated_model.write(tmp_path / "m.gguf", architecture="olmo2")
    encoder = generated_encoder.write(tmp_path / "e.gguf", "qwen3vl_merger", out=64)
    with pytest.raises(ModelFileError, match="shows no pictures to models of the architecture olmo2"):
        TextModel(EngineOptions(model_path=str(path), mmproj=str(encoder)), lambda _: None)


def test_an_encoder_of_another_model_is_refused(tmp_path):
    path = generated_model.write(tmp_path / "m.gguf", architecture="mistral3")
    for kind, out, says in ("gemma3", 64, "does not fit"), ("pixtral", 96, "96 elements"):
        encoder = generated_encoder.write(tmp_path / "e.gguf", kind, out=out)
        with pytest.raises(ModelFileError, match=says):
            TextModel(EngineOptions(model_path=str(path), mmproj=str(encoder)), lambda _: None)
