"""The server on a real socket: other programs' clients, our own, signals, and the command."""

import asyncio
import base64
import contextlib
import json
import os
import signal
import socket

import httpx
import pytest

from app.serve import connection as connection_module
from app.serve import server as server_module
from app.serve.routes import application
from app.serve.server import Server, listen
from app.serve.service import Service
from engine.errors import UsageError
from engine.peers.openai_api import OpenAIEngine
from engine.protocol.events import (
    PICTURE_MARK,
    Chat,
    Failed,
    Finished,
    Generate,
    Message,
    Picture,
    Ready,
    Token,
)
from tests import synthetic
from tests.app.fake_engine import SEEING, STARTED, FakeEngine, reply, tokens, vector_of
from tests.app.serve.conftest import HELLO, WEATHER
from tests.app.serve.model_engine import ModelEngine
from tests.pictures import plain_picture
from tests.thorough import thorough
from tests.waiting import LIMIT_S, until

SCHEMA = {
    "type": "object",
    "properties": {"age": {"type": "integer", "maximum": 99}},
    "required": ["age"],
    "additionalProperties": False,
}


@contextlib.asynccontextmanager
async def running(engine, model_file, *, loads=True, **fields):
    """(address, Service, the run of the server, events of its start), once the model has loaded or begun to."""
    shown = []
    with listen("127.0.0.1", 0) as sock:
        address = f"http://127.0.0.1:{sock.getsockname()[1]}"
        service = Service(engine, model="tiny", file=model_file, **fields)
        server = Server(service, engine, application(service), sock, shown.append)
        run = asyncio.create_task(server.run())
        try:
            while not run.done() and not (service.ready if loads else shown):
                await asyncio.sleep(0.005)
            yield address, service, run, shown
        finally:
            if not run.done():
                await server._stop()
                await run


async def test_openais_client(model_path, model_file):
    import openai  # takes a second, and one of the processes that run tests needs it

    async with running(ModelEngine(model_path), model_file) as (address, _, _, _):
        client = openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="any")
        assert [model.id async for model in client.models.list()] == ["tiny"]
        ask = client.chat.completions.create
        options = {"model": "tiny", "seed": 4, "temperature": 1.0}

        stream = await ask(
            **options,
            **HELLO,
            stream=True,
            max_tokens=8,
            stream_options={"include_usage": True},
            logprobs=True,
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert chunks[-1].usage.completion_tokens == 8 and chunks[-2].choices[0].finish_reason == "length"
        again = await ask(**options, **HELLO, max_tokens=8)
        assert again.choices[0].message.content == text  # the same seed, in one piece

        schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
        person = await ask(**options, **HELLO, response_format=schema, reasoning_effort="none")
        assert person.choices[0].finish_reason == "stop"
        assert json.loads(person.choices[0].message.content)["age"] <= 99

        messages = [{"role": "user", "content": "Rome?"}]
        asked = await ask(
            **options, messages=messages, tools=[WEATHER], tool_choice="required", reasoning_effort="none"
        )
        [choice] = asked.choices
        [call] = choice.message.tool_calls
        assert choice.finish_reason == "tool_calls" and call.function.name == "get_weather"
        assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")
        messages += [choice.message, {"role": "tool", "tool_call_id": call.id, "content": "Sunny"}]
        told = await ask(**options, messages=messages, tools=[WEATHER], max_tokens=1)
        assert told.usage.prompt_tokens > asked.usage.prompt_tokens

        with pytest.raises(openai.BadRequestError) as refused:
            await ask(**options, messages=[{"role": "user", "content": "far too long " * 999}])
        assert refused.value.code == "context_length_exceeded"
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await ask(model="tiny", **HELLO, temperature=-1)
        await client.close()


CALLED = reply('I look. <tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>', "Hm.")


async def test_clients_send_pictures(model_file):
    """16 of them at once."""
    import openai

    ollama = pytest.importorskip("ollama")
    files = [plain_picture(size=(8, i + 1)) for i in range(16)]
    texts = [base64.b64encode(file).decode() for file in files]
    urls = [f"data:image/png;base64,{text}" for text in texts]
    sources = [{"type": "base64", "media_type": "image/png", "data": text} for text in texts]
    engine = FakeEngine(reply("Blue."), start=[SEEING])
    async with running(engine, model_file) as (address, _, _, _):
        client = openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="any")
        ask = lambda content: {"model": "tiny", "messages": [{"role": "user", "content": content}]}
        parts = [{"type": "image_url", "image_url": {"url": url, "detail": "low"}} for url in urls]
        told = await client.chat.completions.create(**ask([*parts, {"type": "text", "text": "?"}]))
        assert told.choices[0].message.content == "Blue."
        inputs = [{"type": "input_image", "image_url": url, "detail": "auto"} for url in urls]
        given = [{"role": "user", "content": [*inputs, {"type": "input_text", "text": "?"}]}]
        assert (await client.responses.create(model="tiny", input=given)).output_text == "Blue."
        [model] = [model async for model in client.models.list()]
        assert model.architecture["input_modalities"] == ["text", "image"]
        await client.close()
        blocks = [{"type": "image", "source": source} for source in sources]
        written = ask([*blocks, {"type": "text", "text": "?"}]) | {"max_tokens": 9}
        async with httpx.AsyncClient(base_url=address) as plain:  # as Anthropic's client has it
            assert (await plain.post("/v1/messages", json=written)).json()["content"][-1]["text"] == "Blue."
        client = ollama.AsyncClient(host=address)
        await client.chat("tiny", [{"role": "user", "content": "?", "images": files}])
        await client.generate("tiny", "?", images=texts)
        assert "vision" in (await client.show("tiny")).capabilities
        peer = OpenAIEngine(address)
        assert [event.model.sees async for event in peer.start()] == [True]
        pictures = tuple(Picture(data=file) for file in files)
        message = Message(role="user", content=PICTURE_MARK * 15 + "?", pictures=pictures)
        asked = Generate(request_id=1, prompt=Chat(messages=(message,)))
        assert isinstance([event async for event in peer.generate(asked)][-1], Finished)
        await peer.close()
    assert len(engine.requests) == 6
    for request in engine.requests:
        [message] = request.prompt.messages
        assert [picture.data for picture in message.pictures] == files
        assert message.content == PICTURE_MARK * 16 + "?"


