import io
import json

import pytest

from app.chat.settings import Settings
from app.cli.tokenize import run
from engine.errors import ModelFileError
from tests.formats.vocabularies import CONTROL, byte_level


@pytest.fixture
def tokenize(tmp_path, monkeypatch):
    """(exit code, what was written) of a run on a small vocabulary."""
    byte_level(tmp_path / "vocabulary.gguf", special=(("<|end|>", CONTROL),), merges=["a b"])

    def tokenize(text: str | None = None, *options: str, stdin: str | bytes = "") -> tuple[int, str]:
        source = io.TextIOWrapper(io.BytesIO(stdin.encode() if isinstance(stdin, str) else stdin), "utf-8")
        target = io.TextIOWrapper(io.BytesIO(), "ascii", write_through=True)
        monkeypatch.setattr("sys.stdin", source)
        monkeypatch.setattr("sys.stdout", target)
        texts = () if text is None else (text,)
        code = run(["--model", str(tmp_path / "vocabulary.gguf"), *options, *texts], Settings())
        return code, target.buffer.getvalue().decode("ascii")

    return tokenize


def test_json(tokenize):
    code, written = tokenize("abé", "--json")
    assert code == 0 and json.loads(written) == {"ids": [256, 195, 169], "pieces": ["ab", "\ufffd", "\ufffd"]}
    assert json.loads(tokenize("", "--json")[1]) == {"ids": [], "pieces": []}


def test_special_tokens_only_when_asked(tokenize):
    assert len(json.loads(tokenize("<|end|>", "--json")[1])["ids"]) == 7
    assert json.loads(tokenize("<|end|>", "--json", "--special")[1]) == {"ids": [257], "pieces": ["<|end|>"]}


def test_text_for_people(tokenize):
    assert tokenize("ab\x1b") == (0, '     256  "ab"\n      27  "\\u001b"\n')
    assert tokenize(None, stdin=b"ab\xff")[1].startswith('     256  "ab"\n     239 ')


def test_json_lines(tokenize):
    lines = ['"ab"', '"\\n"', "ab", "[1]", "", '"\\ud800"', "[" * 100_000]
    code, written = tokenize(None, "--jsonl", stdin="\n".join(lines))
    answers = [json.loads(line) for line in written.splitlines()]
    assert code == 2 and [answer.get("ids") for answer in answers] == [
        [256],
        [10],
        None,
        None,
        None,
        [239, 191, 189],
        None,
    ]
    assert all(("error" in answer) != ("ids" in answer) for answer in answers)
    assert tokenize(None, "--jsonl", stdin='"a"\n"b"\n')[0] == 0


def test_a_file_that_is_no_model(tmp_path):
    (tmp_path / "none.gguf").write_text("no model")
    with pytest.raises(ModelFileError):
        run(["--model", str(tmp_path / "none.gguf"), "--json", ""], Settings())
