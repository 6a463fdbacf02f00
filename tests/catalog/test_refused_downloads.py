"""Downloads that fail: what is said of it."""

import json
from pathlib import Path

import pytest

from engine.catalog import cache, hub
from engine.catalog.downloads import download
from engine.catalog.hub import DownloadError
from engine.catalog.names import HubModel
from engine.catalog.progress import Cancelled
from engine.errors import ModelFileError
from tests.catalog.fake_hub import COMMIT, FakeHub
from tests.catalog.test_downloads import blob, is_right


def test_a_wrong_hash_is_never_taken(fake_hub, model):
    good = fake_hub.files["model-Q8_0.gguf"]
    fake_hub.sent["model-Q8_0.gguf"] = b"X" + good[1:]
    with pytest.raises(DownloadError, match="arrived damaged twice: its hash is"):
        download(model)
    assert cache.find(model) is None
    assert not list((cache.repository_folder(fake_hub.repository) / "blobs").iterdir())
    fake_hub.sent.clear()
    assert is_right(download(model), fake_hub, "model-Q8_0.gguf")


@pytest.mark.parametrize("change", [lambda good: good[:-10], lambda good: good + b"more"])
def test_a_wrong_size_is_never_taken(fake_hub, model, change):
    fake_hub.sent["model-Q8_0.gguf"] = change(fake_hub.files["model-Q8_0.gguf"])
    with pytest.raises(DownloadError, match="damaged twice: the server sends"):
        download(model)
    assert cache.find(model) is None


def test_a_part_that_was_damaged_on_disk_is_fetched_again(fake_hub, model):
    incomplete = Path(f"{blob(fake_hub, 'model-Q8_0.gguf')}.incomplete")
    incomplete.parent.mkdir(parents=True)
    for left in (b"\0" * 70_000, b"\0" * 150_000, b"\0" * 200_000):  # too short, as long, too long
        incomplete.write_bytes(left)
        path = download(model)
        assert is_right(path, fake_hub, "model-Q8_0.gguf")
        path.resolve().unlink()


def test_a_damaged_file_in_the_cache_is_mended(fake_hub, model):
    path = download(model)
    for damage in (b"short", b"\0" * path.stat().st_size):
        path.resolve().write_bytes(damage)
        assert is_right(download(model), fake_hub, "model-Q8_0.gguf")


def test_a_link_in_the_cache_that_leads_nowhere_is_no_model(fake_hub, model):
    path = download(model)
    path.resolve().unlink()
    assert cache.find(model) is None and cache.installed() == []
    assert is_right(download(model), fake_hub, "model-Q8_0.gguf")


@pytest.mark.parametrize("statuses", [[500], [502, 503, 504], [(429, {"Retry-After": "0"})], [408, 429]])
def test_a_busy_server_is_asked_again(fake_hub, model, statuses):
    fake_hub.answers.extend(statuses)
    fake_hub.api_answers.extend(statuses)
    assert is_right(download(model), fake_hub, "model-Q8_0.gguf")


@pytest.mark.parametrize(
    "status, sentence",
    [
        (500, "failed to deliver"),
        ((429, {"Retry-After": "0"}), "The hub has received too many requests"),
        (404, "does not exist, or it is private"),
        (401, "does not exist, or it is private"),
        (403, "is gated"),
    ],
)
def test_a_server_that_refuses_is_given_up_with_a_sentence(fake_hub, model, status, sentence):
    for answers in (fake_hub.answers, fake_hub.api_answers):
        answers.extend([status] * 50)
        with pytest.raises(DownloadError, match=sentence) as caught:
            download(model)
        assert caught.value.hint.endswith((".", "`."))
        answers.clear()


def test_a_wait_that_the_server_asks_for_is_bounded_and_can_be_stopped(fake_hub, model):
    fake_hub.answers.append((429, {"Retry-After": "100000"}))
    notes = []

    def told(progress):
        notes.append(progress.note)

    with pytest.raises(Cancelled):
        download(model, told, cancelled=lambda: "interrupted; trying again in 60 s" in notes)


def test_a_gated_model_says_what_to_do(fake_hub, model):
    fake_hub.gated = "hf_secret"
    with pytest.raises(DownloadError, match="is gated: its owner must let you in") as caught:
        download(model)
    assert "HF_TOKEN" in caught.value.hint


def test_no_network(fake_hub, model, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DownloadError, match=r"The hub \(http://127.0.0.1:9\) cannot be reached"):
        download(model)


def test_offline_mode(fake_hub, model, monkeypatch):
    path = download(model)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert cache.find(model) == path
    with pytest.raises(DownloadError, match="HF_HUB_OFFLINE forbids"):
        download(HubModel(fake_hub.repository, "Q4_K_M"))


EVIL = b'{"id": "a/b", "sha": "../../../../evil", "siblings": []}'


