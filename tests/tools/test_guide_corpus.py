"""What the built-in model is trained on: that it is true of this program, varied, reproducible, and that the
questions it is judged by are not in it."""

import random
import re
import tomllib

import pytest
from textual.widgets import TextArea

from app.chat.commands import commands
from app.cli import options
from app.main import COMMANDS
from app.screens.actions import ACTIONS, OTHER_KEYS, key_label
from engine.catalog.names import known_models
from engine.description.encoder_kinds import KINDS
from engine.description.families import ARCHITECTURES
from engine.errors import EXIT_CODES
from presets import loader
from tests.thorough import thorough
from tools.guide import facts, questions, sources
from tools.guide.conversations import Conversations
from tools.guide.corpus import conversations
from tools.guide.signs import accented, signed
from tools.guide.starting import Starting
from tools.guide.template import rendered
from tools.guide.wording import gerund, gist, normalized

_OPTION = r"(?<![\w-])--[a-z][a-z-]*"


@pytest.fixture(scope="module")
def known():
    return facts.load()


def test_every_answer_says_what_it_must(known):
    for fact in known.facts.values():
        assert fact.must and all(text.lower() in fact.answer.lower() for text in fact.must), fact.id
        assert len(fact.answer.split()) < 60 and "{key" not in fact.answer, fact.id


def test_answers_name_only_what_the_program_has(known, capsys):
    # Of jetson_clocks, of pipx, of ollama, and of pip.
    known_options = {"--restore", "--force", "--modelfile", "--require-hashes"} | set(
        re.findall(_OPTION, options._parser({}).format_help())
    )
    for run, _ in COMMANDS.values():
        with pytest.raises(SystemExit):
            run(["--help"])
        known_options |= set(re.findall(_OPTION, capsys.readouterr().out))
    labels = {key_label(key) for action in ACTIONS for key in action.keys.split(",")}
    labels |= {part for names, _ in OTHER_KEYS for part in names.split(", ")} | {"Shift+Enter"}
    labels |= set(sources.EDITING_KEYS)
    models = {model.name for model in known_models()}
    for fact in known.facts.values():
        assert set(re.findall(_OPTION, fact.answer)) <= known_options, fact.id
        assert set(re.findall(r"\b(?:(?:Ctrl|Alt|Shift)\+\w+|F\d+)\b", fact.answer)) <= labels | {
            "F32",
            "F16",
        }, fact.id
        assert set(re.findall(r"(?<!\S)/([a-z]+)\b(?!/)", fact.answer)) <= {*commands(), "tmp"}, fact.id
        assert set(re.findall(r"(?<![\w./])[a-z][\w.-]*:[\d.]+\w(?:-\w+)?\b", fact.answer)) <= models, fact.id
        assert set(re.findall(r"orin-chat ([a-z]+) (?:--[a-z]|NAME|FILE)", fact.answer)) <= COMMANDS.keys(), (
            fact.id
        )


def test_all_of_the_program_is_known(known):
    ids = known.facts.keys()
    assert {f"key.{action.name}.press" for action in ACTIONS} <= ids
    assert {f"command.{name}.command" for name in commands()} <= ids
    assert {f"program.{name}.program" for name in COMMANDS} <= ids
    assert {f"exit.{code}.exit" for code in EXIT_CODES.values()} <= ids
    assert {f"preset.{path.stem}.what" for path in loader.BUILT_IN.glob("*.toml")} <= ids
    families = tomllib.loads((facts.KNOWLEDGE / "models.toml").read_text("utf-8")).values()
    for key, runs in (("architectures", ARCHITECTURES), ("encoders", KINDS)):
        told = {name for family in families for name in family.get(key, ())}
        assert told <= runs.keys() and len(runs.keys() - told) < 10, runs.keys() ^ told
    described = {action.dest for action in options._parser({})._actions if action.option_strings} - {"help"}
    assert {f"{name}.set" for name in described} <= ids


