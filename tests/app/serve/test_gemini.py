"""Google's protocol for Gemini, over an engine that follows a script."""

import base64
import functools
import json

import pytest

from app.serve.protocols.common.pictures import NOT_READ
from engine.protocol.events import Sampling, Token, TopToken
from tests.app.fake_engine import SEEING, TOO_LONG, FakeEngine, reply
from tests.pictures import plain_picture

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
PATH = "/v1beta/models/tiny"
DECLARED = {
    "name": "get_weather",
    "parameters": {
        "type": "OBJECT",
        "properties": {"city": {"type": "STRING", "nullable": True, "format": "enum", "enum": ["Rome"]}},
        "required": ["city"],
    },
}
ASKED = {"contents": [{"role": "user", "parts": [{"text": "Rome?"}]}]}


def nested(value, name):
    """JSON that is as deep as a request may be, or nearly."""
    return functools.reduce(lambda inner, _: {name: inner}, range(900), value)


async def streamed(client, body, path=f"{PATH}:streamGenerateContent?alt=sse"):
    response = await client.post(path, json=body)
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    return [json.loads(part.removeprefix("data: ")) for part in response.text.split("\n\n") if part]


async def test_answers(served):
    client, service = served(FakeEngine(*[reply(f"I look.\n{CALL}", "Hm.")] * 4))
    body = ASKED | {
        "tools": [{"function_declarations": [DECLARED]}, {"google_search": {}}],
        "generation_config": {"thinking_config": {"include_thoughts": True}},
    }
    whole = (await client.post(f"{PATH}:generateContent", json=body)).json()
    [candidate] = whole["candidates"]
    thought, text, call = candidate["content"]["parts"]
    assert thought == {"text": "Hm.", "thought": True} and text["text"].strip() == "I look."
    assert call["functionCall"]["name"] == "get_weather" and call["functionCall"]["args"] == {"city": "Rome"}
    assert candidate["finishReason"] == "STOP" and whole["usageMetadata"]["promptTokenCount"] == 96
    *parts, last = await streamed(client, body)
    said = [part["candidates"][0]["content"]["parts"][0] for part in parts]
    assert "".join(part.get("text", "") for part in said).split() == ["Hm.I", "look."]
    assert {part["usageMetadata"]["totalTokenCount"] for part in parts} == {96}
    assert [part["functionCall"]["args"] for part in said if "functionCall" in part] == [{"city": "Rome"}]
    assert last["candidates"][0]["finishReason"] == "STOP" and last["usageMetadata"] == whole["usageMetadata"]
    [listed] = (await client.post(f"{PATH}:streamGenerateContent", json=body)).json()
    assert listed["candidates"][0]["content"]["parts"][0] == thought
    silent = (
        await client.post("/v1/models/tiny:generateContent", json={**body, "generationConfig": {}})
    ).json()
    assert len(silent["candidates"][0]["content"]["parts"]) == 2, "no thoughts unasked"
    shown = json.loads(service.engine.requests[0].prompt.tools)[0]["function"]["parameters"]
    assert shown["type"] == "object" and shown["properties"]["city"] == {
        "type": ["string", "null"],
        "enum": ["Rome", None],
    }
    assert "google_search" in service.handled[0].note.replace("googleSearch", "google_search")


async def test_a_conversation_and_its_options(served):
    client, _ = served(engine := FakeEngine(), ready=SEEING)
    picture = base64.b64encode(plain_picture()).decode()
    contents = [
        {"parts": [{"text": "Look"}, {"inline_data": {"mime_type": "image/png", "data": picture}}]},
        {
            "role": "model",
            "parts": [{"text": "Hm", "thought": True}, {"functionCall": {"name": "f", "args": {"a_b": 1}}}],
        },
        {
            "role": "user",
            "parts": [
                {
                    "functionResponse": {
                        "name": "f",
                        "response": {"result": "Sunny"},
                        "parts": [{"inlineData": {"mimeType": "application/pdf", "data": "JVBERi0="}}],
                    }
                },
                {"text": "So?"},
            ],
        },
    ]
    config = {
        "temperature": 0.5,
        "topK": 7.0,
        "maxOutputTokens": 9,
        "stopSequences": ["x"],
        "seed": 3,
        "thinkingConfig": {"thinkingBudget": 0},
        "responseSchema": {"type": "OBJECT", "properties": {"a_b": {"type": "INTEGER"}}},
    }
    body = {
        "contents": contents,
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
        "generationConfig": config,
    }
    assert (await client.post(f"{PATH}:generateContent", json=body)).status_code == 200
    [request] = engine.requests
    system, user, model, tool, last = request.prompt.messages
    assert (system.content, last.content, len(user.pictures)) == ("Be brief.", "So?", 1)
    assert model.thinking == "Hm" and model.tool_calls[0].arguments == '{"a_b": 1}'
    assert (tool.name, tool.content) == ("f", f"Sunny{NOT_READ}")
    assert request.sampling == Sampling(temperature=0.5, top_k=7, seed=3) and request.max_tokens == 9
    assert not request.prompt.think
    source = request.grammar.source
    assert [*json.loads(source)["properties"]] == ["a_b"] and '"type":"integer"' in source
    enum = {
        "response_mime_type": "text/x.enum",
        "response_schema": {"type": "STRING", "enum": ["red", "blue"]},
    }
    await client.post(f"{PATH}:generateContent", json=ASKED | {"generation_config": enum})
    assert engine.requests[1].grammar.source == 'start: "red" | "blue"'
    calling = {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["get_weather"]}}
    tools = [{"functionDeclarations": [DECLARED, {"name": "stop"}]}]
    await client.post(f"{PATH}:generateContent", json=ASKED | {"tools": tools, "toolConfig": calling})
    assert engine.requests[2].grammar and "stop" not in engine.requests[2].prompt.tools


