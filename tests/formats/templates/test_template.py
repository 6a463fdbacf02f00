import shutil
import signal
import sys
import threading
from datetime import datetime
from unittest import mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine.errors import ContextFullError, TemplateError
from engine.formats.gguf import GGUF
from engine.formats.templates import template_renderer
from engine.formats.templates.template import ChatTemplate
from engine.formats.tokens.tokenizer import Tokenizer
from engine.protocol.events import Message
from tests.formats.vocabularies import CONTROL, USER_DEFINED, byte_level, decode, spelled_out
from tests.paths import SHARED
from tests.thorough import rarely

needs_shared = pytest.mark.skipif(not SHARED.is_dir(), reason="no shared folder with real templates")

CHATML = (
    ("<|im_start|>", CONTROL),
    ("<|im_end|>", CONTROL),
    ("<think>", USER_DEFINED),
    ("</think>", USER_DEFINED),
)
ECHO = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def system(text: str) -> Message:
    return Message(role="system", content=text)


def user(text: str) -> Message:
    return Message(role="user", content=text)


def assistant(text: str, thinking: str = "") -> Message:
    return Message(role="assistant", content=text, thinking=thinking)


@pytest.fixture(scope="module")
def chatml(tmp_path_factory) -> Tokenizer:
    return Tokenizer(byte_level(tmp_path_factory.mktemp("v") / "v", special=CHATML))


@pytest.fixture
def template(chatml):
    return lambda source, architecture="other": ChatTemplate(source, architecture, chatml)


@pytest.fixture(scope="module")
def real():
    """(template, tokenizer) of the real models, by name; each is made once."""
    made = {}

    def get(name: str) -> tuple[ChatTemplate, Tokenizer]:
        if name not in made:
            vocabulary, architecture = {"llama3.2": ("llama-bpe", "llama"), "qwen3": ("qwen2", "qwen3")}[name]
            tokenizer = Tokenizer(GGUF(SHARED / f"models/vocab/{vocabulary}.gguf"))
            source = (SHARED / f"models/vocab/{name}.jinja").read_text()
            made[name] = ChatTemplate(source, architecture, tokenizer), tokenizer
            made[name][0].now = lambda: datetime(2025, 7, 26, 12)
        return made[name]

    return get


def text_of(template: ChatTemplate, messages: list[Message], **options) -> str:
    return spelled_out(template._tokenizer, template.encode(messages, **options).ids)


# --- real templates -------------------------------------------------------------------------------------


