"""How families of models write calls of tools. The chat template of a model says which way is its own.

A client describes tools in OpenAI's form: a JSON array of {"type": "function", "function": {"name", "description",
"parameters"}}, in which the parameters are a JSON schema. The chat template shows them to the model; if it shows none,
`told` does.
"""

import re
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Tags:
    """How a call with its parameters in tags is written: `name` and `key` hold what stands before and after these. If
    `has_breaks`, a line break at both ends of a value is none of it. `end` comes after the last parameter;
    `ends_call`: it is what closes the call. A value may stand between `quotes`, and then hold the other marks."""

    name: tuple[str, str]
    key: tuple[str, str]
    value_end: str
    end: str
    has_breaks: bool = False
    ends_call: bool = False
    quotes: tuple[str, str] = ("", "")


@dataclass(frozen=True)
class ToolForm:
    """How a family writes a call: after one of `opens`, and before `close` ("": before the next call, or the end of the
    reply). `bare`: a reply that is nothing but a JSON object is a call, too, or such a list `in_python`. A call is a
    JSON object with the name under `name_key` and, under `key` ("": the name is the key), the arguments, or a list of
    these; or the name, then `between`, then the arguments; or it is in `tags`; or it begins with `before_name`, then
    its braces are Gemma's (`gemma_calls`); or, `in_python`, it is a list of calls of functions."""

    opens: tuple[str, ...]
    close: str = ""
    bare: bool = False
    key: str = "arguments"
    listed: bool = False
    between: str = ""
    tags: Tags | None = None
    before_name: str = ""
    in_python: bool = False
    name_key: str = "name"