async def test_openais_client_of_responses(model_file):
    import openai

    engine = FakeEngine(CALLED, reply("Sunny."), vector_of(3, 4))
    async with running(engine, model_file) as (address, _, _, _):
        client = openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="any")
        tool = {"type": "function", "strict": False, **WEATHER["function"]}
        async with client.responses.stream(model="tiny", input="Rome?", tools=[tool]) as stream:
            kinds = [event.type async for event in stream]
            response = await stream.get_final_response()
        assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
        assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]
        assert response.output_text.strip() == "I look." and response.usage.input_tokens == 96
        result = {"type": "function_call_output", "call_id": response.output[2].call_id, "output": "Sunny"}
        told = await client.responses.create(model="tiny", previous_response_id=response.id, input=[result])
        assert told.output_text == "Sunny." and told.status == "completed"
        assert (await client.models.retrieve("tiny")).id == "tiny"
        embedded = await client.embeddings.create(model="tiny", input=["a", "b"])  # asks for Base64
        assert embedded.data[1].embedding == pytest.approx([0.6, 0.8])
        await client.close()


@thorough  # to import it takes two seconds; `test_anthropic.py` has what it sends and reads
async def test_anthropics_client(model_file):
    anthropic = pytest.importorskip("anthropic")
    async with running(FakeEngine(CALLED, reply("Sunny.")), model_file) as (address, _, _, _):
        client = anthropic.AsyncAnthropic(base_url=address, api_key="any")
        parameters = WEATHER["function"]["parameters"]
        asked = {"model": "tiny", "max_tokens": 99, "messages": [{"role": "user", "content": "Rome?"}]}
        tools = [{"name": "get_weather", "description": "d", "input_schema": parameters}]
        thinking = {"type": "enabled", "budget_tokens": 1024}
        async with client.messages.stream(**asked, tools=tools, thinking=thinking) as stream:
            text = "".join([text async for text in stream.text_stream])
            message = await stream.get_final_message()
        assert text.strip() == "I look." and message.stop_reason == "tool_use"
        assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
        assert message.content[2].input == {"city": "Rome"} and message.usage.input_tokens == 96
        told = await client.messages.create(**asked)
        assert told.content[0].text == "Sunny."
        counted = await client.messages.count_tokens(model="tiny", messages=asked["messages"])
        assert counted.input_tokens > 5 and [m.id async for m in client.models.list()] == ["tiny"]
        with pytest.raises(anthropic.BadRequestError, match="temperature"):
            await client.messages.create(**asked, extra_body={"temperature": -1})
        await client.close()


