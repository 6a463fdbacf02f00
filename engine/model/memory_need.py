"""The memory that a model needs on a device, known from its description before anything is loaded.

The list of models, `orin-chat show` and the engine's refusal of a model that does not fit all take it from here. Each
target says what it takes (`engine.targets.memory`), without tinygrad, which lists of models do not import.
"""

from __future__ import annotations

from dataclasses import dataclass

from engine.description.spec import ModelSpec
from engine.description.sublayers import Operator
from engine.errors import BackendError, UsageError
from engine.formats.kv_format import KVFormat
from engine.loading import PIECE_BYTES
from engine.model.coverage import Target
from engine.protocol.events import ContextLength
from engine.runtime.checkpoints import checkpoint_slots
from engine.targets.cpu.memory import MEMORY as of_cpus
from engine.targets.graph.memory import MEMORY as of_graphs
from engine.targets.memory import TargetMemory
from engine.targets.nvidia.memory import MEMORY as of_gpus

DEFAULT_CONTEXT = 8192  # tokens, for a model that was trained for more
_WHOLE_TEXT = 2048  # tokens, for one that reads texts as a whole

_CONTEXT_STEP = 256  # tokens: contexts are proposed in such steps
_SMALLEST_CONTEXT = 512  # tokens: a shorter one is not proposed
_LEFT_FREE = 0.1  # the share of the free memory that the longest context leaves: other programs need some too
_BITS = {"Q8_0": 8.5, "Q6_K": 6.6, "Q5_K_M": 5.7, "Q4_K_M": 4.9, "Q3_K_M": 3.9, "Q2_K": 3.3}
"""Bits a weight of whole files, from the best to the smallest: llama.cpp's tools/quantize/README.md."""

_MEMORY: dict[Target, TargetMemory] = {"graph": of_graphs, "cpu": of_cpus, "nvidia": of_gpus}


@dataclass(frozen=True)
class MemoryNeed:
    """The memory that a model needs for `conversations` at once, with a context of `context` tokens each."""

    context: int
    conversations: int
    weights_bytes: int
    cache_bytes: int
    states_bytes: int
    """Recurrent states and their checkpoints; 0 for most models."""
    kernels_bytes: int
    """What kernels leave to each other, tables, copies of pieces of the file while it loads, and compilers. Roughly."""

    @property
    def total_bytes(self) -> int:
        return self.weights_bytes + self.cache_bytes + self.states_bytes + self.kernels_bytes

    def __str__(self) -> str:
        contexts = "a context" if self.conversations == 1 else f"{self.conversations} contexts"
        states = f"{gigabytes(self.states_bytes)} for recurrent states, " if self.states_bytes else ""
        return (
            f"{gigabytes(self.weights_bytes)} of weights, {gigabytes(self.cache_bytes)} for {contexts} of "
            f"{self.context:,} tokens, {states}{gigabytes(self.kernels_bytes)} for kernels"
        )


def gigabytes(n_bytes: int) -> str:
    """18.6 GB, 0.02 GB: one decimal, or two for less than 0.1."""
    return f"{n_bytes / 1e9:.{1 if n_bytes >= 0.95e8 else 2}f} GB"


def default_context(spec: ModelSpec) -> int:
    """The context, in tokens, if none is asked for."""
    return min(spec.trained_context, _WHOLE_TEXT if spec.both_ways else DEFAULT_CONTEXT)


def chosen_context(
    spec: ModelSpec,
    asked: ContextLength,
    free_bytes: int | None,
    target: Target,
    parallel: int = 1,
    kv: KVFormat = KVFormat.F16,
    *,
    at_most: bool = False,
) -> int:
    """The context that is meant by `asked`, in tokens. "max" leaves a part of `free_bytes` free; if that figure is not
    known (None), it is the default. With `at_most`, one that the model was not trained for is cut; else UsageError is
    raised for it."""
    if asked == "max" and free_bytes is not None:
        usable = int(free_bytes * (1 - _LEFT_FREE))
        longest = largest_context(spec, usable, target, parallel, kv)
        # `check_fits` says why it is not enough.
        return longest or min(spec.trained_context, _SMALLEST_CONTEXT)
    if asked is None or asked == "max":
        return default_context(spec)
    if at_most:
        asked = min(asked, spec.trained_context)
    if not 1 < asked <= spec.trained_context:
        why = "which it was trained for"
        if spec.reads_all_to == spec.trained_context:
            why = (
                "above which it reads chosen tokens alone, which orin-chat does not do for this architecture"
            )
        raise UsageError(
            f"{spec.name} cannot have a context of {asked:,} tokens.",
            f"Choose one between 2 and {spec.trained_context:,} tokens, {why}, or max.",
        )
    return asked


def squeezed_because(spec: ModelSpec, asked: ContextLength, context: int) -> str:
    """A sentence on why a context as long as possible is shorter than the model was trained for; "" if it is not."""
    if asked != "max" or context == spec.trained_context:
        return ""
    return (
        f"The context has {context:,} tokens of the {spec.trained_context:,} that {spec.name} was trained for: "
        "the free memory holds no more."
    )


