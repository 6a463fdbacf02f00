"""What clients send in the form of another protocol, and files in requests."""

import base64
import json
from dataclasses import replace

import pytest

from engine.formats.templates.fill_in import FillIn
from tests.app.fake_engine import TOO_LONG, FakeEngine, reply
from tests.app.serve.conftest import HELLO, WEATHER, error, events

CHAT = "/v1/chat/completions"
FUNCTION = WEATHER["function"]
PLAIN = {"type": "function", **FUNCTION}
OF_MESSAGES = {"name": FUNCTION["name"], "input_schema": FUNCTION["parameters"]}
NOTES = base64.b64encode("Grüße\n".encode()).decode()


@pytest.mark.parametrize("tool", [WEATHER, PLAIN, OF_MESSAGES])
@pytest.mark.parametrize(
    "choice", ["auto", {"type": "function", "name": "get_weather"}, {"type": "tool", "name": "get_weather"}]
)
async def test_tools_in_the_forms_of_other_protocols(served, tool, choice):
    engine = FakeEngine()
    client, _ = served(engine)
    response = await client.post(CHAT, json=HELLO | {"tools": [tool], "tool_choice": choice})
    [shown] = json.loads(engine.requests[0].prompt.tools)
    assert response.status_code == 200 and shown == WEATHER


@pytest.mark.parametrize("tool", [WEATHER, OF_MESSAGES])
async def test_tools_of_other_protocols_in_responses(served, tool):
    """The answer repeats them as responses have them, so that the types of clients fit."""
    engine = FakeEngine()
    client, _ = served(engine)
    response = await client.post("/v1/responses", json={"input": "Hello", "tools": [tool]})
    assert response.status_code == 200 and json.loads(engine.requests[0].prompt.tools) == [WEATHER]
    assert response.json()["tools"] == [{"description": None, "strict": False} | PLAIN]


@pytest.mark.parametrize(
    "path, content",
    [
        (CHAT, [{"text": "Read "}, {"type": "file", "file": {"filename": "a.txt", "file_data": NOTES}}]),
        (
            "/v1/responses",
            [
                {"type": "input_text", "text": "Read "},
                {"type": "input_file", "filename": "a.txt", "file_data": f"data:text/plain;base64,{NOTES}"},
            ],
        ),
        (
            "/v1/messages",
            [
                {"type": "text", "text": "Read "},
                {"type": "document", "title": "a.txt", "source": {"type": "base64", "data": NOTES}},
            ],
        ),
    ],
)
async def test_files_of_text_are_read(served, path, content):
    engine = FakeEngine()
    client, _ = served(engine)
    field = "input" if path.endswith("responses") else "messages"
    body = {"model": "tiny", "max_tokens": 5, field: [{"role": "user", "content": content}]}
    response = await client.post(path, json=body)
    assert response.status_code == 200, response.text
    said = engine.requests[0].prompt.messages[0].content
    assert said.startswith("Read ") and "a.txt\nGrüße" in said


@pytest.mark.parametrize(
    "file",
    [
        {"file_id": "file-1"},
        {"file_data": base64.b64encode(b"%PDF-1.7\xff\0").decode()},
        {"file_data": base64.b64encode(b"%PDF-1.7\n1 0 obj").decode()},
        {"file_data": "=="},
        5,
    ],
)
async def test_other_files_are_refused(served, file):
    client, service = served()
    messages = [{"role": "user", "content": [{"type": "file", "file": file}]}]
    response = await client.post(CHAT, json={"messages": messages})
    assert response.status_code == 400 and "file" in error(response)["message"]
    assert not service.engine.requests


async def test_an_address_that_ends_with_v1_gets_another(served):
    client, _ = served()
    assert (await client.get("/v1/v1/models")).json()["data"][0]["id"] == "tiny"
    assert (await client.get("/v1/api/tags")).json()["models"][0]["name"] == "tiny"
    assert (await client.get("/v1/v1")).status_code == 404
    whole = "v1/chat/completions"
    for path in (
        "openai/deployments/tiny",
        "openai/v1",
        "inference/a/v1",
        "api/v1",
        "v1/v1",
        "api/v1/v1",
        whole,
    ):
        assert (await client.post(f"/{path}/chat/completions", json=HELLO)).status_code == 200
    assert (await client.post("/v1/engines/x/completions", json={"prompt": "a"})).status_code == 200
    for path in ("/openai/v1", "/openai/deployments/tiny", "/a/v2/models"):
        assert (await client.get(path)).status_code == 404


async def test_mistrals_path_for_code(served, model_file):
    engine = FakeEngine(reply("a, b"))
    client, _ = served(engine, file=replace(model_file, fill_in=FillIn(1, 2, 3)))
    asked = {"prompt": "def f(", "suffix": ")", "max_tokens": 9, "random_seed": 4, "stop": [","]}
    body = (await client.post("/v1/fim/completions", json=asked)).json()
    assert body["choices"][0]["message"]["content"] == "a" and engine.requests[0].sampling.seed == 4
    assert [id for id in engine.requests[0].prompt.ids if id in (1, 2, 3)] == [1, 2, 3]


async def test_mistrals_libraries_get_calls_whole_and_models_of_their_kind(served):
    engine = FakeEngine(
        reply('<tool_call>{"name": "get_weather", "arguments": {"city": "Rome"}}</tool_call>')
    )
    client, _ = served(engine)
    client.headers["user-agent"] = "mistral-client-python/3.7.0"
    parts = await events(client, CHAT, HELLO | {"tools": [WEATHER]})
    [call] = [call for part in parts for call in part["choices"][0]["delta"].get("tool_calls", ())]
    assert call["function"] == {"name": "get_weather", "arguments": '{"city": "Rome"}'}
    [model] = (await client.get("/v1/models")).json()["data"]
    assert model["type"] == "base" and model["capabilities"]["function_calling"]


async def test_a_schema_that_is_left_out_is_any_object(served):
    engine = FakeEngine()
    client, _ = served(engine)
    format = {"type": "json_schema", "json_schema": {"name": "x"}}
    assert (await client.post(CHAT, json=HELLO | {"response_format": format})).status_code == 200
    assert json.loads(engine.requests[0].grammar.source)["type"] == "object"


@pytest.mark.parametrize(
    "path, body, said",
    [
        (CHAT, HELLO, "This model's maximum context length is 8192 tokens. The prompt has 9,000 tokens"),
        (
            "/v1/messages",
            HELLO | {"max_tokens": 5},
            "prompt is too long: 9000 tokens > 8192 maximum. The prompt",
        ),
        ("/api/chat", HELLO | {"stream": False}, "maximum context length is 8192 tokens"),
    ],
)
async def test_a_full_context_is_said_as_agents_expect_it(served, path, body, said):
    client, _ = served(FakeEngine([TOO_LONG]))
    response = await client.post(path, json=body)
    assert response.status_code == 400 and said in response.text
