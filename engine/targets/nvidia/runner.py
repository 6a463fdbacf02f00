"""Steps of a model on an NVIDIA GPU, each one graph launch.

The next tokens are written to memory of the host, so the host reads them without waiting for the device to become idle.
They stay on the device too, so the next step can run before the host has read them (`row_steps`).
"""

from __future__ import annotations

import os
from bisect import insort
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial

import numpy as np
from numpy.typing import NDArray
from tinygrad import Device, UOp

from engine.errors import ModelFileError
from engine.fixes import launch_bounds
from engine.formats.kv_format import KVFormat
from engine.kernels.compilation import MakeLinears, begin_once, compile_once, processes_compile, was_compiled
from engine.kernels.device_memory import overwrite
from engine.kernels.functions import described
from engine.loading.weights import Weights
from engine.measure.profile import Replay
from engine.measure.timeline import timeline
from engine.protocol.events import Step
from engine.runtime.model_runner import Ahead, SearchRequest, Slot, varied_tokens
from engine.runtime.pictures import PictureRoom
from engine.runtime.prefix_store import export_layout
from engine.runtime.sampling import Logits
from engine.targets.buffer_uses import BufferUses
from engine.targets.not_finite import not_finite
from engine.targets.nvidia.assistant import NvidiaAssistant
from engine.targets.nvidia.batch import ROW_COUNTS, BatchKernels, check_rows
from engine.targets.nvidia.block_tables import BlockTables
from engine.targets.nvidia.calibration import calibrate
from engine.targets.nvidia.decode import DecodeKernels
from engine.targets.nvidia.device_sampler import Choice, DeviceSampler
from engine.targets.nvidia.draft_head import NvidiaDraftHead
from engine.targets.nvidia.export import CacheExport
from engine.targets.nvidia.filling import piece_specs
from engine.targets.nvidia.input_scales import InputScales
from engine.targets.nvidia.kernels.device import chip
from engine.targets.nvidia.kernels.kernel_sequence import KernelSequence
from engine.targets.nvidia.kernels.pieces import PIECE_ROWS
from engine.targets.nvidia.kernels.sampling.sampling import Shortlist
from engine.targets.nvidia.kernels.weights.weight_repacking import begin_repacking, repacking_kernels
from engine.targets.nvidia.memory import CHUNK_SIZES
from engine.targets.nvidia.mixed import MixedKernels
from engine.targets.nvidia.mrope_angles import MRopeAngles
from engine.targets.nvidia.row_steps import Key, Rows, RowSteps
from engine.targets.nvidia.schedule_search import SearchTarget, search
from engine.targets.nvidia.states import DeviceStates
from engine.targets.nvidia.step_trials import StepTrials
from engine.targets.nvidia.uses import uses_of
from engine.targets.nvidia.weights import allocate

_DECODE_AT_MOST = 1  # up to so many tokens of a prompt are faster one by one
_DETOUR_AT_MOST = 128  # and up to so many while prefill has to be compiled first
_BEST, _DRAWN, _CHANGED = Choice(), Choice(draws=True), Choice(draws=True, changes=True)
_ALL = Choice(draws=True, changes=True, masks=True, tells=True)  # it has all kernels of choices apart


