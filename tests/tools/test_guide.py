"""The built-in model as it is shipped: that it knows the program of today, and answers as it was judged to."""

import json
import random
import warnings
from dataclasses import replace

import gguf
import pytest
import tokenizers

from engine.protocol.events import Chat, Event, Finished, Generate, Message, Sampling, Token
from presets import GUIDE, guide_path
from tests.thorough import rarely, thorough
from tools.guide import export, facts, template
from tools.guide.bpe import from_merges
from tools.guide.conversations import Conversations
from tools.guide.evaluate import Chatter
from tools.guide.questions import HELD_OUT, holds, loops
from tools.guide.shape import SHAPE
from tools.guide.template import rendered

AGAIN = "Train it again: tools/guide/train.py says how"
LEFT_BEHIND = {"key.ctrl+f.press"}
"""What has changed since it was trained: Ctrl+F did nothing then. The next training empties this."""
SANE = 1536
"""Its context, in tokens: it was trained for chats of up to 1,400, and falls apart after some 1,600. It still says that
its context is of 2,048; the next training, for chats as long as that, makes it true."""
UNTAUGHT = {"new keys", "labels", "other languages"}
"""Topics of the held-out questions that it was not trained for. The next training empties this, too."""
ASKED = {
    ("How do I stop a reply?",): "Esc",
    ("which key opens my earlier conversations",): "Ctrl+O",
    ("how much quality do I lose with 4 bits",): "Q4_K loses a little",
    ("what does exit code 4 mean?",): "backend, engine",
    ("hello",): "orin-guide",
    ("What is the population of Portugal?",): "do not know",
    ("what is 12 times 12",): "cannot calculate",
    ("what does F11 do?",): "does nothing",
    ("which kernels are slow?",): "s sorts",
    ("make it fall silent in the middle of a sentence",): "Esc",
    ("how do I change the system prompt while chatting?",): "F12",
    ("what is the preset graph for?",): "tensor graphs",
    ("what does F9 do?", "and how do I undo that?"): "Esc brings the chat back",
    ("How do I start a new chat?", "and how do I undo that?"): "Ctrl+O",
    ("what is the temperature", "how do I set it", "thanks", "and what is the default?"): "0.7",
}


@pytest.fixture(scope="module")
def shipped():
    return export.read(guide_path())


@pytest.fixture(scope="module")
def chatter():
    return Chatter(guide_path())


def test_the_file(shipped):
    assert guide_path().stat().st_size <= 12_000_000
    assert shipped.shape == replace(SHAPE, context=SANE) and len(shipped.weights) == 9 * SHAPE.layers + 2
    reader = gguf.GGUFReader(guide_path())
    assert reader.get_field("general.name").contents() == GUIDE
    assert {t.tensor_type.name for t in reader.tensors if len(t.shape) == 2} == {"Q8_0"}


def test_it_says_nothing_that_is_no_longer_so(shipped):
    """What it was taught of each key, option, command, preset and exit code must still be said. What came later is
    no mistake of its, only something it does not know yet: a warning."""
    today, taught = facts.load().snapshot, shipped.known
    gone = sorted(taught.keys() - today.keys() - LEFT_BEHIND)
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


@pytest.mark.parametrize("turns", ASKED, ids=lambda turns: turns[-1])
def test_answers(chatter, turns):
    assert ASKED[turns] in chatter.ask(turns)


def test_some_of_the_held_out_questions(chatter):
    """All of them take a minute: python -m tools.guide.evaluate."""
    some = [question for question in HELD_OUT if question.topic not in UNTAUGHT][::12]
    answers = [chatter.ask(question.turns) for question in some]
    right = [holds(answer, question.must) for question, answer in zip(some, answers, strict=True)]
    assert sum(right) >= 0.9 * len(some)
    assert not any(map(loops, answers))


@thorough
def test_it_is_sane_at_the_end_of_its_context(chatter):
    bpe = tokenizers.Tokenizer.from_str(from_merges(*_spelling()).to_str())
    rng = random.Random(1)
    source, before = Conversations(facts.load(), rng), list[Message]()
    while True:
        drawn = [m for m in source.draw() if m.role != "system"]
        text = rendered([template.Message(m.role, m.content) for m in [*before, *drawn]])
        if len(bpe.encode(text, add_special_tokens=False).ids) > SANE - 100:
            break
        before += [Message(role=m.role, content=m.content) for m in drawn]
    asked = [*before, Message(role="user", content="How do I stop a reply?")]
    assert "Esc" in chatter._answer(asked)


def _spelling():
    guide = export.read(guide_path())
    return guide.tokens, guide.merges


def test_it_ends_by_itself_and_stays_right_when_it_is_sampled(chatter):
    """With the sampling that a chat begins with."""
    prompt = Chat(messages=(Message(role="user", content="How do I stop a reply?"),))
    for seed in range(8):
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
