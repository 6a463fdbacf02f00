"""What the server answers, over an engine that follows a script."""

import asyncio
import dataclasses
import functools
import gc
import json
import os

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from app.serve import bodies
from app.serve.metrics import Metrics
from app.serve.protocols.chat import ChatBody
from app.serve.protocols.completions import TextBody
from app.serve.routes import application
from engine.formats.tool_calls import HARMONY
from engine.protocol.events import (
    BlockCounts,
    Failed,
    Generate,
    RawText,
    Sampling,
    Slots,
    Token,
    TokenIds,
    TopToken,
)
from tests.app.fake_engine import READY, TOO_LONG, FakeEngine, reply, tokens
from tests.app.serve.conftest import HELLO, WEATHER, error, events
from tests.waiting import LIMIT_S

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


async def test_a_whole_answer(served):
    client, service = served(FakeEngine(reply("Good day.", "Let me see.", cached_n=6)))
    body = (await client.post(CHAT, json=HELLO)).json()
    [choice] = body["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "Good day.",
        "reasoning_content": "Let me see.",
    }
    assert (
        choice["finish_reason"] == "stop" and body["object"] == "chat.completion" and body["model"] == "tiny"
    )
    assert body["usage"] == {
        "prompt_tokens": 96,
        "completion_tokens": 7,
        "total_tokens": 103,
        "prompt_tokens_details": {"cached_tokens": 6},
        "completion_tokens_details": {"reasoning_tokens": 3},
    }
    timings = body["timings"]
    assert (timings["prompt_n"], timings["cache_n"], timings["predicted_n"]) == (90, 6, 7)
    assert timings["predicted_per_second"] == pytest.approx(6 / 60 * 1e3)
    [handled] = service.handled
    assert (handled.status, handled.path, handled.client) == (200, CHAT, "127.0.0.1")
    assert handled.finished.prompt_n == 96 and "Good" not in repr(handled)


async def test_a_streamed_answer(served):
    client, service = served(FakeEngine(reply("Good day.", "Let me see.")))
    first, *middle, last = await events(client, CHAT, HELLO)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    deltas = [chunk["choices"][0]["delta"] for chunk in middle]
    assert "".join(d.get("reasoning_content", "") for d in deltas) == "Let me see."
    assert "".join(d.get("content", "") for d in deltas) == "Good day."
    assert last["choices"][0]["finish_reason"] == "stop" and last["timings"]["predicted_n"] == 7
    assert len({chunk["id"] for chunk in (first, *middle, last)}) == 1
    assert service.handled[0].status == 200 and service.open == service.processing == 0


async def test_usage_of_a_stream(served):
    client, _ = served()
    *_, ended, usage = await events(client, CHAT, {**HELLO, "stream_options": {"include_usage": True}})
    assert "timings" not in ended and ended["choices"][0]["finish_reason"] == "stop"
    assert usage["choices"] == [] and usage["usage"]["prompt_tokens"] == 96 and "timings" in usage


async def test_text_completions(served):
    engine = FakeEngine(reply("once", reason="length"))
    client, _ = served(engine)
    body = (await client.post(TEXT, json={"prompt": "a", "max_tokens": 3})).json()
    assert body["choices"][0]["text"] == "once" and body["choices"][0]["finish_reason"] == "length"
    assert body["object"] == "text_completion"
    chunks = await events(client, TEXT, {"prompt": [1, 2]})
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "once"
    await client.post(TEXT, json={"prompt": [[3]]})
    await client.post(TEXT, json={"prompt": ["b"]})
    wanted = RawText(text="a"), TokenIds(ids=(1, 2)), TokenIds(ids=(3,)), RawText(text="b")
    assert tuple(request.prompt for request in engine.requests) == wanted
    assert engine.requests[0].max_tokens == 3


async def test_fields_reach_the_engine(served):
    engine = FakeEngine()
    client, _ = served(engine, sampling=Sampling(top_k=7, seed=1))
    body = {
        "temperature": 0.5,
        "top_p": 0.8,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "seed": -1,
        "unknown": {},
    }
    await client.post(CHAT, json={**HELLO, **body, "max_completion_tokens": 9, "max_tokens": 5, "user": None})
    await client.post(
        CHAT, json={**HELLO, "max_tokens": -1, "seed": 2**40 + 3, "top_k": -1, "cache_prompt": False}
    )
    first, second = engine.requests
    assert first.sampling == Sampling(temperature=0.5, top_k=7, top_p=0.8, min_p=0.1, repeat_penalty=1.2)
    assert first.max_tokens == 9 and not first.fresh and first.client == "127.0.0.1"
    assert (
        second.max_tokens is None
        and second.sampling.seed == 3
        and second.sampling.top_k == 0
        and second.fresh
    )


