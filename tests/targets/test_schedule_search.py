"""The search for schedules, with fake runners whose best schedule the test knows."""

import contextlib
import math
from dataclasses import astuple, replace
from types import SimpleNamespace

import numpy as np
import pytest
import tinygrad.engine.realize
from tinygrad import UOp
from tinygrad.uop.ops import Ops

from engine.cache import candidate_trial
from engine.cache.disk_cache import DiskCache
from engine.cache.start_trial import StartTrials
from engine.measure.compiling import kernels_reported
from engine.model.text_model import IDLE_WIDTH, SEARCH_S_PER_WIDTH, TextModel
from engine.protocol.events import EngineOptions, Tune, Tuned, Warming
from engine.runtime.model_runner import SearchRequest
from engine.targets.nvidia import schedule_search
from engine.targets.nvidia.kernels.products import schedules
from engine.targets.nvidia.kernels.products.chosen_experts import ChosenExperts
from engine.targets.nvidia.kernels.products.schedules import _by_rule, candidates
from engine.targets.nvidia.kernels.products.stacked_matrices import Schedule, StackedMatrices
from engine.targets.nvidia.kernels.weights.matrix_bytes import units_of
from engine.targets.nvidia.kernels.weights.weight_layout import WeightLayout
from tests.thorough import thorough

FASTEST = Schedule(32, 4, 4)
RIGHT = np.linspace(-3, 5, 50, dtype=np.float32)


class FakeRunner:
    """A step takes the longer the farther its products' schedules are from FASTEST; `answers` and `faults` say
    what goes wrong with which."""

    def __init__(self, *products, answers=lambda schedule: RIGHT, faults=lambda schedule: False):
        self.products, self.answers, self.faults = list(products), answers, faults
        self.timed, self.is_well, self.compiles = [], True, lambda schedule: True

    @property
    def target(self):
        return schedule_search.SearchTarget(
            self.products, self.build_step, self.build_step, self.check_logits, self.step_seconds
        )

    def build_step(self):
        chosen = tuple(product.schedule for product in self.products if product.name != "embedding")
        calls = [SimpleNamespace(src=(schedule, object())) for schedule in chosen]

        def capture():
            if not all(map(self.compiles, chosen)):
                raise RuntimeError("no kernel image")
            return chosen

        return SimpleNamespace(linear=UOp(Ops.LINEAR), calls=calls, capture=capture)

    def check_logits(self, run):
        if any(map(self.faults, run)):
            self.is_well = False
            raise RuntimeError("CUDA Error 700, an illegal memory access was encountered")
        return next((a for a in map(self.answers, run) if a is not RIGHT), RIGHT)

    def step_seconds(self, run):
        self.timed.append(run)
        return 1e-3 * (1 + sum(distance(schedule) for schedule in run))


def distance(s):
    return (
        sum(abs(math.log2(a / b)) for a, b in ((s.threads, 32), (s.groups, 4), (s.rows, 4))) + s.blocks / 100
    )


def product(rows=3072, cols=2048, ggml_type=14, name="down"):
    stack = StackedMatrices.single(WeightLayout(ggml_type), rows, cols)
    return SimpleNamespace(name=name, stack=stack, schedule=_by_rule(rows, units_of(cols), 96))


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    cache = DiskCache(tmp_path / "cache", "")
    for module in (schedule_search, schedules):
        monkeypatch.setattr(module, "disk_cache", lambda: cache)
    monkeypatch.setattr(schedules, "lasting_cache", lambda: cache)
    monkeypatch.setattr(schedule_search, "device_works", schedule_search.device_works)
    monkeypatch.setattr(schedules, "capability", lambda: "sm_00")
    return cache


def run(runner, width=16, seconds=60.0):
    told = []
    schedule_search.device_works = lambda device: runner.is_well  # restored by `cache`
    report = lambda *said: told.append(said)
    schedule_search.search(runner.target, SearchRequest(width, seconds, report))
    return told


def test_the_fastest_is_found_kept_and_not_searched_again():
    runner = FakeRunner(product(), product(), product(rows=2048))
    told = run(runner)
    assert [p.schedule for p in runner.products] == [FASTEST] * 3
    assert [said[:3] for said in told if not said[3].tried] == [(0, 2, 0), (1, 2, 0)], (
        "before the first of each"
    )
    assert told[-1][:3] == (2, 2, 0)
    end = told[-1][3]
    assert end.after_us < end.before_us and end.tried == end.total and not end.found
    assert "32 threads x 4 rows, 4 each" in end.choice
    again = FakeRunner(product(), product(rows=2048))
    told = run(again)
    assert not again.timed and told[-1][:3] == (2, 2, 2) and told[-1][3].found
    assert schedules.search_result(product().stack) == (FASTEST, 16, False)


