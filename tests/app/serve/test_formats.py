"""What answers are to keep to, in the fields of several servers, and what the JSON of a request may look like."""

import gc
import gzip
import json
import weakref
import zlib

import pytest

from app.serve import bodies
from engine.protocol.events import Grammar
from tests.app.fake_engine import FakeEngine, reply
from tests.app.serve.conftest import HELLO, WEATHER, error

CHAT = "/v1/chat/completions"
SEVEN = {"type": "object", "properties": {"q": {"const": 7}}, "required": ["q"]}


async def grammar(served, **fields):
    engine = FakeEngine()
    client, _ = served(engine)
    response = await client.post(CHAT, json=HELLO | fields)
    assert response.status_code == 200, response.text
    return engine.requests[0].grammar


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object", "schema": SEVEN}},
        {"response_format": {"type": "json_schema", "schema": SEVEN}},
        {"response_format": {"schema": SEVEN}},
        {"response_format": {"json_schema": {"schema": SEVEN}}},
        {"json_schema": SEVEN},
        {"guided_json": SEVEN},
        {"guided_json": json.dumps(SEVEN)},
        {"structured_outputs": {"json": SEVEN}},
    ],
)
async def test_schemas_of_other_servers(served, fields):
    made = await grammar(served, **fields)
    assert made.kind == "json_schema" and json.loads(made.source)["properties"] == SEVEN["properties"]


@pytest.mark.parametrize(
    "fields, source",
    [
        ({"guided_choice": ["yes", 'n"o']}, 'start: "yes" | "n\\"o"'),
        ({"structured_outputs": {"choice": ["a"]}}, 'start: "a"'),
        ({"guided_regex": "^[0-9]{3}/x$"}, "start: /[0-9]{3}\\/x/"),
        ({"regex": "a\\$"}, "start: /a\\$/"),
        ({"grammar": 'root ::= "x"'}, '%llguidance {}\n\nstart: "x"\n'),
        (
            {"grammar": r'root ::= [\U0001F600-\U0001F64F\u0041] "\\U0001F600"'},
            '%llguidance {}\n\nstart: /[😀-🙏\\x41]/ "\\\\U0001F600"\n',
        ),
        ({"guided_grammar": 'start: "x"'}, 'start: "x"'),
        (
            {"response_format": {"type": "grammar", "grammar": 'root ::= "x"'}},
            '%llguidance {}\n\nstart: "x"\n',
        ),
    ],
)
async def test_grammars_of_other_servers(served, fields, source):
    made = await grammar(served, **fields)
    assert made.kind == "lark" and made.source.split() == source.split()


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": "[]"}, "guided_json"),
        ({"response_format": {}}, "response_format"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": "a" * 40_000}, "guided_regex"),
        ({"grammar": "root ::= %"}, "grammar"),
        ({"grammar": "root ::= " + "(" * 5_000}, "grammar"),
        ({"regex": "a", "json_schema": SEVEN}, "json_schema"),
        ({"regex": "a", "tools": [WEATHER]}, "tools"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"prompt_logprobs": 0}, "prompt_logprobs"),
        ({"stop_token_ids": [1] * 65}, "stop_token_ids"),
        ({"modalities": ["text", "audio"]}, "modalities"),
    ],
)
async def test_what_cannot_be_done_is_refused(served, fields, param):
    client, _ = served()
    response = await client.post(CHAT, json=HELLO | fields)
    assert response.status_code == 400 and error(response)["param"] == param


async def test_tokens_that_end_an_answer(served):
    client, _ = served(FakeEngine(reply("one, two")))
    body = (await client.post(CHAT, json=HELLO | {"stop_token_ids": [1]})).json()
    assert (
        body["choices"][0]["message"]["content"] == "one," and body["choices"][0]["finish_reason"] == "stop"
    )


async def test_numbers_may_have_a_fraction_of_zero(served):
    engine = FakeEngine()
    client, _ = served(engine)
    await client.post(
        CHAT, content=json.dumps(HELLO)[:-1] + ', "max_tokens": 9.0, "seed": 2.0, "min_tokens": 3.0}'
    )
    await client.post("/api/chat", content=json.dumps(HELLO)[:-1] + ', "options": {"num_predict": 4.0}}')
    await client.post(CHAT, json=HELLO | {"max_tokens": 10**30})
    first, second, third = engine.requests
    assert (first.max_tokens, first.sampling.seed, first.min_tokens) == (9, 2, 3)
    assert second.max_tokens == 4 and third.max_tokens is None
    response = await client.post(CHAT, json=HELLO | {"max_tokens": 1.5})
    assert response.status_code == 400 and error(response)["param"] == "max_tokens"