def _with_file(**changes):
    """The hub's answer with one file, in which something is wrong."""
    sibling = {"rfilename": "model-Q8_0.gguf", "size": 5, "blobId": "0" * 40} | changes
    return json.dumps({"id": FakeHub.repository, "sha": COMMIT, "siblings": [sibling]}).encode()


def test_what_is_no_hub(fake_hub, model):
    for answer in (
        b"<html>Log in</html>",
        b"[]",
        b'{"siblings": 5}',
        b'{"sha": null, "siblings": [{}]}',
        b"[" * 200_000,
        _with_file(size="many"),
        _with_file(size=-1),
        EVIL,
    ):
        fake_hub.info = lambda answer=answer: answer
        with pytest.raises(DownloadError, match="does not answer as the hub does"):
            download(model)


@pytest.mark.parametrize(
    "wanted, sentence",
    [
        (HubModel(FakeHub.repository, "Q6_K"), "user/model-GGUF has no Q6_K"),
        (HubModel(FakeHub.repository, "Q4_0_4_4"), "Q4_0_4_4 is of a type that orin-chat does not run"),
        (HubModel(FakeHub.repository, file="other.gguf"), "has no other.gguf"),
        (HubModel("user/nothing"), "does not exist, or it is private"),
        (HubModel(FakeHub.repository, revision="v9"), "names a revision that does not exist"),
        (HubModel("user/" + "x" * 200), "cannot be the name of a repository"),
    ],
)
def test_what_is_not_there(fake_hub, wanted, sentence):
    with pytest.raises(Exception, match=sentence) as caught:
        download(wanted)
    assert caught.value.hint or "cannot be the name" in sentence


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"size": 0}, "is empty on the hub"),
        ({"rfilename": "\ud800-Q8_0.gguf"}, "holds no GGUF model"),
        ({"rfilename": "\x1b[31m-Q8_0.gguf"}, "holds no GGUF model"),
    ],
)
def test_files_that_cannot_be_models(fake_hub, model, changes, sentence):
    fake_hub.info = lambda: _with_file(**changes)
    with pytest.raises(ModelFileError, match=sentence):
        download(model)


def test_a_server_that_leads_nowhere_is_asked_once(fake_hub, model):
    fake_hub.answers.extend([(302, {"Location": "file:///etc/passwd"})] * 9)
    with pytest.raises(DownloadError, match="cannot be reached"):
        download(model)
    assert len(fake_hub.answers) == 8


def test_no_wait_is_silent_for_long(fake_hub, model):
    fake_hub.api_answers.extend([(429, {"Retry-After": "9" * 20})] * 9)
    with pytest.raises(DownloadError, match="too many requests"):
        download(model)
    assert len(fake_hub.api_answers) == 8


def test_what_the_hub_states_is_bounded(fake_hub, model, monkeypatch):
    """It could take all memory, or be sent a byte at a time for ever."""
    fake_hub.answers.append((404, {"Content-Encoding": "gzip"}))  # of an error only the head counts
    with pytest.raises(DownloadError, match="does not exist"):
        download(model)
    fake_hub.api_answers.append((200, {"Content-Encoding": "gzip"}))
    for most_bytes in (hub.MOST_BYTES, 100):
        monkeypatch.setattr(hub, "MOST_BYTES", most_bytes)
        with pytest.raises(DownloadError, match="does not answer as the hub does"):
            download(model)
    fake_hub.pause_s = 0.3
    monkeypatch.setattr(hub, "ANSWER_S", 0.05)
    with pytest.raises(DownloadError, match=r"has not answered within 0 s"):
        download(model)


def test_a_redirect_without_end_and_one_to_an_address_that_is_none(fake_hub, model):
    for where, says in (
        ("/user/model-GGUF/resolve/main/model-Q8_0.gguf", "too often"),
        ("http://[::1", "is none"),
    ):
        fake_hub.answers.clear()
        fake_hub.answers.extend([(302, {"Location": where})] * 99)
        with pytest.raises(DownloadError, match=says):
            download(model)
        assert len(fake_hub.answers) > 70


def test_names_that_lead_out_of_the_cache_are_not_followed(fake_hub):
    fake_hub.files = {"../../evil-Q8_0.gguf": b"evil", "/etc/evil-Q8_0.gguf": b"evil"}
    with pytest.raises(ModelFileError, match="holds no GGUF model"):
        download(HubModel(fake_hub.repository, "Q8_0"))
    with pytest.raises(ModelFileError, match="holds no GGUF model"):
        download(HubModel(fake_hub.repository, file="../../evil-Q8_0.gguf"))


def test_an_architecture_that_cannot_run_is_refused_before_the_download(fake_hub, model):
    fake_hub.architecture = "arctic"
    with pytest.raises(ModelFileError, match="of the architecture arctic"):
        download(model)
    assert all(path.startswith("/api/") for path in fake_hub.paths())
