"""Many requests at once to one engine process."""

import asyncio
import sys

import pytest

from engine.protocol.client import LocalEngine
from engine.protocol.events import (
    EngineOptions,
    Failed,
    Finished,
    Generate,
    Measured,
    Sampling,
    Slots,
    Token,
    TokenIds,
)
from tests import generated_model
from tests.paths import ROOT
from tests.runtime.fake_batch_runner import greedy_reply


@pytest.fixture
async def engine(engines, tmp_path):
    path = generated_model.write(tmp_path / "m.gguf", layers=1)
    return engines.add(
        LocalEngine(
            EngineOptions(model_path=str(path), backend="CPU", parallel=3),
            environment={"PYTHONPATH": str(ROOT)},
            command=(sys.executable, "-m", "tests.parallel_worker"),
        )
    )


def request(prompt, n=20):
    ids = TokenIds(ids=tuple(prompt))
    return Generate(request_id=1, prompt=ids, sampling=Sampling(temperature=0), max_tokens=n, ignore_eos=True)


async def answered(engine, prompt, n=20):
    events = [event async for event in engine.generate(request(prompt, n))]
    assert isinstance(events[-1], Finished), events[-1]
    return [event.id for event in events if isinstance(event, Token)]


async def test_each_of_many_gets_its_own_text_and_the_slots_are_reported(engine):
    seen = []
    engine.on_event = seen.append
    prompts = [[i] * (1 + 40 * i) for i in range(8)]
    answers = [asyncio.create_task(answered(engine, prompt)) for prompt in prompts]
    await asyncio.sleep(0)
    measured = asyncio.create_task(engine.measure())  # waits until none is answered
    assert await asyncio.gather(*answers) == [greedy_reply(prompt, 20) for prompt in prompts]
    assert isinstance(await measured, Measured)
    slots = [event for event in seen if isinstance(event, Slots)]
    assert any(slots[0].slots), "the first round is reported"
    assert slots[-1].slots == (None,) * 3 and slots[-1].waiting == 0


async def test_one_that_leaves_and_one_that_cannot_be_answered_do_not_disturb_others(engine):
    other = asyncio.create_task(answered(engine, [7, 8], 300))
    async for event in engine.generate(request([9], 400)):
        if isinstance(event, Token):
            break  # the caller goes away, the request is cancelled
    too_long = [event async for event in engine.generate(request([1] * 600))]
    assert isinstance(too_long[-1], Failed) and too_long[-1].kind == "context"
    assert await other == greedy_reply([7, 8], 300)
    assert await answered(engine, [9]) == greedy_reply([9], 20)


async def test_the_death_of_the_process_ends_all_and_the_next_works(engine):
    async def last(prompt):
        return [event async for event in engine.generate(request(prompt, 400))][-1]

    ends = [asyncio.create_task(last([i])) for i in range(5)]
    engine.on_event = lambda event: isinstance(event, Token) and engine._process.kill()
    assert all(isinstance(end, Failed) for end in await asyncio.gather(*ends))
    engine.on_event = lambda event: None
    assert await answered(engine, [3]) == greedy_reply([3], 20)
