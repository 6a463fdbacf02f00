"""Paths and methods: what other servers have, and what is not there."""

import pytest

from tests.app.serve.conftest import HELLO, error


@pytest.mark.parametrize(
    "method, path, allowed",
    [
        ("GET", "/v1/chat/completions", {"POST"}),
        ("POST", "/v1/models", {"GET", "HEAD"}),
        ("PUT", "/v1/responses/resp_1", {"GET", "HEAD", "DELETE"}),
    ],
)
async def test_a_wrong_method_is_told_the_right_ones(served, method, path, allowed):
    client, _ = served()
    response = await client.request(method, path)
    assert response.status_code == 405 and set(response.headers["allow"].split(", ")) == allowed
    assert all(one in error(response)["message"] for one in allowed)


async def test_slashes_around_a_path_change_nothing(served):
    client, _ = served()
    assert (await client.get("http://localhost//v1/models")).json()["data"][0]["id"] == "tiny"
    assert (await client.get("/v1/models/")).json()["data"][0]["id"] == "tiny"
    assert (await client.post("/v1/chat/completions/", json=HELLO)).status_code == 200
    assert (await client.head("/")).status_code == 200
    assert "orin-chat is running" in (await client.get("/v1/")).text


@pytest.mark.parametrize(
    "path, said",
    [
        ("/v1/audio/transcriptions", "no sound"),
        ("/v1/images/generations", "no pictures"),
        ("/batches/batch_1", "no batches"),
        ("/v1/chat/completions/chatcmpl-1", "keeps no completed chats"),
    ],
)
async def test_what_is_not_done_is_said(served, path, said):
    client, _ = served()
    response = await client.post(path, json={"model": "tiny"})
    assert response.status_code == 404 and said in error(response)["message"]
    assert error(response)["type"] == "not_supported_error"


async def test_what_is_not_done_is_said_as_anthropic_has_it(served):
    client, _ = served()
    response = await client.post("/v1/messages/batches", json={"requests": []})
    body = response.json()
    assert (
        response.status_code == 404 and body["type"] == "error" and body["error"]["type"] == "not_found_error"
    )
    assert "batches" in body["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/responses", "/", "/v1/realtime"])
async def test_there_are_no_web_sockets(served, path):
    """Codex CLI goes on with a plain request at once, by this status alone."""
    client, _ = served()
    headers = {"Connection": "Upgrade", "Upgrade": "WebSocket", "Sec-WebSocket-Version": "13"}
    response = await client.get(path, headers=headers)
    assert response.status_code == 426 and "post the request" in error(response)["message"]
    assert (await client.get("/health", headers={"Connection": "Upgrade", "Upgrade": "h2c"})).is_success
    assert (await client.post("/lora-adapters", json=[], headers=headers)).is_success  # a proxy's header


async def test_small_paths_of_other_servers(served):
    client, _ = served()
    assert (await client.get("/ping")).status_code == 200
    assert (await client.get("/version")).json()["version"]
    assert (await client.get("/lora-adapters")).json() == []


async def test_ollamas_models_stay_as_they_are(served):
    client, _ = served()
    for name in ("tiny", "tiny:latest"):
        assert (await client.post("/api/pull", json={"model": name})).json() == {"status": "success"}
    assert (await client.post("/api/pull", json={"name": "other"})).status_code == 404
    for method, path in (
        ("POST", "create"),
        ("POST", "copy"),
        ("DELETE", "delete"),
        ("POST", "blobs/sha256:0"),
    ):
        response = await client.request(method, f"/api/{path}", json={"model": "tiny"})
        assert response.status_code == 501 and "models" in response.json()["error"]
