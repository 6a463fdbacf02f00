"""A llama-server that does not work: each way to fail is one sentence, and nothing of it stays behind."""

import asyncio
import socket
import sys
from pathlib import Path

import pytest

from engine.peers.llama_process import find_llama_server
from engine.protocol.events import Failed, Generate, Loading, RawText, Sampling, TokenIds
from tests.peers.conftest import collect
from tests.peers.fake_server import CLOSE, WAIT, fake_server, sse

HELP = """\
-c, --ctx-size N    size of the context
--host HOST         address to listen on, or a UNIX socket if it ends with .sock
-ngl, --n-gpu-layers N   layers on the device: a number, 'auto' or 'all'
-fa, --flash-attn [on|off|auto]
-ctk, --cache-type-k TYPE
-ctv, --cache-type-v TYPE
--fit [on|off]
--no-ui
"""


@pytest.fixture
def program(tmp_path):
    """Makes a program that stands in for llama-server: `run` is what it does instead of serving."""

    def make(run: str, help: str = HELP) -> str:
        path = tmp_path / "llama-server"
        path.write_text(
            f"#!{sys.executable} -IS\nimport os, sys, time\n"  # without what is installed: a third of the start
            f"if '--help' in sys.argv:\n    print({help!r})\n    sys.exit()\n{run}\n"
        )
        path.chmod(0o755)
        return str(path)

    return make


def test_where_it_is_looked_for(program, tmp_path, monkeypatch):
    path = program("")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("LLAMA_SERVER", raising=False)
    assert find_llama_server(path) == path
    monkeypatch.setenv("LLAMA_SERVER", path)
    assert find_llama_server() == path
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("LLAMA_SERVER")
    assert find_llama_server() == path


@pytest.mark.parametrize("given", ["", "/nowhere/llama-server"])
async def test_none(peers, monkeypatch, given):
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.delenv("LLAMA_SERVER", raising=False)
    *_, failed = await collect(peers(given).start())
    assert isinstance(failed, Failed)
    assert failed.kind == "backend"
    assert failed.message == (
        f"There is no program {given}." if given else "llama.cpp's llama-server was not found."
    )
    assert "--llama-server" in failed.hint and "github.com/ggml-org/llama.cpp" in failed.hint


@pytest.mark.parametrize(
    ("run", "kind", "message"),
    [
        (
            "sys.exit(3)",
            "backend",
            "llama-server ended before it was ready (exit status 3); it printed nothing.",
        ),
        (
            "os.kill(os.getpid(), 11)",
            "backend",
            "llama-server ended before it was ready (signal 11, SIGSEGV); it printed nothing.",
        ),
        (
            "print('loading', flush=True); os.kill(os.getpid(), 4)",
            "backend",
            "llama-server ended before it was ready (signal 4, SIGILL).",
        ),
        ("os.kill(os.getpid(), 9)", "backend", "llama-server was killed."),
        (
            "sys.exit('0.00.05 E ggml_backend_cuda_buffer_type_alloc_buffer: allocating 900 MiB on device 0: "
            "cudaMalloc failed: out of memory')",
            "backend",
            "llama-server ran out of memory.",
        ),
        (
            'sys.exit("0.00.05 E llama_model_load: error loading model: unknown model architecture: '
            "'x\\x1b[31m'\\n"
            '0.00.06 E srv  llama_server: exiting due to model loading error")',
            "model",
            "llama-server cannot run this model: error loading model: unknown model architecture: 'x[31m'.",
        ),
        (
            "sys.exit('./llama-server: error while loading shared libraries: libcuda.so.1: cannot open')",
            "backend",
            "llama-server ended before it was ready (exit status 1); it says: ./llama-server: error while "
            "loading shared libraries: libcuda.so.1: cannot open.",
        ),
        (
            "sys.exit('error: invalid argument: --no-ui')",
            "backend",
            "llama-server ended before it was ready (exit status 1); it says: invalid argument: --no-ui.",
        ),
    ],
)
async def test_one_that_ends(peers, program, run, kind, message, children):
    peer = peers(program(run))
    *_, failed = await collect(peer.start())
    assert (failed.kind, failed.message) == (kind, message)
    assert str(peer.log_path) in failed.hint
    assert peer.pid is None and not children()


