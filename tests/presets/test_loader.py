import pytest
from msgspec.structs import replace

from app.chat.configuration import configure
from app.chat.settings import SamplingSettings, Settings
from engine import backends
from engine.errors import UsageError
from engine.protocol.events import EngineOptions, Matvec, Sampling
from presets import loader

CONTEXT = Settings(context=4096)


@pytest.fixture
def own(home):
    """The folder of the user's own presets."""
    folder = home / ".config" / "orin-chat" / "presets"
    folder.mkdir(parents=True)
    return folder


def test_the_built_in_ones_are_there_and_sound():
    found = loader.preset_files()
    names = "cpu cuda cuda-beam2 cuda-beam4 graph nv nv-jitbeam2 nv-jitbeam4 safe"
    assert set(names.split()) == set(found)
    assert all(
        entry.preset and entry.built_in and loader.NAME.fullmatch(entry.name) for entry in found.values()
    )


def test_a_width_of_the_search_is_all_that_its_key_changes():
    for entry in loader.preset_files().values():
        searched = configure("m.gguf", CONTEXT, entry.preset).engine
        if searched.search_width:
            plain = configure("m.gguf", CONTEXT, loader.find_preset(searched.backend.lower())).engine
            assert replace(searched, search_width=0) == replace(plain, search_width=0)


def test_a_preset_becomes_options(own):
    (own / "mine.toml").write_text(
        'title = "Mine"\nbackend = "CUDA"\nkernels = "graph"\nbeam = 3\ncontext = 512\n'
        "[matvec]\nthreads_per_row = 16\n[sampling]\ntemperature = 0\n"
    )
    preset = loader.find_preset("mine")
    own_settings = Settings(context=4096, sampling=SamplingSettings(seed=7))
    engine, sampling, *_ = configure("m.gguf", own_settings, preset)
    assert engine == EngineOptions(
        model_path="m.gguf", backend="CUDA", kernels="graph", search_width=3, context_length=512,
        context_at_most=True, matvec=Matvec(threads_per_row=16), prefix_cache_bytes=None,
    )  # fmt: skip
    assert sampling == Sampling(temperature=0, seed=7)
    longest = loader.parse('title = "x"\ncontext = "max"')
    assert configure("m", CONTEXT, longest).engine.context_length == "max"
    with pytest.raises(ValueError, match=r"context"):
        loader.parse('title = "x"\ncontext = "long"')
    assert configure("m", CONTEXT, loader.find_preset("safe")).engine.context_length == 2048
    assert configure("m", CONTEXT, loader.find_preset("cpu")).engine.context_length == 4096


@pytest.mark.parametrize("line", ["beam = 3", "jitbeam = 3", "beam = 0\njitbeam = 3"])
def test_the_width_of_the_search_has_two_names(line):
    preset = loader.parse(f"title = 'x'\n{line}\n")
    assert configure("m", preset=preset).engine.search_width == preset.search_width == 3


def test_the_users_own_wins(own):
    (own / "cuda.toml").write_text('title = "Mine"\nbackend = "CPU"\n')
    assert loader.find_preset("cuda").title == "Mine"
    assert not loader.preset_files()["cuda"].built_in


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("backend = 'CPU'", "title"),
        ("title = 'x'\nbackend = 'TPU'", "$.backend"),
        ("title = 'x'\nbeam = -1", "$.beam"),
        ("title = 'x'\nbaem = 1", "there is no key baem; there are title, backend, kernels, beam, jitbeam"),
        ("title = 'x'\nkv = 'q3'", "$.kv"),
        ("title = 'x'\n[sampling]\ntop_p = 2", "top-p must be from 0 to 1, not 2.0"),
        (
            "title = 'x'\n[matvec]\nwidth = 2",
            "there is no key width; [matvec] has block_size, threads_per_row",
        ),
        ("title = ", "end of document"),
        pytest.param("a = " + "[" * 9999, "lists within lists", id="brackets"),
    ],
)
def test_a_bad_file_is_named_with_its_key_and_spoils_no_other(own, text, says):
    (own / "bad.toml").write_text(text)
    with pytest.raises(UsageError) as error:
        loader.find_preset("bad")
    assert says in str(error.value) and "bad.toml" in str(error.value)
    assert loader.preset_files()["bad"].preset is None
    assert (
        says in loader.preset_files()["bad"].problem
        and "bad.toml" not in loader.preset_files()["bad"].problem
    )
    assert loader.find_preset("cpu")


def test_bytes_that_are_no_text(own):
    (own / "bad.toml").write_bytes(b"\xff\xfe")
    assert "utf-8" in loader.preset_files()["bad"].problem
    (own / "bad.toml").write_bytes(b"\xef\xbb\xbftitle = 'from Windows'\r\n")
    assert loader.find_preset("bad").title == "from Windows"


def test_a_name_that_is_not_there():
    with pytest.raises(UsageError, match="cuda-beam2"):
        loader.find_preset("fast")


def test_saving(own):
    path = loader.save("mine", 'title = "Mine"\n')
    assert loader.find_preset("mine").title == "Mine" and path.parent == own
    for name, text in (("../x", 'title = "x"'), ("mine", "title = 3")):
        with pytest.raises(UsageError):
            loader.save(name, text)
    assert loader.find_preset("mine").title == "Mine"


def test_a_folder_that_cannot_be_written_is_named(own):
    own.rmdir()
    own.write_text("a file")
    for act in (lambda: loader.save("mine", 'title = "Mine"'), lambda: loader.delete("mine")):
        with pytest.raises(UsageError, match=r"mine is not \w+: .* \(.*presets.*\)\.$") as error:
            act()
        assert "Errno" not in str(error.value)


def test_deleting_brings_back_the_built_in_one(own):
    loader.save("cpu", 'title = "Mine"\n')
    loader.delete("cpu")
    assert loader.find_preset("cpu").title == "CPU" and loader.preset_files()["cpu"].built_in
    with pytest.raises(UsageError):
        loader.delete("cpu")


def test_what_is_chosen_reaches_tinygrads_environment(monkeypatch):
    for name in ("DEV", "CC", "PARALLEL", "BEAM", "JITBEAM", "MV_BLOCKSIZE"):
        monkeypatch.setenv(name, "unset")  # and undone afterwards
    searched = {"search_width": 2, "matvec": Matvec(block_size=8)}
    environment = backends.os.environ
    backends.prepare(EngineOptions(model_path="m", backend="CPU", kernels="fused", **searched))
    assert environment["JITBEAM"] == "unset", "kernels of our own are not tinygrad's to search"
    backends.prepare(EngineOptions(model_path="m", backend="CPU", kernels="graph", **searched))
    assert (environment["BEAM"], environment["JITBEAM"], environment["MV_BLOCKSIZE"]) == ("0", "2", "8")
    backends.prepare(EngineOptions(model_path="m", backend="CPU"))
    assert environment["JITBEAM"] == "2", "left to the environment"