def test_a_search_that_is_interrupted_leaves_the_shape_at_hand_as_it_was():
    runner, before = FakeRunner(product(), product(rows=2048)), product(rows=2048).schedule
    told = []
    interrupted = lambda: told[-1][0] == 1 and told[-1][3].tried == 3
    report = lambda *said: told.append(said)
    request = SearchRequest(16, 60.0, report, interrupted=lambda: bool(told) and interrupted())
    schedule_search.search(runner.target, request)
    assert [p.schedule for p in runner.products] == [FASTEST, before] and told[-1][:2] == (1, 2)
    known = [schedules.search_result(p.stack) for p in runner.products]
    assert known[0] and not known[1]
    told = run(runner)
    assert [p.schedule for p in runner.products] == [FASTEST] * 2 and told[0][2] == 1


def test_what_the_step_does_not_depend_on_is_not_searched():
    runner = FakeRunner(product(), product(rows=4096, name="embedding"))
    told = run(runner)
    assert told[-1][:2] == (1, 1) and not schedules.search_result(runner.products[1].stack)


def test_what_was_found_with_other_kernels_is_used_and_searched_first(monkeypatch):
    """After an update. A start must end well with it again."""
    run(FakeRunner(product(), product(rows=2048)))
    monkeypatch.setattr(schedules, "_kernels", lambda: ("new", ""))
    for starts in (found := [StartTrials() for _ in range(2)]):
        monkeypatch.setattr(schedules, "start_trials", starts)
        assert schedules.search_result(product().stack) == (FASTEST, 16, True)
    found[1].failed()
    found[1].__init__()
    assert schedules.search_result(product().stack) is None and found[1].dropped
    told = run(FakeRunner(product(rows=4096), product(rows=2048)))
    order = dict.fromkeys((said[3].what, said[3].outdated) for said in told)
    assert [*order] == [("down Q6_K 2048x2048", True), ("down Q6_K 4096x2048", False)]
    assert schedules.search_result(product(rows=2048).stack) == (FASTEST, 16, False)


def test_what_another_process_found_meanwhile_is_not_proved_by_a_start(monkeypatch):
    stack, (start, other, later) = product().stack, (StartTrials() for _ in range(3))
    run(FakeRunner(product()))
    monkeypatch.setattr(schedules, "start_trials", start)
    assert schedules.search_result(stack)
    monkeypatch.setattr(schedules, "start_trials", other)
    schedules.save_search_result(stack, replace(FASTEST, rows=1), 16)
    start.proved()
    monkeypatch.setattr(schedules, "start_trials", later)
    assert schedules.search_result(stack) and later.failed()


def test_what_a_version_with_other_schedules_has_kept_counts_for_nothing():
    stack = product().stack
    schedules.lasting_cache().put(
        "tuned", schedules._key(stack), ((*astuple(FASTEST), True), 16, ("", ""), ("", ""))
    )
    assert schedules.search_result(stack) is None


def test_a_wider_search_looks_again():
    run(FakeRunner(product()), width=1)
    runner = FakeRunner(product())
    assert not run(FakeRunner(product()), width=1)[-1][3].tried
    assert run(runner, width=2)[-1][3].tried


def test_what_computes_something_else_is_never_taken():
    wrong = RIGHT.copy()
    wrong[7] += 0.1
    runner = FakeRunner(product(), answers=lambda s: wrong if s.threads == 32 and s.groups == 4 else RIGHT)
    told = run(runner)
    assert runner.products[0].schedule != FASTEST and told[-1][3].refused > 0
    assert not any(s == FASTEST for timed in runner.timed for s in timed)


def test_what_does_not_compile_is_refused():
    runner = FakeRunner(product())
    runner.compiles = lambda s: s.threads != 32 or s.groups != 4
    told = run(runner)
    assert told[-1][3].refused > 0 and told[-1][3].tried == told[-1][3].total
    assert runner.products[0].schedule != FASTEST


def test_rounding_is_not_something_else():
    runner = FakeRunner(product(), answers=lambda s: RIGHT + np.float32(1e-4))
    assert run(runner)[-1][3].refused == 0


@thorough
def test_what_spoils_the_device_costs_a_restart_and_is_not_tried_again(monkeypatch):
    class Restarted(BaseException):
        pass

    def restart():
        raise Restarted

    monkeypatch.setattr(candidate_trial, "restart", restart)
    faults = lambda s: s.threads == 16
    restarts = 0
    while True:
        runner = FakeRunner(product(), faults=faults)
        try:
            run(runner)
            break
        except Restarted:
            restarts += 1
    wanted = sum(faults(s) for s in candidates(product().stack, _by_rule(3072, 32, 96)))
    assert restarts == wanted > 0 and runner.products[0].schedule == FASTEST


def test_what_made_a_later_start_fail_is_found_no_more(monkeypatch):
    run(FakeRunner(product()))
    for starts in (found := [StartTrials() for _ in range(3)]):
        monkeypatch.setattr(schedules, "start_trials", starts)
        known = schedules.search_result(product().stack)
        assert (known is None) == (starts is not found[0])
        with pytest.raises(AssertionError), starts.start(lambda: None):
            raise AssertionError
    assert [starts.dropped for starts in found] == [0, 1, 0]  # it is said once


