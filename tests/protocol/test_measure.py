"""Measurements through the engine process: its clock, its counters, prompts computed anew."""

import asyncio

import pytest

from engine.protocol.events import Failed, Finished, Generate, KernelProfile, Measured, RawText, Token, Tuned
from tests.waiting import LIMIT_S, until

pytestmark = pytest.mark.usefixtures("forked_engines")


def ask(**fields):
    return Generate(request_id=5, prompt=RawText(text="one two three four"), **fields)


async def collect(stream):
    return [event async for event in stream]


async def test_measuring(engines):
    measured = await engines().measure()
    assert measured == Measured(
        request_id=0, copy_gbps=100.0, kernels_per_token=100, device_bytes=600_000_000
    )


async def test_measuring_waits_for_an_answer_and_does_not_end_it(engines):
    engine = engines(tokens=20, rate=200)
    answer = asyncio.create_task(collect(engine.generate(ask())))
    await asyncio.sleep(0)
    assert isinstance(await engine.measure(), Measured)
    assert (await answer)[-1].reason == "stop"


async def test_an_engine_that_does_not_start_cannot_measure(engines):
    failed = await engines(load_failure="ModelFileError").measure()
    assert isinstance(failed, Failed)
    assert failed.kind == "model"


async def test_closing_ends_a_measurement(engines):
    engine = engines(load_s=30.0)
    measuring = asyncio.create_task(engine.measure())
    await until(lambda: engine.pid)
    await engine.close()
    assert isinstance(await measuring, Failed)


async def test_tokens_tell_when_they_were_there_by_the_engines_clock(engines):
    events = await collect(engines(tokens=30, rate=500, prefill_s=0.05, send_interval_s=0.01).generate(ask()))
    times = [event.at_ms for event in events if isinstance(event, Token)]
    assert times == sorted(times)
    end = events[-1]
    assert isinstance(end, Finished)
    assert times[0] >= 50
    assert times[-1] - times[0] == pytest.approx(end.predicted_ms, abs=50)
    assert len(set(times)) == 30  # though the events arrive in parcels


async def test_a_fresh_prompt_is_computed_whole(engines):
    engine = engines(tokens=2)
    assert (await collect(engine.generate(ask())))[-1].cached_n == 0
    assert (await collect(engine.generate(ask())))[-1].cached_n > 0
    assert (await collect(engine.generate(ask(fresh=True))))[-1].cached_n == 0


async def test_a_profile(engines):
    profile = await engines().profile("prefill")
    assert isinstance(profile, KernelProfile)
    assert (profile.request_id, profile.step) == (0, "prefill")
    assert [kernel.role for kernel in profile.kernels] == ["FFN down", "attention", "sampling"]


async def test_a_profile_gives_way_to_a_prompt(engines):
    engine = engines(tokens=5, profile_s=30.0)
    await collect(engine.start())
    profiling = asyncio.create_task(engine.profile())
    await asyncio.sleep(0.1)
    assert (await asyncio.wait_for(collect(engine.generate(ask())), 60))[-1].reason == "stop"
    failed = await profiling
    assert isinstance(failed, Failed)
    assert failed.kind == "usage" and "given up" in failed.message
    assert isinstance(await engine.measure(), Measured)


async def test_a_search_while_idle_ends_at_a_key_and_for_a_prompt(engines):
    engine = engines(tokens=5, profile_s=30.0)
    await collect(engine.start())
    searching = asyncio.create_task(engine.tune(60.0))
    await asyncio.sleep(0.1)
    engine.stop_tuning()
    stopped = await asyncio.wait_for(searching, LIMIT_S)
    assert stopped == Tuned(request_id=0, before_us=1000.0, after_us=900.0, left=3)
    searching = asyncio.create_task(engine.tune(60.0))
    await asyncio.sleep(0.1)
    assert (await asyncio.wait_for(collect(engine.generate(ask())), 60))[-1].reason == "stop"
    assert (await searching).left == 3


async def test_a_search_that_waits_for_what_is_prepared_ends_at_a_key(engines):
    engine = engines(tokens=5, warm_up_s=60.0)
    await collect(engine.start())
    searching = asyncio.create_task(engine.tune(60.0))
    await asyncio.sleep(0.1)
    engine.stop_tuning()
    stopped = await asyncio.wait_for(searching, LIMIT_S)
    assert stopped == Tuned(request_id=0, before_us=0.0, after_us=0.0, left=1)
    assert (await asyncio.wait_for(collect(engine.generate(ask())), 60))[-1].reason == "stop"
