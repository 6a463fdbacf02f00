"""What a target takes of memory for what a description says, known without tinygrad."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.description.attention import Attention
from engine.description.spec import ModelSpec
from engine.description.sublayers import Weight
from engine.formats.kv_format import KVFormat
from engine.runtime.kv_blocks import BLOCK, blocks_of_one


@dataclass(frozen=True)
class TargetMemory:
    """`matrix_bytes`: of a matrix, by its ggml type, rows and columns. `chunk`: the most tokens of a prompt at once.
    `states`: recurrent states of a sequence, and `checked_states` more of all, in checks of guesses; if it
    `checks_alone`, only a single conversation has these. `repacking`: copies of a piece of the file while it loads;
    `compilers_bytes`: of processes that compile kernels after that. A layer's cache has `spare_blocks`. It has no more
    than its window needs if it `has_windows`, and each conversation has one if they are not `shared`. If it
    `widens_caches`, those of float32 models are float32. `reads_tables`: the embeddings of layers stay in the file, of
    which the host reads rows for each token. `copies_experts`: each token gets its experts' matrices."""

    matrix_bytes: Callable[[int, int, int], int]
    chunk: int
    states: int = 1
    checked_states: int = 0
    checks_alone: bool = False
    repacking: int = 1
    compilers_bytes: int = 0
    spare_blocks: int = 0
    has_windows: bool = True
    is_shared: bool = True
    widens_caches: bool = True
    reads_tables: bool = True
    copies_experts: bool = False

    def weight_bytes(self, weight: Weight) -> int:
        return self.matrix_bytes(weight.type, weight.experts * weight.rows, weight.cols)

    def loaded(self, spec: ModelSpec) -> list[Weight]:
        """The matrices that are copied into memory."""
        tables = spec.host_tables if self.reads_tables else ()
        return [weight for weight in spec.weights() if weight not in tables]

    def cache_bytes(self, spec: ModelSpec, context: int, kv: KVFormat) -> int:
        """Bytes of the KV cache of a conversation with a context of so many tokens."""
        return sum(spec.kv_bytes(a, kv, self.widens_caches) * self._cached(a, context) for a in spec.caching)

    def _cached(self, attend: Attention, context: int) -> int:
        """Tokens for which a layer's cache has room."""
        blocks = blocks_of_one(attend.window if self.has_windows else 0, context, self.chunk)
        return (blocks + self.spare_blocks) * BLOCK
