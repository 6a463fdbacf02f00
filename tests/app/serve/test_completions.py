"""Completions of text and what goes with them: tokens, lists of prompts, echoes."""

from msgspec.structs import replace

from engine.protocol.events import Token, TokenIds, TopToken
from tests.app.fake_engine import FakeEngine, reply
from tests.app.serve.conftest import events

TEXT = "/v1/completions"


async def test_tokenize_and_back(served, model_file):
    client, _ = served()
    ids = (await client.post("/tokenize", json={"content": "Rome<|im_end|>"})).json()["tokens"]
    assert ids == model_file.tokenizer.encode("Rome<|im_end|>", special=True)
    plain = (
        await client.post("/tokenize", json={"content": "Rome<|im_end|>", "parse_special": False})
    ).json()
    assert plain["tokens"] == model_file.tokenizer.encode("Rome<|im_end|>")
    assert (await client.post("/detokenize", json={"tokens": ids})).json()["content"] == "Rome<|im_end|>"
    pieces = (await client.post("/tokenize", json={"content": "é", "with_pieces": True})).json()["tokens"]
    assert [piece["piece"] for piece in pieces] == [[195], [169]]
    assert (await client.post("/tokenize", json={"content": 3})).status_code == 400


async def test_several_prompts(served):
    """A grammar is made once for all of them."""
    client, _ = served(engine := FakeEngine(reply("one"), reply("two")), parallel=2)
    body = (await client.post(TEXT, json={"prompt": ["a", [1, 2]], "regex": "one|two"})).json()
    assert engine.requests[0].grammar is engine.requests[1].grammar
    assert [(c["index"], c["text"]) for c in body["choices"]] == [(0, "one"), (1, "two")]
    assert body["usage"]["prompt_tokens"] == 2 * 96


async def test_the_best_of_several_answers(served):
    made = [
        [*reply("")[:2], Token(request_id=0, id=i, text=text, logprob=logprob), reply("")[-1]]
        for i, (text, logprob) in enumerate([("bad", -3.0), ("best", -0.1), ("good", -1.0)])
    ]
    client, _ = served(FakeEngine(*made), parallel=3)
    body = (await client.post(TEXT, json={"prompt": "a", "n": 2, "best_of": 3})).json()
    assert [c["text"] for c in body["choices"]] == ["best", "good"] and not body["choices"][0]["logprobs"]


async def test_an_echo(served):
    client, _ = served(FakeEngine(reply(" day", reason="length")))
    asked = {"prompt": "Good", "echo": True}
    body = (await client.post(TEXT, json=asked)).json()
    assert body["choices"][0]["text"] == "Good day"
    chunks = await events(client, TEXT, asked)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Good day"


async def test_log_probabilities_of_a_prompt(served, model_file):
    """As lm-evaluation-harness asks: the engine is made to say the prompt."""
    tokenizer = model_file.tokenizer
    ids = tokenizer.encode("so what now")
    top = (TopToken(id=ids[0], logprob=-0.5),)
    said = [
        Token(request_id=0, id=id, text=tokenizer.piece(id).decode(), logprob=-0.5, top=top)
        for id in (*ids[1:], ids[0])
    ]
    end = replace(reply("", reason="length")[-1], prompt_n=1, predicted_n=len(ids))
    engine = FakeEngine([*reply("")[:1], *said, end])
    client, _ = served(engine)
    asked = {"prompt": ids, "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0}
    body = (await client.post(TEXT, json=asked)).json()
    [request] = engine.requests
    assert request.prompt == TokenIds(ids=tuple(ids[:1])) and request.forced == tuple(ids[1:])
    assert request.max_tokens == len(ids) and request.logprobs == 1
    logprobs = body["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [None, *[-0.5] * len(ids)] and logprobs["top_logprobs"][0] is None
    assert "".join(logprobs["tokens"][:-1]) == "so what now" and logprobs["text_offset"][:2] == [
        0,
        len(logprobs["tokens"][0]),
    ]
    assert body["choices"][0]["text"].startswith("so what now")
    assert body["usage"]["prompt_tokens"] == len(ids) and body["usage"]["completion_tokens"] == 1
    by_text = await client.post(TEXT, json={**asked, "prompt": "so what now", "max_tokens": 0})
    assert by_text.status_code == 200 and engine.requests[1].forced == tuple(ids[1:])
    assert engine.requests[1].max_tokens == len(ids) - 1


async def test_the_tokenizer_is_described_as_vllm_does(served, model_file):
    client, _ = served()
    info = (await client.get("/tokenizer_info")).json()
    assert info["eos_token"] and "add_generation_prompt" in info["chat_template"]
    asked = {"prompt": info["eos_token"], "add_special_tokens": False}
    tokenized = (await client.post("/tokenize", json=asked)).json()
    assert tokenized["tokens"] == [model_file.tokenizer.eos_id] and tokenized["count"] == 1
    back = await client.post("/detokenize", json={"tokens": tokenized["tokens"]})
    assert back.json()["prompt"] == info["eos_token"]


async def test_what_lies_between_the_texts_of_tabby(served):
    client, _ = served()
    ask = {"language": "python", "segments": {"prefix": "def f(", "suffix": ""}}
    assert (await client.post("/v1/completions", json=ask)).json()["choices"][0]["text"] == "Hello."
    ask["segments"]["suffix"] = "):"
    refused = await client.post("/v1/completions", json=ask)
    assert refused.status_code == 400 and "no tokens to fill in" in refused.text
    assert (await client.post("/v1/completions", json={})).json()["error"]["param"] == "prompt"
    assert (await client.post("/v1/events", json={"type": "view"})).status_code == 200
    assert (await client.get("/v1beta/server_setting")).json() == {"disable_client_side_telemetry": True}