@pytest.mark.parametrize(
    ("fields", "thinks"),
    [({}, True), ({"reasoning_effort": "none"}, False), ({"reasoning_effort": "low"}, True),
     ({"chat_template_kwargs": {"enable_thinking": False}}, False)],
)  # fmt: skip
async def test_thinking_is_asked_for(served, fields, thinks):
    engine = FakeEngine()
    client, _ = served(engine)
    await client.post(CHAT, json={**HELLO, **fields})
    assert engine.requests[0].prompt.think is thinks
    assert engine.requests[0].sampling.effort == (fields.get("reasoning_effort") if thinks else None)
    client, _ = served(engine, think=False)
    await client.post(CHAT, json=HELLO)
    assert not engine.requests[1].prompt.think


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_texts(served, stream):
    """The text before it is the answer, and the rest is not computed."""
    engine = FakeEngine([*reply("one, two, three")[:2], *tokens("one, two, three"), None])
    client, service = served(engine)
    asked = {**HELLO, "stop": ["three", " tw"]}
    if stream:
        *chunks, last = await events(client, CHAT, asked)
        text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    else:
        last = (await client.post(CHAT, json=asked)).json()
        text = last["choices"][0]["message"]["content"]
    assert text == "one," and last["choices"][0]["finish_reason"] == "stop"
    assert last["timings"]["predicted_n"] == 2 and service.open == 0


async def test_log_probabilities(served, model_file):
    ids = model_file.tokenizer.encode("so what")
    end = min(model_file.tokenizer.eos_ids)
    made = [
        Token(
            request_id=0, id=id, text=model_file.tokenizer.piece(id).decode() if id != end else "",
            logprob=-0.5, top=(TopToken(id=id, logprob=-0.5), TopToken(id=ids[0], logprob=-1.0)),
        )
        for id in (*ids, end)
    ]  # fmt: skip
    engine = FakeEngine([*reply("")[:2], *made, reply("")[-1]])
    client, _ = served(engine)
    body = (await client.post(CHAT, json={**HELLO, "logprobs": True, "top_logprobs": 1})).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in content) == "so what" and len(content) == len(ids)
    assert bytes(content[0]["bytes"]).decode() == content[0]["token"] and content[0]["logprob"] == -0.5
    assert [len(entry["top_logprobs"]) for entry in content] == [1] * len(ids)
    chunks = await events(client, CHAT, {**HELLO, "logprobs": True})
    streamed = [
        e for chunk in chunks for e in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert [entry["token"] for entry in streamed] == [entry["token"] for entry in content]
    assert streamed[0]["top_logprobs"] == []
    body = (await client.post(TEXT, json={"prompt": "x", "logprobs": 2})).json()
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["tokens"] == [entry["token"] for entry in content] and len(
        logprobs["top_logprobs"]
    ) == len(ids)
    assert [request.logprobs for request in engine.requests] == [1, 1, 2]


async def test_calls_of_tools(served):
    engine = FakeEngine(reply(f"I look.\n{CALL}\n{CALL}", "Hm."))
    client, _ = served(engine)
    asked = {**HELLO, "tools": [WEATHER]}
    choice = (await client.post(CHAT, json=asked)).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] == "I look."
    first, second = choice["message"]["tool_calls"]
    assert first["function"] == {"name": "get_weather", "arguments": '{"city": "Rome"}'}
    assert first["id"] != second["id"] and len(first["id"]) == 9 and first["type"] == "function"
    *chunks, last = await events(client, CHAT, asked)
    calls = [c for chunk in chunks for c in chunk["choices"][0]["delta"].get("tool_calls", ())]
    begun = [call for call in calls if "id" in call]
    assert [call["index"] for call in begun] == [0, 1] and len(calls) > 6
    for i in (0, 1):  # in pieces, as they were made
        pieces = [call["function"]["arguments"] for call in calls if call["index"] == i]
        assert "".join(pieces) == '{"city": "Rome"}' and begun[i]["function"]["name"] == "get_weather"
    assert last["choices"][0]["finish_reason"] == "tool_calls"
    assert json.loads(engine.requests[0].prompt.tools) == [WEATHER]
    await client.post(CHAT, json={**asked, "tool_choice": "none"})
    assert engine.requests[2].prompt.tools == ""
    for stream in (False, True):
        one = (await client.post(CHAT, json={**asked, "parallel_tool_calls": False, "stream": stream})).text
        assert one.count("get_weather") == 1 and '"tool_calls"' in one


async def test_a_conversation_with_tools(served):
    engine = FakeEngine()
    client, _ = served(engine)
    call = {
        "id": "a1",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'},
    }
    messages = [
        {
            "role": "developer",
            "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}],
        },
        {"role": "user", "content": "Rome?"},
        {"role": "assistant", "content": None, "reasoning_content": "Hm.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a1", "content": "Sunny"},
    ]
    await client.post(CHAT, json={"messages": messages})
    system, _, assistant, tool = engine.requests[0].prompt.messages
    assert (system.role, system.content) == ("system", "Be brief.")
    assert (assistant.thinking, assistant.tool_calls[0].arguments) == ("Hm.", '{"city": "Rome"}')
    assert (tool.name, tool.tool_call_id, tool.content) == ("get_weather", "a1", "Sunny")


