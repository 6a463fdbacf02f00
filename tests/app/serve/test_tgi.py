"""The paths of Hugging Face's servers."""

import json
from dataclasses import replace

from engine.protocol.events import RawText
from tests.app.fake_engine import FakeEngine, reply, vector_of
from tests.app.serve.conftest import error


async def test_generate(served):
    engine = FakeEngine(reply("one, two"))
    client, _ = served(engine)
    asked = {"inputs": "Count:", "parameters": {"details": True, "stop": [" two"], "watermark": False}}
    body = (await client.post("/generate", json=asked)).json()
    assert body["generated_text"] == "one," and body["details"]["finish_reason"] == "stop_sequence"
    assert body["details"]["tokens"][0].keys() == {"id", "text", "logprob", "special"}
    more = {"do_sample": True, "temperature": 0.5, "max_new_tokens": 3, "return_full_text": True}
    more["grammar"] = {"type": "json", "value": {"type": "object"}}
    [one] = (await client.post("/", json={"inputs": "Count:", "parameters": more})).json()
    assert one["generated_text"] == "Count:one, two"
    first, second = engine.requests
    assert first.prompt == RawText(text="Count:", special=True)
    assert (first.max_tokens, first.sampling.temperature) == (100, 0)
    assert (second.max_tokens, second.sampling.temperature) == (3, 0.5) and second.grammar
    refused = await client.post("/generate", json={"inputs": "a", "parameters": {"max_new_tokens": 0}})
    assert refused.status_code == 400 and error(refused)["param"] == "max_new_tokens"
    odd = {"inputs": "a", "parameters": {"grammar": {"type": "json", "value": 5}}}
    assert (await client.post("/generate", json=odd)).status_code == 400


async def test_a_stream(served):
    """The last token comes with the whole text."""
    client, _ = served(FakeEngine(reply("one, two")))
    text = (await client.post("/generate_stream", json={"inputs": "Count:"})).text
    values = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line]
    assert "".join(value["token"]["text"] for value in values) == "one, two"
    assert [value["generated_text"] for value in values] == [None] * (len(values) - 1) + ["one, two"]
    assert values[-1]["details"]["finish_reason"] == "eos_token"


async def test_vectors_and_figures(served, model_file):
    client, _ = served(FakeEngine(vector_of(3, 4), vector_of(3, 4)))
    assert (await client.post("/embed", json={"inputs": "a"})).json() == [[0.6, 0.8]]
    assert (await client.post("/embed", json={"inputs": ["a"], "normalize": False})).json() == [[3.0, 4.0]]
    refused = await client.post("/", json={"inputs": ["a", "b"]})
    assert refused.status_code == 400 and error(refused)["param"] == "inputs"
    client, _ = served(FakeEngine(vector_of(3, 4)), file=replace(model_file, pooling="mean"))
    assert (await client.post("/", json={"inputs": "a"})).json() == [[0.6, 0.8]], "as the hub's library asks"
    assert (await client.get("/info")).json()["max_input_length"] > 0
