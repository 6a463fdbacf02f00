"""The grammars' own parser says which replies they take."""

import json
import re
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import UsageError
from engine.formats.channels import ChannelSplitter, channel_marks
from engine.formats.tools.calls import FunctionCall, ToolCallParser
from engine.formats.tools.forms import (
    APERTUS,
    COHERE,
    FUNCTIONARY,
    GEMMA,
    GLM,
    GRANITE,
    HARMONY,
    HERMES,
    KIMI,
    LFM,
    LLAMA,
    LLAMA_4,
    MINICPM,
    MINIMAX,
    MISTRAL,
    MISTRAL_ARGS,
    MUSE,
    NEMOTRON,
    PHI,
    QWEN_XML,
    SEED,
)
from engine.formats.tools.grammars import reply_grammar, schema_grammar
from engine.formats.tools.json_formats import with_strict_formats
from engine.formats.tools.json_leniency import NOT_KEPT, closed, loosened, without_needless

llguidance = pytest.importorskip("llguidance")
PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "unit": {"type": "string", "enum": ["C", "F"]},
    },
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
STOP = {"type": "function", "function": {"name": "stop"}}
TOOLS = json.dumps([WEATHER, STOP])
JSON = '{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}'
CALL = FunctionCall("get_weather", '{"city": "Rome", "days": 2}')
CALLS = {
    "hermes": (HERMES, f"<tool_call>\n{JSON}\n</tool_call>"),
    "mistral": (MISTRAL, f"[TOOL_CALLS][{JSON}]"),
    "ministral": (MISTRAL_ARGS, f"[TOOL_CALLS]get_weather[ARGS]{CALL.arguments}"),
    "granite": (GRANITE, f"<|tool_call|>[{JSON}]"),
    "llama": (LLAMA, JSON.replace("arguments", "parameters")),
    "tags": (
        QWEN_XML,
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n"
        "</parameter>\n</function>\n</tool_call>",
    ),
    "glm": (
        GLM,
        "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>2</arg_value>\n</tool_call>",
    ),
    "seed": (
        SEED,
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Rome</parameter>\n<parameter=days>2</parameter>\n"
        "</function>\n</seed:tool_call>",
    ),
    "minimax": (
        MINIMAX,
        '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Rome</parameter>\n<parameter '
        'name="days">2</parameter>\n</invoke>\n</minimax:tool_call>',
    ),
    "nemotron": (NEMOTRON, f"<TOOLCALL>\n[{JSON}]\n</TOOLCALL>"),
    "gemma": (GEMMA, '<|tool_call>call:get_weather{city:<|"|>Rome<|"|>,days:2}<tool_call|>'),
    "phi": (PHI, f"<|tool_call|>\n{JSON}\n<|/tool_call|>"),
    "lfm": (LFM, '<|tool_call_start|>[get_weather(city="Rome", days=2)]<|tool_call_end|>'),
    "apertus": (APERTUS, f'<|tools_prefix|>\n[{{"get_weather": {CALL.arguments}}}]\n<|tools_suffix|>'),
    "muse": (
        MUSE,
        '<atem:function_calls>\n<atem:invoke name="get_weather">\n<atem:parameter name="city">Rome</atem:parameter>\n'
        '<atem:parameter name="days">2</atem:parameter>\n</atem:invoke>\n</atem:function_calls>',
    ),
    "functionary": (FUNCTIONARY, f"<function=get_weather>{CALL.arguments}</function>"),
    "minicpm 5": (
        MINICPM,
        '<function name="get_weather"><param name="city">Rome</param><param name="days">2</param></function>',
    ),
    "cohere": (
        COHERE,
        f'<|START_ACTION|>\n[{{"tool_name": "get_weather", "parameters": {CALL.arguments}}}]\n<|END_ACTION|>',
    ),
    "kimi": (
        KIMI,
        "<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>"
        f"{CALL.arguments}<|tool_call_end|>",
    ),
    "llama 4": (LLAMA_4, '[get_weather(city="Rome", days=2)]'),
    "gpt-oss": (
        HARMONY,
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>" + CALL.arguments,
    ),
}
MARKS = ("<|constrain|>", "<|channel|>", "<|message|>", "<|start|>", "<|end|>")


