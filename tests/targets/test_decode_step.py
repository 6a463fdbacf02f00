"""What products of a decode step bring to the L2 cache."""

from types import SimpleNamespace

from tinygrad import Tensor, dtypes

from engine.targets.nvidia.decode_step import DecodeStep
from engine.targets.nvidia.kernels.products.matvec import Brought
from engine.targets.nvidia.kernels.products.stacked_matrices import Schedule


def product(brings=0, planes=(), experts=None):
    schedule, stack = Schedule(8, 2, 1, brings=brings), SimpleNamespace(slots=1)
    return SimpleNamespace(schedule=schedule, stack=stack, n_blocks=4, planes=planes, experts=experts)


def planes_of_a_product():
    types = (1 << 20, dtypes.uint32), (1 << 18, dtypes.half), (8, dtypes.uint16), (1 << 19, dtypes.uint16)
    return [Tensor.empty(n, dtype=dtype) for n, dtype in types]


def test_a_product_brings_the_beginning_of_the_next_one_whose_weights_are_known():
    """Not what is too little of a plane."""
    planes = planes_of_a_product()
    router, experts = product(brings=1), product(brings=1, experts=SimpleNamespace(chooses=False))
    last, silent = product(brings=16, planes=planes), product()
    step = DecodeStep.__new__(DecodeStep)
    step._products = [silent, router, experts, last]
    share = 1e6 / sum(plane.nbytes() for plane in planes) / 4
    wanted = tuple(int(planes[i].nbytes() * share) // 16 * 16 for i in (0, 1, 3))
    assert step._brought(router) == (Brought(wanted, keeps=True), [planes[0], planes[1], planes[3]])
    assert step._brought(experts) == (Brought(wanted, keeps=False), [planes[0], planes[1], planes[3]])
    assert step._brought(last) == step._brought(silent) == (None, [])


def test_experts_that_are_chosen_bring_the_beginning_of_their_own_next_weights():
    planes, n, used = planes_of_a_product(), 8, 2
    chosen = product(brings=1, experts=SimpleNamespace(chooses=True, n=n, used=used))
    down = product(planes=planes, experts=SimpleNamespace(chooses=False))
    step = DecodeStep.__new__(DecodeStep)
    step._products = [chosen, down, product(planes=planes)]
    share = 1e6 / (used * sum(plane.nbytes() // n for plane in planes)) / chosen.n_blocks
    wanted = tuple(int(planes[i].nbytes() // n * share) // 16 * 16 for i in (0, 1, 3))
    assert step._brought(chosen) == (Brought(wanted, keeps=False, experts=n), [planes[i] for i in (0, 1, 3)])
