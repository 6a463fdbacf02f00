"""bench --parallel: several conversations at once."""

import asyncio
import json
import time

import pytest

from app.bench import benchmark, regression, results, samples
from app.bench.bench_command import run as run_command
from app.bench.results import OURS, PEER
from app.bench.samples import TimedAnswer, _shared_intervals, shared_decode
from app.chat.settings import Settings
from engine.errors import UsageError
from engine.protocol.events import Failed, Finished, ModelInfo, Ready, Token
from tests import generated_model

MODEL = ModelInfo(
    name="m",
    architecture="llama",
    quantization="F32",
    parameters=1,
    file_bytes=1,
    trained_context=512,
    thinks=False,
)


class FakeEngine:
    """Answers `parallel` requests at a time, a token in `token_s` each; notes how many there were at once."""

    pid = None

    def __init__(self, options, name, asked, *, parallel=None, token_s=0.001, failure=""):
        self.options, self.name, self.asked, self.token_s, self.failure = (
            options,
            name,
            asked,
            token_s,
            failure,
        )
        self.parallel = parallel or options.parallel
        self.open = 0

    async def start(self):
        yield Ready(
            model=MODEL,
            backend="CPU",
            device_name="no device",
            context_length=self.options.context_length,
            load_ms=1.0,
            parallel=self.parallel,
        )

    async def generate(self, request):
        self.open += 1
        try:
            async for event in self.answer(request):
                yield event
        finally:
            self.open -= 1

    async def answer(self, request):
        assert self.open <= self.parallel
        began = time.perf_counter()
        await asyncio.sleep(self.token_s)
        self.asked.append((self.name, self.open, request))
        if self.failure:
            yield Failed(kind="backend", message=self.failure, request_id=request.request_id)
            return
        for n in range(request.max_tokens):
            await asyncio.sleep(self.token_s if n else 0)
            at_ms = (time.perf_counter() - began) * 1e3
            yield Token(request_id=request.request_id, id=n, text="", at_ms=at_ms)
        yield Finished(
            request_id=1, reason="length", prompt_n=len(request.prompt.ids), cached_n=0, prompt_ms=1.0,
            predicted_n=request.max_tokens, predicted_ms=at_ms, load_ms=0.0, seed=0,
        )  # fmt: skip

    async def close(self):
        pass


@pytest.fixture
def bench(monkeypatch, tmp_path, capsys):
    """Runs the command with fake engines: `bench(*arguments, ours={...}, peer={...})`."""
    model = generated_model.write(tmp_path / "noise.gguf", context=512)

    def run(*arguments, ours=None, peer=None):
        asked = []
        monkeypatch.setattr(
            benchmark, "LocalEngine", lambda options: FakeEngine(options, OURS, asked, **ours or {})
        )
        monkeypatch.setattr(
            "app.bench.bench_command.LlamaServer",
            lambda options, path: FakeEngine(options, PEER, asked, **peer or {}),
        )
        monkeypatch.setattr("app.bench.bench_command.find_llama_server", lambda path: "llama-server")
        code = run_command(["--model", str(model), *map(str, arguments)], Settings())
        return code, *capsys.readouterr(), asked

    return run


@pytest.mark.parametrize(
    ("streams", "ms", "rates"),
    [
        ([[0, 10, 20, 30]], 30, [100]),
        ([[0, 10, 20, 30], [0, 20, 40, 60]], 30, [100, 50]),  # until the first one ends
        ([[0, 10, 20, 30], [15, 20, 25, 30]], 15, [100, 200]),  # from when the last one begins
        ([[0, 10, 10, 20], [0, 10, 20]], 20, [150, 100]),  # tokens reported together
        ([[0, 10], [20, 30]], None, None),  # one after another
        ([[0, 10], []], None, None),
        ([[0]], None, None),
    ],
)
def test_the_decode_that_several_answers_share(streams, ms, rates):
    shared = shared_decode(streams)
    assert (shared and shared.ms) == ms
    assert (shared and shared.rates) == (rates and pytest.approx(rates))


def test_times_of_engines_whose_clocks_begin_later_than_the_request():
    sample = TimedAnswer(None, [5.0, None, 7.0], sent_s=100.0, began_s=100.02)
    assert sample.first_token_ms == [pytest.approx(25)]
    assert sample.common_times_ms == pytest.approx([100_025, 100_027])
    assert TimedAnswer(None, []).first_token_ms == []


def test_all_prompts_come_at_once_and_then_again(bench):
    code, out, _, asked = bench(
        *("--parallel", "3,1", "-p", "8", "-n", "6", "-r", "2", "-o", "json", "--compare", PEER)
    )
    assert code == 0
    found = json.loads(out)
    assert [(r["n_parallel"], r["engine"]) for r in found] == [(1, OURS), (1, PEER), (3, OURS), (3, PEER)]
    assert [r["n_depth"] for r in found] == [8] * 4 and [r["n_gen"] for r in found] == [6] * 4
    ones, threes = asked[: 2 * 2 * 3], asked[2 * 2 * 3 :]
    assert [name for name, _, _ in ones] == [PEER, PEER, OURS, OURS, OURS, OURS] + [PEER] * 4 + [OURS] * 2
    assert {request.max_tokens for _, _, request in ones} == {7}
    assert {(n, request.max_tokens) for _, n, request in threes} == {(3, 9)}
    for i in range(0, len(threes), 12):  # two engines, two rounds each
        prompts = [request.prompt.ids for _, _, request in threes[i : i + 12]]
        assert len(set(prompts)) == 3
        assert all(sorted(prompts[:3]) == sorted(prompts[j : j + 3]) for j in (3, 6, 9))
    for r in found:
        assert len(r["samples_ts"]) == 2
        assert 0 < r["stream_ts"] < 1000  # a token in 1 ms, or later
        assert r["median_ts"] == pytest.approx(r["stream_ts"] * r["n_parallel"], rel=0.5)
        assert 1 <= r["first_token_ms"] <= r["first_token_p99_ms"]
        assert 1 <= r["latency_p50_ms"] <= r["latency_p99_ms"]
        assert r["gbps"] is None


