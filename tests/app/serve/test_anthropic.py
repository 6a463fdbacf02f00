"""Anthropic's messages, over an engine that follows a script."""

import json

import pytest

from app.serve.errors import ApiError, anthropic_form, form_of, gemini_form, openai_form
from app.serve.protocols.anthropic import CountBody, chat_body
from engine.protocol.events import Failed
from tests.app.fake_engine import TOO_LONG, FakeEngine, reply
from tests.app.serve.conftest import HELLO, WEATHER

PATH = "/v1/messages"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TOOL = {"name": "get_weather", "description": "d", "input_schema": WEATHER["function"]["parameters"]}
USER = [{"role": "user", "content": "Rome?"}]
ASKED = {"model": "any", "max_tokens": 99, "messages": USER}


async def streamed(client, body):
    response = await client.post(PATH, json={**ASKED, **body, "stream": True})
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    parts = [part.split("\n") for part in response.text.split("\n\n") if part]
    events = [json.loads(data.removeprefix("data: ")) for _, data in parts]
    assert [name for name, _ in parts] == [f"event: {event['type']}" for event in events]
    return events


async def test_a_whole_message(served):
    engine = FakeEngine(reply(f"I look.\n{CALL}", "Hm.", cached_n=6))
    client, service = served(engine)
    asked = {**ASKED, "tools": [TOOL], "thinking": {"type": "enabled", "budget_tokens": 1024}}
    asked["metadata"] = {"user_id": json.dumps({"device_id": "d", "session_id": "0123456789"})}
    message = (await client.post(PATH, json=asked)).json()
    thinking, text, call = message["content"]
    assert thinking == {"type": "thinking", "thinking": "Hm.", "signature": "orin-chat"}
    assert text["type"] == "text" and text["text"].strip() == "I look."
    assert (call["type"], call["name"], call["input"]) == ("tool_use", "get_weather", {"city": "Rome"})
    assert message["stop_reason"] == "tool_use" and message["role"] == "assistant"
    assert message["usage"]["input_tokens"] == 90 and message["usage"]["cache_read_input_tokens"] == 6
    assert engine.requests[0].prompt.think and engine.requests[0].max_tokens == 99
    assert service.handled[0].path == PATH and service.handled[0].status == 200
    assert service.handled[0].client == "01234567@127.0.0.1"


async def test_a_streamed_message(served):
    client, _ = served(FakeEngine(reply(f"I look.\n{CALL}", "Hm.", cached_n=6)))
    events = await streamed(client, {"tools": [TOOL], "thinking": {"type": "adaptive"}})
    assert [e["type"] for e in (events[0], events[-2], events[-1])] == [
        "message_start", "message_delta", "message_stop"
    ]  # fmt: skip
    assert (
        events[0]["message"]["usage"]["cache_read_input_tokens"] == 0 and not events[0]["message"]["content"]
    )
    kinds, texts = [], []
    for event in events[1:-2]:
        match event["type"]:
            case "content_block_start":
                assert event["index"] == len(kinds)
                kinds.append(event["content_block"]["type"])
                texts.append("")
            case "content_block_delta" if event["delta"]["type"] != "signature_delta":
                [text] = [value for name, value in event["delta"].items() if name != "type"]
                texts[event["index"]] += text
    assert kinds == ["thinking", "text", "tool_use"] and texts[0] == "Hm." and texts[1].strip() == "I look."
    assert json.loads(texts[2]) == {"city": "Rome"}
    assert events[-2]["delta"]["stop_reason"] == "tool_use" and events[-2]["usage"]["output_tokens"] > 0


async def test_a_conversation_with_tools(served):
    engine = FakeEngine()
    client, _ = served(engine)
    system = [
        {"type": "text", "text": "x-anthropic-billing-header: cch=1a2b3;\nBe brief."},
        {"type": "text", "text": "Use tools.", "cache_control": {"type": "ephemeral"}},
    ]
    call = {"type": "tool_use", "id": "a1", "name": "get_weather", "input": {"city": "Rome"}}
    results = [
        {"type": "tool_result", "tool_use_id": "a1", "content": [{"type": "text", "text": "Sunny"}]},
        {"type": "tool_result", "tool_use_id": "a2", "content": "none", "is_error": True},
        {"type": "text", "text": "And Oslo?"},
    ]
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "x"}
    summary = {"type": "compaction", "content": "They met."}
    messages = [
        *USER,
        {"role": "assistant", "content": [summary, thought, call]},
        {"role": "user", "content": results},
    ]
    await client.post(PATH, json={**ASKED, "system": system, "messages": messages})
    first = engine.requests[0].prompt.messages
    assert [m.role for m in first] == ["system", "user", "assistant", "tool", "tool", "user"]
    assert first[0].content == "Be brief.\n\nUse tools."
    assert (first[2].content, first[2].thinking) == ("They met.", "Hm.")
    assert json.loads(first[2].tool_calls[0].arguments) == {"city": "Rome"}
    assert (first[3].name, first[3].tool_call_id, first[3].content) == ("get_weather", "a1", "Sunny")
    assert first[4].content == "Error: none" and first[5].content == "And Oslo?"
    system[0]["text"] = "x-anthropic-billing-header: cch=99999;\nBe brief."
    await client.post(PATH, json={**ASKED, "system": system, "messages": messages})
    assert engine.requests[1].prompt == engine.requests[0].prompt and not engine.requests[0].prompt.think


