"""Tokens drawn by kernels and their log-probabilities, against the sampler of the host."""

import numpy as np
from tinygrad import dtypes

from engine.protocol.events import Sampling
from engine.runtime.model_runner import Drawing
from engine.runtime.sampling import Bias, Sampler, log_probabilities, penalizes
from engine.targets.nvidia.device_sampler import Choice, DeviceSampler
from engine.targets.nvidia.kernels.kernel_sequence import KernelSequence
from engine.targets.nvidia.kernels.sampling.logit_changes import MAX_BIASES, penalize
from engine.targets.nvidia.kernels.sampling.sampling import (
    NOT_FINITE,
    Shortlist,
    StepRows,
    draw,
    leaders,
    ranked,
    settings_of,
)
from tests.kernels.gpu.buffers import buffer, close, rng, run, zeros


def drawn_tokens(sampling, logits, previous, numbers, shortlist, context=16):
    """The tokens that kernels draw with each of `numbers`, and the logits that they sort."""
    position, vocab = len(previous) - 1, shortlist.vocab
    said = np.zeros(context + 1, np.int32)
    said[: len(previous)] = previous
    tokens, settings, left = buffer(said), buffer(settings_of(sampling)), buffer(logits)
    if penalizes(sampling):
        state = buffer(np.array([0, position], np.int32))
        run(penalize(vocab, context, 8), left, settings, state, tokens)
    values, ids = zeros(shortlist.entries(0)), []
    run(leaders(shortlist), values, left)
    for level in range(len(shortlist.spans)):
        n, source = shortlist.entries(level + 1), [left] if level + 1 < len(shortlist.spans) else []
        outs = zeros(n), zeros(n, dtypes.int32)
        run(ranked(shortlist, level), *outs, values, *ids, *source)
        values, ids = outs[0], [outs[1]]
    drawn = []
    for number in numbers:
        by_position = np.zeros(context, np.float32)
        by_position[position] = number
        state, history = buffer(np.array([0, position], np.int32)), zeros(context, dtypes.int32)
        run(draw(shortlist, context), state, history, tokens, values, *ids, settings, buffer(by_position))
        token = int(history.numpy()[position])
        following = max(token, 0)
        assert state.numpy().tolist() == [following, position + 1]
        assert tokens.numpy()[position + 1] == following
        drawn.append(token)
    return drawn, left.numpy()


def check_sampling() -> None:
    """Tokens drawn by kernels are the host's: numbers on either side of each boundary between two tokens tell that
    the same ones are kept with the same probabilities, to 1e-4."""
    vocab = 150
    logits = np.round(rng.standard_normal(vocab) * 3, 1).astype(np.float32)  # some are alike
    order = np.argsort(-logits, kind="stable")
    logits[-1] = logits[order[0]] + 0.2  # where the last group is not whole
    shortlist = Shortlist(vocab, 16, (4, 2, 1))
    previous = [int(order[0]), 9, 7, int(order[1]), int(order[0]), int(order[40])]
    off = {"top_p": 1.0, "min_p": 0.0}
    for settings in (
        {"top_k": 6},
        {"top_k": 16, "temperature": 1.7, **off},
        {"top_k": 12, "top_p": 0.8, "min_p": 0.0, "temperature": 0.4},
        {"top_k": 12, "top_p": 1.0, "min_p": 0.1, "temperature": 1.0},
        {"top_k": 5, "repeat_penalty": 1.8, "repeat_last_n": 4, **off},
        {"top_k": 8, "presence_penalty": 0.77, "frequency_penalty": 0.31, "repeat_last_n": 5, **off},
        {"temperature": 0.0, "repeat_penalty": 1.3},
        {"temperature": 0.0, "frequency_penalty": 0.41, "repeat_penalty": 1.2},
    ):
        wanted = Sampling(**settings)
        assert shortlist.suffices(wanted)
        if wanted.temperature == 0:
            got, _ = drawn_tokens(wanted, logits, previous, [0.3], shortlist)
            assert got == [Sampler(wanted).sample(logits, previous)]
            continue
        ids, masses = Sampler(wanted).candidates(logits, previous)
        edges = np.concatenate([[0], np.cumsum(masses) / masses.sum()])
        over_heads = np.flatnonzero(np.diff(edges) > 3e-4)
        over_heads = over_heads[:2].tolist() + over_heads[2:][-2:].tolist()
        numbers = [x for i in over_heads for x in (edges[i] + 1e-4, edges[i + 1] - 1e-4)] + [1 - 2**-24]
        got, penalized = drawn_tokens(wanted, logits, previous, numbers, shortlist)
        assert got == [ids[i] for i in over_heads for _ in (0, 1)] + [ids[-1]], (settings, got, ids)
        close(penalized, Sampler(wanted)._penalized(logits, previous))
    assert not any(shortlist.suffices(Sampling(top_k=k)) for k in (0, 17))
    for broken in (logits * np.nan, np.where(order == 77, np.nan, logits), np.full(vocab, -np.inf)):
        got, _ = drawn_tokens(Sampling(top_k=6), broken.astype(np.float32), previous, [0.3], shortlist)
        assert got == [NOT_FINITE]


