import json
from unittest import mock

import pytest

from engine.formats.tools import json_kinds
from engine.formats.tools.calls import ToolCallParser
from engine.formats.tools.forms import QWEN_XML
from engine.formats.tools.json_kinds import KindsOf, read

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}}
WHOLE = {"$defs": {"point": POINT, "a/b": {"$ref": "#/$defs/point"}, "loop": {"$ref": "#/$defs/loop"}}}


@pytest.mark.parametrize(
    ("schema", "allowed"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/point"}]}, {"string", "object"}),
        ({"oneOf": [{"type": "string"}, {}]}, set()),
        ({"enum": ["1", 2, None]}, {"string", "integer", "null"}),
        ({"const": True}, {"boolean"}),
        ({"allOf": [{"description": "x"}, {"$ref": "#/$defs/a~1b"}]}, {"object"}),
        ({"$ref": "#/$defs/loop"}, set()),
        ({"$ref": "#/$defs/missing"}, set()),
        ({"$ref": "other"}, set()),
        (True, set()),
    ],
)
def test_the_kinds_that_a_schema_allows(schema, allowed):
    assert KindsOf(WHOLE)(schema) == allowed


def test_references_are_followed_once_each():
    """Ten choices of ten choices, and so on, would take for ever."""
    levels = {f"l{i}": {"anyOf": [{"$ref": f"#/$defs/l{i + 1}"}] * 10} for i in range(40)}
    whole = {"$defs": levels | {"l40": {"type": "integer"}}}
    kinds = KindsOf(whole)
    with mock.patch.object(json_kinds, "_found", wraps=json_kinds._found) as found:
        assert all(kinds({"$ref": "#/$defs/l0"}) == {"integer"} for _ in range(3)) and found.call_count == 41
    chain = {"$defs": {f"l{i}": {"$ref": f"#/$defs/l{i + 1}"} for i in range(2000)}}
    assert KindsOf(chain)({"$ref": "#/$defs/l0"}) == set()


@pytest.mark.parametrize(
    ("text", "allowed", "value"),
    [
        ("42", {"string", "null"}, "42"),
        ("null", {"string", "null"}, None),
        ('{"a": 1}', {"string", "null"}, '{"a": 1}'),
        ("42", {"string", "number"}, 42),
        ('"a"', {"string", "number"}, '"a"'),
        ("42", {"string"}, "42"),
        ("42", set(), 42),
        ("Rome", {"integer"}, "Rome"),
        ('{"a": 1}', {"object"}, {"a": 1}),
        ("{'a': True}", {"object"}, {"a": True}),
        ("{'a': True}", {"object", "string"}, "{'a': True}"),
        ("f()", {"array"}, "f()"),
    ],
)
def test_a_text_is_read_as_what_is_allowed(text, allowed, value):
    assert read(text, frozenset(allowed)) == value


@pytest.mark.parametrize("in_pieces", [False, True])
def test_parameters_that_may_be_left_out_stay_texts(in_pieces):
    """As pydantic writes `str | None`: the content of a file of JSON is a text, too."""
    optional = {"anyOf": [{"type": "string"}, {"type": "null"}]}
    properties = {"content": optional, "mode": optional, "at": {"$ref": "#/$defs/point"}}
    parameters = {"type": "object", "properties": properties, **WHOLE}
    tools = json.dumps([{"type": "function", "function": {"name": "write", "parameters": parameters}}])
    given = {"content": '{"a": 1}', "mode": "null", "at": '{"x": 2}'}
    tags = "".join(f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in given.items())
    parser = ToolCallParser(QWEN_XML, tools, in_pieces=in_pieces)
    reply = f"<tool_call>\n<function=write>\n{tags}</function>\n</tool_call>"
    calls = [*(part for character in reply for part in parser.feed(character)), *parser.flush()]
    arguments = json.loads("".join(call.arguments for call in calls if not isinstance(call, str)))
    assert arguments == {"content": '{"a": 1}', "mode": None, "at": {"x": 2}}
