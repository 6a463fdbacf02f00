"""Requests that the server refuses: what it says of them, and what they cost."""

import asyncio
import functools
import gc
import gzip
import json
import threading

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.serve import bodies, endpoints
from app.serve.long_work import LongWork
from app.serve.protocols.chat import ChatBody
from app.serve.protocols.completions import TextBody
from engine.protocol.events import Generate
from tests.app.fake_engine import TOO_LONG, FakeEngine, reply
from tests.app.serve.conftest import HELLO, WEATHER, error

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


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
        (CHAT, {**HELLO, "logit_bias": dict.fromkeys(map(str, range(65_537)), 1)}, "logit_bias"),
        (CHAT, {**HELLO, "n": 0}, "n"),
        (CHAT, {**HELLO, "n": 17}, "n"),
        (CHAT, {**HELLO, "presence_penalty": 3}, "presence_penalty"),
        (CHAT, {**HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {**HELLO, "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {**HELLO, "stop": [str(i) for i in range(65)]}, "stop"),
        (CHAT, {**HELLO, "response_format": {"type": "xml"}}, "response_format.type"),
        (CHAT, {**HELLO, "json_schema": {"minimum": 2**70}}, None),
        (TEXT, {"prompt": "a", "json_schema": {"const": 2**60}}, None),
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


async def test_half_a_character_is_no_reason_to_refuse(served):
    engine = FakeEngine()
    client, _ = served(engine)
    text = json.dumps(HELLO | {"messages": [{"role": "user", "content": "a\ud83d \U0001f600"}]})
    assert (await client.post(CHAT, content=text)).status_code == 200
    assert engine.requests[0].prompt.messages[-1].content == "a\ufffd \U0001f600"


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
        ({"const": dict.fromkeys(map(str, range(3000)), 1)}, "has too many parts"),
        ({"items": {"patternProperties": {f"^{i}(a+)+$": {} for i in range(99)}}}, "has too many parts"),
        ({"properties": {"a": {"enum": ["x" * 9000]}}}, "has texts of more than 8,192 characters to keep to"),
        ({"properties": {"x" * 9000: {}}}, "has texts of more than 8,192 characters to keep to"),
        ({"anyOf": [{"const": "x" * 9000}]}, "has texts of more than 8,192 characters to keep to"),
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


async def test_texts_that_only_describe_may_be_long(served):
    client, _ = served()
    schema = {"type": "object", "description": "x" * 9000, "default": {"a": "x" * 9000}}
    format = {"type": "json_schema", "json_schema": {"schema": schema}}
    assert (await client.post(CHAT, json={**HELLO, "response_format": format})).status_code == 200
    response = await client.post(CHAT, json={**HELLO, "guided_choice": ["yes", "x" * 9000]})
    assert response.status_code == 400 and error(response)["param"] == "guided_choice"


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


async def test_long_bodies_are_decoded_one_at_a_time_beside_others(served, monkeypatch):
    decoded, threads = endpoints.decoded, []

    def noted(data, kind):
        threads.append(threading.current_thread().name)
        assert threads.count("long-work_0") == 1 or len(data) < endpoints.LONG_BODY_BYTES
        body = decoded(data, kind)
        threads.append(threads.pop(threads.index(threading.current_thread().name)) + " ended")
        return body

    monkeypatch.setattr(endpoints, "decoded", noted)
    client, _ = served()
    long = {"messages": [{"role": "user", "content": "x" * endpoints.LONG_BODY_BYTES}]}
    squeezed = {"content": gzip.compress(json.dumps(long).encode()), "headers": {"Content-Encoding": "gzip"}}
    asked = [client.post(CHAT, **squeezed) for _ in range(4)] + [client.post(CHAT, json=HELLO)]
    assert {response.status_code for response in await asyncio.gather(*asked)} == {200}
    assert sorted(threads) == ["MainThread ended", *["long-work_0 ended"] * 4]


async def test_a_schema_of_many_parts_is_worked_at_beside_others(served, monkeypatch):
    """It is gone through part by part: one of 250 KB took over a second, in which nobody was answered."""
    run, sizes = LongWork.run, []

    async def noted(work, client, n_bytes, *how):
        sizes.append(n_bytes)
        return await run(work, client, n_bytes, *how)

    monkeypatch.setattr(LongWork, "run", noted)
    client, _ = served(FakeEngine(reply("{}"), reply("{}")))
    for parts in (100, 2_100):
        schema = {"anyOf": [{"type": "object"}, *[{}] * parts]}
        format = {"type": "json_schema", "json_schema": {"schema": schema}}
        assert (await client.post(CHAT, json={**HELLO, "response_format": format})).status_code == 200
    assert len(sizes) == 1 and sizes[0] > endpoints.LONG_BODY_BYTES


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


async def test_many_messages_count_for_more_than_their_bytes(served, monkeypatch):
    """Until the engine's request is made of them."""
    monkeypatch.setattr(bodies, "MAX_PARTS_BYTES", 8_000_000)
    client, _ = served()
    long = {"messages": [{"role": "user", "content": "x"}] * 10_000}
    asked = [client.post(CHAT, json=long), client.post(CHAT, json=HELLO)]
    assert [response.status_code for response in await asyncio.gather(*asked)] == [200, 200]
    asked = [client.post(CHAT, json=long) for _ in range(3)]
    assert {response.status_code for response in await asyncio.gather(*asked)} == {200, 503}
    assert (await client.post(CHAT, json=long)).status_code == 200


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
