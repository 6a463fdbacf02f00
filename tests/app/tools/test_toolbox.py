"""Servers of tools in processes: what they offer, what calls return, and what becomes of those that break the rules."""

import asyncio
import contextlib
import gzip
import json
import signal
import socket
import subprocess
import sys
import time
from asyncio.subprocess import PIPE
from importlib.util import find_spec
from pathlib import Path

import pytest

from app.tools import toolbox as toolbox_module
from app.tools.messages import Listed, ListedTool, Result, Server
from app.tools.stdio import _end
from app.tools.toolbox import Toolbox, without_sequences
from tests.paths import ROOT
from tests.thorough import thorough
from tests.waiting import until

pytestmark = pytest.mark.skipif(find_spec("mcp") is None, reason="the extra `mcp` is not installed")
SERVER = Path(__file__).with_name("server.py")


def real(**options) -> Server:
    return Server(command=sys.executable, args=(str(SERVER),), folder=str(ROOT), **options)


async def call(box: Toolbox, name: str, **arguments):
    return await box.call(box.tools[name], json.dumps(arguments))


def test_a_command_may_be_a_list_with_its_arguments():
    assert Server(command=("npx", "-y"), args=("a",)).words == ("npx", "-y", "a")
    assert Server(command="npx", args=("-y",)).words == ("npx", "-y")
    with pytest.raises(ValueError, match="a command or a url"):
        Server(command=())


@thorough
async def test_a_real_server_lists_answers_and_dies():
    box = Toolbox({"calc": real(), "gone": Server(command="no-such-program")})
    await box.start()
    try:
        assert box.states["gone"].text == "does not start: No such file or directory: no-such-program"
        # Each name is of its server, and of letters that do not look like others.
        assert [*box.tools] == [
            f"calc.{name}" for name in ("add", "_dd", "web_search", "large", "hang", "die")
        ]
        shown = json.loads(box.shown())
        assert shown[0]["function"]["description"] == "Adds numbers."
        assert shown[0]["function"]["parameters"]["required"] == ["a", "b"]
        assert (await call(box, "calc.add", a=2, b=3)).text == "5"
        assert (await call(box, "calc._dd")).text == "redtext"
        wrong = await box.call(box.tools["calc.add"], "[1]")
        assert wrong.is_error and "no JSON object" in wrong.text
        assert (await call(box, "calc.add", a="x")).is_error
        dead = await call(box, "calc.die")
        assert dead.is_error and dead.text.startswith("calc ended: exit status 3, the last words")
        assert "exit status 3, the last words.." in box.states["calc"].problem and not box.tools
    finally:
        await box.close()


@thorough
async def test_servers_that_hang_send_too_much_or_are_started_again(monkeypatch):
    monkeypatch.setattr(toolbox_module, "START_S", 8.0)
    quick, mute = real(timeout_s=0.5), Server(command="sleep", args=("100",))
    box = Toolbox({"quick": quick, "calc": real(), "mute": mute})
    try:
        await box.start()
        assert box.states["mute"].text == "did not answer in time"
        assert (await call(box, "quick.hang")).text == "quick did not answer within 0.5 s."
        assert (await call(box, "quick.add", a=2, b=3)).text == "5"  # the server lives on
        large = await call(box, "calc.large", mib=1)
        assert len(large.text) == 200_000 and large.left_out == (1 << 20) - 200_000
        huge = await call(box, "calc.large", mib=100)
        assert huge.text == "calc sent a message of more than 8 MiB and was ended."
        await box.again()
        assert (await call(box, "calc.add", a=2, b=3)).text == "5"
    finally:
        await box.close()


@thorough
async def test_a_server_over_http():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, str(SERVER), str(port)],
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with socket.socket() as tried:
                if tried.connect_ex(("127.0.0.1", port)) == 0:
                    break
            await asyncio.sleep(0.05)
        box = Toolbox({"web": Server(url=f"http://127.0.0.1:{port}/mcp")})
        await box.start()
        assert (await call(box, "web.add", a=2, b=3)).text == "5"
        huge = await call(box, "web.large", mib=30)
        assert huge.is_error and "web " in huge.text
        await box.close()
    finally:
        process.kill()
        process.wait()


