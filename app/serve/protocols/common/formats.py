"""What an answer is to keep to: a JSON schema, a regular expression, one of some texts, or a grammar.

`response_format` is OpenAI's. `json_schema` and `grammar` are llama-server's, the fields that begin with `guided_` and
`structured_outputs` vLLM's, and `regex` and `ebnf` SGLang's. Whoever asks for a format gets it, or hears that it cannot
be: an answer that only looks right would be worse.
"""

import json
import re
import sys
from typing import Any, Literal

import msgspec

from app.serve.errors import ApiError, wrong
from app.serve.protocols.common.json_values import check_size, check_texts
from engine.formats.tools.grammars import choice_grammar, schema_grammar
from engine.formats.tools.json_leniency import closed, loosened, without_needless
from engine.protocol.events import Grammar

MAX_GRAMMAR = 1 << 14
"""Characters of a grammar in another syntax: making ours of it takes 50 ms, in which nobody else is answered."""
Schema = dict[str, Any]


class JsonSchema(msgspec.Struct):
    """A schema that is not `strict` loses the parts that cannot be kept."""

    schema: Schema | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct):
    """`schema` beside `json_object` is llama-server's, and that of others; `grammar` is of the type "grammar". Where
    the type is missing, what there is says it."""

    type: Literal["text", "json_object", "json_schema", "grammar"] | None = None
    json_schema: JsonSchema | None = None
    schema: Schema | None = None
    grammar: str | None = None


class StructuredOutputs(msgspec.Struct):
    json: str | Schema | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None


class Formatted(msgspec.Struct, kw_only=True):
    """The fields of a request that say so."""

    response_format: ResponseFormat | None = None
    json_schema: str | Schema | None = None
    grammar: str | None = None
    guided_json: str | Schema | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    regex: str | None = None
    ebnf: str | None = None


def format_of(body: Formatted) -> Schema | Grammar | None:
    """The format that the answer is to keep to, if there is one. Raises ApiError."""
    other = body.structured_outputs or StructuredOutputs()
    wanted: dict[str, Schema | Grammar] = {}
    if body.response_format and (format := _response_format(body.response_format)) is not None:
        wanted["response_format"] = format
    for name, schema in (
        ("json_schema", body.json_schema),
        ("guided_json", body.guided_json),
        ("structured_outputs.json", other.json),
    ):
        if schema is not None:
            wanted[name] = _schema(schema, name)
    if other.json_object:
        wanted["structured_outputs.json_object"] = {"type": "object"}
    for name, regex in (
        ("guided_regex", body.guided_regex),
        ("structured_outputs.regex", other.regex),
        ("regex", body.regex),
    ):
        if regex is not None:
            wanted[name] = _regex(regex, name)
    for name, texts in (("guided_choice", body.guided_choice), ("structured_outputs.choice", other.choice)):
        if texts is not None:
            wanted[name] = _choice(texts, name)
    for name, grammar in (
        ("grammar", body.grammar),
        ("guided_grammar", body.guided_grammar),
        ("structured_outputs.grammar", other.grammar),
        ("ebnf", body.ebnf),
    ):
        if grammar:
            wanted[name] = _grammar(grammar, name)
    if len(wanted) > 1:
        raise wrong(f"{' and '.join(wanted)}: an answer keeps to one of them.", next(iter(wanted)))
    return next(iter(wanted.values()), None)


def grammar_of(body: Formatted) -> Grammar | None:
    """The same as a grammar. Raises ApiError."""
    format = format_of(body)
    return schema_grammar(format) if isinstance(format, dict) else format


def _response_format(format: ResponseFormat) -> Schema | Grammar | None:
    kind = format.type or ("grammar" if format.grammar else "json_schema")
    match kind:
        case "text":
            return None
        case "json_object":
            return {"type": "object"} if format.schema is None else _schema(format.schema, "response_format")
        case "grammar":
            return _grammar(format.grammar or "", "response_format")
    given = format.json_schema
    schema = format.schema if given is None or given.schema is None else given.schema
    if schema is None and given is None:
        raise wrong(
            f"response_format.{'json_schema' if format.type else 'type'} is missing.", "response_format"
        )
    if schema is None:
        return {"type": "object"}
    is_strict = given is not None and given.strict is True
    kept: Schema = (without_needless if is_strict else loosened)(_schema(schema, "response_format"))
    return kept


def _schema(given: str | Schema, param: str) -> Schema:
    """Whose objects are `closed`. Raises ApiError."""
    if isinstance(given, str):
        try:
            given = msgspec.json.decode(given, type=Schema)
        except (msgspec.DecodeError, RecursionError):
            raise wrong(f"{param} is a JSON schema, or one as text.", param) from None
    check_size(given, param)
    schema: Schema = closed(given)
    return schema


def _choice(texts: list[str], param: str) -> Grammar:
    if not any(texts):
        raise wrong(f"{param} has no texts to choose from.", param)
    check_texts(texts, param)
    return choice_grammar(texts)


def _regex(regex: str, param: str) -> Grammar:
    """Raises ApiError."""
    from llguidance import regex_to_lark

    _check_length(regex, param)
    regex = regex.removeprefix("^")
    if regex.endswith("$") and not regex.endswith("\\$"):  # all of the answer fits, anyway
        regex = regex[:-1]
    try:
        return Grammar(kind="lark", source=f"start: /{regex_to_lark(regex)}/", ends_numbers=False)
    except ValueError as error:
        raise _unusable(error, param) from None


def _grammar(grammar: str, param: str) -> Grammar:
    """The grammar of a text in GBNF, which llama.cpp and vLLM read, or in Lark's syntax. Raises ApiError."""
    from llguidance.gbnf_to_lark import any_to_lark

    _check_length(grammar, param)
    try:
        source = any_to_lark(_LONG_ESCAPE.sub(_shorter_escape, grammar))
        return Grammar(kind="lark", source=source, ends_numbers=False)
    except Exception as error:  # the library raises plain Exceptions, too
        raise _unusable(error, param) from None


_LONG_ESCAPE = re.compile(r"(?<!\\)((?:\\\\)*)\\(?:u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8}))")


def _shorter_escape(found: re.Match[str]) -> str:
    """A character that GBNF writes as \\U0001F600 or \\u0041. The library writes them without their zeros, and no regex
    has such escapes."""
    code = int(found[2] or found[3], 16)
    if code < 1 << 7:
        return f"{found[1]}\\x{code:02X}"
    is_character = code <= sys.maxunicode and not 0xD800 <= code < 0xE000
    return f"{found[1]}{chr(code)}" if is_character else found[0]


def _check_length(source: str, param: str) -> None:
    if len(source) > MAX_GRAMMAR:
        raise wrong(f"{param} has more than {MAX_GRAMMAR:,} characters.", param)


def _unusable(error: Exception, param: str) -> ApiError:
    reason = json.dumps(str(error)[:200], ensure_ascii=False)
    return wrong(f"{param} cannot be used: {reason}.", param)
