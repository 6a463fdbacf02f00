"""KoboldCpp's protocol."""

import json

from tests.app.fake_engine import FakeEngine, reply


async def test_generate(served, model_file):
    engine, encode = FakeEngine(reply("one, two")), model_file.tokenizer.encode
    client, service = served(engine)
    asked = {"prompt": "Count:", "memory": "M", "stop_sequence": [" two"], "max_length": 9, "rep_pen": 1.2}
    asked |= {
        "tfs": 1,
        "typical": 1,
        "quiet": True,
        "genkey": "KCPP1",
        "temperature": 0.5,
        "sampler_seed": -1,
    }
    assert (await client.post("/api/v1/generate", json=asked | {"images": ["AA=="]})).status_code == 400
    body = (await client.post("/api/v1/generate", json=asked)).json()
    [result] = body["results"]
    assert result["text"] == "one," and result["finish_reason"] == "stop"
    kept = {**asked, "trim_stop": False, "prompt": "a " * 9999, "ban_eos_token": True}
    text = (await client.post("/api/extra/generate/stream", json=kept)).text
    values = [json.loads(event.partition("data: ")[2]) for event in text.split("\n\n") if event]
    assert "".join(value["token"] for value in values) == "one, two" and values[-1]["finish_reason"] == "stop"
    first, second = engine.requests
    assert [*first.prompt.ids] == [*encode("M"), *encode("Count:")] and first.sampling.repeat_penalty == 1.2
    assert second.ignore_eos and [*second.prompt.ids][:1] == encode("M"), "the beginning is left out"
    assert len(second.prompt.ids) == service.ready.context_length - 9 - 1


async def test_what_there_is(served, model_file):
    client, service = served()
    get = client.get
    assert (await get("/api/v1/model")).json() == {"result": "tiny"}
    assert (await get("/api/extra/true_max_context_length")).json()["value"] == service.ready.context_length
    assert (await get("/api/extra/version")).json()["result"] == "KoboldCpp"
    assert (await get("/api/extra/perf")).json()["idle"] == 1
    counted = (await client.post("/api/extra/tokencount", json={"prompt": "Hi"})).json()
    assert counted["value"] == len(counted["ids"]) > 0
    spelled = (await client.post("/api/extra/detokenize", json={"ids": counted["ids"]})).json()
    assert spelled["result"] == "Hi" and (await client.post("/api/extra/abort", json={})).json()["success"]