async def test_grammars(served):
    engine = FakeEngine()
    client, _ = served(engine)
    schema = {"type": "object", "properties": {"b": {}, "a": {}}}
    for format in (
        {"type": "text"},
        {"type": "json_object"},
        {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    ):
        assert (await client.post(CHAT, json={**HELLO, "response_format": format})).status_code == 200
    await client.post(CHAT, json={**HELLO, "tools": [WEATHER], "tool_choice": "required"})
    named = {"type": "function", "function": {"name": "get_weather"}}
    await client.post(CHAT, json={**HELLO, "tools": [WEATHER], "tool_choice": named})
    grammars = [request.grammar for request in engine.requests]
    assert grammars[0] is None and json.loads(grammars[1].source) == {"type": "object"}
    assert grammars[2].source == json.dumps(schema)
    assert grammars[3].kind == "lark" and grammars[3] == grammars[4] and "get_weather" in grammars[3].source


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"messages": "x"}, "messages"),
        (CHAT, {}, "messages"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {**HELLO, "max_tokens": "9"}, "max_tokens"),
        (CHAT, {**HELLO, "max_tokens": 0}, "max_tokens"),
        (CHAT, {**HELLO, "stream_options": {"include_usage": 3}}, "stream_options.include_usage"),
        (CHAT, {**HELLO, "temperature": -1}, "temperature"),
        (CHAT, {**HELLO, "top_p": 2}, "top_p"),
        (CHAT, {**HELLO, "reasoning_effort": "vast"}, "reasoning_effort"),
        (CHAT, {**HELLO, "logit_bias": {"the": 1}}, "logit_bias"),
        (CHAT, {**HELLO, "logit_bias": {"5": 101}}, "logit_bias"),
        (CHAT, {**HELLO, "n": 0}, "n"),
        (CHAT, {**HELLO, "n": 17}, "n"),
        (CHAT, {**HELLO, "presence_penalty": 3}, "presence_penalty"),
        (CHAT, {**HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {**HELLO, "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {**HELLO, "stop": [str(i) for i in range(17)]}, "stop"),
        (CHAT, {**HELLO, "response_format": {"type": "xml"}}, "response_format.type"),
        (CHAT, {**HELLO, "response_format": {"type": "json_schema"}}, "response_format"),
        (CHAT, {**HELLO, "tools": [{"type": "function"}]}, "tools[0].function"),
        (CHAT, {**HELLO, "tools": [WEATHER, WEATHER]}, "tools"),
        (CHAT, {**HELLO, "tools": [WEATHER], "tool_choice": {"function": {"name": "f"}}}, "tool_choice"),
        (CHAT, {"messages": [{"content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content"),
        (TEXT, {"prompt": ["a", 3]}, "prompt"),
        (TEXT, {"prompt": []}, "prompt"),
        (TEXT, {"prompt": "a", "echo": True, "logprobs": 1, "stream": True}, "echo"),
        (TEXT, {"prompt": "a", "suffix": "b"}, "suffix"),
        (CHAT, {**HELLO, "tools": [WEATHER], "tool_choice": {"type": "function"}}, "tool_choice"),
        (CHAT, {**HELLO, "tools": [{"type": "custom"}]}, "tools[0].custom"),
        (TEXT, {"prompt": "a", "n": 3, "best_of": 2}, "best_of"),
        (TEXT, {"prompt": "a", "logprobs": 99}, "logprobs"),
        (CHAT, [], None),
    ],
)
async def test_what_is_wrong_is_named(served, path, body, param):
    engine = FakeEngine()
    client, service = served(engine)
    response = await client.post(path, json=body)
    assert response.status_code == 400 and not engine.requests
    assert error(response)["param"] == param and error(response)["message"].endswith(".")
    assert service.handled[0].status == 400


@pytest.mark.parametrize("data", [b"", b"{", b"\xff", b'{"messages": ' + b"[" * 100_000])
async def test_what_is_not_json(served, data):
    client, _ = served()
    response = await client.post(CHAT, content=data)
    assert response.status_code == 400 and error(response)["type"] == "invalid_request_error"


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=3)
    | st.sampled_from(["user", "tool"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["role", "content"]), inner),
    max_leaves=4,
)
FIELDS = sorted({*ChatBody.__struct_fields__, *TextBody.__struct_fields__} - {"stream"})


@given(st.sampled_from([CHAT, TEXT]), st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4))
@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
async def test_no_request_is_the_servers_fault(served, path, fields):
    client, service = served()
    response = await client.post(path, content=json.dumps({**HELLO, "prompt": "x", **fields}))
    assert response.status_code in (200, 400) and service.open == 0


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (functools.reduce(lambda inner, _: {"properties": inner}, range(200), {}), "is nested too deeply"),
        ({"enum": [[1] * 9] * 30_000}, "has too many parts"),
    ],
)
@pytest.mark.parametrize("param", ["response_format", "tools"])
async def test_a_schema_that_is_too_much(served, schema, says, param):
    client, _ = served()
    fields = {
        "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
        "tools": [{"function": {"name": "f", "parameters": schema}}],
    }
    response = await client.post(CHAT, json={**HELLO, param: fields[param]})
    assert response.status_code == 400 and error(response)["param"] == param
    assert error(response)["message"] == f"{param} {says}."


