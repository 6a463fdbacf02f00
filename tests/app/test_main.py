"""The command line, in this process with a synthetic engine; signals and pipes in processes of their own."""

import errno
import gc
import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

import engine.protocol.client
from app.chat.settings import last_model
from app.cli.oneshot import TextOutput
from app.cli.options import Parser
from app.main import main
from engine.protocol.events import Sampling
from presets import GUIDE, guide_path
from tests import synthetic
from tests.generated_model import write
from tests.paths import ROOT

INSTANT = {"rate": 0, "load_s": 0, "prefill_s": 0}
ESCAPES = "\x1b[31mred\x07 \x9b2J\u202e"


@pytest.fixture
def model(home):
    path = home / "model.gguf"
    path.write_bytes(b"GGUF")
    return path


@pytest.fixture
def stdin(home, monkeypatch):
    """Gives standard input a text; nothing is there until it is called."""

    def give(text):
        path = home / "stdin"
        path.write_bytes(text.encode() if isinstance(text, str) else text)
        monkeypatch.setattr(sys, "stdin", path.open())

    with Path(os.devnull).open() as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        yield give


@pytest.fixture
def run(model, stdin, monkeypatch, capfd):
    """Runs the command line with a synthetic engine: exit code, standard output, standard error, options."""

    def run(*arguments, **behaviour):
        started = []

        def make(options, **_):
            started.append(options)
            return synthetic.engine(**(INSTANT | {"text": "You said: {prompt}\n", "tokens": 4} | behaviour))

        monkeypatch.setattr(engine.protocol.client, "LocalEngine", make)
        code = main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return code, out, err, started[0] if started else None

    return run


# --- one answer ----------------------------------------------------------------------------------------


def test_the_reply_is_all_there_is_on_stdout(run, model):
    code, out, err, options = run("--model", model, "why?")
    assert (code, out, err) == (0, "You said: why?\n", "")
    assert options.model_path == str(model)


def test_text_on_stdin_is_a_prompt_and_is_joined_to_one(run, model, stdin):
    stdin("some text\n")
    assert run("--model", model)[1] == "You said: some text\n"
    stdin("some text\n")
    assert run("--model", model, "Summarize.", tokens=8)[1] == "You said: Summarize.\n\nsome text\n"


def test_stdin_need_not_be_valid_text(run, model, stdin):
    stdin(b"caf\xe9")
    assert run("--model", model)[1] == "You said: caf\ufffd\n"


def test_garbage_is_collected_and_files_are_made_for_the_user_while_the_program_works(
    run, model, monkeypatch
):
    collects = []
    monkeypatch.setattr(TextOutput, "show", lambda self, event: collects.append(gc.isenabled()))
    run("--model", model, "why?")
    assert collects and all(collects)
    usual = os.umask(0)
    try:
        run("--no-such-option")
    finally:
        changed = os.umask(usual)
    assert gc.isenabled() and changed == 0o002, "nobody else may write what is kept, and run"


def test_a_variable_for_other_programs_traces_no_memory(run, model, monkeypatch):
    monkeypatch.setenv("PYTHONTRACEMALLOC", "1")
    tracemalloc.start()
    try:
        run(model, "hello")
        assert not tracemalloc.is_tracing() and "PYTHONTRACEMALLOC" not in os.environ
    finally:
        tracemalloc.stop()


def test_thinking_is_not_part_of_the_reply(run, model):
    assert run("--model", model, "why?", thinking=5, tokens=11)[1] == "You said: why?\n"


def test_verbose_says_what_the_engine_did_on_stderr(run, model):
    code, out, err, _ = run("--verbose", "--model", model, "why?")
    assert (code, out) == (0, "You said: why?\n")
    assert "Synthetic 0.5B" in err and "tok/s" in err


def test_nothing_from_the_model_steers_the_terminal(run, model):
    _, out, err, _ = run("--verbose", "--model", model, "why?", text=ESCAPES, tokens=3, name=ESCAPES)
    assert "[31mred" in out
    assert "red" in err
    assert not set(out + err) & {"\x1b", "\x07", "\x9b", "\u202e"}


