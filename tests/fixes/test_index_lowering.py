"""Indices that share their expressions: each is lowered once, and to the same code."""

from unittest import mock

from tinygrad import UOp, dtypes
from tinygrad.uop import weak
from tinygrad.uop.ops import GroupOp, PatternMatcher, UPat, graph_rewrite

from engine.fixes import index_lowering


def stock(ctx: dict[UOp, UOp], uop: UOp) -> UOp | None:
    if uop.dtype in dtypes.weaks or not any(source.dtype in dtypes.weaks for source in uop.src):
        return None
    return index_lowering._stock_lower_sources(ctx, uop)


STOCK = weak.pm_commit_weak + weak.pm_cast_weak + PatternMatcher([(UPat(GroupOp.All, name="uop"), stock)])


TRIED: list[UOp] = []
NOTING = PatternMatcher([(UPat(GroupOp.All, name="uop"), lambda uop: TRIED.append(uop))]) + weak.pm_lower_weak


def lowered(n: int, rules: PatternMatcher) -> tuple[UOp, int]:
    """Loads at n places, each of which follows from the one before, and how often the rules of lowering were tried."""
    array, place, loads = UOp.placeholder((1 << 20,), dtypes.int32, slot=0), UOp.special(8, "gidx0"), []
    for _ in range(n):
        place = (place * 3 + 1) % 1000
        loads.append(array.index(place).load())
    TRIED.clear()
    with mock.patch.object(weak, "pm_lower_weak", NOTING):
        graph = graph_rewrite(UOp.group(*loads), rules, ctx={})
    return graph, len(TRIED)


def test_what_indices_share_is_lowered_once() -> None:
    index_lowering.apply()
    few, many = (lowered(n, weak.pm_lower_index_dtype)[1] for n in (10, 40))
    assert 0 < many < 5 * few < lowered(40, STOCK)[1]


def test_the_code_is_the_same() -> None:
    index_lowering.apply()
    assert lowered(20, weak.pm_lower_index_dtype)[0].key == lowered(20, STOCK)[0].key