class Forgetful:
    """A server over HTTP that has forgotten its first session before all calls, and its second one after two, and whose
    streams of events end at once and are to be asked for again at once."""

    sessions = streams = answered = refused = 0

    async def answer(self, reader, writer):
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
                if head.startswith("get"):
                    self.streams += 1
                    writer.write(
                        b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\nretry: 0\nid: 1\n\n"
                    )
                    break
                if head.startswith("delete"):
                    writer.write(b"HTTP/1.1 404 .\r\nContent-Length: 0\r\n\r\n")
                    continue
                asked = json.loads(
                    await reader.readexactly(int(head.split("content-length: ")[1].split()[0]))
                )
                if "/closed " in head:
                    writer.write(b"HTTP/1.1 401 .\r\nContent-Length: 0\r\n\r\n")
                    continue
                session = head.partition("mcp-session-id: ")[2][:1]
                status, body = self._answer(asked.get("method"), session)
                if status == 404:
                    self.refused += 1
                    await asyncio.sleep(0.05 * self.refused)
                text = json.dumps({"jsonrpc": "2.0", "id": asked.get("id")} | body) if body else ""
                kind = f"Content-Type: application/json\r\nMcp-Session-Id: {self.sessions}"
                writer.write(
                    f"HTTP/1.1 {status} .\r\n{kind}\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode()
                )
        writer.close()

    def _answer(self, method, session):
        match method:
            case "initialize":
                self.sessions += 1
                about = {"protocolVersion": "2025-06-18", "serverInfo": {"name": "x", "version": "1"}}
                return 200, {"result": about | {"capabilities": {"tools": {}}}}
            case "tools/list":
                return 200, {"result": {"tools": [{"name": "echo", "inputSchema": {"type": "object"}}]}}
            case "tools/call" if session == "1":
                return 404, {"error": {"code": -32001, "message": "Session not found"}}
            case "tools/call" if session == "2" and self.answered == 2:
                return 400, {"error": {"code": -32000, "message": "No valid session ID"}, "id": None}
            case "tools/call":
                self.answered += 1
                return 200, {"result": {"content": [{"type": "text", "text": "hello"}]}}
        return 202, {}


async def test_faults_of_servers_harm_no_other(monkeypatch):
    """All at once, since their process takes a second to start. What is sent to one that does not read waits in the
    library, whose own limit counts from then on."""
    monkeypatch.setenv("SSL_CERT_FILE", "/nowhere")  # certificates are read for https only
    bomb = gzip.compress(b'{"jsonrpc": "2.0", "id": 0, "result": {"x": "%s"}}' % bytes(1 << 20))
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n"

    async def answer(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head % len(bomb) + bomb)
        writer.close()

    def faulty(fault, **options):
        arguments = "-S", "-E", str(ROOT / "tests/soak/bad_tool_server.py"), fault
        return Server(command=sys.executable, args=arguments, **options)

    forgetful = Forgetful()
    async with (
        await asyncio.start_server(answer, "127.0.0.1", 0) as web,
        await asyncio.start_server(forgetful.answer, "127.0.0.1", 0) as other,
    ):
        url, other_url = (f"http://127.0.0.1:{each.sockets[0].getsockname()[1]}/mcp" for each in (web, other))
        servers = {"odd": "sends surrogates", "wrong": "has invalid tools", "good": "none"}
        servers |= {"new": "changes its tools", "first": "has wrong capabilities"}
        box = Toolbox(
            {name: faulty(fault) for name, fault in servers.items()}
            | {"deaf": faulty("stops reading", timeout_s=0.2), "web": Server(url=url)}
            | {"lost": Server(url=other_url), "closed": Server(url=other_url.replace("mcp", "closed"))}
        )
        await box.start()
        try:
            assert box.states["web"].text == "failed: it sent a compressed answer, which nobody asked for"
            closed = "failed: it answered with the status 401: does it need a key, in headers?"
            assert box.states["closed"].text == closed
            problem = "sent an answer that MCP does not have: InitializeResult.capabilities: Input should be"
            assert box.states["first"].text.startswith(problem)
            assert (await call(box, "new.echo", text="hello")).text == "hello"
            assert (await call(box, "odd.echo", text="hello")).text.startswith("\ufffd ")
            assert (await call(box, "wrong.echo", text="hello")).text == "hello"
            left_out = "1 tool, not valid and left out: " + ", ".join(["one without a name"] * 3 + ["text"])
            assert box.states["wrong"].text.startswith(left_out)
            assert (
                await call(box, "deaf.echo", text="x" * 200_000)
            ).text == "deaf did not answer within 0.2 s."
            assert (await call(box, "good.echo", text="hello")).text == "hello"
            at_once = await asyncio.gather(*(call(box, "lost.echo") for _ in range(2)))
            assert [each.text for each in at_once] == ["hello"] * 2 and forgetful.sessions == 2
            assert (await call(box, "lost.echo")).text == "hello" and forgetful.sessions == 3
            assert forgetful.streams < 10, "no more than one a second and session"
            await until(lambda: "new.later0" in box.tools)
        finally:
            await box.close()


