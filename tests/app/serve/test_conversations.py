"""OpenAI's conversations, over an engine that follows a script."""

import pytest

from app.serve.bodies import MAX_BODY_BYTES
from app.serve.errors import ApiError
from app.serve.protocols.common.items import go_on
from app.serve.protocols.common.remembered import Conversations, Remembered
from tests.app.fake_engine import FakeEngine, reply
from tests.app.serve.conftest import error

PATH = "/v1/conversations"
ME = {"role": "user", "content": "I am Bob."}


async def test_responses_go_on_with_a_conversation(served):
    client, _ = served(engine := FakeEngine(reply("Hello, Bob.", "Hm."), reply("Bob."), reply("Yes.")))
    made = (await client.post(PATH, json={"items": [ME], "metadata": {"topic": "names"}})).json()
    path = f"{PATH}/{made['id']}"
    assert made["object"] == "conversation" and (await client.get(path)).json() == made
    asked = {"input": "Hi", "conversation": made["id"], "store": False}
    first = (await client.post("/v1/responses", json=asked)).json()
    assert first["conversation"] == {"id": made["id"]}
    again = {"input": "Who am I?", "conversation": {"id": made["id"]}, "stream": True}
    assert "response.completed" in (await client.post("/v1/responses", json=again)).text
    said = [message.content for message in engine.requests[1].prompt.messages]
    assert said == ["I am Bob.", "Hi", "Hello, Bob.", "Who am I?"]
    page = (await client.get(f"{path}/items?order=asc&limit=2")).json()
    assert [item["role"] for item in page["data"]] == ["user", "user"] and page["has_more"]
    assert all(item["id"] and item["status"] == "completed" for item in page["data"])
    rest = (await client.get(f"{path}/items?order=asc&after={page['last_id']}")).json()["data"]
    assert [item["type"] for item in rest] == ["reasoning", "message", "message", "message"]
    assert rest[-1]["content"][0]["text"] == "Bob." and rest[:2] == first["output"]
    newest = (await client.get(f"{path}/items?limit=1")).json()["data"]
    assert newest == rest[-1:] and (await client.get(f"{path}/items/{newest[0]['id']}")).json() == newest[0]
    assert (await client.delete(f"{path}/items/{newest[0]['id']}")).json() == made
    result = {"type": "function_call_output", "call_id": "c", "output": "5"}
    [added] = (await client.post(f"{path}/items", json={"items": [result]})).json()["data"]
    assert added["id"] and added["output"] == "5"
    changed = (await client.post(path, json={"metadata": {}})).json()
    assert changed == made | {"metadata": {}}
    await client.post("/v1/responses", json=asked | {"input": []})
    assert [message.content for message in engine.requests[2].prompt.messages][-2:] == ["Who am I?", "5"]
    assert (await client.delete(path)).json()["deleted"] and (await client.get(path)).status_code == 404


async def test_refusals(served):
    client, _ = served(FakeEngine(reply("Hi")), key="one,two")
    mine, other = ({"Authorization": f"Bearer {key}"} for key in ("one", "two"))
    made = (await client.post(PATH, headers=mine)).json()
    path = f"{PATH}/{made['id']}"
    assert (await client.get(path, headers=other)).status_code == 404
    asked = {"input": "Hi", "conversation": made["id"]}
    unknown = await client.post("/v1/responses", json=asked, headers=other)
    assert unknown.status_code == 404 and error(unknown)["param"] == "conversation"
    both = asked | {"previous_response_id": "resp_1"}
    assert (await client.post("/v1/responses", json=both, headers=mine)).status_code == 400
    robot = {"items": [{"role": "robot", "content": "x"}]}
    for wrong in (robot, {}, {"items": [ME | {"content": {}}]}):
        assert (await client.post(f"{path}/items", json=wrong, headers=mine)).status_code == 400
    for query in ("limit=0", "limit=101", "limit=0101", "limit=0001" + "0" * 5000, "limit=x", "limit=\u0663"):
        assert (await client.get(f"{path}/items?{query}", headers=mine)).status_code == 400
    for place in ("items/x", "items?after=x"):
        assert (await client.get(f"{path}/{place}", headers=mine)).status_code == 404
    assert (await client.delete(f"{path}/items/x", headers=mine)).status_code == 404
    assert (await client.get(f"/v1/responses/{made['id']}", headers=mine)).status_code == 404
    response = (await client.post("/v1/responses", json={"input": "Hi"}, headers=mine)).json()
    refused = await client.post("/v1/responses", json=asked | {"conversation": response["id"]}, headers=mine)
    assert refused.status_code == 404 and error(refused)["param"] == "conversation"
    for method in ("GET", "POST", "DELETE"):
        no_conversation = f"{PATH}/{response['id']}"
        assert (await client.request(method, no_conversation, headers=mine)).status_code == 404


def test_a_conversation_that_is_too_long_is_forgotten():
    kept = Conversations()
    kept.keep_whole("conv_1", Remembered("", [ME], 1, {"object": "conversation"}))
    with pytest.raises(ApiError, match="longer than a request"):
        kept.keep_whole("conv_1", Remembered("", [{"text": "x" * MAX_BODY_BYTES}], 1, {}))
    assert kept.get("conv_1", "").items == [ME]
    go_on("conv_1", kept, "", [{"text": "x" * MAX_BODY_BYTES}])
    go_on("conv_1", kept, "", [ME])
    with pytest.raises(ApiError, match="forgotten"):
        kept.get("conv_1", "")