def test_options_reach_the_engine(run, model):
    *_, options = run(
        "--model", model, "--backend", "cpu", "--context", 99, "--beam", 2, "--temperature", 0, "why?"
    )
    assert (options.backend, options.context_length, options.search_width) == ("CPU", 99, 2)
    assert run("--model", model, "--context", "max", "why?")[-1].context_length == "max"
    assert run("--model", model, "--kv", "q8_0", "why?")[-1].kv == "q8_0"
    assert (
        "must be a whole number, 2 or more, or max" in run("--model", model, "--context", "most", "why?")[2]
    )


def test_an_effort_that_has_no_effect_is_said(run, model):
    code, out, err, _ = run("--model", model, "--effort", "high", "why?")
    assert (code, out) == (0, "You said: why?\n")
    assert "The chat template of Synthetic 0.5B reads no effort" in err
    assert "reads no effort" not in run("--model", model, "why?")[2]


# --- for programs --------------------------------------------------------------------------------------


def lines(out):
    return [json.loads(line) for line in out.splitlines()]


def test_json_is_every_event(run, model):
    code, out, err, _ = run("--json", "--model", model, "why?", thinking=1, tokens=6)
    events = lines(out)
    assert (code, err) == (0, "")
    kinds = [event["event"] for event in events]
    assert list(dict.fromkeys(kinds)) == [
        "loading",
        "warming",
        "ready",
        "prefilling",
        "thinking",
        "token",
        "finished",
    ]
    assert next(event for event in events if event["event"] == "token") == {
        "event": "token",
        "id": 3,
        "text": "You",
    }
    assert next(event for event in events if event["event"] == "ready")["model"]["name"] == "Synthetic 0.5B"
    end = events[-1]
    assert (end["reason"], end["predicted_n"]) == ("stop", 6)
    assert {"prompt_n", "prompt_ms", "predicted_ms", "load_ms"} < set(end)
    assert not any("request_id" in event or "type" in event for event in events)


def test_logprobs_come_with_the_tokens(run, model):
    _, out, _, _ = run("--json", "--logprobs", 2, "--model", model, "why?")
    token = next(event for event in lines(out) if event["event"] == "token")
    assert token["logprob"] == -0.5
    assert token["top"] == [{"id": 0, "logprob": -0.5}, {"id": 1, "logprob": -1.5}]


def test_json_is_ascii_whatever_the_model_says(run, model):
    _, out, _, _ = run("--json", "--model", model, "why?", text=ESCAPES + "\x7f é", tokens=4)
    assert out.isascii() and out.replace("\n", "").isprintable()
    assert "".join(e["text"] for e in lines(out) if e["event"] == "token") == ESCAPES + "\x7f é"


def test_raw_text_and_token_ids_replace_the_template(run, model):
    assert run("--raw", "--model", model, "a  b", tokens=5)[1] == "You said: a  b\n"
    assert run("--prompt-ids", "1, 2,30", "--model", model)[1] == "You said: 30 \n"


def test_failures_are_events_too(run, model):
    code, out, _, _ = run("--json", "--model", model, "why?", failure="ContextFullError")
    assert code == 5
    assert lines(out)[-1]["event"] == "failed" and lines(out)[-1]["kind"] == "context"
    code, out, err, _ = run("--json", "--model", model.parent / "other.gguf", "why?")
    assert (code, err) == (3, "")
    assert lines(out)[0]["kind"] == "model" and "other.gguf" in lines(out)[0]["message"]


# --- what goes wrong -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("UsageError", 2),
        ("ModelFileError", 3),
        ("TemplateError", 3),
        ("BackendError", 4),
        ("MemoryError", 4),
        ("ContextFullError", 5),
        ("RuntimeError", 1),
    ],
)
def test_exit_codes(run, model, name, code):
    """Also: the codes that engine.errors gives its classes are those of the events they become."""
    for behaviour in ({"load_failure": name}, {"failure": name, "fail_at": 2}):
        result, out, err, _ = run("--model", model, "why?", **behaviour)
        assert result == code
        assert err.startswith("orin-chat: ") and err.count("\n") == 1 and "Traceback" not in err
        assert out == ("You said:\n" if "fail_at" in behaviour else "")