@needs_shared
def test_llama_32(real):
    template, _ = real("llama3.2")
    assert text_of(template, [system("Be brief."), user(" Hi! "), assistant("Yo"), user("Bye")]) == (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
        "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2025\n\nBe brief.<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nHi!<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nYo<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert not template.thinks and template.warning == ""


@needs_shared
def test_qwen3(real):
    template, _ = real("qwen3")
    turns = [user("Hi"), assistant("Yo", thinking="Hm"), user("Bye")]
    turn = "<|im_start|>{}\n{}<|im_end|>\n".format
    head = turn("user", "Hi") + turn("assistant", "Yo") + turn("user", "Bye")
    assert text_of(template, turns) == head + "<|im_start|>assistant\n"
    assert text_of(template, turns, think=False) == head + "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert template.thinks and not template.encode(turns, think=False).opens_thinking


@needs_shared
@pytest.mark.parametrize("name", ["llama3.2", "qwen3"])
def test_special_tokens_are_tokens_and_a_prompt_begins_with_one_bos(real, name):
    template, t = real(name)
    ids = template.encode([user("Hi")]).ids
    ends = t.special_tokens["<|eot_id|>" if name == "llama3.2" else "<|im_end|>"]
    assert ids.count(ends) == (2 if name == "llama3.2" else 1)
    assert ids.count(t.bos_id) == (1 if name == "llama3.2" else 0)


@needs_shared
@pytest.mark.parametrize("name", ["llama3.2", "qwen3"])
def test_the_next_turn_keeps_the_prefix(real, name):
    template, _ = real(name)
    first = [system("Be brief."), user("Hi there")]
    before = template.encode(first).ids
    after = template.encode([*first, assistant("Yo"), user("Bye")]).ids
    assert after[: len(before)] == before


# --- special tokens in what people type -----------------------------------------------------------------

PIECES = """<|im_end|> <|im_start|> <|eot_id|> <|begin_of_text|> <|start_header_id|> <|IM_END|> [PAD151650]
<think> </think> <tool_response> </tool_response> < > [ ] | <| |> im_end eot_id a é {{1}} {%if%}
\U000f0000 \U000f0001"""
SPELLINGS = st.lists(st.sampled_from([*PIECES.split(), "\n", " "]), max_size=8).map("".join)


@needs_shared
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.tuples(*[SPELLINGS] * 5))
def test_no_message_can_write_a_special_token(real, texts):
    for name in ("llama3.2", "qwen3"):
        template, t = real(name)
        special = set(t.special_tokens.values())
        conversation = lambda a, b, c, d, e: [system(a), user(b), assistant(c, thinking=d), user(e)]
        ids = template.encode(conversation(*texts)).ids
        plain = template.encode(conversation("s", "u", "a", "t", "v")).ids
        assert [i for i in ids if i in special] == [i for i in plain if i in special]
        rendered = spelled_out(t, ids)
        for text in (texts[0], texts[1], texts[4]):
            assert text.strip() in rendered


CUTTING = "<|im_start|>{{ messages[0].content.split('x') | join('') | lower | replace(' ', '') }}<|im_end|>"


@pytest.mark.parametrize("typed", ["<|imx_end|>", "<|IM_END|>", "<|im_ end|>", "<x|im_start|>", "<thinkx>"])
def test_templates_that_cut_and_join_cannot_make_one_either(chatml, template, typed):
    ids = template(CUTTING).encode([user(typed)]).ids
    special = set(chatml.special_tokens.values())
    assert [chatml.text(id) for id in ids if id in special] == ["<|im_start|>", "<|im_end|>"]
    assert decode(chatml, ids) == typed.replace("x", "").replace(" ", "").lower()


def test_marks_in_a_message_are_not_marks_to_the_template(template):
    source = "{{ '</think>' in messages[0].content }} {{ messages[0].content | trim | length }}"
    assert text_of(template(source), [user(" a</think>b ")]) == "False 10"


def test_a_prompt_opens_thinking_only_if_the_template_does(template):
    assert template(ECHO + "<|im_start|>assistant\n<think>\n").encode([user("x")]).opens_thinking
    assert not template("{{ messages[0].content }}").encode([user("<think>")]).opens_thinking
    assert (
        not template(ECHO + "<think>{{ messages[0].content }}")
        .encode([user(f"{' ' * 50_000}!")])
        .opens_thinking
    )
    assert template("<think>a</think>" + ECHO + "<think> <x>\n").encode([user("x")]).opens_thinking
    opens = template(ECHO + "{% if enable_thinking %}<think>\n{% endif %}")
    assert opens.thinks and not opens.encode([user("x")], think=False).opens_thinking


# --- what templates expect ------------------------------------------------------------------------------


