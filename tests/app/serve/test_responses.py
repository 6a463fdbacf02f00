"""OpenAI's responses, over an engine that follows a script."""

import asyncio
import json
import threading

import msgspec
import pytest
from msgspec.structs import replace

from app.serve import bodies
from app.serve.bodies import MAX_BODY_BYTES, MAX_PARTS
from app.serve.errors import ApiError
from app.serve.http import PIECE_BYTES
from app.serve.long_work import LongWork
from app.serve.protocols import responses
from app.serve.protocols.common.conversation import ChatMessage
from app.serve.protocols.common.remembered import Conversations, Remembered
from engine.protocol.events import Failed
from tests.app.fake_engine import READY, TOO_LONG, FakeEngine, reply
from tests.app.serve.conftest import WEATHER, error
from tests.waiting import until

PATH = "/v1/responses"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'
TOOL = {"type": "function", **WEATHER["function"]}

REQUIRED = {
    "id", "object", "created_at", "completed_at", "status", "incomplete_details", "model", "previous_response_id",
    "instructions", "output", "error", "tools", "tool_choice", "truncation", "parallel_tool_calls", "text", "top_p",
    "presence_penalty", "frequency_penalty", "top_logprobs", "temperature", "reasoning", "user", "usage",
    "max_output_tokens", "max_tool_calls", "store", "background", "service_tier", "metadata", "safety_identifier",
    "prompt_cache_key",
}  # fmt: skip
"""Of https://www.openresponses.org/specification."""


async def streamed(client, body):
    response = await client.post(PATH, json={"input": "Hi", **body, "stream": True})
    assert response.status_code == 200 and "[DONE]" not in response.text
    parts = [part.split("\n") for part in response.text.split("\n\n") if part and not part.startswith(":")]
    events = [json.loads(data.removeprefix("data: ")) for _, data in parts]
    assert [name for name, _ in parts] == [f"event: {event['type']}" for event in events]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


async def test_a_whole_response(served):
    client, service = served(FakeEngine(reply("Good day.", "Let me see.", cached_n=6)))
    response = (await client.post(PATH, json={"input": "Hi", "instructions": "Be brief."})).json()
    thinking, message = response["output"]
    assert thinking["content"] == [{"type": "reasoning_text", "text": "Let me see."}]
    assert message["content"][0]["text"] == "Good day." and message["role"] == "assistant"
    assert (response["object"], response["status"], response["model"]) == ("response", "completed", "tiny")
    assert response["usage"]["input_tokens"] == 96 and response["usage"]["output_tokens"] == 7
    assert response["usage"]["input_tokens_details"]["cached_tokens"] == 6
    assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 3
    system, user = service.engine.requests[0].prompt.messages
    assert (system.content, user.content) == ("Be brief.", "Hi")
    assert response.keys() >= REQUIRED and response["completed_at"] >= response["created_at"]
    asked = {"input": "Hi", "top_p": 0.5, "presence_penalty": 0.5}
    again = (await client.post(PATH, json=asked)).json()
    sampling = service.engine.requests[1].sampling
    for name in ("temperature", "top_p", "presence_penalty", "frequency_penalty"):
        assert again[name] == getattr(sampling, name)
    assert again["top_p"] == again["presence_penalty"] == 0.5


async def test_a_streamed_response(served):
    client, _ = served(FakeEngine(reply(f"I look.\n{CALL}", "Hm.")))
    skipped = {"type": "web_search"}
    events = await streamed(client, {"tools": [TOOL, skipped], "include": ["reasoning.encrypted_content"]})
    kinds = [event["type"].removeprefix("response.") for event in events]
    whole = ["output_item.added", "content_part.added", "TEXT.delta", "TEXT.done", "content_part.done"]
    wanted = ["created", "in_progress"]
    for text in ("reasoning_text", "output_text"):
        wanted += [kind.replace("TEXT", text) for kind in whole] + ["output_item.done"]
    wanted += ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done"]
    wanted += ["output_item.done", "completed"]
    once = [kind for i, kind in enumerate(kinds) if not i or kinds[i - 1] != kind]
    assert once == wanted
    items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call"]
    assert json.loads(items[2]["arguments"]) == {"city": "Rome"} and items[2]["name"] == "get_weather"
    deltas = [e["delta"] for e in events if e["type"] == "response.output_text.delta"]
    assert "".join(deltas) == items[1]["content"][0]["text"]
    assert events[-1]["response"]["output"] == items and items[0]["encrypted_content"]


