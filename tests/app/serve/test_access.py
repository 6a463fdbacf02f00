"""Who may ask."""

import pytest

from app.serve.access import is_loopback
from tests.app.serve.conftest import HELLO, error

CHAT = "/v1/chat/completions"


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8080", 200),
        ("localhost", 200),
        ("LOCALHOST.:1", 200),
        ("[::1]:8080", 200),
        ("127.9.9.9", 200),
        ("evil.example:8080", 403),
        ("localhost.evil.example", 403),
        ("evil.example\\@localhost", 403),
        ("localhost#.evil.example", 403),
        ("localhost/.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("192.168.0.9:8080", 403),
        ("[::1", 403),
        ("", 403),
    ],
)
async def test_a_page_with_another_name_is_refused(served, host, status):
    """DNS rebinding: the page's own name leads to this machine."""
    client, service = served()
    for path, ask in (
        ("/v1/models", client.get),
        (CHAT, lambda path, **k: client.post(path, json=HELLO, **k)),
    ):
        response = await ask(path, headers={"Host": host})
        assert response.status_code == status
    if status == 403:
        assert error(response)["code"] == "wrong_host" and not service.engine.requests


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        ("http://localhost:3000", 200),
        ("http://[::1]", 200),
        ("app://obsidian.md", 200),
        ("chrome-extension://jfgfiigpkhlkbnfnbobbkinehhfdhndo", 200),
        ("vscode-webview://1kq8", 200),
        ("https://evil.example", 403),
        ("https://app://evil.example", 403),
        ("http://evil.example\\@localhost", 403),
        ("data://localhost", 403),
        ("null", 403),
    ],
)
async def test_a_page_of_another_site_is_refused(served, origin, status):
    client, _ = served()
    response = await client.post(CHAT, json=HELLO, headers={"Origin": origin})
    assert response.status_code == status
    assert response.headers.get("access-control-allow-origin") == (origin if status == 200 else None)
    two = [("Origin", "http://localhost"), ("Origin", origin)]
    assert (await client.post(CHAT, json=HELLO, headers=two)).status_code == status
    asked_before = await client.options(CHAT, headers={"Origin": origin})
    assert asked_before.status_code == (204 if status == 200 else 403)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": "Bearer wrong"}, 401),
        ({"Authorization": "Basic s3cret"}, 401),
        ({"Authorization": "Bearer s3cre"}, 401),
        ({"Authorization": "bearer s3cret"}, 200),
        ({"X-Api-Key": "s3cret"}, 200),
        ({"X-Api-Key": "caf\u00e9".encode()}, 401),
    ],
)
async def test_a_key(served, headers, status):
    client, service = served(key="s3cret")
    for path in ("/v1/models", "/metrics", CHAT):
        request = (
            client.post(path, json=HELLO, headers=headers)
            if path == CHAT
            else client.get(path, headers=headers)
        )
        response = await request
        assert response.status_code == status and "s3cret" not in response.text
    assert len(service.engine.requests) == (status == 200)
    if status == 401:
        assert (
            error(response)["code"] == "invalid_api_key" and response.headers["www-authenticate"] == "Bearer"
        )


async def test_a_key_in_an_address_counts_where_google_has_it(served):
    """It is not read elsewhere, and a key in a header comes first."""
    client, service = served(key="s3cret")
    paths = {"/v1beta/models": 200, "/v1/models": 401, "/metrics": 401}
    for path, status in paths.items():
        assert (await client.get(f"{path}?key=s3cret")).status_code == status, path
    wrong = {"X-Goog-Api-Key": "wrong"}
    assert (await client.get("/v1beta/models?key=s3cret", headers=wrong)).status_code == 401
    for query in ("key=wrong", f"key=s3cret{'&a=1' * 16}"):
        assert (await client.get(f"/v1beta/models?{query}")).status_code == 401
    asked = {"contents": [{"parts": [{"text": "Hi"}]}]}
    answer = await client.post("/v1beta/models/tiny:generateContent?key=s3cret", json=asked)
    assert answer.status_code == 200 and "s3cret" not in repr(service.handled)


async def test_a_key_that_is_not_ascii(served):
    client, _ = served(key="schl\u00fcssel,\udcff")
    given = [({"Authorization": "Bearer schl\u00fcssel".encode()}, ""), ({"X-Api-Key": b"\xff"}, "")]
    given += [({}, "?key=schl%C3%BCssel")]
    for headers, query in given:
        answer = await client.get(f"/v1beta/models{query}", headers=headers)
        assert answer.status_code == 200, (headers, query)


async def test_two_statements_of_a_length_are_refused(served):
    client, service = served(key="s3cret")
    headers = {"X-Api-Key": "s3cret", "Transfer-Encoding": "chunked", "Content-Length": "2"}
    response = await client.post(CHAT, json=HELLO, headers=headers)
    assert response.status_code == 400 and response.headers["connection"] == "close"
    assert not service.engine.requests


async def test_with_a_key_any_name_and_page_will_do(served):
    client, _ = served(key="s3cret")
    headers = {"Host": "chat.example", "Origin": "https://app.example"}
    assert (await client.get("/health", headers=headers)).status_code == 200
    refused = await client.get("/v1/models", headers=headers)
    assert (
        refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "https://app.example"
    )
    asked_before = await client.options(CHAT, headers=headers)
    assert "Authorization" in asked_before.headers["access-control-allow-headers"]


def test_loopback():
    assert is_loopback("127.0.0.1") and is_loopback("::1") and not is_loopback("0.0.0.0")
    assert not is_loopback("::") and not is_loopback("")


async def test_clients_with_different_keys_are_told_apart(served):
    """For turns, and on the screen. A key itself is shown nowhere."""
    asked = lambda client, key: client.post(CHAT, json=HELLO, headers={"X-Api-Key": key})
    alike = ["key68", "key130"]  # in the first four digits
    for keys, given in (
        ("", ["one", "two", ""]),
        ("one, two", ["one", "two"]),
        (", ".join(alike), alike),
        ("one", ["one"]),
    ):
        client, service = served(key=keys)
        for key in given:
            assert (await asked(client, key)).status_code == 200
        names = [request.client for request in service.engine.requests]
        assert len({*names}) == len(given) and all(name.startswith("127.0.0.1") for name in names)
        assert "one" not in repr(names)
        assert (names[-1] == "127.0.0.1") is ("," not in keys)  # where there is one key, it tells nothing
    assert (await asked(client, "one, two")).status_code == 401
