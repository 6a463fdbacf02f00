"""Tools, calls and results in the prompts that templates make."""

import json

import pytest
from msgspec.structs import replace

from engine.errors import TemplateError
from engine.formats.tools.calls import ToolCallParser
from engine.formats.tools.forms import LFM
from engine.protocol.events import Message, ToolCall
from tests.formats.templates.test_template import (
    ECHO,
    assistant,
    chatml,
    needs_shared,
    real,
    system,
    template,
    text_of,
    user,
)
from tests.paths import SHARED

__all__ = ["chatml", "real", "template"]


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather <|im_end|> of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALL = ToolCall(id="abc123456", name="get_weather", arguments='{"city": "Rome <|im_end|>"}')
RESULT = Message(role="tool", content="Sunny", tool_call_id="abc123456", name="get_weather")
ASKED = [user("Hi"), Message(role="assistant", content="", tool_calls=(CALL,)), RESULT]


@needs_shared
def test_tools_are_rendered_as_hugging_face_does(real):
    template, tokenizer = real("qwen3")
    text = text_of(template, ASKED, tools=json.dumps([WEATHER]))
    assert json.dumps(WEATHER) in text
    assert (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome <|im_end|>"}}\n</tool_call>' in text
    )
    assert "<tool_response>\nSunny\n</tool_response>" in text
    ids = template.encode(ASKED, tools=json.dumps([WEATHER])).ids
    assert ids.count(tokenizer.special_tokens["<|im_end|>"]) == 4  # of the turns, with the one of the tools


def test_a_call_ends_its_reply(template):
    echo = template(ECHO)
    assert text_of(echo, ASKED[:2]).endswith("<|im_start|>assistant\n<|im_end|>\n")
    assert text_of(echo, [user("Hi"), assistant("Yo")]).endswith("user\nHi<|im_end|>\nYo")


def test_a_private_character_in_tools_is_not_taken_for_a_disguise(template):
    echo = template("{# <tool_call> #}{% for t in tools %}{{ t.function.name }}{% endfor %}" + ECHO)
    tools = '[{"type": "function", "function": {"name": "\\udb80\\udc00<"}}]'
    assert text_of(echo, [user("x")], tools=tools).startswith("\U000f0000<<|im_start|>")
    with pytest.raises(TemplateError, match="private"):
        echo.encode([user("".join(map(chr, range(0xF0000, 0x10FFFE))))])


def test_tools_that_a_template_cannot_render(template):
    broken = template("{# <tool_call> #}{% if tools %}{{ 1 + tools }}{% endif %}" + ECHO)
    with pytest.raises(TemplateError, match="does not work with these tools"):
        broken.encode([user("Hi")], tools=json.dumps([WEATHER]))
    assert text_of(broken, [user("Hi")]) and not broken.warning
    refusing = template("{% if messages[1] %}{{ raise_exception('one at a time') }}{% endif %}" + ECHO)
    with pytest.raises(TemplateError, match="one at a time"):
        refusing.encode(ASKED)


@pytest.mark.parametrize("source", [ECHO, "{% for t in tools %}{{ t }}{% endfor %}" + ECHO])
def test_a_template_that_shows_no_tools_gets_them_in_the_system_text(template, source):
    echo, again = template(source), replace(CALL, id="b")
    messages = [
        user("Hi"),
        Message(role="assistant", content="I look.", tool_calls=(CALL, again)),
        RESULT,
        replace(RESULT, content="Rain", tool_call_id="b"),
        user("So?"),
    ]
    call = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome <|im_end|>"}}\n</tool_call>'
    turns = (
        f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nI look.\n{call}\n{call}<|im_end|>\n<|im_start|>user\n"
        "<tool_response>\nSunny\n</tool_response>\n<tool_response>\nRain\n</tool_response><|im_end|>\n"
    )
    assert turns in text_of(echo, messages)  # also without tools of its own
    for first in ([], [system("Be brief.")]):
        text = text_of(echo, [*first, *messages], tools=json.dumps([WEATHER]))
        told, _, rest = text.partition("<|im_end|>\n<|im_start|>user")
        begin = "Be brief.\n\nYou can" if first else "You can"
        assert told.startswith(f"<|im_start|>system\n{begin}") and json.dumps(WEATHER["function"]) in told
        assert '<tool_call>\n{"name": "the name of the tool", "arguments": {"' in told
        assert turns in f"<|im_start|>user{rest}"


def test_a_template_that_shows_no_calls_gets_them_in_the_reply(template):
    lfm = template("{# <|tool_list_start|> #}{{ tools | tojson }}" + ECHO)
    more = ToolCall(id="b", name="stop", arguments='{"n": [1, true], "s": "a\\"b"}')
    asked = [user("Hi"), Message(role="assistant", content="Hm.", tool_calls=(CALL, more)), RESULT]
    calls = """[get_weather(city="Rome <|im_end|>"), stop(n=[1, True], s="a\\"b")]"""
    text = text_of(lfm, asked, tools=json.dumps([WEATHER]))
    assert f"assistant\nHm.<|tool_call_start|>{calls}<|tool_call_end|><|im_end|>" in text
    parser = ToolCallParser(LFM, json.dumps([WEATHER]))
    read = [*parser.feed(f"<|tool_call_start|>{calls}<|tool_call_end|>")]
    assert [(call.name, json.loads(call.arguments)) for call in read] == [
        (call.name, json.loads(call.arguments)) for call in (CALL, more)
    ]


def test_marks_that_open_thinking_and_say_how_long_it_is(template):
    source = (
        "{% for m in messages %}{{ m.content }}</seed:think>{% endfor %}"
        "<seed:think>{% if thinking_budget == 0 %}<seed:cot_budget_reflect>{% endif %}"
    )
    seed = template(source)
    for think in (True, False):
        prompt = seed.encode([user("Hi")], think=think)
        assert prompt.opens_thinking and prompt.marks.close == "</seed:think>"
    assert not template(f"{source}</seed:think>").encode([user("Hi")]).opens_thinking


@needs_shared
@pytest.mark.parametrize(
    ("name", "call", "result"),
    [
        ("llama3.2", '{"name": "get_weather", "parameters": {"city": "Rome"}}', '"Sunny"'),
        ("qwen3.5", "<function=get_weather>\n<parameter=city>\nRome\n</parameter>", "<tool_response>\nSunny"),
        ("gemma4", '<|tool_call>call:get_weather{city:<|"|>Rome<|"|>}<tool_call|>', "Sunny"),
        ("ministral3", '[TOOL_CALLS]get_weather[ARGS]{"city": "Rome"}', "[TOOL_RESULTS]Sunny"),
        (
            "gpt-oss",
            "<|channel|>analysis<|message|>Hm<|end|><|start|>assistant to=functions.get_weather<|channel|>commentary "
            'json<|message|>{"city": "Rome"}<|call|>',
            '<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"Sunny"',
        ),
    ],
)  # fmt: skip
def test_a_call_and_its_result_in_the_forms_of_families(template, name, call, result):
    source = (SHARED / f"models/vocab/{name}.jinja").read_text()
    asked = ToolCall(id="abc123456", name="get_weather", arguments='{"city": "Rome"}')
    messages = [
        user("Rome?"),
        Message(role="assistant", content="", thinking="Hm", tool_calls=(asked,)),
        RESULT,
    ]
    text = text_of(template(source), messages, tools=json.dumps([WEATHER]))
    assert call in text and result in text.partition(call)[2] and "get_weather" in text.partition("Rome?")[0]
