"""What a search gives back: a graph of its own with the file's names, and a report that tells how it came about."""

from __future__ import annotations

import json
import random

import models
import numpy as np
import onnx.checker
import pytest
from hypothesis import given
from models import model
from onnx import ModelProto, numpy_helper
from searching import (
    FUZZ,
    ROUNDED,
    SEEDS,
    FormulaBackend,
    planted_graph,
    prepared,
    random_graph,
    random_inputs,
    rule,
    run_unoptimized,
)  # fmt: skip

import taso
from taso.graph.errors import GraphError
from taso.graph.evaluate import evaluate_graph
from taso.graph.graph import Graph
from taso.graph.operator import Weight
from taso.graph.ops.elementwise import ADD
from taso.graph.ops.movement import TILE
from taso.graph.types import DType, TensorType
from taso.search.result import Report, by_rule, fold, to_graph
from taso.search.verify import relative_error

NAMED = """branches (float[1, 4, 6, 6] image) => (float[1, 4, 6, 6] merged, float[1, 4, 6, 6] left)
<float[4, 4, 3, 3] wide, float[4, 4, 1, 1] narrow>
{
    [first] left = Conv <pads = [1, 1, 1, 1]> (image, wide)
    [second] same = Identity (left)
    [third] right = Conv (same, narrow)
    [fourth] merged = Relu (right)
}"""


def named() -> ModelProto:
    proto = model(NAMED)
    rng = np.random.default_rng(1)
    del proto.graph.initializer[:]
    for name, window in (("wide", 3), ("narrow", 1)):
        values = rng.normal(size=(4, 4, window, window)).astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(values, name))
    return proto


def optimized(graph: taso.Graph | ModelProto, backend: FormulaBackend, **settings: object) -> taso.Graph:
    given = {"backend": backend, "never_slower": False, "verify": False, "budget": 20, **settings}
    return taso.optimize(graph, **given)  # type: ignore[arg-type]  # settings of optimize


def report_of(graph: taso.Graph) -> Report:
    return graph.report


# ── outputs ──────────────────────────────────────────────────────────────────────────────────────────────────────


def assert_optimize_keeps_outputs(graph: taso.Graph, alpha: float, backend: FormulaBackend) -> None:
    feeds, before = random_inputs(graph), taso.export_onnx(graph)
    best = optimized(graph, backend, alpha=alpha, budget=8)
    after = taso.export_onnx(best)
    onnx.checker.check_model(after, full_check=True)
    report = report_of(best)
    assert report.cost_after <= report.cost_before
    exact = evaluate_graph(graph, feeds, wide=True)
    for (name, _), a, b in zip(
        best.outputs, run_unoptimized(after, feeds), run_unoptimized(before, feeds), strict=True
    ):
        # what is nothing but rounding may be rounded otherwise
        close = b.dtype.kind == "f" and bool((np.abs(a - b) <= 4 * np.max(np.abs(b - exact[name]), initial=0)).all())
        wrong = f"{name} after {[r.identifier for r in report.rewrites]}"
        assert close or models.relative_error(a, b) <= 1e-4, wrong


@pytest.mark.parametrize("alpha", [1.0, 1.1])
@pytest.mark.parametrize("make", [random_graph, planted_graph])
def test_optimizing_random_graphs_keeps_their_outputs_and_writes_valid_files(make: object, alpha: float) -> None:
    backend = FormulaBackend()

    @FUZZ
    @given(SEEDS)
    def trial(seed: int) -> None:
        assert_optimize_keeps_outputs(make(random.Random(seed)), alpha, backend)  # type: ignore[operator]  # one of two functions

    trial()


def test_the_state_of_a_graph_gives_the_same_graph_back() -> None:
    for seed in range(20):
        graph = random_graph(random.Random(seed))
        start = prepared(graph)
        again = to_graph(start.state, graph, start.classes, taso.Graph)
        feeds = random_inputs(graph)
        for name, value in evaluate_graph(graph, feeds, wide=True).items():
            assert relative_error(evaluate_graph(again, feeds, wide=True)[name], value) <= ROUNDED


# ── names ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_inputs_outputs_and_surviving_nodes_keep_their_names(formula_backend: FormulaBackend) -> None:
    proto = named()
    best = optimized(proto, formula_backend)
    assert [r.identifier for r in report_of(best).rewrites] == ["drop-identity"]
    after = taso.export_onnx(best)
    assert [v.name for v in after.graph.input] == ["image"]
    assert [v.name for v in after.graph.output] == ["merged", "left"]
    assert {n.name for n in after.graph.node} == {"first", "third", "fourth"}
    assert {t.name for t in after.graph.initializer} == {"wide", "narrow"}


