"""Ollama's protocol, over an engine that follows a script."""

import json
import zlib
from dataclasses import replace

import pytest

from app.serve.protocols import generate_context
from engine.formats.templates.fill_in import FillIn
from engine.protocol.events import RawText, Sampling
from tests.app.fake_engine import TOO_LONG, FakeEngine, reply
from tests.app.serve.conftest import WEATHER

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
ASKED = {"model": "tiny:latest", "messages": [{"role": "user", "content": "Rome?"}]}


async def lines(client, path, body):
    response = await client.post(path, json=body)
    assert response.status_code == 200 and response.headers["content-type"] == "application/x-ndjson"
    return [json.loads(line) for line in response.text.splitlines()]


async def test_a_chat(served):
    client, service = served(FakeEngine(reply(f"I look.\n{CALL}", "Hm.")))
    *parts, last = await lines(client, "/api/chat", {**ASKED, "tools": [WEATHER], "think": True})
    messages = [part["message"] for part in parts]
    assert not any(part["done"] for part in parts) and last["done"] and last["done_reason"] == "stop"
    assert "".join(m.get("thinking", "") for m in messages) == "Hm."
    assert "".join(m["content"] for m in messages).strip() == "I look."
    [[call]] = [m["tool_calls"] for m in messages if "tool_calls" in m]
    assert call["function"] == {"index": 0, "name": "get_weather", "arguments": {"city": "Rome"}}
    assert last["prompt_eval_count"] == 96 and last["prompt_eval_duration"] == 210_000_000
    whole = (await client.post("/api/chat", json={**ASKED, "tools": [WEATHER], "stream": False})).json()
    assert whole["message"]["tool_calls"][0]["function"] == call["function"]
    client, _ = served(FakeEngine(reply(f"{CALL}\n{CALL}")))
    twice = (await client.post("/api/chat", json={**ASKED, "tools": [WEATHER], "stream": False})).json()
    assert [each["function"]["index"] for each in twice["message"]["tool_calls"]] == [0, 1]
    assert whole["message"]["thinking"] == "Hm." and whole["message"]["content"].strip() == "I look."
    assert whole["eval_count"] == last["eval_count"] and service.handled[0].path == "/api/chat"


async def test_options_and_formats(served):
    engine = FakeEngine()
    client, _ = served(engine, sampling=Sampling(top_k=7))
    options = {"temperature": 0.5, "num_predict": 9, "stop": ["x"], "seed": 4, "num_ctx": 99}
    schema = {"type": "object", "properties": {"a": {}}}
    for format in ("json", schema):
        asked = {**ASKED, "options": options, "format": format, "think": False}
        assert (await client.post("/api/chat", json=asked)).status_code == 200
    first, second = engine.requests
    assert first.sampling == Sampling(temperature=0.5, top_k=7, seed=4) and first.max_tokens == 9
    assert not first.prompt.think and json.loads(first.grammar.source) == {"type": "object"}
    assert json.loads(second.grammar.source) == schema | {"additionalProperties": False}
    await client.post("/api/chat", json={**ASKED, "think": "low", "options": {"num_predict": -1}})
    assert engine.requests[2].sampling.effort == "low" and engine.requests[2].max_tokens is None
    assert (await client.post("/api/chat", json={**ASKED, "format": "xml"})).status_code == 400


async def test_a_conversation_with_tools(served):
    engine = FakeEngine()
    client, _ = served(engine)
    call = {"function": {"name": "get_weather", "arguments": {"city": "Rome"}}}
    said = {"role": "assistant", "content": "", "tool_calls": [call, call]}
    named = ("tool_name", "Sunny"), ("name", "Rain")
    results = [{"role": "tool", field: "get_weather", "content": text} for field, text in named]
    await client.post("/api/chat", json={"messages": [*ASKED["messages"], said, *results]})
    _, turn, *tools = engine.requests[0].prompt.messages
    assert [call.id for call in turn.tool_calls] == [tool.tool_call_id for tool in tools]
    assert len({call.id for call in turn.tool_calls}) == 2 and len(turn.tool_calls[0].id) == 9
    assert json.loads(turn.tool_calls[0].arguments) == {"city": "Rome"} and {tool.name for tool in tools} == {
        "get_weather"
    }
    said["tool_calls"] = [call, {"function": {"name": "time"}}]
    results = [{"role": "tool", "tool_name": name, "content": name} for name in ("time", "other", "")]
    await client.post("/api/chat", json={"messages": [*ASKED["messages"], said, *results]})
    _, turn, *tools = engine.requests[1].prompt.messages
    first, second = (call.id for call in turn.tool_calls)
    assert [tool.tool_call_id for tool in tools] == [second, "", first]


async def test_a_text(served, model_file):
    engine = FakeEngine(reply("Good day."))
    client, _ = served(engine, file=replace(model_file, fill_in=FillIn(1, 2, 3)))
    *parts, last = await lines(client, "/api/generate", {"model": "m", "prompt": "Hi", "system": "Be brief."})
    assert "".join(part["response"] for part in parts) == "Good day." and last["done"]
    assert [m.role for m in engine.requests[0].prompt.messages] == ["system", "user"]
    await client.post("/api/generate", json={"prompt": "Hi", "raw": True})
    await client.post("/api/generate", json={"prompt": "a", "suffix": "b"})
    assert engine.requests[1].prompt == RawText(text="Hi", special=True)
    assert [id for id in engine.requests[2].prompt.ids if id in (1, 2, 3)] == [1, 2, 3]
    loaded = (await client.post("/api/generate", json={"model": "m"})).json()
    assert loaded["done_reason"] == "load" and len(engine.requests) == 3
    for keep_alive in (0, "0s"):
        asked = {"model": "m", "keep_alive": keep_alive}
        assert (await client.post("/api/generate", json=asked)).json()["done_reason"] == "unload"
    assert (await client.post("/api/chat", json={"model": "m", "messages": []})).json()["done"]


