"""Replies that are drawn at random among those that the grammar of a random schema allows."""

import json
import random
import warnings
from datetime import datetime, time

import numpy as np
import pytest

from engine.formats.tools.grammars import WHITE_SPACE, reply_grammar, schema_grammar
from engine.formats.tools.json_leniency import loosened
from tests.formats.tools.test_grammars import CALLS, VOCABULARY
from tests.thorough import rarely

llguidance = pytest.importorskip("llguidance")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # another library's
    jsonschema = pytest.importorskip("jsonschema")

EOS, MOST = 256, 1500  # tokens, each of a byte
ENDS = [ord(byte) for byte in '"}],']
FORMATS = jsonschema.FormatChecker(["date", "email", "ipv4", "uuid"])
FORMATS.checks("time", ValueError)(lambda text: not isinstance(text, str) or time.fromisoformat(text.upper()))
FORMATS.checks("date-time", ValueError)(
    lambda text: not isinstance(text, str) or datetime.fromisoformat(text.upper())
)
NOT_KEPT = {"uniqueItems": True, "not": {"type": "null"}, "contains": {"type": "integer"}}


def schema_of(choose, depth=0):
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const"]
    kinds += ["object", "array", "anyOf", "$ref"] if depth < 3 else []
    match choose.choice(kinds):
        case "string":
            form = choose.choice(
                ({}, {"maxLength": 9}, {"minLength": 2, "maxLength": 5}, {"pattern": "^[a-c]{1,4}$"})
            )
            if choose.random() < 0.3:
                form = {"format": choose.choice(("date", "time", "date-time", "email", "ipv4", "uuid"))}
            made = {"type": "string", **form}
        case "integer" | "number" as kind:
            low = choose.randint(-99, 99)
            made = {
                "type": kind,
                **choose.choice(({}, {"minimum": low}, {"minimum": low, "maximum": low + 7})),
            }
        case "enum":
            made = {"enum": choose.sample(["a", "b\n", 1, 2.5, None, True, [1], {"k": 0}], 3)}
        case "const":
            made = {"const": choose.choice(("x", 7, None, {"a": [1]}))}
        case "object":
            names = choose.sample(["a", "b", "c d", "é", '"'], choose.randint(0, 4))
            made = {"type": "object", "properties": {name: schema_of(choose, depth + 1) for name in names}}
            made |= {"required": [name for name in names if choose.random() < 0.6]}
            made |= choose.choice(
                ({}, {"additionalProperties": False}, {"additionalProperties": {"type": "integer"}})
            )
        case "array":
            made = {"type": "array", "items": schema_of(choose, depth + 1)}
            made |= choose.choice(({}, {"minItems": 1, "maxItems": 3}, {"maxItems": 2}))
        case "anyOf":
            made = {"anyOf": [schema_of(choose, depth + 1) for _ in range(2)]}
        case "$ref":
            made = {"$ref": "#/$defs/node"}
        case kind:
            made = {"type": kind}
    if choose.random() < 0.02:
        made |= [{key: value} for key, value in NOT_KEPT.items()][choose.randrange(len(NOT_KEPT))]
    return made


def drawn(grammar, choose):
    """A reply; "" if it did not end. Raises ValueError for a grammar that cannot be used."""
    matcher = llguidance.LLMatcher
    if grammar.kind == "json_schema":
        source = matcher.grammar_from_json_schema(
            grammar.source, overrides={"whitespace_pattern": WHITE_SPACE}
        )
    else:
        source = matcher.grammar_from_lark(grammar.source)
    made = matcher(VOCABULARY, source, log_level=0)
    if made.is_error():
        raise ValueError(made.get_error())
    said = bytearray()
    for _ in range(MOST):
        words = np.frombuffer(made.compute_bitmask(), np.uint8)
        allowed = np.flatnonzero(np.unpackbits(words, bitorder="little")[: EOS + 1])
        ends = [end for end in (EOS, *ENDS) if end in allowed]
        token = choose.choice(ends) if ends and choose.random() < 0.5 else int(choose.choice(allowed))
        if token == EOS:
            return said.decode()
        assert made.consume_token(token), made.get_error()
        said.append(token)
    return ""


@pytest.mark.parametrize(("first", "end"), [(0, 25), rarely(25, 1000)])
def test_every_reply_that_ends_is_valid(first, end):
    """Half of the schemas are those of a tool's arguments."""
    ended = 0
    for number in range(first, end):
        choose = random.Random(number)
        schema = {
            "type": "object",
            "properties": {"a": schema_of(choose), "b": schema_of(choose)},
            "required": ["a"],
        }
        schema |= {"$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}}}
        tool = json.dumps([{"type": "function", "function": {"name": "do", "parameters": schema}}])
        is_tool = number % 2
        grammar = (
            reply_grammar(CALLS["hermes"][0], tool, None, is_required=True)
            if is_tool
            else schema_grammar(schema)
        )
        try:
            reply = drawn(grammar, choose)
        except ValueError as error:
            assert any(key in json.dumps(schema) and key in str(error) for key in (*NOT_KEPT, "$ref")), (
                number,
                error,
            )
            continue
        if reply:
            ended += 1
            value = json.loads(reply.removeprefix("<tool_call>").removesuffix("</tool_call>"))
            kept = loosened(schema) if is_tool else schema  # nobody has asked for strict arguments
            jsonschema.validate(value["arguments"] if is_tool else value, kept, format_checker=FORMATS)
    assert ended > 0.6 * (end - first)
