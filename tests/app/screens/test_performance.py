"""From events to speeds, from speeds to a verdict, from speeds to what is remembered of a preset."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from app.chat import speed_history
from app.chat.slowdown import explain_slowdown
from app.screens.performance import PerformanceObserver
from engine.protocol.events import Counter, Measured, Prefilling, Seeing, Token
from tests.app.fake_engine import CHOICES, READY, WITH_EXPERTS, profile, reply
from widgets.dashboard.expert_strip import ExpertUse

MEASURED = Measured(request_id=0, copy_gbps=100.0, kernels_per_token=1, device_bytes=1)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def performance(clock):
    performance = PerformanceObserver(clock)
    performance.observe(READY)
    performance.observe(MEASURED)
    return performance


def decode(performance, n, rate, start=0.0):
    for i in range(n):
        performance.observe(Token(request_id=1, id=i, text="x", at_ms=(start + i / rate) * 1e3))


def test_decode_by_the_engines_clock(performance):
    decode(performance, 400, 200.0)
    view = performance.throughput()
    assert view.current == pytest.approx(200) == view.median == view.best
    assert len(view.samples) in (7, 8)  # of a quarter of a second each, in two


def test_slow_tokens_are_samples_of_their_own(performance):
    decode(performance, 5, 2.0)
    assert [s.tokens_per_s for s in performance.throughput().samples] == [2.0] * 4


def test_an_answer_too_short_for_a_sample_is_one(performance):
    for event in reply("a few words"):
        performance.observe(event)
    assert performance.current == pytest.approx(100)


def test_the_time_of_pictures_is_not_one_of_reading(performance, clock):
    start, *_, end = reply("a few words", prompt_ms=10_000.0, pictures_ms=9_000.0)
    performance.observe(start)
    for clock.now in (2.0, 4.0, 9.0):
        performance.observe(
            Seeing(request_id=0, index=0, pictures=1, tokens=64, done=int(clock.now), total=10)
        )
    clock.now = 10.0
    performance.observe(Prefilling(request_id=0, done=96, total=96, cached=0))
    [sample] = performance.throughput().samples
    assert sample.tokens_per_s == pytest.approx(96) and sample.is_prefill
    performance.observe(Token(request_id=0, id=1, text="x", at_ms=10_000.0))
    performance.observe(end)
    assert performance.throughput().prefill == pytest.approx(96)


def test_what_guesses_were_worth(performance):
    *_, end = reply("a few words")
    performance.observe(replace(end, predicted_n=90, draft_n=80, draft_n_accepted=60, draft_gain=2.16))
    assert performance.throughput().guesses == "guesses: 3.0 tokens a step, 75% right, 2.2x as fast"


def test_the_roofline_falls_as_the_context_grows(performance):
    performance.observe(Prefilling(request_id=1, done=1000, total=1000, cached=0))
    decode(performance, 100, 100.0)
    view = performance.throughput()
    must_read = READY.weight_bytes_per_token + 1100 * READY.kv_bytes_per_token
    assert view.share == pytest.approx(100 / (100e9 / must_read))
    assert view.gbps == pytest.approx(100 * must_read / 1e9)
    first, *_, last = [s.roofline(100.0) for s in view.samples]
    assert first > last


@pytest.mark.parametrize(
    ("weights_mb", "rate", "is_cached"),
    [(11, 12_000.0, True), (11, 5_000.0, False), (5_000, 40.0, False)],  # the last: no cache holds that
)
def test_a_small_model_faster_than_the_memory_is_in_a_cache(performance, weights_mb, rate, is_cached):
    performance.observe(replace(READY, weight_bytes_per_token=weights_mb * 1_000_000, kv_bytes_per_token=0))
    performance.observe(MEASURED)
    decode(performance, int(rate), rate)
    assert performance.throughput().is_cached is is_cached


def test_the_best_bandwidth_of_a_device_counts(performance):
    for gbps in (30.0, 120.0, 55.0):
        performance.observe(replace(MEASURED, copy_gbps=gbps))
    assert performance.kernels.copy_gbps == 120, "other programs only make it less"
    performance.observe(replace(READY, backend="CPU", device_name="a CPU"))
    performance.observe(replace(MEASURED, copy_gbps=50.0))
    assert performance.kernels.copy_gbps == 50, "of this device"
    performance.observe(READY)
    performance.observe(MEASURED)
    assert performance.kernels.copy_gbps == 120, "of the earlier engine on the same device"


def test_an_engine_that_tells_no_bytes_has_no_roofline(clock):
    performance = PerformanceObserver(clock)
    decode(performance, 100, 100.0)
    view = performance.throughput()
    assert (view.share, view.gbps) == (None, None)


def test_prefill_by_its_progress(performance, clock):
    for done in (0, 512, 1024, 1500):
        performance.observe(Prefilling(request_id=1, done=done, total=1500, cached=0))
        clock.now += 0.1
    speeds = [s.tokens_per_s for s in performance.throughput().samples if s.is_prefill]
    assert speeds == pytest.approx([5120, 5120, 4760])


def test_a_prompt_too_short_for_progress_is_a_sample_of_its_own(performance):
    for done in (10, 50):
        performance.observe(Prefilling(request_id=1, done=done, total=50, cached=10))
    decode(performance, 2, 100.0, start=0.02)
    [sample] = performance.throughput().samples
    assert sample.is_prefill and sample.tokens_per_s == pytest.approx(40 / 0.02)
    assert performance.throughput().prefill == pytest.approx(40 / 0.02), "said as soon as it is known"


def test_a_prompt_that_was_nearly_all_cached_is_no_speed(performance, clock):
    for event in reply("word " * 100):
        performance.observe(event)
    before = performance.throughput()
    for done in (1000, 1020, 1031):
        performance.observe(Prefilling(request_id=2, done=done, total=1031, cached=1000))
        clock.now += 0.1
    decode(performance, 2, 100.0, start=0.3)
    performance.observe(reply("", prompt_n=1031, cached_n=1000, predicted_n=2)[-1])
    after = performance.throughput()
    assert after.prefill == before.prefill == pytest.approx(96 / 0.21)
    assert [s for s in after.samples if s.is_prefill] == [s for s in before.samples if s.is_prefill]


def test_the_current_speed_is_of_one_answer(performance):
    decode(performance, 100, 100.0)
    performance.observe(reply("")[-1])
    decode(performance, 100, 200.0)
    assert performance.current == pytest.approx(200)
    performance.observe(reply("")[-1])
    performance.observe(Prefilling(request_id=2, done=0, total=9, cached=0))
    assert performance.current == pytest.approx(200), "until the next one says more"


def test_answers_are_kept_apart(performance):
    for event in reply("word " * 100):
        performance.observe(event)
    decode(performance, 100, 100.0, start=5.0)
    samples = performance.throughput().samples
    assert all(s.tokens_per_s < 1000 for s in samples), "the pause between them is no speed"
    assert performance.throughput().prefill == pytest.approx(96 / 0.21)


def test_nothing_changes_while_nothing_happens(performance):
    performance.observe(profile())
    before = performance.changes
    decode(performance, 2, 1000.0)
    assert performance.changes == before
    assert performance.kernels.decode == profile()


def test_kernels_are_held_against_the_last_answer(performance):
    assert performance.kernels.answer_us is None
    for event in (profile(), *reply("word " * 100, predicted_n=101, predicted_ms=137.9)):
        performance.observe(event)
    assert performance.kernels.answer_us == pytest.approx(1379)
    performance.observe(reply("", predicted_n=1)[-1])
    assert performance.kernels.answer_us == pytest.approx(1379), "one token is no speed"
    performance.observe(READY)
    assert performance.kernels.answer_us is None, "that was another engine"


def test_what_this_program_took_of_a_processor_on_which_the_engine_computes_too(clock):
    took = iter((3.0, 3.4))
    performance = PerformanceObserver(clock, lambda: next(took))
    performance.observe(replace(READY, backend="CPU"))
    performance.observe(Prefilling(request_id=1, done=0, total=4, cached=0))
    clock.now += 2.0
    performance.observe(reply("", predicted_n=50, predicted_ms=1900.0)[-1])
    assert performance.kernels.screen_share == pytest.approx(0.2)


def test_the_first_tokens_of_an_answer_do_not_say_what_one_takes(performance):
    times = (0.0, 90.0, 130.0, *(130.0 + 2 * i for i in range(1, 10)))
    for at_ms in times:
        performance.observe(Token(request_id=1, id=1, text="x", at_ms=at_ms))
    performance.observe(reply("", predicted_n=len(times), predicted_ms=times[-1])[-1])
    assert performance.kernels.answer_us == pytest.approx(2000)
    performance.observe(reply("", predicted_n=4, predicted_ms=130.0)[-1])
    assert performance.kernels.answer_us is None, "too few to say"


def test_another_engine_begins_anew_on_the_same_time_axis(performance, clock):
    decode(performance, 100, 100.0)
    performance.observe(READY)
    view = performance.throughput()
    assert (view.current, view.median, view.best, view.copy_gbps) == (None, None, None, None)
    assert [s.tokens_per_s for s in view.samples] == pytest.approx([100] * 3)
    performance.observe(replace(MEASURED, copy_gbps=400.0))
    decode(performance, 100, 100.0)
    limits = [s.limit_gbps(performance.kernels.copy_gbps) for s in performance.throughput().samples]
    assert limits[0] == 100 and limits[-1] == 400, "each has the limit of its own engine"


def test_a_sample_knows_when_it_was_taken(performance, clock):
    for i in range(101):
        clock.now = 50.0 + i / 100
        performance.observe(Token(request_id=1, id=i, text="x"))
    clock.now = 60.0
    view = performance.throughput()
    assert view.now_s == 60
    assert [(s.at_s, s.seconds) for s in view.samples] == [
        (pytest.approx(50.25 + i / 4), pytest.approx(0.25)) for i in range(4)
    ]


def test_what_is_older_than_the_graph_is_forgotten_and_the_figures_stay(performance, clock):
    for event in reply("word " * 100):
        performance.observe(event)
    clock.now = 300.0
    assert performance.throughput().samples and performance.throughput().marks
    clock.now = 331.0
    view = performance.throughput()
    assert (view.samples, view.marks) == ((), ())
    assert view.current == pytest.approx(view.median) == pytest.approx(100)


def test_each_prompt_is_marked_when_it_begins(performance, clock):
    for now in (5.0, 20.0):
        clock.now = now
        performance.observe(Prefilling(request_id=1, done=0, total=1200, cached=0))
        clock.now += 1
        performance.observe(Prefilling(request_id=1, done=1200, total=1200, cached=0))
        decode(performance, 2, 100.0)
        performance.observe(reply("")[-1])
    assert [(m.at_s, m.symbol, f"{m.kind} {m.text}") for m in performance.throughput().marks] == [
        (5.0, "P", "prompt of 1,200 tokens"), (20.0, "P", "prompt of 1,200 tokens"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("counter", "line"),
    [
        (Counter(name="EMC activity", value=61.4, unit="%"), "memory 61 % busy, measured"),
        (Counter(name="EMC activity", absent="no permission"), "memory: no permission"),
        (Counter(name="GPU", absent="NVML is away"), "memory: NVML is away"),
        (Counter(name="CPU load", value=1), "memory: no counter here"),
    ],
)
def test_what_the_memory_controller_measures_is_its_own_line(performance, counter, line):
    assert performance.throughput([counter]).memory == line


# --- the slowdown --------------------------------------------------------------------------------------

FULL = Counter(name="GPU clock", value=1300, unit="MHz", maximum=1300)
LOW = Counter(name="GPU clock", value=600, unit="MHz", maximum=1300)
MODE = Counter(name="power mode", text="30W")


@pytest.mark.parametrize(
    ("rate", "slowdown", "counters", "says"),
    [
        (95, 1.0, (LOW,), ""),
        (None, 1.0, (), ""),
        (70, 0.75, (LOW,), "30% below the best: each token reads a KV cache of 4,000 tokens"),
        (
            50,
            0.99,
            (Counter(name="throttled", text="x", parts=("too hot",)), LOW),
            "the GPU is throttled, too hot",
        ),
        (50, 0.99, (LOW, MODE), "the GPU clock is 600 of 1,300 MHz in power mode 30W"),
        (50, 0.99, (Counter(name="other load", value=80, unit="%"), LOW), "other programs take 80 %"),
        (50, 0.99, (FULL, Counter(name="temperature", value=97, unit="°C")), "the temperature is 97 °C"),
        (50, 0.99, (FULL, MODE), "50% below the best: no counter shows why"),
    ],
)
def test_a_slowdown_is_explained(rate, slowdown, counters, says):
    sentence = explain_slowdown(rate, 100.0, slowdown, 4000, counters)
    assert says in sentence and bool(sentence) == bool(says)


# --- speed history -------------------------------------------------------------------------------------


def test_speeds_are_kept_by_model_machine_and_preset(monkeypatch):
    model = Path("/models/a.gguf")
    for decode_rate in (84.0, 85.0, 83.0):
        speed_history.record_run(model, "cuda", decode=decode_rate, prefill=1200.0)
    speed_history.record_run(model, "cpu", decode=20.0, prefill=None)
    speed_history.record_run(Path("/models/b.gguf"), "cuda", decode=1.0, prefill=None)
    known = speed_history.preset_speeds(model)
    assert set(known) == {"cuda", "cpu"}
    assert str(known["cuda"]).startswith("decode 84.0 ± 1.0, prefill 1,200 ± 0 tok/s (20")
    assert str(known["cpu"]).startswith("decode 20.0 tok/s (")
    for decode_rate in (977.0, 40.0):  # a machine that was busy for one of them
        speed_history.record_run(model, "graph", decode=decode_rate, prefill=None)
    assert str(speed_history.preset_speeds(model)["graph"]).startswith("decode 40 to 977 tok/s (")
    monkeypatch.setattr(speed_history.platform, "node", lambda: "another")
    assert speed_history.preset_speeds(model) == {}


def test_only_the_last_runs_count():
    for rate in range(1, 20):
        speed_history.record_run(Path("m"), "cuda", decode=float(rate), prefill=None)
    assert [run.decode for run in speed_history.preset_speeds(Path("m"))["cuda"].runs] == list(range(12, 20))


def test_a_history_that_cannot_be_written_stops_nothing():
    speed_history._path().parent.mkdir(parents=True)
    speed_history._path().write_text("{ damaged")
    assert speed_history.preset_speeds(Path("m")) == {}
    speed_history.record_run(Path("m"), "cuda", decode=1.0, prefill=None)
    assert speed_history.preset_speeds(Path("m"))
    speed_history._path().unlink()
    speed_history._path().mkdir()
    speed_history.record_run(Path("m"), "cuda", decode=1.0, prefill=None)


def test_the_counters_of_a_card_say_nothing_of_an_engine_on_the_cpu(performance):
    counters = (Counter(name="memory activity", value=3.0), Counter(name="CPU load", value=90.0))
    assert performance.relevant(counters) == counters
    assert performance.throughput(counters).memory == "memory 3 % busy, measured"
    assert performance.throughput(counters).measured == "copy"
    performance.observe(replace(READY, backend="CPU"))
    assert performance.relevant(counters) == counters[1:]
    assert performance.throughput(counters).memory == "memory: no counter here"
    assert performance.throughput(counters).measured == "reading"


def test_choices_of_experts_are_those_of_the_last_minute(performance, clock):
    assert performance.experts() is None
    performance.observe(WITH_EXPERTS)
    assert performance.experts() == ExpertUse(((0,) * 128,), 8)
    for _ in range(2):
        performance.observe(CHOICES)
        clock.now += 40
    assert performance.experts().layers == CHOICES.layers  # the second time
    assert performance.experts() is performance.experts()
    clock.now += 40
    assert not any(map(any, performance.experts().layers))
    performance.observe(CHOICES)
    performance.observe(READY)
    assert performance.experts() is None
