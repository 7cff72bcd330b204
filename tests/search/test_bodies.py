"""Bodies of If, Loop and Scan are optimized like graphs of their own, and what comes out is valid and equal."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx.checker
import pytest
from models import Arrays, by_onnxruntime, model, relative_error
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, numpy_helper
from searching import FormulaBackend, database, rule

import taso
from taso.graph import onnx_bodies
from taso.search import bodies, decision
from taso.search import optimize as search
from taso.search.backtracking import Limits
from taso.search.result import Report
from taso.search.settings import Settings
from taso.search.verify import Check, Timing

IF = """branches (bool c, float[4, 8] x, float[8] bias) => (float[4, 8] y)
<float[8, 8] shared>
{
    moved = Transpose <perm = [1, 0]> (x)
    [choice] y = If (c) <
        then_branch = yes () => (float[4, 8] a) {
            back = Transpose <perm = [1, 0]> (moved)
            product = MatMul (back, shared)
            a = Add (product, bias)
        },
        else_branch = no () => (float[4, 8] b) {
            first = Relu (x)
            second = Relu (first)
            b = Add (second, bias)
        }
    >
}"""

LOOP = """counting (int64 n, float[4, 8] x) => (float[4, 8] last, float[k, 8, 4] all)
<bool go = {1}>
{
    [repeat] last, all = Loop (n, go, x) <
        body = step (int64 i, bool on, float[4, 8] state) => (bool on, float[4, 8] next, float[8, 4] seen) {
            first = Relu (state)
            second = Relu (first)
            next = Add (second, x)
            seen = Transpose <perm = [1, 0]> (second)
        }
    >
}"""

SCAN = """scanning (float[8] start, float[5, 8] xs) => (float[8] end, float[5, 8] ys)
{
    [walk] end, ys = Scan <num_scan_inputs = 1,
        body = step (float[8] sum, float[8] item) => (float[8] more, float[8] out) {
            first = Relu (item)
            second = Relu (first)
            more = Add (sum, second)
            out = Identity (more)
        }
    > (start, xs)
}"""

NESTED = """nested (int64 n, bool c, float[4, 8] x, float[8] bias) => (float[4, 8] last)
<bool go = {1}>
{
    [repeat] last = Loop (n, go, x) <
        body = step (int64 i, bool on, float[4, 8] state) => (bool on, float[4, 8] next) {
            [inside] next = If (c) <
                then_branch = yes () => (float[4, 8] a) {
                    first = Relu (state)
                    second = Relu (first)
                    a = Add (second, bias)
                },
                else_branch = no () => (float[4, 8] b) {
                    b = Sub (state, x)
                }
            >
        }
    >
}"""

CONV = """normalized (bool c, float[1, 4, 6, 6] x) => (float[1, 4, 6, 6] y, float[1, 4, 6, 6] z)
<float[4, 4, 1, 1] kernel, float[4] scale, float[4] offset, float[4] mean, float[4] variance>
{
    z = Conv (x, kernel)
    [choice] y = If (c) <
        then_branch = yes () => (float[1, 4, 6, 6] a) {
            raw = Conv (x, kernel)
            a = BatchNormalization (raw, scale, offset, mean, variance)
        },
        else_branch = no () => (float[1, 4, 6, 6] b) { b = Relu (x) }
    >
}"""


def filled(text: str) -> ModelProto:
    """The model `text`; what it declares and nothing computes becomes an initializer of random positive values."""
    proto = model(text)
    rng = np.random.default_rng(3)
    for declared in proto.graph.value_info:
        shape = tuple(d.dim_value for d in declared.type.tensor_type.shape.dim)
        values = rng.uniform(0.5, 1.5, shape).astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(values, declared.name))
    proto.graph.ClearField("value_info")
    return proto


def feeds_of(text: str) -> list[Arrays]:
    rng = np.random.default_rng(5)
    given: list[Arrays] = []
    for value in (True, False):
        feeds: Arrays = {}
        for declared in model(text).graph.input:
            shape = tuple(d.dim_value for d in declared.type.tensor_type.shape.dim)
            feeds[declared.name] = rng.normal(size=shape).astype(np.float32)
        for name, array in (("c", np.asarray(value)), ("n", np.asarray(3 - value, np.int64))):
            if name in feeds:
                feeds[name] = array
        given.append(feeds)
    return given


def optimized(proto: ModelProto, backend: FormulaBackend, **settings: object) -> taso.Graph:
    given = {"backend": backend, "never_slower": False, "budget": 40, "progress": False, **settings}
    return taso.optimize(proto, **given)  # type: ignore[arg-type]  # settings of optimize


def graphs_in(graph: GraphProto) -> Iterator[GraphProto]:
    """The bodies in a graph, at any depth."""
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                yield attribute.g
                yield from graphs_in(attribute.g)


def nodes_of(proto: ModelProto, body: str) -> list[NodeProto]:
    """The nodes of the body named `body`."""
    return list(next(g for g in graphs_in(proto.graph) if g.name == body).node)


def kinds(proto: ModelProto, body: str) -> list[str]:
    return [node.op_type for node in nodes_of(proto, body)]


def assert_valid_and_equal(before: ModelProto, after: ModelProto, text: str) -> None:
    onnx.checker.check_model(after, full_check=True)
    for feeds in feeds_of(text):
        expected, found = by_onnxruntime(before, feeds), by_onnxruntime(after, feeds)
        for a, b in zip(found, expected, strict=True):
            assert relative_error(a, b) <= 1e-5


def assert_body_interfaces_stay(before: ModelProto, after: ModelProto) -> None:
    for old, new in zip(graphs_in(before.graph), graphs_in(after.graph), strict=True):
        assert list(old.input) == list(new.input)
        assert list(old.output) == list(new.output)


@pytest.mark.parametrize(
    ("text", "body", "fewer"),
    [(IF, "yes", "Transpose"), (IF, "no", "Relu"), (LOOP, "step", "Relu"), (SCAN, "step", "Relu"),
     (NESTED, "yes", "Relu"), (CONV, "yes", "BatchNormalization")],
    ids=["then", "else", "loop", "scan", "nested", "batchnorm"],
)  # fmt: skip
def test_a_body_is_optimized_and_the_model_stays_valid_and_equal(
    text: str, body: str, fewer: str, formula_backend: FormulaBackend
) -> None:
    before = filled(text)
    best = optimized(before, formula_backend)
    after = taso.export_onnx(best)
    assert kinds(after, body).count(fewer) < kinds(before, body).count(fewer)
    assert_valid_and_equal(before, after, text)
    assert_body_interfaces_stay(before, after)
    assert best.report.changed and best.report.body_rewrites > 0


def test_what_a_body_reads_of_outer_weights_is_not_copied_into_it(formula_backend: FormulaBackend) -> None:
    before = filled(IF)
    after = taso.export_onnx(optimized(before, formula_backend))
    assert [t.name for t in after.graph.initializer] == ["shared"]
    assert all(not body.initializer for body in graphs_in(after.graph))
    assert any("shared" in node.input for node in nodes_of(after, "yes"))


def test_what_is_folded_of_outer_weights_stays_inside_the_body(formula_backend: FormulaBackend) -> None:
    after = taso.export_onnx(optimized(filled(CONV), formula_backend))
    inside = next(g for g in graphs_in(after.graph) if g.name == "yes")
    assert inside.initializer
    # the outer Conv still reads it
    assert [t.name for t in after.graph.initializer] == ["kernel"]


def test_new_names_inside_a_body_are_none_of_the_names_around_it(formula_backend: FormulaBackend) -> None:
    text = CONV.replace("z = Conv (x, kernel)", "weight = Conv (x, kernel) conv = Relu (weight) z = Relu (conv)")
    before = filled(text)
    after = taso.export_onnx(optimized(before, formula_backend))
    assert "BatchNormalization" not in kinds(after, "yes")
    names: list[str] = [v.name for v in after.graph.input]
    for graph in (after.graph, *graphs_in(after.graph)):
        names += [t.name for t in graph.initializer] + [n for node in graph.node for n in node.output]
    assert len(names) == len(set(names)), names
    assert_valid_and_equal(before, after, text)


def test_a_loop_body_may_give_back_its_inputs_as_they_are(formula_backend: FormulaBackend) -> None:
    text = LOOP.replace("bool on, float[4, 8] next,", "bool on, float[4, 8] state,")
    text = text.replace("next = Add (second, x)", "")
    before = filled(text)
    after = taso.export_onnx(optimized(before, formula_backend))
    assert kinds(after, "step") == ["Relu", "Transpose"]
    assert_valid_and_equal(before, after, text)
    assert_body_interfaces_stay(before, after)


def test_a_body_that_states_no_types_is_optimized_from_what_it_is_fed(formula_backend: FormulaBackend) -> None:
    before = filled(LOOP)
    for body in graphs_in(before.graph):
        body.input[2].ClearField("type")
    after = taso.export_onnx(optimized(before, formula_backend))
    assert kinds(after, "step").count("Relu") == 1
    assert_valid_and_equal(before, after, LOOP)


def test_shapes_that_a_loop_changes_are_not_believed() -> None:
    text = """growing (int64 n, float[4, 8] x) => (float[k, 8] last)
    <bool go = {1}>
    {
        last = Loop (n, go, x) <
            body = step (int64 i, bool on, float[4, 8] state) => (bool on, float[4, 8] next) {
                next = Concat <axis = 0> (state, x)
            }
        >
    }"""
    graph = taso.load(model(text))
    loop = next(node for node in graph.operators if node.op.label == "Loop")
    state = onnx_bodies.read_body(graph, loop, 0, {}).graph.inputs[2].type
    assert state.dims[1] == 8 and not isinstance(state.dims[0], int)


def test_a_body_on_symbolic_shapes_is_optimized(formula_backend: FormulaBackend) -> None:
    before = filled(IF.replace("float[4, 8]", "float[rows, 8]"))
    after = taso.export_onnx(optimized(before, formula_backend, input_shapes={"x": (4, 8)}))
    assert kinds(after, "no").count("Relu") == 1
    assert_valid_and_equal(before, after, IF)


# ── what must not get through ────────────────────────────────────────────────────────────────────────────────────


def forced(proto: ModelProto, backend: FormulaBackend) -> tuple[ModelProto, Report]:
    """What a search makes of a model with a rule that is wrong, admitted although the tester would refute it."""
    wrong = rule("[wrong]\nRelu(Relu(x)) => x")
    settings = Settings(backend, [wrong], database(), Limits(budget=40), never_slower=False, progress=False)
    best, report = search.optimize(taso.load(proto), settings)
    assert isinstance(best, taso.Graph)
    return taso.export_onnx(best), report


def test_a_wrong_rule_in_a_body_does_not_get_into_the_result(formula_backend: FormulaBackend) -> None:
    before = filled(LOOP)
    after, report = forced(before, formula_backend)
    assert nodes_of(after, "step") == nodes_of(before, "step")
    assert not report.changed and report.body_rewrites == 0
    assert any("body of Loop 'repeat' stays as it is: the outputs" in said for said in report.messages)


def test_a_wrong_body_that_passed_its_own_comparison_fails_that_of_the_whole_graph(
    formula_backend: FormulaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decision, "compare", lambda *given: Check(True, 0.0))
    before = filled(LOOP)
    after, report = forced(before, formula_backend)
    assert nodes_of(after, "step") == nodes_of(before, "step") and not report.changed
    assert any("the bodies stay as they are: output" in said for said in report.messages)


def test_random_nodes_inside_a_body_are_never_merged(formula_backend: FormulaBackend) -> None:
    text = """drawing (bool c, float[4, 8] x) => (float[4, 8] y)
    {
        y = If (c) <
            then_branch = yes () => (float[4, 8] a) {
                one = RandomNormalLike (x)
                two = RandomNormalLike (x)
                a = Sub (one, two)
            },
            else_branch = no () => (float[4, 8] b) { b = Relu (x) }
        >
    }"""
    after = taso.export_onnx(optimized(model(text), formula_backend))
    assert kinds(after, "yes").count("RandomNormalLike") == 2


def test_a_body_of_a_foreign_operator_stays_and_the_report_says_so(formula_backend: FormulaBackend) -> None:
    text = LOOP.replace("next = Add (second, x)", "next = my.domain.Secret (second)")
    before = model(text, domains={"my.domain": 1})
    best = optimized(before, formula_backend)
    assert nodes_of(taso.export_onnx(best), "step") == nodes_of(before, "step")
    assert any("stay as they are" in said or "stays as it is" in said for said in best.report.messages)


def test_a_budget_of_0_leaves_bodies_alone(formula_backend: FormulaBackend) -> None:
    before = filled(IF)
    best = optimized(before, formula_backend, budget=0)
    assert nodes_of(taso.export_onnx(best), "no") == nodes_of(before, "no") and best.report.bodies_expanded == 0


def test_bodies_and_the_graph_around_them_share_one_budget(formula_backend: FormulaBackend) -> None:
    report = optimized(filled(IF), formula_backend, budget=3, search="backtracking").report
    assert 0 < report.bodies_expanded and report.bodies_expanded + report.expanded <= 3


# ── never slower ─────────────────────────────────────────────────────────────────────────────────────────────────


class Measuring(FormulaBackend):
    """Says that it measures, so that whole graphs are raced."""

    measures = True


@pytest.mark.parametrize("low", [0.9, 1.1])
def test_new_bodies_are_kept_only_where_the_whole_graph_is_measured_to_be_faster(
    low: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def race(*given: object) -> Timing:
        return Timing(1.0, 1.0, low, 1.2)

    monkeypatch.setattr(bodies, "race", race)
    before = filled(LOOP)
    best = optimized(before, Measuring(), never_slower=True)
    assert kinds(taso.export_onnx(best), "step").count("Relu") == (1 if low > 1 else 2)
    assert best.report.changed == (low > 1)
    if low < 1:
        assert any("not measurably faster" in said for said in best.report.messages)


class Counting:
    """A program that takes a second, and one more for each iteration, by a clock of its own."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now

    def __call__(self, feeds: Arrays) -> Arrays:
        self.now += 1.0 + float(feeds["n"])
        return {}


def test_a_loop_is_timed_on_inputs_on_which_its_body_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    program = Counting()
    monkeypatch.setattr(bodies, "time", program)
    settings = Settings(Measuring(), [], database(), sizes={})
    for seed in range(8):
        settings.seed = seed
        feeds = bodies._busiest(program, taso.load(filled(LOOP)), settings)  # type: ignore[arg-type]  # a program
        assert feeds["n"] > 0
