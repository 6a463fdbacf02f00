"""LM Studio's own paths, by which editors find out what a model can."""

import msgspec

from tests.app.fake_engine import READY, FakeEngine
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