async def test_a_body_that_is_too_long(served):
    client, _ = served()
    response = await client.post(CHAT, content=b" " * (bodies.MAX_BODY_BYTES + 1))
    assert response.status_code == 413
    at_once = await client.post(
        CHAT, content=b"{}", headers={"Content-Length": str(bodies.MAX_BODY_BYTES + 1)}
    )
    assert at_once.status_code == 413


async def test_a_body_of_too_many_lists(served, monkeypatch):
    monkeypatch.setattr(bodies, "MAX_PARTS", 99)
    monkeypatch.setattr(bodies, "_PIECE_BYTES", 7)
    client, _ = served()
    quoted = {"messages": [{"role": "user", "content": '"[{\\' * 60}], "unknown": [[]] * 90 + ["\\", '"[']}
    assert (await client.post(CHAT, json=quoted)).status_code == 200
    response = await client.post(CHAT, json={**quoted, "more": [{}] * 5})
    assert response.status_code == 413
    assert error(response)["message"] == "The request has more than 99 lists and objects."


async def test_a_long_prompt_with_many_answers(served, monkeypatch):
    monkeypatch.setattr(bodies, "MAX_BODY_BYTES", 2 << 20)
    client, service = served()
    body = {"messages": [{"role": "user", "content": "x" * (1 << 19)}]}
    assert (await client.post(CHAT, json={**body, "n": 3})).status_code == 200
    response = await client.post(CHAT, json={**body, "n": 4})
    assert response.status_code == 413 and len(service.engine.requests) == 3
    assert error(response)["message"] == "The request is longer than 2 MiB for its 4 answers."
    different = {"prompt": ["x" * (1 << 18), "y", "z", "w"]}  # each goes to the engine once
    assert (await client.post(TEXT, json=different)).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_failed_is_not_kept(served, stream):
    client, service = served(FakeEngine([TOO_LONG]))
    gc.collect()
    gc.disable()
    try:
        assert (await client.post(CHAT, json={**HELLO, "seed": 8_151, "stream": stream})).status_code == 400
        service.engine.requests.clear()
        await asyncio.sleep(0)  # the event loop has what it last woke
        kept = [each for each in gc.get_objects() if isinstance(each, Generate)]
        assert not [each for each in kept if each.sampling.seed == 8_151]
    finally:
        gc.enable()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("says_length", [False, True])
async def test_all_bodies_together_have_a_limit(served, monkeypatch, stream, says_length):
    monkeypatch.setattr(bodies, "MAX_HELD_BYTES", 300_000)
    gated = [*reply("")[:2], None, *reply("done")[2:]]
    client, service = served(FakeEngine(gated, reply("Hello.")), parallel=2)
    long = json.dumps({"messages": [{"role": "user", "content": "x" * 250_000}], "stream": stream}).encode()

    async def in_pieces():
        for start in range(0, len(long), 100_000):
            yield long[start : start + 100_000]

    def ask():
        return client.post(CHAT, content=long if says_length else in_pieces())

    first = asyncio.ensure_future(ask())
    while not service.processing:
        await asyncio.sleep(0)
    refused = await ask()
    assert refused.status_code == 503 and refused.headers["retry-after"] == "5"
    assert error(refused)["message"] == "The server holds as many long requests as it may."
    assert (await client.post(CHAT, json=HELLO)).status_code == 200
    service.engine.release()
    assert (await first).status_code == 200
    assert (await ask()).status_code == 200


async def test_the_description_of_the_paths(served):
    client, _ = served()
    described = (await client.get("/openapi.json")).json()
    fields = described["components"]["schemas"]["ChatBody"]["properties"]
    assert described["openapi"] == "3.1.0" and {"messages", "max_tokens", "tools"} <= set(fields)
    for path, operations in described["paths"].items():
        for method in operations:
            assert (await client.request(method, f"/v1{path}")).status_code in (200, 400)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failed", "status", "code"),
    [
        (TOO_LONG, 400, "context_length_exceeded"),
        (Failed(kind="usage", message="The prompt is empty.", request_id=0), 400, None),
        (Failed(kind="template", message="The template refuses.", request_id=0), 400, None),
        (Failed(kind="model", message="The weights are damaged.", request_id=0), 500, None),
        (Failed(kind="backend", message="The engine died."), 500, None),
    ],
)
async def test_failures_before_the_first_token_have_a_status(served, stream, failed, status, code):
    client, service = served(FakeEngine([failed]))
    response = await client.post(CHAT, json={**HELLO, "stream": stream})
    assert response.status_code == status and error(response)["code"] == code
    assert failed.message in error(response)["message"] and service.handled[0].status == status


async def test_a_failure_in_the_middle_of_a_stream(served):
    died = Failed(kind="backend", message="The engine died.")
    client, service = served(FakeEngine([*reply("")[:2], *tokens("Well"), died]))
    *_, last = await events(client, CHAT, HELLO)
    assert last["error"]["message"] == "The engine died." and service.handled[0].problem == "server_error"