def test_a_reply_that_was_broken_off_is_gone_on_with(template, real):
    plain = template(ECHO + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
    asked, begun = user("Count."), assistant("One, two, <|im_end|>")
    prompt = plain.encode([asked, begun])
    assert text_of(plain, [asked, begun]) == text_of(plain, [asked]) + "One, two, <|im_end|>"
    assert prompt.ids[: len(plain.encode([asked]).ids)] == plain.encode([asked]).ids
    assert prompt.ids.count(plain._tokenizer.special_tokens["<|im_end|>"]) == 1  # the user's turn's
    start = text_of(plain, [asked])
    assert text_of(plain, [asked, assistant("", "hm")]) == start + "<think>\nhm"
    assert plain.encode([asked, assistant("", "hm")]).opens_thinking
    assert text_of(plain, [asked, assistant("One", "hm")]) == start + "<think>\nhm\n</think>\n\nOne"
    assert not plain.encode([asked, assistant("One", "hm")]).opens_thinking
    opening = template(ECHO + "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}")
    assert text_of(opening, [asked, assistant("One", "hm")]).endswith(
        "assistant\n<think>\nhm\n</think>\n\nOne"
    )


def test_helpers(template):
    def rendered(source: str, *messages: Message) -> str:
        made = template(source)
        made.now = lambda: datetime(2025, 7, 26, 12)
        return text_of(made, list(messages) or [user("ü<b>")])

    assert rendered("{{ strftime_now('%d %b %Y') }} {{ date_string }}") == "26 Jul 2025 26 Jul 2025"
    assert rendered("{{ messages | tojson }}") == '[{"role": "user", "content": "ü<b>"}]'
    assert rendered("{{ {'b': 1, 'a': 2} | tojson(indent=1, sort_keys=true) }}") == '{\n "a": 2,\n "b": 1\n}'
    assert rendered("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}") == "1"
    assert rendered("a\n  {% if true %}\nb\n  {% endif %}\nc") == "a\nb\nc"
    assert rendered("{% generation %}x{% endgeneration %}y") == "xy"
    assert rendered("{{ 'it is '|safe + (messages | tojson) }}").startswith('it is [{"role"')
    assert (
        rendered("{{ tools is none }}{{ nothing }}{{ messages[0].reasoning_content is defined }}")
        == "TrueFalse"
    )
    source = "{{ messages[0].reasoning_content }}|{{ messages[0]['content'] }}"
    assert rendered(source, assistant("a", thinking="t")) == "t|a"


def test_bos_comes_once(tmp_path):
    special = (("<bos>", CONTROL), ("<eos>", CONTROL))
    ids = {"bos_token_id": 257, "eos_token_id": 258}
    for add in (True, False):
        t = Tokenizer(byte_level(tmp_path / str(add), special=special, add_bos_token=add, **ids))
        written = ChatTemplate("{{ bos_token }}x{{ eos_token }}", "", t).encode([user("")]).ids
        assert [t.text(id) for id in written] == ["<bos>", "x", "<eos>"]
        assert [t.text(id) for id in ChatTemplate("x", "", t).encode([user("")]).ids] == ["<bos>", "x"][
            not add :
        ]


EFFORT = "{% if reasoning_effort is not defined %}{% set reasoning_effort = 'as ever' %}{% endif %}"
EFFORT += "{{ reasoning_effort }}"
CHANNELS = "<|channel|>analysis<|message|><|end|><|start|>assistant<|channel|>final<|message|>"


def test_more_messages_than_the_context_has_tokens_are_not_rendered(template):
    broken = template("{{ 1 / 0 }}")
    with pytest.raises(ContextFullError, match="has 101 messages; the context holds 100 tokens"):
        broken.encode([user("x")] * 101, most=100)
    assert not broken.warning


def test_how_much_a_model_should_think(template):
    effort = template(EFFORT)
    said = [text_of(effort, [user("x")], effort=level) for level in (None, "low", "high")]
    assert said == ["as ever", "low", "high"] and effort.takes_effort
    assert text_of(effort, [user("x")], effort="high", think=False) == "as ever"
    gpt_oss = template(f"{{# {CHANNELS} #}}{EFFORT}")  # it always thinks
    assert text_of(gpt_oss, [user("x")], effort="high", think=False) == "low"


@pytest.mark.parametrize(
    "source",
    [ECHO, "{% set reasoning_effort = 1 %}{{ reasoning_effort }}", "{# reasoning_effort #}", "{% if %}"],
)
def test_templates_that_read_no_effort(template, source):
    assert not template(source).takes_effort


# --- templates that refuse, break or do not end ---------------------------------------------------------

NO_SYSTEM = (
    "{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Must alternate') }}{% endif %}"
    "{{ m.role[0] }}:{{ m.content }};{% endfor %}"
)


def test_a_template_without_system_role_gets_it_in_the_first_user_turn(template):
    t = template(NO_SYSTEM)
    assert text_of(t, [system("S"), user("U"), assistant("A"), user("V")]) == "u:S\n\nU;a:A;u:V;"
    assert text_of(t, [user("U"), user("V")]) == "u:U\n\nV;"  # the reply to U was stopped at once
    assert text_of(t, [user("U"), assistant("", thinking="T"), user("V")]) == "u:U;a:;u:V;"
    assert text_of(t, [system("S")]) == "u:S;" and t.warning == ""


def test_a_system_text_that_a_template_leaves_out_is_in_the_first_user_turn(template):
    silent = template(
        "{% for m in messages if m.role != 'system' %}{{ m.role[0] }}:{{ m.content }};{% endfor %}"
    )
    assert text_of(silent, [system("S"), user("U"), assistant("A"), user("V")]) == "u:S\n\nU;a:A;u:V;"
    assert text_of(silent, [user("U")]) == "u:U;"


def test_a_system_text_at_the_beginning_stays_one_where_later_ones_are_refused(template):
    """As in Qwen 3.5; agents send several at the beginning, and later ones."""
    first = template(
        "{% for m in messages %}{{ raise_exception('late') if m.role == 'system' and not loop.first }}"
        "{{ m.role[0] }}:{{ m.content }};{% endfor %}"
    )
    asked = [system("S"), system("T"), user("U"), system("L"), assistant("A"), user("V")]
    assert text_of(first, asked) == "s:S\n\nT;u:U\n\nL;a:A;u:V;"


def test_a_template_that_refuses_empty_replies_gets_none(template):
    t = template(ECHO.replace("{{ m.role", "{{ raise_exception('Empty') if not m.content }}{{ m.role"))
    stopped = [user("U"), assistant("", thinking="T"), user("V")]
    assert text_of(t, stopped) == "<|im_start|>user\nU\n\nV<|im_end|>\n"


def test_a_template_that_refuses(template):
    with pytest.raises(TemplateError, match='refuses this conversation: "no�way"') as e:
        template("{{ raise_exception('no\x1b[31m\nway'[:2] + '\n' + 'way') }}").encode([user("x")])
    assert e.value.hint and str(e.value).isprintable()
    with pytest.raises(TemplateError, match="nothing to answer"):
        template(ECHO).encode([])


def test_a_template_may_change_its_own_lists(template):
    t = template("{% set names = [] %}{% set _ = names.append(messages[0].content) %}{{ names[0] }}")
    assert text_of(t, [user("Hi")]) == "Hi" and not t.warning


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}",
        "{{ messages[0].a.b }}",
        "{{ 1 / 0 }}",
        "{% include 'x' %}",
        "{{ ''.__class__.__mro__ }}",
        "{{ f() }}",
    ],
)
def test_a_template_that_breaks_gives_way_to_the_format_of_the_family(template, source):
    t = template(source)
    assert text_of(t, [user("Hi")]) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert "does not work" in t.warning and t.warning.isprintable()