def test_a_rewritten_node_remembers_the_rule_that_made_it(formula_backend: FormulaBackend) -> None:
    graph = taso.new_graph()
    x = graph.new_input(dims=(4, 16))
    graph.matmul(graph.matmul(x, graph.new_weight(dims=(16, 16))), graph.new_weight(dims=(16, 16)))
    best = optimized(graph, formula_backend)
    assert [n.origin for n in best.run_time_nodes] == [r.rule for r in report_of(best).rewrites] != []
    assert all(n.origin == "" for n in graph.nodes)


def test_the_graph_that_was_given_stays_as_it_was(formula_backend: FormulaBackend) -> None:
    graph = taso.load(named())
    before = taso.export_onnx(graph).SerializeToString(deterministic=True)
    best = optimized(graph, formula_backend)
    assert report_of(best).changed
    assert taso.export_onnx(graph).SerializeToString(deterministic=True) == before
    untouched = optimized(graph, formula_backend, budget=0)
    assert untouched is not graph and not report_of(untouched).changed
    with pytest.raises(GraphError, match="no report"):
        _ = graph.report


# ── constants ────────────────────────────────────────────────────────────────────────────────────────────────────


def tiled(repeats: int) -> Graph:
    graph = Graph()
    small = graph.add_weight(Weight(TensorType(DType.FLOAT, (64,)), np.ones(64, np.float32)))
    big = graph.make(TILE, (small,), {"repeats": (repeats,)}).output
    x = graph.add_input("x", big.type)
    graph.set_outputs([("y", graph.make(ADD, (x, big)).output)])
    return graph


@pytest.mark.parametrize("repeats, folded", [(2, True), (1 << 14, False)])
def test_a_constant_is_folded_unless_it_is_much_larger_than_what_it_is_made_of(repeats: int, folded: bool) -> None:
    names = [n.op.name for n in fold(tiled(repeats)).nodes]
    assert ("Tile" not in names) == folded


def test_folding_reads_no_weight_until_it_is_asked_for() -> None:
    def never() -> np.ndarray:
        raise AssertionError("a weight was read")

    graph = taso.Graph()
    w = graph.add_weight(Weight(TensorType(DType.FLOAT, (4, 4)), never))
    graph.matmul(graph.new_input(dims=(2, 4)), graph.transpose(w, (1, 0)))
    (node,) = fold(graph).run_time_nodes
    assert node.inputs[1] is not None and node.inputs[1].node.op.name == "Weight"


# ── the report ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_report_is_plain_data_and_text(formula_backend: FormulaBackend) -> None:
    report = report_of(optimized(named(), formula_backend, verify=True))
    assert json.loads(report.to_json()) == json.loads(json.dumps(report.to_dict()))
    text = str(report)
    assert text == report.summary()
    assert "Identity(x) => x" in text and "a formula, not measured" in text
    assert "equal" in text and report.verified is True


def test_the_gains_of_the_rewrites_add_up_to_the_difference_of_the_costs(formula_backend: FormulaBackend) -> None:
    for seed in range(12):
        report = report_of(optimized(random_graph(random.Random(seed), 16), formula_backend))
        gained = sum(r.gain_ms for r in report.rewrites)
        assert gained == pytest.approx(report.cost_before - report.cost_after, abs=1e-9)


def test_rewrites_of_one_rule_are_counted_together(formula_backend: FormulaBackend) -> None:
    graph = taso.new_graph()
    x = graph.new_input(dims=(2, 3))
    graph.relu(graph.transpose(graph.tanh(graph.transpose(graph.sigmoid(x), (0, 1))), (0, 1)))
    (line,) = by_rule(report_of(optimized(graph, formula_backend)).rewrites)
    assert line[0] == "Transpose(x, perm=p) => x" and line[1] == 2


def test_what_did_not_pay_is_told(formula_backend: FormulaBackend) -> None:
    dear = rule("Add(x, y) => Sub(x, Neg(y))")
    graph = taso.new_graph()
    x, y = graph.new_input(dims=(64, 64)), graph.new_input(dims=(64, 64))
    graph.transpose(graph.add(graph.transpose(x, (1, 0)), y), (1, 0))
    report = report_of(optimized(graph, formula_backend, rules=dear))
    assert not report.changed and "original graph" in report.decision
    assert {rule for rule, change in report.near_misses if change > 0} == {dear.name}
    assert dear.name in str(report)
