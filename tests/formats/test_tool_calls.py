import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.formats.tool_calls import (
    GRANITE,
    HARMONY,
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_ARGS,
    QWEN_XML,
    FunctionCall,
    ToolCallParser,
    demand,
    tool_form,
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
    "gpt-oss": (
        HARMONY,
        f"Wait. to=functions.get_weather<|message|>{CALL.arguments}",
        ["Wait.", CALL],
    ),
}


def parts(form, chunks):
    parser, found = ToolCallParser(form, TOOLS), []
    for part in (*(part for chunk in chunks for part in parser.feed(chunk)), *parser.flush()):
        if isinstance(part, str) and found and isinstance(found[-1], str):
            found[-1] += part
        else:
            found.append(part)
    return found


@pytest.mark.parametrize("name", REPLIES)
def test_calls_are_taken_out_however_the_text_is_cut(name):
    form, reply, wanted = REPLIES[name]
    for size in (1, 3, 7, len(reply)):
        assert parts(form, [reply[i : i + size] for i in range(0, len(reply), size)]) == wanted


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
     ("granite", GRANITE), ("gpt-oss", HARMONY), ("phi3", None), ("gemma3", None)],
)  # fmt: skip
def test_a_template_tells_the_form(name, form):
    assert tool_form((SHARED / f"models/vocab/{name}.jinja").read_text()) == form


@pytest.mark.parametrize("form", [HERMES, MISTRAL, MISTRAL_ARGS, GRANITE, LLAMA])
def test_what_is_demanded_is_read_again(form):
    """The grammar's own parser says whether it takes a call as the model would write it."""
    llguidance = pytest.importorskip("llguidance")
    grammar = demand(form, TOOLS, "get_weather")
    assert "stop" not in grammar
    body = JSON.replace("arguments", form.key)
    if form.between:
        body = f"get_weather[ARGS]{CALL.arguments}"
    elif form.listed:
        body = f"[{body}]"
    line = "\n" if form.close else ""
    reply = f"{'' if form.bare else form.opens[0]}{line}{body}{line}{form.close}"
    vocabulary = llguidance.LLTokenizer(llguidance.TokenizerWrapper(_Bytes()), n_vocab=257, eos_token=256)
    matcher = llguidance.LLMatcher(vocabulary, llguidance.LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert matcher.consume_tokens(list(reply.encode())) and matcher.is_accepting(), matcher.get_error()
    assert parts(form, [reply]) == [CALL]


@pytest.mark.parametrize("form", [QWEN_XML, HARMONY])
def test_what_cannot_be_demanded(form):
    assert demand(form, TOOLS) == ""


class _Bytes:
    eos_token_id, bos_token_id, special_token_ids = 256, None, (256,)
    tokens = [*(bytes([byte]) for byte in range(256)), b"<eos>"]  # noqa: RUF012

    def __call__(self, text):
        return list(text if isinstance(text, bytes) else text.encode())