async def test_requests_wait_up_to_a_limit(served):
    engine = FakeEngine([*reply("")[:2], None, *reply("done")[2:]])
    client, service = served(engine, parallel=1, max_waiting=1)
    service.metrics.answers.add(7.0)
    first, second = (asyncio.ensure_future(client.post(CHAT, json=HELLO)) for _ in range(2))
    while service.processing < 2:  # a FakeEngine begins with all
        await asyncio.sleep(0)
    third = await client.post(CHAT, json=HELLO)
    assert third.status_code == 429 and third.headers["retry-after"] == "7"
    assert error(third)["code"] == "too_many_requests" and len(engine.requests) == 2
    await engine.stop()
    assert [(await answer).status_code for answer in (first, second)] == [503, 503]
    assert service.open == 0 and service.metrics.requests == {429: 1, 503: 2}


@pytest.mark.parametrize("path", [CHAT, TEXT])
async def test_several_answers_to_one_request(served, path):
    engine = FakeEngine(reply("one", cached_n=6), reply("two", reason="length"), reply("three"))
    client, service = served(engine, parallel=2, max_waiting=1)
    asked = {**HELLO, "prompt": "x", "n": 3, "seed": 2**32 - 1, "user": "ann"}
    body = (await client.post(path, json=asked)).json()
    texts = ["one", "two", "three"]
    said = lambda choice: choice["message"]["content"] if path == CHAT else choice["text"]
    assert [(c["index"], said(c), c["finish_reason"]) for c in body["choices"]] == [
        (0, "one", "stop"), (1, "two", "length"), (2, "three", "stop")
    ]  # fmt: skip
    assert [request.sampling.seed for request in engine.requests] == [2**32 - 1, 0, 1]
    assert {request.client for request in engine.requests} == {"ann@127.0.0.1"}
    predicted = sum(len(list(tokens(text))) + 1 for text in texts)
    assert body["usage"]["prompt_tokens"] == 96 and body["usage"]["completion_tokens"] == predicted
    engine.replies = [reply(text) for text in texts]
    *chunks, usage = await events(client, path, {**asked, "stream_options": {"include_usage": True}})
    for i, text in enumerate(texts):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == i]
        assert "".join(c["delta"].get("content", "") if path == CHAT else c["text"] for c in mine) == text
        assert mine[-1]["finish_reason"] == "stop"
    assert usage["usage"] == {**body["usage"], "prompt_tokens_details": {"cached_tokens": 0}}
    assert (await client.post(path, json={**asked, "n": 4})).status_code == 429
    assert service.open == service.processing == 0 and [h.status for h in service.handled] == [200, 200, 429]
    assert service.handled[0].finished.predicted_n == predicted


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_of_one_of_several_answers_ends_all(served, stream):
    died = Failed(kind="backend", message="The engine died.")
    client, service = served(FakeEngine([*reply("one")[:-1], None], [died]))
    response = await client.post(CHAT, json={**HELLO, "n": 2, "stream": stream})
    assert "The engine died." in response.text
    assert service.open == service.processing == 0 and service.handled[0].problem == "server_error"


async def test_a_proxy_sees_that_a_silent_stream_lives(served, monkeypatch):
    monkeypatch.setattr("app.serve.http.KEEP_ALIVE_S", 0.01)
    engine = FakeEngine([None, TOO_LONG])
    client, service = served(engine)
    asked = asyncio.ensure_future(client.post(CHAT, json={**HELLO, "stream": True}))
    await asyncio.sleep(0.05)
    engine.release()
    response = await asked
    first, *_, failed, done, _ = response.text.split("\n\n")
    assert response.status_code == 200 and first == ": still here" and done == "data: [DONE]"
    assert json.loads(failed.removeprefix("data: "))["error"]["code"] == "context_length_exceeded"
    assert service.open == 0 and service.handled[0].problem


async def test_an_answer_that_is_not_streamed_shows_that_it_lives(served, monkeypatch):
    for name in ("KEEP_ALIVE_S", "QUIET_S"):
        monkeypatch.setattr(f"app.serve.http.{name}", 0.01)
    engine = FakeEngine([None, *reply("Well.")], [None, TOO_LONG])
    client, service = served(engine)
    for told in ("choices", "error"):
        asked = asyncio.ensure_future(client.post(CHAT, json=HELLO))
        await asyncio.sleep(0.05)
        engine.release()
        response = await asked
        assert response.text.startswith("  ") and told in response.json() and response.status_code == 200
        assert "content-length" not in response.headers and service.open == 0
    assert service.handled[1].problem
    task = asyncio.ensure_future(client.post(CHAT, json=HELLO))
    await asyncio.sleep(0.05)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert service.open == 0 and service.handled[2].status == 499


async def test_tools_of_gpt_oss_have_a_description(served, model_file):
    engine = FakeEngine()
    client, _ = served(engine, file=dataclasses.replace(model_file, form=HARMONY))
    await client.post(CHAT, json={**HELLO, "tools": [WEATHER]})
    [tool] = json.loads(engine.requests[0].prompt.tools)
    assert tool["function"]["description"] == "" and "description" not in WEATHER["function"]


