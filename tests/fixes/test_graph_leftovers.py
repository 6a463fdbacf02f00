"""What a graph keeps of what it was made of, with a driver that only counts."""

from __future__ import annotations

import pytest
from tinygrad.device import DepsTracker
from tinygrad.runtime.graph.cuda import CUDAGraph

from engine.fixes import graph_leftovers


@pytest.mark.parametrize("updatable", [[], [0]])
def test_only_a_graph_that_changes_keeps_what_it_was_made_of(updatable, monkeypatch):
    destroyed = []

    def make(graph):
        graph.graph, graph.updatable, graph.deps = "template", updatable, DepsTracker()
        graph.nodes = graph.calls = graph.runtimes = graph.uop_replace = ["a kernel"]

    monkeypatch.setattr(graph_leftovers, "_make", make)
    monkeypatch.setattr(graph_leftovers.cuda, "cuGraphDestroy", lambda graph: destroyed.append(graph) or 0)
    graph = CUDAGraph.__new__(CUDAGraph)
    graph_leftovers._init(graph)
    is_kept = bool(updatable)
    assert destroyed == ([] if is_kept else ["template"])
    assert [hasattr(graph, "graph"), bool(graph.calls), bool(graph.nodes)] == [is_kept] * 3
    del graph  # destroys the template, if it is there
    assert destroyed == ["template"]
