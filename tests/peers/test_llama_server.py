"""A real llama-server as an engine: the same ids, the same figures, started and stopped with us."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from engine.formats.gguf import GGUF
from engine.formats.templates.prompt import PromptEncoder
from engine.model.text_model import TextModel
from engine.protocol.events import (
    Chat,
    EngineOptions,
    Failed,
    Finished,
    Generate,
    Message,
    Prefilling,
    RawText,
    Ready,
    Sampling,
    Thinking,
    Token,
    TokenIds,
    decode_rate,
)
from tests.paths import ROOT
from tests.peers.conftest import collect
from tests.protocol.conftest import running

GREEDY = Sampling(temperature=0)
HELLO = Chat(messages=(Message(role="user", content="How do things find their way?"),))


def ask(prompt=HELLO, **fields):
    fields = {"sampling": GREEDY, "max_tokens": 12, "ignore_eos": True} | fields
    return Generate(request_id=4, prompt=prompt, **fields)


def tokens(events):
    return [event for event in events if isinstance(event, Token)]


async def test_an_answer(peers, llama_server, model):
    peer = peers(llama_server)
    *_, ready = await collect(peer.start())
    assert isinstance(ready, Ready)
    assert (ready.model.name, ready.model.quantization) == ("random noise", "Q8_0")
    assert (ready.model.architecture, ready.backend, ready.context_length) == ("qwen3", "llama.cpp", 256)
    assert ready.load_ms > 0

    events = await collect(peer.generate(ask()))
    end = events[-1]
    assert isinstance(end, Finished)
    with GGUF(model) as file:
        ids = PromptEncoder(file).encode(HELLO).ids
    assert (end.reason, end.prompt_n, end.predicted_n, end.cached_n) == ("length", len(ids), 12, 0)
    assert len(tokens(events)) == 12
    assert isinstance(events[0], Prefilling)
    assert decode_rate(end.predicted_n, end.predicted_ms) > 0
    times = [token.at_ms for token in tokens(events)]
    assert times == sorted(times)
    assert times[0] == pytest.approx(end.prompt_ms, abs=5)
    assert times[-1] == pytest.approx(end.prompt_ms + end.predicted_ms, abs=5)
    assert all(event.request_id == 4 for event in events)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
async def test_both_engines_give_the_same_greedy_tokens(peers, llama_server, tmp_path, architecture):
    """64 of them, of weights that no quantization rounds; by the CPU's own kernels and by tensor graphs."""
    from tests import generated_model

    path = str(generated_model.write(tmp_path / "f32.gguf", architecture=architecture, quant="F32"))
    request = ask(TokenIds(ids=tuple(range(30, 50))), max_tokens=64)
    theirs = [token.id for token in tokens(await collect(peers(llama_server, model=path).generate(request)))]
    for kernels in ("auto", "graph"):
        ours: list = []
        options = EngineOptions(model_path=path, context_length=256, kernels=kernels)
        TextModel(options, lambda _: None).generate(request, ours.append, lambda: False)
        known = [(o.id, t) for o, t in zip(tokens(ours), theirs, strict=True) if t != -1]
        assert len(known) > 32 and all(o == t for o, t in known), (kernels, known)


async def test_a_second_turn_uses_the_cache_unless_it_is_to_be_fresh(peers, llama_server):
    peer = peers(llama_server)
    prompt = TokenIds(ids=tuple(range(20, 60)))
    first = (await collect(peer.generate(ask(prompt))))[-1]
    again = (await collect(peer.generate(ask(prompt))))[-1]
    fresh = (await collect(peer.generate(ask(prompt, fresh=True))))[-1]
    assert (first.cached_n, fresh.cached_n) == (0, 0)
    assert again.cached_n == 39


async def test_the_same_seed_gives_the_same_text(peers, llama_server):
    peer = peers(llama_server)
    texts = []
    for seed in (3, 3, 4):
        request = ask(RawText(text="The river"), sampling=Sampling(temperature=1.5, seed=seed), max_tokens=40)
        events = await collect(peer.generate(request))
        assert events[-1].seed == seed
        texts.append("".join(token.text for token in tokens(events)))
    assert texts[0] == texts[1] != texts[2]


async def test_log_probabilities(peers, llama_server):
    events = await collect(peers(llama_server).generate(ask(RawText(text="The"), logprobs=3, max_tokens=1)))
    [token] = tokens(events)
    assert len(token.top) == 3
    assert token.top[0].id == token.id
    assert token.logprob == token.top[0].logprob < 0


async def test_an_open_thinking_mark_in_the_prompt_makes_thinking_of_the_reply(peers, llama_server, tmp_path):
    from tests import generated_model

    path = generated_model.write(
        tmp_path / "thinks.gguf", architecture="qwen3", template=generated_model.CHATML + "{{ '<think>' }}"
    )
    events = await collect(peers(llama_server, model=str(path)).generate(ask()))
    assert isinstance(tokens(events)[0], Thinking)