async def test_thoughts_are_the_summary_where_one_is_wanted(served):
    """Clients that ask for a summary show nothing else of what a model thinks."""
    engine = FakeEngine(reply("Bob.", "Hm. So."))
    client, _ = served(engine)
    asked = {"reasoning": {"summary": "auto"}}
    events = await streamed(client, asked)
    kinds = [event["type"].removeprefix("response.") for event in events]
    once = [kind for i, kind in enumerate(kinds) if not i or kinds[i - 1] != kind]
    part, text = "reasoning_summary_part", "reasoning_summary_text"
    added = ["created", "in_progress", "output_item.added"]
    assert once[:8] == [
        *added,
        f"{part}.added",
        f"{text}.delta",
        f"{text}.done",
        f"{part}.done",
        "output_item.done",
    ]
    deltas = [event for event in events if event["type"] == f"response.{text}.delta"]
    assert "".join(event["delta"] for event in deltas) == "Hm. So." and deltas[0]["summary_index"] == 0
    thought, said = events[-1]["response"]["output"]
    assert thought["summary"] == [{"type": "summary_text", "text": "Hm. So."}] and "content" not in thought
    given = [{"role": "user", "content": "Who?"}, thought, said, {"role": "user", "content": "Sure?"}]
    await client.post(PATH, json={"input": given} | asked)
    assert engine.requests[1].prompt.messages[1].thinking == "Hm. So."


async def test_a_conversation_that_the_client_keeps(served):
    """What the model thought comes back sealed, and is the same prompt as if it were open."""
    engine = FakeEngine(reply(CALL, "Hm."))
    client, _ = served(engine)
    asked = {"tools": [TOOL], "store": False, "include": ["reasoning.encrypted_content"]}
    first = (await client.post(PATH, json={**asked, "input": "Rome?"})).json()
    thought, call = first["output"]
    given = [{"role": "user", "content": [{"type": "input_text", "text": "Rome?"}]}]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "Sunny"}
    unknown = {"type": "web_search_call", "id": "x"}
    sealed = {name: value for name, value in thought.items() if name != "content"}
    for said in (thought, sealed):
        await client.post(PATH, json={**asked, "input": [*given, said, call, unknown, result]})
    _, opened, closed = engine.requests
    assert opened.prompt == closed.prompt
    user, turn, tool = opened.prompt.messages
    assert (user.content, turn.thinking, turn.content) == ("Rome?", "Hm.", "")
    assert turn.tool_calls[0].name == tool.name == "get_weather" and tool.content == "Sunny"


async def test_a_conversation_that_the_server_remembers(served):
    engine = FakeEngine(reply("Bob."), reply("Yes."))
    client, _ = served(engine)
    first = (await client.post(PATH, json={"input": "Who?"})).json()
    second = await client.post(PATH, json={"input": "Sure?", "previous_response_id": first["id"]})
    said = [(m.role, m.content) for m in engine.requests[1].prompt.messages]
    assert said == [("user", "Who?"), ("assistant", "Bob."), ("user", "Sure?")]
    assert second.json()["previous_response_id"] == first["id"]
    assert (await client.get(f"{PATH}/{first['id']}")).json()["output"] == first["output"]
    assert (await client.delete(f"{PATH}/{first['id']}")).json()["deleted"]
    unknown = await client.post(PATH, json={"input": "?", "previous_response_id": first["id"]})
    assert unknown.status_code == 404 and error(unknown)["code"] == "previous_response_not_found"
    hidden = (await client.post(PATH, json={"input": "Who?", "store": False})).json()
    assert (await client.get(f"{PATH}/{hidden['id']}")).status_code == 404