async def test_ollamas_client(model_file):
    ollama = pytest.importorskip("ollama")
    engine = FakeEngine(CALLED, reply("Sunny."), vector_of(3, 4))
    async with running(engine, model_file) as (address, _, _, _):
        client = ollama.AsyncClient(host=address)
        asked = {"model": "tiny", "messages": [{"role": "user", "content": "Rome?"}]}
        parts = [part async for part in await client.chat(**asked, tools=[WEATHER], stream=True)]
        calls = [call for part in parts for call in part.message.tool_calls or ()]
        assert calls[0].function.arguments == {"city": "Rome"} and parts[-1].done_reason == "stop"
        assert "".join(part.message.thinking or "" for part in parts) == "Hm."
        assert (await client.generate(model="tiny", prompt="Rome?")).response == "Sunny."
        assert (await client.list()).models[0].model == "tiny" and (await client.ps()).models
        assert "tools" in (await client.show("tiny")).capabilities
        assert (await client.embed("tiny", ["a"])).embeddings == [[0.6, 0.8]]
        with pytest.raises(ollama.ResponseError, match="temperature"):
            await client.chat(**asked, options={"temperature": -1})


async def test_our_own_client_finds_model_and_context(model_file):
    engine = FakeEngine(reply("Good day.", "Hm."), start=STARTED)
    async with running(engine, model_file) as (address, _, _, shown):
        client = OpenAIEngine(address)  # without /v1
        [ready] = [event async for event in client.start()]
        assert isinstance(ready, Ready) and ready.backend == "orin-chat" and not ready.warnings
        assert (ready.model.name, ready.context_length, ready.model.trained_context) == ("tiny", 8192, 40960)
        prompt = Chat(messages=(Message(role="user", content="Hi"),), think=False)
        events = [event async for event in client.generate(Generate(request_id=1, prompt=prompt, fresh=True))]
        assert "".join(e.text for e in events if type(e) is Token) == "Good day."
        assert isinstance(events[-1], Finished) and events[-1].prompt_n == 96
        [asked] = engine.requests
        assert asked.fresh and not asked.prompt.think and asked.sampling.top_k == 40
        assert shown == list(STARTED)
        await client.close()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_hangs_up(model_file, monkeypatch, stream):
    """In a stream, or after the first sign that an answer is made."""
    monkeypatch.setattr("app.serve.http.QUIET_S", 0.01)
    engine = FakeEngine([*reply("")[:2], *tokens("Well, "), None])
    async with running(engine, model_file) as (address, service, _, _):
        async with (
            httpx.AsyncClient(verify=False) as client,
            client.stream(
                "POST", f"{address}/v1/chat/completions", json={**HELLO, "stream": stream}
            ) as response,
        ):
            assert (
                await anext(response.aiter_lines() if stream else response.aiter_text()) and service.open == 1
            )
        async with asyncio.timeout(LIMIT_S):
            while service.open:
                await asyncio.sleep(0.005)


@pytest.mark.parametrize("begun", [b"", b"POST /v1/chat/completions HTTP/1.1\r\nHost: local"])
async def test_a_connection_on_which_no_request_comes_is_closed(model_file, monkeypatch, begun):
    monkeypatch.setattr(connection_module, "HEAD_S", 0.05)
    async with running(FakeEngine(), model_file) as (address, _, _, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(address.split(":")[-1]))
        writer.write(begun)
        with contextlib.suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), LIMIT_S) == b""
        writer.close()
        async with httpx.AsyncClient(
            verify=False
        ) as client:  # one that asks in time stays, for longer than that
            for _ in range(2):
                assert (await client.get(f"{address}/health")).status_code == 200
                await asyncio.sleep(0.1)


async def test_a_connection_whose_body_outlasts_the_answer_is_closed(model_file, monkeypatch):
    monkeypatch.setattr(connection_module, "HEAD_S", 0.05)
    async with running(FakeEngine(), model_file) as (address, _, _, _), asyncio.timeout(LIMIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(address.split(":")[-1]))
        writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n")
        assert b" 200 " in await reader.readline()
        rest = asyncio.ensure_future(reader.read())
        while not rest.done():
            writer.write(b"x")
            await asyncio.sleep(0.01)
        writer.close()
        await asyncio.gather(rest, return_exceptions=True)  # the end, or a reset