async def test_functions_are_tools_in_their_first_form(served):
    call = '<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>'
    engine = FakeEngine(reply(f"{call}{call}"))
    client, _ = served(engine)
    asked = {**HELLO, "functions": [WEATHER["function"]], "function_call": {"name": "get_weather"}}
    [choice] = (await client.post(CHAT, json=asked)).json()["choices"]
    assert choice["finish_reason"] == "function_call" and "tool_calls" not in choice["message"]
    called = choice["message"]["function_call"]
    assert called["name"] == "get_weather" and json.loads(called["arguments"]) == {"city": "Rome"}
    assert "get_weather" in engine.requests[0].prompt.tools and engine.requests[0].grammar
    parts = [part["choices"][0] for part in await events(client, CHAT, {**asked, "function_call": "auto"})]
    pieces = [part["delta"]["function_call"] for part in parts if "function_call" in part["delta"]]
    assert pieces[0]["name"] == "get_weather" and parts[-1]["finish_reason"] == "function_call"
    assert json.loads("".join(piece["arguments"] for piece in pieces)) == {"city": "Rome"}
    assert engine.requests[1].grammar is None
    await client.post(CHAT, json={**asked, "function_call": "none"})
    assert not engine.requests[2].prompt.tools


async def test_a_bias_reaches_the_engine(served):
    engine = FakeEngine()
    client, _ = served(engine)
    await client.post(CHAT, json={**HELLO, "logit_bias": {"5": -100, "7": 0.5, "9": 0}})
    assert engine.requests[0].logit_bias == ((5, -100), (7, 0.5))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("before", [[], [*reply("")[:2], *tokens("Well, ")]], ids=["waiting", "answering"])
async def test_a_client_that_goes_cancels_its_request(served, stream, before):
    closed = asyncio.Event()

    class Watched(FakeEngine):
        async def generate(self, request):
            try:
                async for event in super().generate(request):
                    yield event
            finally:
                closed.set()

    engine = Watched([*before, None])
    _, service = served(engine)
    gone, sent = asyncio.Event(), []
    body = json.dumps({**HELLO, "stream": stream}).encode()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive():
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    scope = {
        "type": "http", "method": "POST", "path": CHAT, "headers": [(b"host", b"localhost")], "query_string": b"",
        "client": ("127.0.0.1", 1), "scheme": "http", "server": ("127.0.0.1", 80), "root_path": "",
    }  # fmt: skip
    call = asyncio.ensure_future(application(service)(scope, receive, send))
    while not engine.requests or (stream and before and len(sent) < 3):
        await asyncio.sleep(0)
    gone.set()
    await asyncio.wait_for(call, LIMIT_S)
    assert closed.is_set() and service.open == service.processing == 0
    assert [(h.status, h.problem) for h in service.handled] == [(499, "the client has gone")]


async def test_while_it_loads_and_when_it_stops(served):
    engine = FakeEngine([None, *reply("Hello.")])
    client, service = served(engine, ready=None, max_waiting=1)
    loading = await client.get("/health")
    assert loading.status_code == 503 and error(loading)["message"] == "Loading model"
    early = [asyncio.ensure_future(client.post(CHAT, json=HELLO)) for _ in range(2)]
    while service.open < 2:
        await asyncio.sleep(0)
    assert (await client.post(CHAT, json=HELLO)).status_code == 429
    engine.release()
    assert [(await answer).status_code for answer in early] == [200, 200]
    assert "meta" not in (await client.get("/v1/models")).json()["data"][0]
    service.ready = READY
    assert (await client.get("/health")).json() == {"status": "ok", "slots": 1}
    service.stopping = True
    assert (await client.post(CHAT, json=HELLO)).status_code == 503


async def test_the_model_is_listed_as_others_do(served):
    client, _ = served(model="qwen/qwen3:0.6b")
    listed = (await client.get("/v1/models")).json()
    [model] = listed["data"]
    assert (model["id"], model["object"], model["owned_by"]) == ("qwen/qwen3:0.6b", "model", "orin-chat")
    assert model["meta"]["n_ctx"] == model["max_model_len"] == model["context_length"] == 8192
    assert model["meta"]["n_ctx_train"] == 40960 and "tools" in model["supported_parameters"]
    assert model["capabilities"]["thinking"]["supported"] and listed["first_id"] == model["id"]
    assert (await client.get("/v1/models/qwen/qwen3:0.6b")).json() == model
    assert (await client.get("/v1/models/qwen%2Fqwen3:0.6b")).json() == model
    unknown = await client.get("/v1/models/gpt-9")
    assert unknown.status_code == 404 and "qwen/qwen3:0.6b" in error(unknown)["message"]


