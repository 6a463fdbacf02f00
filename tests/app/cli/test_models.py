"""`orin-chat models`, `pull`, `rm` and `show`, and models by name, against a hub on loopback."""

import io
import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import engine.protocol.client
from app.chat import speed_history
from app.chat.model_list import not_here, on_this_machine
from app.chat.settings import last_model
from app.cli import models
from app.cli.download import obtain
from app.main import main
from engine.backends import unusable_because
from engine.catalog import cache
from engine.catalog.names import known_models, parse
from engine.description.architectures import read_spec
from engine.formats.gguf import GGUF
from engine.loading import packed_weights_cache
from engine.system.invocation import call
from presets import GUIDE, guide_path
from tests import synthetic
from tests.catalog.fixtures import fake_hub
from tests.generated_model import write
from tests.paths import ROOT
from tests.thorough import thorough
from widgets.text import as_bytes, as_count

__all__ = ["fake_hub"]

NAME = "hf.co/user/model-GGUF:Q8_0"


@pytest.fixture
def hub(fake_hub, tmp_path):
    """A hub with two models that can run, one with a name that plays tricks."""
    fake_hub.files = {
        "model-Q8_0.gguf": write(tmp_path / "q8.gguf", architecture="qwen3").read_bytes(),
        "model-F16.gguf": write(tmp_path / "f16.gguf", quant="F16", context=512).read_bytes(),
    }
    return fake_hub


