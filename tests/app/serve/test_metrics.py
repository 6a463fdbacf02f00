"""What the server says of itself: its model, and figures for Prometheus."""

import os

import pytest
from msgspec.structs import replace

from app.serve.metrics import MOST_RECENT, Metrics
from engine.protocol.events import BlockCounts, Slots
from tests.app.fake_engine import FakeEngine, reply
from tests.app.serve.conftest import HELLO, error

CHAT = "/v1/chat/completions"


async def test_the_model_is_listed_as_others_do(served):
    client, _ = served(model="qwen/qwen3:0.6b")
    listed = (await client.get("/v1/models")).json()
    [model] = listed["data"]
    assert (model["id"], model["object"], model["owned_by"]) == ("qwen/qwen3:0.6b", "model", "orin-chat")
    assert model["meta"]["n_ctx"] == model["max_model_len"] == model["context_length"] == 8192
    assert model["meta"]["n_ctx_train"] == 40960 and "tools" in model["supported_parameters"]
    assert model["capabilities"]["thinking"]["supported"] and listed["first_id"] == model["id"]
    assert (await client.get("/v1/models/qwen/qwen3:0.6b")).json() == model
    assert (await client.get("/v1/models/qwen%2Fqwen3:0.6b")).json() == model
    unknown = await client.get("/v1/models/gpt-9")
    assert unknown.status_code == 404 and "qwen/qwen3:0.6b" in error(unknown)["message"]


async def test_metrics(served):
    prefill, done, *pieces, end = reply("Hello, you.", cached_n=6)
    timed = [replace(token, at_ms=ms) for token, ms in zip(pieces, (200.0, 207.0, 240.0), strict=True)]
    client, service = served(FakeEngine([prefill, done, *timed, end]))
    service.observe(
        Slots(
            slots=(),
            waiting=0,
            blocks=(BlockCounts(free=3, held=2, cached=1),),
            device_bytes=8,
            checkpoints=(3, 16),
            rows=32,
            prompt_tokens=480,
            room=512,
        )
    )
    service.engine.pid = os.getpid()
    await client.post(CHAT, json=HELLO)
    await client.post(CHAT, json={})
    response = await client.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    samples = dict(line.rsplit(" ", 1) for line in response.text.splitlines() if not line.startswith("#"))
    assert (
        samples['orin_chat_requests_total{status="200"}']
        == samples['orin_chat_requests_total{status="400"}']
        == "1"
    )
    assert (
        samples["orin_chat_prompt_tokens_total"] == "96"
        and samples["orin_chat_prompt_tokens_cached_total"] == "6"
    )
    first, between = "orin_chat_time_to_first_token_seconds", "orin_chat_inter_token_latency_seconds"
    assert f"# TYPE {first} histogram" in response.text and f"# TYPE {between} histogram" in response.text
    assert samples[f'{first}_bucket{{le="+Inf"}}'] == samples[f"{first}_count"] == "1"
    gaps = [
        samples[f'{between}_bucket{{le="{bound}"}}'] for bound in ("0.005", "0.01", "0.025", "0.05", "+Inf")
    ]
    assert gaps == ["0", "1", "1", "2", "2"] and samples[f"{between}_count"] == "2"
    assert float(samples[f"{between}_sum"]) == pytest.approx(0.04)
    step = [samples[f"orin_chat_step_{name}"] for name in ("rows", "prompt_tokens", "room_tokens")]
    assert step == ["32", "480", "512"]
    assert samples['orin_chat_kv_cache_blocks{group="0",state="held"}'] == "2"
    assert samples["orin_chat_device_memory_bytes"] == "8"
    assert samples["orin_chat_state_checkpoints"] == "3"
    assert int(samples["orin_chat_resident_memory_bytes"]) > 1 << 20
    assert samples["orin_chat_requests_processing"] == samples["orin_chat_requests_waiting"] == "0"


def test_first_tokens_are_recent_for_a_minute():
    now = [100.0]
    metrics = Metrics(clock=lambda: now[0])
    metrics.begun(0.5)
    now[0] += 59
    metrics.begun(0.1)
    assert metrics.recent_first_tokens() == [0.5, 0.1]
    now[0] += 2
    assert metrics.recent_first_tokens() == [0.1] and metrics.first_token.count == 2
    for _ in range(2 * MOST_RECENT):
        metrics.begun(0.2)
    assert len(metrics.recent_first_tokens()) == MOST_RECENT