class _Bytes:
    """A token for each byte, and the special ones."""

    eos_token_id, bos_token_id, special_token_ids = 256, None, tuple(range(256, 257 + len(MARKS)))
    tokens = [*(bytes([byte]) for byte in range(256)), b"<eos>", *(m.encode() for m in MARKS)]  # noqa: RUF012

    def __call__(self, text):
        return list(text if isinstance(text, bytes) else text.encode())


VOCABULARY = llguidance.LLTokenizer(
    llguidance.TokenizerWrapper(_Bytes()), n_vocab=257 + len(MARKS), eos_token=256
)


def takes(grammar, reply):
    matcher = llguidance.LLMatcher
    from_source = (
        matcher.grammar_from_json_schema if grammar.kind == "json_schema" else matcher.grammar_from_lark
    )
    made = matcher(VOCABULARY, from_source(grammar.source), log_level=0)
    assert not made.is_error(), made.get_error()
    parts = re.split("(" + "|".join(map(re.escape, MARKS)) + ")", reply)
    ids = [id for part in parts for id in ([257 + MARKS.index(part)] if part in MARKS else part.encode())]
    return made.consume_tokens(ids) and made.is_accepting()


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_demanded(name):
    form, reply = CALLS[name]
    grammar = reply_grammar(form, TOOLS, None, is_required=True)
    assert takes(grammar, reply)
    assert not takes(grammar, "I look.") and not takes(grammar, reply.replace("get_weather", "nothing"))
    assert not takes(grammar, reply.replace("2", "two" if form.tags else '"2"'))
    with_schema = reply_grammar(form, TOOLS, {"type": "integer"}, is_required=False)
    answer = "<|channel|>final<|message|>7" if form is HARMONY else "7"
    assert takes(with_schema, reply) and takes(with_schema, answer)
    assert not takes(with_schema, answer.replace("7", "seven"))


@pytest.mark.parametrize("name", CALLS)
def test_what_is_demanded_is_read_again(name):
    form, reply = CALLS[name]
    if form is HARMONY:  # as `ChannelSplitter` shows it
        marks = channel_marks(
            {mark: i for i, mark in enumerate(("<|start|>", "<|channel|>", "<|message|>", "<|end|>"))}
        )
        splitter = ChannelSplitter(marks, with_tools=True)
        pieces = ("<|channel|>", 1), ("commentary to=functions.get_weather ", 9), ("", 8), ("json", 9)
        fed = [splitter.feed(*piece) for piece in (*pieces, ("<|message|>", 2), (CALL.arguments, 9))]
        reply = "".join(text for thinks, text in fed if not thinks)
    parser = ToolCallParser(form, TOOLS)
    assert [*parser.feed(reply), *parser.flush()] == [CALL]


def test_texts_and_choices_in_tags():
    grammar = reply_grammar(QWEN_XML, TOOLS, None, is_required=True)
    call = (
        "<tool_call>\n<function=get_weather>\n<parameter=city>\n{}\n</parameter>\n{}</function>\n</tool_call>"
    )
    assert takes(grammar, call.format("a < b\n</p> <parameter=", ""))
    unit = "<parameter=unit>\n{}\n</parameter>\n"
    assert takes(grammar, call.format("x", unit.format("F")))
    assert not takes(grammar, call.format("x", unit.format("K")))
    assert takes(grammar, "<tool_call>\n<function=stop>\n</function>\n</tool_call>")


