"""Google's interactions, over an engine that follows a script."""

import base64
import json

import pytest

from tests.app.fake_engine import SEEING, FakeEngine, reply
from tests.pictures import plain_picture

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
PATH = "/v1beta/interactions"
TOOL = {
    "type": "function",
    "name": "get_weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
SHOWN = {"generation_config": {"thinking_summaries": "auto"}}


async def streamed(client, body):
    text = (await client.post(PATH, json=body | {"stream": True})).text
    *parts, done = [part for part in text.split("\n\n") if part]
    assert done == "data: [DONE]"
    events = [json.loads(part.partition("data: ")[2]) for part in parts]
    assert [part.partition("\n")[0] for part in parts] == [
        f"event: {event['event_type']}" for event in events
    ]
    return events


async def test_a_conversation_goes_on_with_the_result_of_a_call(served):
    engine = FakeEngine(reply(f"I look.\n{CALL}", "Hm."), reply("Sunny."))
    client, _ = served(engine)
    body = {"model": "tiny", "input": "Rome?", "system_instruction": "Be brief.", "tools": [TOOL]}
    first = (await client.post(PATH, json=body)).json()
    thought, said, call = first["steps"]
    assert first["status"] == "requires_action" and first["usage"]["total_input_tokens"] == 96
    assert thought["type"] == "thought" and "summary" not in thought, "no thoughts unasked"
    assert said["content"][0]["text"].strip() == "I look."
    assert (call["type"], call["name"], call["arguments"]) == (
        "function_call",
        "get_weather",
        {"city": "Rome"},
    )
    result = {
        "type": "function_result",
        "call_id": call["id"],
        "name": call["name"],
        "result": {"weather": "sun"},
    }
    body = {"model": "tiny", "input": [result], "previous_interaction_id": first["id"], "tools": [TOOL]}
    second = (await client.post(PATH, json=body)).json()
    assert second["status"] == "completed" and second["steps"][0]["content"][0]["text"] == "Sunny."
    asked = engine.requests[1].prompt.messages
    assert [message.role for message in asked] == ["user", "assistant", "tool"]
    assert (
        json.loads(asked[1].tool_calls[0].arguments) == {"city": "Rome"}
        and asked[2].content == '{"weather": "sun"}'
    )


async def test_the_client_may_keep_the_conversation(served):
    """Its steps come back as they were, and with them what the model thought."""
    engine = FakeEngine(reply("Hello", "Hm."), reply("Yes"))
    client, _ = served(engine)
    first = (await client.post(PATH, json={"input": "Hi", "store": False})).json()
    assert (await client.get(f"{PATH}/{first['id']}")).json()["error"]["status"] == "NOT_FOUND"
    more = {
        "type": "user_input",
        "content": [{"type": "text", "text": "And"}, {"type": "text", "text": " now?"}],
    }
    await client.post(PATH, json={"input": [*first["steps"], more]})
    said, asked = engine.requests[1].prompt.messages
    assert (said.role, said.content, said.thinking) == ("assistant", "Hello", "Hm.")
    assert asked.content == "And now?"


async def test_events_of_a_stream(served):
    client, _ = served(FakeEngine(reply(f"I look.\n{CALL}", "Hm.")))
    events = await streamed(client, {"input": "Rome?", "tools": [TOOL]} | SHOWN)
    kinds = [event["event_type"] for event in events if event["event_type"] != "step.delta"]
    assert kinds == [
        "interaction.created",
        "interaction.status_update",
        *["step.start", "step.stop"] * 3,
        "interaction.completed",
    ]
    deltas = [event["delta"] for event in events if event["event_type"] == "step.delta"]
    text = lambda kind, name: "".join(delta[name] for delta in deltas if delta["type"] == kind)
    assert text("text", "text").strip() == "I look."
    assert json.loads(text("arguments_delta", "arguments")) == {"city": "Rome"}
    assert [delta["content"]["text"] for delta in deltas if delta["type"] == "thought_summary"] == ["Hm."]
    end = events[-1]["interaction"]
    assert end["status"] == "requires_action" and end["usage"]["total_tokens"] > 96


async def test_what_is_remembered(served):
    client, _ = served(FakeEngine(reply("Hello")))
    made = (await client.post(PATH, json={"input": "Hi", "labels": {"a": "b"}})).json()
    place = f"{PATH}/{made['id']}"
    assert (await client.get(place)).json() == made and made["labels"] == {"a": "b"}
    assert (await client.get(f"{place}?include_input=true")).json() == made | {"input": "Hi"}
    assert (await client.post(f"{place}/cancel")).status_code == 400
    assert (await client.delete(place)).json() == {} and (await client.get(place)).status_code == 404


async def test_contents_stand_where_they_are_among_steps(served):
    engine = FakeEngine(reply("Yes"))
    client, _ = served(engine)
    text = lambda said: {"type": "text", "text": said}
    await client.post(
        PATH, json={"input": [text("A"), text("B"), {"type": "model_output", "content": "C"}, text("D")]}
    )
    said = [(message.role, message.content) for message in engine.requests[0].prompt.messages]
    assert said == [("user", "AB"), ("assistant", "C"), ("user", "D")]


async def test_settings_and_schemas(served):
    engine = FakeEngine(*[reply("{}")] * 3)
    client, _ = served(engine)
    schema = {"type": "object", "properties": {"a": {"type": "string"}}}
    config = {"seed": 3, "stop_sequences": ["x"], "max_output_tokens": 5, "thinking_level": "minimal"}
    wanted = {"type": "text", "mime_type": "application/json", "schema": schema}
    for format in (wanted, [wanted], schema):
        body = {"input": "Hi", "generation_config": config, "response_format": format}
        assert (await client.post(PATH, json=body)).status_code == 200
    for request in engine.requests:
        assert request.grammar and request.max_tokens == 5 and request.sampling.seed == 3
        assert not request.prompt.think


async def test_pictures(served):
    engine = FakeEngine(reply("Red."))
    client, _ = served(engine, ready=SEEING)
    data = base64.b64encode(plain_picture()).decode()
    picture = {"type": "image", "mime_type": "image/png", "data": data}
    by_address = {"type": "image", "uri": f"data:image/png;base64,{data}"}
    response = await client.post(
        PATH, json={"input": [{"type": "text", "text": "What?"}, picture, by_address]}
    )
    assert response.status_code == 200, response.text
    [message] = engine.requests[0].prompt.messages
    assert len(message.pictures) == 2
    kept = await client.get(f"{PATH}/{response.json()['id']}?include_input=true")
    text = {"type": "text", "text": "What?"}
    assert kept.json()["input"] == [{"type": "user_input", "content": [text, picture, by_address]}]


async def test_what_was_asked_is_told_step_by_step(served):
    """Of an interaction that goes on with another, what came with it alone."""
    client, _ = served(FakeEngine(reply("Hi"), reply("Bye")))
    first = (await client.post(PATH, json={"input": "Hello"})).json()["id"]
    text = [{"type": "text", "text": "A"}]
    steps = [
        {"type": "thought", "signature": base64.b64encode(b"Hm.").decode()},
        {"type": "function_call", "id": "c1", "name": "get", "arguments": {"a": 1}},
        {"type": "function_result", "call_id": "c1", "result": text},
        {"type": "model_output", "content": text},
        {"type": "user_input", "content": text},
    ]
    body = {"input": steps, "previous_interaction_id": first, "tools": [TOOL]}
    second = (await client.post(PATH, json=body)).json()["id"]
    assert (await client.get(f"{PATH}/{second}?include_input=true")).json()["input"] == steps


async def test_a_response_is_no_interaction(served):
    client, _ = served(FakeEngine(reply("Hi")))
    response = (await client.post("/v1/responses", json={"input": "Hello"})).json()["id"]
    refused = await client.get(f"{PATH}/{response}?include_input=true")
    assert refused.status_code == 404 and "/v1/responses/ID" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    "fields",
    [
        {"background": True},
        {"agent": "deep-research"},
        {"input": None},
        {"input": [{"type": "audio", "data": "AAAA"}]},
        {"input": [{"type": "image", "uri": "http://10.0.0.1/a.png"}]},
        {"response_format": {"type": "audio"}},
        {"previous_interaction_id": "v1_x"},
    ],
)
async def test_what_is_refused(served, fields):
    client, _ = served()
    refused = await client.post(PATH, json={"model": "tiny", "input": "Hi"} | fields)
    assert refused.status_code in (400, 404)
    failed = refused.json()["error"]
    assert (
        failed["status"] in ("INVALID_ARGUMENT", "NOT_FOUND") and failed["code"] == failed["status"].lower()
    )
