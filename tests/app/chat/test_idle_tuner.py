"""When an idle engine searches for faster kernels, and what ends that."""

import asyncio
from types import SimpleNamespace

import pytest

from app.chat import idle_tuner
from app.chat.idle_tuner import IdleTuner, gain
from engine.protocol.events import Failed, Tuned


class TunableEngine:
    """Searches until it is told to stop."""

    def __init__(self):
        self.searches, self.stops = [], 0
        self.result = tuned(left=2)

    async def tune(self, seconds):
        self.searches.append(asyncio.get_running_loop().create_future())
        return await self.searches[-1]

    def stop_tuning(self):
        self.stops += 1
        self.searches[-1].set_result(self.result)


def tuned(before=1000.0, after=1000.0, left=0):
    return Tuned(request_id=0, before_us=before, after_us=after, left=left)


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(idle_tuner, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


class Machine:
    def __init__(self, clock):
        self.clock, self.engine, self.told = clock, TunableEngine(), []
        self.is_idle, self.when, self.on_mains = True, "mains", True
        self.tuner = IdleTuner(
            lambda: self.engine,
            lambda: self.is_idle,
            lambda: self.when,
            self.told.append,
            lambda: self.on_mains,
        )

    async def after(self, seconds):
        self.clock[0] += seconds
        self.tuner.search_if_idle()
        await asyncio.sleep(0)
        return len(self.engine.searches)


async def test_a_search_begins_when_all_is_quiet_and_ends_at_the_first_key(clock):
    machine = Machine(clock)
    assert await machine.after(10) == 0
    machine.tuner.key_pressed()
    assert await machine.after(15) == 0
    machine.is_idle = False
    assert await machine.after(15) == 0
    machine.is_idle = True
    assert await machine.after(15) == 0
    assert await machine.after(10) == 1 and machine.tuner.is_searching
    assert await machine.after(100) == 1
    machine.tuner.key_pressed()
    await asyncio.sleep(0.01)
    assert machine.engine.stops == 1 and not machine.tuner.is_searching
    assert await machine.after(10) == 1
    assert await machine.after(15) == 2, "two products are left"
    machine.engine.result = tuned(1000.0, 950.0)
    machine.tuner.key_pressed()
    await asyncio.sleep(0.01)
    assert machine.told == ["A search while idle: a token takes 950 µs, 5.0 % less than before"]
    assert await machine.after(1000) == 2, "nothing is left"


@pytest.mark.parametrize(
    "when, on_mains, searches",
    [("mains", False, 0), ("always", False, 1), ("never", True, 0), ("mains", True, 1)],
)
async def test_on_a_battery_only_if_it_is_always(clock, when, on_mains, searches):
    machine = Machine(clock)
    machine.when, machine.on_mains = when, on_mains
    assert await machine.after(30) == searches


async def test_an_engine_that_cannot_search_or_failed_is_left_alone(clock):
    machine = Machine(clock)
    machine.engine.result = Failed(kind="internal", message="no")
    await machine.after(30)
    machine.tuner.key_pressed()
    await asyncio.sleep(0.01)
    assert await machine.after(1000) == 1 and not machine.told
    machine = Machine(clock)
    machine.engine = object()
    machine.tuner.search_if_idle()
    clock[0] += 1000
    machine.tuner.search_if_idle()
    machine.tuner.key_pressed()
    assert not machine.tuner.is_searching


def test_a_gain_too_small_to_be_one_is_not_told():
    assert not gain(tuned(1000.0, 999.0)) and not gain(tuned(0.0, 0.0))