@pytest.mark.parametrize(
    "head", [b"POST /nowhere HTTP/1.1", b"POST http://localhost/nowhere HTTP/1.0", b"\x16\x03"]
)
async def test_who_is_refused_before_the_request_has_come_reads_why(model_file, head):
    async with running(FakeEngine(), model_file) as (address, _, _, _), asyncio.timeout(LIMIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(address.split(":")[-1]))
        head += b"\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 4000000\r\n\r\n"
        writer.write(head)
        await asyncio.sleep(0.02)  # it is refused by then
        for _ in range(40):
            writer.write(b"x" * 100_000)
            await writer.drain()
        assert (await reader.read()).split()[1] == (b"404" if head[:1] == b"P" else b"400")
        writer.close()


async def test_a_connection_is_read_a_little_at_a_time(model_file, monkeypatch):
    sizes, received = [], connection_module.Connection.data_received
    monkeypatch.setattr(
        connection_module.Connection,
        "data_received",
        lambda c, data: sizes.append(len(data)) or received(c, data),
    )
    async with running(FakeEngine(), model_file) as (address, _, _, _), asyncio.timeout(LIMIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(address.split(":")[-1]))
        head = b"POST /nowhere HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
        writer.write(head + b"1\r\n \r\n" * 20_000 + b"0\r\n\r\n")
        assert b" 404 " in await reader.readline()
        writer.close()
    assert max(sizes) <= connection_module.READ_BYTES < sum(sizes)


