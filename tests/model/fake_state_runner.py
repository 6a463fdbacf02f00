"""A runner without a model whose next token is a function of its state: of all tokens before it."""

import zlib

import numpy as np

VOCAB = 256


def next_token(tokens):
    return zlib.crc32(np.asarray(tokens, np.int32).tobytes()) % VOCAB


class FakeStateRunner:
    """Steps check that the state is that after the tokens whose keys and values are in the cache. A step may run ahead,
    and the state has passed its token then."""

    precompiled = True
    max_chunk = 16
    chunk_sizes = (16,)
    decode_depths = (0,)
    max_rewind = None
    state_bytes = 8

    def __init__(self, slots=5):
        self.state_slots = slots
        self.cache, self.state, self.saved = [], [], {}
        self.ahead = None  # the token and the position of a step that ran ahead
        self.prefilled = []  # the tokens of each prefill step

    def state_position(self, sequence=0):
        return len(self.state)

    def save_state(self, slot, sequence=0):
        assert 0 <= slot < self.state_slots
        self.saved[slot] = list(self.state)

    def load_state(self, slot, sequence=0):
        self.state, self.ahead = list(self.saved[slot]), None

    def prefill(self, tokens, position):
        assert 0 < len(tokens) <= self.max_chunk
        self.prefilled.append(len(tokens))
        self._run(tokens, position)

    def decode(self, token, position, run_ahead=False):
        if self.ahead != (token, position):
            self._run([token], position)
        best = next_token(self.state)
        self.ahead = None
        if run_ahead:
            self._run([best], position + 1)
            self.ahead = best, position + 1
        return best

    def logits(self):
        raise AssertionError  # nobody asks for them

    def expert_choices(self):
        return []

    def replay(self, step, position):
        self.state, self.ahead = [1, 2, 3], None
        del self.cache[position:]

    def _run(self, tokens, position):
        if position == 0:
            self.state = []
        self.cache[position:] = tokens
        self.state += tokens
        self.ahead = None
        assert self.state == self.cache, (len(self.state), len(self.cache), position)
