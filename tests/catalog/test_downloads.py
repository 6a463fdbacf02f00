"""Downloads, against a server that fails in every way that networks do."""

import errno
import hashlib
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from engine.catalog import cache, hub, transfer
from engine.catalog.downloads import download
from engine.catalog.hub import RETRIES, DownloadError
from engine.catalog.names import HubModel, WebFile
from engine.catalog.progress import Cancelled
from tests.catalog.fake_hub import FakeHub
from tests.thorough import THOROUGH, thorough
from tests.waiting import wait_until


def blob(hub, name):
    return cache.repository_folder(hub.repository) / "blobs" / hashlib.sha256(hub.files[name]).hexdigest()


def is_right(path, hub, name):
    return path.read_bytes() == hub.files[name] and path.resolve() == blob(hub, name)


# --- what is fetched, and how it lies ------------------------------------------------------------------


def test_a_file_lies_in_the_cache_as_the_hub_library_puts_it(fake_hub, model):
    path = download(model)
    assert is_right(path, fake_hub, "model-Q8_0.gguf")
    from huggingface_hub import scan_cache_dir, try_to_load_from_cache

    found = try_to_load_from_cache(fake_hub.repository, path.name, cache_dir=cache.hub_folder())
    assert found == str(path)
    [repository] = scan_cache_dir(cache.hub_folder()).repos
    assert repository.repo_id == fake_hub.repository
    assert repository.size_on_disk == len(fake_hub.files[path.name])


def test_the_second_time_only_the_hub_is_asked(fake_hub, model):
    first = download(model)
    fake_hub.requests.clear()
    assert download(model) == first
    assert [path for path in fake_hub.paths() if not path.startswith("/api/")] == []


def test_a_file_that_the_hub_library_fetched_is_not_fetched_again(fake_hub, model):
    from huggingface_hub import hf_hub_download

    theirs = hf_hub_download(
        fake_hub.repository, "model-Q8_0.gguf", cache_dir=cache.hub_folder(), endpoint=fake_hub.url
    )
    fake_hub.requests.clear()
    assert cache.find(model) == Path(theirs)
    assert download(model) == Path(theirs)
    assert [path for path in fake_hub.paths() if path.startswith("/cdn/")] == []


def test_all_parts_of_a_split_model_come(fake_hub):
    path = download(HubModel(fake_hub.repository, "F16"))
    assert path.name == "model-F16-00001-of-00002.gguf"
    second = path.with_name("model-F16-00002-of-00002.gguf")
    assert is_right(second, fake_hub, "big/model-F16-00002-of-00002.gguf")


def test_a_new_version_of_a_file_is_fetched_and_the_old_one_stays(fake_hub, model):
    old = download(model)
    fake_hub.commit = "f" * 40
    fake_hub.files["model-Q8_0.gguf"] = b"newer" * 1000
    new = download(model)
    assert old != new and is_right(new, fake_hub, "model-Q8_0.gguf")
    assert old.exists()
    assert cache.find(model) == new


def test_what_was_begun_of_a_replaced_file_goes_and_what_was_begun_of_others_stays(fake_hub, model):
    blobs = blob(fake_hub, "model-Q8_0.gguf").parent
    other = blob(fake_hub, "big/model-F16-00002-of-00002.gguf").with_suffix(".incomplete")
    blobs.mkdir(parents=True)
    for begun in (other, blobs / f"{'0' * 64}.incomplete", blobs / f"{'1' * 64}.incomplete"):
        begun.write_bytes(b"part")
    locks = cache.hub_folder() / ".locks" / blobs.parent.name
    locks.mkdir(parents=True)
    with hub.lock(str(locks / f"{'1' * 64}.lock"), 1.0):
        download(model)
    assert {path.name[:3] for path in blobs.glob("*.incomplete")} == {other.name[:3], "111"}
    download(model)
    assert [*blobs.glob("*.incomplete")] == [other]


def test_an_address_that_is_none_is_a_sentence(fake_hub):
    with pytest.raises(DownloadError, match="cannot be reached: Invalid"):
        download(WebFile("http://a\x07b/model.gguf"))


def test_a_small_file_kept_in_git_is_verified_by_gits_hash(fake_hub):
    fake_hub.files = {"model.gguf": b"a model"}
    info = FakeHub.info
    fake_hub.info = lambda: (answer := info(fake_hub), answer["siblings"][0].pop("lfs"))[0]
    path = download(HubModel(fake_hub.repository))
    assert path.read_bytes() == b"a model"
    path.resolve().write_bytes(b"a MODEL")
    assert download(HubModel(fake_hub.repository)).read_bytes() == b"a model"


