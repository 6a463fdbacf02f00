"""The command line with the real engine behind it: a generated model on the CPU."""

import json
import math

import pytest

from app.main import main
from engine.backends import unusable_because
from presets import GUIDE
from tests import generated_encoder
from tests.generated_model import write
from tests.pictures import plain_picture
from tests.thorough import rarely, thorough


@thorough
def test_processes_that_compile_together_make_the_same_kernels(tmp_path, monkeypatch, capfd):
    model = write(tmp_path / "noise.gguf")
    options = "--backend CPU --context 64 --temperature 0 --max-tokens 5 --ignore-eos --prompt-ids 1,2,3"
    said = []
    for processes in ("0", "2"):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / processes))
        monkeypatch.setenv("PARALLEL", processes)
        assert main(["--model", str(model), *options.split()]) == 0
        said.append(capfd.readouterr())
    assert said[0] == said[1] and said[0].out
    kept = lambda processes: len(list((tmp_path / processes).rglob("*")))
    assert kept("0") == kept("2") > 3


@thorough  # a commit: the option in tests/app/test_main.py, the figures in tests/model/test_text_model.py
def test_an_answer_with_log_probabilities(tmp_path, capfd):
    model = write(tmp_path / "noise.gguf")
    options = (
        "--backend CPU --json --logprobs 3 --temperature 0 --max-tokens 5 --ignore-eos --prompt-ids 1,2,3"
    )
    code = main(["--model", str(model), *options.split()])
    out, err = capfd.readouterr()
    events = [json.loads(line) for line in out.splitlines()]
    assert code == 0, err
    assert {"loading", "ready", "prefilling"} <= {event["event"] for event in events}
    tokens = [event for event in events if event["event"] == "token"]
    assert len(tokens) == 5
    for token in tokens:
        top = [candidate["logprob"] for candidate in token["top"]]
        assert top == sorted(top, reverse=True) and len(top) == 3
        assert sum(map(math.exp, top)) < 1
        assert token["top"][0] == {"id": token["id"], "logprob": token["logprob"]}  # greedy
    end = events[-1]
    assert (end["event"], end["reason"], end["prompt_n"], end["predicted_n"]) == ("finished", "length", 3, 5)
    assert min(end["prompt_ms"], end["predicted_ms"], end["load_ms"]) > 0


@thorough
def test_a_picture_from_the_command_line_to_the_reply(tmp_path, capfd):
    """The encoder beside the model is found."""
    model = write(tmp_path / "noise-F32.gguf", architecture="mistral3")
    encoder = generated_encoder.write(tmp_path / "mmproj-noise.gguf", "pixtral")
    (tmp_path / "sea.png").write_bytes(plain_picture())
    options = f"--model {model} --backend CPU --context 512 --max-tokens 3 --ignore-eos --json"
    asked = [*options.split(), "--image", str(tmp_path / "sea.png"), f"What is @{tmp_path}/sea.png?"]
    assert main(asked) == 0
    out, err = capfd.readouterr()
    assert f"@{tmp_path}/sea.png goes as text. Files go along as arguments" in err
    events = [json.loads(line) for line in out.splitlines()]
    assert next(event for event in events if event["event"] == "ready")["model"]["sees"]
    seen = [event for event in events if event["event"] == "seeing"][-1]
    assert seen["done"] == seen["total"] and 0 < seen["tokens"] < events[-1]["prompt_n"]
    (tmp_path / "sea.png").write_bytes(plain_picture()[:60])
    assert main(asked) == 2
    assert "damaged" in capfd.readouterr().out
    encoder.unlink()
    assert main(asked) == 2
    assert "sees no pictures" in capfd.readouterr().out


@pytest.mark.skipif(not unusable_because("NV"), reason="NV works here")
@pytest.mark.parametrize("choice", [("--backend", "NV"), rarely(("--preset", "nv"))])
def test_a_gpu_that_is_not_there_is_one_sentence_with_its_own_exit_code(choice, capfd):
    code = main(["--model", GUIDE, *choice, "hi"])
    out, err = capfd.readouterr()
    assert (code, out) == (4, "")
    assert unusable_because("NV") in err and err.count("\n") == 1 and "ExceptionGroup" not in err