def listing() -> list[str]:
    """A process of servers in which one lists a tool."""
    lists = "import sys; sys.stdin.readline(); print('{}'); print(sys.argv[1], flush=True); sys.stdin.read()"
    line = '{"type":"Listed","server":"calc","tools":[{"name":"add","schema":"{}"}]}'
    return [sys.executable, "-c", lists, line]


async def test_two_who_start_the_servers_at_once_share_their_process(monkeypatch):
    begun = []
    monkeypatch.setattr(toolbox_module, "module_command", lambda name: begun.append(name) or listing())
    box = Toolbox({"calc": Server(command="none")})
    await asyncio.gather(box.start(), box.start())
    assert len(begun) == 1 and [*box.tools] == ["calc.add"]
    await box.close()


async def test_the_process_of_the_servers_is_lost_and_begins_again(monkeypatch):
    box = Toolbox({"calc": Server(command="none")})
    monkeypatch.setattr(
        toolbox_module, "module_command", lambda _: [sys.executable, "-c", "raise SystemExit(7)"]
    )
    await box.start()
    assert box.states["calc"].text == "was lost: the process of the servers ended with exit status 7"
    monkeypatch.setattr(toolbox_module, "module_command", lambda _: listing())
    await box.start()
    assert [*box.tools] == ["calc.add"]
    await box.close()


async def test_no_server_outlives_a_program_that_ends_meanwhile():
    process = await asyncio.create_subprocess_exec("sleep", "100", stdin=PIPE, start_new_session=True)
    ending = asyncio.ensure_future(_end(process, at_once=False))
    await asyncio.sleep(0)
    ending.cancel()
    assert await process.wait() == -signal.SIGKILL


async def test_nothing_is_started_without_servers(monkeypatch):
    monkeypatch.setattr(toolbox_module, "module_command", None)
    box = Toolbox({})
    await box.start()
    assert box.shown() == ""
    await box.close()


def test_names_and_texts_are_made_harmless():
    box = Toolbox({"a": Server(command="a"), "a_b": Server(command="b")})
    hostile = [ListedTool(name=name, schema="{}") for name in ("x", "х", "x", "b.x", "\x1b[1m", "y" * 100)]
    box._take(Listed(server="a", tools=tuple(hostile), note="\x1b[31mnote"))
    box._take(Listed(server="a_b", tools=(ListedTool(name="x", schema="{}"),)))
    names = [*box.tools]
    assert len(set(names)) == 7 and all(name.isascii() and len(name) < 80 for name in names)
    assert names[0] == "a.x" and names[-1] == "a_b.x"
    assert box.states["a"].note.isprintable()
    assert (
        without_sequences("\x1b[1;31mred\x1b]8;;http://a\x1b\\link\x1bP1$r\x1b\\\x9b2Jend\x1b")
        == "redlinkend\x1b"
    )


def test_a_tool_that_changes_has_another_definition():
    def definition(server: Server, tool: ListedTool) -> str:
        box = Toolbox({"a": server})
        box._take(Listed(server="a", tools=(tool,)))
        return box.tools["a.x"].definition

    first = definition(Server(command="a"), ListedTool(name="x", schema="{}"))
    assert first == definition(Server(command="a"), ListedTool(name="x", schema="{}"))
    assert first != definition(Server(command="a"), ListedTool(name="x", description="more", schema="{}"))
    assert first != definition(Server(command="b"), ListedTool(name="x", schema="{}"))


def test_a_result_that_nobody_waits_for_is_forgotten():
    Toolbox({"a": Server(command="a")})._take(Result(id=7, text="late"))
