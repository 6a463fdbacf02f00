"""Kernels know their buffers by name, and what they say of their launch is not in their names."""

import pytest
from tinygrad import UOp, dtypes

from engine.kernels.functions import fingerprint
from engine.kernels.kernel import Kernel, call_by_name
from engine.kernels.launch_hints import LaunchHints, hints_of, info_of
from engine.targets.nvidia.kernels.kernel_sequence import KernelSequence
from engine.targets.nvidia.kernels.uops import finish, load, store


def summed(name="summed", n=2, has_bias=True, hints=None):
    def kernel(out, parts, bias):
        i = UOp.special(8, "lidx0")
        value = load(parts[0], i)
        for part in (*parts[1:], *([] if bias is None else [bias])):
            value = value + load(part, i)
        return finish(name, [store(out, i, value)])

    return Kernel(kernel, ("out",), (("parts", n), has_bias and "bias"), hints or LaunchHints())


def graph(kernel):
    return kernel.graph(*(UOp.placeholder((8,), dtypes.float32, slot=i) for i in range(len(kernel.buffers))))


def test_buffers_are_put_in_the_order_of_their_slots():
    kernel = summed()
    assert kernel.buffers == ("out", "parts.0", "parts.1", "bias")
    assert kernel.by_slot({"bias": 4, "parts": [2, 3], "out": 1}) == [1, 2, 3, 4]
    assert summed(has_bias=False).by_slot({"out": 1, "parts": (2, 3), "bias": None}) == [1, 2, 3]
    assert summed(n=0).by_slot({"out": 1, "bias": 2}) == [1, 2]


@pytest.mark.parametrize(
    "buffers",
    [
        {"out": 1, "parts": [2, 3]},
        {"out": 1, "parts": [2, 3], "bias": None},
        {"out": 1, "parts": [2, 3], "bias": 4, "bais": 5},
        {"out": 1, "parts": [2], "bias": 4},
        {"out": 1, "parts": [2, 3, 4], "bias": 4},
        {"out": [1, 1], "parts": [2, 3], "bias": 4},
    ],
)
def test_a_buffer_that_is_missing_unknown_or_one_too_many_is_refused(buffers):
    with pytest.raises(ValueError, match=r"test_kernel\.summed (wants|has no)"):
        KernelSequence().add(summed(), **buffers)


def test_a_kernel_without_a_buffer_gets_none():
    with_bias, without = (graph(summed(has_bias=has)).toposort() for has in (True, False))
    slots = [{u.arg.slot for u in uops if "PARAM" in str(u.op)} for uops in (with_bias, without)]
    assert slots == [{0, 1, 2, 3}, {0, 1, 2}]
    assert call_by_name(lambda x, a, **others: (x, a, others), {"b": 1}, 0) == (0, None, {"b": 1})


@pytest.mark.parametrize("names", [("out", "out"), ("out", ("out", 2))])
def test_a_name_is_used_once(names):
    with pytest.raises(ValueError, match="out"):
        Kernel(lambda out: out, names, ())


def test_hints_name_buffers_of_the_kernel():
    with pytest.raises(ValueError, match="rows"):
        summed(hints=LaunchHints(waits_for=("rows",)))


def test_a_kernel_that_is_renamed_keeps_its_hints():
    hints = LaunchHints(3, 65536, ("parts",), "before its first barrier")
    graphs = [graph(summed(name, hints=hints)) for name in ("summed", "another_name")]
    assert [info_of(made).name for made in graphs] == ["summed", "another_name"]
    assert [hints_of(made) for made in graphs] == [hints, hints]
    assert info_of(graphs[1]).slots(hints.waits_for) == {1, 2}


def test_other_hints_are_another_kernel_for_the_caches():
    kernels = [
        summed(hints=hints) for hints in (LaunchHints(), LaunchHints(3), LaunchHints(waits_for=("out",)))
    ]
    assert len({graph(kernel).key for kernel in kernels}) == 3
    assert len({fingerprint(kernel) for kernel in kernels}) == 3