NESTED = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
GROWING = "{% set n = namespace(x=START) %}{% for i in range(60) %}{% set n.x = MORE %}{% endfor %}{{ n.x }}"


def stopped(template: ChatTemplate, *messages: Message) -> None:
    with (
        mock.patch.object(template_renderer, "RENDER_S", 0.3),
        pytest.raises(TemplateError, match=r"was stopped: it (takes|repeats|writes)") as e,
    ):
        template.encode(messages or [user("x")])
    assert e.value.hint and str(e.value).isprintable()


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**9) %}{% endfor %}",
        "{% for i in range(200) %}{{ 'a' * 9999 }}{% endfor %}",
        "{{ messages[0].content * 10**9 * 10**9 }}",
        "{{ (10 ** (10 ** (messages | length * 9))) % 7 }}",
        rarely(GROWING.replace("START", "[1]").replace("MORE", "[n.x, n.x]")),
        GROWING.replace("START", "'a'").replace("MORE", "n.x ~ n.x"),
        "{{ 'a' | center(10**10) }}",
        rarely("{{ range(99999) | map('center', 99999) | list }}"),
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_a_template_that_does_not_end_is_stopped(template, source):
    stopped(template(source))


def test_it_is_stopped_and_can_be_used_again(template):
    t = template("{% if messages | length > 1 %}" + NESTED + "{% endif %}ok")
    assert text_of(t, [user("a")]) == "ok"
    stopped(t, user("a"), user("b"))
    assert text_of(t, [user("a")]) == "ok"


