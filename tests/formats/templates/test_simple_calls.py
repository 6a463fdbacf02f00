"""Conversations with calls of tools, for templates that refuse the usual form."""

from msgspec.structs import replace

from engine.formats.templates.simple_calls import one_by_one, with_short_ids
from engine.formats.templates.template import ChatTemplate
from engine.formats.tokens.tokenizer import Tokenizer
from engine.protocol.events import Message, ToolCall
from tests.formats.vocabularies import byte_level, spelled_out

# As Mistral's and Llama 3's: ids have 9 letters, and a message has one call.
STRICT = (
    "{# <tool_call> #}{% if tools %}{% endif %}{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{% if c.id | length != 9 or m.tool_calls | length > 1 %}{{ raise_exception('no') }}{% endif %}"
    "{{ c.function.name }}({% endfor %}{{ m.content }}){% endfor %}"
)


def call(id: str) -> ToolCall:
    return ToolCall(id=id, name=f"f{id[-1]}", arguments="{}")


def result(id: str) -> Message:
    return Message(role="tool", content=f"r{id[-1]}", tool_call_id=id)


USER = Message(role="user", content="u")
ASKED = Message(role="assistant", content="a", thinking="t", tool_calls=(call("call-1"), call("call-2")))


def test_each_call_stands_before_its_result():
    messages = one_by_one([USER, ASKED, result("call-2"), result("call-1"), result("call-9"), USER])
    assert [(m.role, [c.id for c in m.tool_calls], m.content, m.thinking) for m in messages] == [
        ("user", [], "u", ""),
        ("assistant", ["call-2"], "a", "t"),
        ("tool", [], "r2", ""),
        ("assistant", ["call-1"], "", ""),
        ("tool", [], "r1", ""),
        ("tool", [], "r9", ""),
        ("user", [], "u", ""),
    ]
    assert [len(m.tool_calls) for m in one_by_one([ASKED, result("call-1")])] == [1, 0, 1]
    assert one_by_one([USER, result("x")]) == [USER, result("x")]


def test_results_of_calls_with_the_same_id_are_in_their_order():
    asked = replace(ASKED, tool_calls=tuple(ToolCall(id="", name=name, arguments="{}") for name in "abc"))
    messages = one_by_one([asked, Message(role="tool", content="1"), USER])
    assert [[c.name for c in m.tool_calls] for m in messages] == [["a"], [], ["b"], ["c"], []]


def test_ids_are_the_same_for_a_call_and_its_result():
    (first, second), answer = with_short_ids([ASKED])[0].tool_calls, with_short_ids([result("call-2")])[0]
    assert answer.tool_call_id == second.id != first.id and len(second.id) == 9
    assert with_short_ids([result("abcdefg12"), USER]) == [result("abcdefg12"), USER]


def test_a_template_that_refuses_calls_gets_simple_ones(tmp_path):
    template = ChatTemplate(STRICT, "llama", tokenizer := Tokenizer(byte_level(tmp_path / "v")))
    messages = [USER, ASKED, result("call-1"), result("call-2")]
    assert spelled_out(tokenizer, template.encode(messages).ids) == "u)f1(a)r1)f2()r2)"


def test_a_template_for_tools_alone_gets_an_empty_list(tmp_path):
    source = "{% for t in tools %}{{ t }}{% endfor %}{{ messages[0].content }}"
    template = ChatTemplate(source, "llama", tokenizer := Tokenizer(byte_level(tmp_path / "v")))
    assert spelled_out(tokenizer, template.encode([USER]).ids) == "u" and not template.warning
