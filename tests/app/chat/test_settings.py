from pathlib import Path
from unittest import mock

import platformdirs
import pytest

from app.chat.commands import chat_number, engine_option
from app.chat.settings import (
    Settings,
    check_sampling,
    last_model,
    load_settings,
    remember,
    remember_model,
    remembered,
    usable_settings,
)
from engine.errors import UsageError
from engine.protocol.events import Sampling


def test_no_file_gives_the_defaults(home):
    assert load_settings() == Settings()


def test_every_key_is_read(home):
    path = home / "settings.toml"
    path.write_text(
        'model = "m.gguf"\nbackend = "CPU"\ncontext = 512\nsystem = "Be brief."\n'
        "[sampling]\ntemperature = 0\nseed = 7\n"
    )
    settings = load_settings(path)
    assert (settings.model, settings.backend, settings.context) == ("m.gguf", "CPU", 512)
    assert (settings.sampling.temperature, settings.sampling.seed, settings.sampling.top_k) == (0, 7, None)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("modle = 'x'", "modle"),
        ("[sampling]\ntemp = 1", "temp"),
        ("[sampling]\ntemperature = 'hot'", "temperature"),
        ("[sampling]\ntop_p = 2", "top-p"),
        ("context = 1.5", "context"),
        ("model = ", "settings.toml"),
        ("\0", "settings.toml"),
    ],
)
def test_a_broken_file_is_named_with_what_is_wrong(home, text, named):
    path = home / "settings.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=named):
        load_settings(path)


def test_a_bad_key_drops_itself_alone_and_is_named(home):
    path = home / "settings.toml"
    path.write_text(
        'model = "m.gguf"\nmodle = "x"\nkv = "f17"\n[sampling]\ntop_k = 3\ntop_p = 2\n[models]\na = "b"\n'
    )
    settings, flaws = usable_settings(path)
    assert (settings.model, settings.kv, settings.sampling.top_k, settings.models) == (
        "m.gguf", None, 3, {"a": "b"},
    )  # fmt: skip
    assert len(flaws) == 3 and all("is left out" in flaw for flaw in flaws)
    assert [flaw.split()[1] for flaw in flaws] == ["modle", "kv", "sampling.top_p"]
    path.write_text("model = ")
    assert usable_settings(path)[0] == Settings() and "defaults" in usable_settings(path)[1][0]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('colour = "blue"', "colour is left out: there is no such key."),
        ('[servers.x]\nurl = "y"', "servers.x is left out: there is no table [servers]."),
        (
            'theme = "light"',
            "theme is left out: there is no such key; Ctrl+P in the chat chooses the theme, and it is kept.",
        ),
        (
            "temprature = 1",
            "temprature is left out: there is no such key; is temperature under [sampling] meant?",
        ),
        ('modle = "x"', "modle is left out: there is no such key; is model meant?"),
        (
            'context = "huge"',
            'context is left out: it takes a whole number from 2 to 2,147,483,647 or "max".',
        ),
        ("context = 1.5", 'context is left out: it takes a whole number from 2 to 2,147,483,647 or "max".'),
        (
            "context = 9999999999",
            'context is left out: it takes a whole number from 2 to 2,147,483,647 or "max".',
        ),
        ("prefix_cache_gb = nan", "prefix_cache_gb is left out: it takes a number from 0 to 1,000,000."),
        ('keys = "emacs"', 'keys is left out: it takes "plain" or "vi".'),
        ('kv = "f17"', 'kv is left out: it takes "f16" or "q8_0".'),
        ("model = 3", "model is left out: it takes a text in quotation marks."),
        ("keep_packed = 1", "keep_packed is left out: it takes true or false."),
        ("sampling = 1", "sampling is left out: it takes a table."),
        ("[sampling]\ntopk = 3", "sampling.topk is left out: there is no such key; is top_k meant?"),
        ('[sampling]\ntop_k = "3"', "sampling.top_k is left out: it takes a whole number."),
        ("[sampling]\ntop_p = 2", "sampling.top_p is left out: top-p must be from 0 to 1, not 2.0."),
        ('[mcp.a]\ncmd = "x"', "mcp.a is left out: it has no key cmd."),
        ('[mcp.a]\ncomand = "x"', "mcp.a is left out: it has no key comand; is command meant?"),
        ('[mcp.a]\ncommand = "x"\nargs = "y"', "mcp.a is left out: args takes a list of texts."),
        ("[models]\nfast = 1", "models.fast is left out: it takes a text in quotation marks."),
    ],
)
def test_what_is_wrong_with_a_key_is_said_in_words(home, text, says):
    path = home / "settings.toml"
    path.write_text(text)
    assert usable_settings(path)[1] == (f"settings.toml: {says}",)


