"""LM Studio's own paths, by which editors find out what a model can."""

import msgspec

from tests.app.fake_engine import READY, FakeEngine, reply
from tests.app.serve.conftest import HELLO


async def test_models_and_their_contexts(served):
    client, service = served()
    listed = (await client.get("/api/v0/models")).json()
    [model] = listed["data"]
    assert listed["object"] == "list" and model == (await client.get("/api/v0/models/tiny")).json()
    assert (model["id"], model["type"], model["state"]) == ("tiny", "llm", "loaded")
    assert model["loaded_context_length"] == READY.context_length and model["capabilities"] == ["tool_use"]
    assert (await client.get("/api/v0/models/other")).status_code == 404
    [newer] = (await client.get("/api/v1/models")).json()["models"]
    assert newer["key"] == "tiny" and newer["capabilities"] == {"vision": False, "trained_for_tool_use": True}
    assert newer["loaded_instances"][0]["config"] == {"context_length": READY.context_length}
    service.ready = None
    [unloaded] = (await client.get("/api/v0/models")).json()["data"]
    assert unloaded["state"] == "not-loaded" and "quantization" not in unloaded


async def test_a_model_that_sees(served):
    sees = msgspec.structs.replace(READY.model, sees=True)
    client, _ = served(ready=msgspec.structs.replace(READY, model=sees))
    assert (await client.get("/api/v0/models/tiny")).json()["type"] == "vlm"


async def test_chats_at_its_path(served):
    client, _ = served(FakeEngine())
    answer = (await client.post("/api/v0/chat/completions", json=HELLO)).json()
    assert answer["object"] == "chat.completion" and answer["choices"][0]["message"]["content"]


async def test_a_chat_of_its_own_form_goes_on_where_it_was(served):
    engine = FakeEngine(reply("Hello there", "Hm."), reply("Yes"))
    client, _ = served(engine)
    ask = {"model": "tiny", "input": "Hi", "system_prompt": "Be brief.", "top_k": 3, "max_output_tokens": 9}
    first = (await client.post("/api/v1/chat", json=ask)).json()
    kinds = [(item["type"], item["content"].strip()) for item in first["output"]]
    assert kinds == [("reasoning", "Hm."), ("message", "Hello there")]
    assert first["model_instance_id"] == "tiny" and first["stats"]["total_output_tokens"] > 0
    assert engine.requests[0].sampling.top_k == 3 and engine.requests[0].max_tokens == 9
    parts = [{"type": "message", "content": "And"}, {"type": "text", "content": " now?"}]
    again = {"input": parts, "previous_response_id": first["response_id"], "stream": True, "store": False}
    events = (await client.post("/api/v1/chat", json=again)).text
    names = [line.removeprefix("event: ") for line in events.splitlines() if line.startswith("event: ")]
    assert names[:2] == ["chat.start", "prompt_processing.start"] and names[-1] == "chat.end"
    assert [name for name in names if name.startswith("message.")][:: len(names)] == ["message.start"]
    said = [(message.role, message.content) for message in engine.requests[1].prompt.messages]
    assert said == [("user", "Hi"), ("assistant", "Hello there"), ("user", "And now?")]
    assert "response_id" not in msgspec.json.decode(events.split("data: ")[-1])["result"]
    assert (await client.delete(f"/v1/responses/{first['response_id']}")).json()["deleted"] is True


async def test_what_a_chat_of_its_own_form_cannot_do_is_refused(served):
    client, _ = served()
    for fields in (
        {"integrations": ["mcp/a"]},
        {"input": [{"type": "sound"}]},
        {"previous_response_id": "x"},
    ):
        refused = await client.post("/api/v1/chat", json={"input": "Hi"} | fields)
        assert refused.status_code in (400, 404) and refused.json()["error"]["message"]
    assert (await client.post("/api/v1/models/load", json={"model": "tiny"})).json()["status"] == "loaded"