async def test_metrics(served):
    prefill, done, *pieces, end = reply("Hello, you.", cached_n=6)
    timed = [replace(token, at_ms=ms) for token, ms in zip(pieces, (200.0, 207.0, 240.0), strict=True)]
    client, service = served(FakeEngine([prefill, done, *timed, end]))
    service.observe(
        Slots(
            slots=(),
            waiting=0,
            blocks=(BlockCounts(free=3, held=2, cached=1),),
            device_bytes=8,
            checkpoints=(3, 16),
            rows=32,
            prompt_tokens=480,
            room=512,
        )
    )
    service.engine.pid = os.getpid()
    await client.post(CHAT, json=HELLO)
    await client.post(CHAT, json={})
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = dict(line.rsplit(" ", 1) for line in response.text.splitlines() if not line.startswith("#"))
    assert (
        samples['orin_chat_requests_total{status="200"}']
        == samples['orin_chat_requests_total{status="400"}']
        == "1"
    )
    assert (
        samples["orin_chat_prompt_tokens_total"] == "96"
        and samples["orin_chat_prompt_tokens_cached_total"] == "6"
    )
    first, between = "orin_chat_time_to_first_token_seconds", "orin_chat_inter_token_latency_seconds"
    assert f"# TYPE {first} histogram" in response.text and f"# TYPE {between} histogram" in response.text
    assert samples[f'{first}_bucket{{le="+Inf"}}'] == samples[f"{first}_count"] == "1"
    gaps = [
        samples[f'{between}_bucket{{le="{bound}"}}'] for bound in ("0.005", "0.01", "0.025", "0.05", "+Inf")
    ]
    assert gaps == ["0", "1", "1", "2", "2"] and samples[f"{between}_count"] == "2"
    assert float(samples[f"{between}_sum"]) == pytest.approx(0.04)
    step = [samples[f"orin_chat_step_{name}"] for name in ("rows", "prompt_tokens", "room_tokens")]
    assert step == ["32", "480", "512"]
    assert samples['orin_chat_kv_cache_blocks{group="0",state="held"}'] == "2"
    assert samples["orin_chat_device_memory_bytes"] == "8"
    assert samples["orin_chat_state_checkpoints"] == "3"
    assert int(samples["orin_chat_resident_memory_bytes"]) > 1 << 20
    assert samples["orin_chat_requests_processing"] == samples["orin_chat_requests_waiting"] == "0"


def test_first_tokens_are_recent_for_a_minute():
    now = [100.0]
    metrics = Metrics(clock=lambda: now[0])
    metrics.begun(0.5)
    now[0] += 59
    metrics.begun(0.1)
    assert metrics.recent_first_tokens() == [0.5, 0.1]
    now[0] += 2
    assert metrics.recent_first_tokens() == [0.1] and metrics.first_token.count == 2


async def test_tokenize_and_back(served, model_file):
    client, _ = served()
    ids = (await client.post("/tokenize", json={"content": "Rome<|im_end|>"})).json()["tokens"]
    assert ids == model_file.tokenizer.encode("Rome<|im_end|>", special=True)
    plain = (
        await client.post("/tokenize", json={"content": "Rome<|im_end|>", "parse_special": False})
    ).json()
    assert plain["tokens"] == model_file.tokenizer.encode("Rome<|im_end|>")
    assert (await client.post("/detokenize", json={"tokens": ids})).json()["content"] == "Rome<|im_end|>"
    pieces = (await client.post("/tokenize", json={"content": "é", "with_pieces": True})).json()["tokens"]
    assert [piece["piece"] for piece in pieces] == [[195], [169]]
    assert (await client.post("/tokenize", json={"content": 3})).status_code == 400


async def test_several_prompts(served):
    client, _ = served(FakeEngine(reply("one"), reply("two")), parallel=2)
    body = (await client.post(TEXT, json={"prompt": ["a", [1, 2]]})).json()
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "one"), (1, "two")]
    assert body["usage"]["prompt_tokens"] == 2 * 96


async def test_the_best_of_several_answers(served):
    made = [
        [*reply("")[:2], Token(request_id=0, id=i, text=text, logprob=logprob), reply("")[-1]]
        for i, (text, logprob) in enumerate([("bad", -3.0), ("best", -0.1), ("good", -1.0)])
    ]
    client, _ = served(FakeEngine(*made), parallel=3)
    body = (await client.post(TEXT, json={"prompt": "a", "n": 2, "best_of": 3})).json()
    assert [c["text"] for c in body["choices"]] == ["best", "good"] and not body["choices"][0]["logprobs"]


async def test_an_echo(served):
    client, _ = served(FakeEngine(reply(" day", reason="length")))
    asked = {"prompt": "Good", "echo": True}
    body = (await client.post(TEXT, json=asked)).json()
    assert body["choices"][0]["text"] == "Good day"
    chunks = await events(client, TEXT, asked)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Good day"


