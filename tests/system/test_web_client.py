"""Passwords from netrc; proxies and certificates of the environment that cannot be used."""

from importlib.util import find_spec

import pytest
from huggingface_hub.utils import close_session

from engine.catalog import hub
from engine.errors import UsageError
from engine.peers.http import client
from engine.system.web_client import credentials

NETRC = "machine models.org login me password secret\ndefault login any password other\n"


@pytest.fixture(params=[".netrc", "elsewhere"])
def netrc(home, monkeypatch, request):
    if request.param != ".netrc":
        monkeypatch.setenv("NETRC", str(home / request.param))
    path = home / request.param
    path.write_text(NETRC)
    path.chmod(0o600)
    return path


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://models.org/a.gguf", ("me", "secret")),
        ("http://MODELS.org:8000/v1", ("me", "secret")),
        ("https://other.org/a.gguf", None),
        ("https://you:typed@models.org/a.gguf", None),
        ("not an address", None),
    ],
)
def test_only_the_host_that_is_named_gets_a_password(netrc, url, expected):
    assert credentials(url) == expected


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"machine models.org login me passwrd secret", "line 1 is not valid"),
        (b"\xff\xfe\x00", "it is not a text file"),
    ],
)
def test_a_file_that_cannot_be_read_is_a_sentence_without_what_it_holds(netrc, content, reason):
    netrc.write_bytes(content)
    with pytest.raises(UsageError) as raised:
        credentials("https://models.org")
    assert str(raised.value.message).endswith(f"netrc: {reason}.") or reason in raised.value.message
    assert "secret" not in raised.value.message + raised.value.hint


def test_a_file_that_others_can_read(home):
    (home / ".netrc").write_text(NETRC)
    (home / ".netrc").chmod(0o644)
    with pytest.raises(UsageError, match="too permissive"):
        credentials("https://models.org")


def test_no_file(home, monkeypatch):
    assert credentials("https://models.org") is None
    monkeypatch.setenv("NETRC", str(home))
    with pytest.raises(UsageError, match=f"{home}: Is a directory"):
        credentials("https://models.org")


@pytest.mark.parametrize(
    "name, value, says",
    [
        ("ALL_PROXY", "socks5://127.0.0.1:9", "SOCKS proxy.*socksio"),
        ("SSL_CERT_FILE", "/nowhere/certificates.pem", "certificates of SSL_CERT_FILE"),
    ],
)
def test_a_proxy_or_certificates_that_cannot_be_used_are_named(monkeypatch, name, value, says):
    if name == "ALL_PROXY" and find_spec("socksio"):
        pytest.skip("socksio is installed")
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=says):
        client("https://example.org")
    close_session()
    with pytest.raises(UsageError, match=says):
        hub.http_errors()
