"""The program that each thread of the pool runs: it takes parts of kernels, one after another, until none is left.

A job is a run of calls. A call is a kernel cut into parts, which may run in any order. Parts are numbered through all
calls of the pool. A thread with nothing to do takes the next number. No part belongs to a particular core, so a slow
core, or one that other programs keep busy, does fewer parts and delays nobody. A part may start when all parts that its
call depends on are finished. The threads share two counters, of the parts that were taken and of those that are
finished; there is no barrier between kernels.

A thread that cannot go on polls for a while and then sleeps on its semaphore. The thread that finishes the last part
that others wait for wakes the sleepers. A sleeper first sets its flag and then polls once more; a waker first counts
its part and then reads the flags. With a fence between the two steps on both sides, at least one side sees the other.
The fences also publish a kernel's results before its part is counted, and keep a kernel's loads behind the check of the
counter. x86 orders these by itself, except a store before a later load; Arm does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count

from tinygrad import UOp, dtypes
from tinygrad.dtype import AddrSpace, DType
from tinygrad.uop.ops import Ops

MAX_CALLS = 1 << 15

# A call is CALL_WORDS words of 64 bits: the address of its kernel's code, the number of its parts, the number of its
# first part, how many parts come before its group (the calls that may run concurrently with it), how many parts there
# are up to the group's end, and then the addresses of the kernel's buffers.
CALL_WORDS = 24
ADDRESS, N_PARTS, FIRST_PART, GROUP_START, GROUP_END, BUFFERS = range(6)

LINE = 8  # words of a cache line: words that different cores write are on lines of their own

# The queue's words: the number of the next part, with the job's end in the upper 32 bits; how many parts are finished;
# the job's first part, and the first part that is not the job's.
NEXT, FINISHED, JOB_FIRST, JOB_END = 0, LINE, 2 * LINE, 2 * LINE + 1

SEM_WAIT, SEM_POST, SCHED_YIELD, NOTHING = range(4)  # indices in the table of C functions
MAX_POLLS = 1 << 11  # before a thread sleeps: some 50 µs


def memory_sizes(n_threads: int) -> dict[str, int]:
    """Words of the memory that threads share, by name, in the order of the program's arguments."""
    return {
        "calls": MAX_CALLS * CALL_WORDS,
        "queue": 3 * LINE,
        "asleep": n_threads * LINE,
        "semaphores": n_threads * LINE,
        "functions": LINE,
    }


def thread_program(n_threads: int) -> UOp:
    """The program as a graph. Arguments: the shared memory (`memory_sizes`), uint64, and the thread's number, int32.
    Thread 0 starts the job and returns when it is done; the other threads take part in all jobs and never return."""
    memory = [
        UOp.param(i, dtypes.uint64, (n,), volatile=True)
        for i, n in enumerate(memory_sizes(n_threads).values())
    ]
    # The range includes n_threads: tinygrad makes no argument of a variable that has only one value.
    number = UOp.param(
        len(memory), dtypes.int, (), vmin_vmax=(0, n_threads), name="core", addrspace=AddrSpace.ALU
    )
    thread = number.cast(dtypes.uint64)
    s = _SequentialProgram()
    pool = _Pool(s, memory)
    with s.times(thread.eq(0).where(_word(1), _word(0))):
        pool.start_job(n_threads)
    with s.repeat() as next_part:
        pool.wait_for_parts(thread)
        pool.take_part()
        pool.run_part()
        pool.count_part(n_threads)
        next_part(thread.ne(0) | pool.is_job_left())
    return s.last


