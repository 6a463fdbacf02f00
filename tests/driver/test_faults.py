"""Every call to the driver fails once, in each way: what is said, and that nothing is left behind.

`python -m tests.driver.test_faults` prints the table.
"""

import errno
import gc
from collections import Counter

import pytest
from tinygrad.device import BufferSpec

from engine.tegra.errors import DriverError, DriverMemoryError
from tests.driver.conftest import INT, buffer, contents, held, program
from tests.driver.simulate import simulated
from tests.driver.test_device import FILL
from tests.thorough import rarely

WAYS = (errno.ENOMEM, errno.EINVAL, errno.EPERM, errno.ENOTTY, errno.EMFILE, errno.ETIMEDOUT)
ENDED = "refused with the call's name"
MEMORY = "MemoryError"
WENT_ON = "went on"


def life(kernel):
    """A device from opening to closing: buffers, a kernel, copies, a flush."""
    from engine.tegra.device import NVDevice

    device = NVDevice("NV")
    try:
        made = buffer(device, bytes(64 << 10))
        prg = program(device, "fill", "int* data0, const int n", FILL, values=(INT,))
        prg(made, global_size=(2, 1, 1), local_size=(32, 1, 1), vals=(5,))
        assert contents(device, made)[:65] == [5] * 64 + [0]
        device.invalidate_caches()
        device.allocator.free(made, made.size, BufferSpec(nolru=True))
        del prg
        gc.collect()
    finally:
        device.finalize()


def calls_of_a_life():
    with simulated() as kernel:
        life(kernel)
        assert kernel.leaks() == []
        return list(kernel.calls)


def failing(index, number):
    """What came of a life whose call `index` failed. Raises AssertionError where something is left."""
    gc.collect()
    before = held()
    with simulated() as kernel:
        kernel.fail(index, number)
        said = None
        try:
            life(kernel)
        except (DriverError, MemoryError) as error:
            said = error
        name = kernel.calls[index]
        outcome = WENT_ON
        if said is not None:
            # tinygrad's allocator says how much was asked for; the driver's word is the cause
            driver = said if isinstance(said, DriverError) else said.__cause__
            assert isinstance(driver, DriverError), said
            assert errno.errorcode[number] in driver.message and driver.hint
            assert isinstance(driver, DriverMemoryError) is (number in (errno.ENOMEM, errno.EMFILE))
            outcome = MEMORY if isinstance(said, MemoryError) else ENDED
        del said
        gc.collect()
        assert kernel.leaks() == [], (name, errno.errorcode[number])
    after = held()
    assert after == before, (name, errno.errorcode[number])
    return name, outcome


# An unmapping fails in a finalizer.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("number", [*WAYS[:1], *map(rarely, WAYS[1:])], ids=lambda n: errno.errorcode[n])
def test_any_call_may_fail(number):
    names = calls_of_a_life()
    assert len(names) > 60
    outcomes = Counter()
    for index in range(len(names)):
        name, outcome = failing(index, number)
        outcomes[outcome] += 1
        # Handles and mappings that could not be freed go with their owner; allocations inside tinygrad are tried twice.
        if outcome == WENT_ON:
            assert name.endswith(("FREE", "UNMAP_BUFFER")) or names.count(name) > 3, name
    assert outcomes[ENDED] + outcomes[MEMORY] > 30


def table():
    """Rows of: call, how often a life makes it, what came of each way to fail."""
    names, rows = calls_of_a_life(), {}
    gc.freeze()
    for index in range(len(names)):
        for number in WAYS:
            name, outcome = failing(index, number)
            rows.setdefault(name, Counter())[outcome] += 1
    return [(name, names.count(name), found) for name, found in rows.items()]


if __name__ == "__main__":
    print(
        f"| call | in a life | faults | {ENDED} | {MEMORY} | {WENT_ON} | left behind |\n|---|---|---|---|---|---|---|"
    )
    for name, n, found in table():
        columns = (n * len(WAYS), found[ENDED], found[MEMORY], found[WENT_ON], 0)
        print(f"| {name} | {n} | {' | '.join(map(str, columns))} |")
