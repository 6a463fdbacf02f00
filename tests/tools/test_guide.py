"""The built-in model as it is shipped: that it knows the program of today, and answers as it was judged to."""

import json
import warnings

import gguf
import pytest

from engine.protocol.events import Chat, Event, Finished, Generate, Message, Sampling, Token
from presets import GUIDE, guide_path
from tests.thorough import THOROUGH, rarely, thorough
from tools.guide import export, facts
from tools.guide.evaluate import Chatter, long_chat
from tools.guide.questions import HELD_OUT, holds, loops
from tools.guide.shape import SHAPE

AGAIN = "Train it again: tools/guide/train.py says how"
ASKED = {
    ("How do I stop a reply?",): "Esc",
    ("which key opens my earlier conversations",): "Ctrl+O",
    ("how much quality do I lose with 4 bits",): "Q4_K loses a little",
    ("what does exit code 4 mean?",): "backend, engine",
    ("hello",): "orin-guide",
    ("how do I stop it",): "Press Esc to stop",
    ("which keys?",): "Esc stops the reply",
    ("gpu temp",): "machine pane",
    ("What is this?",): "terminal",
    ("are you chatgpt?",): "I am orin-guide",
    ("write me a poem",): "cannot write",
    ("how do i run qwen3 4b? \U0001f1eb\U0001f1f7 é",): "orin-chat --model qwen3:4b",
    ("can it search the web?",): "[mcp.NAME]",
    ("notes.txt:\n```\nThe tide is high.\n```\n\nsummarize @notes.txt",): "files",
    ("What is the KV cache?", "how do I stop it?"): "Press Esc to stop",
    ("What is the population of Portugal?",): "do not know",
    ("what is 12 times 12",): "cannot calculate",
    ("what does F11 do?",): "does nothing",
    ("how do I search this chat?",): "Ctrl+F",
    ("how do I load my own model?",): "--model FILE.gguf",
    ("a tool asks whether it may run",): "Alt+Y",
    ("what does explains mean?",): "last answer",
    ("use ./models/my-own.Q8_0.gguf",): "make chat MODEL=./models/my-own.Q8_0.gguf",
    ("Wie speichere ich das Gespräch?",): "only know English",
    ("Comment puis-je quitter ?",): "only know English",
    ("What is the KV cache?", "Which keys does the chat have?"): "F1",
    ("can the model use tools?", "how do I allow one?"): "Alt+Y",
    ("which kernels are slow?",): "s sorts",
    ("make it fall silent in the middle of a sentence",): "Esc",
    ("how do I change the system prompt while chatting?",): "F12",
    ("what is the preset graph for?",): "ensor graphs",
    ("what does F9 do?", "and how do I undo that?"): "Esc brings the chat back",
    ("How do I start a new chat?", "and how do I undo that?"): "Ctrl+O",
    ("How do I attach a file?",): "@notes.txt",
    ("how do i run someone/Thing-7B-GGUF",): "--model hf.co/someone/Thing-7B-GGUF",
    ("how do I fork a chat",): "Alt+M",
    ("run qwen3:4b", "and 8b"): "--model qwen3:8b",
    ("which words were guessed by speculation?",): "Alt+G",
    ("does it run glm 4.5?",): "GLM-4.5",
    ("which models can call tools",): "system text",
    ("please reply in French from now on",): "F12",
    ("edit an older prompt, not the last",): "F2",
    ("it says this model sees no pictures",): "mmproj",
    ("how do I get llama 4 scout",): "llama4:scout",
    ("can llama 4 look at pictures?",): "Llama 4 Scout and Maverick run and see",
    ("wie starte ich gemma3:4b?",): "--model gemma3:4b",
    ("does mamba run here",): "--model",
    ("what is lora?", "how do i use it"): "orin-chat --model NAME --lora FILE",
    ("what is the temperature", "how do I set it", "thanks", "and what is the default?"): "0.7",
}


@pytest.fixture(scope="module")
def shipped():
    return export.read(guide_path())


@pytest.fixture(scope="module")
def chatter(optimizing_compiler):
    return Chatter(guide_path())


def test_the_file(shipped):
    assert guide_path().stat().st_size <= 12_000_000
    assert shipped.shape == SHAPE and len(shipped.weights) == 9 * SHAPE.layers + 2
    reader = gguf.GGUFReader(guide_path())
    assert reader.get_field("general.name").contents() == GUIDE
    assert {t.tensor_type.name for t in reader.tensors if len(t.shape) == 2} == {"Q8_0"}


def test_it_says_nothing_that_is_no_longer_so(shipped):
    """What it was taught of each key, option, command, preset and exit code must still be said. What came later is
    no mistake of its, only something it does not know yet: a warning."""
    today, taught = facts.load().snapshot, shipped.known
    gone = sorted(taught.keys() - today.keys())
    changed = {
        name: (old, today[name])
        for name, old in taught.items()
        if name in today and not set(old) <= set(today[name])
    }
    assert not gone and not changed, f"{GUIDE} speaks of what is gone or has changed. {AGAIN}."
    unknown = sorted(name for name in today.keys() - taught.keys() if not name.startswith("label."))
    if unknown:
        warnings.warn(f"{GUIDE} does not know {', '.join(unknown)}. {AGAIN}.", stacklevel=1)
    assert len(unknown) < 30, f"{GUIDE} knows too little of the program of today. {AGAIN}."


@pytest.mark.parametrize(
    "turns",
    [
        turns if i % 24 == 0 else rarely(turns) for i, turns in enumerate(ASKED)
    ],  # it knows what it was shipped with
    ids=lambda turns: turns[-1],
)
def test_answers(chatter, turns):
    assert ASKED[turns] in chatter.ask(turns)


@thorough
def test_some_of_the_held_out_questions(chatter):
    """All of them take a minute: python -m tools.guide.evaluate."""
    some = HELD_OUT[::36]
    answers = [chatter.ask(question.turns) for question in some]
    right = [holds(answer, question.must) for question, answer in zip(some, answers, strict=True)]
    assert sum(right) >= 0.9 * len(some)
    assert not any(map(loops, answers))


@pytest.mark.parametrize("tokens", [rarely(1000), rarely(1900)])
def test_it_is_sane_to_the_end_of_its_context(chatter, tokens):
    before = long_chat(tokens, seed=tokens)
    for turns, must in list(ASKED.items())[:12]:
        assert must in chatter.ask(turns, before)


def test_it_ends_by_itself_and_stays_right_when_it_is_sampled(chatter):
    """With the sampling that a chat begins with."""
    prompt = Chat(messages=(Message(role="user", content="How do I stop a reply?"),))
    for seed in range(8 if THOROUGH else 3):
        request = Generate(request_id=1, prompt=prompt, sampling=Sampling(seed=seed), max_tokens=100)
        events: list[Event] = []
        end: Finished = chatter._model.generate(request, events.append, lambda: False)
        said = "".join(event.text for event in events if isinstance(event, Token))
        assert end.reason == "stop" and "Esc" in said


@pytest.mark.parametrize("quant", [rarely("Q6_K"), rarely("Q4_K")])
def test_other_types_of_weights_answer_alike(shipped, tmp_path, quant):
    path = tmp_path / f"{quant}.gguf"
    export.pack(shipped, path, quant)
    chatter = Chatter(path)
    for turns, must in list(ASKED.items())[:6]:
        assert must in chatter.ask(turns)
    assert json.loads(gguf.GGUFReader(path).get_field(export.KNOWN).contents()) == shipped.known
