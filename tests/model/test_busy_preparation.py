"""When kernels are compiled although requests come all the time."""

import pytest

from engine.errors import PreemptedError
from engine.model.busy_preparation import BUSY_S, BusyPreparation


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    return now


def test_a_busy_server_compiles_now_and_then(clock):
    done = []

    def step(name, turns):
        left = [turns]

        def compile_some():
            clock[0] += 1.0
            left[0] -= 1
            done.append(name)
            if left[0]:
                raise PreemptedError("more is to be compiled")

        return compile_some

    preparation = BusyPreparation([step("large", 2), step("small", 1)])
    at = []
    for _ in range(400):
        before = len(done)
        preparation.turn(8)
        at += [clock[0]] * (len(done) - before)
        clock[0] += 0.25
    assert done == ["large", "large", "small"]
    assert at[1] - at[0] == at[2] - at[1] == pytest.approx(5.0)  # a fifth of the time


@pytest.mark.parametrize("conversations", [0, 1])
def test_a_chat_never_waits_for_it(clock, conversations):
    preparation = BusyPreparation([pytest.fail])
    for _ in range(100):
        preparation.turn(conversations)
        clock[0] += 1.0
    preparation.turn(2)  # it has not been busy for long
    clock[0] += BUSY_S / 2
    preparation.turn(2)
