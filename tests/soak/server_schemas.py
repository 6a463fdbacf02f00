"""Requests after the server's own OpenAPI description, that keep to it or do not (schemathesis makes them)."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import httpx
from hypothesis import strategies as st

from app.serve.openapi import description
from app.serve.routes import application
from app.serve.service import ModelFile, Service
from tests import generated_model
from tests.app.fake_engine import READY, FakeEngine
from tests.soak.counts import Counts
from tests.soak.drawn import drawn

_REFUSED = {400, 401, 404, 405, 413, 501}


def run(tries: int, number: int = 0) -> Counts:
    """A request is answered, or refused in a sentence with a status that says whose fault it is."""
    import schemathesis  # takes a second
    from schemathesis import GenerationMode

    counts = Counts("requests after the server's schema, and against it")
    schema = schemathesis.openapi.from_dict(description())
    cases = st.one_of(
        operation.ok().as_strategy(generation_mode=mode)
        for operation in schema.get_all_operations()
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)
    )
    with tempfile.TemporaryDirectory() as folder:
        file = ModelFile.read(generated_model.write(Path(folder, "tiny.gguf"), architecture="qwen3"))
    service = Service(FakeEngine(), "tiny", file, ready=READY)
    transport = httpx.ASGITransport(application(service))
    loop = asyncio.new_event_loop()
    client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")

    @drawn(tries, number, cases)
    def ask(case: schemathesis.Case) -> None:
        sent = case.as_transport_kwargs()
        with counts.trying():
            response = loop.run_until_complete(
                client.request(
                    case.method,
                    case.formatted_path,
                    json=sent.get("json"),
                    content=sent.get("data") if "json" not in sent else None,
                )
            )
            if response.status_code != 200:
                assert response.status_code in _REFUSED, response.text
                said = response.json()["error"]
                assert (said if isinstance(said, str) else said["message"]).endswith(".")
            assert service.open == 0
            counts.survived["answered" if response.status_code == 200 else "refused"] += 1

    ask()
    loop.run_until_complete(client.aclose())
    loop.close()
    return counts
