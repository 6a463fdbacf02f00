"""The command line with other engines: a server that answers, llama.cpp beside ours."""

import asyncio
import io
import json
import threading

import pytest

from app.main import main
from tests import generated_model
from tests.peers.fake_server import FakeServer, sse
from tests.thorough import thorough

LONG = "why? " * 30  # long enough for a prefill rate


@pytest.fixture
def server(monkeypatch):
    """A server with OpenAI's protocol, in a thread of its own."""
    monkeypatch.setattr("sys.stdin", io.StringIO())
    fake = FakeServer({})
    fake.answer("/v1/models", {"data": [{"id": "owner/small", "owned_by": "vllm", "max_model_len": 4096}]})
    pieces = [{"choices": [{"delta": {"content": text}}]} for text in ("Be", "cause\x1b[2J.")]
    fake.answer("/v1/chat/completions", *sse(*pieces, {"choices": [{"finish_reason": "stop"}]}, "[DONE]"))
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def listen():
        return await asyncio.start_server(fake.serve, "127.0.0.1", 0)

    listening = asyncio.run_coroutine_threadsafe(listen(), loop).result()
    fake.url = f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}/v1"
    yield fake
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    listening.close()
    loop.close()


def test_a_server_answers(server, capsys, monkeypatch):
    monkeypatch.setenv("MY_KEY", " sesame\n")
    code = main(
        ["--engine", server.url, "--api-key-env", "MY_KEY", "--verbose", "--system", "Brief.", "why?"]
    )
    out, err = capsys.readouterr()
    assert (code, out) == (0, "Because[2J.\n")
    assert "small, on vLLM (127.0.0.1" in err and "context of 4,096 tokens" in err
    _, headers, body = server.requests[-1]
    assert headers["authorization"] == "Bearer sesame"
    assert [message["role"] for message in body["messages"]] == ["system", "user"]


def test_a_server_answers_as_json(server, capsys):
    assert main(["--engine", server.url, "--json", "--model", "owner/small", "why?"]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["event"] for event in events] == ["ready", "token", "token", "finished"]


def test_a_server_that_refuses(server, capsys):
    server.answer("/v1/chat/completions", {"error": {"message": "Out of money."}}, status=429)
    assert main(["--engine", server.url, "why?"]) == 4
    assert "takes no more requests now: Out of money. Try again later." in capsys.readouterr().err


def test_nothing_is_remembered_of_a_server(server, home):
    main(["--engine", server.url, "why?"])
    assert not list(home.rglob("last-model"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--engine", "nonsense", "x"], "'nonsense' is not the address of a server"),
        (["--engine", "localhost:8080", "x"], "Write it as http://localhost:8080/v1"),
        (["--engine", "http://h/v1", "--api-key-env", "NONE_SUCH", "x"], "variable NONE_SUCH is not set"),
        (["--engine", "http://h/v1", "--beam", "2", "x"], "--engine is set up where it runs"),
        (["--engine", "http://h/v1", "--compare", "x"], "--compare is for the engine of orin-chat"),
        (["--api-key-env", "HOME", "x"], "--api-key-env is for the server"),
        (["--llama-server", "/bin/true", "x"], "--llama-server is for a comparison"),
        (["--compare", "--plain"], "--compare is for the full screen"),
        (["--compare", "--once"], "--compare is for the full screen"),
        (["--compare", "--json", "--logprobs", "2", "x"], "--compare leaves no place for --logprobs"),
    ],
)
def test_wrong_usage(capsys, monkeypatch, arguments, message):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    assert main(arguments) == 2
    assert message in "".join(capsys.readouterr())


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO())
    path = generated_model.write(tmp_path / "noise.gguf")
    options = "--backend CPU --context 256 --max-tokens 12 --speculate off --compare"
    return ["--model", str(path), *options.split()]


def test_llama_cpp_answers_too(model, llama_server, capsys):
    assert main([*model, "--llama-server", llama_server, LONG]) == 0
    out = capsys.readouterr().out
    assert "orin-chat" in out and "llama.cpp" in out
    assert out.count("tok/s") == 4
    assert "in turn · greedy" in out

    assert main([*model, "--llama-server", llama_server, "--json", LONG]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["event"] for event in events[-2:]] == ["finished", "comparison"]
    assert events[-1]["left"]["decode"] > 0 and events[-1]["right"]["decode"] > 0


def test_without_llama_cpp_ours_answers_all_the_same_and_the_exit_code_says_so(model, capsys):
    assert main([*model, "--llama-server", "/nowhere/llama-server", LONG]) == 4
    out, err = capsys.readouterr()
    assert "llama.cpp: There is no program /nowhere/llama-server. Install llama.cpp" in out
    assert out.count("tok/s") == 2
    assert err == "orin-chat: There is no comparison: llama.cpp did not answer.\n"


@thorough
def test_without_llama_cpp_the_last_event_says_so(model, capsys):
    assert main([*model, "--llama-server", "/nowhere/llama-server", "--json", LONG]) == 4
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [event["event"] for event in events[-3:]] == ["finished", "comparison", "failed"]
