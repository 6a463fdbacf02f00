import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.formats.tools import calls
from engine.formats.tools.calls import FunctionCall, ToolCallParser
from engine.formats.tools.forms import (
    APERTUS,
    APRIEL,
    COHERE,
    FUNCTIONARY,
    GEMMA,
    GIGACHAT,
    GIGACHAT_3,
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
    shown_form,
)
from tests.paths import SHARED

PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = json.dumps(
    [{"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}},
     {"type": "function", "function": {"name": "stop"}}]
)  # fmt: skip
CALL = FunctionCall("get_weather", '{"city": "Rome", "days": 2}')
STOP = FunctionCall("stop", "{}")
JSON = '{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}'
STOP_JSON = '{"name": "stop", "arguments": {}}'
REPLIES = {
    "hermes": (HERMES, f"Wait.\n<tool_call>\n{JSON}\n</tool_call>", ["Wait.\n", CALL]),
    "two": (HERMES, f"<tool_call>{JSON}</tool_call>\n<tool_call>{STOP_JSON}</tool_call>\n", [CALL, STOP]),
    "cut off": (HERMES, f"<tool_call>\n{JSON}", [CALL]),
    "not a call": (HERMES, "<tool_call>\nno\n</tool_call> then", ["<tool_call>\nno\n</tool_call> then"]),
    "text": (HERMES, "a <tool b <tool_cal", ["a <tool b <tool_cal"]),
    "as OpenAI": (HERMES, f'<tool_call>{{"function": {JSON}}}</tool_call>', [CALL]),
    "xml": (
        QWEN_XML,
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nRome\n</parameter>\n<parameter=days>\n2\n"
        "</parameter>\n</function>\n</tool_call>",
        [CALL],
    ),
    "xml with digits": (
        QWEN_XML,
        "<tool_call><function=get_weather><parameter=city>12</parameter></function></tool_call>",
        [FunctionCall("get_weather", '{"city": "12"}')],
    ),
    "mistral": (MISTRAL, f"[TOOL_CALLS] [{JSON}, {STOP_JSON}]", [CALL, STOP]),
    "ministral": (
        MISTRAL_ARGS,
        f"Well[TOOL_CALLS]get_weather[ARGS]{CALL.arguments}[TOOL_CALLS]stop[CALL_ID]a1[ARGS]{{}}",
        ["Well", CALL, STOP],
    ),
    "granite": (GRANITE, f"<|tool_call|>[{JSON}]", [CALL]),
    "llama": (LLAMA, JSON.replace("arguments", "parameters"), [CALL]),
    "llama, two": (LLAMA, f"<|python_tag|>{JSON}; {STOP_JSON}", [CALL, STOP]),
    "llama, other JSON": (LLAMA, '{"name": "Bob", "parameters": {}}', ['{"name": "Bob", "parameters": {}}']),
    "llama, text": (LLAMA, 'So: {"a": 1}', ['So: {"a": 1}']),
    "glm": (
        GLM,
        "Wait.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>\n<tool_call>stop\n</tool_call>",
        ["Wait.\n", CALL, STOP],
    ),
    "glm, no line breaks": (
        GLM,
        "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome\n</arg_value></tool_call>",
        [FunctionCall("get_weather", '{"city": "Rome\\n"}')],
    ),
    "seed": (
        SEED,
        "<seed:tool_call>\n<function=get_weather>\n<parameter=city>\nRome</parameter>\n<parameter=days>2</parameter>"
        "\n</function>\n</seed:tool_call>",
        [FunctionCall("get_weather", '{"city": "\\nRome", "days": 2}')],
    ),
    "minimax, two": (
        MINIMAX,
        '\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Rome</parameter>\n'
        '<parameter name="days">2</parameter>\n</invoke>\n<invoke name="stop">\n</invoke>\n</minimax:tool_call>',
        ["\n", CALL, STOP],
    ),
    "nemotron": (NEMOTRON, f"<TOOLCALL>[{JSON}, {STOP_JSON}]</TOOLCALL>", [CALL, STOP]),
    "gemma": (
        GEMMA,
        'Well<|tool_call>call:get_weather{city:<|"|>Rome<|"|>,days:2}<tool_call|><|tool_call>call:stop{}<tool_call|>',
        ["Well", CALL, STOP],
    ),
    "gemma, all kinds": (
        GEMMA,
        '<|tool_call>call:get_weather{a:[{b:<|"|>x: {"y", }<|"|>,<|"|>c<|"|>:null}, -1.5],"d":"{e}",f:on}<tool_call|>',
        [
            FunctionCall(
                "get_weather", '{"a": [{"b": "x: {\\"y\\", }", "c": null}, -1.5], "d": "{e}", "f": "on"}'
            )
        ],
    ),
    "phi": (PHI, f"<|tool_call|>{JSON}<|/tool_call|>", [CALL]),
    "phi, a list": (PHI, f"<|tool_call|>[{JSON}, {STOP_JSON}]<|/tool_call|>", [CALL, STOP]),
    "lfm": (
        LFM,
        "<|tool_call_start|>[get_weather(city='Rome', days=2), stop()]<|tool_call_end|>Done.",
        [CALL, STOP, "Done."],
    ),
    "apertus": (
        APERTUS,
        f'<|tools_prefix|>[{{"get_weather": {CALL.arguments}}}, {{"stop": {{}}}}]<|tools_suffix|>',
        [CALL, STOP],
    ),
    "muse": (
        MUSE,
        '<atem:function_calls>\n<atem:invoke name="get_weather">\n<atem:parameter name="city">Rome</atem:parameter>\n'
        '<atem:parameter name="days">2</atem:parameter>\n</atem:invoke>\n</atem:function_calls>',
        [CALL],
    ),
    "cohere": (
        COHERE,
        'So.<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "get_weather", "parameters": '
        f'{CALL.arguments}}},\n    {{"tool_call_id": "1", "tool_name": "stop", "parameters": {{}}}}\n]<|END_ACTION|>',
        ["So.", CALL, STOP],
    ),
    "kimi": (
        KIMI,
        f"So.<|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{CALL.arguments}<|tool_call_end|>"
        "<|tool_call_begin|>functions.stop:1<|tool_call_argument_begin|>{}<|tool_call_end|>",
        ["So.", CALL, STOP],
    ),
    "mistral, ids": (
        MISTRAL,
        f'[TOOL_CALLS][{JSON[:-1]}, "id": "abc12"}}, {STOP_JSON[:-1]}, "id": "Z-1"}}]',
        [CALL, STOP],
    ),
    "apriel": (APRIEL, f"So.<tool_calls>[{JSON}, {STOP_JSON}]</tool_calls>", ["So.", CALL, STOP]),
    "functionary": (
        FUNCTIONARY,
        f"So.<function=get_weather>{CALL.arguments}</function><function=stop>{{}}</function>",
        ["So.", CALL, STOP],
    ),
    "minicpm 5": (
        MINICPM,
        'So.\n<function name="get_weather"><param name="city">Rome</param><param name="days">2</param></function>\n'
        '<function name="stop"></function>',
        ["So.\n", CALL, STOP],
    ),
    "minicpm 5, a text in marks": (
        MINICPM,
        '<function name="get_weather"><param name="city"><![CDATA[<a>\n</param> ]]]]></param></function>',
        [FunctionCall("get_weather", json.dumps({"city": "<a>\n</param> ]]"}))],
    ),
    "gigachat": (GIGACHAT, f"So.<|function_call|>{JSON}", ["So.", CALL]),
    "gigachat 3": (
        GIGACHAT_3,
        f"So.<|message_sep|>\n\nfunction call<|role_sep|>\n{JSON}<|message_sep|>",
        ["So.", CALL],
    ),
    "llama 4": (LLAMA_4, '[get_weather(city="Rome", days=2), stop()]', [CALL, STOP]),
    "llama 4, marked": (LLAMA_4, "<|python_start|>[get_weather(city='Rome', days=2)]<|python_end|>", [CALL]),
    "llama 4, a list": (LLAMA_4, "[1, 2]", ["[1, 2]"]),
    "lfm, JSON": (LFM, f"<|tool_call_start|>[{JSON}]<|tool_call_end|>", [CALL]),
    "lfm, values": (
        LFM,
        """<|tool_call_start|>[get_weather("Rome", days={'a': [true, None, -1.5]})]<|tool_call_end|>""",
        [FunctionCall("get_weather", '{"city": "Rome", "days": {"a": [true, null, -1.5]}}')],
    ),
    "minicpm": (
        LFM,
        '<|tool_call_start|>\n```python\nget_weather(city="Rome", days=2)\nstop()\n```\n<|tool_call_end|>',
        [CALL, STOP],
    ),
    "lfm, no call": (
        LFM,
        "<|tool_call_start|>[print(x)]<|tool_call_end|>",
        ["<|tool_call_start|>[print(x)]<|tool_call_end|>"],
    ),
    "gpt-oss": (HARMONY, f"Wait. to=functions.get_weather<|message|>{CALL.arguments}", ["Wait.", CALL]),
}


def parts(form, chunks, in_pieces=False, is_cut=False):
    parser, found = ToolCallParser(form, TOOLS, in_pieces=in_pieces), []
    for part in (*(part for chunk in chunks for part in parser.feed(chunk)), *parser.flush(is_cut=is_cut)):
        if isinstance(part, FunctionCall) and not part.name:
            found[-1] = FunctionCall(found[-1].name, found[-1].arguments + part.arguments)
        elif isinstance(part, str) and found and isinstance(found[-1], str):
            found[-1] += part
        else:
            found.append(part)
    return found


@pytest.mark.parametrize(
    ("thought", "answer", "calls"),
    [
        (f"I look.\n<tool_call>\n{JSON}\n</tool_call>\n", "", [CALL]),
        (
            f"Like <tool_call>?\n<tool_call>{JSON}</tool_call><tool_call>{STOP_JSON}</tool_call>",
            "\n",
            [CALL, STOP],
        ),
        (f"<tool_call>{JSON}</tool_call> or none.", "", []),
        (f"<tool_call>{JSON}</tool_call>", "Hi.", ["Hi."]),
        (f"<tool_call>{JSON.replace('get_weather', 'other')}</tool_call>", "", []),
    ],
)
def test_a_call_in_thinking_that_was_not_closed_counts_at_its_end(thought, answer, calls):
    parser = ToolCallParser(HERMES, TOOLS, in_pieces=True)
    parser.think(thought)
    assert [part for part in (*parser.feed(answer), *parser.flush()) if part != "\n"] == calls


def test_what_templates_show() -> None:
    assert shown_form('{% if tools %}<|START_ACTION|>[{"tool_name": 1}]<|END_ACTION|>{% endif %}') == COHERE
    assert (
        shown_form("{% if tools %}<|tool_call_begin|>{{ id }}<|tool_call_argument_begin|>{% endif %}") == KIMI
    )
    assert shown_form("{% if tools %}List of tools: [{% endif %}{{ keep_past_thinking }}") is LFM
    assert shown_form("{% if tools %}<tool_call> or <tool_calls>[{% endif %}") is APRIEL
    assert shown_form('{% if tools %}<function name="{{ f }}"><param name="{{ p }}">{% endif %}') is MINICPM
    assert (
        shown_form("{% if tools %}<{start_tag}={function_name}>{parameters}{% endif %}<|python_tag|>")
        is FUNCTIONARY
    )
    assert shown_form("{% set ns = ']<]minimax[>[' %}{% if tools %}<tool_call>{% endif %}") is None


@pytest.mark.parametrize("name", REPLIES)
def test_calls_are_taken_out_however_the_text_is_cut(name):
    form, reply, wanted = REPLIES[name]
    for size in (1, 3, 7, len(reply)):
        for in_pieces in (False, True):
            assert parts(form, [reply[i : i + size] for i in range(0, len(reply), size)], in_pieces) == wanted


@pytest.mark.parametrize(
    "name", ["hermes", "xml", "mistral", "ministral", "granite", "llama", "gpt-oss", "glm", "seed", "gemma"]
)
def test_arguments_come_in_pieces(name):
    form, reply, _ = REPLIES[name]
    parser = ToolCallParser(form, TOOLS, in_pieces=True)
    seen = [
        [part for part in parser.feed(character) if isinstance(part, FunctionCall)] for character in reply
    ]
    when = [at for at, calls in enumerate(seen) if calls]
    assert len(when) > 8 and next(calls for calls in seen if calls)[0].name == "get_weather"
    assert when[0] < reply.index("city") + len("city>") + 1


PIECES = [*'a\n<>/"\\{}é', "</p", "</parameter", "</tool_call>"]
TEXTS = (
    st.lists(st.sampled_from(PIECES), max_size=12)
    .map("".join)
    .filter(lambda text: "</parameter>" not in text)
)


@given(TEXTS, st.integers(), st.integers(1, 9), st.booleans())
def test_arguments_of_any_text(text, days, size, in_tags):
    """However they are cut, and whatever is in them."""
    if in_tags:
        reply = (
            f"<tool_call>\n<function=get_weather>\n<parameter=city>\n{text}\n</parameter>\n<parameter=days>\n"
        )
        reply += f"{days}\n</parameter>\n</function>\n</tool_call>"
        form = QWEN_XML
    else:
        arguments = json.dumps({"city": text, "days": days}, ensure_ascii=False)
        reply, form = f'<tool_call>{{"name": "get_weather", "arguments": {arguments}}}</tool_call>', HERMES
    [call] = parts(form, [reply[i : i + size] for i in range(0, len(reply), size)], in_pieces=True)
    assert call.name == "get_weather" and json.loads(call.arguments) == {"city": text, "days": days}


def test_a_reply_that_is_cut_off_within_a_call():
    for form, reply in ((HERMES, f"<tool_call>\n{JSON[:-12]}"), (QWEN_XML, REPLIES["xml"][1][:-60])):
        [call] = parts(form, [reply], in_pieces=True)
        assert [call] == parts(form, [reply], is_cut=True)
        assert call.name == "get_weather" and call.arguments.startswith('{"city": "Rome')
        with pytest.raises(ValueError):  # nobody acts on half of a value
            json.loads(call.arguments)
    text = REPLIES["llama, other JSON"][1][:-3]
    assert parts(LLAMA, [text], is_cut=True) == [text]


@given(st.sampled_from([HERMES, MISTRAL_ARGS, LLAMA, HARMONY]), st.lists(st.sampled_from(
    ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|channel|>", " to=functions.", "{", "}", " a"]
)))  # fmt: skip
def test_text_without_calls_stays_as_it_is(form, chunks):
    found = parts(form, chunks)
    if not any(isinstance(part, FunctionCall) for part in found):
        assert "".join(found) == "".join(chunks)


@pytest.mark.skipif(not SHARED.is_dir(), reason="no shared folder with real templates")
@pytest.mark.parametrize(
    ("name", "form"),
    [("qwen3", HERMES), ("qwen3.5", QWEN_XML), ("llama3.2", LLAMA), ("ministral3", MISTRAL_ARGS),
     ("granite", GRANITE), ("gpt-oss", HARMONY), ("gemma4", GEMMA), ("phi3", None), ("gemma3", None)],
)  # fmt: skip
def test_a_template_tells_the_form(name, form):
    assert shown_form((SHARED / f"models/vocab/{name}.jinja").read_text()) == form


def test_each_piece_asks_whether_a_call_begins_in_a_bounded_part_of_what_is_held(monkeypatch):
    """20,000 digits after the mark of a call took 35 s."""
    asked = []
    pattern = SimpleNamespace(match=lambda text: asked.append(len(text)))
    monkeypatch.setattr(calls, "_JSON_BEGINNINGS", ((pattern, None),))
    parts(HERMES, ["<tool_call>", *"9" * 1500], in_pieces=True)
    assert max(asked) == calls._MAX_BEGINNING < 1500
