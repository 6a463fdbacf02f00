"""llama-server's own paths."""

import json
from dataclasses import replace

from engine.formats.templates.fill_in import FillIn
from engine.protocol.events import BlockCounts, EngineOptions, RawText, Slot, Slots, Token, TokenIds
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
    assert b"".join(pieces) == b"a.py\nimport os\n\ndef f()x" and request.max_tokens == 9
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
        RawText(text="Count:", special=True),
        9,
        2,
    ) and first.grammar
    assert second.prompt == TokenIds(ids=(5, 6))
    for wrong in ({"n_probs": 99}, {"grammar": "root ::= x"}, {"n_probs": 1, "post_sampling_probs": True}):
        assert (await client.post("/completion", json={"prompt": "a", **wrong})).status_code == 400


async def test_each_piece_has_the_probabilities_of_its_token(served, model_file):
    """That of the token which ends the answer is no piece: clients read the first of its list."""
    begun, read, *_, end = reply("")
    one = Token(request_id=0, id=1, text="x", logprob=-0.5)
    last = Token(request_id=0, id=min(model_file.tokenizer.eos_ids), text="", logprob=-0.1)
    client, _ = served(FakeEngine([begun, read, one, last, end]))
    text = (await client.post("/completion", json={"prompt": "a", "n_probs": 1, "stream": True})).text
    pieces = [json.loads(part.removeprefix("data: ")) for part in text.strip().split("\n\n")]
    assert [len(piece["completion_probabilities"]) for piece in pieces if not piece["stop"]] == [1]


async def test_the_forms_of_prompts_and_answers(served, model_file):
    """As SillyTavern, llama.vim and others send them and read them."""
    engine = FakeEngine(reply("one,\ntwo"))
    client, _ = served(engine)
    encode = model_file.tokenizer.encode
    ask = lambda **body: client.post("/completion", json={"prompt": "Count:", **body})
    fields = ["content", "timings/predicted_n", "generation_settings/n_predict", "tokens", "nothing/here"]
    some = (await ask(n_predict=9, return_tokens=True, response_fields=fields)).json()
    assert some.keys() == {*fields[:-1]} and some["generation_settings/n_predict"] == 9
    assert some["tokens"] == [0, 1] and some["timings/predicted_n"] == 3
    whole = (await ask(logit_bias=[[5, 1.5], ["a", False]], n_probs=1)).json()
    assert engine.requests[1].logit_bias == ((5, 1.5), *((id, -100) for id in encode("a")))
    assert whole["tokens"] == [] and whole["prompt"] == "Count:" and whole["has_new_line"]
    assert whole["generation_settings"]["logit_bias"][0] == {"token": 5, "bias": 1.5}
    both = (await ask(prompt=["a", [5, "b"]], n=2)).json()
    assert [one["index"] for one in both] == [0, 1, 2, 3] and both[2]["prompt"] == both[3]["prompt"]
    assert engine.requests[4].prompt == TokenIds(ids=(5, *encode("b")))
    await ask(prompt={"prompt_string": "a"}, logit_bias={"7": 2, "a": 1})
    assert engine.requests[6].logit_bias == ((7, 2), *((id, 1) for id in encode("a")))
    for wrong in ([], [[5], {"prompt_string": "a", "multimodal_data": ["AA=="]}], [[[5]]]):
        assert (await ask(prompt=wrong)).status_code == 400
    assert (await ask(image_data=[{"data": "AA==", "id": 1}])).status_code == 400
    parts = (await ask(stream=True)).text.split("\n\n")
    first = json.loads(parts[0].removeprefix("data: "))
    assert first["tokens"] == [0] and first["tokens_predicted"] == 1 and first["tokens_evaluated"] == 96


async def test_an_answer_that_ends_by_its_lines(served, model_file):
    code = "  a\n    b\nc\n"
    client, _ = served(FakeEngine(reply(code)), file=replace(model_file, fill_in=FillIn(1, 2, 3)))
    for stream in (False, True):
        response = await client.post(
            "/infill", json={"n_indent": 2, "t_max_predict_ms": 9e5, "stream": stream}
        )
        values = (
            [json.loads(line[6:]) for line in response.text.split("\n\n") if line]
            if stream
            else [response.json()]
        )
        assert "".join(value["content"] for value in values) == "  a\n    b\n"
        assert values[-1]["stop_type"] == "limit"
    slow = (await client.post("/infill", json={"t_max_predict_ms": 1e-6})).json()
    assert slow["content"] == code[:8] and slow["stop_type"] == "limit"


async def test_what_does_not_fit_is_left_out_of_what_is_filled_in(served, model_file):
    engine = FakeEngine()
    client, _ = served(engine, file=replace(model_file, fill_in=FillIn(1, 2, 3, ends=frozenset((1, 5)))))
    asked = {"input_prefix": "a b " * 9000, "input_suffix": "c", "input_extra": [{"text": "d " * 9000}]}
    assert (await client.post("/infill", json=asked | {"n_predict": 100})).status_code == 200
    [request] = engine.requests
    assert len(request.prompt.ids) + request.max_tokens < 8192 and request.prompt.ids[-1] == 3


async def test_a_chat_that_is_only_read(served):
    engine = FakeEngine()
    client, _ = served(engine)
    for n in (0, 7):
        assert (await client.post("/v1/chat/completions", json=HELLO | {"n_predict": n})).status_code == 200
    assert [request.max_tokens for request in engine.requests] == [0, 7]


async def test_slots_and_adapters_as_far_as_there_are_any(served):
    client, service = served(parallel=2)
    assert (await client.post("/slots/1?action=erase")).json() == {"id_slot": 1, "n_erased": 0}
    refused = [
        (await client.post(f"/slots/{slot}")).status_code for slot in ("0?action=save", "0", "2?action=erase")
    ]
    assert refused == [501, 400, 400]
    assert (await client.post("/lora-adapters", json=[])).json() == {"success": True}
    assert (await client.post("/lora-adapters", json=[{"id": 0, "scale": 1}])).status_code == 501
    service.engine.options = EngineOptions(model_path="", lora="/home/me/pirate.gguf:0.5")
    pirate = {"id": 0, "scale": 0.5}
    assert (await client.get("/lora-adapters")).json() == [pirate | {"path": "pirate.gguf"}]
    asked = [
        (await client.post("/lora-adapters", json=body)).status_code for body in ([pirate], [], [pirate] * 2)
    ]
    assert asked == [200, 501, 200]
    counted = await client.post("/v1/chat/completions/input_tokens", json=HELLO)
    assert counted.json()["input_tokens"] == (await client.post("/tokenize", json=HELLO)).json()["count"]


async def test_properties_and_slots(served, model_file):
    client, service = served(parallel=2)
    props = (await client.get("/props")).json()
    assert props["default_generation_settings"]["n_ctx"] == 8192 and props["total_slots"] == 2
    assert props["chat_template"] == model_file.templates.chat
    params = props["default_generation_settings"]["params"]
    assert params["temperature"] == 0.7 and params["seed"] == 2**32 - 1 and "effort" not in params
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
