"""Files on the command line: `orin-chat FILE... "question"`."""

from io import StringIO

import pytest

from app.cli import options
from app.cli.meant import check_command
from app.cli.model_file import adapters
from app.cli.oneshot import TextOutput
from app.main import COMMANDS, main
from engine.errors import UsageError
from engine.protocol.events import Failed
from engine.system.invocation import call
from tests.pictures import plain_picture


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(options, "_stdin_has_text", lambda: False)
    (tmp_path / "a.py").write_text("a = 1\n")
    (tmp_path / "b.bin").write_bytes(b"\0")


def parse(*arguments):
    return options.parse(arguments, {})


def test_files_go_before_the_question():
    args = parse("a.py", "What is it?")
    [message] = options.prompt(args).messages
    assert args.one_shot and message.content == "a.py:\n```\na = 1\n```\n\nWhat is it?"


def test_lines_of_a_file_are_taken(tmp_path):
    (tmp_path / "b.txt").write_text("one\ntwo\nthree\n")
    [message] = options.prompt(parse("b.txt:2-3", "What is it?")).messages
    assert message.content == "b.txt:2-3:\n```\ntwo\nthree\n```\n\nWhat is it?"
    assert not parse("c.txt:2-3").files


def test_a_file_that_is_too_long_is_named_with_lines_that_fit(tmp_path):
    (tmp_path / "b.txt").write_text("a line of some words\n" * 1000)
    files = options.attachments(parse("a.py", "b.txt", "What is it?"))
    said = StringIO()
    failure = Failed(kind="context", message="It is too long.", hint="Shorten it.", tokens=6000, most=2000)
    TextOutput(StringIO(), said, files=files).show(failure)
    assert said.getvalue() == "orin-chat: It is too long. b.txt:1-224 takes as many lines as fit.\n"
    said = StringIO()
    TextOutput(StringIO(), said).show(failure)
    assert said.getvalue() == "orin-chat: It is too long. Shorten it.\n"


def test_a_models_file_is_the_model(tmp_path, capsys):
    (tmp_path / "m.gguf").write_bytes(b"GGUF\3\0\0\0")
    (tmp_path / "text.gguf").write_text("about models\n")
    args = parse("m.gguf")
    assert (args.model, args.prompt, args.files, args.one_shot) == ("m.gguf", [], [], False)
    args = parse("m.gguf", "a.py", "What is it?")
    assert (args.model, args.prompt, args.files) == ("m.gguf", ["What is it?"], ["a.py"])
    args = parse("text.gguf", "What is it?")
    assert args.model is None and args.files == ["text.gguf"]
    assert parse("--", "m.gguf").prompt == ["m.gguf"]
    assert main(["--model", "x", "m.gguf", "Hi"]) == 2
    assert "m.gguf is a model, and only one answers. Name it alone." in capsys.readouterr().err


def test_a_file_alone_opens_the_chat_on_a_terminal_and_is_a_prompt_for_programs(monkeypatch):
    assert not parse("a.py").files and parse("a.py").one_shot
    monkeypatch.setattr(options, "_is_terminal", lambda: True)
    assert parse("a.py").files == ["a.py"] and not parse("a.py").one_shot
    assert parse("--", "a.py").prompt == ["a.py"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("c.py", "What is it?"), "no file c.py"),
        (("What", "is"), "put it in quotes"),
        (("What is it?", "/dev/null"), "/dev/null is a pipe or a device"),
        (("What is it?", "/dev"), r"/dev is a folder: /dev/\* names the files in it"),
    ],
)
def test_what_is_no_file_is_named(arguments, reason):
    with pytest.raises(UsageError, match=reason):
        parse(*arguments)


def test_a_file_that_is_no_text_is_refused():
    with pytest.raises(UsageError, match="is no text"):
        options.prompt(parse("b.bin", "What is it?"))


def test_bytes_on_standard_input_are_refused_and_text_of_any_coding_is_not(monkeypatch):
    monkeypatch.setattr(options, "_stdin_has_text", lambda: True)
    for data, text in ((b"gr\xfc\xdfe", "gr\ufffd\ufffde"), ("grün".encode("utf-16"), "grün")):
        monkeypatch.setattr(options, "_read_stdin", lambda data=data: data)
        assert options.prompt(parse("What?")).messages[0].content == f"What?\n\n{text}"
    monkeypatch.setattr(options, "_read_stdin", lambda: b"\x7fELF\0\1\xff")
    with pytest.raises(UsageError, match="Standard input is no text"):
        options.prompt(parse("What?"))


