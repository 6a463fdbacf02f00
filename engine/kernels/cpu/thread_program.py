"""The program that every core's thread runs: it takes pieces of kernels, one after another, until there are
none.

A job is a run of calls, and a call is a kernel cut into pieces that may be computed in any order. Pieces are
numbered through all calls there are. Whoever has nothing to do takes the next number; nobody owns a share
of a kernel, so that a core that other programs keep busy, or that is slow, does less and holds nobody up. A
piece may start when all that its call comes after are finished. There is one count of pieces that were
taken and one of those that are finished, and no meeting of all cores.

A thread that cannot go on looks for a while whether it can, then sleeps. Who finishes the last piece of what
others wait for wakes those that sleep. A sleeper first says that it is going to, then looks once more, and a
waker first counts and then looks who sleeps: with a fence between the two, in both, one sees the other.
Fences are also what makes results visible to other cores before they are counted, and keeps a kernel's loads
behind the look at the count. x86 does that by itself; Arm does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

from tinygrad import UOp, dtypes
from tinygrad.dtype import AddrSpace, DType
from tinygrad.uop.ops import Ops

MAX_CALLS = 1 << 15
WORDS = 24  # of a call: what `Call` names, and its buffers
ADDRESS, PARTS, FIRST, AFTER, UNTIL, BUFFERS = range(6)
"""Words of a call: its kernel's address; pieces; the number of its first piece; how many pieces come before
what it belongs to (calls beside each other), and how many there are with it; the buffers' addresses."""
LINE = 8  # words of a cache line, so that no two cores write to the same one by accident
SEM_WAIT, SEM_POST, SCHED_YIELD, NOTHING = range(4)  # functions
TAKEN, FINISHED, JOB_FIRST, JOB_END = 0, LINE, 2 * LINE, 2 * LINE + 1
"""Places in the queue: the next piece, beside the job's end (<< 32); pieces that are finished; the job's first
piece and the first that is not its own."""
LOOKS = 1 << 11  # before a thread sleeps: some 50 µs


def memory_sizes(cores: int) -> dict[str, int]:
    """Words of the memory that threads share, by name, in the order of the program's arguments."""
    return {
        "calls": MAX_CALLS * WORDS,
        "queue": 3 * LINE,
        "asleep": cores * LINE,
        "semaphores": cores * LINE,
        "functions": LINE,
    }


