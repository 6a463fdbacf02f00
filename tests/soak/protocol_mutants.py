"""Requests of every protocol of the server, with parts changed, left out or put elsewhere, streamed or not."""

from __future__ import annotations

import asyncio
import copy
import json
import random
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from app.serve.errors import form_of
from app.serve.routes import application
from app.serve.service import ModelFile, Service
from engine.formats.templates.file_templates import FileTemplates
from engine.protocol.events import Event, Failed
from tests import generated_model
from tests.app.fake_engine import SEEING, TOO_LONG, FakeEngine, reply, tokens
from tests.app.serve.conftest import TOOL_TEMPLATE
from tests.soak.counts import Counts

MOST_MS = 1000.0
_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_TOOL = {"name": "get_weather", "description": "Now.", "parameters": _SCHEMA}
_OPENAI_CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Oslo"}'},
}
_PNG = "iVBORw0KGgo="
_URL = f"data:image/png;base64,{_PNG}"
_IMAGE = {"type": "image_url", "image_url": {"url": _URL}}
_INPUT = {"type": "input_image", "image_url": _URL}
_BLOCK = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": _PNG}}
_RESULT = [{"type": "text", "text": "rain"}, _BLOCK]
_OPTIONS = {"temperature": 0.5, "top_k": 3, "seed": 7, "stop": ["\n\n"], "num_predict": 9}
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [_IMAGE, {"type": "text", "text": "Hello"}]},
            {"role": "assistant", "content": None, "tool_calls": [_OPENAI_CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        ],
        "tools": [{"type": "function", "function": _TOOL}],
        "tool_choice": {"type": "function", "function": {"name": "get_weather"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}},
        "n": 2, "logprobs": True, "top_logprobs": 3, "logit_bias": {"5": -3.5}, "max_tokens": 9,
    },
    "/v1/completions": {"prompt": ["Hello", "Good"], "logprobs": 2, "best_of": 3, "n": 2, "stop": "."},
    "/v1/messages": {
        "model": "tiny", "max_tokens": 9, "system": [{"type": "text", "text": "Be brief."}],
        "messages": [
            {"role": "user", "content": [_BLOCK, {"type": "text", "text": "Hello"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "Hm.", "signature": "x"},
                    {"type": "tool_use", "id": "c1", "name": "get_weather", "input": {"city": "Oslo"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": _RESULT}
                ],
            },
        ],
        "tools": [{"name": "get_weather", "description": "Now.", "input_schema": _SCHEMA}],
        "tool_choice": {"type": "tool", "name": "get_weather"}, "thinking": {"type": "enabled"},
        "stop_sequences": ["\n\n"], "metadata": {"user_id": '{"session_id": "abc"}'},
    },
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "Hello"}], "system": "Be brief."},
    "/v1/responses": {
        "instructions": "Be brief.", "previous_response_id": None, "max_output_tokens": 9,
        "input": [
            {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}, _INPUT]},
            {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "orin-chat:SG0u"},
            {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Oslo"}'},
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_text", "text": "rain"}]},
        ],
        "tools": [{"type": "function", **_TOOL}, {"type": "custom", "name": "patch"}],
        "tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "patch"}]},
        "text": {"format": {"type": "json_schema", "name": "a", "schema": _SCHEMA}}, "top_logprobs": 2,
        "reasoning": {"effort": "low"}, "include": ["reasoning.encrypted_content"], "metadata": {"a": "b"},
    },
    "/api/chat": {
        "model": "tiny", "think": "low", "format": _SCHEMA, "options": _OPTIONS,
        "messages": [
            {"role": "user", "content": "Hello", "images": [_PNG]},
            {"role": "assistant", "tool_calls": [{"function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}]},
            {"role": "tool", "tool_name": "get_weather", "content": "rain"},
        ],
        "tools": [{"type": "function", "function": _TOOL}],
    },
    "/api/generate": {"prompt": "Hello", "images": [_URL], "system": "Be brief.", "raw": False, "options": _OPTIONS},
    "/v1/embeddings": {"input": ["Hello", "Good day"], "dimensions": 2, "encoding_format": "base64", "user": "ann"},
    "/api/embed": {"input": ["Hello", "x" * 999], "truncate": True, "dimensions": 2, "options": _OPTIONS},
    "/api/embeddings": {"prompt": "Hello"},
    "/v1/rerank": {
        "query": "Hello?", "documents": ["Good day", {"text": "<|im_end|>"}], "top_n": 1, "return_documents": True,
    },
    "/completion": {"prompt": [5, 6], "n_predict": 9, "n_probs": 3, "json_schema": _SCHEMA, "stop": ["."]},
    "/tokenize": {"messages": [{"role": "user", "content": "Hello"}], "with_pieces": True},
    "/apply-template": {"messages": [{"role": "user", "content": "Hello"}]},
    "/v1/fim/completions": {"prompt": "def f(", "suffix": "):", "stop": ["."], "random_seed": 3},
    "/infill": {
        "input_prefix": "def f(", "input_suffix": "):", "input_extra": [{"filename": "a.py", "text": "pass"}],
        "n_predict": 9, "n_indent": 2, "t_max_predict_ms": 100,
    },
    "/v2/rerank": {"query": "Hello?", "texts": ["Good day", "Rain"], "return_text": True},
    "/v1/score": {"text_1": ["Hello"], "text_2": ["Good day", "Rain"]},
    "/v1beta/models/tiny:generateContent": {
        "systemInstruction": {"parts": [{"text": "Be brief."}]},
        "contents": [
            {"role": "user", "parts": [{"text": "Hello"}, {"inlineData": {"mimeType": "image/png", "data": _PNG}}]},
            {"role": "model", "parts": [{"functionCall": {"name": "get_weather", "args": {"city": "Oslo"}}}]},
            {"role": "user", "parts": [{"functionResponse": {"name": "get_weather", "response": {"a": "rain"}}}]},
        ],
        "tools": [{"functionDeclarations": [_TOOL]}],
        "toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["get_weather"]}},
        "generationConfig": {
            "temperature": 0.5, "topK": 3, "stopSequences": ["."], "maxOutputTokens": 9, "candidateCount": 2,
            "responseMimeType": "application/json", "responseSchema": {"type": "OBJECT"},
            "thinkingConfig": {"thinkingBudget": 0, "includeThoughts": True},
        },
    },
    "/v1beta/models/tiny:streamGenerateContent": {"contents": [{"parts": [{"text": "Hello"}]}]},
    "/v1beta/models/tiny:countTokens": {"contents": [{"parts": [{"text": "Hello"}]}]},
    "/v1beta/models/tiny:embedContent": {"content": {"parts": [{"text": "Hello"}]}, "outputDimensionality": 2},
    "/v1beta/models/tiny:batchEmbedContents": {"requests": [{"content": {"parts": [{"text": "Hello"}]}}]},
    "/generate": {"inputs": "Hello", "parameters": {
        "do_sample": True, "max_new_tokens": 9, "top_p": 0.5, "stop": ["."], "details": True,
        "grammar": {"type": "json", "value": _SCHEMA},
    }},
    "/generate_stream": {"inputs": "Hello", "parameters": {"return_full_text": True, "top_n_tokens": 2}},
    "/embed": {"inputs": ["Hello", [5, 6]], "normalize": True, "dimensions": 2},
    "/api/v1/generate": {"prompt": "Hello", "memory": "Once.", "max_length": 9, "rep_pen": 1.1, "grammar": ""},
    "/api/extra/generate/stream": {"prompt": "Hello", "max_length": 9, "stop_sequence": ["."], "images": [_PNG]},
    "/api/extra/tokencount": {"prompt": "Hello", "special": True},
    "/api/extra/detokenize": {"ids": [5, 6]},
    "/api/v1/chat": {
        "model": "tiny", "system_prompt": "Be brief.", "reasoning": "low", "store": True, "max_output_tokens": 9,
        "input": [{"type": "message", "content": "Hello"}, {"type": "image", "data_url": _URL}], "top_k": 3,
    },
    "/v1beta/interactions": {
        "model": "tiny", "system_instruction": "Be brief.", "previous_interaction_id": "v1_x", "labels": {"a": "b"},
        "input": [
            {"type": "user_input", "content": [{"type": "text", "text": "Hello"}, {"type": "image", "data": _PNG}]},
            {"type": "thought", "signature": "SG0="}, {"type": "model_output", "content": "Yes?"},
            {"type": "function_call", "id": "a", "name": "get_weather", "arguments": {"city": "Oslo"}},
            {"type": "function_result", "call_id": "a", "name": "get_weather", "result": {"a": "rain"}},
        ],
        "tools": [{"type": "function", **_TOOL}], "response_format": {"type": "text", "schema": _SCHEMA},
        "generation_config": {
            "seed": 1, "stop_sequences": ["."], "max_output_tokens": 9, "thinking_level": "low",
            "thinking_summaries": "auto", "tool_choice": {"allowed_tools": {"mode": "any", "tools": ["get_weather"]}},
        },
    },
    "/api/v1/models/load": {"model": "tiny"},
    "/api/show": {"model": "tiny", "verbose": True},
    "/detokenize": {"tokens": [5, 6]},
}  # fmt: skip
_ODD = (
    None, True, 0, -1, 1, 2**31, 2**63, 10**30, 1e308, 1.5, "", "x", "none", "auto", "\ud800", "\x1b[31m", "x" * 70_000,
    [], {}, [[]], [None], {"": None}, {"type": "text"}, {"type": "object"}, ["\x00"], {"role": "user"},
    _BLOCK, {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
)  # fmt: skip
_CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def run(tries: int, number: int = 0) -> Counts:
    """A request is answered, or refused in its protocol's form with a status that says that it is the client's fault,
    within a second. Nothing is left open."""
    counts, choose = Counts("requests of each protocol with changed parts"), random.Random(number)
    with tempfile.TemporaryDirectory() as folder:
        file = ModelFile.read(
            generated_model.write(Path(folder, "tiny.gguf"), architecture="qwen3", template=TOOL_TEMPLATE)
        )
    ranks = replace(file, pooling="rank", templates=FileTemplates(rank="{query} <|im_end|> {document}"))
    for of_file, share in ((file, tries - tries // 5), (ranks, tries // 5)):
        service = Service(_Engine(choose), "tiny", of_file, ready=SEEING, parallel=8)
        asyncio.run(_all(service, share, choose, counts))
    return counts


class _Engine(FakeEngine):
    """Answers as a model may: in words, thoughts, calls, or not at all."""

    def __init__(self, choose: random.Random) -> None:
        super().__init__()
        self._choose = choose

    async def generate(self, request: Any) -> Any:
        died = Failed(kind="backend", message="The engine process died (signal 9).")
        ends: list[list[Event | None]] = [
            reply("Good day.\n\nMore."), reply("Rain.", "Let me see."), reply(_CALL), reply(""), [TOO_LONG],
            [*tokens("Good"), died],
        ]  # fmt: skip
        self.replies = [self._choose.choice(ends)]
        async for event in super().generate(request):
            yield event
        self.requests.clear()


async def _all(service: Service, tries: int, choose: random.Random, counts: Counts) -> None:
    transport = httpx.ASGITransport(application(service), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        for _ in range(tries):
            path = choose.choice([*REQUESTS])
            body = _changed(REQUESTS[path], choose)
            started = time.perf_counter()
            try:
                counts.survived[await _ask(client, path, body)] += 1
                assert service.open == service.processing == 0, "requests are left open"
            except Exception as error:
                counts.lost[f"{path}: {type(error).__name__} {str(error)[:120]}"] += 1
            took_ms = (time.perf_counter() - started) * 1e3
            if took_ms > MOST_MS:
                counts.lost[f"{path} took over {MOST_MS:.0f} ms"] += 1
            counts.took(took_ms)


async def _ask(client: httpx.AsyncClient, path: str, body: dict[str, Any]) -> str:
    response = await client.post(path, content=json.dumps(body).encode("utf-8", "surrogatepass"))
    if response.status_code == 200:
        return "answered"
    error = response.json()
    message = error["error"] if form_of(path).__name__ == "ollama_form" else error["error"]["message"]
    assert ("type" in error) == (form_of(path).__name__ == "anthropic_form"), error
    died = response.status_code == 500 and "process died" in message
    assert response.status_code in (400, 404, 413, 501) or died, f"{response.status_code} {message}"
    return "told that the script's engine died" if died else "refused"


def _changed(body: dict[str, Any], choose: random.Random) -> dict[str, Any]:
    """A copy with some parts changed, left out, repeated, or taken from another place. JSON can hold it."""
    body = copy.deepcopy(body)
    if choose.random() < 0.5:
        body["stream"] = choose.random() < 0.7
    for _ in range(choose.choice((0, 1, 1, 2, 3, 6))):
        places = [*_places(body)]
        if not places:
            break
        holder, key = choose.choice(places)
        other = holder[key]
        match choose.randrange(5):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, list):
                holder.insert(key, copy.deepcopy(other))
            case 2:
                whence, at = choose.choice(places)
                holder[key] = copy.deepcopy(whence[at])
            case 3:
                for _ in range(choose.choice((3, 30, 70))):
                    other = [other] if choose.random() < 0.5 else {"content": other}
                holder[key] = other
            case _:
                holder[key] = copy.deepcopy(choose.choice(_ODD))
    return body


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """All places in lists and objects: the holder, and the index or name."""
    waiting = [value]
    while waiting:
        holder = waiting.pop()
        for key, held in holder.items() if isinstance(holder, dict) else enumerate(holder):
            yield holder, key
            if isinstance(held, dict | list):
                waiting.append(held)
