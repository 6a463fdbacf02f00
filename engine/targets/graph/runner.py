"""A model as tinygrad's tensor graphs: runs on every device that tinygrad supports."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tinygrad import Device, Tensor, TinyJit, UOp, dtypes
from tinygrad.uop.ops import Ops

from engine.description.spec import ModelSpec
from engine.errors import ModelFileError
from engine.fixes import fused_gathers, matvec_heuristic, search_trials
from engine.formats.kv_format import KVFormat
from engine.loading.weights import Weights
from engine.measure.free_memory import free_bytes
from engine.measure.profile import Replay
from engine.protocol.events import Step as StepKind
from engine.runtime.checkpoints import checkpoint_slots
from engine.runtime.kv_blocks import BLOCK, KVGroup, blocks_of_one
from engine.runtime.model_runner import Ahead, SearchRequest, Slot, varied_tokens
from engine.runtime.pictures import PictureRoom, positions_of
from engine.runtime.sampling import Logits
from engine.targets.graph.inputs import Step, StepInputs
from engine.targets.graph.states import StateCopies
from engine.targets.graph.step import Transformer
from engine.targets.not_finite import not_finite


class GraphRunner:
    """Implements `ModelRunner`. Slots are run one after another. Pieces of a prompt are padded to `max_chunk`, so one
    captured step serves all. Layers with a window keep all tokens, as those without."""

    sampler = None
    precompiled, captures = False, True
    max_chunk = BLOCK
    chunk_sizes: tuple[int, ...] = (max_chunk,)
    row_counts: tuple[int, ...] = (1,)
    check_rows: tuple[int, ...] = ()
    search_tokens = 0
    export_layout = ""

    def __init__(
        self,
        weights: Weights,
        context_length: int,
        parallel: int = 1,
        kv: KVFormat = KVFormat.F16,
        pictures: PictureRoom | None = None,
    ) -> None:
        """`pictures`: if prompts may have some. Raises ModelFileError."""
        matvec_heuristic.apply()
        fused_gathers.apply()
        search_trials.apply()
        spec, self.parallel, self._has_pictures = weights.spec, parallel, pictures is not None
        if pictures and pictures.whole:
            self.max_chunk = -(-pictures.whole // BLOCK) * BLOCK
            self.chunk_sizes = BLOCK, self.max_chunk
        if spec.both_ways:  # a step of BLOCK tokens has no place for what they see
            self.max_chunk = max(self.max_chunk, 2 * BLOCK)
            some = (2 * BLOCK << 2 * i for i in range(self.max_chunk.bit_length()))
            self.chunk_sizes = (*(n for n in some if n < self.max_chunk), self.max_chunk)
        self._turned = next((rope for rope in spec.ropes if pictures and rope.sections), None)
        blocks = _n_blocks(spec, context_length, parallel, kv)
        self.kv_groups: tuple[KVGroup, ...] = (KVGroup(None, blocks),)
        length = context_length + self.max_chunk  # with what fills a step
        self._turns = self._turned.tables(length, context_length) if self._turned else ()
        self._transformer = Transformer(weights, length, context_length, parallel, blocks, kv)
        self._inputs = StepInputs(parallel, length, blocks)
        self._prefill, self._whole = (
            {size: TinyJit(step) for size in self.chunk_sizes}
            for step in (self._prefill_step, self._whole_step)
        )
        self._decode, self._copy = TinyJit(self._decode_step), TinyJit(self._transformer.copy_block)
        for jit in (*self._prefill.values(), *self._whole.values(), self._decode, self._copy):
            jit.cnt = 1  # capture at the first call, not at the second
        self._source, self._target = (UOp.variable(name, 0, blocks - 1) for name in ("source", "target"))
        self._logits: list[Tensor] = []
        self._hidden: list[NDArray[np.float32]] = []
        self.state_bytes = spec.state_bytes
        self.state_slots = checkpoint_slots(parallel) if self.state_bytes else 0
        self._states = StateCopies(self._transformer.states, self.state_slots)
        self._kept = [0] * self.state_slots  # the positions of the checkpoints
        self._positions = [0] * parallel
        self._recent: list[tuple[int, ...]] = [()] * parallel  # the last tokens of each sequence
        self._kept_recent: list[tuple[int, ...]] = [()] * self.state_slots

    # --- steps -------------------------------------------------------------------------------------------

    def cut_state(self, sequence: int, position: int) -> None:
        raise AssertionError("No guesses are checked with recurrent states here.")

    def can_check(self, count: int) -> bool:
        return False

    def prepare_check(self, count: int) -> None:
        """There are none."""

    def prepare_rows(self, count: int) -> None:
        pass  # a step has one row

    def run(self, slots: Sequence[Slot], ahead: Ahead | None = None) -> NDArray[np.int32]:
        chosen: list[int] = []
        self._logits, self._hidden = [], []
        for slot in slots:
            n = len(slot.inputs)
            if slot.position == 0:
                self._states.clear(slot.sequence)
                self._recent[slot.sequence] = ()
            if slot.want == "none":
                size = self._size_of(slot)
                step = self._step(slot, size)
                Device[Device.DEFAULT].synchronize()  # else one wait, at the end, is for the whole prompt
                self._prefill[size](*step)
            elif slot.want == "hidden":
                size = self._size_of(slot)
                self._hidden.append(self._whole[size](*self._step(slot, size)).numpy()[:n])
            else:
                if self._logits:  # the step overwrites those of the last one
                    self._logits[-1] = self._logits[-1].clone().realize()
                best, logits = self._decode(*self._step(slot, 1))
                chosen.append(int(best.item()))
                self._logits.append(logits)
            self._positions[slot.sequence] = slot.position + n
            if hashed := self._transformer.spec.hashed:
                self._recent[slot.sequence] = (*self._recent[slot.sequence], *slot.inputs)[-hashed.kept :]
        return np.array(chosen, np.int32)

    def decode_depths(self, rows: int) -> tuple[int, ...]:
        return (0,)

    def piece_sizes(self, rows: int) -> tuple[int, ...]:
        return self.chunk_sizes

    def _size_of(self, slot: Slot) -> int:
        """The size of the step for a piece of a prompt."""
        return next(size for size in self.chunk_sizes if len(slot.inputs) <= size)

    def _step(self, slot: Slot, size: int) -> Step:
        padded = [*slot.inputs, *[0] * (size - len(slot.inputs))]
        rows = self._transformer.rows_of(padded, self._recent[slot.sequence])
        step = self._inputs.step(padded, rows, slot.sequence, slot.position, len(slot.inputs))
        return self._with_pictures(step, slot, size) if self._has_pictures else step

    def _with_pictures(self, step: Step, slot: Slot, size: int) -> Step:
        position, pictures = slot.position, slot.pictures
        if self._turned:
            places = positions_of(pictures, position, size)
            by_pair = places[self._turned.turned_by].T, np.arange(self._turned.pairs)
            cos, sin = (Tensor(table[by_pair]).realize() for table in self._turns)
            step = step._replace(cos=cos, sin=sin)
        if size == 1:
            return step
        n = len(slot.inputs)
        of_pictures = np.zeros((size, self._transformer.spec.picture_width), np.float32)
        seen = np.arange(position + 1, position + size + 1, dtype=np.int32)
        if pictures:
            seen[:n] = pictures.seen(position, n)
            if (embeddings := pictures.embeddings(position, n)) is not None:
                of_pictures[:n] = embeddings
        step = step._replace(of_pictures=Tensor(of_pictures).realize())
        return step._replace(seen=Tensor(seen).realize()) if size > BLOCK else step

    def _prefill_step(self, *inputs: Tensor | UOp | int) -> None:
        self._transformer.store(Step(*inputs)).realize()

    def _decode_step(self, *inputs: Tensor | UOp | int) -> tuple[Tensor, Tensor]:
        hidden = self._transformer(Step(*inputs))
        logits = self._transformer.logits(hidden).reshape(-1)
        best = logits.sum().isfinite().where(logits.argmax().cast(dtypes.int32), -1)
        Tensor.realize(best, logits)
        return best, logits

    def _whole_step(self, *inputs: Tensor | UOp | int) -> Tensor:
        *_, (x, _) = self._transformer.sublayers(Step(*inputs))
        return x.contiguous().realize()

    def streams(self, rows: int) -> NDArray[np.float32] | None:
        return None  # no guesses are checked

    def hidden(self) -> list[NDArray[np.float32]]:
        return self._hidden

    def not_finite(self, slot: Slot) -> ModelFileError:
        transformer, step = self._transformer, self._step(slot, 1)
        outputs = itertools.chain([transformer.embedded(step)], (x for x, _ in transformer.sublayers(step)))
        return not_finite(transformer.spec, (x.numpy() for x in outputs))

    def prepare(self, size: int) -> None:
        pass  # the first use of a step captures it

    def logits(self, rows: Sequence[int] | None = None) -> Logits:
        chosen = self._logits if rows is None else [self._logits[row] for row in rows]
        values: list[Logits] = [logits.numpy() for logits in chosen]
        return np.array(values, np.float32).reshape(len(chosen), -1)

    def expert_choices(self) -> list[NDArray[np.int32]]:
        return []  # not counted

    def replay(self, step: StepKind, position: int) -> Replay:
        jit, n = (self._decode, 1) if step == "decode" else (self._prefill[self.max_chunk], self.max_chunk)
        inputs = self._step(Slot(0, tuple(varied_tokens(n, self._transformer.spec.vocab)), position), n)
        return Replay(
            calls=[kernel for call in jit.captured.linear.src for kernel in _kernels(call)],
            uses=self._transformer.uses(),
            tokens=n,
            run=lambda: jit(*inputs),
            variables={u.unbind()[0].expr: u.unbind()[1] for u in inputs if isinstance(u, UOp)},
            inputs=tuple(t.uop.base for t in inputs if isinstance(t, Tensor)),
        )

    def search(self, request: SearchRequest) -> bool:
        return False  # tinygrad's own search is part of a capture

    # --- the memory of sequences -------------------------------------------------------------------------

    def assign(self, sequence: int, tables: Sequence[Sequence[int]]) -> None:
        self._inputs.assign(sequence, tables[0])

    def copy_block(self, group: int, source: int, target: int) -> None:
        if source < 0:
            self._transformer.clear_block(target)
        elif self._transformer.spec.caching:
            self._copy(self._source.bind(source), self._target.bind(target))

    def export_blocks(self, tables: Sequence[Sequence[int]]) -> NDArray[np.uint8]:
        raise NotImplementedError

    def import_blocks(self, tables: Sequence[Sequence[int]], export: NDArray[np.uint8]) -> None:
        raise NotImplementedError

    def state_position(self, sequence: int = 0) -> int:
        return self._positions[sequence]

    def save_state(self, slot: int, sequence: int = 0) -> None:
        self._states.save(slot, sequence)
        self._kept[slot] = self._positions[sequence]
        self._kept_recent[slot] = self._recent[sequence]

    def load_state(self, slot: int, sequence: int = 0) -> None:
        self._states.load(slot, sequence)
        self._positions[sequence] = self._kept[slot]
        self._recent[sequence] = self._kept_recent[slot]

    def export_state(self, slot: int) -> NDArray[np.uint8]:
        raise NotImplementedError

    def import_state(self, slot: int, position: int, export: NDArray[np.uint8]) -> None:
        raise NotImplementedError


def _n_blocks(spec: ModelSpec, context: int, parallel: int, kv: KVFormat) -> int:
    """The blocks of the KV cache: room for all sequences if it takes no more than half of the memory, but at least for
    one."""
    one = blocks_of_one(0, context, BLOCK)
    token_bytes = sum(spec.kv_bytes_per_token(windowed=windowed, kv=kv) for windowed in (False, True))
    free = (free_bytes(Device.DEFAULT) or 0) - spec.matrix_bytes if parallel > 1 else 0
    return max(one, min(parallel * one, free // 2 // (BLOCK * max(token_bytes, 1))))


def _kernels(call: UOp) -> tuple[UOp, ...]:
    """The kernels of a captured call, which may be a graph of many."""
    ast = call.src[0]
    is_graph = ast.op is Ops.CUSTOM_FUNCTION and ast.arg == "graph"
    return ast.src[0].src if is_graph else (call,)
