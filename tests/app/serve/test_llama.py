"""llama-server's own paths."""

from dataclasses import replace

from engine.formats.fill_in import FillIn
from engine.protocol.events import BlockCounts, RawText, Slot, Slots, TokenIds
from tests.app.fake_engine import FakeEngine, reply
from tests.app.serve.conftest import HELLO, error


async def test_filling_in(served, model_file):
    engine = FakeEngine(reply("one, two"))
    client, _ = served(engine, file=replace(model_file, fill_in=FillIn(1, 2, 3)))
    asked = {"input_prefix": "def f(", "input_suffix": ")", "prompt": "x", "n_predict": 9}
    asked["input_extra"] = [{"filename": "a.py", "text": "import os"}]
    body = (await client.post("/infill", json={**asked, "stop": " two"})).json()
    assert body["content"] == "one," and (body["stop_type"], body["stopping_word"]) == ("word", " two")
    [request] = engine.requests
    pieces = [model_file.tokenizer.piece(id) for id in request.prompt.ids if id not in (1, 2, 3)]
    assert b"".join(pieces) == b"a.py\nimport os\ndef f(x)" and request.max_tokens == 9
    response = await client.post("/infill", json={**asked, "stream": True})
    assert '"stop":true' in response.text and "[DONE]" not in response.text
    client, _ = served(engine)
    refused = await client.post("/infill", json=asked)
    assert refused.status_code == 400 and "no tokens to fill in" in error(refused)["message"]


async def test_completions(served, model_file):
    engine = FakeEngine(reply("one, two"))
    client, _ = served(engine)
    asked = {"prompt": "Count:", "n_predict": 9, "n_probs": 2, "json_schema": {"type": "object"}}
    body = (await client.post("/completion", json=asked)).json()
    assert body["content"] == "one, two" and body["stop_type"] == "eos" and "completion_probabilities" in body
    await client.post("/completion", json={"prompt": [5, 6], "stream": True})
    first, second = engine.requests
    assert (first.prompt, first.max_tokens, first.logprobs) == (
        RawText(text="Count:"),
        9,
        2,
    ) and first.grammar
    assert second.prompt == TokenIds(ids=(5, 6))
    for wrong in ({"n_probs": 99}, {"grammar": "root ::= x"}, {"n": 2}):
        assert (await client.post("/completion", json={"prompt": "a", **wrong})).status_code == 400


async def test_properties_and_slots(served, model_file):
    client, service = served(parallel=2)
    props = (await client.get("/props")).json()
    assert props["default_generation_settings"]["n_ctx"] == 8192 and props["total_slots"] == 2
    assert props["chat_template"] == model_file.templates.chat
    work = Slot(
        request_id=1, client="ann", phase="decode", prompt_done=5, prompt_n=5, predicted_n=2, rate=1.0
    )
    service.observe(Slots(slots=(work, None), waiting=0, blocks=(BlockCounts(free=1, held=1, cached=1),)))
    busy, free = (await client.get("/slots")).json()
    assert busy["is_processing"] and not free["is_processing"] and busy["next_token"]["n_decoded"] == 2
    service.open = 2
    assert (await client.get("/slots?fail_on_no_slot=1")).status_code == 503
    service.open = 0


async def test_the_text_that_the_model_gets(served):
    client, _ = served()
    body = (await client.post("/apply-template", json=HELLO)).json()
    assert body["prompt"] == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
