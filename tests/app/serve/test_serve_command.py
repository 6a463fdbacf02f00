"""The command serve: its options, what it refuses, and the models that it is given."""

import asyncio
import errno
import io
import json
import signal
import subprocess
import sys
from types import SimpleNamespace

import httpx
import pytest

from app.serve.lines import Lines
from app.serve.server import listen
from engine.errors import UsageError
from tests.app.fake_engine import READY, FakeEngine
from tests.paths import ROOT
from widgets.dashboard.request_list import Handled


def test_a_port_that_is_taken():
    with listen("127.0.0.1", 0) as sock, pytest.raises(UsageError, match="in use"):
        listen("127.0.0.1", sock.getsockname()[1])
    with pytest.raises(UsageError, match="cannot listen on no"):
        listen("no.such.host.invalid", 0)


class Full(io.StringIO):
    """A file on a full disk."""

    def flush(self):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_requests_are_answered_while_the_disk_of_the_log_is_full(monkeypatch):
    """All of them failed with status 500."""
    monkeypatch.setattr(sys, "stdout", Full())
    monkeypatch.setattr(sys, "stderr", Full())
    lines = Lines("http://127.0.0.1:8080/v1")
    lines.handled(Handled("12:00:00", "127.0.0.1", "/v1/models", 200, problem="bad"))
    lines.show(READY)


def test_the_command(model_path):
    command = [
        sys.executable,
        "-m",
        "tests.app.synthetic_cli",
        json.dumps({"rate": 0, "tokens": 5, "load_s": 0.0}),
        "serve",
    ]
    command += ["--port", "0", "--model", str(model_path)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as process:
        address, said = "", list[str]()
        while not address:
            said.append(process.stderr.readline())
            address = said[-1].partition("listening on ")[2].strip()
        assert said[0] == "orin-chat: loading\n", "a file says so before the model is ready"
        answer = httpx.post(
            f"{address}/chat/completions", json={"messages": [{"role": "user", "content": "secret"}]}
        )
        assert answer.json()["model"] == "tiny" and answer.json()["usage"]["completion_tokens"] == 5
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert process.returncode == 130 and err == ""
    assert (
        "127.0.0.1 /v1/chat/completions 200: prompt" in out
        and "reply 5 tokens" in out
        and "secret" not in out
    )


@pytest.mark.parametrize(
    ("arguments", "environment", "says"),
    [
        (["--host", "0.0.0.0"], {}, "Everyone who reaches 0.0.0.0"),
        (["--api-key-env", "ORIN_KEY"], {}, "ORIN_KEY is not set"),
        (["--api-key-env", "ORIN_KEY", "--host", "256.0.0.1"], {"ORIN_KEY": " , "}, "ORIN_KEY is not set"),
        (["--port", "70000"], {}, "no port 70000"),
        (["--token-gap", "0.9"], {}, "number, 1 or more, not '0.9'"),
        (["--token-gap", "nan"], {}, "number, 1 or more"),
    ],
)
def test_what_the_command_refuses(model_path, monkeypatch, arguments, environment, says):
    from app.chat.settings import Settings
    from app.serve.serve_command import run

    monkeypatch.delenv("ORIN_KEY", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=says):
        run(["--port", "0", "--model", str(model_path), *arguments], Settings())


@pytest.mark.parametrize(("arguments", "gap"), [([], 2.0), (["--token-gap", "1.5"], 1.5)])
def test_what_the_engine_is_told(model_path, monkeypatch, arguments, gap):
    from app.chat.settings import Settings
    from app.serve import serve_command

    made = []
    monkeypatch.setattr(
        serve_command, "LocalEngine", lambda options, **_: made.append(options) or FakeEngine()
    )
    monkeypatch.setattr(asyncio, "run", lambda run: run.close() or 0)
    assert (
        serve_command.run(["--port", "0", "--model", str(model_path), "--plain", *arguments], Settings()) == 0
    )
    assert made[0].token_gap == gap


def test_a_folder_of_models(model_path, tmp_path, monkeypatch):
    from app.chat.settings import Settings
    from app.serve import serve_command

    made, names = [], []
    engine = lambda options, **_: made.append(options.model_path) or FakeEngine()
    monkeypatch.setattr(serve_command, "LocalEngine", engine)
    monkeypatch.setattr("app.serve.routes.application", lambda pool, *_: names.extend(pool.names))
    monkeypatch.setattr("app.serve.server.Server", lambda *_: SimpleNamespace(run=lambda: None))
    monkeypatch.setattr(asyncio, "run", lambda run: 0)
    for name in ("b.gguf", "a.gguf", "c-00001-of-00002.gguf", "c-00002-of-00002.gguf", "a-mmproj-F16.gguf"):
        (tmp_path / name).symlink_to(model_path)
    assert serve_command.run(["--port", "0", "--models", str(tmp_path), "--loaded", "2"], Settings()) == 0
    assert names == ["a", "b", "c-00001-of-00002"] and made == [str(tmp_path / "a.gguf")]
    with pytest.raises(UsageError, match="two ways"):
        serve_command.run(["--models", str(tmp_path), "--model", "x"], Settings())


def test_a_missing_extra(monkeypatch):
    from app.chat.settings import Settings
    from app.serve.serve_command import run

    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(UsageError, match="needs the library uvicorn") as refused:
        run([], Settings())
    assert "pip install llguidance starlette uvicorn" in refused.value.hint
