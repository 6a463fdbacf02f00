import shutil
from pathlib import Path

import pytest

from engine.catalog import cache
from engine.catalog.downloads import download
from engine.catalog.names import HubModel


@pytest.mark.parametrize(
    "variables, folder",
    [
        ({}, "~/.cache/huggingface/hub"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
        ({"HF_HOME": "/h"}, "/h/hub"),
        ({"HF_HOME": "/h", "HUGGINGFACE_HUB_CACHE": "/old"}, "/old"),
        ({"HUGGINGFACE_HUB_CACHE": "/old", "HF_HUB_CACHE": "$HOME/new"}, "~/new"),
    ],
)
def test_the_cache_is_where_the_hub_library_has_it(home, monkeypatch, variables, folder):
    monkeypatch.delenv("HF_HOME")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache.hub_folder() == Path(folder).expanduser()


def test_what_is_installed_and_what_finds_it(fake_hub):
    repository = fake_hub.repository
    wanted = [HubModel(repository, "F16"), HubModel(repository, "Q4_K_M"), HubModel(repository, "Q8_0")]
    paths = [download(model) for model in wanted]
    found = cache.installed()
    assert [(model.source, model.path) for model in found] == list(zip(wanted, paths, strict=True))
    assert [model.size_bytes for model in found] == [90_000, 90_000, 150_000]
    assert [cache.find(model) for model in wanted] == paths
    assert cache.find(HubModel(repository)) == paths[1]
    assert cache.find(HubModel(repository, file="model-Q8_0.gguf")) == paths[2]
    assert cache.find(HubModel(repository, "Q8_0", revision=fake_hub.commit)) == paths[2]
    assert cache.find(HubModel(repository, "Q8_0", revision="elsewhere")) is None
    assert cache.find(HubModel("user/other")) is None


def test_a_file_that_no_quantization_tells_from_others_has_its_name(fake_hub):
    fake_hub.files |= {"other-Q8_0.gguf": b"other", "plain.gguf": b"plain"}
    for name in ("model-Q8_0.gguf", "other-Q8_0.gguf", "plain.gguf"):
        download(HubModel(fake_hub.repository, file=name))
    assert [str(model.source).removeprefix("hf.co/user/model-GGUF") for model in cache.installed()] == [
        "/other-Q8_0.gguf",
        "/plain.gguf",
        ":Q8_0",
    ]


def test_removing_frees_the_bytes_and_leaves_the_rest(fake_hub):
    folder = cache.repository_folder(fake_hub.repository)
    for quantization in ("Q8_0", "Q4_K_M", "F16"):
        download(HubModel(fake_hub.repository, quantization))
    for quantization, size in (("Q8_0", 150_000), ("F16", 90_000), ("Q4_K_M", 90_000)):
        wanted = HubModel(fake_hub.repository, quantization)
        before = sum(path.stat().st_size for path in (folder / "blobs").iterdir())
        [model] = [model for model in cache.installed() if model.source == wanted]
        assert cache.remove(model) == size
        assert cache.find(wanted) is None
        left = sum(path.stat().st_size for path in (folder / "blobs").iterdir()) if folder.exists() else 0
        assert left == before - size
    assert not folder.exists() and not list((cache.hub_folder() / ".locks").iterdir())


def test_removing_takes_every_version_and_keeps_what_another_name_needs(fake_hub, model):
    fake_hub.files["copy-Q4_0.gguf"] = fake_hub.files["model-Q8_0.gguf"]  # the same bytes: one blob
    download(model)
    copy = download(HubModel(fake_hub.repository, "Q4_0"))
    fake_hub.commit = "f" * 40
    fake_hub.files["model-Q8_0.gguf"] = b"newer" * 100
    download(model)
    [found] = [found for found in cache.installed() if found.source == model]
    assert cache.remove(found) == 500
    assert cache.find(model) is None
    assert copy.read_bytes() == fake_hub.files["copy-Q4_0.gguf"]


def test_a_cache_without_links_works_too(fake_hub, model):
    path = download(model)
    blob = path.resolve()
    path.unlink()
    shutil.move(blob, path)
    [found] = cache.installed()
    assert cache.remove(found) == 150_000
    assert cache.installed() == []


def test_bytes_in_the_shared_store_stay_there(fake_hub, model):
    path = download(model)
    blob = path.resolve()
    store = cache.hub_folder() / "blobs" / "ab" / ("ab" * 32)
    store.parent.mkdir(parents=True)
    shutil.move(blob, store)
    blob.symlink_to(store)
    [found] = cache.installed()
    assert found.size_bytes == 150_000
    assert cache.remove(found) == 0
    assert store.exists() and cache.installed() == []


def test_a_file_elsewhere_that_a_link_leads_to_stays(fake_hub, model, tmp_path):
    path, own = download(model), tmp_path / "own.gguf"
    shutil.move(path.resolve(), own)
    path.unlink()
    path.symlink_to(own)
    [found] = cache.installed()
    assert cache.remove(found) == 0
    assert own.exists() and cache.installed() == []


def test_a_cache_with_rubbish_in_it(home):
    root = cache.hub_folder()
    (root / "models--user--empty").mkdir(parents=True)
    (root / "models--no-snapshots--x" / "refs").mkdir(parents=True)
    (root / "models--file--x").parent.mkdir(exist_ok=True)
    (root / "models--file--x").write_text("")
    (root / "models--u--r" / "snapshots" / "c" / "dir-Q8_0.gguf").mkdir(parents=True)
    (root / "models--u--r" / "snapshots" / "c" / "empty-Q8_0.gguf").write_bytes(b"")
    (root / "models--u--r" / "refs").mkdir()
    (root / "models--u--r" / "refs" / "main").write_bytes(b"\xff\xfe")
    (home / "x-Q8_0.gguf").write_bytes(b"GGUF")
    (root / "models--u--r" / "refs" / "v2").write_text(str(home))
    for number, url in enumerate(("http://[", "", "\0")):
        folder = cache.web_folder() / str(number)
        folder.mkdir(parents=True)
        (folder / cache.URL_FILE).write_text(url)
        (folder / "model.gguf").write_bytes(b"GGUF")
    assert cache.find(HubModel("u/r", "Q8_0", revision="v2")) is None
    assert cache.installed() == []
    for repository in ("user/empty", "no-snapshots/x", "file/x", "u/r"):
        assert cache.find(HubModel(repository, "Q8_0")) is None