def walk(cores: int) -> UOp:
    """The program. Arguments: memory (`memory_sizes`), the number of the core. Core 0 tells the others of the
    job and returns when it is done; the others take part in all jobs to come."""
    memory = [
        UOp.param(i, dtypes.uint64, (n,), volatile=True) for i, n in enumerate(memory_sizes(cores).values())
    ]
    calls, queue, asleep, semaphores, functions = memory
    # A variable that has one value only would not be an argument.
    number = UOp.param(
        len(memory), dtypes.int, (), vmin_vmax=(0, cores), name="core", addrspace=AddrSpace.ALU
    )
    core = number.cast(dtypes.uint64)
    s = _Sequence()
    call, piece, end, looks = (s.variable() for _ in range(4))
    s.store(call, 0, 0)

    # What is known before a loop is read again in it: tinygrad may take what is made of it for the loop's own.
    def call_if(condition: UOp, function: int, *arguments: UOp) -> None:
        address = s.load(functions, function)
        s.call(condition.where(address, s.load(functions, NOTHING)), *arguments)

    def of_call(word: int) -> UOp:
        return s.load(calls, s.load(call) * WORDS + word)

    def find(taken: UOp) -> None:
        """Lets `call` be the one that a piece belongs to."""
        s.store(piece, 0, taken & (2**32 - 1))
        s.store(end, 0, taken // 2**32)
        with s.repeat() as again:
            before = s.keep(s.load(piece) < of_call(FIRST))
            s.store(call, 0, s.load(call) - before.cast(dtypes.uint64))
            again(before)
        with s.repeat() as again:
            beyond = s.keep((of_call(FIRST) + of_call(PARTS) <= s.load(piece)) & there_is())
            s.store(call, 0, s.load(call) + beyond.cast(dtypes.uint64))
            again(beyond)

    def there_is() -> UOp:
        return s.load(piece) < s.load(end)

    def wake(n: UOp | int) -> None:
        """Wakes those of the first n cores that sleep."""
        with s.times(_word(n)) as other:
            # Looked at and cleared in one, or who lies down in between would sleep without being known to.
            slept = s.exchange(asleep, other * LINE, 0).ne(0)
            call_if(slept, SEM_POST, semaphores.index(other * LINE))

    with s.times(core.eq(0).where(_word(1), _word(0))):
        s.store(queue, FINISHED, s.load(queue, JOB_FIRST))
        s.fence()
        s.store(queue, TAKEN, s.load(queue, JOB_END) * 2**32 + s.load(queue, JOB_FIRST))
        s.fence()
        wake(cores)
    with s.repeat() as next_piece:
        s.store(looks, 0, 0)
        with s.repeat() as look_again:
            tired = s.keep(_word(LOOKS) <= s.load(looks))
            s.store(looks, 0, s.load(looks) + 1)
            s.store(asleep, core * LINE, tired.cast(dtypes.uint64))
            s.fence()
            find(s.load(queue, TAKEN))
            finished = s.load(queue, FINISHED)
            leave = core.eq(0) & (s.load(queue, JOB_END) <= finished)
            stay = s.keep(((there_is() & (of_call(AFTER) <= finished)) | leave).ne(True))
            call_if(stay & tired, SEM_WAIT, semaphores.index(core * LINE))
            look_again(stay)
        s.store(asleep, core * LINE, 0)
        find(s.fetch_add(queue, TAKEN, 1))
        with s.repeat() as wait:  # for a moment: others were quicker to take what was there to take
            early = s.keep((s.load(queue, FINISHED) < of_call(AFTER)) & there_is())
            call_if(early, SCHED_YIELD)
            wait(early)
        s.fence()
        part, parts = s.load(piece) - of_call(FIRST), of_call(PARTS)
        here = s.keep(s.load(call) * WORDS)
        buffers = [calls.index(here + word).load() for word in range(BUFFERS, WORDS)]
        s.call(there_is().where(of_call(ADDRESS), s.load(functions, NOTHING)), part, parts, *buffers)
        s.fence()
        finished = s.fetch_add(queue, FINISHED, there_is().cast(dtypes.uint64)) + 1
        s.fence()
        # The job's end as well: one that ends within calls that are beside each other, as a kernel timed alone
        # does, is before their common end, and core 0 may sleep.
        is_last = finished.eq(of_call(UNTIL)) | finished.eq(s.load(end))
        wake((is_last & there_is()).where(_word(cores), _word(0)))
        next_piece(core.ne(0) | (s.load(queue, FINISHED) < s.load(queue, JOB_END)))
    return s.last


def nothing() -> UOp:
    """A program that does nothing."""
    return UOp.group()


class _Sequence:
    """A program in which everything happens in the order in which it is written."""

    def __init__(self) -> None:
        self._done: list[UOp] = []  # what comes next happens after these
        self._names = count()

    @property
    def last(self) -> UOp:
        return self._done[0]

    # --- values ----------------------------------------------------------------------------------------

    def variable(self, dtype: DType = dtypes.uint64) -> UOp:
        return UOp.placeholder((1,), dtype, next(self._names), AddrSpace.REG)

    def keep(self, value: UOp) -> UOp:
        """A value as it is now."""
        variable = self.variable(value.dtype)
        self.store(variable, 0, value)
        return self._place(variable, 0).load()

    def load(self, buffer: UOp, at: UOp | int = 0) -> UOp:
        return self.keep(self._place(buffer, at).load())

    # --- effects ---------------------------------------------------------------------------------------

    def store(self, buffer: UOp, at: UOp | int, value: UOp | int) -> None:
        self._do(self._place(buffer, at).store(_word(value)))

    def fetch_add(self, buffer: UOp, at: int, value: UOp | int) -> UOp:
        """Adds to a word that other cores add to at the same time; what it was before. The one thing that
        UOps have no name for: C's own atomics do."""
        atomic = "__atomic_fetch_add({0}, {1}, __ATOMIC_SEQ_CST)"
        return self.keep(UOp(Ops.CUSTOM, dtypes.uint64, (self._place(buffer, at), _word(value)), atomic))

    def exchange(self, buffer: UOp, at: UOp | int, value: UOp | int) -> UOp:
        """Stores a word that other cores store to at the same time; what it was before."""
        atomic = "__atomic_exchange_n({0}, {1}, __ATOMIC_SEQ_CST)"
        return self.keep(UOp(Ops.CUSTOM, dtypes.uint64, (self._place(buffer, at), _word(value)), atomic))

    def call(self, function: UOp, *arguments: UOp) -> None:
        self._do(self.keep(function).call(*arguments, ret_dtype=dtypes.void))

    def fence(self) -> None:
        self._do(UOp(Ops.BARRIER, src=tuple(self._done)))

    @contextmanager
    def repeat(self) -> Iterator[Callable[[UOp], None]]:
        """What is inside, again and again, as long as the condition it ends with is true."""
        loop, conditions = UOp.loop(next(self._names)), list[UOp]()
        self._done.append(loop)
        yield conditions.append
        self._do(self._done[0].end(loop, *conditions))

    @contextmanager
    def times(self, n: UOp) -> Iterator[UOp]:
        turn = UOp.range(n, next(self._names), dtype=dtypes.uint64)
        self._done.append(turn)
        yield turn
        self._do(self._done[0].end(turn))

    def _do(self, effect: UOp) -> None:
        self._done = [effect]

    def _place(self, buffer: UOp, at: UOp | int) -> UOp:
        return buffer.after(*self._done).index(_word(at))


def _word(n: UOp | int) -> UOp:
    return UOp.const(n, dtypes.uint64) if isinstance(n, int) else n
