"""Kernels are drawn as the operators that they run, whichever steps read which."""

from __future__ import annotations

import random

import onnx.parser
import pytest
from hypothesis import given
from searching import FUZZ, SEEDS, random_graph

import taso
from taso.backends.lowering import Lowering, lower
from taso.backends.onnxruntime.lowering import RuntimeLowering
from taso.backends.select import get_backend
from taso.graph.graph import Graph
from taso.search.picturing import _nodes

GELU = """
<ir_version: 9, opset_import: ["" : 17]>
g (float[4,64] x, float[64,64] w) => (float[4,64] y)
<float half = {0.5}, float one = {1.0}, float root = {1.4142135}> {
    m = MatMul(x, w)
    d = Div(m, root)
    e = Erf(d)
    a = Add(e, one)
    p = Mul(m, a)
    y = Mul(p, half)
}
"""
"""What reads the product at its beginning and at its end."""


def each_node_once(graph: Graph, lowering: Lowering) -> int:
    """Checks that the kernels' operators are those of the graph; the most that one kernel has."""
    jobs = lower(graph, lowering).jobs
    drawn = [_nodes(job) for job in jobs]
    assert all(nodes[-1] is job.results[0].node for nodes, job in zip(drawn, jobs, strict=True))
    assert sorted(n.guid for nodes in drawn for n in nodes) == sorted(n.guid for n in graph.run_time_nodes)
    return max(map(len, drawn))


@given(SEEDS)
@FUZZ
def test_every_operator_of_a_random_graph_is_in_one_box(seed: int) -> None:
    graph = random_graph(random.Random(seed))
    for name in ("reference", "onednn"):
        each_node_once(graph, get_backend(name).lowering)
    each_node_once(graph, RuntimeLowering())


def test_a_kernel_whose_steps_read_several_before_them_is_one_box() -> None:
    assert each_node_once(taso.load(onnx.parser.parse_model(GELU)), RuntimeLowering()) >= 5


def test_a_drawing_that_fails_loses_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: object) -> None:
        raise ValueError("no such thing")

    monkeypatch.setattr("taso.search.optimize.before_and_after", fails)
    graph = taso.new_graph()
    graph.relu(graph.relu(graph.new_input(dims=(4, 4))))
    best = taso.optimize(graph, backend="reference", progress=False)
    assert len(best.operators) == 1 and "could not be drawn: no such thing" in " ".join(best.report.messages)