@pytest.mark.parametrize("path", ["/api/chat", "/v1/responses"])
async def test_the_oldest_turns_of_a_long_conversation_are_left_out(served, path):
    engine = FakeEngine()
    client, service = served(engine)
    turns = [{"role": "system", "content": "Be brief."}]
    for i in range(9):
        said = [(role, f"{role} {i} " + "word " * 300) for role in ("user", "assistant")]
        turns += [{"role": role, "content": text} for role, text in said]
    turns.append({"role": "user", "content": "Last"})
    place, cuts = ("messages", {}) if path == "/api/chat" else ("input", {"truncation": "auto"})
    await client.post(path, json={place: turns, "stream": False, **cuts})
    first, second, *_, last = engine.requests[0].prompt.messages
    assert first.content == "Be brief." and second.role == "user" and last.content == "Last"
    assert 5 < len(engine.requests[0].prompt.messages) < 15 and "left out" in service.handled[0].note
    kept = {"truncate": False} if path == "/api/chat" else {}
    for body in ({place: turns, **kept}, {place: turns[:4] + turns[-1:], **cuts}):
        await client.post(path, json=body)
    assert [len(request.prompt.messages) for request in engine.requests[1:]] == [20, 5]
    turns[1]["content"] = "word " * 900_000  # more than is made into tokens
    await client.post(path, json={place: turns, "stream": False, **cuts})
    assert engine.requests[-1].prompt.messages[-1] == last and len(engine.requests[-1].prompt.messages) < 15


async def test_what_there_is(served):
    client, _ = served()
    [model] = (await client.get("/api/tags")).json()["models"]
    assert model["name"] == "tiny" and model["details"]["quantization_level"] == "Q6_K"
    assert model["details"]["parameter_size"] == "752M" and model["details"]["context_length"] == 8192
    [running] = (await client.get("/api/ps")).json()["models"]
    assert running["context_length"] == 8192 and running["size"] == model["size"]
    shown = (await client.post("/api/show", json={"model": "tiny"})).json()
    assert {"tools", "thinking", "completion"} == set(shown["capabilities"]) == set(model["capabilities"])
    assert shown["model_info"]["qwen3.context_length"] == 8192
    assert (await client.get("/api/version")).json()["version"]
    assert shown["model_info"]["general.basename"] == "tiny" and shown["model_info"]["qwen3.embedding_length"]
    assert (await client.post("/api/show", json={"name": "tiny"})).json() == shown
    assert (await client.get("/")).text == "Ollama is running" and (await client.head("/")).status_code == 200
    browser = {"Accept": "text/html,*/*"}
    assert (await client.get("/", headers=browser)).text.startswith("orin-chat is running")


def test_a_context_of_a_conversation_that_repeats_itself_is_read_again():
    turns = [("user", "no " * 100_000), ("assistant", "yes " * 100_000)]
    assert generate_context.turns(generate_context.packed(turns), "") == turns


async def test_the_context_of_a_text_goes_on_with_the_conversation(served):
    engine = FakeEngine(reply("Good day.", "Hm."), reply("Fine."))
    client, _ = served(engine)
    *_, last = await lines(client, "/api/generate", {"prompt": "Hi", "system": "Be brief."})
    asked = {"prompt": "How are you?", "context": last["context"], "stream": False}
    second = (await client.post("/api/generate", json=asked)).json()
    said = [(m.role, m.content) for m in engine.requests[1].prompt.messages]
    first = [("system", "Be brief."), ("user", "Hi"), ("assistant", "Good day.")]
    assert said == [*first, ("user", "How are you?")] and len(second["context"]) > len(last["context"])
    await client.post("/api/generate", json=asked | {"system": "Be long."})
    assert [m.content for m in engine.requests[2].prompt.messages[:2]] == ["Be long.", "Hi"]
    raw = (await client.post("/api/generate", json={"prompt": "Hi", "raw": True, "stream": False})).json()
    assert "context" not in raw
    bomb = [*zlib.compress(b'[["user",""]' + b',["user",""]' * 100_000 + b"]")]
    for wrong in ([1, 2, 3], [300], [-1], [2**70], last["context"][:-9], bomb):
        refused = await client.post("/api/generate", json=asked | {"context": wrong})
        assert refused.status_code == 400 and "context" in refused.json()["error"]


@pytest.mark.parametrize("stream", [False, True])
async def test_errors(served, stream):
    client, _ = served(FakeEngine([TOO_LONG]))
    refused = await client.post("/api/chat", json={**ASKED, "stream": stream})
    assert refused.status_code == 400 and "8,192" in refused.json()["error"]
    for image, reason in ("x", "not valid base64"), ("http://10.0.0.1/a.png", "fetches nothing"):
        pictures = [{"role": "user", "content": "?", "images": [image]}]
        refused = await client.post("/api/chat", json={"messages": pictures, "stream": stream})
        assert refused.status_code == 400 and reason in refused.json()["error"]
    assert (await client.post("/api/pull", json={"model": "x"})).json() == {
        "error": "This server pulls no models. There are: tiny."
    }
