"""Rules that cannot match a node are not tried, nodes are made with less, and kernels become the same code."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
from tinygrad import Device, Tensor, UOp, codegen, dtypes
from tinygrad.uop import ops, symbolic, weak
from tinygrad.uop.ops import GroupOp, Ops, PatternMatcher, RewriteContext, UOpMetaClass, UPat, graph_rewrite

from engine.fixes import graph_nodes, graph_rewrites
from tests.thorough import thorough


@pytest.fixture(autouse=True)
def applied() -> None:
    graph_nodes.apply()
    graph_rewrites.apply()


@contextmanager
def stock() -> Iterator[None]:
    """Meanwhile, tinygrad is as it was."""
    with (
        mock.patch.object(PatternMatcher, "rewrite", graph_rewrites._stock_rewrite),
        mock.patch.object(RewriteContext, "unified_rewrite", graph_rewrites._stock_walk),
        mock.patch.object(UOpMetaClass, "__call__", graph_nodes._stock_make),
        mock.patch.object(ops, "dtype_from_uop", graph_nodes._stock_dtype),
        mock.patch.object(weak, "dtype_from_uop", graph_nodes._stock_dtype),
        mock.patch.object(ops.recursive_property, "__get__", graph_nodes._stock_property),
    ):
        yield


def kernels() -> list[UOp]:
    """Graphs of kernels: a product, a softmax, places that follow from one another, and a gather."""
    a, b = Tensor.empty(24, 32), Tensor.empty(32, 40)
    chosen = Tensor.empty(5, dtype=dtypes.int32)
    steps = (a @ b).softmax(-1), a.pad(((1, 2), (0, 3))).flip(0)[3:20].max(1), b[chosen].sin()
    calls = [call for step in steps for call in step.schedule_linear().src]
    return [call.src[0] for call in calls if call.src[0].op is Ops.SINK]


def sources() -> list[str]:
    renderer = Device["CPU"].renderer
    return [codegen.do_to_program(kernel, renderer).src[2].arg for kernel in kernels()]


@thorough  # all kernels of tests/kernels are compiled with it
def test_kernels_become_the_same_code() -> None:
    ours = sources()
    with stock():
        assert sources() == ours and len(ours) > 4


def tried() -> int:
    """How many of 21 additions a rule was tried on that fits one of them, an addition to a product."""
    x = UOp.special(8, "gidx0")
    rule = UPat(Ops.ADD, src=(UPat((Ops.MUL, Ops.SHL)), UPat(Ops.CONST)))
    rule = mock.Mock(wraps=rule, op=rule.op, src=rule.src, early_reject=set(), is_any=False)
    rule.required_len, rule.strict_length = 2, True
    matcher = PatternMatcher([(rule, lambda: None)], compiled=False)
    graph_rewrite(UOp.group(*(x + i for i in range(20)), x * 3 + 1), matcher)
    return rule.match.call_count


def test_a_rule_that_cannot_match_is_not_tried() -> None:
    assert tried() == 1
    with stock():
        assert tried() == 21


@pytest.mark.parametrize("op", [Ops.ADD, Ops.CMPLT, Ops.WHERE, Ops.SHL, Ops.MAX, Ops.MULACC, Ops.CMPNE])
def test_types_are_those_of_tinygrad(op: Ops) -> None:
    values = [UOp.const(1, d) for d in (dtypes.weakint, dtypes.int32, dtypes.int64, dtypes.uint8)]
    for first in values:
        for second in values:
            src = (UOp.const(True), first, second) if op in GroupOp.Ternary else (first, second)
            assert graph_nodes._dtype(op, src, None) is graph_nodes._stock_dtype(op, src, None)


def test_properties_do_not_walk_over_what_is_known() -> None:
    x = UOp.special(8, "gidx0")
    assert x._shape == ()
    with mock.patch.object(UOp, "toposort", autospec=True, side_effect=UOp.toposort) as walk:
        assert (x * 13)._shape == () and not walk.called


def test_a_node_is_made_once_and_forgotten() -> None:
    x = UOp.special(8, "gidx7")
    assert x + 5 is x + 5
    n = len(UOpMetaClass.ucache)
    made = [x * i for i in range(100, 120)]
    assert len(UOpMetaClass.ucache) >= n + 20
    del made
    assert len(UOpMetaClass.ucache) <= n + 1


def test_rules_that_never_end_are_told() -> None:
    matcher = PatternMatcher([(UPat(Ops.CONST, name="c"), lambda c: UOp.const(c.val + 1, c.dtype))])
    with (
        mock.patch.object(ops.REWRITE_STACK_LIMIT, "value", 100),
        pytest.raises(RuntimeError, match="infinite"),
    ):
        graph_rewrite(UOp.const(1), matcher)


def test_symbolic_rules_find_the_same() -> None:
    x, y = UOp.variable("x", 0, 9), UOp.variable("y", 0, 99)
    graph = ((x * 4 + y) // 4 + (x < 5).where(y, y) % 7) * 3 + ((y + 1 < 1) | (x < 20)).where(x, 0)
    ours = graph_rewrite(graph, symbolic.sym)
    with stock():
        assert graph_rewrite(graph, symbolic.sym) is ours
