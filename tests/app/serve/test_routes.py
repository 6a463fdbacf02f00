"""What the server answers, over an engine that follows a script."""

import asyncio
import dataclasses
import json

import pytest

from engine.errors import LOG_IS
from engine.formats.tools.forms import HARMONY
from engine.protocol.events import Failed, RawText, Sampling, Token, TokenIds, TopToken
from tests.app.fake_engine import TOO_LONG, FakeEngine, reply, tokens
from tests.app.serve.conftest import HELLO, WEATHER, error, events

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


async def test_a_whole_answer(served):
    client, service = served(FakeEngine(reply("Good day.", "Let me see.", cached_n=6)))
    body = (await client.post(CHAT, json=HELLO)).json()
    [choice] = body["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "Good day.",
        "refusal": None,
        "reasoning_content": "Let me see.",
    }
    assert (
        choice["finish_reason"] == "stop" and body["object"] == "chat.completion" and body["model"] == "tiny"
    )
    assert body["usage"] == {
        "prompt_tokens": 96,
        "completion_tokens": 7,
        "total_tokens": 103,
        "prompt_tokens_details": {"cached_tokens": 6, "audio_tokens": 0},
        "completion_tokens_details": {
            "reasoning_tokens": 3,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
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
    a, b = (RawText(text=text, special=True) for text in "ab")
    wanted = a, TokenIds(ids=(1, 2)), TokenIds(ids=(3,)), b
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
    ("fields", "thinks", "effort"),
    [({}, True, None), ({"reasoning_effort": "none"}, False, None), ({"reasoning_effort": "low"}, True, "low"),
     ({"chat_template_kwargs": {"enable_thinking": False}}, False, None),
     ({"chat_template_kwargs": {"thinking": True, "reasoning_effort": "high"}}, True, "high"),
     ({"reasoning": {"effort": "xhigh"}}, True, "high"), ({"reasoning": {"enabled": False}}, False, None),
     ({"reasoning": {"effort": "none"}}, False, None), ({"enable_thinking": False}, False, None),
     ({"thinking": {"type": "disabled"}}, False, None), ({"thinking": {"type": "adaptive"}}, True, None),
     ({"thinking": False}, False, None), ({"think": False}, False, None), ({"think": "low"}, True, "low"),
     ({"thinking_budget": 0}, False, None), ({"thinking_budget_tokens": 9}, True, None)],
)  # fmt: skip
async def test_thinking_is_asked_for(served, fields, thinks, effort):
    """In the words of all providers."""
    engine = FakeEngine()
    client, _ = served(engine)
    await client.post(CHAT, json={**HELLO, **fields})
    assert engine.requests[0].prompt.think is thinks
    assert engine.requests[0].sampling.effort == effort
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
    client, _ = served(FakeEngine(reply("", f"I look.\n{CALL}")))  # the model forgot to close its thinking
    choice = (await client.post(CHAT, json=asked)).json()["choices"][0]
    assert (choice["finish_reason"], len(choice["message"]["tool_calls"])) == ("tool_calls", 1)


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
    schema = {"type": "object", "properties": {"b": {}, "a": {}}, "additionalProperties": False}
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
    assert grammars[2].source == json.dumps(schema, separators=(",", ":"))
    assert grammars[3].kind == "lark" and grammars[3] == grammars[4] and "get_weather" in grammars[3].source


async def test_the_description_of_the_paths(served):
    client, _ = served()
    described = (await client.get("/openapi.json")).json()
    fields = described["components"]["schemas"]["ChatBody"]["properties"]
    assert described["openapi"] == "3.1.0" and {"messages", "max_tokens", "tools"} <= set(fields)
    for path, operations in described["paths"].items():
        for method in operations.keys() - {"parameters"}:
            asked = await client.request(method, path.replace("{model}", "tiny"))
            assert asked.status_code in (200, 400) or ("{id}" in path and asked.status_code == 404), path
    assert {"get", "post", "delete"} <= described["paths"]["/v1/conversations/{id}"].keys()


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
    """Who runs the server is told why, and where the log lies; a client is told no paths."""
    died = Failed(kind="backend", message="The engine died.", hint=f"Free memory. {LOG_IS} /home/me/log")
    client, service = served(FakeEngine([*reply("")[:2], *tokens("Well"), died]))
    *_, last = await events(client, CHAT, HELLO)
    assert last["error"]["message"] == "The engine died. Free memory."
    assert service.handled[0].problem == f"{died.message} {died.hint}"


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


async def test_one_client_does_not_take_the_places_of_others(served):
    engine = FakeEngine([*reply("")[:2], None, *reply("done")[2:]])
    client, service = served(engine, key="one,two", parallel=1, max_waiting=1)
    ask = lambda key: client.post(CHAT, json=HELLO, headers={"X-Api-Key": key})
    begun = [asyncio.ensure_future(ask("one")) for _ in range(2)]
    while service.processing < 2:
        await asyncio.sleep(0)
    assert (await ask("one")).status_code == 429
    begun.append(asyncio.ensure_future(ask("two")))
    while service.processing < 3:
        await asyncio.sleep(0)
    assert (await ask("two")).status_code == 429
    await engine.stop()
    assert [(await answer).status_code for answer in begun] == [503, 503, 503]
    assert service.open == 0 and not service._open_by


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
    assert usage["usage"] == {
        **body["usage"],
        "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
    }
    # More than the server has places: as they become free.
    engine.replies = [reply(text) for text in (*texts, "four")]
    choices = (await client.post(path, json={**asked, "n": 4})).json()["choices"]
    assert [said(choice) for choice in choices] == [*texts, "four"]
    assert service.open == service.processing == 0 and [h.status for h in service.handled] == [200, 200, 200]
    assert service.handled[0].finished.predicted_n == predicted


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
    some = {"tools": [{"type": "custom", "custom": {"name": "patch"}}] * 2, "mode": "required"}
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
    [("GET", "/v1/nothing", 404), ("GET", CHAT, 405), ("DELETE", "/health", 405)],
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