def memory_need(
    spec: ModelSpec,
    context: int | None = None,
    target: Target = "cpu",
    parallel: int = 1,
    kv: KVFormat = KVFormat.F16,
) -> MemoryNeed:
    """What a model needs with a context of `context` tokens (None: the default) on a target. On a GPU each of
    `parallel` conversations has a context; elsewhere they share what there is room for. `kv`: the format of the KV
    cache."""
    context = context or default_context(spec)
    of = _MEMORY[target]
    conversations, loaded = 1 if of.is_shared else parallel, of.loaded(spec)
    checked = 0 if of.checks_alone and parallel > 1 else of.checked_states
    piece = min(PIECE_BYTES, max(weight.n_bytes for weight in loaded))
    return MemoryNeed(
        context=context,
        conversations=conversations,
        weights_bytes=spec.vector_bytes + sum(map(of.weight_bytes, loaded)),
        cache_bytes=conversations * of.cache_bytes(spec, context, kv),
        states_bytes=(of.states * parallel + checked + checkpoint_slots(parallel)) * spec.state_bytes,
        kernels_bytes=of.compilers_bytes + of.repacking * piece + _scratch_bytes(spec, of, context),
    )


def draft_head_bytes(spec: ModelSpec, head: ModelSpec, target: Target, kv: KVFormat) -> int:
    """What the draft head of a model, or an assistant, needs beside it, with the default context: they share
    matrices."""
    of, shared = _MEMORY[target], {spec.embedding} if head.narrowing else set(spec.weights())
    own = sum(of.weight_bytes(weight) for weight in of.loaded(head) if weight not in shared)
    return own + of.cache_bytes(head, default_context(head), kv)


def largest_context(
    spec: ModelSpec, free_bytes: int, target: Target, parallel: int = 1, kv: KVFormat = KVFormat.F16
) -> int:
    """The largest context, in tokens, with which a model fits into `free_bytes`; 0 if none does that is worth it."""

    def fits(context: int) -> bool:
        return memory_need(spec, context, target, parallel, kv).total_bytes <= free_bytes

    if fits(spec.trained_context):
        return spec.trained_context
    low, high = 0, spec.trained_context // _CONTEXT_STEP  # `low` steps fit, and `high` do not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle * _CONTEXT_STEP) else (low, middle)
    context = low * _CONTEXT_STEP
    return context if context >= _SMALLEST_CONTEXT else 0


def check_fits(
    spec: ModelSpec,
    context: int,
    free_bytes: int | None,
    target: Target,
    parallel: int = 1,
    kv: KVFormat = KVFormat.F16,
) -> MemoryNeed:
    """What a model needs. Raises BackendError, which says what would fit, if it does not fit into `free_bytes` (None:
    not known)."""
    need = memory_need(spec, context, target, parallel, kv)
    if free_bytes is None or need.total_bytes <= free_bytes:
        return need
    raise BackendError(
        f"{spec.name} needs {gigabytes(need.total_bytes)} of memory: {need}. {gigabytes(free_bytes)} are free.",
        _what_fits(spec, need, free_bytes, target, parallel, kv),
    )


def _what_fits(
    spec: ModelSpec, need: MemoryNeed, free_bytes: int, target: Target, parallel: int, kv: KVFormat
) -> str:
    for smaller_kv in KVFormat:
        in_kv = memory_need(spec, need.context, target, parallel, smaller_kv)
        if in_kv.total_bytes <= free_bytes and not spec.lacks_format_because(smaller_kv):
            return f"With --kv {smaller_kv.value} it would fit."
    context = largest_context(spec, free_bytes, target, parallel, kv)
    if 0 < context < need.context:
        return f"A context of {context:,} tokens would fit: --context {context}."
    shorter = memory_need(spec, min(need.context, 2048), target, parallel, kv)
    left = free_bytes - shorter.cache_bytes - shorter.states_bytes - shorter.kernels_bytes
    weights = sum(weight.experts * weight.rows * weight.cols for weight in spec.weights())
    if smaller := next((name for name, bits in _BITS.items() if weights * bits / 8 <= left), ""):
        return f"This model in {smaller} would fit."
    billions = left * 8 / _BITS["Q4_K_M"] / 1e9
    if billions < 0.1:
        return "Close other programs."
    return f"A model with up to {billions:.1f} billion weights in Q4_K_M would fit."


def _scratch_bytes(spec: ModelSpec, target: TargetMemory, context: int) -> int:
    """What a chunk of a prompt leaves in memory from kernel to kernel, in 32-bit numbers, and tables by position."""
    rows: dict[type[Operator], int] = {}  # of a token, those of the largest sublayer of each kind
    for operator in spec.operators:
        rows[type(operator)] = max(rows.get(type(operator), 0), operator.row_elements)
    token = 6 * spec.dim + sum(rows.values())
    if embeddings := spec.layer_embeddings:
        token += 3 * embeddings.table.cols
    tables = sum(2 * rope.pairs * context for rope in spec.ropes) + spec.vocab
    copied = 0
    if target.copies_experts:
        of_one = (sum(map(target.weight_bytes, e.matrices)) // e.count for e in spec.experts)
        copied = max(of_one, default=0)
    chunk = max(target.chunk, context) if spec.both_ways else target.chunk
    return chunk * (4 * token + copied) + 4 * tables
