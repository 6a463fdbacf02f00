"""tinygrad 0.14.0: of the rules by which a graph is rewritten, a node is shown to those only that can match it.

tinygrad rewrites a kernel's graph in thirty passes, each with up to 200 rules. Which of them a node is shown to follows
from its operation; here also from the operations of its sources, and it is looked up. The walk over the graph comes to
a node once if its sources are done. The results are the same.
"""

from __future__ import annotations

from typing import Any

from tinygrad.uop import ops
from tinygrad.uop.ops import Ops, PatternMatcher, RewriteContext, UOp, UPat

from engine.fixes import once

_stock_rewrite, _stock_walk = PatternMatcher.rewrite, RewriteContext.unified_rewrite
_MOST_EXACT = 4  # sources whose order counts; of more, only which operations there are


@once("Rewriting of graphs")
def apply() -> None:
    """Changes tinygrad in this process, once. Raises BackendError if another version is installed."""
    PatternMatcher.rewrite = _rewrite
    RewriteContext.unified_rewrite = _walk


class Kind:
    """An operation and those of its sources: what nodes of one kind have in common."""

    __slots__ = ("op", "sources")

    def __init__(self, op: Ops, sources: tuple[Ops, ...] | frozenset[Ops]) -> None:
        self.op, self.sources = op, sources

    @staticmethod
    def of(uop: UOp) -> Kind:
        """The kind of a node, which it keeps."""
        sources: Any = tuple([source.op for source in uop.src])
        if len(sources) > _MOST_EXACT:
            sources = frozenset(sources)
        kind = _kinds.get((uop.op, sources))
        if kind is None:
            kind = _kinds.setdefault((uop.op, sources), Kind(uop.op, sources))
        uop.__dict__["_kind"] = kind
        return kind

    def may_match(self, pattern: UPat, early_reject: set[Ops]) -> bool:
        """Whether the pattern, which is one for this operation, may match a node of this kind."""
        if not early_reject.issubset(self.sources):
            return False
        if isinstance(self.sources, frozenset) or pattern.src is None:
            return True
        n = len(self.sources)
        if n < pattern.required_len or (pattern.strict_length and n != pattern.required_len):
            return False
        return any(
            all(p.op is None or op in p.op for op, p in zip(self.sources, patterns, strict=False))
            for patterns in pattern.src
        )


_kinds: dict[tuple[Any, Any], Kind] = {}


def _rules(matcher: PatternMatcher) -> dict[Kind, tuple[list[Any], ...]]:
    """The rules that may match nodes of each kind, as far as they were looked for, in tinygrad's order. A rule is a
    list: pattern, function, early reject. The function changes at its first call."""
    found: dict[Kind, tuple[list[Any], ...]] | None = matcher.__dict__.get("_rules_of_kinds")
    if found is None:
        found = matcher.__dict__["_rules_of_kinds"] = {}
    return found


def _look_up(matcher: PatternMatcher, kind: Kind) -> tuple[list[Any], ...]:
    rules = tuple(rule for rule in matcher.pdict.get(kind.op, ()) if kind.may_match(rule[0], rule[2]))
    _rules(matcher)[kind] = rules
    return rules


def _rewrite(matcher: PatternMatcher, uop: UOp, ctx: Any = None) -> Any:
    """In the place of PatternMatcher.rewrite."""
    kind = uop.__dict__.get("_kind") or Kind.of(uop)
    if (rules := _rules(matcher).get(kind)) is None:
        rules = _look_up(matcher, kind)
    for rule in rules:
        if (new := rule[1](uop, ctx)) is not None and new is not uop:
            return new
    return None


def _walk(self: RewriteContext, root: UOp) -> UOp:
    """In the place of RewriteContext.unified_rewrite, where sources are rewritten first. A node waits on the stack for
    its sources, then for what a rule made of it: in a pair with itself, or with that."""
    if self.bpm is not None:
        return _stock_walk(self, root)
    assert self.pm is not None
    done, ctx, rules_of_kinds = self.replace, self.ctx, _rules(self.pm)
    most, opaque = ops.REWRITE_STACK_LIMIT.value, UOp._OPAQUE_CALL_BODIES
    stack: list[tuple[UOp, UOp | None]] = [(root, None)]
    placed = {root}
    waiting: dict[UOp, list[tuple[UOp, UOp | None]]] = {}  # by what they wait for
    while stack:
        node, new = stack.pop()
        if node in done:
            continue
        if new is None:
            if node.op in (Ops.CALL, Ops.FUNCTION) and not self.enter_calls:
                body = node.src[0]  # is left as it is
                if node.op is Ops.FUNCTION or body.op in opaque:
                    done[body] = body
            new = node
            for source in node.src[::-1]:
                if source not in placed:
                    if new is node:
                        stack.append((node, node))
                        new = source
                    placed.add(source)
                    stack.append((source, None))
            if new is not node:
                continue
        if new is not node:  # a rule made this of it, or its sources have changed
            if (result := done.get(new)) is None:
                waiting.setdefault(new, []).append((node, new))
            else:
                done[node] = result
                if node in waiting:
                    stack.extend(waiting.pop(node))
            continue
        sources = []
        changed = False
        for source in node.src:
            if (result := done.get(source)) is None:
                waiting.setdefault(source, []).append((node, node))
                break
            if result is not source:
                changed = True
            sources.append(result)
        else:
            if changed:
                src = tuple(sources)
                new = UOp(node.op, ops._rebuild_dtype(node, src), src, node.arg, node.tag)
            else:
                kind = node.__dict__.get("_kind") or Kind.of(node)
                if (rules := rules_of_kinds.get(kind)) is None:
                    rules = _look_up(self.pm, kind)
                for rule in rules:
                    if (new := rule[1](node, ctx)) is not None and new is not node:
                        break
                else:
                    done[node] = node
                    if node in waiting:
                        stack.extend(waiting.pop(node))
                    continue
            if (result := done.get(new)) is not None:
                done[node] = result
                if node in waiting:
                    stack.extend(waiting.pop(node))
                continue
            stack.append((node, new))
            stack.append((new, None))
            if len(stack) > most:
                raise RuntimeError("infinite loop in graph_rewrite (stack too big)")
    return done[root]
