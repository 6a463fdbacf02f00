"""A BatchRunner without a model: the next token is a function of all tokens before it, read through the tables."""

import numpy as np

from engine.model.kv_blocks import BLOCK, KVGroup
from engine.model.model_runner import Row

VOCAB = 256
GROUPS = KVGroup(None, 64), KVGroup(40, 64)


def next_logits(tokens):
    return np.random.default_rng(list(tokens)).normal(size=VOCAB).astype(np.float32)


def greedy_reply(prompt, n):
    """What a request gets alone."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(int(next_logits(tokens).argmax()))
    return tokens[len(prompt) :]


class FakeBatchRunner:
    precompiled = True
    max_chunk = 128
    chunk_sizes = (128,)
    decode_depths = (0,)
    max_rewind = None

    def __init__(self, parallel=4, groups=GROUPS):
        self.parallel, self.kv_groups = parallel, groups
        self.row_counts = (1, parallel)
        self.pools = [{} for _ in groups]
        self.tables = {}
        self.ahead = {}  # the rows of a step that was launched already, with their logits
        self.steps = []  # (phase, tokens) of each

    def assign(self, sequence, tables):
        self.tables[sequence] = [list(table) for table in tables]
        if not any(tables):
            self.ahead = {row: logits for row, logits in self.ahead.items() if row.sequence != sequence}

    def copy_block(self, group, source, target):
        pool = self.pools[group]
        pool.update({(target, t): pool.get((source, t)) for t in range(BLOCK)})

    def _store(self, token, position, sequence):
        """A place holds all tokens so far, as far as the token before it is still there."""
        before = ()
        for pool, group, table in zip(self.pools, self.kv_groups, self.tables[sequence], strict=True):
            if position:
                before = pool[table[(position - 1) // BLOCK], (position - 1) % BLOCK]
            for t in range(group.first_seen(position), position):
                assert pool[table[t // BLOCK], t % BLOCK] == before[: t + 1]
        assert len(before) == position
        for pool, table in zip(self.pools, self.tables[sequence], strict=True):
            pool[table[position // BLOCK], position % BLOCK] = (*before, token)
        return (*before, token)

    def prefill(self, tokens, position, sequence=0):
        assert 0 < len(tokens) <= self.max_chunk
        self.steps.append(("prefill", len(tokens)))
        for i, token in enumerate(tokens):
            self._store(token, position + i, sequence)

    def decode_rows(self, rows, ahead=False):
        assert (
            0 < len(rows) <= self.parallel == len({row.sequence for row in rows}) + self.parallel - len(rows)
        )
        known, self.ahead = self.ahead, {}
        if not all(row in known for row in rows):
            assert not known  # nobody asked for a step in vain
            known = self._step("decode", rows)
        self._logits = np.array([known[row] for row in rows])
        best = self._logits.argmax(1).astype(np.int32)
        if ahead and len(rows) == len(known):
            self._logits = None
            following = [Row(int(i), r.position + 1, r.sequence) for i, r in zip(best, rows, strict=True)]
            self.ahead = self._step("ahead", following)
        return best

    def _step(self, phase, rows):
        """The logits after each row."""
        self.steps.append((phase, len(rows)))
        return {row: next_logits(self._store(row.token, row.position, row.sequence)) for row in rows}

    def row_logits(self):
        return self._logits
