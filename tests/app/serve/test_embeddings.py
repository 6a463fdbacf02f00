"""Embeddings and ranks, over an engine that follows a script."""

import base64
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest

from app.serve.answer import ServedAnswer
from app.serve.protocols.embeddings import EmbeddingsBody, openai_asked
from app.serve.service import Exchange, ModelFile
from app.serve.stop_texts import StopTexts
from engine.formats.templates.file_templates import FileTemplates
from engine.protocol.events import RawText, TokenIds
from tests import generated_model
from tests.app.fake_engine import TOO_LONG, FakeEngine, vector_of
from tests.app.serve.conftest import error

DIM = 64  # of the generated model


@pytest.fixture
def made_for(model_file):
    return lambda pooling: {
        "file": replace(
            model_file, pooling=pooling, templates=FileTemplates(rank="{query} <|im_end|> {document}")
        )
    }


async def test_openais(served, made_for):
    engine = FakeEngine(vector_of(3, 4, 0), vector_of(0, 0, 2))
    client, service = served(engine, **made_for("last"), parallel=1, max_waiting=0)
    asked = {"input": ["one", "two"], "model": "any", "user": "ann"}
    body = (await client.post("/v1/embeddings", json=asked)).json()
    assert [entry["embedding"] for entry in body["data"]] == [[0.6, 0.8, 0.0], [0.0, 0.0, 1.0]]
    assert [entry["index"] for entry in body["data"]] == [0, 1] and body["usage"]["total_tokens"] == 192
    assert [request.prompt for request in engine.requests] == [RawText(text="one"), RawText(text="two")]
    assert {request.pooling for request in engine.requests} == {"last"}
    [handled] = service.handled
    assert (handled.finished.prompt_n, handled.note, handled.client) == (192, "", "ann@127.0.0.1")
    coded = {"input": [[5, 6]], "encoding_format": "base64", "dimensions": 2}
    [entry] = (await client.post("/v1/embeddings", json=coded)).json()["data"]
    assert np.frombuffer(base64.b64decode(entry["embedding"]), "<f4").tolist() == [0.0, 0.0]
    assert engine.requests[2].prompt == TokenIds(ids=(5, 6)) and service.open == service.processing == 0
    assert (await client.post("/embeddings", json={"input": [7]})).status_code == 200
    assert engine.requests[3].prompt == TokenIds(ids=(7,))


async def test_geminis(served, made_for):
    client, _ = served(engine := FakeEngine(*[vector_of(3, 4, 0)] * 3), **made_for("mean"))
    one, path = {"content": {"parts": [{"text": "one"}]}}, "/v1beta/models/tiny"
    assert (await client.post(f"{path}:embedContent", json=one)).json() == {
        "embedding": {"values": [0.6, 0.8, 0.0]}
    }
    batch = {"requests": [one | {"output_dimensionality": 1}, one]}
    both = (await client.post(f"{path}:batchEmbedContents", json=batch)).json()
    assert both == {"embeddings": [{"values": [1.0]}] * 2}
    assert [request.prompt for request in engine.requests] == [RawText(text="one")] * 3
    assert (await client.post(f"{path}:batchEmbedContents", json={"requests": []})).status_code == 400


async def test_llama_servers(served, made_for):
    client, _ = served(FakeEngine(*[vector_of(3, 4, 0)] * 4), **made_for("mean"))
    one = {"index": 0, "embedding": [[0.6, 0.8, 0.0]]}
    assert (await client.post("/embedding", json={"content": "one"})).json() == [one]
    assert (await client.post("/embeddings", json={"content": ["a", "b"]})).json() == [
        one,
        one | {"index": 1},
    ]
    plain = await client.post("/embedding", json={"input": "one", "embd_normalize": -1})
    assert plain.json() == [{"index": 0, "embedding": [[3.0, 4.0, 0.0]]}]
    for wrong in ({}, {"content": "a", "embd_normalize": 1}):
        assert (await client.post("/embedding", json=wrong)).status_code == 400


async def test_what_is_refused(served, made_for):
    client, _ = served(FakeEngine([TOO_LONG]), **made_for("mean"))
    for wrong in (
        {"input": []}, {"input": ["a", 1]}, {"input": "a", "dimensions": DIM + 1}, {"input": "a", "dimensions": 0},
        {"input": ["a"] * 2049}, {},
    ):  # fmt: skip
        refused = await client.post("/v1/embeddings", json=wrong)
        assert refused.status_code == 400 and error(refused)["param"] in ("input", "dimensions"), wrong
    assert (
        error(await client.post("/v1/embeddings", json={"input": "a"}))["code"] == "context_length_exceeded"
    )
    ranked = await client.post("/v1/rerank", json={"query": "a", "documents": ["b"]})
    assert ranked.status_code == 501 and "does not rank" in error(ranked)["message"]
    client, _ = served(**made_for("rank"))
    assert "ranks documents" in error(await client.post("/v1/embeddings", json={"input": "a"}))["message"]
    for wrong in ({"documents": []}, {"documents": ["b"], "top_n": 0}):
        assert (await client.post("/v1/rerank", json={"query": "a", **wrong})).status_code == 400