async def test_log_probabilities_of_a_prompt(served, model_file):
    """As lm-evaluation-harness asks: the engine is made to say the prompt."""
    tokenizer = model_file.tokenizer
    ids = tokenizer.encode("so what now")
    top = (TopToken(id=ids[0], logprob=-0.5),)
    said = [
        Token(request_id=0, id=id, text=tokenizer.piece(id).decode(), logprob=-0.5, top=top)
        for id in (*ids[1:], ids[0])
    ]
    end = replace(reply("", reason="length")[-1], prompt_n=1, predicted_n=len(ids))
    engine = FakeEngine([*reply("")[:1], *said, end])
    client, _ = served(engine)
    asked = {"prompt": ids, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    body = (await client.post(TEXT, json=asked)).json()
    [request] = engine.requests
    assert request.prompt == TokenIds(ids=tuple(ids[:1])) and request.forced == tuple(ids[1:])
    assert request.max_tokens == len(ids) and request.logprobs == 1
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [None, *[-0.5] * len(ids)] and logprobs["top_logprobs"][0] is None
    assert "".join(logprobs["tokens"][:-1]) == "so what now" and logprobs["text_offset"][:2] == [
        0,
        len(logprobs["tokens"][0]),
    ]
    assert body["choices"][0]["text"].startswith("so what now")
    assert body["usage"]["prompt_tokens"] == len(ids) and body["usage"]["completion_tokens"] == 1
    by_text = await client.post(TEXT, json={**asked, "prompt": "so what now", "max_tokens": 0})
    assert by_text.status_code == 200 and engine.requests[1].forced == tuple(ids[1:])
    assert engine.requests[1].max_tokens == len(ids) - 1


async def test_the_tokenizer_is_described_as_vllm_does(served, model_file):
    client, _ = served()
    info = (await client.get("/tokenizer_info")).json()
    assert info["eos_token"] and "add_generation_prompt" in info["chat_template"]
    asked = {"prompt": info["eos_token"], "add_special_tokens": False}
    tokenized = (await client.post("/tokenize", json=asked)).json()
    assert tokenized["tokens"] == [model_file.tokenizer.eos_id] and tokenized["count"] == 1
    back = await client.post("/detokenize", json={"tokens": tokenized["tokens"]})
    assert back.json()["prompt"] == info["eos_token"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_call_that_cannot_be_read_is_text(served, stream):
    client, service = served(FakeEngine(reply("<tool_call>\n{name: get_weather}\n</tool_call>")))
    response = await client.post(CHAT, json={**HELLO, "tools": [WEATHER], "stream": stream})
    assert "tool_calls" not in response.text and '"stop"' in response.text
    assert service.handled[0].note == "1 call of tools could not be read"


async def test_what_agents_send(served):
    engine = FakeEngine(reply('<tool_call>{"name": "patch", "arguments": {"input": "x"}}</tool_call>'))
    client, service = served(engine)
    custom = {"type": "custom", "custom": {"name": "patch", "description": "Edits."}}
    asked = {**HELLO, "tools": [WEATHER, custom, {"type": "web_search"}]}
    said = (await client.post(CHAT, json=asked)).json()["choices"][0]["message"]["tool_calls"]
    assert said[0]["type"] == "custom" and said[0]["custom"] == {"name": "patch", "input": "x"}
    assert "web_search" in service.handled[0].note
    *_, call, _ = await events(client, CHAT, asked)
    assert call["choices"][0]["delta"]["tool_calls"][0]["custom"]["input"] == "x"
    some = {"tools": [{"type": "custom", "custom": {"name": "patch"}}], "mode": "required"}
    await client.post(CHAT, json={**asked, "tool_choice": {"type": "allowed_tools", "allowed_tools": some}})
    assert (
        len(json.loads(engine.requests[2].prompt.tools)) == 1 and "patch" in engine.requests[2].grammar.source
    )
    format = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"required": ["answer"]}}}
    await client.post(CHAT, json={**asked, "response_format": format})
    assert all(word in engine.requests[3].grammar.source for word in ("answer", "get_weather"))
    old = [
        {"role": "user", "content": "Rome?"},
        {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}},
        {"role": "function", "name": "f", "content": "Sunny"},
    ]
    await client.post(CHAT, json={"messages": [*old, {**old[1], "function_call": None, "tool_calls": said}]})
    _, called, result, last = engine.requests[4].prompt.messages
    assert called.tool_calls[0].name == result.name == "f" and result.role == "tool"
    assert json.loads(last.tool_calls[0].arguments) == {"input": "x"}


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nothing", 404),
        ("GET", CHAT, 405),
        ("DELETE", "/health", 405),
    ],
)
async def test_what_there_is_not(served, method, path, status):
    client, _ = served()
    response = await client.request(method, path)
    assert response.status_code == status and error(response)["message"]


async def test_a_bug_shows_nothing_of_the_request(served, capsys):
    class Broken(FakeEngine):
        def generate(self, request):
            raise RuntimeError(request.prompt.messages[0].content)

    client, service = served(Broken())
    response = await client.post(CHAT, json={"messages": [{"role": "user", "content": "a secret"}]})
    assert response.status_code == 500 and error(response)["type"] == "server_error"
    shown = capsys.readouterr()
    assert "RuntimeError" in shown.err and "secret" not in shown.err + shown.out + response.text
    assert service.handled[0].status == 500 and service.open == 0
