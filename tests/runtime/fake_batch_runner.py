"""A runner without a model: the next token is a function of all tokens before it, read through the tables."""

import functools

import numpy as np

from engine.runtime.checkpoints import checkpoint_slots
from engine.runtime.kv_blocks import BLOCK, KVGroup
from engine.runtime.sampling import Bias, Sampler, log_probabilities

VOCAB = 256
GROUPS = KVGroup(None, 64), KVGroup(40, 64)


def next_logits(tokens):
    return _next_logits(tuple(tokens))


@functools.cache
def _next_logits(tokens):
    return np.random.default_rng(list(tokens)).normal(size=VOCAB).astype(np.float32)


class Text(tuple):
    """Tokens, and the text before the last one: it is looked at instead of comparing tokens."""

    before = ()

    def longer(self, token):
        text = Text((*self, token))
        text.before = self
        return text


def greedy_reply(prompt, n):
    """What a request gets alone."""
    tokens = list(prompt)
    for _ in range(n):
        tokens.append(int(next_logits(tokens).argmax()))
    return tokens[len(prompt) :]


class FakeBatchRunner:
    sampler = None
    precompiled = captures = True
    check_rows = ()
    max_chunk = 128
    chunk_sizes = (128,)
    state_slots = search_tokens = 0
    export_layout = ""

    def __init__(self, parallel=4, groups=GROUPS):
        self.parallel, self.kv_groups = parallel, groups
        self.row_counts = (1, parallel)
        self.pools = [{} for _ in groups]
        self.tables = {}
        self.ahead = {}  # the slots of a step that was launched already, with the tokens of each
        self.pieces_ahead = []  # and its pieces of prompts
        self.steps = []  # (phase, tokens) of each
        self.begun_ahead = 0  # replies whose first token was in a step ahead

    def assign(self, sequence, tables):
        self.tables[sequence] = [list(table) for table in tables]
        if not any(tables):
            self.ahead = {row: logits for row, logits in self.ahead.items() if row.sequence != sequence}

    def copy_block(self, group, source, target):
        pool = self.pools[group]
        pool.update({(target, t): pool.get((source, t)) for t in range(BLOCK)})

    def _store(self, token, position, sequence):
        """A place holds all tokens so far, as far as the token before it is still there."""
        before = Text()
        for pool, group, table in zip(self.pools, self.kv_groups, self.tables[sequence], strict=True):
            if position:
                before = pool[table[(position - 1) // BLOCK], (position - 1) % BLOCK]
            text = before
            for t in reversed(range(group.first_seen(position), position)):
                stored = pool[table[t // BLOCK], t % BLOCK]
                assert stored is text or stored == text
                text = text.before
        assert len(before) == position
        text = before.longer(token)
        for pool, table in zip(self.pools, self.tables[sequence], strict=True):
            pool[table[position // BLOCK], position % BLOCK] = text
        return text

    def can_check(self, count):
        return True

    def prepare(self, size):
        pass

    def piece_sizes(self, rows):
        return (32, self.max_chunk)

    def run(self, slots, ahead=None):
        self.of_pieces = []
        self._prefill([slot for slot in slots if slot.want != "last" and slot not in self.pieces_ahead])
        self.pieces_ahead = []
        rows = [slot for slot in slots if slot.want == "last"]
        return self._decode(rows, ahead) if rows else np.zeros(0, np.int32)

    def _prefill(self, pieces, phase="prefill"):
        for piece in pieces:
            assert 0 < len(piece.inputs) <= self.max_chunk
            self.steps.append((phase, len(piece.inputs)))
            texts = [
                self._store(token, piece.position + i, piece.sequence) for i, token in enumerate(piece.inputs)
            ]
            if piece.want == "hidden":
                assert phase == "prefill"
                self.of_pieces.append(np.array([next_logits(text) for text in texts]))

    def hidden(self):
        return self.of_pieces

    def _decode(self, rows, ahead):
        assert (
            0 < len(rows) <= self.parallel == len({row.sequence for row in rows}) + self.parallel - len(rows)
        )
        known, self.ahead = self.ahead, {}
        if not all(row in known for row in rows):
            assert not known  # nobody asked for a step in vain
            known = self._step("decode", rows)
        self._logits = np.array([next_logits(known[row]) for row in rows])
        chosen = np.array(
            [self._chosen(row, known[row], self._logits[i]) for i, row in enumerate(rows)], np.int32
        )
        if ahead and (following := ahead()) is not None:
            self._logits = None
            self.pieces_ahead = [slot for slot in following.slots if slot.want == "none"]
            self._prefill(self.pieces_ahead, "prefill ahead")
            going = [
                r._replace(inputs=(int(i),), position=r.position + 1)
                for i, r in zip(chosen, rows, strict=True)
                if r.sequence not in following.ended
            ]
            begun = [slot for slot in following.slots if slot.want == "last"]
            self.begun_ahead += len(begun)
            self.ahead = self._step("ahead", [*going, *begun])
        return chosen

    def _step(self, phase, rows):
        """All tokens of each row. A step ahead chooses the next ones when it is asked for."""
        self.steps.append((phase, len(rows)))
        return {row: self._store(*row.inputs, row.position, row.sequence) for row in rows}

    def _chosen(self, row, tokens, logits):
        return int(logits.argmax())

    def logits(self, rows=None):
        return self._logits if rows is None else self._logits[rows]


class FakeStateRunner(FakeBatchRunner):
    """With a state for each sequence, all its tokens so far: steps check that it is the one they need."""

    state_bytes = 8

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.state_slots = checkpoint_slots(self.parallel)
        self.states, self.saved = [()] * self.parallel, {}

    def state_position(self, sequence=0):
        return len(self.states[sequence])

    def save_state(self, slot, sequence=0):
        assert 0 <= slot < self.state_slots
        self.saved[slot] = self.states[sequence]

    def load_state(self, slot, sequence=0):
        self.states[sequence] = self.saved[slot]

    def _store(self, token, position, sequence):
        before = self.states[sequence] if position else ()
        self.states[sequence] = super()._store(token, position, sequence)
        assert self.states[sequence] == (*before, token), (before, self.states[sequence], position, sequence)
        return self.states[sequence]


class FakeRowSampler(FakeBatchRunner):
    """Draws as the host does."""

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.sampler = FakeSampler()

    def _chosen(self, row, tokens, logits):
        return self.sampler.draw(row, tokens, logits) if row.draw else super()._chosen(row, tokens, logits)


class FakeSampler:
    def __init__(self):
        self.drawings, self.masks, self.told = {}, {}, {}

    def prepare(self, sequence, drawing):
        by_position = dict(enumerate(drawing.uniforms, len(drawing.tokens) - 1))
        self.drawings[sequence] = drawing, by_position
        return drawing.sampling.top_k > 0

    def allow(self, sequence, words):
        assert self.drawings[sequence][0].masks
        bits = np.ones(VOCAB) if words is None else np.unpackbits(words.view(np.uint8), bitorder="little")
        self.masks[sequence] = bits[:VOCAB].astype(bool)

    def log_probabilities(self, sequence, position, n):
        logits, chosen = self.told.pop((sequence, position))
        return log_probabilities(logits, chosen, n)

    def draw(self, row, tokens, logits):
        drawing, uniforms = self.drawings[row.sequence]
        changed = Bias(drawing.bias).added_to(logits)
        if drawing.masks:  # each is for one step
            changed = np.where(self.masks.pop(row.sequence), changed, np.float32(-np.inf))
        sampler = Sampler(drawing.sampling)
        if drawing.sampling.temperature == 0:
            token = sampler.sample(changed, tokens)
        else:
            ids, masses = sampler.candidates(changed, tokens)
            cumulative = np.cumsum(masses)
            place = np.searchsorted(cumulative, uniforms[row.position] * cumulative[-1], side="right")
            token = int(ids[place])
        if drawing.top:
            self.told[row.sequence, row.position] = logits, token
        return token