async def test_stopping_frees_the_server(peers, llama_server):
    peer = peers(llama_server, context_length=2048)
    await collect(peer.start())
    stream = peer.generate(ask(max_tokens=None))
    seen = []
    async for event in stream:
        seen.append(event)
        if len(tokens(seen)) == 5:
            await peer.stop()
    assert isinstance(seen[-1], Finished)
    assert seen[-1].reason == "cancelled"
    assert seen[-1].predicted_n >= 5
    assert (await collect(peer.generate(ask())))[-1].reason == "length"


async def test_a_prompt_that_does_not_fit(peers, llama_server):
    peer = peers(llama_server)
    [*_, failed] = await collect(peer.generate(ask(TokenIds(ids=(20,) * 400))))
    assert isinstance(failed, Failed)
    assert (failed.kind, failed.request_id) == ("context", 4)
    assert "400 tokens" in failed.message and "256" in failed.message
    assert (await collect(peer.generate(ask())))[-1].reason == "length"


async def test_a_full_context_ends_the_reply(peers, llama_server):
    end = (await collect(peers(llama_server).generate(ask(max_tokens=None))))[-1]
    assert end.reason == "length"
    assert end.context_used in (255, 256)


async def test_death_in_mid_answer_is_told_and_the_next_prompt_starts_it_again(peers, llama_server):
    peer = peers(llama_server, context_length=2048)
    await collect(peer.start())
    before = peer.pid
    events = []
    async for event in peer.generate(ask(max_tokens=None)):
        events.append(event)
        if len(tokens(events)) == 3:
            os.kill(before, signal.SIGKILL)
    assert events[-1] == Failed(
        kind="backend",
        message="llama-server was killed.",
        hint=f"If memory ran out, choose a smaller model or a shorter context. Its log: {peer.log_path}",
    )
    assert peer.pid is None
    assert (await collect(peer.generate(ask())))[-1].reason == "length"
    assert peer.pid not in (None, before)


async def test_one_that_died_unasked_is_there_again_for_the_next_prompt(peers, llama_server):
    peer = peers(llama_server)
    await collect(peer.start())
    before = peer.pid
    os.kill(before, signal.SIGKILL)
    await peer._process.process.wait()
    assert (await collect(peer.generate(ask())))[-1].reason == "length"
    assert peer.pid not in (None, before)


async def test_it_ends_with_us(peers, llama_server):
    peer = peers(llama_server)
    await collect(peer.start())
    pid, folder = peer.pid, peer._process._folder
    assert running(pid)
    assert folder.is_dir() and folder.stat().st_mode & 0o077 == 0
    await peer.close()
    await peer.close()
    assert not running(pid)
    assert not folder.exists()
    assert "listening on" in peer.log_path.read_text()


async def test_it_ends_even_when_we_are_killed(llama_server, model, tmp_path):
    script = f"""if True:
        import asyncio
        from engine.protocol.events import EngineOptions
        from engine.peers.llama_server import LlamaServer

        async def main():
            peer = LlamaServer(EngineOptions(model_path={model!r}, backend="CPU"), {llama_server!r})
            async for event in peer.start():
                pass
            print(peer.pid, flush=True)
            await asyncio.sleep(60)

        asyncio.run(main())"""
    import sys

    us = await asyncio.create_subprocess_exec(
        sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE, cwd=ROOT
    )
    pid = int(await us.stdout.readline())
    assert running(pid)
    us.kill()
    await us.wait()
    for _ in range(100):
        if not running(pid):
            return
        await asyncio.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError("llama-server outlived its parent")


async def test_its_key_is_not_among_its_arguments(peers, llama_server):
    peer = peers(llama_server)
    await collect(peer.start())
    key = peer._process.key
    assert len(key) > 20
    assert key.encode() not in Path(f"/proc/{peer.pid}/cmdline").read_bytes()


async def test_without_unix_sockets_it_listens_on_loopback(peers, llama_server, monkeypatch):
    monkeypatch.setattr("engine.peers.llama_process._MAX_SOCKET_PATH", 0)
    peer = peers(llama_server)
    assert isinstance((await collect(peer.start()))[-1], Ready)
    assert peer._process.base_url.startswith("http://127.0.0.1:")

    url, key = peer._process.base_url, peer._process.key
    attached = peers(url=url + "/v1", api_key=key)
    assert (await collect(attached.generate(ask())))[-1].reason == "length"
    assert attached.pid is None
    await attached.close()
    assert running(peer.pid)

    [refused] = await collect(peers(url=url, api_key="wrong").start())
    assert refused.kind == "usage"
    assert refused.message == "llama.cpp refuses the key: Invalid API Key."


async def test_a_server_with_another_model(peers, llama_server, monkeypatch, tmp_path):
    from tests import generated_model

    monkeypatch.setattr("engine.peers.llama_process._MAX_SOCKET_PATH", 0)
    other = str(generated_model.write(tmp_path / "other.gguf", layers=1))
    host = peers(llama_server, model=other)
    await collect(host.start())
    peer = peers(url=host._process.base_url, api_key=host._process.key)
    [failed] = await collect(peer.start())
    assert failed.kind == "model"
    assert failed.message == "The llama-server runs other.gguf, which is not noise.gguf."
