"""Results of bench: tables, files, and what is slower than before."""

import json
import re
import sys

import pytest
from msgspec.structs import replace
from rich.console import Console

from app.bench import regression, results, tables
from app.bench.results import OURS, PEER, Result
from engine.errors import UsageError

# --- output ---------------------------------------------------------------------------------------------

RESULT = Result(
    build_commit="0.1.0",
    cpu_info="AMD EPYC",
    backends="CPU",
    model_filename="/models/qwen[bold]3|.gguf",
    model_type="qwen3 Q8_0",
    model_size=639_000_000,
    model_n_params=596_000_000,
    n_gen=128,
    engine=OURS,
    load_ms=3210.0,
    kernels_per_token=143,
    bytes_per_token=610_000_000,
    gbps=34.9,
    copy_gbps=40.0,
    roofline_share=0.87,
    latency_p50_ms=17.4,
    latency_p90_ms=17.9,
    latency_p99_ms=21.03,
    peak_resident_bytes=1_300_000_000,
    **results.sample_fields([2238, 2240, 2242], [57.2, 57.1, 57.3]),
)
PEERS = replace(RESULT, engine=PEER, build_commit="b1-0c1e570", median_ts=52.0, kernels_per_token=None)


def shown(results, width=tables.WIDE):
    console = Console(width=width, record=True, file=sys.stderr)
    for part in tables.to_tables(results, width):
        console.print(part)
    return console.export_text()


def test_the_table():
    lines = shown([RESULT, PEERS]).splitlines()
    assert lines[0] == (
        "qwen[bold]3|.gguf · qwen3 Q8_0 · 639 MB, 596M parameters · CPU · AMD EPYC · memory 40 GB/s"
    )
    assert lines[1].split() == [
        *("test", "engine", "tok/s", "median", "p50/p90/p99", "ms", "GB/s", "of", "memory", "ratio")
    ]
    assert lines[2].split() == [
        *("tg128", OURS, "57.2", "±", "0.10", "57.2", "17.4/17.9/21.0", "34.9", "87%", "1.10x")
    ]
    assert lines[3].split()[:2] == ["tg128", PEER]
    assert "3.21" in lines[5] and "143" in lines[5] and "610 MB" in lines[5] and "1.30 GB" in lines[5]
    assert all(len(line) <= tables.WIDE for line in lines)


def test_a_narrow_table_is_spared_some_columns():
    lines = shown([RESULT, PEERS], 80).splitlines()
    assert not any("median" in line for line in lines)
    assert sum("1.10x" in line for line in lines) == 1
    assert max(map(len, lines)) <= 80


def test_one_engine_has_no_ratio():
    assert "ratio" not in shown([RESULT])


def test_markdown():
    text = tables.to_markdown([RESULT, PEERS])
    assert text.startswith("**qwen[bold]3\\|.gguf · ")
    assert "| tg128 | orin-chat | 57.2 ± 0.10 | 57.2 | 17.4/17.9/21.0 | 34.9 | 87% | 1.10x |" in text
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in rows[:4]}) == 1


def test_json_has_llama_benchs_names_and_comes_back(tmp_path):
    names = set(json.loads(results.to_json([RESULT]))[0])
    assert {
        *("build_commit", "cpu_info", "gpu_info", "backends", "model_filename", "model_type", "model_size"),
        *("model_n_params", "type_k", "type_v", "n_prompt", "n_gen", "n_depth", "test_time", "avg_ns"),
        *("stddev_ns", "avg_ts", "stddev_ts", "samples_ns", "samples_ts"),
    } <= names
    (tmp_path / "x.json").write_text(results.to_json([RESULT, PEERS]))
    assert results.read(tmp_path / "x.json") == [RESULT, PEERS]


# --- against an earlier run -----------------------------------------------------------------------------


def samples(*rates):
    return replace(RESULT, **results.sample_fields([1000] * len(rates), rates))


@pytest.mark.parametrize(
    ("then", "now", "verdict", "slower"),
    [
        (samples(100, 101, 99), samples(100, 99, 101), "within the noise", False),
        (samples(100, 101, 99), samples(98.5, 98.4, 98.6), "within the noise", False),  # under 2 %
        (samples(100, 101, 99), samples(90, 91, 89), "SLOWER", True),
        (samples(100, 140, 60), samples(90, 91, 89), "within the noise", False),  # a noisy machine
        (samples(100, 101, 99), samples(120, 121, 119), "faster", False),
        (samples(100), samples(90), "SLOWER", True),
    ],
)
def test_slower_is_slower_beyond_the_noise(then, now, verdict, slower):
    [sentence], is_slower = regression.compare([now], [then])
    assert is_slower is slower
    assert sentence.endswith(f": {verdict}")
    assert sentence.startswith("tg128 orin-chat CPU qwen[bold]3|.gguf: ")


def test_only_the_same_is_compared():
    for changes in ({"engine": PEER}, {"n_depth": 1}, {"backends": "CUDA"}, {"preset": "x"}):
        with pytest.raises(UsageError, match="none of these tests"):
            regression.compare([RESULT], [replace(RESULT, **changes)])
    with pytest.raises(UsageError, match="another machine: Arm, not AMD EPYC"):
        regression.compare([RESULT], [replace(RESULT, cpu_info="Arm")])


def test_a_file_of_llama_bench_can_be_compared_with(tmp_path):
    path = tmp_path / "llama.json"
    fields = ("model_filename", "n_gen", "backends", "avg_ts", "stddev_ts", "samples_ts", "cpu_info")
    row = {name: value for name, value in json.loads(results.to_json([PEERS]))[0].items() if name in fields}
    path.write_text(json.dumps([row | {"n_threads": 2, "unknown": None}]))
    [sentence], _ = regression.compare([PEERS], results.read(path))
    assert "within the noise" in sentence


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot be read"), ("{", "holds no results"), ('[{"n_gen": "x"}]', "holds no")],
)
def test_a_file_that_is_no_earlier_run(tmp_path, content, message):
    path = tmp_path / "x.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match=message):
        results.read(path)