@pytest.mark.skipif(
    sys.platform != "linux", reason="the system does not tell another process's processor time"
)
def test_a_process_that_waits_for_a_processor_is_not_stopped(template):
    t = template(ECHO)
    t.encode([user("a")])
    [process] = [each._process for each in t._renderer._idle]
    process.send_signal(signal.SIGSTOP)
    going_on = threading.Timer(0.3, process.send_signal, [signal.SIGCONT])
    with mock.patch.object(template_renderer, "RENDER_S", 0.1):
        going_on.start()
        assert text_of(t, [user("a")]) == "<|im_start|>user\na<|im_end|>\n"


@pytest.mark.usefixtures("started_processes")
def test_the_process_ends_with_its_template(template):
    template_renderer.start_ahead()
    [ahead] = template_renderer._ahead
    t = template(ECHO)
    t.encode([user("a")])
    [process] = [each._process for each in t._renderer._idle]
    assert process is ahead._process and not template_renderer._ahead
    del ahead
    process.kill()
    process.wait()
    assert text_of(t, [user("a")]) == "<|im_start|>user\na<|im_end|>\n"  # it starts anew
    [process] = [each._process for each in t._renderer._idle]
    assert process.poll() is None
    del t
    assert process.poll() is not None


@pytest.mark.parametrize("python", ["/no/such/python", "false"])
def test_a_process_that_does_not_start(template, monkeypatch, python):
    monkeypatch.setattr("sys.executable", shutil.which(python) or python)
    with pytest.raises(TemplateError, match="does not start") as e:
        template(ECHO).encode([user("x")])
    assert e.value.hint


# --- the template of a file ---------------------------------------------------------------------------


def test_the_template_of_the_file_is_used(tmp_path):
    gguf = byte_level(tmp_path / "v", special=CHATML, template="file: {{ messages[0].content }}")
    template = ChatTemplate.from_gguf(gguf, Tokenizer(gguf))
    assert text_of(template, [user("x")]) == "file: x" and template.warning == ""


def test_of_templates_with_names_one_is_for_tools(tmp_path):
    def texts(**templates: str) -> list[str]:
        with byte_level(tmp_path / "v", special=CHATML) as gguf:
            named = {f"tokenizer.chat_template{name}": source for name, source in templates.items()}
            gguf.metadata = {**gguf.metadata, **named}
            template = ChatTemplate.from_gguf(gguf, Tokenizer(gguf))
        return [
            text_of(template, [user("x")], tools=tools)
            for tools in ("", '[{"function": {"name": "get_weather"}}]')
        ]

    both = texts(**{"": "chat", ".tool_use": "{{ tools[0].function.name }}{# <tool_call> #}"})
    assert both == ["chat", "get_weather"]
    assert texts(**{".rag": "no", ".plain": "chat"}) == ["chat", "chat"]
    assert texts(**{".tool_use": "{{ tools is none }}{# <tool_call> #}"}) == ["True", "False"]
    assert texts(**{"": "chat", ".tool_use": " "}) == ["chat", "chat"]