def test_pictures_go_along_as_files(tmp_path, monkeypatch):
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_bytes(plain_picture())
    args = parse("--image", "a.png", "b.png", "a.py", "What \ufffc is it?")
    [message] = options.prompt(args).messages
    assert [picture.name for picture in message.pictures] == [
        str(tmp_path / name) for name in ("a.png", "b.png")
    ]
    assert message.content == "a.py:\n```\na = 1\n```\n\nWhat \ufffd is it?"
    with pytest.raises(UsageError, match=r"a\.py is not a picture"):
        options.prompt(parse("--image", "a.py", "What is it?"))
    with pytest.raises(UsageError, match="--raw takes no pictures"):
        options.prompt(parse("--raw", "--image", "a.png", "What is it?"))
    monkeypatch.setattr(options, "_stdin_has_text", lambda: True)
    monkeypatch.setattr(options, "_read_stdin", plain_picture)
    [message] = options.prompt(parse("What is it?")).messages
    assert (message.content, message.pictures[0].data) == ("What is it?", plain_picture())


def test_words_that_look_like_commands_are_answered(home, capsys):
    assert main(["presets"]) == 0
    listed = capsys.readouterr().out
    assert "cuda" in listed and "--preset NAME" in listed
    for word, meant in (("chat", ""), ("modles", "models")):
        assert main([word]) == 2
        output = capsys.readouterr()
        assert f"Is {word} a command? That is: {call(meant).strip()}." in output.err and not output.out
    assert main(["hf.co/user/repository:Q4_K_M"]) == 2
    assert call("--model hf.co/user/repository:Q4_K_M") in capsys.readouterr().err
    assert main(["run", "qwen3:0.6b", "Why is that?"]) == 2
    assert call("--model qwen3:0.6b 'Why is that?'") in capsys.readouterr().err
    assert main(["run", "orin-guide", "Hi"]) == 2
    assert call("--model orin-guide 'Hi'") in capsys.readouterr().err
    assert main(["help", "bench"]) == 2
    assert f"That is: {call('bench --help')}." in capsys.readouterr().err
    assert main(["qwen3:0.6b"]) == 2
    assert f"That is: {call('--model qwen3:0.6b')}." in capsys.readouterr().err
    assert main(["missing.gguf"]) == 2 and main(["missing.gguf", "Hi"]) == 2
    assert "There is no file missing.gguf. As a prompt:" in capsys.readouterr().err
    for words in (["note:this"], ["hello"], ["serves?"], ["water"], ["run", "to the hills"]):
        check_command(words, COMMANDS)
    assert main(["download", "qwen3:0.6b"]) == 2
    assert "pull qwen3:0.6b" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["user/a-GGUF:Q4_K_M", "hf:user/a-GGUF:Q4_K_M"])
def test_a_repository_without_its_host(home, capsys, name):
    assert main(["--model", name, "Hi"]) == 3
    assert "A model of the Hugging Face hub is hf.co/user/a-GGUF:Q4_K_M." in capsys.readouterr().err


@pytest.mark.parametrize(
    "given, said",
    [
        (["--modle", "x"], "Is --model meant?"),
        (["-m", "x"], "Is --model meant?"),
        (["--ctx-size", "4096"], "Is --context meant?"),
        (["--temp", "0"], "Is --temperature meant?"),
        (["--max_tokens", "5"], "Is --max-tokens meant?"),
        (["--prompt"], "The prompt needs no option"),
        (["-x"], "Unrecognized arguments: -x. "),
        (["show", "--model"], "--model. The model's name needs no option: it stands alone. "),
        (["models", "--model"], "arguments: --model hi. "),
        (["--temperature", "hot"], "must be a number, not 'hot'"),
        (["--seed", "x"], "must be a whole number, not 'x'"),
        (["--kv", "q4"], "must be one of 'f16', 'q8_0', not 'q4'"),
    ],
)
def test_what_is_wrong_with_an_option(capsys, given, said):
    assert main([*given, "hi"]) == 2
    assert said in capsys.readouterr().err


def test_adapters_are_named_by_their_whole_paths(tmp_path):
    assert (
        adapters(parse("--lora", "a.py,b.bin:.5").lora) == f"{tmp_path / 'a.py'}:1,{tmp_path / 'b.bin'}:0.5"
    )
    assert adapters(parse().lora) == ""
    assert adapters("a.py:0.00001") == f"{tmp_path / 'a.py'}:1e-05"
    with pytest.raises(UsageError, match=r"There is no file c\.gguf"):
        adapters("c.gguf:2")
    with pytest.raises(UsageError, match="names no file"):
        adapters("")
    (tmp_path / "a, b").touch()
    (tmp_path / "c.gguf").symlink_to("a, b")
    with pytest.raises(UsageError, match="has a comma"):
        adapters("c.gguf:2")