async def test_earlier_runs_in_the_log_are_not_taken_for_this_one(peers, program):
    await collect(peers(program("sys.exit('0.1 E cudaMalloc failed: out of memory')")).start())
    *_, failed = await collect(peers(program("sys.exit(3)")).start())
    assert "it printed nothing" in failed.message


@pytest.mark.parametrize(
    ("run", "message"),
    [
        ("print('error: no such thing'); sys.exit(1)", "it says: no such thing."),
        ("sys.exit(1)", "it prints nothing."),
    ],
)
async def test_a_program_that_is_no_llama_server(peers, program, run, message):
    path = program("", help="")
    Path(path).write_text(f"#!{sys.executable}\nimport sys\n{run}\n")
    *_, failed = await collect(peers(path).start())
    assert failed.message == f"{path} is no llama-server that works: {message}"


async def test_one_that_cannot_be_run(peers, tmp_path):
    path = tmp_path / "llama-server"
    path.write_bytes(b"\x7fELF for another machine")
    path.chmod(0o755)
    *_, failed = await collect(peers(str(path)).start())
    assert failed.message == f"{path} cannot be run: Exec format error."


async def test_one_that_never_gets_ready(peers, program, children):
    peer = peers(program("time.sleep(60)"), start_s=0.3)
    *loading, failed = await collect(peer.start())
    assert loading and all(isinstance(event, Loading) for event in loading)
    assert failed.message == "llama-server was not ready after 0 s."
    assert peer.pid is None and not children()


async def test_giving_up_while_it_starts(peers, program, children):
    peer = peers(program("time.sleep(600)"))
    async for event in peer.start():
        assert isinstance(event, Loading)
        break
    await asyncio.sleep(0.1)
    stream = peer.generate(Generate(request_id=1, prompt=RawText(text="x")))
    events = []
    async for event in stream:
        events.append(event)
        if len(events) == 2:
            await peer.stop()
    assert events[-1].reason == "cancelled"
    await peer.close()
    assert peer.pid is None and not children()


async def test_one_that_does_not_want_to_end(peers, program, children):
    peer = peers(
        program("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"), start_s=0.5
    )
    await collect(peer.start())
    assert not children()


async def test_only_options_that_it_knows_are_asked_for(peers, program, tmp_path):
    log = tmp_path / "arguments"
    keep = f"open({str(log)!r}, 'w').write(' '.join(sys.argv[1:]) + ' ' + os.environ['LLAMA_API_KEY'])"
    await collect(peers(program(keep), kv="q8_0").start())
    arguments = log.read_text()
    assert "--flash-attn on" in arguments and "--fit off" in arguments and "--no-ui" in arguments
    assert "llama.sock" in arguments and "--port" not in arguments
    assert "--cache-ram" not in arguments and "--offline" not in arguments
    assert "-np 1 -c 256" in arguments
    assert "--cache-type-k q8_0 --cache-type-v q8_0" in arguments

    await collect(peers(program(keep), parallel=4).start())
    assert "-np 4 -c 1024" in log.read_text()

    await collect(
        peers(program(keep, help="--ctx-size N\n-fa, --flash-attn  use it\n--n-gpu-layers N")).start()
    )
    arguments = log.read_text()
    assert "--flash-attn" in arguments and "--flash-attn on" not in arguments
    assert "--port" in arguments and "127.0.0.1" in arguments