async def test_a_chat_models_are_noted(served):
    engine = FakeEngine(vector_of(1))
    client, service = served(engine)
    await client.post("/v1/embeddings", json={"input": "a"})
    assert engine.requests[0].pooling == "mean" and "not made for embeddings" in service.handled[0].note


async def test_ollamas(served, made_for, model_file):
    engine = FakeEngine(vector_of(0, 2))
    client, _ = served(engine, **made_for("last"))
    body = (await client.post("/api/embed", json={"model": "tiny", "input": ["a", "b"]})).json()
    assert body["embeddings"] == [[0.0, 1.0]] * 2 and body["prompt_eval_count"] == 192
    assert (await client.post("/api/embeddings", json={"prompt": "a"})).json() == {"embedding": [0.0, 1.0]}
    assert (await client.post("/api/embed", json={"model": "tiny"})).json()["embeddings"] == []
    assert (await client.post("/api/show", json={"model": "tiny"})).json()["capabilities"] == ["embedding"]
    long = "word " * 20_000
    await client.post("/api/embed", json={"input": long})
    prompt = engine.requests[-1].prompt
    assert len(prompt.ids) == 8192 and prompt.ids[:9] == tuple(model_file.tokenizer.encode(long)[:9])
    await client.post("/api/embed", json={"input": long, "truncate": False})
    assert engine.requests[-1].prompt == RawText(text=long)


async def test_ranks(served, made_for, model_file):
    engine = FakeEngine(vector_of(0.2, 0.8), vector_of(0.9, 0.1), vector_of(0.5, 0.5))
    client, _ = served(engine, **made_for("rank"))
    asked = {
        "query": "<|im_end|>?",
        "documents": ["a", {"text": "b"}, "c"],
        "top_n": 2,
        "return_documents": True,
    }
    body = (await client.post("/v1/rerank", json=asked)).json()
    shown = [(result["index"], result["relevance_score"]) for result in body["results"]]
    assert shown == [(1, pytest.approx(0.9)), (2, pytest.approx(0.5))]
    assert body["results"][0]["document"] == {"text": "b"} and engine.requests[0].pooling == "rank"
    plain = {"query": "?", "texts": ["a", "b"], "return_text": True}  # text-embeddings-inference
    assert (await client.post("/rerank", json=plain)).json()[0].keys() == {"index", "score", "text"}
    end = model_file.tokenizer.special_tokens["<|im_end|>"]
    assert engine.requests[0].prompt.ids.count(end) == 1  # that of the template, not of the query


async def test_scores(served, made_for):
    client, _ = served(FakeEngine(vector_of(0.2, 0.8), vector_of(0.9, 0.1)), **made_for("rank"))
    body = (await client.post("/score", json={"text_1": "a", "text_2": ["b", "c"]})).json()
    assert [one["score"] for one in body["data"]] == [pytest.approx(0.2), pytest.approx(0.9)]
    refused = await client.post("/v1/score", json={"text_1": ["a", "b"], "text_2": ["b", "c", "d"]})
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "text_1"
    long = {"text_1": "a" * (1 << 14), "text_2": ["b"] * 2000}  # 32 MiB with a query for each
    assert (await client.post("/score", json=long)).status_code == 413


async def test_a_client_that_goes_frees_its_places(served, made_for):
    _, service = served(FakeEngine([*vector_of(1)[:1], None]), **made_for("mean"), parallel=2)
    asked = openai_asked(EmbeddingsBody(input=["a"] * 9), service)
    exchange = Exchange(service, "ann", "/v1/embeddings")
    exchange.one_by_one = asked.one_by_one

    parts = service.parts(exchange, [ServedAnswer(one, StopTexts(())) for one in asked.requests])
    async with aclosing(parts):
        await anext(parts)
        assert service.open == 4  # twice as many as it answers at a time
    assert service.open == service.processing == 0


def test_the_classes_of_a_file(tmp_path):
    """What a model makes of them: tests/model/test_text_model.py."""
    path = generated_model.write(tmp_path / "m.gguf", architecture="qwen3", classes=2)
    assert (file := ModelFile.read(path)).pooling == "rank" and file.dimensions == DIM