def test_the_death_of_the_engine_keeps_what_was_said(run, model):
    code, out, err, _ = run("--model", model, "why?", die_at=2, rate=50)
    assert (code, out) == (4, "You said:\n")
    assert "SIGKILL" in err and "next" not in err  # there is no next prompt


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--temperature", "-1", "why?"], "temperature"),
        (["--temperature", "nan", "why?"], "temperature"),
        (["--top-p", "1.5", "why?"], "top-p"),
        (["--top-k", "x", "why?"], "--top-k"),
        (["--max-tokens", "0", "why?"], "--max-tokens"),
        (["--context", "-5", "why?"], "--context"),
        (["--backend", "TPU", "why?"], "--backend"),
        (["--nonsense"], "--nonsense"),
        (["--temp", "0", "why?"], "--temp"),
        (["--raw", "--system", "x", "why?"], "--raw"),
        (["--raw", "--no-think", "why?"], "--raw"),
        (["--raw", "--effort", "low", "why?"], "--raw"),
        (["--effort", "huge", "why?"], "--effort"),
        (["--effort", "low", "--no-think", "why?"], "--no-think"),
        (["--prompt-ids", "1,x"], "--prompt-ids"),
        (["--prompt-ids", "1", "why?"], "--prompt-ids"),
        (["--prompt-ids", "1", "--raw"], "--prompt-ids"),
        (["--logprobs", "3", "why?"], "--json"),
        (["--plain", "why?"], "--plain"),
        (["--continue", "--chat", "3"], "--continue"),
        (["--continue", "why?"], "--continue"),
        (["--allow-tools", "files", "why?"], "no server"),
        (["--allow-tools", "files", "--raw", "why?"], "--allow-tools"),
        (["--json"], "PROMPT"),
        (["why", "not?"], "quotes"),
        (["--verbose", "tokenize", "x"], "orin-chat tokenize"),
        (["  "], "empty"),
        (["--chat", "1", "--plain"], "no chat 1"),
        (["--continue", "--plain"], "no chat"),
        ([], "terminal"),
    ],
)
def test_wrong_usage_is_one_sentence_and_starts_nothing(run, model, arguments, named):
    code, out, err, started = run("--model", model, *arguments)
    if "--json" in arguments:
        out, err = "", json.loads(out)["message"] + "\n"
    assert (code, out, started) == (2, "", None)
    assert named in err and err.count("\n") == 1


def test_a_missing_model_is_named_with_those_that_are_there(run, model):
    code, _, err, _ = run("--model", model.parent / "mo\x1bdel.ggfu", "why?")
    assert code == 3
    assert "model.ggfu" in err and str(model) in err and "\x1b" not in err
    code, _, err, _ = run("--model", model.parent, "why?")
    assert code == 3 and "folder" in err and str(model) in err
    code, _, err, _ = run("--model", "/dev/zero", "why?")
    assert code == 3 and "device" in err


def test_a_folder_that_may_not_be_looked_into(run, model, monkeypatch):
    hidden, stat = model.parent / "hidden", Path.stat

    def refused(path, **how):
        if hidden in path.parents:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        return stat(path, **how)

    monkeypatch.setattr(Path, "stat", refused)
    code, _, err, started = run("--model", hidden / "x.gguf", "why?")
    assert (code, started) == (3, None)
    assert "x.gguf cannot be read: Permission denied." in err and err.count("\n") == 1


@pytest.mark.parametrize("command", ["bench", "show", "tune"])
def test_a_device_is_written_as_one_likes_and_told_as_it_was_written(command, capsys):
    name = ["none.gguf"] if command == "show" else ["--model", "./none.gguf"]
    for backend, says in (("cpu", "none.gguf"), ("Tpu", "'Tpu'")):
        main([command, *name, "--backend", backend])
        assert says in capsys.readouterr().err


def test_where_the_model_comes_from(run, model, home):
    code, out, err, options = run("why?")
    assert (code, out) == (0, "You said: why?\n") and options.model_path == str(guide_path())
    assert GUIDE in err and "--model qwen3:0.6b" in err and err.count("\n") == 1
    assert run("why?")[2] == ""  # known by now
    assert run("--model", GUIDE, "why?")[2] == ""  # asked for, it needs no introduction
    run("--plain")
    assert last_model() == GUIDE
    run("--plain", "--model", model)
    assert run("why?")[3].model_path == str(model)  # the last one
    other = home / "other.gguf"
    other.write_bytes(b"GGUF")
    write_settings(home, f"model = '{other}'\nbackend = 'cpu'\n[sampling]\nseed = 3\n")
    assert run("why?")[3].model_path == str(other)
    assert run("--model", "~/model.gguf", "why?")[3].model_path == str(model)
    assert lines(run("--json", "why?")[1])[-1]["seed"] == 3
    assert lines(run("--json", "--seed", 4, "why?")[1])[-1]["seed"] == 4