async def test_items_that_are_named(served, monkeypatch):
    """As Vercel's AI SDK sends what the model said before."""
    engine = FakeEngine(reply("Bob.", "Hm."), reply("Yes."))
    client, _ = served(engine, key="one,two")
    keys = [{"Authorization": f"Bearer {key}"} for key in ("one", "two")]
    who, sure = ({"role": "user", "content": text} for text in ("Who?", "Sure?"))
    first = (await client.post(PATH, json={"input": [who]}, headers=keys[0])).json()
    thought, said = ({"type": "item_reference", "id": item["id"]} for item in first["output"])
    asked = {"input": [who, thought, {"id": said["id"]}, sure]}
    held, hold = [], bodies._Share.hold_more
    monkeypatch.setattr(bodies._Share, "hold_more", lambda share, n: held.append(n) or hold(share, n))
    second = (await client.post(PATH, json=asked, headers=keys[0])).json()
    assert held == [sum(len(msgspec.json.encode(item)) for item in first["output"])], "as if they were sent"
    _, turn, _ = engine.requests[1].prompt.messages
    assert (turn.thinking, turn.content) == ("Hm.", "Bob.")
    asked = {"input": "?", "previous_response_id": second["id"]}
    await client.post(PATH, json=asked, headers=keys[0])
    assert [m.content for m in engine.requests[2].prompt.messages] == ["Who?", "Bob.", "Sure?", "Yes.", "?"]
    unknown = await client.post(PATH, json={"input": [who, said]}, headers=keys[1])
    assert unknown.status_code == 404 and error(unknown)["param"] == "input[1]"
    twice = await client.post(PATH, json={"input": [said, said]}, headers=keys[0])
    assert twice.status_code == 400 and error(twice)["param"] == "input[1]"
    monkeypatch.setattr(responses, "MAX_BODY_BYTES", 200)
    long = await client.post(PATH, json={"input": [thought, said, sure]}, headers=keys[0])
    assert long.status_code == 413 and error(long)["param"] == "input"
    await client.delete(f"{PATH}/{first['id']}", headers=keys[0])
    assert (await client.post(PATH, json={"input": [said]}, headers=keys[0])).status_code == 404
    nothing = {"input": [{"type": "item_reference"}]}
    assert (await client.post(PATH, json=nothing, headers=keys[0])).status_code == 404


async def test_what_a_response_was_made_of(served):
    client, _ = served(FakeEngine(reply("Bob", reason="length")))
    first = (await client.post(PATH, json={"input": [{"role": "user", "content": "Who?"}]})).json()
    path = f"{PATH}/{first['id']}"
    assert first["status"] == "incomplete" and (await client.get(path)).json() == first
    items = (await client.get(f"{path}/input_items")).json()
    assert [(item["role"], item["content"]) for item in items["data"]] == [
        ("user", [{"type": "input_text", "text": "Who?"}])
    ]
    assert items["first_id"] == items["last_id"] and items["has_more"] is False
    assert (await client.post(f"{path}/cancel")).status_code == 400
    assert (await client.get(f"{PATH}/resp_0/input_items")).status_code == 404
    counts = [
        (await client.post(f"{PATH}/input_tokens", json=body)).json()["input_tokens"]
        for body in ({"input": "Who?"}, {"input": "Sure?", "previous_response_id": first["id"]})
    ]
    assert 0 < counts[0] < counts[1]


@pytest.mark.parametrize("param", ["background", "prompt", "input"])
async def test_what_cannot_be_done_is_refused(served, param):
    client, _ = served()
    body = {} if param == "input" else {"input": "Hi", param: {"id": "x"} if param == "prompt" else True}
    response = await client.post(PATH, json=body)
    assert response.status_code == 400 and error(response)["param"] == param


async def test_keys_do_not_see_each_others_responses(served):
    client, _ = served(key="one,two")
    keys = [{"Authorization": f"Bearer {key}"} for key in ("one", "two")]
    first = (await client.post(PATH, json={"input": "Who?"}, headers=keys[0])).json()
    found = [(await client.get(f"{PATH}/{first['id']}", headers=key)).status_code for key in keys]
    assert found == [200, 404]


async def test_nobody_waits_while_a_response_is_remembered_or_forgotten(served, monkeypatch):
    """Writing and reading the longest takes a tenth of a second."""
    threads = []

    def noting(work):
        return lambda *arguments: threads.append(threading.current_thread()) or work(*arguments)

    for name in ("keep", "forget"):
        monkeypatch.setattr(Conversations, name, noting(getattr(Conversations, name)))
    client, _ = served(FakeEngine(reply("Hi")))
    made = (await client.post(PATH, json={"input": "Hello"})).json()
    assert (await client.delete(f"{PATH}/{made['id']}")).json()["deleted"]
    assert len(threads) == 2 and threading.main_thread() not in threads