class NvidiaRunner:
    """Implements `ModelRunner`."""

    precompiled = captures = True
    max_chunk = CHUNK_SIZES[-1]

    def __init__(
        self,
        weights: Weights,
        context_length: int,
        parallel: int = 1,
        kv: KVFormat = KVFormat.F16,
        is_early: bool = False,
        pictures: PictureRoom | None = None,
    ) -> None:
        """`is_early`: what a chat's first answer does not need is compiled later. `pictures`: if there may be some.
        Raises ModelFileError."""
        launch_bounds.apply()
        os.environ.setdefault("ALLOW_HALF8", "1")  # lets tinygrad load eight half-precision numbers at once
        self.parallel, self._context = parallel, context_length
        self.chunk_sizes = sizes = tuple(n for n in CHUNK_SIZES if n <= context_length)
        # Those that are compiled at the start. The shortest does for all, and without any a server's prompts would be
        # read as replies are, token by token.
        self._first_sizes = sizes[: 1 if parallel > 1 else 0] if is_early else sizes
        rates = chip().rates  # beside what else the kernels follow from
        self._set_up = (described((weights.spec, context_length, parallel, kv, pictures, rates)),)
        self._model = model = allocate(weights, context_length, self.max_chunk, parallel, kv, pictures)
        self._angles = MRopeAngles(model, context_length, parallel, pictures)
        self._input_scales = InputScales()
        self._one = DecodeKernels(model, self._input_scales, context_length)
        counts = self.row_counts
        self._counts = sorted({1, counts[-1]})  # the numbers of rows whose kernels are compiled
        self._checks: list[int] = []  # the numbers of `check_rows` whose kernels are compiled
        self.check_rows = check_rows(model, parallel)
        most = max(counts[-1], *self.check_rows, 1)
        batches = sorted({*counts[1:], *self.check_rows})
        self._batch = BatchKernels(model, self._input_scales, context_length, batches)
        self._prefill = MixedKernels(model, self._input_scales, self.max_chunk, self._batch, pictures)
        self.sampler = DeviceSampler(Shortlist(model.spec.vocab), context_length, parallel, most)
        self._steps = RowSteps(
            self._one,
            self._batch,
            self._prefill,
            self.sampler,
            self._counts,
            most,
            context_length,
            self._launch,
        )
        self._tables = BlockTables(model.storing, parallel)
        self.kv_groups = self._tables.groups
        self._states = states = DeviceStates(model.recurrent, parallel)
        self.state_slots, self.state_bytes = states.state_slots, states.state_bytes
        self.state_position, self.save_state = states.state_position, states.save_state
        self.export_state, self.import_state = states.export_state, states.import_state
        self._cache_export = CacheExport(model.storing, self._tables.windows)
        self.export_blocks, self.import_blocks = (
            self._cache_export.export_blocks,
            self._cache_export.import_blocks,
        )
        self.export_layout = export_layout(
            ((a.heads.kv, a.heads.dim, a.heads.window) for a in model.storing), states.layout
        )
        self.search_tokens = min(context_length, self._one.context_limits[0])
        self._captured: dict[Key, Callable[[], None]] = {}
        self._prepared: set[int] = set()  # what `prepare` was called with
        self._compiled: dict[int, bool] = {}  # whether each size of prefill that was asked for is compiled
        self._launched: Sequence[Slot] = ()  # the pieces of prompts in the step that is ahead
        self._hidden: list[NDArray[np.float32]] = []
        self._earlier: list[Logits] = []  # the logits of all steps of one `run` but the last
        # of the steps with prompts and replies, those whose kernels are compiled
        self._mixed_sizes: set[int] = set()
        self._start(weights, is_early)

    def _start(self, weights: Weights, is_early: bool) -> None:
        """Compiles the kernels that answers need at first, while the weights are read, and captures a step."""
        with timeline.span("kernels"):
            schedules = {product.stack.name: product.schedule for product in self._model.products}
            makes = self._linears, self._repacking_linears
            compiled = begin_once((*self._set_up, is_early, *schedules.items()), *makes)
        filling = self._model.begin_fill(weights)
        with timeline.span("waiting for kernels"):
            compiled()
            for n in self.row_counts[1:-1]:
                if was_compiled((*self._set_up, "rows", n)):
                    self.prepare_rows(n)
            mixed = (size for size in self._mixing if was_compiled((*self._set_up, "mixed", size)))
            self._mixed_sizes.update(mixed)
        with timeline.span("capture"):
            self._capture_while(filling)
        with timeline.span("waiting for the weights"):
            filling.result()

    def _linears(self) -> list[UOp]:
        """The kernels that answers need at first, to be compiled at once, so that several compilers share them: the
        least and the most rows, and some sizes of prefill; of a server also all that requests may ask of a choice."""
        steps = self._steps
        sequences = [steps.kernels(n, limit) for n in self._counts for limit in steps.limits(n)]
        sequences += [steps.kernels(n, steps.limits(n)[0], _DRAWN) for n in self._counts]
        sequences += [self._prefill.step(size) for size in self._first_sizes]
        if self.parallel > 1:
            sequences += [steps.choice_kernels(n, _ALL) for n in self._counts]
        sequences += [*self._tables.kernels(), *self._states.kernels()]
        # The first that compilers get: weights wait for it.
        begin_repacking(piece_specs(self._model.matrices))
        return [s.linear for s in sequences]

    def _repacking_linears(self) -> list[UOp]:
        if processes_compile():  # else this would not wait for them
            calibrate()
        return [*map(repacking_kernels, piece_specs(self._model.matrices))]

    def _capture_while(self, filling: Future[None]) -> None:
        """Captures the step that shows that the device works, and while weights travel those of a first answer."""
        shortest = self._steps.limits(1)[0]
        self._capture((1, shortest, _BEST, 0, False), lambda: self._steps.kernels(1, shortest))
        if not filling.done():
            self._capture((1, shortest, _DRAWN, 0, False), lambda: self._steps.kernels(1, shortest, _DRAWN))
        if not filling.done() and self._has_prefill(CHUNK_SIZES[0]):
            self._prepare_prefill(CHUNK_SIZES[0])

    @property
    def row_counts(self) -> tuple[int, ...]:
        if self.parallel == 1:
            return (1,)
        fewer = sum(n < self.parallel for n in ROW_COUNTS)
        return (1, *ROW_COUNTS[: fewer + 1])

    def can_check(self, count: int) -> bool:
        return count in self._checks

    def prepare_check(self, count: int) -> None:
        limits = self._steps.limits(count)
        keys: list[Key] = [(count, limit, _BEST, 0, True) for limit in limits]
        keys.append((count, limits[0], _DRAWN, 0, True))
        self._compile_steps(("check", count), keys)
        if count not in self._checks:
            insort(self._checks, count)

    def prepare_rows(self, count: int) -> None:
        limits = self._steps.limits(count)
        keys: list[Key] = [*((count, limit) for limit in limits), (count, limits[0], _CHANGED)]
        choice = lambda: [self._steps.choice_kernels(count, _ALL).linear]
        self._compile_steps(("rows", count), keys, choice)
        if count not in self._counts:
            insort(self._counts, count)

    def _compile_steps(self, name: Key, keys: Sequence[Key], *others: MakeLinears) -> None:
        """Compiles the kernels of steps (`RowSteps.kernels`), and others."""
        steps = self._steps
        makes = [partial(lambda key: [steps.kernels(*key).linear], key) for key in keys]
        compile_once((*self._set_up, *name), *makes, *others)

    def decode_depths(self, rows: int) -> tuple[int, ...]:
        return (0, *(limit for limit in self._steps.limits(rows) if limit < self._context))

    def load_state(self, slot: int, sequence: int = 0) -> None:
        self._steps.finish()
        self._states.load_state(slot, sequence)

    def cut_state(self, sequence: int, position: int) -> None:
        self._states.set(position, sequence)

    # ---- the cache ----

    def assign(self, sequence: int, tables: Sequence[Sequence[int]]) -> None:
        if not any(tables):
            self._steps.end(sequence)
        self._tables.assign(sequence, tables)

    def copy_block(self, group: int, source: int, target: int) -> None:
        self._tables.choose_copy(source, target)
        self._launch(("copy", group, 0), lambda: self._tables.copy_kernels(group))

    # ---- steps ----

    def run(self, slots: Sequence[Slot], ahead: Ahead | None = None) -> NDArray[np.int32]:
        by_want = ([slot for slot in slots if slot.want == want] for want in ("none", "hidden", "last"))
        pieces, embedded, rows = by_want
        if len({row.sequence for row in rows}) < len(rows):
            self._earlier = []
            self._set_positions(rows)
            count = next(n for n in self._checks if len(rows) <= n)
            return np.asarray(self._steps.check(rows, count, ahead), np.int32)
        self._set_positions(slots)
        pieces, self._launched = [piece for piece in pieces if piece not in self._launched], ()
        most, size = self.row_counts[-1], self._mixed_size(pieces, rows)
        if size:
            self._prefill.send(size, pieces, len(rows), self._steps.count(len(rows), size))
        else:
            self._store(pieces)
        self._hidden = [*self._prefill.streams(embedded, CHUNK_SIZES, self._launch_whole)]
        chosen: list[int] = []
        self._earlier = []
        for first in range(0, len(rows), most):
            if first:  # the next step overwrites them
                self._earlier.append(self._steps.logits())
            following = partial(self._following, rows, ahead) if ahead and len(rows) <= most else None
            chosen += self._steps.decode(rows[first : first + most], following, size)
        return np.asarray(chosen, np.int32)

    def _following(self, rows: Sequence[Slot], ahead: Ahead) -> tuple[Rows, int] | None:
        """The rows of the step after one of these rows, and its size (`row_steps.Follow`). Sends its pieces."""
        if (following := ahead()) is None:
            return None
        slots, ended = following
        pieces, begin = ([slot for slot in slots if slot.want == want] for want in ("none", "last"))
        going = [row for row in rows if row.sequence not in ended]
        size = self._fitting(pieces, [*going, *begin]) if pieces else 0
        after = self._steps.following(going, begin, size)
        if after is None or (pieces and not size):
            return None
        self._set_positions(slots)
        if pieces:
            self._prefill.send(size, pieces, max(after) + 1, self._steps.count(len(after), size))
            self._launched = pieces
        return after, size

    def _set_positions(self, slots: Sequence[Slot]) -> None:
        """Says how many tokens the recurrent states have after these slots, and how their pictures turn angles."""
        self._angles.turn(slots)
        for slot in slots:
            self._states.set(slot.position + len(slot.inputs), slot.sequence)

    def piece_sizes(self, rows: int) -> tuple[int, ...]:
        if not self._mixing or not 0 < rows <= self.row_counts[-1]:
            return self.chunk_sizes
        rooms = (size - self._steps.count(rows, size) for size in self._mixing)
        return (*rooms, self.chunk_sizes[-1])

    def _mixed_size(self, pieces: Sequence[Slot], rows: Sequence[Slot]) -> int:
        """The size of the step that has room for pieces and rows together; 0 if they go in steps of their own."""
        return 0 if not pieces or self._steps.is_launched(rows) else self._fitting(pieces, rows)

    def _fitting(self, pieces: Sequence[Slot], rows: Sequence[Slot]) -> int:
        """The smallest size of steps with these rows that has room for these pieces; 0 if none has."""
        if not 0 < len(rows) <= self.row_counts[-1]:
            return 0
        fits = self._prefill.fits
        sizes = (n for n in self._mixed_sizes if fits(n, pieces, self._steps.count(len(rows), n)))
        return min(sizes, default=0)

    def _store(self, pieces: Sequence[Slot]) -> None:
        """Prefills pieces of prompts, as many as fit in a step."""
        while pieces:
            some = ((n, size) for n in range(len(pieces), 1, -1) for size in CHUNK_SIZES)
            n, size = next((s for s in some if self._fits(s[1], pieces[: s[0]])), (1, 0))
            self._launch_prefill(size, pieces[:n]) if size else self._store_one(pieces[0])
            pieces = pieces[n:]

    def _fits(self, size: int, pieces: Sequence[Slot]) -> bool:
        """Whether a prefill step that is compiled has room for these pieces."""
        return self._prefill.fits(size, pieces) and self._has_prefill(size)

    def _store_one(self, slot: Slot) -> None:
        """Prefills a piece of a prompt. While the kernels of its size are not compiled, it goes in smaller ones, or in
        a larger step if these would be many."""
        size, n = self._size_of(len(slot.inputs)), len(slot.inputs)
        if not (slot.pictures or self._has_prefill(size)):
            compiled = [s for s in CHUNK_SIZES if self._has_prefill(s)]
            smaller = max((s for s in compiled if s < size), default=CHUNK_SIZES[0])
            larger = min((s for s in compiled if s > size), default=0)
            size = larger if larger and n > 2 * smaller else smaller
        at_most = _DECODE_AT_MOST if self._has_prefill(size) else _DETOUR_AT_MOST
        decodes = n <= at_most and not slot.pictures
        for at in range(0, n, step := 1 if decodes else size):
            part = slot._replace(inputs=slot.inputs[at : at + step], position=slot.position + at)
            if decodes:
                self._steps.decode([part._replace(want="last")], ahead=None)
            else:
                self._launch_prefill(size, [part])

    def _launch_whole(self, size: int) -> None:
        """Prefills what was sent with all sublayers."""
        if ("whole", size) not in self._captured:
            compile_once((*self._set_up, "whole", size), lambda: [self._prefill.whole_step(size).linear])
        self._launch(("whole", size), lambda: self._prefill.whole_step(size))

    def streams(self, rows: int) -> NDArray[np.float32] | None:
        return self._steps.streams(rows)

    def draft_head(self, weights: Weights, kv: KVFormat) -> NvidiaDraftHead:
        """The draft head of the model's file. Raises ModelFileError."""
        return NvidiaDraftHead(weights, self._context, kv, self._model, self.sampler)

    def assistant(self, weights: Weights, kv: KVFormat) -> NvidiaAssistant:
        """An assistant of the model, whose description has it as its draft head. Raises ModelFileError."""
        return NvidiaAssistant(weights, self._context, kv, self._model, self.sampler)

    def hidden(self) -> list[NDArray[np.float32]]:
        return self._hidden

    def not_finite(self, slot: Slot) -> ModelFileError:
        self._tables.send()
        return not_finite(self._model.spec, self._steps.outputs(slot))

    def logits(self, rows: Sequence[int] | None = None) -> Logits:
        if not self._earlier:
            return self._steps.logits(rows)
        logits = np.concatenate([*self._earlier, self._steps.logits()])
        return logits if rows is None else logits[list(rows)]

    def expert_choices(self) -> list[NDArray[np.int32]]:
        return self._model.choices.read()

    def _size_of(self, tokens: int) -> int:
        """The padded size of a chunk of so many tokens."""
        return next(size for size in CHUNK_SIZES if tokens <= size)

    def prepare(self, size: int) -> None:
        if size in self._prepared:
            return
        self._prepare_prefill(size)
        if size in self._mixing:
            counts, limits = self.row_counts[1:], self._steps.limits(self.row_counts[-1])
            self._compile_steps(("mixed", size), [(n, limit, None, size) for n in counts for limit in limits])
            self._mixed_sizes.add(size)
        self._prepared.add(size)

    def _prepare_prefill(self, size: int) -> None:
        if ("prefill", size) not in self._captured:
            compile_once((*self._set_up, "prefill", size), lambda: [self._prefill.step(size).linear])
            self._compiled[size] = True
            self._captured["prefill", size] = self._prefill.step(size).capture()

    @property
    def _mixing(self) -> tuple[int, ...]:
        """The sizes of steps with prompts and replies. With the largest one, weights are a small part of what takes
        time, so replies have a step of their own."""
        return tuple(n for n in self.chunk_sizes if PIECE_ROWS < n < self.max_chunk and self.parallel > 1)

    def _has_prefill(self, size: int) -> bool:
        """Whether prefill of chunks of this size need not be compiled."""
        if ("prefill", size) in self._captured or size in self._first_sizes:
            return True
        if size not in self._compiled:  # the disk is asked once: that takes milliseconds
            self._compiled[size] = was_compiled((*self._set_up, "prefill", size))
        return self._compiled[size]

    def replay(self, step: Step, position: int) -> Replay:
        self._steps.finish()
        self._steps.end(0)
        if step == "prefill":
            count = min(self.max_chunk, self._context - position)
            size = self._size_of(count)
            slot = Slot(0, tuple(varied_tokens(count, self._model.spec.vocab)), position, "none")
            send: Callable[[], None] = lambda: self._prefill.send(size, [slot])
            calls, run = self._prefill.step(size).compile().src, lambda: self._launch_prefill(size)
        else:
            count, limit = 1, self._steps.limit(1, position)
            send = lambda: self._send_token(0, position)
            calls, run = self._steps.kernels(1, limit).compile().src, lambda: self._steps.launch(1, limit)

        def reset() -> None:
            Device[Device.DEFAULT].synchronize()
            send()

        return Replay(calls, self._uses(), count, run, reset=reset)

    def _uses(self) -> BufferUses:
        parts = [*self._one.attention_parts, *self._prefill.attention_parts]
        return uses_of(self._model, self._input_scales, self._context, parts)

    def _send_token(self, token: int, position: int) -> None:
        """Makes a token of sequence 0 the row of the next step."""
        overwrite(self._one.state, np.asarray([token, position, 0], np.int32))

    def _launch_prefill(self, size: int, pieces: Sequence[Slot] = ()) -> None:
        if pieces:  # else they are sent already
            self._prefill.send(size, pieces)
        self._prepare_prefill(size)
        self._launch(("prefill", size), lambda: self._prefill.step(size))

    def _launch(self, key: Key, sequence: Callable[[], KernelSequence]) -> None:
        """Launches the captured graph of a sequence, which is captured when it is first used."""
        self._tables.send()
        self._capture(key, sequence)()

    def _capture(self, key: Key, sequence: Callable[[], KernelSequence]) -> Callable[[], None]:
        if key not in self._captured:
            self._captured[key] = sequence().capture()
        return self._captured[key]

    # ---- the search for schedules ----

    def search(self, request: SearchRequest) -> bool:
        if not request.interrupted:  # nobody waits for an answer
            calibrate()
        before = [product.schedule for product in self._model.products]
        search(self.search_target(), request)
        if is_changed := before != [product.schedule for product in self._model.products]:
            self._captured.clear()
            self._prepared.clear()
        return is_changed

    def search_target(self) -> SearchTarget:
        """The steps in which schedules are searched. Ends what the runner has launched."""
        self._steps.finish()
        self._steps.end(0)
        self._tables.send()
        step = lambda: self._steps.kernels(1, self._steps.limits(1)[0])
        vocab = self._model.spec.vocab
        trials = StepTrials(self._send_token, self._one.logits, self.search_tokens, vocab)
        short_step = self._steps.short_kernels
        return SearchTarget(self._model.products, step, short_step, trials.logits, trials.seconds)
