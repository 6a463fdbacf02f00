"""Greedy texts with guesses are those without: of each kind of model and each guesser, over many tokens on a CPU."""

import numpy as np
import pytest

from engine.model.text_model import TextModel
from engine.protocol.events import EngineOptions, Generate, Sampling, Token, TokenIds
from engine.runtime.guesser import StepTimes
from tests import generated_model
from tests.generated_assistant import write_assistant
from tests.thorough import THOROUGH, rarely

TOKENS, REPLY = (10_000, 1000) if THOROUGH else (300, 150)
SMALL = {"layers": 1, "dim": 32, "heads": 2, "kv_heads": 1, "ffn": 32}
CASES = [
    ("qwen3", "lookup"),
    rarely("qwen35", "heads"),
    rarely("qwen35", "lookup"),
    rarely("qwen35", "draft"),
    rarely("qwen35moe", "heads"),
    *(rarely(kind, who) for kind in ("llama", "qwen35moe", "gemma4", "olmoe") for who in ("lookup", "draft")),
    rarely("qwen3", "draft"),
    rarely("gemma4", "assistant"),
]


@pytest.mark.parametrize(("architecture", "guesser"), CASES)
def test_greedy_texts_are_the_same(tmp_path, monkeypatch, architecture, guesser):
    """To the last bit of the log-probabilities. Checks cost nothing here, so all guesses are checked."""
    monkeypatch.setattr(StepTimes, "seconds", lambda self, rows, checks=False: 1.0)
    head = {"draft_head": True} if guesser == "heads" else {}
    path = generated_model.write(tmp_path / "m.gguf", architecture=architecture, layers=4, **head)
    draft = generated_model.write(tmp_path / "d.gguf", **SMALL) if guesser == "draft" else ""
    if guesser == "assistant":
        draft, guesser = write_assistant(tmp_path / "d.gguf", quant="Q8_0"), "draft"
    options = EngineOptions(
        model_path=str(path), draft=str(draft), speculate=guesser, context_length=max(256, REPLY + 60)
    )
    model = TextModel(options, lambda _: None)
    model.warm_up(lambda: False)
    tried = right = compared = 0
    for seed in range(2 * TOKENS // REPLY):
        prompt = tuple(map(int, np.random.default_rng(seed).integers(0, 500, 40)))
        texts: list[list[Token]] = []
        for guesses in (False, True):
            request = Generate(
                request_id=seed,
                prompt=TokenIds(ids=prompt),
                sampling=Sampling(temperature=0),
                max_tokens=REPLY,
                ignore_eos=True,
                guesses=guesses,
                fresh=True,
                logprobs=2,
            )
            text = list[Token]()
            report = lambda event, text=text: text.append(event) if isinstance(event, Token) else None
            end = model.generate(request, report, lambda: False)
            texts.append(text)
        plain, guessed = ([(token.id, token.logprob) for token in text] for text in texts)
        assert plain == guessed and len(plain) == REPLY, seed
        compared, tried, right = compared + REPLY, tried + end.draft_n, right + end.draft_n_accepted
        if compared >= TOKENS:
            break
    assert tried > TOKENS // 500  # a model of noise, or a small one, hardly ever guesses right, and stops
    assert right or guesser != "lookup" or architecture == "qwen35moe"