def test_the_oldest_responses_are_forgotten():
    too_long = Remembered("", [{"type": "unknown", "text": "x" * MAX_BODY_BYTES}], 1, {"id": "resp_0"})
    too_many = Remembered("", [{"type": "unknown", "parts": [[]] * MAX_PARTS}], 1, {"id": "resp_0"})
    for too_much in (too_long, too_many):
        whole = Conversations()
        whole.keep("resp_0", too_much)
        with pytest.raises(ApiError, match="send the whole conversation"):
            whole.get("resp_0", "")
    kept = Conversations(max_bytes=1200)
    for i in range(5):
        kept.keep(str(i), Remembered("", [{"text": "x" * 90}], 1, {}))
    assert kept.get("4", "").items == [{"text": "x" * 90}] and kept.get("3", "")
    few = Conversations(max_responses=2)
    for i in range(5):
        few.keep(str(i), Remembered("", [{"text": "x"}], 1, {}))
    assert few.get("3", "") and few.get("4", "")
    for conversations in (kept, few):
        with pytest.raises(ApiError):
            conversations.get("0", "")


async def test_a_short_request_that_goes_on_with_a_long_conversation_is_a_long_one(served, monkeypatch):
    """Else a hundred of them bring back megabytes each, and others wait for all of that."""
    worked = []
    run = LongWork.run
    monkeypatch.setattr(LongWork, "run", lambda self, who, n, *of: worked.append(n) or run(self, who, n, *of))
    monkeypatch.setattr(bodies, "MAX_HELD_BYTES", 250_000)
    engine = FakeEngine(reply("Yes"), [None, *reply("Yes")])
    client, _ = served(engine, parallel=2)
    first = (await client.post(PATH, json={"input": "x" * 200_000})).json()
    more = {"input": "And?", "previous_response_id": first["id"]}
    waiting = asyncio.create_task(client.post(PATH, json=more))
    await until(lambda: len(engine.requests) == 2)
    for refused in (
        await client.post(PATH, json=more),
        await client.get(f"{PATH}/{first['id']}"),
        await client.get(f"{PATH}/{first['id']}/input_items"),
    ):
        assert refused.status_code == 503 and error(refused)["message"]
    engine.release()
    assert (await waiting).status_code == 200 and worked[-1] > 200_000
    engine.replies = [reply("Yes")]
    assert (await client.post(PATH, json=more)).status_code == 200, "its room is free again"


async def test_a_long_answer_is_sent_as_its_client_takes_it(served, sent, monkeypatch):
    """Else it lies whole in the connection's buffer, where nothing counts it, while the client reads nothing."""
    client, _ = served()
    first = (await client.post(PATH, json={"input": "x" * (2 * PIECE_BYTES)})).json()
    sent.clear()
    items = (await client.get(f"{PATH}/{first['id']}/input_items")).json()
    assert len(items["data"][0]["content"][0]["text"]) == 2 * PIECE_BYTES
    assert [len(part) for part in sent][:2] == [PIECE_BYTES] * 2
    monkeypatch.setattr(bodies, "MAX_HELD_BYTES", PIECE_BYTES)
    client, _ = served()
    text = {"content": "x " * (PIECE_BYTES // 16), "with_pieces": True}
    assert (await client.post("/tokenize", json=text)).status_code == 503, "the answer is longer"


async def test_custom_tools(served):
    called = '<tool_call>\n{"name": "patch", "arguments": {"input": "*** Begin"}}\n</tool_call>'
    engine = FakeEngine(reply(called))
    client, _ = served(engine)
    format = {"type": "grammar", "syntax": "lark", "definition": "start: /x/"}
    tool = {"type": "custom", "name": "patch", "description": "Edits.", "format": format}
    *_, done, completed = await streamed(client, {"tools": [tool]})
    assert done["item"]["type"] == "custom_tool_call" and done["item"]["input"] == "*** Begin"
    [shown] = json.loads(engine.requests[0].prompt.tools)
    assert shown["function"]["name"] == "patch" and "start: /x/" in shown["function"]["description"]
    result = {"type": "custom_tool_call_output", "call_id": done["item"]["call_id"], "output": "done"}
    given = [{"role": "user", "content": "x"}, *completed["response"]["output"], result]
    await client.post(PATH, json={"input": given, "tools": [tool]})
    call = engine.requests[1].prompt.messages[1].tool_calls[0]
    assert json.loads(call.arguments) == {"input": "*** Begin"}


@pytest.mark.parametrize(
    ("choice", "shown", "has_grammar"),
    [("auto", 2, False), ("required", 2, True), ("none", 0, False),
     ({"type": "function", "name": "get_weather"}, 1, True),
     ({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "other"}]}, 1, False)],
)  # fmt: skip
async def test_the_choice_of_tools(served, choice, shown, has_grammar):
    engine = FakeEngine()
    client, _ = served(engine)
    tools = [TOOL, {**TOOL, "name": "other"}]
    await client.post(PATH, json={"input": "Hi", "tools": tools, "tool_choice": choice})
    [request] = engine.requests
    assert len(json.loads(request.prompt.tools or "[]")) == shown and bool(request.grammar) is has_grammar