def test_answers_while_prompts_arrive(bench):
    """A fake engine's prompts take no time, so both rates are about the same."""
    arguments = ("--parallel", "3", "--arrivals", "40", "-p", "8", "-n", "30", "-r", "2", "--compare", PEER)
    code, out, _, asked = bench(*arguments, "-o", "json")
    assert code == 0
    arrivals = [request for _, _, request in asked if len(request.prompt.ids) == 40]
    assert {(request.max_tokens, request.fresh) for request in arrivals} == {(1, True)}
    assert len({request.prompt.ids for request in arrivals}) == len(arrivals) >= 3 * 2 * 3
    assert max(n for _, n, _ in asked) == 3  # two answers, and one prompt at a time
    found = json.loads(out)
    assert [(r["n_arrival"], r["engine"]) for r in found] == [(40, OURS), (40, PEER)]
    for r in found:
        assert 1 <= r["quiet_p50_ms"] <= r["quiet_p99_ms"] and r["first_token_ms"] >= 1
        assert 1 <= r["latency_p50_ms"] <= r["latency_p99_ms"] <= r["latency_max_ms"]
        assert r["median_ts"] == pytest.approx(2 * r["stream_ts"])
    _, out, _, _ = bench(*arguments)
    assert out.splitlines()[2].startswith("2 x tg30 @ d8 + pp40  orin-chat")


def test_only_times_in_which_all_decode_count():
    early, late = (TimedAnswer(None, times, 0.0, 0.0) for times in ([0, 10, 20, 30, 30, 40], [18, 25, 100]))
    assert _shared_intervals([early, late]) == [10, 5, 5, 10, 7]
    assert _shared_intervals([early, late], since_ms=26) == [5, 5, 10]
    assert _shared_intervals([early, TimedAnswer(None, [])]) == []


def test_the_table_and_an_earlier_run(bench, tmp_path):
    arguments = ("--parallel", "2", "-p", "8", "-n", "8", "-r", "2", "--compare", PEER)
    _, out, _, _ = bench(*arguments, "--save", tmp_path / "run.json", peer={"token_s": 0.003})
    titles, ours, theirs = out.splitlines()[1:4]
    assert titles.split("  ")[0] == "test" and "first p50/p99 ms" in titles and "total tok/s" in titles
    assert ours.startswith("2 x tg8 @ d8  orin-chat") and ours.endswith("x")
    assert theirs.startswith("2 x tg8 @ d8  llama.cpp")
    earlier = results.read(tmp_path / "run.json")
    sentences, _ = regression.compare(earlier, earlier)
    assert [sentence.split(":")[0] for sentence in sentences] == [
        "2 x tg8 @ d8 orin-chat CPU noise.gguf",
        "2 x tg8 @ d8 llama.cpp CPU noise.gguf",
    ]


def test_an_engine_that_answers_fewer_says_so(bench):
    code, out, err, _ = bench("--parallel", "1,2,4", "-p", "8", "-n", "4", "-r", "1", ours={"parallel": 2})
    assert code == 0
    assert "2 x tg4" in out and "4 x" not in out
    assert "orin-chat answers 2 conversations at a time here: 4 at once are left out." in err
    code, out, err, asked = bench("--parallel", "2,4", "-p", "8", "-n", "4", ours={"parallel": 1})
    assert (code, out, asked) == (4, "", [])
    assert "orin-chat answers one conversation after another here: 2, 4 at once are left out." in err


def test_an_engine_that_does_not_decode_at_the_same_time(bench, monkeypatch):
    monkeypatch.setattr(samples, "shared_decode", lambda streams: None)
    code, out, err, _ = bench("--parallel", "2", "-p", "8", "-n", "2", "-r", "2")
    assert (code, out) == (0, "")
    assert err.count("2 x tg2 @ d8: orin-chat did not decode all of them at the same time.") == 1


def test_an_answer_that_fails_ends_the_engine(bench):
    code, out, err, asked = bench(
        *("--parallel", "2", "-p", "8", "-n", "4", "-r", "1", "--compare", PEER), peer={"failure": "No."}
    )
    assert code == 4
    assert OURS in out and PEER not in out
    assert "No." in err
    assert sum(name == PEER for name, _, _ in asked) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-d", "64"], "has no --depth"),
        (["-n", "0"], "1 or more"),
        (["-p", "600"], "nothing to measure"),
        (["--arrivals", "600"], "nothing to measure"),
        (["--arrivals", "--parallel", "1,2"], "from 2 on"),
    ],
)
def test_wrong_usage(bench, arguments, message):
    with pytest.raises(UsageError, match=message):
        bench("--parallel", "2", *arguments)


def test_a_real_pair(llama_server, tmp_path, capsys):
    model = generated_model.write(tmp_path / "noise.gguf", context=512)
    arguments = ["--model", str(model), "--backend", "CPU", "--parallel", "1,2", "-p", "40", "-n", "60"]
    code = run_command(
        [*arguments, "-r", "2", "-o", "json", "--compare", PEER, "--llama-server", llama_server], Settings()
    )
    found = json.loads(capsys.readouterr().out)
    assert code == 0
    assert {r["engine"] for r in found} == {OURS, PEER}
    assert all(r["avg_ts"] > 0 and r["first_token_ms"] > 0 for r in found)
