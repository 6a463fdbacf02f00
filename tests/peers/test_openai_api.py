"""Servers that speak OpenAI's protocol: a real llama-server, and ones that answer as they are told."""

import asyncio

import pytest

from engine.formats.tools.calls import ToolCallParser
from engine.formats.tools.forms import HERMES
from engine.peers import openai_api
from engine.peers.openai_api import OpenAIEngine
from engine.protocol.events import (
    Chat,
    Failed,
    Finished,
    Generate,
    Grammar,
    Message,
    RawText,
    Ready,
    Sampling,
    Thinking,
    Token,
    TokenIds,
    ToolCall,
    decode_rate,
)
from tests.peers.conftest import collect
from tests.peers.fake_server import CLOSE, WAIT, fake_server, sse

HELLO = Chat(
    messages=(Message(role="system", content="Be brief."), Message(role="user", content="Why?", thinking="…"))
)


def ask(prompt=HELLO, **fields):
    return Generate(request_id=6, prompt=prompt, **fields)


def said(events, kind=Token):
    return "".join(event.text for event in events if type(event) is kind)


@pytest.fixture
async def engines():
    made = []

    def make(url, **arguments):
        made.append(OpenAIEngine(url, **arguments))
        return made[-1]

    yield make
    for engine in made:
        await engine.close()


@pytest.fixture
async def fake():
    async with fake_server() as fake:
        fake.answer("/v1/models", {"data": [{"id": "small", "owned_by": "vllm", "max_model_len": 4096}]})
        yield fake


def delta(finish_reason=None, **fields):
    return {"choices": [{"delta": fields, "finish_reason": finish_reason}]}


END = delta("stop")
USAGE = {
    "choices": None,
    "usage": {"prompt_tokens": 20, "completion_tokens": 9, "prompt_tokens_details": {"cached_tokens": 16}},
}


# --- a real one -----------------------------------------------------------------------------------------


async def test_a_chat_with_a_real_llama_server(peers, llama_server, engines, monkeypatch):
    monkeypatch.setattr("engine.peers.llama_process._MAX_SOCKET_PATH", 0)
    host = peers(llama_server, context_length=512)
    await collect(host.start())
    url, key = host._process.base_url, host._process.key
    engine = engines(f"{url}/v1", api_key=key)
    [ready] = await collect(engine.start())
    assert (ready.model.name, ready.backend, ready.context_length) == ("noise.gguf", "llama.cpp", 512)
    assert ready.model.quantization == "Q8_0" and ready.warnings == ()

    events = await collect(engine.generate(ask(max_tokens=20, ignore_eos=True)))
    end = events[-1]
    assert isinstance(end, Finished)
    assert (end.reason, end.predicted_n) == ("length", 20)
    assert end.prompt_n > 10
    assert said(events)
    assert decode_rate(end.predicted_n, end.predicted_ms) > 0

    again = (await collect(engine.generate(ask(max_tokens=20, ignore_eos=True))))[-1]
    assert again.cached_n > 0
    fresh = (await collect(engine.generate(ask(max_tokens=20, ignore_eos=True, fresh=True))))[-1]
    assert fresh.cached_n == 0

    greedy = {"sampling": Sampling(temperature=0), "max_tokens": 8, "ignore_eos": True}
    ids = tuple(range(20, 40))
    for prompt in (RawText(text="The river came down"), TokenIds(ids=ids)):
        assert (await collect(engine.generate(ask(prompt, **greedy))))[-1].predicted_n == 8

    [failed] = await collect(engine.generate(ask(TokenIds(ids=(20,) * 600))))
    assert (failed.kind, failed.request_id) == ("context", 6)

    events = []
    async for event in engine.generate(ask(RawText(text="The"), ignore_eos=True)):
        events.append(event)
        if len(events) == 5:
            await engine.stop()
    assert events[-1].reason == "cancelled"
    assert (await collect(engine.generate(ask(max_tokens=3))))[-1].predicted_n <= 3

    [failed] = await collect(engines(url, api_key="wrong").start())
    assert failed.kind == "usage"
    assert "refuses the key" in failed.message and "--api-key-env" in failed.hint


# --- ones that answer as they are told ------------------------------------------------------------------


