"""Programs are set up for a server that runs."""

import io
import json
import socket
import sys
import threading
import tomllib
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from app.chat.settings import Settings
from app.serve.agents import AGENTS, Endpoint
from app.serve.agents_command import run
from engine.errors import BackendError, UsageError

AT = Endpoint("http://127.0.0.1:8080", "qwen3:0.6b", 8192)


@pytest.fixture
def server(monkeypatch, tmp_path):
    """The address of a server with one model; it needs the key s3cret."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            is_allowed = self.headers["Authorization"] == "Bearer s3cret"
            self.send_response(200 if is_allowed else 401)
            self.end_headers()
            if is_allowed:
                self.wfile.write(b'{"data": [{"id": "qwen3:0.6b", "context_length": 8192}]}')

        def log_message(self, *_):
            pass

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("ORIN_KEY", "s3cret")
    monkeypatch.chdir(tmp_path)
    with HTTPServer(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield f"http://127.0.0.1:{http.server_port}"
        http.shutdown()


def ask(server, *arguments):
    return run(["--server", server, "--api-key-env", "ORIN_KEY", *arguments], Settings())


def test_what_is_printed(server, capsys):
    assert ask(f"{server}/v1") == 0
    out = capsys.readouterr().out
    for agent in AGENTS.values():
        assert f"# {agent.title}\n" in out
    assert f'base_url = "{server}/v1"' in out and "s3cret" not in out and '"$ORIN_KEY"' in out
    assert "model_context_window=8192" in out
    with pytest.raises(UsageError, match="no model x"):
        ask(server, "codex", "--model", "x")
    with pytest.raises(UsageError, match="does not know 'emacs'"):
        ask(server, "emacs")
    with pytest.raises(BackendError, match="refuses: 401"):
        run(["--server", server], Settings())
    with pytest.raises(BackendError, match="No orin-chat answers"):
        run(["--server", "http://127.0.0.1:9"], Settings())


@pytest.mark.parametrize(
    "answer",
    [b"SSH-2.0-OpenSSH_9.6\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 90000\r\n\r\n" + b"[" * 90_000],
)
def test_other_servers_are_none(answer):
    def reply(listening):
        with listening.accept()[0] as connection:
            connection.recv(4096)
            connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listening, ThreadPoolExecutor() as threads:
        threads.submit(reply, listening)
        with pytest.raises(BackendError, match="No orin-chat answers"):
            run(["--server", f"http://127.0.0.1:{listening.getsockname()[1]}"], Settings())


def test_files_are_written_beside_what_is_in_them(server, capsys, tmp_path):
    codex, opencode = tmp_path / ".codex/config.toml", tmp_path / ".config/opencode/opencode.json"
    for file, text in ((codex, 'model = "gpt"\n'), (opencode, '{"theme": "x", "provider": {"a": {}}}')):
        file.parent.mkdir(parents=True)
        file.write_text(text)
    assert ask(server, "codex", "opencode", "claude", "llm", "--write", "--yes") == 0
    out = capsys.readouterr().out
    assert "+[model_providers.orin-chat]" in out and "written: ~/.codex/config.toml" in out
    assert tomllib.loads(codex.read_text())["model"] == "gpt"
    assert tomllib.loads(codex.read_text())["model_providers"]["orin-chat"]["env_key"] == "ORIN_KEY"
    providers = json.loads(opencode.read_text())["provider"]
    assert providers.keys() == {"a", "orin-chat"} and "s3cret" not in opencode.read_text()
    claude = json.loads((tmp_path / ".claude/settings.local.json").read_text())
    assert claude["env"]["ANTHROPIC_BASE_URL"] == server and "s3cret" not in str(claude)
    with pytest.raises(UsageError, match="already"):
        ask(server, "codex", "--write", "--yes")


def test_a_link_stays_and_a_file_that_another_way_of_writing_would_break(server, tmp_path):
    kept, linked = tmp_path / "dotfiles/config.toml", tmp_path / ".codex/config.toml"
    for folder in (kept.parent, linked.parent):
        folder.mkdir()
    kept.write_text('model = "gpt"\n')
    linked.symlink_to(kept)
    assert ask(server, "codex", "--write", "--yes") == 0
    assert linked.is_symlink() and "orin-chat" in kept.read_text()
    for text in ("model_providers = {}\n", '[model_providers."orin-chat"]\n', "model = 'a\n"):
        kept.write_text(text)
        with pytest.raises(UsageError, match="would not be valid TOML"):
            ask(server, "codex", "--write", "--yes")
        assert kept.read_text() == text


def test_nothing_is_written_that_nobody_agreed_to(server, monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with pytest.raises(UsageError, match="--yes"):
        ask(server, "codex", "--write")
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda _: "n")
    assert ask(server, "codex", "--write") == 0 and not (tmp_path / ".codex").exists()
    broken = tmp_path / ".config/zed/settings.json"
    broken.parent.mkdir(parents=True)
    broken.write_text("// a comment\n{}")
    with pytest.raises(UsageError, match="not plain JSON"):
        ask(server, "zed", "--write", "--yes")
    assert broken.read_text() == "// a comment\n{}"


def test_what_a_model_lacks_is_said_and_not_promised():
    small = Endpoint("http://127.0.0.1:8080", "tiny", 2048, has_tools=False, sees=True)
    assert [remark.split(" ")[0] for remark in small.remarks] == ["The", "A"]
    assert not Endpoint("http://127.0.0.1:8080", "tiny", 32768).remarks
    opencode, zed, llm = (AGENTS[name].lines(small) for name in ("opencode", "zed", "llm"))
    assert '"tool_call": false' in opencode and "supports_tools: false" in llm and "vision: true" in llm
    assert '"tools": false' in zed and '"images": true' in zed


@pytest.mark.parametrize("name", AGENTS)
def test_each_says_where_the_server_is_and_which_model(name):
    agent = AGENTS[name]
    text = agent.lines(AT) + agent.run(AT)
    assert AT.address in text and (AT.model in text or name == "open-webui")