class _Pool:
    """What a thread does with the memory that it shares with others, in a program `s`. It has taken `part_number`, of
    the job that ends at `job_end`, or looks at it; `call` is the call that the part belongs to."""

    # Values from before a loop are loaded again inside it: tinygrad may move their expressions into the loop.

    def __init__(self, s: _SequentialProgram, memory: Sequence[UOp]) -> None:
        self._s = s
        self._calls, self._queue, self._asleep, self._semaphores, self._functions = memory
        self._call, self._part_number, self._job_end, self._polls = (s.variable() for _ in range(4))
        s.store(self._call, 0, 0)

    def start_job(self, n_threads: int) -> None:
        s, queue = self._s, self._queue
        s.store(queue, FINISHED, s.load(queue, JOB_FIRST))
        s.fence()
        s.store(queue, NEXT, s.load(queue, JOB_END) * 2**32 + s.load(queue, JOB_FIRST))
        s.fence()
        self._wake(n_threads)

    def wait_for_parts(self, thread: UOp) -> None:
        """Polls and then sleeps until a part may start, or the job of thread 0 is done."""
        s, queue = self._s, self._queue
        s.store(self._polls, 0, 0)
        with s.repeat() as poll_again:
            sleepy = s.keep(_word(MAX_POLLS) <= s.load(self._polls))
            s.store(self._polls, 0, s.load(self._polls) + 1)
            s.store(self._asleep, thread * LINE, sleepy.cast(dtypes.uint64))
            s.fence()
            self._find_call(s.load(queue, NEXT))
            finished = s.load(queue, FINISHED)
            leave = thread.eq(0) & (s.load(queue, JOB_END) <= finished)
            stay = s.keep(((self._is_in_job() & (self._of_call(GROUP_START) <= finished)) | leave).ne(True))
            self._call_if(stay & sleepy, SEM_WAIT, self._semaphores.index(thread * LINE))
            poll_again(stay)
        s.store(self._asleep, thread * LINE, 0)

    def take_part(self) -> None:
        """Takes the next part. Others may have taken those that were free to start: then it waits, but briefly."""
        s = self._s
        self._find_call(s.fetch_add(self._queue, NEXT, 1))
        with s.repeat() as wait:
            before_group = s.load(self._queue, FINISHED) < self._of_call(GROUP_START)
            early = s.keep(before_group & self._is_in_job())
            self._call_if(early, SCHED_YIELD)
            wait(early)
        s.fence()

    def run_part(self) -> None:
        s = self._s
        part, parts = s.load(self._part_number) - self._of_call(FIRST_PART), self._of_call(N_PARTS)
        first_word = s.keep(s.load(self._call) * CALL_WORDS)
        buffers = [self._calls.index(first_word + word).load() for word in range(BUFFERS, CALL_WORDS)]
        is_in_job, kernel = self._is_in_job(), self._of_call(ADDRESS)
        s.call(is_in_job.where(kernel, s.load(self._functions, NOTHING)), part, parts, *buffers)
        s.fence()

    def count_part(self, n_threads: int) -> None:
        """Counts the part as finished, and wakes the others if they wait for it."""
        s = self._s
        finished = s.fetch_add(self._queue, FINISHED, self._is_in_job().cast(dtypes.uint64)) + 1
        s.fence()
        # The job's end counts too: a job that ends inside a group (a kernel that is timed alone) ends before its group,
        # and thread 0 may be asleep.
        is_last = finished.eq(self._of_call(GROUP_END)) | finished.eq(s.load(self._job_end))
        self._wake((is_last & self._is_in_job()).where(_word(n_threads), _word(0)))

    def is_job_left(self) -> UOp:
        """Whether parts of the job are not finished."""
        return self._s.load(self._queue, FINISHED) < self._s.load(self._queue, JOB_END)

    def _call_if(self, condition: UOp, function: int, *arguments: UOp) -> None:
        address = self._s.load(self._functions, function)
        self._s.call(condition.where(address, self._s.load(self._functions, NOTHING)), *arguments)

    def _of_call(self, word: int) -> UOp:
        return self._s.load(self._calls, self._s.load(self._call) * CALL_WORDS + word)

    def _find_call(self, next_word: UOp) -> None:
        """Sets `part_number` and `job_end` from the queue's word, and `call` to the call that the part belongs to."""
        s, call, of_call = self._s, self._call, self._of_call
        s.store(self._part_number, 0, next_word & (2**32 - 1))
        s.store(self._job_end, 0, next_word // 2**32)
        with s.repeat() as again:
            before = s.keep(s.load(self._part_number) < of_call(FIRST_PART))
            s.store(call, 0, s.load(call) - before.cast(dtypes.uint64))
            again(before)
        with s.repeat() as again:
            is_behind = of_call(FIRST_PART) + of_call(N_PARTS) <= s.load(self._part_number)
            beyond = s.keep(is_behind & self._is_in_job())
            s.store(call, 0, s.load(call) + beyond.cast(dtypes.uint64))
            again(beyond)

    def _is_in_job(self) -> UOp:
        return self._s.load(self._part_number) < self._s.load(self._job_end)

    def _wake(self, n: UOp | int) -> None:
        """Wakes the sleepers among the first n threads."""
        s = self._s
        with s.times(_word(n)) as other:
            # One atomic exchange reads and clears the flag: a thread that sets it in between is not overlooked.
            slept = s.exchange(self._asleep, other * LINE, 0).ne(0)
            self._call_if(slept, SEM_POST, self._semaphores.index(other * LINE))


def nothing() -> UOp:
    """A program that does nothing."""
    return UOp.group()


class _SequentialProgram:
    """Builds a program whose effects happen in the order in which they are written."""

    def __init__(self) -> None:
        self._done: list[UOp] = []  # the next effect happens after these
        self._names = count()

    @property
    def last(self) -> UOp:
        return self._done[0]

    # --- values ----------------------------------------------------------------------------------------

    def variable(self, dtype: DType = dtypes.uint64) -> UOp:
        return UOp.placeholder((1,), dtype, next(self._names), AddrSpace.REG)

    def keep(self, value: UOp) -> UOp:
        """A value as it is at this point of the program."""
        variable = self.variable(value.dtype)
        self.store(variable, 0, value)
        return self._element(variable, 0).load()

    def load(self, buffer: UOp, at: UOp | int = 0) -> UOp:
        return self.keep(self._element(buffer, at).load())

    # --- effects ---------------------------------------------------------------------------------------

    def store(self, buffer: UOp, at: UOp | int, value: UOp | int) -> None:
        self._do(self._element(buffer, at).store(_word(value)))

    def fetch_add(self, buffer: UOp, at: int, value: UOp | int) -> UOp:
        """Adds to a word atomically and returns its old value. UOps have no atomics; C's own are used."""
        atomic = "__atomic_fetch_add({0}, {1}, __ATOMIC_SEQ_CST)"
        return self.keep(UOp(Ops.CUSTOM, dtypes.uint64, (self._element(buffer, at), _word(value)), atomic))

    def exchange(self, buffer: UOp, at: UOp | int, value: UOp | int) -> UOp:
        """Stores a word atomically and returns its old value."""
        atomic = "__atomic_exchange_n({0}, {1}, __ATOMIC_SEQ_CST)"
        return self.keep(UOp(Ops.CUSTOM, dtypes.uint64, (self._element(buffer, at), _word(value)), atomic))

    def call(self, function: UOp, *arguments: UOp) -> None:
        self._do(self.keep(function).call(*arguments, ret_dtype=dtypes.void))

    def fence(self) -> None:
        self._do(UOp(Ops.BARRIER, src=tuple(self._done)))

    @contextmanager
    def repeat(self) -> Iterator[Callable[[UOp], None]]:
        """Repeats its body while the condition that the body passes on at its end is true."""
        loop, conditions = UOp.loop(next(self._names)), list[UOp]()
        self._done.append(loop)
        yield conditions.append
        self._do(self._done[0].end(loop, *conditions))

    @contextmanager
    def times(self, n: UOp) -> Iterator[UOp]:
        """Repeats its body n times; gives the loop's variable."""
        turn = UOp.range(n, next(self._names), dtype=dtypes.uint64)
        self._done.append(turn)
        yield turn
        self._do(self._done[0].end(turn))

    def _do(self, effect: UOp) -> None:
        self._done = [effect]

    def _element(self, buffer: UOp, at: UOp | int) -> UOp:
        return buffer.after(*self._done).index(_word(at))


def _word(n: UOp | int) -> UOp:
    return UOp.const(n, dtypes.uint64) if isinstance(n, int) else n