def test_keys_that_are_no_actions(known):
    """Those that the text box has are said to edit, those that nothing has to do nothing."""
    box = {key_label(key) for binding in TextArea.BINDINGS for key in binding.key.split(",")}
    used = {key_label(action.key) for action in ACTIONS}
    assert set(sources.EDITING_KEYS) <= box - used
    free = set(sources.free_keys())
    assert "F11" in free and not free & (box | used)
    assert all("nothing" in known.facts[f"key.{key.lower()}.press"].answer for key in free)


def test_second_turns_undo_what_the_first_was_about(known):
    source = Conversations(known, random.Random(0))
    for name, must in {
        "key.zoom.press": "Esc brings the chat back", "key.stop.press": "Ctrl+G", "key.edit.press": "stays as it was",
        "command.think.command": "/think on", "top_k.set": "without the option", "kv-cache.what": "nothing to undo",
        "program.pull.program": "orin-chat rm",
    }.items():  # fmt: skip
        ways = source._follow_ups(known.facts[name])
        undoing = [way for way in ways if any("undo" in pattern for pattern in way.patterns)]
        assert undoing and all(must in way.answer for way in undoing), name


def test_answers_have_the_names_and_defaults_of_the_program(known):
    stop = next(action for action in ACTIONS if action.name == "stop")
    assert f"Press {key_label(stop.key)} to stop" in known.facts["key.stop.press"].answer
    assert "/stats" in known.facts["command.stats.command"].answer
    assert "The default is 0.7" in known.facts["temperature.set"].answer
    assert known.facts["label.throughput-p-prompt.what"].answer.startswith("In the throughput pane, P marks")


def test_answers_are_sentences(known):
    """No lists of a key, a colon and its help."""
    for fact in known.facts.values():
        assert not re.match(r"(Press|Type|Use|orin-chat) ?[^ ]*( or [^ ]+)?: ", fact.answer), fact.answer


@thorough
def test_patterns_can_be_read(known):
    rng = random.Random(0)
    for fact in known.facts.values():
        for ask in fact.asks:
            for pattern in ask.patterns:
                question = known.wording.phrase(pattern, rng, ask.slots)
                assert question and not set("[]{}()") & set(question), (fact.id, pattern)


def test_conversations_are_reproducible_and_varied():
    few, again, others = (list(conversations(50, seed, 50)) for seed in ("test", "test", "another"))
    assert few == again != others
    first = list(conversations(300, "test", 50))
    asked = {normalized(m.content) for messages in first for m in messages if m.role == "user"}
    answered = [m.content for messages in first for m in messages if m.role == "assistant"]
    assert len(asked) > 0.8 * len(answered) and len(set(answered)) > 200
    assert all(messages[-1].role == "assistant" for messages in first)
    assert any(len(messages) > 12 for messages in first)


@thorough
def test_questions_of_the_judgement_are_not_in_training():
    small = facts.load().grammar["noise"]["dropped"]
    judged = {*questions.excluded_turns((*questions.HELD_OUT, *questions.DEVELOPMENT), small)}
    assert len(judged) > 450
    drawn = {
        normalized(m.content) for c in conversations(2000, "train 0", 500) for m in c if m.role == "user"
    }
    assert not judged & drawn
    gists = {gist(question, small) for question in judged} - {""}
    assert len(gists) > 300 and not gists & {gist(question, small) for question in drawn}
    held = {turns for question in questions.HELD_OUT for turns in [question.turns]}
    assert len(questions.HELD_OUT) >= 300 and not held & {
        question.turns for question in questions.DEVELOPMENT
    }