async def test_a_port_in_use(peers, llama_server, monkeypatch):
    monkeypatch.setattr("engine.peers.llama_process._MAX_SOCKET_PATH", 0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setattr("engine.peers.llama_process._free_port", lambda: taken.getsockname()[1])
        *_, failed = await collect(peers(llama_server, start_s=5).start())
    assert failed.message.startswith("llama-server cannot use its address: couldn't bind")


async def test_a_model_that_it_does_not_take(peers, llama_server, model, tmp_path):
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(Path(model).read_bytes())
    peer = peers(llama_server, model=str(cut))
    # Our reader refuses a truncated file; one whose tensors llama.cpp alone does not like is harder to make.
    data = cut.read_bytes().replace(b"blk.0.ffn_up.weight", b"blk.0.ffn_uq.weight")
    cut.write_bytes(data)
    *_, failed = await collect(peer.start())
    assert failed.kind == "model"
    assert failed.message.startswith("llama-server cannot run this model: ")
    assert "ffn_up" in failed.message


@pytest.mark.skipif(sys.platform != "linux", reason="limits the address space")
async def test_too_little_memory(peers, llama_server, tmp_path):
    path = tmp_path / "limited"
    path.write_text(f'#!/bin/sh\n[ "$1" = --help ] || ulimit -v 900000\nexec {llama_server} "$@"\n')
    path.chmod(0o755)
    *_, failed = await collect(peers(str(path), context_length=4_000_000).start())
    assert failed.message == "llama-server ran out of memory."


# --- a server elsewhere ---------------------------------------------------------------------------------

ASK = Generate(
    request_id=2,
    prompt=TokenIds(ids=(20, 21)),
    sampling=Sampling(temperature=0),
    max_tokens=4,
    ignore_eos=True,
)
TOKEN = {"content": "a", "tokens": [65], "stop": False, "tokens_predicted": 1, "timings": {"prompt_ms": 2.0}}


@pytest.fixture
async def fake():
    async with fake_server() as fake:
        fake.answer("/health", {"status": "ok"})
        fake.answer("/props", {"default_generation_settings": {"n_ctx": 256}})
        fake.answer("/v1/models", {"data": []})
        yield fake


async def test_nothing_listens_there(peers):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    [failed] = await collect(peers(url=f"http://127.0.0.1:{port}").start())
    assert failed.kind == "backend"
    assert failed.message.startswith(f"llama-server cannot be reached at http://127.0.0.1:{port}: ")


@pytest.mark.parametrize("url", ["127.0.0.1:8080", "ftp://host", "http://[", "http://host:port"])
async def test_an_address_that_is_none(peers, url):
    [failed] = await collect(peers(url=url).start())
    assert failed.kind == "usage"
    assert "is not the address of a server" in failed.message


async def test_a_server_that_still_loads_is_waited_for(peers, fake):
    fake.answer("/health", {"error": {"message": "Loading model", "code": 503}}, status=503)
    stream = peers(url=fake.url).start()
    assert isinstance(await anext(stream), Loading)
    fake.answer("/health", {"status": "ok"})
    assert [event async for event in stream][-1].context_length == 256


async def test_another_kind_of_server(peers, fake):
    fake.answer("/props", b"<html>Welcome</html>")
    [failed] = await collect(peers(url=fake.url).start())
    assert failed.message.startswith("llama.cpp sent something unexpected: ")


@pytest.mark.parametrize(
    ("parts", "kind", "message"),
    [
        ([*sse(TOKEN), CLOSE], "backend", "llama.cpp closed the connection before"),
        (sse(TOKEN), "backend", "llama.cpp ended its answer in the middle."),
        (sse(TOKEN, "{not json"), "backend", "llama.cpp sent something unexpected: "),
        (sse(TOKEN, '{"tokens": "x"}'), "backend", "llama.cpp sent something unexpected: "),
        (sse(TOKEN, "[" * 100_000), "backend", "llama.cpp sent something unexpected: "),
        (
            sse(TOKEN, {"error": {"code": 500, "message": "Compute error."}}),
            "backend",
            "llama.cpp failed (500 Internal Server Error): Compute error.",
        ),
        (
            [*sse(TOKEN), b'error: {"code": 400, "message": "No."}\n\n'],
            "usage",
            "llama.cpp refuses the request: No.",
        ),
    ],
)
async def test_answers_that_fail_in_the_middle(peers, fake, parts, kind, message):
    fake.answer("/completion", *parts)
    peer = peers(url=fake.url)
    await collect(peer.start())
    [token, failed] = await collect(peer.generate(ASK))
    assert token.text == "a"
    assert (failed.kind, failed.request_id) == (kind, 2)
    assert failed.message.startswith(message)
    fake.answer("/completion", *sse(TOKEN | {"tokens_predicted": 2, "stop": True, "stop_type": "eos"}))
    assert (await collect(peer.generate(ASK)))[-1].reason == "stop"


@pytest.mark.parametrize(
    ("status", "headers", "body", "kind", "message"),
    [
        (429, {"retry_after": "7"}, {}, "backend", "llama.cpp takes no more requests now. Try again in 7 s."),
        (
            429,
            {"retry_after": "\x1b]0;x"},
            {},
            "backend",
            "llama.cpp takes no more requests now. Try again later.",
        ),
        (
            500,
            {},
            {"error": "boom\x1b[2J"},
            "backend",
            "llama.cpp failed (500 Internal Server Error): boom[2J. ",
        ),
        (
            502,
            {},
            b"<html>",
            "backend",
            "llama.cpp failed (502 Bad Gateway). Try again; its log may say more.",
        ),
        (307, {"location": "http://x"}, {}, "backend", "llama.cpp failed (307 Temporary Redirect). "),
        (
            400,
            {},
            {"error": {"message": "No temperature."}},
            "usage",
            "llama.cpp refuses the request: No temperature.",
        ),
        (200, {}, {"content": "all at once"}, "backend", "llama.cpp does not stream its answer. "),
    ],
)
async def test_refusals(peers, fake, status, headers, body, kind, message):
    fake.answer("/completion", body, status=status, **headers)
    peer = peers(url=fake.url)
    await collect(peer.start())
    [failed] = await collect(peer.generate(ASK))
    assert failed.kind == kind
    assert f"{failed.message} {failed.hint}".startswith(message)


async def test_an_event_without_end(peers, fake, monkeypatch):
    monkeypatch.setattr("engine.peers.http.MAX_EVENT_BYTES", 10_000)
    fake.answer("/completion", b"data: {", *[b"x" * 1000] * 50)
    peer = peers(url=fake.url)
    await collect(peer.start())
    assert (await collect(peer.generate(ASK)))[-1].message.startswith("llama.cpp sent an event of more than")


async def test_silence_can_be_stopped(peers, fake):
    fake.answer("/completion", *sse(TOKEN), WAIT)
    peer = peers(url=fake.url)
    await collect(peer.start())
    events = []
    async for event in peer.generate(ASK):
        events.append(event)
        if len(events) == 1:
            asyncio.get_running_loop().call_later(0.05, lambda: asyncio.ensure_future(peer.stop()))
    assert events[-1].reason == "cancelled"
    await asyncio.wait_for(fake.hung_up.wait(), 60)


async def test_characters_that_took_several_tokens(peers, fake):
    fake.answer(
        "/completion",
        *sse(
            {"prompt_progress": {"total": 2, "cache": 0, "processed": 2}, "tokens": [0]},
            TOKEN,
            TOKEN | {"content": "é", "tokens": [9], "tokens_predicted": 3, "timings": {"predicted_ms": 5.0}},
            {
                "stop": True,
                "stop_type": "limit",
                "tokens_predicted": 4,
                "timings": {"prompt_ms": 2.0, "predicted_ms": 9.0},
            },
        ),
    )
    peer = peers(url=fake.url)
    await collect(peer.start())
    _, *tokens, end = await collect(peer.generate(ASK))
    assert [(token.id, token.text) for token in tokens] == [(65, "a"), (-1, ""), (9, "é"), (-1, "")]
    assert (end.predicted_n, end.predicted_ms, end.prompt_ms, end.reason) == (4, 9.0, 2.0, "length")


async def test_no_proxy_stands_between_us_and_our_own(peers, fake, monkeypatch):
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    assert (await collect(peers(url=fake.url).start()))[-1].context_length == 256