async def test_what_is_asked_of_vllm(engines, fake):
    fake.answer("/v1/chat/completions", *sse(delta(content="Because"), END, USAGE, "[DONE]"))
    engine = engines(fake.url, api_key="k")
    events = await collect(engine.generate(ask(Chat(messages=HELLO.messages, think=False), max_tokens=9)))
    _, headers, body = fake.requests[-1]
    assert headers["authorization"] == "Bearer k"
    assert body["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Why?"},
    ]
    seed = body.pop("seed")
    assert body | {"messages": []} == {
        "model": "small",
        "messages": [],
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.7,
        "top_p": 0.95,
        "top_k": 40,
        "min_p": 0.05,
        "repetition_penalty": 1.0,
        "max_tokens": 9,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    ready, end = events[0], events[-1]
    assert isinstance(ready, Ready)
    assert (ready.backend, ready.context_length, ready.model.name) == ("vLLM", 4096, "small")
    assert (end.reason, end.prompt_n, end.cached_n, end.predicted_n, end.seed) == ("stop", 20, 16, 9, seed)


@pytest.mark.parametrize("owner", ["vllm", "somebody"])
async def test_how_much_a_server_should_think(engines, fake, owner):
    fake.answer("/v1/models", {"data": [{"id": "gpt", "owned_by": owner}]})
    fake.answer("/v1/chat/completions", *sse(delta(content="Hi"), END))
    engine = engines(fake.url + "/v1/")
    assert (await collect(engine.start()))[-1].model.takes_effort
    await collect(engine.generate(ask(sampling=Sampling(effort="low"))))
    body = fake.requests[-1][2]
    variables = {"reasoning_effort": "low"} if owner == "vllm" else None
    assert (body["reasoning_effort"], body.get("chat_template_kwargs")) == ("low", variables)


async def test_tools_of_a_chat_and_calls_of_them(engines, fake):
    tools = '[{"type": "function", "function": {"name": "files.read", "parameters": {"type": "object"}}}]'
    call = ToolCall(id="abc", name="files.read", arguments='{"path": "a"}')
    messages = (
        Message(role="user", content="Read a and b"),
        Message(role="assistant", content="", tool_calls=(call,)),
        Message(role="tool", content="text of a", tool_call_id="abc", name="files.read"),
    )
    pieces = (
        {"index": 0, "id": "x", "function": {"name": "files__read", "arguments": '{"path"'}},
        {"index": 0, "function": {"arguments": ': "b"}'}},
    )
    fake.answer("/v1/chat/completions", *sse(*(delta(tool_calls=[piece]) for piece in pieces), END, USAGE))
    engine = engines(f"{fake.url}/v1")
    await collect(engine.start())
    events = await collect(engine.generate(ask(Chat(messages=messages, tools=tools))))
    body = fake.requests[-1][2]
    assert body["tools"][0]["function"]["name"] == "files__read"
    assert body["messages"][1]["tool_calls"][0]["function"] == {
        "name": "files__read",
        "arguments": '{"path": "a"}',
    }
    assert body["messages"][2] == {"role": "tool", "content": "text of a", "tool_call_id": "abc"}
    assert [*ToolCallParser(HERMES, tools).feed(said(events))] == [("files.read", '{"path": "b"}')]


async def test_the_last_call_of_as_many_as_there_may_be_is_whole(engines, fake, monkeypatch):
    monkeypatch.setattr(openai_api, "MOST_CALLS", 2)
    names = [{"index": i, "function": {"name": f"f{i}", "arguments": "{"}} for i in range(3)]
    ends = [{"index": i, "function": {"arguments": "}"}} for i in range(3)]
    fake.answer("/v1/chat/completions", *sse(delta(tool_calls=names), delta(tool_calls=ends), END, USAGE))
    engine = engines(f"{fake.url}/v1")
    await collect(engine.start())
    text = said(await collect(engine.generate(ask())))
    tools = '[{"function": {"name": "f0"}}, {"function": {"name": "f1"}}]'
    assert [*ToolCallParser(HERMES, tools).feed(text)] == [("f0", "{}"), ("f1", "{}")]


async def test_a_server_of_unknown_kind_gets_what_is_in_the_protocol(engines, fake):
    fake.answer("/v1/models", {"data": [{"id": "gpt", "owned_by": "somebody"}]})
    fake.answer("/v1/chat/completions", *sse(delta(content="Hi"), END))
    engine = engines(fake.url + "/v1/")
    [ready] = await collect(engine.start())
    assert ready.unheeded == ("top_k", "min_p", "repeat_penalty", "repeat_last_n") and not ready.warnings
    await collect(engine.generate(ask(sampling=Sampling(top_k=3, seed=5))))
    body = fake.requests[-1][2]
    assert set(body) == {"model", "stream", "stream_options", "temperature", "top_p", "seed", "messages"}
    assert body["seed"] == 5
    end = (await collect(engine.generate(ask(sampling=Sampling(temperature=1, top_p=1)))))[-1]
    assert set(fake.requests[-1][2]) == {"model", "stream", "stream_options", "messages"} and end.seed == 0


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
async def test_reasoning_fields_are_thinking(engines, fake, field):
    fake.answer(
        "/v1/chat/completions",
        *sse(delta(role="assistant", content=None), delta(**{field: "Hm, "}), delta(**{field: "so."})),
        *sse(delta(content="Yes."), END, "[DONE]"),
    )
    events = await collect(engines(fake.url).generate(ask()))
    assert said(events, Thinking) == "Hm, so."
    assert said(events) == "Yes."
    assert events[-1].predicted_n == 3  # no usage was sent: pieces are counted


async def test_thinking_marks_in_the_text_are_told_apart(engines, fake):
    pieces = [delta(content=text) for text in ("<thi", "nk>\nHm", "</think>", "\n\nYes <b>", "</")]
    fake.answer("/v1/chat/completions", *sse(*pieces, END))
    events = await collect(engines(fake.url).generate(ask()))
    assert said(events, Thinking) == "Hm"
    assert said(events) == "Yes <b></"


async def test_raw_text_is_not_split(engines, fake):
    fake.answer("/v1/completions", *sse({"choices": [{"text": "<think>x", "finish_reason": "length"}]}))
    events = await collect(engines(fake.url).generate(ask(RawText(text="Say: "))))
    assert (said(events), events[-1].reason) == ("<think>x", "length")
    assert fake.requests[-1][2]["prompt"] == "Say: "


async def test_a_server_that_cuts_an_emoji(engines, fake):
    fake.answer("/v1/chat/completions", *sse(delta(content="a\ud83d"), delta(content="\ude00b"), END))
    events = await collect(engines(fake.url).generate(ask()))
    assert isinstance(events[-1], Finished), events[-1]
    assert said(events) == "a\ufffd\ufffdb"


async def test_models_to_choose_from(engines, fake):
    fake.answer("/v1/models", {"data": [{"id": "a"}, {"id": "b\x1b[1m"}]})
    assert (await collect(engines(fake.url, model="b\x1b[1m").start()))[-1].model.name == "b[1m"
    [failed] = await collect(engines(fake.url, model="c").start())
    assert (failed.kind, failed.hint) == ("usage", "It has a, b[1m.")
    fake.answer("/v1/models", {"data": []})
    [failed] = await collect(engines(fake.url).start())
    assert failed.message.endswith("lists no model.")


async def test_a_server_without_a_list_of_models(engines, fake):
    fake.routes.clear()
    [failed] = await collect(engines(fake.url).start())
    assert (failed.kind, failed.hint) == (
        "usage",
        "Check the address (many end in /v1), and the model's name.",
    )
    fake.answer("/chat/completions", *sse(delta(content="x"), END))
    events = await collect(engines(fake.url, model="m").generate(ask()))
    assert fake.requests[-1][2]["model"] == "m"
    assert events[-1].reason == "stop"


@pytest.mark.parametrize(
    ("parts", "kind", "message"),
    [
        ([*sse(delta(content="x")), CLOSE], "backend", "closed the connection before its answer"),
        (sse(delta(content="x")), "backend", "ended its answer in the middle"),
        (sse(delta(content="x"), "[DONE]"), "backend", "ended its answer in the middle"),
        (sse(delta(content="x"), "nonsense"), "backend", "sent something unexpected"),
        (sse(delta(content="x"), {"choices": 3}), "backend", "sent something unexpected"),
        (
            sse(delta(content="x"), {"error": {"message": "CUDA error", "code": 500}}),
            "backend",
            "failed (500 Internal Server Error): CUDA error",
        ),
    ],
)
async def test_answers_that_fail_in_the_middle(engines, fake, parts, kind, message):
    fake.answer("/v1/chat/completions", *parts)
    engine = engines(fake.url)
    await collect(engine.start())
    token, failed = await collect(engine.generate(ask()))
    assert token.text == "x"
    assert isinstance(failed, Failed)
    assert (failed.kind, failed.request_id) == (kind, 6)
    assert message in failed.message
    fake.answer("/v1/chat/completions", *sse(END))
    assert (await collect(engine.generate(ask())))[-1].reason == "stop"


@pytest.mark.parametrize(
    ("status", "error", "kind", "message"),
    [
        (401, {"message": "Bad key"}, "usage", "refuses the key: Bad key."),
        (429, {"message": "Quota"}, "backend", "takes no more requests now: Quota."),
        (500, {}, "backend", "failed (500 Internal Server Error)."),
        (
            400,
            {
                "message": "This model's maximum context length is 10 tokens.",
                "code": "context_length_exceeded",
            },
            "context",
            "This model's maximum context length is 10 tokens.",
        ),
    ],
)
async def test_refusals(engines, fake, status, error, kind, message):
    fake.answer("/v1/chat/completions", {"error": error}, status=status)
    engine = engines(fake.url)
    await collect(engine.start())
    [failed] = await collect(engine.generate(ask()))
    assert failed.kind == kind
    assert message in failed.message


@pytest.mark.parametrize("request_", [ask(logprobs=2), ask(grammar=Grammar(kind="lark", source="x"))])
async def test_what_is_not_to_be_had(engines, fake, request_):
    engine = engines(fake.url)
    await collect(engine.start())
    [failed] = await collect(engine.generate(request_))
    assert failed.kind == "usage"
    assert len(fake.requests) == 1


async def test_stopping_hangs_up(engines, fake):
    fake.answer("/v1/chat/completions", *sse(delta(content="x")), WAIT)
    engine = engines(fake.url)
    await collect(engine.start())
    events = []
    async for event in engine.generate(ask()):
        events.append(event)
        await engine.stop()
    assert (events[-1].reason, events[-1].predicted_n) == ("cancelled", 1)
    await asyncio.wait_for(fake.hung_up.wait(), 60)


@pytest.mark.parametrize(("key", "sent"), [("", "Basic bWU6c2VjcmV0"), ("a-key", "Bearer a-key")])
async def test_without_a_key_a_password_comes_from_netrc(fake, engines, home, key, sent):
    (home / ".netrc").write_text(
        "machine 127.0.0.1 login me password secret\ndefault login any password other"
    )
    (home / ".netrc").chmod(0o600)
    await collect(engines(f"{fake.url}/v1", api_key=key).start())
    assert [headers["authorization"] for _, headers, _ in fake.requests] == [sent]


async def test_a_key_that_no_header_holds(engines):
    [failed] = await collect(engines("http://127.0.0.1:1", api_key="a\nb").start())
    assert failed.kind == "usage"
    assert "a\nb" not in failed.message


async def test_what_a_server_sends_has_a_size(fake, engines, monkeypatch):
    monkeypatch.setattr("engine.peers.openai_api.MAX_TEXT", 5)
    monkeypatch.setattr("engine.peers.http.MAX_BODY_BYTES", 1000)
    fake.answer("/v1/chat/completions", *sse(delta(content="12345"), delta(content="x" * 7), END, "[DONE]"))
    events = await collect(engines(fake.url).generate(ask()))
    assert said(events) == "12345xxxxx"
    assert "sent 7 characters at once; the first 5 are here" in events[-1].message
    fake.answer("/v1/models", {"data": [{"id": "small" * 300}]})
    [failed] = await collect(engines(fake.url).start())
    assert "an answer of more than" in failed.message


@pytest.mark.parametrize(
    ("most", "context", "limit"), [(None, 0, 2048), (2000, 0, 2000), (None, 1500, 1500), (9, 0, 1024)]
)
async def test_a_reply_without_end_is_stopped_and_kept(fake, engines, monkeypatch, most, context, limit):
    monkeypatch.setattr("engine.peers.server_engine.MOST_CHARS_A_TOKEN", 1)
    monkeypatch.setattr("engine.peers.server_engine.MOST_TOKENS", 2048)
    fake.answer(
        "/v1/models", {"data": [{"id": "small", "owned_by": "vllm", "max_model_len": context or None}]}
    )
    fake.answer("/v1/chat/completions", *sse(*[delta(content="word ") for _ in range(600)]), WAIT)
    events = await collect(engines(fake.url).generate(ask(max_tokens=most)))
    assert "goes on beyond the end of its reply, which was stopped" in events[-1].message
    assert limit < len(said(events)) <= limit + 5
    await asyncio.wait_for(fake.hung_up.wait(), 60)