def test_only_a_chat_whose_model_has_loaded_changes_what_the_next_one_opens_with(run, model):
    assert run("--model", model, "why?")[0] == 0
    assert last_model() == "", "a single answer"
    assert run("--plain", "--model", model, load_failure="ModelFileError")[0] == 3
    assert last_model() == "", "a model that cannot load"
    assert run("--plain", "--model", model)[0] == 0
    assert last_model() == str(model)


def test_the_built_in_model_stands_in_for_a_last_one_that_is_gone(run, model):
    assert "It is built in. --model NAME takes" in run("why?", load_failure="ModelFileError")[2]
    assert "It is built in" not in run("--lora", model, "why?", load_failure="ModelFileError")[2]
    run("--plain", "--model", model)
    for named, says in (((), True), (("--model", model), False)):
        code, _, err, _ = run(*named, "why?", load_failure="ModelFileError")
        assert (code, "It was used last. --model NAME takes another one" in err) == (3, says)
    model.unlink()
    code, _, err, options = run("--plain")
    assert code == 0 and options.model_path == str(guide_path())
    assert f"There is no file {model}. {GUIDE} answers" in err and err.count("\n") == 1
    assert last_model() == str(model), "it may come back"
    code, _, err, options = run("why?")  # a program should not get the answer of another model
    assert (code, options) == (3, None)
    assert str(model) in err and f"--model {GUIDE}" in err and err.count("\n") == 1
    assert run("--plain", "--model", model)[0] == 3, "asked for"


def test_broken_settings_are_a_warning(run, model, home):
    write_settings(home, "modle = 'x'")
    code, out, err, _ = run("--model", model, "why?")
    assert (code, out) == (0, "You said: why?\n")
    assert "settings.toml: modle is left out" in err


def write_settings(home, text):
    path = home / ".config" / "orin-chat" / "settings.toml"
    path.parent.mkdir(parents=True)
    path.write_text(text)


def test_input_without_end_is_refused(run, model, stdin, monkeypatch):
    monkeypatch.setattr("app.cli.options.STDIN_LIMIT_BYTES", 100)
    stdin("x" * 101)
    code, _, err, _ = run("--model", model)
    assert code == 2 and "Standard input" in err


# --- words ---------------------------------------------------------------------------------------------


def test_tokenize_needs_a_vocabulary_alone_and_is_no_last_model(home, capsys):
    model = write(home / "noise.gguf")
    assert main(["tokenize", "--model", str(model), "--json", "the river"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "".join(found["pieces"]) == "the river" and len(found["ids"]) == len(found["pieces"])
    assert main(["tokenize", "--jsonl", "x"]) == 2
    assert last_model() == ""


def test_a_command_is_its_name_in_front(run, model, monkeypatch):
    seen = []
    monkeypatch.setitem(
        sys.modules["app.main"].COMMANDS, "tokenize", (lambda rest: seen.append(rest) or 0, "")
    )
    assert main(["tokenize", "--json", "x"]) == 0
    assert seen == [["--json", "x"]]
    assert run("--model", model, "--", "tokenize")[1] == "You said: tokenize\n"


def test_help_tells_the_defaults_that_are(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--help"])
    assert end.value.code == 0
    text = capsys.readouterr().out
    for name in ("temperature", "top_k", "top_p", "min_p", "repeat_penalty"):
        line = next(line for line in text.splitlines() if line.startswith(f"  --{name.replace('_', '-')} "))
        assert f"({getattr(Sampling(), name)})" in line
    assert "exit codes" in text and "tokenize" in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_descriptions_are_broken_where_the_terminal_is_narrow(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for command in ("bench", "board", "serve", "tune"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        lines = capsys.readouterr().out.splitlines()
        assert not [line for line in lines if len(line) > 80 and not line.startswith(" ")]


def test_version(capsys):
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out.startswith("orin-chat 0.")


def test_help_imports_nothing_that_it_does_not_need():
    code = (
        "import sys, app.main\n"
        "assert not {'asyncio', 'msgspec', 'textual', 'tinygrad', 'numpy'} & set(sys.modules)\n"
        "sys.argv = ['orin-chat', '--help']; app.main.main()"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def test_no_abbreviations():
    assert Parser().allow_abbrev is False