@pytest.mark.parametrize(
    "encoding, encoded",
    [
        ("gzip", gzip.compress),
        ("gzip", lambda data: b"".join(map(gzip.compress, (data[:9], b"", data[9:])))),
        ("deflate", zlib.compress),
        ("", lambda data: b"\xef\xbb\xbf" + data),
    ],
)
async def test_bodies_that_are_compressed_or_marked(served, encoding, encoded):
    client, _ = served(FakeEngine(reply("Good day.")))
    data, headers = encoded(json.dumps(HELLO).encode()), {"Content-Encoding": encoding}
    response = await client.post(CHAT, content=data, headers=headers)
    assert response.json()["choices"][0]["message"]["content"] == "Good day."


async def in_pieces(data):
    """A body that does not say how long it is."""
    yield data


async def test_compressed_bodies_are_bounded(served, monkeypatch):
    client, _ = served()
    bomb = {
        "content": gzip.compress(b"[" * (bodies.MAX_BODY_BYTES + 9)),
        "headers": {"Content-Encoding": "gzip"},
    }
    assert (await client.post(CHAT, **bomb)).status_code == 413
    monkeypatch.setattr(bodies, "MAX_HELD_BYTES", 1 << 20)
    client, _ = served()
    assert (await client.post(CHAT, **bomb)).status_code == 503
    whole = gzip.compress(json.dumps(HELLO).encode())
    for encoding, data, status in (
        ("gzip", whole[:-1], 400),
        ("gzip", whole + b"{}", 400),
        ("gzip", in_pieces(gzip.compress(b"") * (bodies.MAX_BODY_BYTES // 20 + 1)), 413),
        ("gzip", b"{}", 400),
        ("br", b"{}", 415),
        ("gzip, gzip", b"{}", 415),
    ):
        response = await client.post(CHAT, content=data, headers={"Content-Encoding": encoding})
        assert response.status_code == status and error(response)["message"]
    assert response.headers["accept-encoding"] == "gzip, deflate"
    nothing = bodies._Inflate("gzip")  # as a GET, whose client says it of all requests
    assert await nothing(b"", is_last=True) == b"", "else who asks seems to have gone"


async def test_grammar_is_of_all_paths(served):
    engine = FakeEngine()
    client, _ = served(engine)
    await client.post("/v1/completions", json={"prompt": "a", "guided_choice": ["b"]})
    await client.post("/completion", json={"prompt": "a", "grammar": 'root ::= "b"'})
    assert engine.requests[0].grammar == Grammar(kind="lark", source='start: "b"', ends_numbers=False)
    assert engine.requests[1].grammar.kind == "lark"


async def test_messages_as_some_clients_write_them(served):
    engine = FakeEngine()
    client, _ = served(engine)
    call = {
        "id": None,
        "type": "function",
        "function": {"name": "get_weather", "arguments": {"city": "Rome"}},
    }
    thought = {"type": "thinking", "thinking": [{"type": "text", "text": "Hm."}]}
    messages = [
        {"role": "user", "content": ["a", {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [thought, {"type": "text", "text": "c"}], "tool_calls": [call]},
        {"role": "user", "content": "d"},
    ]
    assert (await client.post(CHAT, json={"messages": messages})).status_code == 200
    first, turn, _ = engine.requests[0].prompt.messages
    assert first.content == "ab" and (turn.thinking, turn.content) == ("Hm.", "c")
    assert turn.tool_calls[0].arguments == '{"city": "Rome"}'
    for choice in ("any", {"type": "any"}, {"type": "required"}):
        asked = HELLO | {"tools": [WEATHER], "tool_choice": choice, "reasoning_effort": "max"}
        assert (await client.post(CHAT, json=asked)).status_code == 200
        assert engine.requests[-1].grammar and engine.requests[-1].sampling.effort == "high"
    asked = HELLO | {"tools": [WEATHER], "tool_choice": {"type": "auto"}}
    assert (await client.post(CHAT, json=asked)).status_code == 200 and not engine.requests[-1].grammar


async def test_a_body_that_is_too_long_is_given_up_at_once(served, monkeypatch):
    """An error that keeps its frame keeps the body, too, until garbage is collected."""
    client, _ = served()
    monkeypatch.setattr(bodies, "MAX_BODY_BYTES", 1000)
    made, raised = bodies._too_long, []

    def too_long():
        error = made()
        raised.append(weakref.ref(error))
        return error

    monkeypatch.setattr(bodies, "_too_long", too_long)
    gc.collect()
    gc.disable()
    try:
        response = await client.post(CHAT, content=iter_of(b"[" * 2000))
        assert response.status_code == 413
        del response
        assert [error() for error in raised] == [None]
    finally:
        gc.enable()


async def iter_of(data):
    yield data