async def test_what_googles_own_server_takes_too(served):
    """Lists of one without the list, whole numbers as 9.0, sizes as texts, and the path of Vertex AI."""
    token = Token(request_id=0, id=1, text="x", logprob=-0.5, top=(TopToken(id=2, logprob=-0.7),))
    begun, read, *_, end = reply("")
    client, _ = served(engine := FakeEngine([begun, read, token, end]))
    schema = {"type": "ARRAY", "min_items": "1", "items": {"any_of": [{"type": "STRING"}], "nullable": True}}
    config = {"maxOutputTokens": 9.0, "responseSchema": schema, "responseLogprobs": True, "logprobs": 1}
    body = {
        "system_instruction": {"parts": {"text": "Be brief."}},
        "contents": {"parts": {"text": "Hi"}},
        "tools": {"function_declarations": {"name": "f"}},
        "generationConfig": config,
    }
    path = "/v1beta1/projects/p/locations/l/publishers/google/models/tiny:generateContent"
    response = await client.post(path, json=body)
    [candidate] = response.json()["candidates"]
    shown = candidate["logprobsResult"]
    assert (candidate["avgLogprobs"], shown["chosenCandidates"][0]["logProbability"]) == (-0.5, -0.5)
    assert shown["topCandidates"][0]["candidates"][0]["tokenId"] == 2
    assert (await streamed(client, body))[0]["candidates"][0]["logprobsResult"] == shown
    refused = await client.post(path.replace("generateContent", "predict"), json=body)
    assert refused.status_code == 404 and refused.json()["error"]["status"] == "NOT_FOUND"
    request = engine.requests[0]
    assert [message.content for message in request.prompt.messages] == ["Be brief.", "Hi"]
    assert request.max_tokens == 9 and '"name": "f"' in request.prompt.tools
    source = request.grammar.source.replace(" ", "")
    assert '"minItems":1' in source and '"type":"null"' in source


async def test_what_else_there_is(served):
    client, _ = served(FakeEngine([TOO_LONG]), key="secret")
    refused = await client.post(f"{PATH}:generateContent", json=ASKED)
    assert refused.status_code == 401 and refused.json()["error"]["status"] == "UNAUTHENTICATED"
    client.headers["x-goog-api-key"] = "secret"
    [model] = (await client.get("/v1beta/models")).json()["models"]
    assert model["name"] == "models/tiny" and (await client.get(PATH)).json() == model
    counted = (await client.post(f"{PATH}:countTokens", json=ASKED)).json()
    again = {"generateContentRequest": {"model": "models/tiny", **ASKED}}
    assert counted["totalTokens"] > 4
    assert (await client.post(f"{PATH}:countTokens", json=again)).json() == counted
    full = await client.post(f"{PATH}:generateContent", json=ASKED)
    assert full.status_code == 400 and full.json()["error"]["status"] == "INVALID_ARGUMENT"
    assert (await client.post(f"{PATH}:dream", json={})).json()["error"]["code"] == 404


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"contents": 5}, "Expected"),
        ({"contents": [{"role": "robot", "parts": []}]}, "A role"),
        ({"contents": [{"parts": [{"fileData": {"fileUri": "http://x"}}]}]}, "fetches nothing"),
        (
            {"contents": [{"parts": [{"inlineData": {"mimeType": "application/pdf", "data": "JVBERi0="}}]}]},
            "PDFs",
        ),
        (ASKED | {"tools": [{"functionDeclarations": ["x"]}]}, "objects"),
        (nested({"contents": []}, "a"), "nested too deeply"),
        (
            ASKED
            | {"tools": [{"functionDeclarations": [{"name": "f", "parameters": nested({}, "properties")}]}]},
            "nested too deeply",
        ),
        (ASKED | {"generationConfig": {"candidateCount": 99}}, "from 1 to"),
        (ASKED | {"generationConfig": {"responseModalities": ["AUDIO"]}}, "text only"),
        (ASKED | {"cachedContent": "cachedContents/x"}, "send the contents"),
        ([], "Expected"),
    ],
)
async def test_refusals(served, wrong, said):
    client, _ = served()
    response = await client.post(f"{PATH}:generateContent", json=wrong)
    assert response.status_code == 400 and said in response.json()["error"]["message"], response.text