async def test_a_path_may_be_a_whole_address(model_file):
    async with running(FakeEngine(), model_file) as (address, _, _, _), asyncio.timeout(LIMIT_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", int(address.split(":")[-1]))
        writer.write(
            b"GET HTTP://localhost:80/v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        )
        assert b" 200 " in await reader.readline() and b'"tiny"' in await reader.read()
        writer.close()


async def test_of_connections_beyond_a_limit_the_one_is_closed_that_was_silent_longest(
    model_file, monkeypatch
):
    """Where few files may be open, that is a limit of connections, too."""
    monkeypatch.setattr(server_module.resource, "getrlimit", lambda _: (5, 5))
    async with running(FakeEngine(), model_file) as (address, _, _, _), asyncio.timeout(LIMIT_S):
        opened = [await asyncio.open_connection("127.0.0.1", int(address.split(":")[-1])) for _ in range(2)]
        for i in (0, 1, 0):  # the second one has the latest answer but one
            opened[i][1].write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b" 200 " in await opened[i][0].readuntil(b"}")
        async with httpx.AsyncClient(verify=False) as client:
            assert (await client.get(f"{address}/health")).status_code == 200
        with contextlib.suppress(ConnectionError):
            assert await opened[1][0].read() == b""
        opened[0][1].write(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert b" 200 " in await opened[0][0].readuntil(b"}")
        for _, writer in opened:
            writer.close()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="only Linux has it")
async def test_a_client_that_does_not_read_loses_its_place(model_file, monkeypatch):
    monkeypatch.setattr(server_module, "UNREAD_S", 0.2)
    long = [Token(request_id=0, id=1, text="x" * 1_000_000) for _ in range(30)]
    engine = FakeEngine([*reply("")[:2], *long, None])
    async with running(engine, model_file) as (address, service, _, _):
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", int(address.split(":")[-1])))
            body = json.dumps({**HELLO, "stream": True}).encode()
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
            sock.sendall(head.encode() + body)
            async with asyncio.timeout(LIMIT_S):
                while not service.open:
                    await asyncio.sleep(0.01)
                while service.open:
                    await asyncio.sleep(0.01)


@pytest.mark.parametrize("ends", [True, False], ids=["in time", "not in time"])
async def test_a_signal_lets_answers_end(model_file, monkeypatch, ends):
    monkeypatch.setattr(server_module, "DRAIN_S", 20.0 if ends else 0.1)
    engine = FakeEngine([*reply("Well, ")[:-1], None, *reply("good day.")[2:]])
    async with running(engine, model_file) as (address, service, run, _):
        async with (
            httpx.AsyncClient(verify=False) as client,
            client.stream(
                "POST", f"{address}/v1/chat/completions", json={**HELLO, "stream": True}
            ) as response,
        ):
            lines = response.aiter_lines()
            await anext(lines)
            os.kill(os.getpid(), signal.SIGINT)
            while not service.stopping:
                await asyncio.sleep(0.005)
            if ends:
                engine.release()
            text = "".join([line async for line in lines])
        assert (
            ("The server is stopping." in text) is not ends and (" day" in text) is ends and "[DONE]" in text
        )
        assert await run == 130 and engine.closed


async def test_a_second_signal_does_not_wait(model_file, monkeypatch):
    monkeypatch.setattr(server_module, "DRAIN_S", 600)
    engine = FakeEngine([*reply("")[:2], None])
    async with (
        running(engine, model_file) as (address, service, run, _),
        httpx.AsyncClient(verify=False) as client,
    ):
        asked = asyncio.create_task(client.post(f"{address}/v1/chat/completions", json=HELLO))
        while not service.processing:
            await asyncio.sleep(0.005)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0.02)
        assert (await asked).status_code == 503
        assert await asyncio.wait_for(run, LIMIT_S) == 143


async def test_an_engine_that_does_not_start(model_file):
    failed = Failed(kind="model", message="There is no such file.")
    async with running(FakeEngine(start=[failed]), model_file) as (_, _, run, shown):
        assert await run == 3 and shown == [failed]


def asking(client, address):
    """Requests of each kind, on their way."""
    streamed = HELLO | {"stream": True}
    asked = ("chat/completions", HELLO), ("chat/completions", streamed), ("completions", {"prompt": "Hello"})
    return [asyncio.create_task(client.post(f"{address}/v1/{path}", json=body)) for path, body in asked]


async def test_who_comes_while_the_model_loads_waits(model_file, tmp_path):
    engine = synthetic.engine(load_s=0, prefill_s=0, rate=0, tokens=3, until=str(tmp_path / "loaded"))
    async with (
        running(engine, model_file, loads=False, max_waiting=3) as (address, service, _, _),
        httpx.AsyncClient(verify=False) as client,
    ):
        waiting = asking(client, address)
        leaves = asyncio.create_task(client.post(f"{address}/v1/chat/completions", json=HELLO))
        await until(lambda: service.open == 4)
        assert (await client.get(f"{address}/health")).status_code == 503
        refused = await client.post(f"{address}/v1/chat/completions", json=HELLO)
        assert refused.status_code == 429 and refused.headers["Retry-After"]
        leaves.cancel()
        await until(lambda: service.open == 3)
        (tmp_path / "loaded").touch()
        answers = await asyncio.gather(*waiting)
        assert [answer.status_code for answer in answers] == [200] * 3
        assert "[DONE]" in answers[1].text and answers[2].json()["usage"]["completion_tokens"] == 3
        assert (await client.get(f"{address}/health")).status_code == 200 and not service.open
        assert service.metrics.requests == {200: 3, 429: 1, 499: 1}


async def test_who_waits_for_a_model_that_does_not_load_is_told_why(model_file, tmp_path):
    engine = synthetic.engine(load_s=0, load_failure="BackendError", until=str(tmp_path / "loaded"))
    async with (
        running(engine, model_file, loads=False) as (address, service, run, shown),
        httpx.AsyncClient(verify=False) as client,
    ):
        waiting = asking(client, address)
        await until(lambda: service.open == 3)
        (tmp_path / "loaded").touch()
        for answer in await asyncio.gather(*waiting):
            assert answer.status_code == 500
            assert answer.json()["error"]["message"] == f"{shown[-1].message} {shown[-1].hint}"
        assert "BackendError while it loads" in shown[-1].message
        assert await run == 4 and engine.pid is None and service.stopping


def test_clients_can_connect_while_the_model_file_is_read(model_path, monkeypatch):
    from app.chat.settings import Settings
    from app.serve.serve_command import run
    from app.serve.service import ModelFile

    with listen("127.0.0.1", 0) as sock:
        port = sock.getsockname()[1]

    def read(path, mmproj):
        socket.create_connection(("127.0.0.1", port)).close()
        raise UsageError("A client has connected.")

    monkeypatch.setattr(ModelFile, "read", read)
    with pytest.raises(UsageError, match="connected"):
        run(["--port", str(port), "--model", str(model_path)], Settings())


async def test_a_signal_while_it_loads(model_file):
    engine = FakeEngine(start=[*STARTED[:1], None])
    async with running(engine, model_file, loads=False) as (_, _, run, shown):
        pass
    assert await run == 0 and shown == [STARTED[0]] and engine.closed
