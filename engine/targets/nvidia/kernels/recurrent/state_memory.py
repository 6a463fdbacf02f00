"""Where the recurrent states of sequences lie in a layer's memory.

The state of a sequence after t tokens is in slot t % slots of its memory. So a step reads one slot and writes the next,
and one that ran ahead in vain leaves the state before it intact. A check of guesses leaves a state after each of its
tokens, so it can end with any. At position 0 the state is zeros, whatever the memory holds.
"""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Sequence

from tinygrad import UOp

from engine.kernels.kernel import Kernel, Name
from engine.kernels.launch_hints import LaunchHints
from engine.targets.nvidia.kernels.pieces import MAX_POSITION
from engine.targets.nvidia.kernels.uops import INDEX, finish, load, load_index, load_run, store_run


def of_a_token(inputs: Sequence[Name]) -> LaunchHints:
    """The launch of a kernel of one token, of whose `inputs` only rows are new. It loads the others, and the state that
    the step before has left, before it waits, and lets the next product load its weights meanwhile: four layers of
    Qwen3.5 35B-A3B 209.9 : 208.6 microseconds, six of Nemotron 3 Nano 232.5 : 229.4."""
    first = tuple(name for name in inputs if isinstance(name, str) and name != "rows")
    return LaunchHints(waits_for=("rows",), loads_first=("memory", *first), releases="after its wait")


class StateMemory(ABC):
    """Room for `slots` states of each of `sequences`. `name`: what tells the layer from others, in names of kernels."""

    sequences: int
    slots: int

    @property
    @abstractmethod
    def state_size(self) -> int:
        """Elements of the state of a sequence."""

    @property
    @abstractmethod
    def name(self) -> str: ...

    @property
    def memory_size(self) -> int:
        """Elements of the memory, float32."""
        return self.sequences * self.slots * self.state_size

    def state_at(self, position: UOp, sequence: UOp) -> UOp:
        """The index of the first element of the state of a sequence before the token at `position`."""
        return (sequence * self.slots + position % self.slots) * self.state_size


@functools.cache
def copy_state(of: StateMemory, slots: int, saves: bool) -> Kernel:
    """Copies the state of a sequence to a checkpoint, or back. Buffers: memory, float32 (memory_size,);
    checkpoints, float32 (slots * state_size,); place, int32 (3,): the number of tokens, the checkpoint and the
    sequence."""
    threads = 256
    size = threads * 4

    def kernel(memory: UOp, checkpoints: UOp, place: UOp) -> UOp:
        index = UOp.special(-(-of.state_size // size), "gidx0") * size + UOp.special(threads, "lidx0") * 4
        ok = None if of.state_size % size == 0 else index < of.state_size
        state = of.state_at(load_index(place, 0, MAX_POSITION), load_index(place, 2, of.sequences))
        checkpoint = load_index(place, 1, slots) * of.state_size
        ends = (checkpoints, checkpoint), (memory, state)
        (target, to), (source, from_) = ends if saves else reversed(ends)
        stores = store_run(target, to + index, load_run(source, from_ + index, 4, ok), ok)
        name = f"{'save' if saves else 'load'}_state_{of.name}_{slots}"
        return finish(name, stores, n_bytes=8 * of.state_size)

    ends = ("checkpoints", "memory") if saves else ("memory", "checkpoints")
    return Kernel(kernel, ends[:1], (*ends[1:], "place"))


def sequence_of(memory: StateMemory, state: UOp, index: UOp | int) -> UOp:
    """The sequence of a token, if there are several."""
    return load(state, index).cast(INDEX) if memory.sequences > 1 else UOp.const(0, INDEX)