def test_files_of_editors_on_windows_and_of_no_editor(home):
    path = home / "settings.toml"
    path.write_bytes(b"\xef\xbb\xbfcontext = 512\r\n")
    assert load_settings(path).context == 512
    for text, says in (
        ("a = " + "[" * 9999, "lists within lists"),
        ("system = '" + "x" * (1 << 18) + "'", "it has more than 262,144 bytes"),
    ):
        path.write_text(text)
        settings, [flaw] = usable_settings(path)
        assert settings == Settings() and says in flaw
    path.write_text("\n".join(f"key{i} = 1" for i in range(30)))
    flaws = usable_settings(path)[1]
    assert len(flaws) == 21 and flaws[-1] == "settings.toml: what follows is left out, too."


def test_servers_of_tools(home):
    path = home / "settings.toml"
    path.write_text(
        '[mcp.files]\ncommand = "npx"\nargs = ["-y", "a"]\nenv = {A = "b"}\n[mcp.web]\nurl = "http://a/mcp"\n'
        '[mcp.both]\ncommand = "a"\nurl = "http://a"\n[mcp.neither]\n[mcp."a.b"]\ncommand = "a"\n'
        '[mcp.file]\nurl = "file:///a"\n[mcp.quick]\ncommand = "a"\ntimeout_s = 0\n'
    )
    settings, flaws = usable_settings(path)
    assert settings.mcp["files"].args == ("-y", "a") and [*settings.mcp] == ["files", "web"]
    assert [flaw.split()[1] for flaw in flaws] == [
        "mcp.both",
        "mcp.neither",
        "mcp.a.b",
        "mcp.file",
        "mcp.quick",
    ]
    assert "a command or a url" in flaws[0] and "small letters" in flaws[2]


def test_bytes_that_are_not_text(home):
    path = home / "settings.toml"
    path.write_bytes(b"model = '\xff\xfe'")
    with pytest.raises(UsageError, match=r"settings\.toml"):
        load_settings(path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_k": -1},
        {"top_p": 1.01},
        {"min_p": -1.0},
        {"repeat_penalty": 0.0},
        {"seed": -1},
        {"seed": 2**32},
        {"presence_penalty": float("nan")},
        {"frequency_penalty": 2.5},
    ],
)
def test_sampling_out_of_range_is_refused_by_name(wrong):
    check_sampling(Sampling())
    with pytest.raises(UsageError, match=next(iter(wrong)).replace("_", "-")):
        check_sampling(Sampling(**wrong))


def test_the_last_model_is_remembered(home):
    assert last_model() == ""
    remember_model(str(home / "a model.gguf"))
    assert last_model() == str(home / "a model.gguf")


def test_a_state_folder_that_cannot_be_written_is_no_reason_to_stop(home):
    (home / ".local").write_text("a file where a folder should be")
    remember_model(str(home / "m.gguf"))
    assert last_model() == ""


def test_what_is_remembered_is_apart_and_lost_without_a_word(home, monkeypatch):
    assert remembered("theme") == ""
    remember("theme", "textual-light")
    remember("model", "m.gguf")
    assert (remembered("theme"), last_model()) == ("textual-light", "m.gguf")
    monkeypatch.setattr("app.chat.settings._remembered_path", lambda what: Path("/dev/null") / what)
    remember("theme", "dark")
    assert remembered("theme") == ""


def test_a_full_disk_leaves_what_was_remembered_before(home, monkeypatch):
    remember("model", "one")
    monkeypatch.setattr(Path, "replace", mock.Mock(side_effect=OSError(28, "No space left on device")))
    remember("model", "two")
    assert remembered("model") == "one"
    assert len(list(platformdirs.user_state_path("orin-chat", appauthor=False).iterdir())) == 1


def test_what_is_remembered_is_for_its_owner_only(home):
    remember("model", "one")
    path = next(home.rglob("last-model"))
    path.chmod(0o644)
    remember("model", "two")
    assert path.stat().st_mode & 0o777 == 0o600 and remembered("model") == "two"


def test_numbers_that_are_too_large_for_a_command():
    for name, text in (("context", "9" * 20), ("context", "1")):
        with pytest.raises(UsageError, match="is no value for context"):
            engine_option(name, text)
    with pytest.raises(UsageError, match="needs the number of a chat"):
        chat_number("open", "9" * 5000)
