"""The server in this process, over a scripted engine or a real one."""

import json

import httpx
import pytest

from app.serve import http
from app.serve.routes import application
from app.serve.service import ModelFile, Service
from tests import generated_model
from tests.app.fake_engine import READY, FakeEngine

TOOL_TEMPLATE = """\
{%- for tool in tools or () %}{{ tool.type }}{% endfor -%}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or () %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif -%}
"""
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
HELLO = {"messages": [{"role": "user", "content": "Hello"}]}


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("served") / "tiny.gguf"
    return generated_model.write(path, architecture="qwen3", template=TOOL_TEMPLATE)


@pytest.fixture(scope="session")
def model_file(model_path):
    return ModelFile.read(model_path)


@pytest.fixture
def sent(monkeypatch):
    """The parts of slow and streamed answers, as they are sent."""
    parts, part = [], http._part
    monkeypatch.setattr(http, "_part", lambda data, **how: parts.append(data) or part(data, **how))
    return parts


@pytest.fixture
def served(model_file):
    """`served(engine, key=…, parallel=…)`: a client of a server in this process, and the server's Service."""

    def make(engine=None, key="", **fields):
        handled = []
        service = Service(
            engine or FakeEngine(),
            **{"model": "tiny", "file": model_file, "ready": READY, "on_handled": handled.append} | fields,
        )
        transport = httpx.ASGITransport(application(service, key))
        client = httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1:8080")
        service.handled = handled
        return client, service

    return make


async def events(client, path, body):
    """The objects of a stream."""
    response = await client.post(path, json={"stream": True, **body})
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    *lines, done = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert done == "[DONE]"
    return [json.loads(line) for line in lines]


def error(response):
    body = response.json()["error"]
    assert set(body) == {"message", "type", "param", "code"}
    return body