def test_gpt_oss_may_think_first():
    form, call = CALLS["gpt-oss"]
    grammar = reply_grammar(form, TOOLS, None, is_required=True)
    thought = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    assert grammar.kind == "reply" and takes(grammar, thought + call) and not takes(grammar, thought)
    assert not takes(grammar, f"{thought}<|channel|>final<|message|>No.")


@pytest.mark.parametrize(
    "name", ["hermes", "mistral", "ministral", "tags", "llama", "gpt-oss", "glm", "gemma", "lfm"]
)
def test_calls_of_strict_tools_keep_to_their_schemas(name):
    form, reply = CALLS[name]
    strict = json.dumps([{**WEATHER, "function": {**WEATHER["function"], "strict": True}}])
    grammar = reply_grammar(form, strict, None, is_required=False)
    texts = ["", "Just text.", f"I look.\n{reply}"]
    if form is LLAMA:
        texts = ["", " Just {text}.", f"I look.<|python_tag|>{reply}", f" \n{reply}"]
    elif form is HARMONY:
        thought = "<|channel|>analysis<|message|>Hm {.<|end|><|start|>assistant"
        texts = [
            f"{thought}<|channel|>final<|message|>No.",
            f"{thought}<|channel|>commentary<|message|>I look.",
            thought + reply,
        ]
    for text in (*texts, reply):
        assert takes(grammar, text), text
    assert not takes(grammar, reply.replace("city", "town"))
    assert not takes(grammar, ("" if form in (LLAMA, HARMONY) else "So: ") + reply[:-3])
    if form.close:
        assert takes(grammar, f"{reply}\n{reply}")
    assert reply_grammar(form, TOOLS, None, is_required=False) is None


@pytest.mark.parametrize(
    ("format", "good", "bad"),
    [
        ("time", ["21:55:02Z", "00:00:00.5+01:00"], ["21:55:02", "24:00:00Z", "21:55:60Z", "1:00:00Z", "x"]),
        ("date", ["2024-02-29", "2000-02-29", "1999-12-31"], ["2023-02-29", "1900-02-29", "2020-04-31"]),
        (
            "email",
            ["ann.b+c@mail.example.org"],
            ["x" * 65 + "@example.org", "ann@", "a..b@example.org", "ann"],
        ),
        ("date-time", ["2024-02-29T21:55:02Z"], ["2024-02-29", "2024-02-29T21:55:60Z"]),
    ],
)
def test_formats_are_those_of_their_standards(format, good, bad):
    grammar = schema_grammar({"properties": {"at": {"type": "string", "format": format}}})
    assert all(takes(grammar, json.dumps({"at": text})) for text in good)
    assert not any(takes(grammar, json.dumps({"at": text})) for text in bad)


@given(st.datetimes(min_value=datetime(1000, 1, 1)))
@settings(max_examples=50)
def test_every_moment_can_be_said(at):
    at = at.replace(tzinfo=UTC)
    assert takes(schema_grammar({"type": "string", "format": "date-time"}), json.dumps(at.isoformat()))


def test_only_schemas_are_changed():
    data = {"enum": [{"type": "string", "format": "time"}], "properties": {"format": {"const": "time"}}}
    assert with_strict_formats(data) == data and with_strict_formats(True) is True
    both = with_strict_formats({"type": "string", "format": "time", "pattern": "^2"})
    assert both["pattern"] == "^2" and both["allOf"]


BIG = 2**63


@pytest.mark.parametrize(
    "schema, good, bad",
    [
        # As generated for int64.
        ({"minimum": -BIG, "maximum": BIG - 1}, [0, 2**62, -(2**62)], [BIG, -BIG - 1]),
        ({"minimum": 0, "maximum": 2 * BIG - 1}, [0, 2**62], [-1, 2 * BIG]),
        ({"minimum": -3.4e38, "maximum": 3.4e38, "type": "number"}, [1.5, -(2**60)], []),
        ({"maximum": 2**53 + 3}, [2**53 + 1], [2**53 + 4]),
        ({"exclusiveMinimum": -(2**60)}, [0, -(2**60) + 128], [-(2**60)]),
    ],
)
def test_bounds_beyond_exact_numbers_are_kept(schema, good, bad):
    grammar = schema_grammar({"type": "integer", **schema})
    assert all(takes(grammar, str(number)) for number in good)
    assert not any(takes(grammar, str(number)) for number in bad)


