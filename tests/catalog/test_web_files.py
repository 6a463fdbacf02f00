"""Downloads from other addresses than the hub's."""

from base64 import b64encode

import pytest

from engine.catalog import cache
from engine.catalog.downloads import download
from engine.catalog.hub import DownloadError
from engine.catalog.names import WebFile
from engine.errors import ModelFileError, UsageError
from tests.generated_model import write


@pytest.fixture
def web(fake_hub, tmp_path):
    fake_hub.files = {"tiny.gguf": write(tmp_path / "tiny.gguf").read_bytes()}
    return WebFile(f"{fake_hub.url.replace('127.0.0.1', 'localhost')}/web/tiny.gguf")


def test_a_file_from_another_address(fake_hub, web, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    path = download(web)
    assert path.read_bytes() == fake_hub.files["tiny.gguf"]
    assert cache.find(web) == path
    [found] = cache.installed()
    assert (found.source, found.path) == (web, path)
    assert not any("Authorization" in headers for *_, headers in fake_hub.requests)
    assert cache.remove(found) == len(fake_hub.files["tiny.gguf"])
    assert cache.installed() == []


def test_a_password_comes_from_netrc_and_only_to_its_own_host(fake_hub, web, home):
    (home / ".netrc").write_text("machine localhost login me password secret")
    (home / ".netrc").chmod(0o600)
    path = download(web)
    sent = {headers.get("Authorization") for *_, headers in fake_hub.requests}
    assert sent == {f"Basic {b64encode(b'me:secret').decode()}"}
    assert "secret" not in (path.parent / cache.URL_FILE).read_text()


def test_its_download_goes_on_where_it_ended_if_it_is_the_same_file(fake_hub, web):
    size = len(fake_hub.files["tiny.gguf"])
    fake_hub.cuts.extend([size // 2, *[0] * 20])
    with pytest.raises(DownloadError, match="cannot be reached"):
        download(web)
    fake_hub.cuts.clear()
    fake_hub.requests.clear()
    assert download(web).read_bytes() == fake_hub.files["tiny.gguf"]
    *_, resumed = [headers for method, _, headers in fake_hub.requests if method == "GET"]
    assert 0 < int(resumed["Range"].removeprefix("bytes=").rstrip("-")) <= size // 2


def test_its_download_starts_over_if_it_is_another_file(fake_hub, web, tmp_path):
    fake_hub.cuts.extend([len(fake_hub.files["tiny.gguf"]) // 2, *[0] * 20])
    with pytest.raises(DownloadError, match="cannot be reached"):
        download(web)
    fake_hub.cuts.clear()
    fake_hub.files["tiny.gguf"] = write(tmp_path / "other.gguf", seed=5).read_bytes()
    assert download(web).read_bytes() == fake_hub.files["tiny.gguf"]


@pytest.mark.parametrize("version", [b"\xff\xfe", "\u00e9".encode(), b"a\nHost: b"])
def test_its_download_starts_over_if_the_note_of_its_version_is_damaged(fake_hub, web, version):
    fake_hub.cuts.extend([len(fake_hub.files["tiny.gguf"]) // 2, *[0] * 20])
    with pytest.raises(DownloadError, match="cannot be reached"):
        download(web)
    fake_hub.cuts.clear()
    [note] = cache.web_folder().glob("*/*.version")
    note.write_bytes(version)
    assert download(web).read_bytes() == fake_hub.files["tiny.gguf"]


def test_two_versions_of_a_file_are_never_joined(fake_hub, web, tmp_path):
    test_its_download_starts_over_if_it_is_another_file(fake_hub, web, tmp_path)
    cache.find(web).unlink()
    fake_hub.files["tiny.gguf"] = write(tmp_path / "third.gguf", seed=7).read_bytes()
    fake_hub.checks_version = False
    test_its_download_starts_over_if_it_is_another_file(fake_hub, web, tmp_path)


def test_a_mirror_whose_address_is_none(model, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://[")
    with pytest.raises(UsageError, match="HF_ENDPOINT is no address"):
        download(model)


def test_what_is_no_model_is_not_kept(fake_hub, web):
    fake_hub.files["tiny.gguf"] = b"<!doctype html><p>Log in"
    with pytest.raises(ModelFileError, match="is a web page"):
        download(web)
    assert cache.find(web) is None


def test_an_address_that_has_nothing(fake_hub, web):
    with pytest.raises(DownloadError, match="does not exist, or it is private"):
        download(WebFile(f"{web.url}.not"))
    with pytest.raises(DownloadError, match=r"http://127.0.0.1:9/x.gguf cannot be reached"):
        download(WebFile("http://127.0.0.1:9/x.gguf"))
    assert cache.installed() == []


@pytest.mark.parametrize(
    ("status", "sentence"),
    [
        (401, "is private"),
        (403, "is private"),
        (404, "is private"),
        (429, "The server has received"),
        (500, "failed"),
    ],
)
def test_sentences_on_other_addresses_do_not_speak_of_the_hub(fake_hub, web, status, sentence):
    fake_hub.answers.extend([(status, {"Retry-After": "0"})] * 50)
    with pytest.raises(DownloadError, match=sentence) as caught:
        download(web)
    text = f"{caught.value.message} {caught.value.hint}".replace(web.url, "")
    assert "hub" not in text and "HF_" not in text


def test_an_address_is_stored_and_shown_without_secrets(fake_hub, home, tmp_path):
    fake_hub.files["m.gguf"] = write(tmp_path / "m.gguf").read_bytes()
    address = f"{fake_hub.url}/web/m.gguf"
    source = WebFile(f"{address.replace('//', '//user:secret@')}?key=secret")
    path = download(source)
    [installed] = cache.installed()
    assert (installed.path, str(installed.source), str(source)) == (path, address, address)
    assert cache.find(source) == cache.find(WebFile(address)) == path
    assert (path.parent / cache.URL_FILE).stat().st_mode & 0o777 == 0o600
    assert not [each for each in home.rglob("*") if each.is_file() and b"secret" in each.read_bytes()]
    fake_hub.answers.extend([404] * 2)
    with pytest.raises(DownloadError) as failed:
        download(WebFile(f"{fake_hub.url.replace('//', '//user:secret@')}/web/none.gguf?key=secret"))
    assert "secret" not in str(failed.value) and "none.gguf" in str(failed.value)