def check_sampling_of_rows() -> None:
    """Rows with settings of their own: sampled, greedy in spite of settings, not used, or of a sequence that has no
    settings yet; with a mask, and then without. The tokens of even positions do not lie where those of odd ones do. The
    logits stay as they are, and log-probabilities are theirs."""
    vocab, context, sequences, n = 150, 16, 4, 5
    logits = (rng.standard_normal((n, vocab)) * 2).astype(np.float32)
    sampler = DeviceSampler(Shortlist(vocab, 32, (4, 2, 1)), context, sequences, n)
    said = [[9, 7, 9, 12], [int(logits[3].argmax())] * 3, [5, 6, 8, 3, 1], [4, 4]]
    settings = [
        Sampling(top_k=4, seed=1, repeat_penalty=1.5),
        Sampling(top_k=12, temperature=2.0, frequency_penalty=1.4, repeat_last_n=2, seed=2, top_p=1, min_p=0),
        Sampling(top_k=16, temperature=1.5, top_p=0.9, min_p=0.01, seed=4),
    ]
    biases = [((9, 2.5), (int(logits[0].argmax()), -3.0)), ((vocab, 1.0), (149, 0.5)), ()]
    drawings = [
        Drawing(s, said[i], Sampler(s).uniforms(9), biases[i], i, masks=i == 2)
        for i, s in enumerate(settings)
    ]
    for i, drawing in enumerate(drawings):
        assert sampler.prepare(i, drawing)
    assert sampler.choice([0]) == Choice(True, changes=True) and sampler.choice([]) == Choice()
    assert sampler.choice([2, 1]) == Choice(True, changes=True, masks=True, tells=True)
    for beyond in ({"top_k": 0}, {"repeat_penalty": 1.1, "repeat_last_n": 5000}):
        assert not sampler.prepare(1, drawings[0]._replace(sampling=Sampling(**beyond)))
    too_many = [(i, 1.0) for i in range(MAX_BIASES + 1)]
    for more in ({"bias": too_many}, {"top": 21}):
        assert not DeviceSampler(Shortlist(999), context).prepare(0, drawings[0]._replace(**more))
    allowed = np.array([0xF0F0F0F0, 0, 0xFFFF, 1 << 31], np.uint32)  # the last word is missing
    drawn = StepRows.SAMPLED
    rows = [(2, drawn), (0, 0), (0, StepRows.USED), (1, drawn), (3, drawn)]  # sequence, kind
    state = np.array([(said[s][-1], len(said[s]) - 1, s, kind) for s, kind in rows], np.int32).T
    for words in (allowed, None):
        sampler.allow(2, words)
        on_device, out, left = buffer(state), zeros(2 * n, dtypes.int32), buffer(logits)
        step = KernelSequence()
        sampler.add_to(step, left, on_device, out, sampler.choice([2, 0, 1, 3]), n)
        step.capture()()
        hold_rows(sampler, rows, state, drawings, logits, words, on_device, out, left)


def check_sampling_of_a_lone_sequence() -> None:
    """Biases and masks where there is one sequence, so that no kernel asks which it is."""
    vocab, context, said, bias = 150, 16, [9, 12], ((9, 2.5),)
    logits, sampling = rng.standard_normal(vocab).astype(np.float32), Sampling(top_k=4, seed=1)
    sampler = DeviceSampler(Shortlist(vocab, 32, (4, 2, 1)), context)
    assert sampler.prepare(0, Drawing(sampling, said, Sampler(sampling).uniforms(9), bias))
    wanted = Sampler(sampling).sample(Bias(bias).added_to(logits), said)
    for masks in (False, True):
        step, out = KernelSequence(), zeros(context, dtypes.int32)
        state = buffer(np.array([said[-1], len(said) - 1, 0], np.int32))
        sampler.add_to(step, buffer(logits), state, out, Choice(True, changes=True, masks=masks))
        step.capture()()
        assert out.numpy()[len(said) - 1] == wanted


def hold_rows(sampler, rows, state, drawings, logits, words, on_device, out, left):
    """Raises AssertionError where a step of rows did not do what the host does. `words`: a mask, of sequence 2."""
    n, vocab = logits.shape
    after, letters = on_device.numpy().reshape(4, n), out.numpy().reshape(2, n)
    wanted = {row: int(logits[row].argmax()) for row in (2, 4)}
    for row in (0, 3):
        s = rows[row][0]
        sampling, said, _, bias, *_ = drawings[s]
        changed = Bias(bias).added_to(logits[row])
        if row == 0 and words is not None:
            may = np.unpackbits(words.view(np.uint8), bitorder="little").astype(bool)
            changed = np.where(np.pad(may, (0, vocab - may.size)), changed, np.float32(-np.inf))
        wanted[row] = Sampler(sampling).sample(changed, said)
    for row, token in wanted.items():
        position = state[1, row]
        assert after[:, row].tolist() == [token, position + 1, *rows[row]]
        assert letters[:, row].tolist() == ([0, token] if position % 2 else [token, 0])
        logprob, top = sampler.log_probabilities(rows[row][0], position, 20)
        host, host_top = log_probabilities(logits[row], token, 20)
        assert abs(logprob - host) < 1e-5 and [t.id for t in top] == [t.id for t in host_top]
        close(np.array([t.logprob for t in top]), np.array([t.logprob for t in host_top]))
    assert after[:, 1].tolist() == state[:, 1].tolist() and not letters[:, 1].any()
    assert np.array_equal(left.numpy().reshape(n, -1), logits)
