"""A runner of one sequence without a model, whose next token is a function of its state: of all tokens before it."""

import zlib

import numpy as np

from engine.runtime.kv_blocks import BLOCK, KVGroup

VOCAB = 256


def next_token(tokens):
    return zlib.crc32(np.asarray(tokens, np.int32).tobytes()) % VOCAB


class FakeStateRunner:
    """Steps check that the state is that after the tokens whose keys and values are in the cache. A step may run ahead,
    and the state has passed its token then."""

    sampler = None
    precompiled = captures = True
    check_rows = ()
    parallel = 1
    max_chunk = 16
    chunk_sizes = (16,)
    row_counts = (1,)
    state_bytes = 8
    search_tokens = 0
    export_layout = ""

    def __init__(self, slots=5, blocks=700):
        self.state_slots, self.kv_groups = slots, (KVGroup(None, blocks),)
        self.state, self.saved = [], {}
        self.pool, self.table = np.full((blocks, BLOCK), -1), []
        self.ahead = None  # the token and the position of a step that ran ahead
        self.prefilled = []  # the tokens of each prefill step

    def assign(self, sequence, tables):
        [self.table] = tables
        if not self.table:
            self.ahead = None

    def copy_block(self, group, source, target):
        self.pool[target] = self.pool[source]

    def state_position(self, sequence=0):
        return len(self.state)

    def save_state(self, slot, sequence=0):
        assert 0 <= slot < self.state_slots
        self.saved[slot] = list(self.state)

    def load_state(self, slot, sequence=0):
        self.state, self.ahead = list(self.saved[slot]), None

    def can_check(self, count):
        return True

    def piece_sizes(self, rows):
        return self.chunk_sizes

    def run(self, slots, ahead=None):
        [(_, inputs, position, want, *_)] = slots
        assert 0 < len(inputs) <= self.max_chunk
        if want == "none":
            self.prefilled.append(len(inputs))
            self._run(inputs, position)
            return np.zeros(0, np.int32)
        if self.ahead != (*inputs, position):
            self._run(inputs, position)
        best = next_token(self.state)
        self.ahead = None
        if ahead and ahead() is not None:
            self._run([best], position + 1)
            self.ahead = best, position + 1
        return np.array([best], np.int32)

    def logits(self, rows=None):
        raise AssertionError  # nobody asks for them

    def expert_choices(self):
        return []

    def replay(self, step, position):
        self.state, self.ahead = [1, 2, 3], None
        self.pool[self.table[position // BLOCK], position % BLOCK] = -1

    def _run(self, tokens, position):
        if position == 0:
            self.state = []
        for i, token in enumerate(tokens, position):
            self.pool[self.table[i // BLOCK], i % BLOCK] = token
        self.state += tokens
        self.ahead = None
        cached = self.pool[self.table].reshape(-1)[: position + len(tokens)]
        assert self.state == cached.tolist(), (len(self.state), len(cached), position)