@pytest.fixture
def run(home, monkeypatch, capfd):
    """Runs the command line with no terminal: exit code, standard output, standard error."""

    def run(*arguments, stdin=""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = main([str(argument) for argument in arguments])
        return code, *capfd.readouterr()

    return run


class Terminal(io.StringIO):
    def isatty(self):
        return True


# --- pull ----------------------------------------------------------------------------------------------


def test_pull_says_what_it_resolved_to_and_where_it_is(run, hub):
    code, out, err = run("pull", NAME)
    path = cache.find(parse(NAME))
    size = as_bytes(len(hub.files["model-Q8_0.gguf"]))
    assert (code, err) == (0, f"orin-chat: Downloading {NAME}.\n")
    assert out == f"{NAME} is model-Q8_0.gguf (Q8_0, {size}): {path}\n"


def test_pull_as_json_tells_progress_and_ends_with_the_model(run, hub):
    code, out, err = run("pull", NAME, "--json")
    events = [json.loads(line) for line in out.splitlines()]
    assert (code, err) == (0, "")
    assert {event["event"] for event in events[:-1]} == {"progress"}
    assert events[-2]["done_bytes"] == events[-2]["total_bytes"] == len(hub.files["model-Q8_0.gguf"])
    assert events[-1]["event"] == "finished"
    assert events[-1]["path"] == str(cache.find(parse(NAME)))


def test_pull_again_mends_what_is_damaged(run, hub):
    run("pull", NAME)
    path = cache.find(parse(NAME))
    path.resolve().write_bytes(b"GGUF" + bytes(1000))
    assert run("pull", NAME)[0] == 0
    assert path.read_bytes() == hub.files["model-Q8_0.gguf"]


def test_progress_on_a_terminal_overwrites_itself(hub, home):
    messages = Terminal()
    hub.pause_s = 0.01
    obtain(NAME, {}, messages)
    assert "\r" in messages.getvalue()
    assert messages.getvalue().endswith(f"orin-chat: {NAME} is model-Q8_0.gguf (Q8_0).\n")
    assert "\x1b" not in messages.getvalue()


@pytest.mark.parametrize(
    "name, code, sentence",
    [
        ("qwen3:0.6", 3, "There is no model called 'qwen3:0.6'. Similar names: qwen3:0.6b"),
        ("hf.co/user/nothing", 3, "hf.co/user/nothing does not exist, or it is private."),
        ("hf.co/user/model-GGUF:Q6_K", 3, "hf.co/user/model-GGUF has no Q6_K. It has F16, Q8_0"),
        ("./some.gguf", 2, "some.gguf, and nothing to download."),
        (__file__, 2, "test_models.py is a file: there is nothing to download."),
        ("user/model-GGUF", 2, "A model of the Hugging Face hub is hf.co/user/model-GGUF."),
        ("http://127.0.0.1:9/x.gguf", 3, "http://127.0.0.1:9/x.gguf cannot be reached:"),
    ],
)
def test_what_cannot_be_pulled_gets_one_line(run, hub, name, code, sentence):
    got, out, err = run("pull", name)
    lines = [line for line in err.splitlines() if "Downloading" not in line]
    assert (got, out, len(lines)) == (code, "", 1)
    assert sentence in lines[0] and "Traceback" not in err


def test_names_from_the_hub_cannot_reach_the_terminal(run, hub):
    hub.files = {"evil\x1b[31m\u202e-Q8_0.gguf": hub.files["model-Q8_0.gguf"]}
    _, out, err = run("pull", NAME)
    assert "\x1b" not in out + err and "\u202e" not in out + err


# --- models --------------------------------------------------------------------------------------------


def test_at_first_the_built_in_model_is_here(run):
    code, out, _ = run("models")
    _, guide, nothing, known, first, *_ = out.splitlines()
    assert code == 0
    assert guide.startswith(f"{GUIDE}  ") and "  Q8_0  " in guide and nothing == ""
    assert known.startswith("Not here, but known (") and first.startswith("llama3.2:1b  ")
    assert max(map(len, out.partition(known)[2].splitlines())) <= 80
    assert {model.name for model in known_models()} <= set(out.split())


def test_the_built_in_model_stays(run):
    code, _, err = run("rm", GUIDE, "--yes")
    assert code == 2 and f"{GUIDE} is built in" in err and guide_path().is_file()


def test_the_list_tells_what_each_model_is(run, hub, home):
    run("pull", NAME)
    speed_history.record_use(cache.find(parse(NAME)), "CUDA", 100, 123.45)
    mine = write(home / "mine.gguf", context=256)
    (home / "broken.gguf").write_bytes(b"GGUF")
    other = write(home / "other.gguf", context=256)
    other.write_bytes(other.read_bytes().replace(b"gpt2", b"ugly", 1))
    speed_history.record_use(other)
    speed_history.record_use(home / "broken.gguf")
    (home / ".config/orin-chat").mkdir(parents=True)
    (home / ".config/orin-chat/settings.toml").write_text(f'[models]\nwork = "{mine}"\n')
    code, out, _ = run("models")
    lines = out.splitlines()
    assert code == 0
    assert lines[0].split() == [
        "NAME",
        "SIZE",
        "TYPE",
        "PARAMETERS",
        "CONTEXT",
        "LAST",
        "USED",
        "SPEED",
        "WHERE",
    ]
    row = next(line for line in lines if line.startswith(NAME))
    assert "  Q8_0  " in row and "  2,048  " in row and "  just now  " in row and "  123.5 tok/s  " in row
    assert "~/hf/hub/models--user--model-GGUF/snapshots/" in row
    assert "  256  " in next(line for line in lines if line.startswith("work "))
    assert any('other.gguf has a tokenizer of the kind "ugly"' in line for line in lines)
    assert any("broken.gguf cannot be used: broken.gguf is truncated" in line for line in lines)


def test_the_list_as_json(run, hub):
    run("pull", NAME)
    [here, guide, *others] = json.loads(run("models", "--json")[1])
    assert guide["name"] == GUIDE and guide["path"] == str(guide_path())
    assert here["name"] == NAME and Path(here["path"]).is_file()
    assert here["quantization"] == "Q8_0" and here["architecture"] == "qwen3" and here["parameters"] > 0
    assert [other["name"] for other in others] == [model.name for model in known_models()]
    assert all(other["path"] is None and other["size_bytes"] is None for other in others)


def test_known_models_that_are_here_are_listed_once(run, hub, monkeypatch):
    hub.repository = "Qwen/Qwen3-0.6B-GGUF"
    hub.files = {"Qwen3-0.6B-Q8_0.gguf": hub.files["model-Q8_0.gguf"]}
    assert run("pull", "qwen3:0.6b")[1].startswith("qwen3:0.6b is Qwen3-0.6B-Q8_0.gguf (Q8_0, ")
    here = on_this_machine()
    assert [entry.name for entry in here] == ["qwen3:0.6b"]
    assert "qwen3:0.6b" not in [entry.name for entry in not_here(here)]


@pytest.mark.parametrize("error", [MemoryError(), RecursionError("too deep"), OSError("no such disk")])
def test_a_file_that_cannot_be_read_hides_no_other(monkeypatch, tmp_path, error):
    paths = {name: write(tmp_path / f"{name}.gguf") for name in ("bad", "good")}

    def read(file):
        if file.path == paths["bad"]:
            raise error
        return read_spec(file)

    monkeypatch.setattr("app.chat.model_list.read_spec", read)
    entries = {entry.name: entry for entry in on_this_machine({n: str(path) for n, path in paths.items()})}
    assert not entries["good"].problem and entries["bad"].problem
    assert str(error) in entries["bad"].problem


def test_ages_in_words():
    now = time.time()
    assert [models.ago(now - past) for past in (0, 70, 3700, 2 * 86_400 + 5)] == [
        "just now",
        "1 minute ago",
        "1 hour ago",
        "2 days ago",
    ]


# --- rm ------------------------------------------------------------------------------------------------


def test_rm_asks(hub, run, monkeypatch, capfd):
    run("pull", NAME)
    for answer, stays in (("\n", True), ("n\n", True), ("y\n", False)):
        monkeypatch.setattr(sys, "stdin", Terminal(answer))
        assert main(["rm", NAME]) == 0
        assert (cache.find(parse(NAME)) is not None) == stays
    out, err = capfd.readouterr()
    size = as_bytes(len(hub.files["model-Q8_0.gguf"]))
    assert f"Delete model-Q8_0.gguf ({size})? [y/N] " in err
    assert out == f"Deleted model-Q8_0.gguf, {size} are free again.\n"


def test_rm_without_a_terminal_needs_a_yes(hub, run):
    run("pull", NAME)
    with GGUF(cache.find(parse(NAME))) as file:
        packed_weights_cache.write(file, 8, {"output": np.zeros(5_000, np.uint8)})
    [packed] = packed_weights_cache.folder().iterdir()
    packed_bytes = packed.stat().st_size
    code, _, err = run("rm", NAME, stdin="y\n")
    assert code == 2 and "--yes" in err
    code, out, _ = run("rm", NAME, "--yes", "--json")
    assert code == 0
    assert json.loads(out)["freed_bytes"] == len(hub.files["model-Q8_0.gguf"]) + packed_bytes
    assert not packed.exists()
    assert run("rm", NAME, "--yes")[0] == run("rm", "nosuch", "--yes")[0] == 3


def test_rm_takes_the_path_of_a_download_and_no_other(hub, run, home):
    run("pull", NAME)
    mine = write(home / "mine.gguf")
    code, _, err = run("rm", mine, "--yes")
    assert code == 2 and "was not downloaded" in err and mine.exists()
    assert run("rm", cache.find(parse(NAME)), "--yes")[0] == 0
    assert cache.installed() == []


# --- show ----------------------------------------------------------------------------------------------


def test_show_predicts_the_ceiling(hub, run, monkeypatch):
    monkeypatch.setattr("engine.measure.bandwidth.copy_gbps", lambda _: 100.0)
    run("pull", NAME)
    speed_history.record_use(cache.find(parse(NAME)), "CPU", 100, 50.0)
    shown = json.loads(run("show", NAME, "--json", "--backend", "CPU")[1])
    assert shown["copy_gbps"] == 100.0 and shown["device"].startswith("CPU (")
    assert sum(kind["bytes"] for kind in shown["tensors"].values()) == shown["bytes_per_token"]  # tied
    assert shown["ceiling_tokens_per_s"] == pytest.approx(100e9 / shown["bytes_per_token"])
    assert shown["tokens_per_s"] == 50.0
    memory = shown["memory"]
    assert memory["needed_bytes"] == sum(memory[f"{part}_bytes"] for part in ("weights", "cache", "kernels"))
    assert memory["needed_bytes"] < memory["free_bytes"]
    assert memory["largest_context_length"] == shown["context_length"]
    assert shown["metadata"]["general.architecture"] == "qwen3"
    assert shown["metadata"]["tokenizer.ggml.tokens"].endswith(" strings]")
    out = run("show", NAME, "--backend", "CPU")[1]
    for words in (
        "read bandwidth",  # which decoding on a CPU does: a copy would be slower
        "100 GB/s on CPU",
        "tokens/s: that bandwidth by those bytes",
        "tensors in Q8_0",
        "of weights, ",
        f"enough for a context of {shown['context_length']:,} tokens",
    ):
        assert words in out


def test_show_says_which_layers_are_not_run(run, home, monkeypatch):
    monkeypatch.setattr("engine.measure.bandwidth.copy_gbps", lambda _: 100.0)
    path = write(home / "mine.gguf", architecture="qwen35", layers=3, keys={"nextn_predict_layers": 1})
    shown = json.loads(run("show", path, "--json", "--backend", "CPU")[1])
    assert shown["not_run"] == "a draft layer (multi-token prediction)" and not shown["problem"]
    assert "not run " in run("show", path, "--backend", "CPU")[1]


def test_show_says_how_much_context_fits_by_format_of_the_kv_cache(run, home, monkeypatch):
    monkeypatch.setattr("engine.measure.bandwidth.copy_gbps", lambda _: 100.0)
    monkeypatch.setattr("engine.measure.free_memory.free_bytes", lambda _: 140_000_000)
    path = write(home / "mine.gguf", context=1 << 20, heads=2, kv_heads=1)
    formats = json.loads(run("show", path, "--json", "--backend", "CPU")[1])["memory"]["kv"]
    f16, q8_0 = formats["f16"], formats["q8_0"]
    assert q8_0["cache_bytes"] / f16["cache_bytes"] == 34 / 64
    assert 512 < f16["largest_context_length"] < q8_0["largest_context_length"] < 1 << 20
    out = run("show", path, "--backend", "CPU")[1]
    assert (
        f"{as_bytes(q8_0['cache_bytes'])} for 8,192 tokens, room for {q8_0['largest_context_length']:,}"
        in out
    )


def test_show_measures_a_cpu_by_reading_as_the_dashboard_does(run, home, monkeypatch):
    monkeypatch.setattr("engine.targets.cpu.kernels.read_bandwidth.read_gbps", lambda n_bytes, rounds: 77.0)
    path = write(home / "mine.gguf")
    assert json.loads(run("show", path, "--json", "--backend", "CPU")[1])["copy_gbps"] == 77.0
    assert "faster" not in run("show", path, "--backend", "CPU")[1]
    speed_history.record_use(path, "CPU", 100, 1e9)
    assert "replies were faster, since caches hold weights" in run("show", path, "--backend", "CPU")[1]


@thorough
def test_show_says_why_there_is_no_ceiling(run, home):
    path = write(home / "mine.gguf")
    code, out, _ = run("show", path, "--backend", "CUDA")
    if "GB/s on CUDA" not in out:
        assert code == 0 and "not measured: The CUDA backend cannot be used" in out
    if unusable_because("NV"):  # in a process of its own, since this one has its device
        command = [sys.executable, "-m", "app", "show", str(path), "--backend", "NV"]
        out = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        assert "not measured: The NV backend cannot be used: " in out and "ExceptionGroup" not in out


def test_show_says_nothing_of_the_speed_of_a_file_that_cannot_be_used(run, home):
    path = write(home / "other.gguf")
    path.write_bytes(path.read_bytes().replace(b"gpt2", b"ugly", 1))
    out = run("show", path)[1]
    assert "cannot be used" in out and "tensors in" in out
    assert not any(words in out for words in ("ceiling", "bandwidth", "a token reads", "last measured"))
    shown = json.loads(run("show", path, "--json")[1])
    assert shown["ceiling_tokens_per_s"] is None and shown["bytes_per_token"] is None


def test_an_untied_embedding_is_not_read_whole(run, home, monkeypatch):
    monkeypatch.setattr("engine.measure.bandwidth.copy_gbps", lambda _: 100.0)
    path = write(home / "untied.gguf", tied=False)
    shown = json.loads(run("show", path, "--json", "--backend", "CPU")[1])
    total = sum(kind["bytes"] for kind in shown["tensors"].values())
    assert shown["bytes_per_token"] < total


def test_of_a_mixture_of_experts_a_token_uses_a_part(run, home, monkeypatch):
    monkeypatch.setattr("engine.measure.bandwidth.copy_gbps", lambda _: 100.0)
    path = write(home / "experts.gguf", architecture="qwen3moe")
    shown = json.loads(run("show", path, "--json", "--backend", "CPU")[1])
    total, active = shown["parameters"], shown["active_parameters"]
    assert 0 < active < total
    words = f"{as_count(total)}, {as_count(active)} active"
    assert words in run("show", path, "--backend", "CPU")[1]


@pytest.mark.parametrize(
    "name, sentence",
    [
        ("qwen3:4b", f"hf.co/Qwen/Qwen3-4B-GGUF:Q4_K_M is not on this machine. {call('pull')}"),
        ("/no/such.gguf", "/no/such.gguf is not on this machine. Check the path"),
        ("/usr", "usr is a folder, not a model file."),
        ("/dev/null", "null is not a file, but a pipe, a socket or a device."),
    ],
)
def test_show_of_what_is_not_here(run, fake_hub, name, sentence):
    code, out, err = run("show", name)
    assert (code, out) == (3, "") and sentence in err


def test_show_says_whether_a_model_that_is_not_here_would_fit(run, fake_hub, monkeypatch):
    monkeypatch.setattr("engine.catalog.memory_fit._machine_bytes", lambda: 100_000)
    monkeypatch.setattr("engine.catalog.memory_fit.cuda_driver.memory_bytes", lambda: 10**6)
    pull = f"{call(f'pull {NAME}')} downloads it."
    assert f"machine. It has 150 kB and fits into 1.00 MB of memory: {pull}" in run("show", NAME)[2]
    assert (
        f"It has 150 kB and does not fit into 100 kB of memory: {pull}"
        in run("show", NAME, "--backend", "CPU")[2]
    )
    assert (
        "It has 90.0 kB and fits into" in run("show", NAME.replace("Q8_0", "Q4_K_M"), "--backend", "CPU")[2]
    )
    monkeypatch.setattr("engine.catalog.memory_fit._machine_bytes", lambda: 0)
    assert f"machine. It has 150 kB: {pull}" in run("show", NAME, "--backend", "CPU")[2]


def test_metadata_are_data(run, home, monkeypatch):
    monkeypatch.setattr("engine.measure.bandwidth.copy_gbps", lambda _: 100.0)
    path = write(home / "evil.gguf", template="\x1b[31m{{ messages }}\u202e\nsecond line")
    for arguments in (("show", path, "--backend", "CPU"), ("show", path, "--json", "--backend", "CPU")):
        out = run(*arguments)[1]
        assert "\x1b" not in out and "\u202e" not in out
        assert not any(line.startswith("second line") for line in out.splitlines())


# --- chatting by name ----------------------------------------------------------------------------------


@pytest.fixture
def answered(run, monkeypatch):
    """Asks for one answer of a synthetic engine: exit code, output, errors, the file it was started with."""

    def answered(*arguments):
        started = []

        def make(options, **_):
            started.append(Path(options.model_path))
            return synthetic.engine(rate=0, load_s=0, prefill_s=0, tokens=40, text="word ")

        monkeypatch.setattr(engine.protocol.client, "LocalEngine", make)
        return *run(*arguments), started[0] if started else None

    return answered


def test_a_name_is_downloaded_once_and_remembered(answered, hub):
    code, _, err, path = answered("--plain", "--model", NAME)
    assert code == 0 and path == cache.find(parse(NAME))
    assert err == f"orin-chat: Downloading {NAME}.\norin-chat: {NAME} is model-Q8_0.gguf (Q8_0).\n"
    assert last_model() == NAME
    hub.requests.clear()
    code, _, err, again = answered("why?")
    assert (code, err, again, hub.requests) == (0, "", path, [])
    assert last_model() == NAME


def test_no_network_is_needed_for_what_is_here(answered, hub, monkeypatch):
    answered("--model", NAME, "why?")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    assert answered("--model", NAME, "why?")[0] == 0


def test_names_of_the_users_own(answered, hub, home):
    (home / ".config/orin-chat").mkdir(parents=True)
    (home / ".config/orin-chat/settings.toml").write_text(f'model = "fast"\n[models]\nfast = "{NAME}"\n')
    code, _, err, path = answered("why?")
    assert code == 0 and path.name == "model-Q8_0.gguf"
    assert "fast is model-Q8_0.gguf (Q8_0)." in err


def test_an_unknown_name_suggests_the_nearest(answered, hub):
    code, out, err, path = answered("--model", "lama3.2:1b", "why?")
    assert (code, out, path) == (3, "", None)
    assert err == (
        "orin-chat: There is no model called 'lama3.2:1b'. Similar names: llama3.2:1b, llama3.2:3b, llama3.1:8b.\n"
    )


# --- the record of speeds ------------------------------------------------------------------------------


def test_replies_are_recorded_by_file(answered, hub):
    answered("--model", NAME, "why?")
    [(path, record)] = speed_history.model_records().items()
    assert path == cache.find(parse(NAME)).resolve()
    assert record.backend == "CPU" and record.tokens_per_s > 0
    assert abs(record.used_at - time.time()) < 60


def test_short_replies_say_nothing_of_speed(home):
    file = home / "here.gguf"
    file.write_bytes(b"x")
    speed_history.record_use(file, "CPU", 100, 10.0)
    speed_history.record_use(file, "CUDA", 5, 99.0)
    [(path, record)] = speed_history.model_records().items()
    assert path == file and (record.tokens_per_s, record.backend) == (10.0, "CPU")


def test_a_damaged_record_is_no_reason_to_stop(home):
    speed_history.record_use(write(home / "m.gguf"))
    [record] = home.rglob("evidence.json")
    record.write_bytes(b"{nonsense")
    assert speed_history.model_records() == {}
    speed_history.record_use(home / "m.gguf")
    assert len(speed_history.model_records()) == 1