def test_a_question_how_a_model_is_started_is_answered_with_its_name(known):
    starting, rng = Starting(known), random.Random(1)
    names = {model.name for model in known_models()}
    drawn = [starting.turn(rng) for _ in range(300)] + [starting.copied(rng) for _ in range(100)]
    assert len({model for *_, model in drawn[300:]}) > 90
    drawn += starting.after(known.facts["starting.known"], "qwen3:4b", rng)
    drawn += starting.after(known.facts["gemma.what"], "", rng)
    for question, answer, fact, model in drawn:
        assert not set(question + answer) & {"{", "}", "\ue000"}
        assert f"--model {model}" in answer if model else fact.aspect == "what"
        assert fact.id != "starting.known" or model in names
        if fact.id in ("starting.file", "starting.hub"):
            assert model.removeprefix("hf.co/") in question
    for written, model in (("Qwen 3", "qwen3:4b"), ("llama-3.2", "llama3.2:3b"), ("LFM2 1.2B", "lfm2:1.2b")):
        assert starting.named(written) == model
    assert not starting.named("InternVL 38B")


def test_some_answer_satisfies_each_question(known):
    answers = [fact.answer.lower() for fact in known.facts.values()]
    asked = [q for q in (*questions.HELD_OUT, *questions.DEVELOPMENT) if "name" not in " ".join(q.turns)]
    told = {name for q in asked for form in q.must[0] for name in re.findall(r"--model (\S+)", form)}
    answers += [answer.replace("{model}", name) for answer in answers if "{model}" in answer for name in told]
    for must, question in {question.must: question for question in asked}.items():
        assert any(questions.holds(answer, must) for answer in answers), question


def test_judging():
    assert questions.holds("Press Ctrl+R now", [["ctrl+r"], ["later", "NOW"]])
    assert not questions.holds("Press Ctrl+R", [["ctrl+r"], ["later", "now"]])
    assert questions.loops("a b c d " * 3) and not questions.loops("a b c d e f g")


def test_a_line_that_is_no_question_is_refused(tmp_path):
    path = tmp_path / "questions.txt"
    path.write_text("[topic]\n# a comment\nWhat? >> And then? => one | two & three\n")
    assert questions.read(path) == [
        questions.Question("topic", ("What?", "And then?"), (("one", "two"), ("three",)))
    ]
    path.write_text("[topic]\nWhat?\n")
    with pytest.raises(ValueError, match="line 2"):
        questions.read(path)


@pytest.mark.parametrize(
    ("phrase", "doing"),
    [
        ("stop it", "stopping it"),
        ("make a file", "making a file"),
        ("copy text", "copying text"),
        ("see", "seeing"),
    ],
)
def test_gerund(phrase, doing):
    assert gerund(phrase) == doing


def test_noise_keeps_the_question(known):
    rng = random.Random(1)
    texts = {known.wording.typed("how do i stop the reply", rng) for _ in range(200)}
    assert len(texts) > 120
    assert sum("stop" in text.lower() for text in texts) > 110


def test_signs_leave_the_words():
    rng = random.Random(0)
    signs = [signed("stop it", rng) for _ in range(300)]
    assert len(set(signs)) > 200
    assert sum("stop" in text and "it" in text for text in signs) > 250
    assert accented("123", rng) == "123" and accented("Zoe", rng) != "Zoe"


def test_names_of_presets_have_no_synonyms(known):
    rng = random.Random(0)
    assert {known.wording.phrase("what is preset graph", rng)[-12:] for _ in range(99)} == {"preset graph"}


def test_rendered_is_what_the_template_makes(tmp_path):
    from jinja2.sandbox import SandboxedEnvironment

    from tools.guide.template import TEMPLATE, Message

    messages = [Message("system", "Be brief."), Message("user", " hi\n"), Message("assistant", "Hello!")]
    template = SandboxedEnvironment(trim_blocks=True, lstrip_blocks=True).from_string(TEMPLATE)
    as_dicts = [message._asdict() for message in messages]
    for more in (False, True):
        expected = template.render(messages=as_dicts, add_generation_prompt=more)
        assert rendered(messages, add_generation_prompt=more) == expected