def test_the_token_goes_to_the_hub_and_not_where_it_redirects_to(fake_hub, model, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    fake_hub.gated = "hf_secret"
    download(model)
    sent = {path.split("/")[1]: headers.get("Authorization") for _, path, headers in fake_hub.requests}
    assert sent == {"api": "Bearer hf_secret", "user": "Bearer hf_secret", "cdn": None}


def test_progress_is_told_with_rate_and_time_left(fake_hub, model, monkeypatch):
    monkeypatch.setattr("engine.catalog.progress.REPORT_S", 0.02)
    monkeypatch.setattr("engine.catalog.progress.MIN_RATE_WINDOW_S", 0.05)
    fake_hub.pause_s = 0.01
    told = []
    download(model, told.append)
    total = len(fake_hub.files["model-Q8_0.gguf"])
    assert told[0].note == "asking the hub"
    moving = [progress for progress in told if progress.bytes_per_s]
    assert len(moving) > 3
    assert all(progress.total_bytes == total for progress in moving)
    assert [progress.done_bytes for progress in moving] == sorted(progress.done_bytes for progress in moving)
    assert 0 < moving[-1].bytes_per_s < 5_000_000
    assert moving[0].seconds_left > moving[-1].seconds_left >= 0
    assert told[-1].done_bytes == total


# --- cuts ----------------------------------------------------------------------------------------------


def test_many_random_cuts(fake_hub):
    """Every file is right in the end, and until then nothing takes a part for the whole."""
    most = 100 if THOROUGH else 40
    chance = random.Random(20260801)
    early = []
    rounds = 0
    while fake_hub.cut_count < most:
        rounds += 1
        name = f"model-{rounds}-Q8_0.gguf"
        size = chance.choice([1, 5000, 60_000, 200_000])
        fake_hub.files = {name: chance.randbytes(size)}
        model = HubModel(fake_hub.repository, "Q8_0")
        folder = cache.repository_folder(fake_hub.repository)

        def look(model=model, name=name):
            early.append(cache.find(model) is not None or blob(fake_hub, name).exists())

        fake_hub.on_cut = look
        fake_hub.cuts.extend(chance.randrange(size) for _ in range(chance.randrange(1, 12)))
        fake_hub.ranges = chance.random() < 0.9
        if chance.random() < 0.3:  # the program ends in between, and is started again
            stop_at = fake_hub.cut_count + 2
            try:
                download(model, cancelled=lambda stop_at=stop_at: fake_hub.cut_count >= stop_at)
            except (Cancelled, DownloadError):
                assert cache.find(model) is None
        if chance.random() < 0.2 and (left := list((folder / "blobs").glob("*.incomplete"))):
            left[0].write_bytes(chance.randbytes(left[0].stat().st_size))  # a disk that lost power
        while (path := cache.find(model)) is None:
            try:
                path = download(model)
            except DownloadError as error:
                arrived = [left.stat().st_size for left in (folder / "blobs").glob("*.incomplete")]
                assert ("What was downloaded is kept" in error.hint) == any(arrived)
        assert is_right(path, fake_hub, name)
        fake_hub.cuts.clear()
        cache.remove(next(found for found in cache.installed() if found.path == path))
        assert not folder.exists()
    assert rounds > most // 10 and len(early) >= most and not any(early)


def test_a_cut_costs_only_what_is_missing(fake_hub, model):
    fake_hub.cuts.append(100_000)
    download(model)
    [_, resumed] = [headers for _, path, headers in fake_hub.requests if path.startswith("/cdn/")]
    assert 0 < int(resumed["Range"].removeprefix("bytes=").rstrip("-")) <= 100_000


def test_a_server_that_ignores_ranges_is_believed(fake_hub, model):
    fake_hub.ranges = False
    fake_hub.cuts.append(100_000)
    assert is_right(download(model), fake_hub, "model-Q8_0.gguf")


def test_a_server_that_ignores_ranges_and_always_ends_early_is_given_up(fake_hub, model):
    fake_hub.ranges = False
    fake_hub.cuts.extend([100_000] * 50)
    with pytest.raises(DownloadError, match="cannot be reached"):
        download(model)
    assert len([path for path in fake_hub.paths() if path.startswith("/cdn/")]) <= RETRIES + 2


def test_another_part_than_was_asked_for_is_not_taken(fake_hub, model):
    fake_hub.shift = 4096
    fake_hub.cuts.append(100_000)
    assert is_right(download(model), fake_hub, "model-Q8_0.gguf"), "the second time it comes in one piece"
    (cache.find(model)).resolve().unlink()
    fake_hub.cuts.extend([100_000] * 50)
    with pytest.raises(DownloadError, match="damaged twice: the server sends another part"):
        download(model)
    assert cache.find(model) is None


def test_a_server_that_gives_nothing_is_given_up(fake_hub, model):
    fake_hub.cuts.extend([0] * 50)
    with pytest.raises(DownloadError, match="cannot be reached") as caught:
        download(model)
    assert "kept" not in caught.value.hint, "there is nothing to keep"
    fake_hub.cuts.clear()
    fake_hub.cuts.extend([100_000, *[0] * 50])
    with pytest.raises(DownloadError, match="cannot be reached") as caught:
        download(model)
    assert "What was downloaded is kept for the next try." in caught.value.hint
    assert cache.find(model) is None


def test_without_a_network_nothing_is_kept(fake_hub, model, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DownloadError, match="cannot be reached") as caught:
        download(model)
    assert caught.value.hint == "Check the network, or name a mirror with HF_ENDPOINT."


def test_what_a_killed_program_got_is_kept(fake_hub, model):
    fake_hub.files["model-Q8_0.gguf"] = random.Random(9).randbytes(400_000)
    fake_hub.pause_s = 0.005
    child = subprocess.Popen([sys.executable, "-c", FETCH, str(model)], stderr=subprocess.DEVNULL)
    incomplete = Path(f"{blob(fake_hub, 'model-Q8_0.gguf')}.incomplete")
    wait_until(lambda: incomplete.exists() and incomplete.stat().st_size > 50_000)
    child.send_signal(signal.SIGKILL)
    child.wait()
    kept = incomplete.stat().st_size
    assert cache.find(model) is None
    fake_hub.pause_s = 0
    assert is_right(download(model), fake_hub, "model-Q8_0.gguf")
    *_, resumed = [headers for _, path, headers in fake_hub.requests if path.startswith("/cdn/")]
    assert resumed["Range"] == f"bytes={kept}-"
    assert not incomplete.exists()


FETCH = (
    "import sys; from engine.catalog import downloads, names; downloads.download(names.parse(sys.argv[1]))"
)


@thorough
def test_two_programs_fetch_once(fake_hub, model):
    fake_hub.pause_s = 0.01
    command = [sys.executable, "-c", FETCH, str(model)]
    children = [subprocess.Popen(command) for _ in range(2)]
    assert [child.wait(timeout=120) for child in children] == [0, 0]
    assert len([path for path in fake_hub.paths() if path.startswith("/cdn/")]) == 1


def test_while_another_has_the_lock_its_progress_is_shown_and_one_can_stop(fake_hub, model, monkeypatch):
    monkeypatch.setattr("engine.catalog.progress.REPORT_S", 0.0)
    monkeypatch.setattr(transfer, "LOCK_S", 0.02)
    fake_hub.pause_s = 0.005
    other = threading.Thread(target=download, args=(model,))
    other.start()
    wait_until(lambda: fake_hub.sent_bytes > 20_000)
    notes = []

    def told(progress):
        notes.append(progress.note)

    with pytest.raises(Cancelled):
        download(model, told, cancelled=lambda: notes.count("another program is downloading it") > 2)
    other.join()
    assert cache.find(model)


# --- the disk ------------------------------------------------------------------------------------------


def test_room_is_checked_before_the_download(fake_hub, model, monkeypatch):
    monkeypatch.setattr(transfer, "free_bytes", lambda _: 64 << 20)
    with pytest.raises(DownloadError, match=r"needs 0.07 GB more, and .* has room for 0.07 GB"):
        download(model)
    assert all(path.startswith("/api/") for path in fake_hub.paths())


def test_a_disk_that_fills_up_keeps_what_came(fake_hub, model, monkeypatch):
    room = 60_000
    take = transfer._PartialFile._add

    def until_full(self, block):
        if self.have + len(block) > room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        take(self, block)

    monkeypatch.setattr(transfer._PartialFile, "_add", until_full)
    with pytest.raises(DownloadError, match="The disk is full") as caught:
        download(model)
    assert "kept" in caught.value.hint
    assert cache.find(model) is None
    monkeypatch.setattr(transfer._PartialFile, "_add", take)
    fake_hub.requests.clear()
    assert is_right(download(model), fake_hub, "model-Q8_0.gguf")
    [headers] = [headers for _, path, headers in fake_hub.requests if path.startswith("/cdn/")]
    assert int(headers["Range"].removeprefix("bytes=").rstrip("-")) > 40_000


def test_a_pipe_or_a_device_in_place_of_what_was_begun(fake_hub, model, home):
    """A pipe was waited for, and the device was read for ever."""
    blob = download(model).resolve()
    begun = blob.with_name(f"{blob.name}.incomplete")
    blob.unlink()
    os.mkfifo(begun)
    with pytest.raises(DownloadError, match="cannot be used: No such device"):
        download(model)
    begun.unlink()
    begun.symlink_to("/dev/zero")
    with pytest.raises(DownloadError, match="a pipe or a device, not a file"):
        download(model)


def test_a_cache_that_cannot_be_written(fake_hub, model, home, monkeypatch):
    (home / "file").write_text("")
    monkeypatch.setenv("HF_HUB_CACHE", str(home / "file"))
    with pytest.raises(DownloadError, match="cannot be used: Not a directory"):
        download(model)