async def test_ends_that_are_none(served):
    died = Failed(kind="backend", message="The engine died.")
    cut, broken = reply("one", reason="length"), [*reply("Well")[:-1], died]
    client, _ = served(FakeEngine(cut, broken, [TOO_LONG]))
    *_, last = await streamed(client, {"max_output_tokens": 1})
    assert last["type"] == "response.incomplete" and last["response"]["status"] == "incomplete"
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    *_, last = await streamed(client, {})
    assert last["type"] == "response.failed" and last["response"]["error"]["message"] == "The engine died."
    refused = await client.post(PATH, json={"input": "x", "stream": True})
    assert refused.status_code == 400 and error(refused)["code"] == "context_length_exceeded"


@pytest.mark.parametrize("begun", [False, True])
async def test_events_come_while_a_prompt_is_read(served, sent, monkeypatch, begun):
    """Comments are not enough for Codex CLI."""
    monkeypatch.setattr("app.serve.http.KEEP_ALIVE_S", 0.01)
    events = reply("Hello.")
    client, service = served(FakeEngine([*events[:1], None, *events[1:]] if begun else [None, *events]))
    asked = asyncio.ensure_future(streamed(client, {"instructions": "Be brief."}))
    await until(lambda: sum(part.count(b"event: response.in_progress") for part in sent) > 1)
    service.engine.release()
    instructions = [event["response"]["instructions"] for event in (await asked)[:3]]
    assert instructions == ["Be brief.", "Be brief.", None]  # long ones are not sent every 5 s
    kinds = [event["type"] for event in await asked]
    assert kinds[:2] == ["response.created", "response.in_progress"] and kinds.count("response.created") == 1
    assert kinds[2] == "response.in_progress" and kinds[-1] == "response.completed"


async def test_tools_in_a_namespace(served):
    """As Codex CLI has them."""
    called = '<tool_call>\n{"name": "agents__spawn", "arguments": {}}\n</tool_call>'
    engine = FakeEngine(reply(called))
    client, service = served(engine)
    space = {"type": "namespace", "name": "agents", "tools": [{**TOOL, "name": "spawn"}]}
    response = (await client.post(PATH, json={"input": "x", "tools": [TOOL, space]})).json()
    [call] = response["output"]
    assert (call["namespace"], call["name"]) == ("agents", "spawn") and not service.handled[0].note
    shown = [tool["function"]["name"] for tool in json.loads(engine.requests[0].prompt.tools)]
    assert shown == ["get_weather", "agents__spawn"]
    later = {"type": "additional_tools", "role": "developer", "tools": [TOOL, TOOL]}
    effort = {"type": "configuration_update", "reasoning": {"effort": "none"}}
    given = [{"role": "user", "content": "x"}, call, later, effort]
    await client.post(PATH, json={"input": given, "tools": [space]})
    shown = [tool["function"]["name"] for tool in json.loads(engine.requests[1].prompt.tools)]
    assert shown == ["agents__spawn", "get_weather"] and not engine.requests[1].prompt.think
    assert engine.requests[1].prompt.messages[1].tool_calls[0].name == "agents__spawn"


LONG = [
    {"role": "user", "content": "Mend it."},
    {"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": '{"city": "Rome"}'},
    {"type": "function_call_output", "call_id": "c", "output": "Sunny"},
]


async def test_a_conversation_is_summed_up_where_its_client_asks_for_it(served):
    """As Codex CLI does, of servers that it takes for OpenAI's."""
    engine = FakeEngine(reply("Rome is sunny.", "Hm."), reply("So."))
    client, _ = served(engine)
    asked = {"tools": [TOOL], "store": False, "instructions": "Be brief."}
    events = await streamed(client, asked | {"input": [*LONG, {"type": "compaction_trigger"}]})
    kinds = [event["type"].removeprefix("response.") for event in events]
    assert kinds == ["created", "in_progress", "output_item.added", "output_item.done", "completed"]
    [item] = events[-1]["response"]["output"]
    assert item["type"] == "compaction" and item == events[3]["item"]
    assert events[-1]["response"]["completed_at"]
    request = engine.requests[0]
    *before, last = request.prompt.messages
    assert [message.role for message in before] == ["system", "user", "assistant", "tool"]
    assert last.role == "user" and last.content.startswith("Summarize") and request.prompt.tools
    assert not request.prompt.think and request.max_tokens == READY.context_length // 4
    given = [{"role": "user", "content": "Mend it."}, item, {"role": "user", "content": "Go on."}]
    await client.post(PATH, json=asked | {"input": [*LONG, *given[1:]]})
    await client.post(PATH, json=asked | {"input": given})
    _, with_all, shorter = engine.requests
    assert with_all.prompt == shorter.prompt
    assert [message.role for message in shorter.prompt.messages] == ["system", "user", "user", "user"]
    assert shorter.prompt.messages[2].content.endswith("Rome is sunny.")