@pytest.mark.parametrize(
    "schema", [{"const": 2**53 + 1}, {"enum": [1, {"a": -1e300}]}, {"minimum": BIG}, {"maximum": -1e30}]
)
def test_values_that_cannot_be_kept_are_refused(schema):
    with pytest.raises(UsageError, match=r"beyond 2\^(53|63)"):
        schema_grammar({"properties": {"n": schema}})
    assert with_strict_formats({"const": True, "enum": [2**53, 0.1], "minimum": 5, "maximum": True})


NESTED = {
    "$id": "https://example.org/place",
    "type": "object",
    "$defs": {"point": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}},
    "properties": {"at": {"$ref": "#/$defs/point"}, "more": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
    "required": ["at"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("name", ["hermes", "mistral", "llama", "gpt-oss"])
def test_references_within_a_tools_schema(name):
    """pydantic writes them for a model within another one."""
    form, reply = CALLS[name]
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": NESTED}}
    grammar = reply_grammar(form, json.dumps([STOP, tool]), None, is_required=True)
    arguments = json.dumps({"at": {"x": 1}, "more": {"at": {"x": 2}, "more": None}})
    call = reply.replace(CALL.arguments, arguments)
    assert arguments in call and takes(grammar, call)
    assert not takes(grammar, call.replace("2", '"2"'))


def test_references_of_parameters_in_tags():
    tool = {"type": "function", "function": {"name": "f", "parameters": NESTED}}
    grammar = reply_grammar(QWEN_XML, json.dumps([tool]), None, is_required=True)
    call = "<tool_call>\n<function=f>\n<parameter=at>\n{}\n</parameter>\n{}</function>\n</tool_call>"
    more = '<parameter=more>\n{"at": {"x": 2}}\n</parameter>\n'
    assert takes(grammar, call.format('{"x": 1}', "")) and takes(grammar, call.format('{"x": 1}', more))
    assert not takes(grammar, call.format("one", "")) and not takes(grammar, call.format('{"x": "1"}', ""))


def test_many_parameters_with_references_take_little():
    parameters = {
        "properties": {f"p{i}": {"$ref": "#/$defs/x"} for i in range(2000)},
        "$defs": {"x": {"type": "null"}},
    }
    few = {**parameters, "description": "x" * 9000, "properties": {"a": {"$ref": "#/$defs/x"}}}
    for tools in [parameters], [few] * 300:
        named = [
            {"type": "function", "function": {"name": f"f{i}", "parameters": each}}
            for i, each in enumerate(tools)
        ]
        assert len(reply_grammar(QWEN_XML, json.dumps(named), None, is_required=True).source) < 1 << 20


@pytest.mark.parametrize("form", [HERMES, QWEN_XML, GEMMA, LFM])
def test_parameters_that_are_no_schemas_are_any(form):
    for parameters in (
        {"properties": 1},
        {"properties": {"a": True, "b": "$ref", "c": ["$ref"]}, "required": 2},
    ):
        tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
        assert reply_grammar(form, json.dumps([tool]), None, is_required=True)


@pytest.mark.parametrize("keyword", NOT_KEPT)
def test_what_is_left_out_is_what_the_library_does_not_know(keyword):
    compile = llguidance.LLMatcher.grammar_from_json_schema
    assert llguidance.LLMatcher.validate_grammar(compile({keyword: {}}))


def test_what_says_nothing_is_left_out_of_what_is_strict():
    words = {
        "type": "object",
        "propertyNames": {"type": "string"},
        "additionalProperties": {"uniqueItems": False},
    }
    assert without_needless(words) == {"type": "object", "additionalProperties": {}}
    short = {"propertyNames": {"maxLength": 3}, "properties": {"uniqueItems": {"type": "integer"}}}
    assert without_needless(short) == short


def test_what_cannot_be_kept_is_left_out_of_what_is_not_strict():
    email = {"type": "string", "format": "email", "pattern": r"^(?!\.)a+@b\.c$"}
    odd = {
        "not": {"type": "string"},
        "password": {"type": "string", "format": "password"},
        "any": {"type": "any"},
    }
    schema = {
        "type": "object",
        "properties": {
            "mail": email,
            "tags": {"type": "array", "uniqueItems": True},
            **odd,
            "far": {"$ref": "x:y"},
        },
        "patternProperties": {"^(?=x)": {}, "^y": {"type": "integer"}},
        "propertyNames": {"type": "string"},
        "required": ["mail", "not"],
    }
    kept = loosened(schema)
    assert kept["properties"]["mail"] == {"type": "string", "format": "email"}
    assert kept["properties"]["not"] == {"type": "string"} and kept["required"] == schema["required"]
    assert kept["patternProperties"] == {"^y": {"type": "integer"}} and "propertyNames" not in kept
    grammar = schema_grammar(kept)
    assert takes(grammar, '{"mail": "a@b.de", "tags": [1, 1], "not": "x"}') and not takes(
        grammar, '{"mail": "a"}'
    )
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    assert takes(
        reply_grammar(CALLS["hermes"][0], json.dumps([tool]), None, is_required=True),
        '<tool_call>\n{"name": "f", "arguments": {"mail": "a@b.de", "not": "x"}}\n</tool_call>',
    )


def test_integers_have_an_end():
    least = {"type": "integer", "exclusiveMinimum": 2, "description": "A count."}
    schema = {"type": "object", "properties": {"n": {"type": "integer"}, "more": {"items": least}}}
    grammar = schema_grammar(schema)
    assert takes(grammar, '{"n": -9223372036854774784, "more": [3, 9223372036854774784]}')
    for text in (f'{{"n": {"1" * 20}}}', f'{{"more": [{"3" * 20}]}}', '{"more": [2]}'):
        assert not takes(grammar, text)
    many = {"anyOf": [{"type": "integer", "minimum": i} for i in range(99)]}
    assert len(with_strict_formats(many)["$defs"]) == 16  # the library compiles no more


def test_objects_have_the_properties_that_are_named_and_no_others():
    city = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
    listed = {"type": "array", "items": {"$ref": "#/$defs/city"}, "$defs": {"city": city}}
    shut = schema_grammar(closed(listed))
    assert takes(shut, '[{"name": "Oslo"}]') and not takes(shut, '[{"name": "Oslo", "more": 1}]')
    tool = {"type": "function", "function": {"name": "f", "parameters": city}}
    call = reply_grammar(CALLS["hermes"][0], json.dumps([tool]), None, is_required=True)
    begin = '<tool_call>\n{"name": "f", "arguments": {"name": "Oslo"'
    assert takes(call, f"{begin}}}}}\n</tool_call>") and not takes(
        call, f'{begin}, "more": 1}}}}\n</tool_call>'
    )
    for open in (
        city | {"additionalProperties": True},
        city | {"required": ["name", "more"]},
        city | {"anyOf": [{"properties": {"more": {"type": "integer"}}}]},
        {"allOf": [city, {"properties": {"more": {"type": "integer"}}, "required": ["more"]}]},
    ):
        assert takes(schema_grammar(closed(open)), '{"name": "Oslo", "more": 1}')
    a = {"properties": {"a": {}}}
    for odd in ({"properties": 1}, a | {"required": 2}, a | {"required": [{}]}, {"allOf": 1}, True):
        assert closed(odd) == odd