def test_it_ends_when_its_time_is_up(monkeypatch):
    """Each product gets a share of the time. A step takes a hundredth of a second by this clock."""
    now = 0.0

    def step_seconds(run):
        nonlocal now
        now += 0.01
        return slow(run)

    monkeypatch.setattr(schedule_search, "time", SimpleNamespace(monotonic=lambda: now))
    runner = FakeRunner(*(product(rows=1024 * n) for n in range(1, 5)))
    slow, runner.step_seconds = runner.step_seconds, step_seconds
    told = run(runner, seconds=3.0)
    assert told[-1][:2] == (4, 4)
    last = {said[3].what: said[3] for said in told}
    assert len(last) == 4 and all(search.tried for search in last.values())
    assert any(search.tried < search.total for search in last.values())
    assert 2.8 < now < 4.0  # the best of each product are timed once more when its share is over


@pytest.mark.parametrize(
    "rows, cols, experts",
    [
        *((3072, 2048, None), (1024, 3072, None), (151936, 1024, None), (96, 64, None), (1, 32, None)),
        *((898, 896, None), (1536, 2048, ChosenExperts(8, 128, added=False))),
        (2048, 768, ChosenExperts(8, 128, added=True)),
    ],
)
def test_candidates_fit_and_those_like_the_first_come_first(rows, cols, experts):
    stack = StackedMatrices.single(WeightLayout(14), rows, cols, experts)
    first = _by_rule(rows, stack.units, 96)
    found = candidates(stack, first)
    assert first not in found and len(found) == len(set(found))
    assert all(s.fits() and s.divides(rows) and s.block_rows % 2 == 0 for s in found)
    distances = [schedules._distance(s, first) for s in found]
    assert distances == sorted(distances)


class Searchable:
    """A runner, of which only `search` is called."""

    search_tokens = 4

    def __init__(self):
        self.asked = []

    def search(self, request):
        tinygrad.engine.realize.tqdm(total=9).update(3)  # candidates are compiled
        report = request.report
        report(1, 2, 1, schedule_search.search_event(product(), found=True))
        self.asked.append((request.width, request.seconds, request.again))
        if request.interrupted:
            report(1, 2, 1, schedule_search.search_event(product(), before_us=500.0, after_us=500.0))
            report(2, 2, 1, schedule_search.search_event(product(), before_us=500.0, after_us=480.0))
        return True


@pytest.mark.parametrize(
    "options, wanted",
    [
        ({"search_width": 2}, [(2, 2 * SEARCH_S_PER_WIDTH, False)]),
        ({"search_width": 4, "search_s": 9.0, "search_again": True}, [(4, 9.0, True)]),
        ({"search_width": 0}, []),
        ({}, []),
    ],
)
def test_a_preset_s_width_steers_it(options, wanted):
    blocks = SimpleNamespace(room=lambda tokens: contextlib.nullcontext(tokens == Searchable.search_tokens))
    model, told = SimpleNamespace(_runner=Searchable(), scheduler=SimpleNamespace(blocks=blocks)), []
    with kernels_reported(lambda done, total: told.append(Warming(done=done, total=total))):
        TextModel._search(model, EngineOptions(model_path="", **options), told.append)
    assert model._runner.asked == wanted
    assert [(event.done, event.total, event.cached) for event in told] == [(1, 2, 1)] * len(wanted)


@pytest.mark.parametrize(
    "tokens, has_free, wanted",
    [
        (4, True, Tuned(request_id=7, before_us=500.0, after_us=480.0, left=0)),
        (4, False, Tuned(request_id=7, before_us=0.0, after_us=0.0, left=1)),
        (0, True, Tuned(request_id=7, before_us=0.0, after_us=0.0, left=0)),
    ],
)
def test_an_idle_engine_searches_if_nothing_has_to_go_for_it(tokens, has_free, wanted):
    blocks = SimpleNamespace(
        room=lambda tokens: contextlib.nullcontext(),
        has_free=lambda lengths: has_free and lengths == [tokens],
    )
    runner, done = Searchable(), []
    runner.search_tokens = tokens
    model = SimpleNamespace(
        _runner=runner,
        scheduler=SimpleNamespace(blocks=blocks),
        _choices=SimpleNamespace(skip=lambda: None),
        _capture=SimpleNamespace(again=lambda: done.append("captured anew")),
        warm_up=lambda interrupted: done.append("warm"),
    )
    assert TextModel.tune(model, Tune(request_id=7, seconds=9.0), lambda: False) == wanted
    assert runner.asked == [(IDLE_WIDTH, 9.0, False)] * (wanted.before_us > 0)
    assert done == ["captured anew", "warm"] * (wanted.before_us > 0)