async def test_a_summary_at_a_path_of_its_own(served):
    engine = FakeEngine(reply("Rome is sunny."))
    client, _ = served(engine)
    old = {"role": "user", "content": "x" * 8000}
    response = (await client.post(f"{PATH}/compact", json={"model": "m", "input": [old, *LONG]})).json()
    message, item = response["output"]
    assert response["object"] == "response.compaction" and response["usage"]["input_tokens"]
    assert message["content"] == [{"type": "input_text", "text": "Mend it."}] and message["role"] == "user"
    assert item["type"] == "compaction"
    for i, sealed in enumerate(("gAAAA", "orin-chat:é", "orin-chat:/w==", 3), 1):  # of others, or forged
        foreign = {"type": "compaction", "encrypted_content": sealed}
        await client.post(PATH, json={"input": [*LONG, foreign]})
        assert len(engine.requests[i].prompt.messages) == 3
    thought = {"type": "reasoning", "encrypted_content": "orin-chat:é"}
    assert (await client.post(PATH, json={"input": [*LONG, thought]})).is_success


def test_many_summaries_take_no_longer_than_other_items():
    """Each once looked at all messages before it: a request of 4 MB took minutes."""
    looked = list[str]()

    class Said(ChatMessage):
        @property
        def role(self):
            looked.append("role")
            return "user"

        @role.setter
        def role(self, _): ...

    made = responses._Messages()
    made._messages = [Said("user", "x")]
    item = {"type": "compaction", "encrypted_content": "orin-chat:aGk="}
    assert len(made.of([item] * 100, 0)) == 101 and looked == ["role"]


async def test_a_summary_of_a_model_that_is_not_loaded_yet(served):
    client, service = served(FakeEngine([None, *reply("Rome is sunny.")]), ready=None)
    asked = {"input": LONG, "user": "me"}
    summing = asyncio.ensure_future(client.post(f"{PATH}/compact", json=asked))
    await until(lambda: service.engine.requests)
    service.ready = READY
    service.engine.release()
    message, item = (await summing).json()["output"]
    assert message["content"][0]["text"] == "Mend it." and item["type"] == "compaction"
    assert service.handled[0].client.startswith("me@")


async def test_a_conversation_that_is_too_long_for_its_summary_is_cut(served):
    engine = FakeEngine(reply("It was long."))
    client, service = served(engine, ready=replace(READY, context_length=1024))
    outputs = [
        {"type": "function_call_output", "call_id": "c", "output": f"{i} " + "abc " * 400} for i in range(9)
    ]
    calls = [{**LONG[1], "call_id": "c"}] * 9
    items = [LONG[0], *(each for pair in zip(calls, outputs, strict=True) for each in pair)]
    assert (await client.post(f"{PATH}/compact", json={"input": items})).status_code == 200
    messages = engine.requests[0].prompt.messages
    assert len(messages) == 20 and messages[2].content.endswith("(left out)")
    assert messages[-2].content != messages[2].content and "9 long messages cut" in service.handled[0].note


async def test_no_summary_is_an_error(served):
    client, _ = served(FakeEngine(reply(" ")))
    response = await client.post(f"{PATH}/compact", json={"input": "Hi"})
    assert response.status_code == 500 and "no summary" in error(response)["message"]
    events = await streamed(client, {"input": [{"type": "compaction_trigger"}]})
    assert events[-1]["type"] == "response.failed"


@pytest.mark.parametrize("path, key", [("/v1beta/interactions", "id"), ("/api/v1/chat", "response_id")])
async def test_what_was_answered_in_another_protocol_is_no_response(served, path, key):
    client, _ = served(FakeEngine(reply("Good day.")))
    id = (await client.post(path, json={"model": "tiny", "input": "Hi"})).json()[key]
    response = await client.get(f"{PATH}/{id}")
    assert response.status_code == 404 and "interactions" in error(response)["message"]