_FUNCTION = Tags(("<function=", ">\n"), ("<parameter=", ">\n"), "\n</parameter>\n", "</function>", True)
HERMES = ToolForm(("<tool_call>",), "</tool_call>")  # Qwen 2.5 and 3 too
QWEN_XML = replace(HERMES, tags=_FUNCTION)  # Qwen 3.5, Qwen3-Coder
# GLM 4.5 to 4.7
GLM = replace(
    HERMES,
    tags=Tags(
        ("", "\n"), ("<arg_key>", "</arg_key>\n<arg_value>"), "</arg_value>\n", HERMES.close, ends_call=True
    ),
)
SEED = ToolForm(
    ("<seed:tool_call>",),
    "</seed:tool_call>",
    tags=replace(_FUNCTION, key=("<parameter=", ">"), value_end="</parameter>\n", has_breaks=False),
)
# MiniMax M2
MINIMAX = ToolForm(
    ("<minimax:tool_call>",),
    "</minimax:tool_call>",
    tags=Tags(('<invoke name="', '">\n'), ('<parameter name="', '">'), "</parameter>\n", "</invoke>"),
)
GEMMA = ToolForm(("<|tool_call>",), "<tool_call|>", before_name="call:")  # Gemma 4
MISTRAL = ToolForm(("[TOOL_CALLS]",), listed=True)
MISTRAL_ARGS = ToolForm(("[TOOL_CALLS]",), between="[ARGS]")  # Ministral 3
GRANITE = ToolForm(("<|tool_call|>",), listed=True)
NEMOTRON = ToolForm(("<TOOLCALL>",), "</TOOLCALL>", listed=True)  # Nemotron Nano 2
PHI = ToolForm(("<|tool_call|>",), "<|/tool_call|>")
LFM = ToolForm(("<|tool_call_start|>",), "<|tool_call_end|>", in_python=True)  # LFM2, MiniCPM 3 and 4
APERTUS = ToolForm(("<|tools_prefix|>",), "<|tools_suffix|>", key="", listed=True)
MUSE = ToolForm(
    ("<atem:function_calls>",),
    "</atem:function_calls>",
    tags=Tags(
        ('<atem:invoke name="', '">\n'),
        ('<atem:parameter name="', '">'),
        "</atem:parameter>\n",
        "</atem:invoke>",
    ),
)
COHERE = ToolForm(  # Command R7B
    ("<|START_ACTION|>",), "<|END_ACTION|>", key="parameters", listed=True, name_key="tool_name"
)
# Kimi K2: each call has its number, and the marks around all calls are tokens that nobody sees
KIMI = ToolForm(
    ("<|tool_call_begin|>functions.",), "<|tool_call_end|>", between=":0<|tool_call_argument_begin|>"
)
APRIEL = ToolForm(("<tool_calls>",), "</tool_calls>", listed=True)
FUNCTIONARY = ToolForm(("<function=",), "</function>", between=">")  # functionary 3.1
# MiniCPM 5
MINICPM = ToolForm(
    ('<function name="',),
    "</function>",
    tags=Tags(
        ("", '">'),
        ('<param name="', '">'),
        "</param>",
        "</function>",
        ends_call=True,
        quotes=("<![CDATA[", "]]>"),
    ),
)
GIGACHAT = ToolForm(("<|function_call|>",))  # GigaChat 3.1
# A call is a message of a role of its own.
GIGACHAT_3 = ToolForm(
    ("<|message_sep|>\n\nfunction call<|role_sep|>\n", "function call<|role_sep|>\n"), "<|message_sep|>"
)
LLAMA_4 = ToolForm(("<|python_start|>",), "<|python_end|>", bare=True, in_python=True)
LLAMA = ToolForm(("<|python_tag|>",), bare=True, key="parameters")
HARMONY = ToolForm((" to=functions.",), between="<|message|>")  # gpt-oss, as `channels` shows it
_SIGNS: tuple[tuple[tuple[str, ...], ToolForm | None], ...] = (
    # what a template with the form holds; the first one that fits counts
    (("]<]minimax[>[",), None),  # MiniMax M3: arguments in tags within tags, which are not read
    (("<|START_ACTION|>", '"tool_name"'), COHERE),
    (("<|tool_call_begin|>", "<|tool_call_argument_begin|>"), KIMI),
    (("<|channel|>", " to=functions."), HARMONY),
    (("<|channel|>commentary",), HARMONY),
    (("[TOOL_CALLS]", "[ARGS]"), MISTRAL_ARGS),
    (("[TOOL_CALLS]",), MISTRAL),
    (("<|tool_call>call:",), GEMMA),
    (("<|tool_call|>", "<|/tool_call|>"), PHI),
    (("<|tool_call|>",), GRANITE),
    (("<seed:tool_call>",), SEED),
    (("<minimax:tool_call>", "<invoke name="), MINIMAX),
    (("<TOOLCALL>[",), NEMOTRON),
    (("<tool_calls>[",), APRIEL),
    (("<|function_call|>", "<|message_sep|>"), GIGACHAT),
    (("'function call'", "<|role_sep|>", "<|message_sep|>"), GIGACHAT_3),
    (("<tool_call>", "<arg_key>"), GLM),
    (("<tool_call>", "<function="), QWEN_XML),
    (("<tool_call>",), HERMES),
    (('<function name="', '<param name="'), MINICPM),
    (("<{start_tag}={function_name}>",), FUNCTIONARY),
    (("<|tool_call_start|>",), LFM),
    (("<|tool_list_start|>",), LFM),
    (("List of tools: [", "keep_past_thinking"), LFM),  # LFM2.5
    (("<atem:function_calls>",), MUSE),
    (("<|tools_prefix|>", "<|tools_suffix|>"), APERTUS),
    (("[func_name1(params_name1=", "<|header_start|>"), LLAMA_4),
    (("<|python_tag|>",), LLAMA),
    (('"parameters": dictionary',), LLAMA),
)
_READS_TOOLS = re.compile(r"""(?<![\w.<>/"'])tools\b(?!>)""")  # the variable, not a field or a tag

CALL_TOKENS = frozenset((
    "<tool_call>", "</tool_call>", "<|tool_call|>", "<|/tool_call|>", "<|python_tag|>", "[TOOL_CALLS]", "[CALL_ID]",
    "[ARGS]", "<|tool_call>", "<tool_call|>", '<|"|>', "<seed:tool_call>", "</seed:tool_call>",
    "<minimax:tool_call>", "</minimax:tool_call>", "<TOOLCALL>", "</TOOLCALL>",
    "<|tool_call_start|>", "<|tool_call_end|>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>",
    "<|python_start|>", "<|python_end|>", "<|tools_prefix|>", "<|tools_suffix|>",
    "<|START_ACTION|>", "<|END_ACTION|>", "<tool_calls>", "</tool_calls>", "<|function_call|>",
    "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
))  # fmt: skip
"""Special tokens that are part of a call: `ToolCallParser` has to see them."""


def shown_form(template: str) -> ToolForm | None:
    """The form that a chat template describes; None if it shows no tools, or in a form that is not known."""
    if not _READS_TOOLS.search(template):
        return None
    return next((form for signs, form in _SIGNS if all(sign in template for sign in signs)), None)
