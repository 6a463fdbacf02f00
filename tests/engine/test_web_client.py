"""Proxies and certificates of the environment that cannot be used."""

from importlib.util import find_spec

import pytest
from huggingface_hub.utils import close_session

from engine.catalog import hub
from engine.errors import UsageError
from engine.peers.http import client


@pytest.mark.parametrize(
    "name, value, says",
    [
        ("ALL_PROXY", "socks5://127.0.0.1:9", "SOCKS proxy.*socksio"),
        ("SSL_CERT_FILE", "/nowhere/certificates.pem", "certificates of SSL_CERT_FILE"),
    ],
)
def test_they_are_named(monkeypatch, name, value, says):
    if name == "ALL_PROXY" and find_spec("socksio"):
        pytest.skip("socksio is installed")
    monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match=says):
        client("https://example.org")
    close_session()
    with pytest.raises(UsageError, match=says):
        hub.http_errors()