@pytest.mark.parametrize(
    ("choice", "has_tools", "has_grammar"),
    [("auto", True, False), ("any", True, True), ("tool", True, True), ("none", False, False)],
)
async def test_the_choice_of_tools(served, choice, has_tools, has_grammar):
    engine = FakeEngine()
    client, service = served(engine)
    asked = {"tools": [TOOL, {"type": "web_search_20250305", "name": "web_search"}]}
    asked["tool_choice"] = {"type": choice, "name": "get_weather"}
    assert (await client.post(PATH, json={**ASKED, **asked})).status_code == 200
    [request] = engine.requests
    assert bool(request.prompt.tools) is has_tools and bool(request.grammar) is has_grammar
    assert "web_search" not in request.prompt.tools
    assert bool(service.handled[0].note) is has_tools


async def test_stop_sequences_and_limits(served):
    client, _ = served(FakeEngine(reply("one, two"), reply("one", reason="length")))
    stopped = (await client.post(PATH, json={**ASKED, "stop_sequences": [" two"]})).json()
    assert stopped["content"] == [{"type": "text", "text": "one,"}]
    assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", " two")
    cut = (await client.post(PATH, json=ASKED)).json()
    assert cut["stop_reason"] == "max_tokens"


async def test_structured_output_is_held_by_a_grammar(served):
    engine = FakeEngine()
    client, _ = served(engine)
    schema = {"type": "object", "properties": {"a": {}}, "additionalProperties": False}
    format = {"type": "json_schema", "schema": schema}
    for fields in ({"output_config": {"format": format}}, {"output_format": format}):
        await client.post(PATH, json={**ASKED, **fields})
        assert json.loads(engine.requests[-1].grammar.source) == schema


async def test_what_anthropics_server_did_is_left_out(served):
    engine = FakeEngine()
    client, _ = served(engine)
    found = [
        {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}},
        {"type": "web_search_tool_result", "tool_use_id": "s1", "content": []},
        {"type": "text", "text": "Sunny."},
    ]
    messages = [*USER, {"role": "assistant", "content": found}, *USER]
    tools = [{"type": "mcp_toolset", "mcp_server_name": "x"}]
    assert (await client.post(PATH, json={**ASKED, "messages": messages, "tools": tools})).status_code == 200
    assert [m.content for m in engine.requests[0].prompt.messages][1] == "Sunny."
    inline = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": TOOL}}
    later = [*USER, {"role": "system", "content": [inline]}]
    assert (await client.post(PATH, json={**ASKED, "messages": later})).status_code == 200
    chat = engine.requests[1].prompt
    assert json.loads(chat.tools)[0]["function"]["name"] == "get_weather" and len(chat.messages) == 1
    for param in ("thread", "compaction"):
        assert (await client.post(PATH, json={**ASKED, param: {"type": "create"}})).status_code == 400
    nameless = {"tools": [TOOL], "tool_choice": {"type": "tool"}}
    assert (await client.post(PATH, json={**ASKED, **nameless})).status_code == 400


async def test_tokens_are_counted_as_the_engine_counts_them(served, model_file):
    client, _ = served()
    asked = {"model": "x", "messages": [{"role": "user", "content": "Hello"}]}
    counted = (await client.post(f"{PATH}/count_tokens", json=asked)).json()
    pieces = (await client.post("/tokenize", json=HELLO)).json()["tokens"]
    assert counted == {"input_tokens": len(pieces)} and len(pieces) > 5
    more = (await client.post(f"{PATH}/count_tokens", json={**asked, "tools": [TOOL]})).json()
    assert more["input_tokens"] > counted["input_tokens"]


async def test_errors_have_the_protocols_form(served):
    died = Failed(kind="backend", message="The engine died.")
    client, service = served(FakeEngine([TOO_LONG], [*reply("Well")[:-1], died]), max_waiting=0, parallel=1)
    response = await client.post(PATH, json={**ASKED, "messages": [{"role": "wizard", "content": ""}]})
    assert response.status_code == 400 and response.json()["type"] == "error"
    assert response.json()["error"]["type"] == "invalid_request_error"
    long = (await client.post(PATH, json=ASKED)).json()["error"]["message"]
    assert long.startswith("prompt is too long: ") and "8,192" in long
    *_, last = await streamed(client, {})
    assert last == {"type": "error", "error": {"type": "api_error", "message": "The engine died."}}
    service.stopping = True
    stopping = await client.post(PATH, json=ASKED)
    assert stopping.status_code == 503 and stopping.json()["error"]["type"] == "overloaded_error"
    picture = [{"type": "image", "source": {}}]
    service.stopping = False
    refused = await client.post(PATH, json={**ASKED, "messages": [{"role": "user", "content": picture}]})
    assert "reads text and pictures" in refused.json()["error"]["message"]


def test_blanks_and_paths_of_any_length_are_read_at_once():
    """Both took as long as the square of their length: hours, in which nobody was answered."""
    blanks = " " * 2_000_000
    assert chat_body(CountBody(messages=[], system=blanks)).messages[0].content == blanks
    assert form_of("/models/:a" * 100_000) is openai_form
    assert form_of("/v1/models/a/b:c:countTokens") is gemini_form
    assert form_of("/v1/messages/:countTokens") is anthropic_form


def test_googles_kinds_of_errors_say_whose_fault_it_is():
    kinds = [gemini_form(ApiError(status, ""))["error"]["status"] for status in (413, 415, 408, 500)]
    assert kinds == ["INVALID_ARGUMENT", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "INTERNAL"]


async def test_a_user_of_many_brackets(served):
    client, _ = served()
    asked = {**ASKED, "metadata": {"user_id": "[" * 100_000}}
    assert (await client.post(PATH, json=asked)).status_code == 200
