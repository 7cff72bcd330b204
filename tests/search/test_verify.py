"""The last word: outputs that differ are found, and a trial that says nothing does not pass."""

from __future__ import annotations

import warnings

import models
import numpy as np
import pytest
from models import model
from searching import FormulaBackend, by_id, database, rule

import taso
from taso.graph.errors import InputError
from taso.search import optimize as search
from taso.search.optimize import Settings
from taso.search.verify import NaNWarning, compare, contest, median_interval, race, random_feeds, relative_error


def identity_of(build: object) -> tuple[taso.Graph, taso.Graph]:
    """A graph with an Identity to be dropped, and what is left when it is."""
    graphs = []
    for redundant in (True, False):
        graph = taso.new_graph()
        x = graph.new_input(dims=(2, 3))
        build(graph, graph.identity(x) if redundant else x)  # type: ignore[operator]  # a function
        graphs.append(graph)
    return graphs[0], graphs[1]


def weight(graph: taso.Graph, *values: float) -> taso.Tensor:
    return graph.new_weight(dims=(len(values),), data=np.asarray(values, np.float32))


# ── what passes and what does not ────────────────────────────────────────────────────────────────────────────────


def test_equal_graphs_pass_with_the_largest_error_of_any_output() -> None:
    original, best = identity_of(lambda g, x: g.set_outputs([("a", g.tanh(x)), ("b", g.relu(x))]))
    check = compare(original, best, {})
    assert check.passed and check.error == 0 and check.reason == "" and check.trials >= 2


@pytest.mark.parametrize("factor, passed", [(1 + 1e-6, True), (1 + 1e-3, False), (-1.0, False)])
def test_a_difference_above_the_tolerance_names_the_output(factor: float, passed: bool) -> None:
    original, _ = identity_of(lambda g, x: g.set_outputs([("fine", g.relu(x)), ("spoiled", g.tanh(x))]))
    best = taso.new_graph()
    x = best.new_input(dims=(2, 3))
    best.set_outputs([("fine", best.relu(x)), ("spoiled", best.mul(best.tanh(x), weight(best, factor)))])
    check = compare(original, best, {})
    assert check.passed == passed
    assert passed or "'spoiled'" in check.reason


def test_a_difference_in_one_element_of_the_last_output_is_found() -> None:
    original = taso.new_graph()
    original.relu(original.new_input(dims=(50, 20)))
    best = taso.new_graph()
    mask = np.ones((50, 20), np.float32)
    mask[49, 19] = 0.5
    best.mul(best.relu(best.new_input(dims=(50, 20))), best.new_weight(dims=(50, 20), data=mask))
    assert not compare(original, best, {}).passed


def test_a_difference_for_negative_inputs_only_is_found() -> None:
    original, _ = identity_of(lambda g, x: g.relu(x))
    best = taso.new_graph()
    best.identity(best.new_input(dims=(2, 3)))
    assert not compare(original, best, {}).passed


def test_an_output_that_is_infinite_proves_nothing() -> None:
    original, best = identity_of(lambda g, x: g.exp(input=g.mul(g.exp(input=x), weight(g, 3e38))))
    with np.errstate(all="ignore"):
        check = compare(original, best, {})
    assert not check.passed and "not finite" in check.reason


def test_an_output_that_does_not_depend_on_the_input_proves_nothing_and_the_original_comes_back() -> None:
    original, best = identity_of(lambda g, x: g.sigmoid(g.add(g.relu(g.mul(x, weight(g, 0.0))), weight(g, 4.0))))
    check = compare(original, best, {})
    assert not check.passed and "does not depend" in check.reason
    returned, report = search.optimize(
        original, Settings(FormulaBackend(), [by_id()["drop-identity"]], database(), never_slower=False)
    )
    assert returned is original and not report.changed and "does not depend" in report.decision


def test_the_models_of_onnx_as_they_are_shipped_do_not_pass_unseen() -> None:
    proto = models.light("squeezenet")
    graph = taso.load(proto)
    check = compare(graph, taso.load(proto), {})
    assert not check.passed and "does not depend" in check.reason


@pytest.mark.parametrize(
    "text",
    [
        "g (float[2, 3] x) => (float[2, 3] y, int64[2] s) { y = Relu (x) s = Shape (x) }",
        "g (float[2, 3] x) => (float[2, 3] y, float[2, 3] s) { y = Relu (x) t = Shape (x) s = ConstantOfShape (t) }",
        "g (float[2, 3] x) => (float[2, 3] y, int64 s) { y = Relu (x) s = Size (x) }",
        "g (float[2, 3] x) => (float[2, 3] y, float[2] c) <float[2] c = {1, 2}> { y = Relu (x) }",
    ],
)
def test_outputs_that_are_shapes_or_constants_do_not_fail(text: str) -> None:
    check = compare(taso.load(model(text)), taso.load(model(text)), {})
    assert check.passed, check.reason


def test_a_custom_operator_is_not_taken_for_equal() -> None:
    text = 'g (float[2, 3] x) => (float[2, 3] y) { z = Identity (x) y = my.domain.Secret (z) }'
    original = taso.load(model(text, domains={"my.domain": 1}))
    check = compare(original, original, {})
    assert not check.passed and "could not run" in check.reason


# ── numbers that are none ────────────────────────────────────────────────────────────────────────────────────────


def test_weights_that_are_nan_pass_with_one_warning(formula_backend: FormulaBackend) -> None:
    original, best = identity_of(lambda g, x: g.set_outputs(
        [("bad", g.mul(x, weight(g, 1.0, float("nan"), 2.0))), ("good", g.tanh(x))]
    ))  # fmt: skip
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert compare(original, best, {}).passed
    assert [w.category for w in caught] == [NaNWarning]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimized = taso.optimize(original, backend=formula_backend, never_slower=False)
    assert [w.category for w in caught] == [NaNWarning]
    assert optimized.report.changed and optimized.report.verified
    assert np.isnan(taso.compile(optimized, formula_backend)({"input": np.ones((2, 3), np.float32)})["bad"]).sum() == 2


def test_nan_in_another_place_is_a_difference() -> None:
    nan = float("nan")
    original, _ = identity_of(lambda g, x: g.mul(x, weight(g, 1.0, nan, 2.0)))
    other, _ = identity_of(lambda g, x: g.mul(x, weight(g, nan, 1.0, 2.0)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NaNWarning)
        assert not compare(original, other, {}).passed


def test_a_wrong_output_beside_one_that_is_nan_is_found() -> None:
    nan = float("nan")
    original, _ = identity_of(lambda g, x: g.set_outputs([("bad", g.mul(x, weight(g, nan))), ("good", g.tanh(x))]))
    other, _ = identity_of(lambda g, x: g.set_outputs([("bad", g.mul(x, weight(g, nan))), ("good", g.sigmoid(x))]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NaNWarning)
        check = compare(original, other, {})
    assert not check.passed and "'good'" in check.reason


@pytest.mark.parametrize(
    "a, b, error",
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([1.0, 2.002], [1.0, 2.0], 1e-3),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
        ([1e-9, 0.0], [0.0, 0.0], np.inf),
        ([np.nan, 1.0], [np.nan, 1.0], 0.0),
        ([1.0, np.nan], [np.nan, 1.0], np.inf),
        ([np.inf, 1.0], [np.inf, 1.0], 0.0),
        ([np.inf, 1.0], [-np.inf, 1.0], np.inf),
        ([np.inf, 1.0], [5.0, 1.0], np.inf),
        ([5.0, 1.0], [np.inf, 1.0], np.inf),
        ([np.nan], [np.nan], 0.0),
        ([], [], 0.0),
        ([1.0], [1.0, 1.0], np.inf),
        ([True], [True], 0.0),
        ([True], [False], np.inf),
        (["a"], ["a"], 0.0),
        (["a"], ["b"], np.inf),
    ],
)
def test_the_relative_error_is_that_of_the_largest_element(a: list[object], b: list[object], error: float) -> None:
    assert relative_error(np.asarray(a), np.asarray(b)) == pytest.approx(error)


# ── random inputs ────────────────────────────────────────────────────────────────────────────────────────────────


def test_random_inputs_are_of_the_declared_types_and_the_same_for_the_same_seed() -> None:
    text = "g (float[N, 3] x, int64[2] i, bool[N] b, double[2] d, string[2] s) => (float[N, 3] y) { y = Relu (x) }"
    graph = taso.load(model(text))
    feeds, again, other = (random_feeds(graph, {"N": 4}, seed) for seed in (1, 1, 2))
    assert {n: (a.dtype.kind, a.shape) for n, a in feeds.items()} == {
        "x": ("f", (4, 3)), "i": ("i", (2,)), "b": ("b", (4,)), "d": ("f", (2,)), "s": ("O", (2,)),
    }  # fmt: skip
    assert all(np.array_equal(feeds[n], again[n]) for n in feeds)
    assert not np.array_equal(feeds["x"], other["x"])


def test_an_input_for_which_no_values_can_be_made_is_named() -> None:
    graph = taso.load(model("g (seq(float[2]) x) => (int64 n) { n = SequenceLength (x) }"))
    with pytest.raises(InputError, match="random values"):
        random_feeds(graph, {}, 0)


# ── the race ─────────────────────────────────────────────────────────────────────────────────────────────────────


class Program:
    """Counts its runs."""

    kernels = 1
    peak_bytes = 0

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, feeds: object) -> dict[str, np.ndarray]:
        self.runs += 1
        return {}


def test_both_programs_of_a_race_run_equally_often() -> None:
    first, second = Program(), Program()
    timing = race(first, second, {}, seconds=0.01)
    assert first.runs == second.runs > timing.rounds > 0
    assert timing.low <= timing.high and len(timing.ratios) == timing.rounds


def test_a_difference_within_the_noise_is_not_called_faster() -> None:
    assert median_interval([0.9, 1.1] * 20)[0] < 1.0
    assert median_interval([1.05 + 0.001 * i for i in range(40)])[0] > 1.0
    low, high = median_interval([1.0])
    assert low == high == 1.0


def test_a_graph_that_is_not_shown_to_be_faster_is_not_taken(formula_backend: FormulaBackend) -> None:
    class Slower(FormulaBackend):
        """Measures, and finds each kernel of the new graph cheaper; the whole takes equally long."""

        measures = True

    graph = taso.new_graph()
    x = graph.identity(graph.new_input(dims=(1, 64)))
    for _ in range(2):
        graph.matmul(x, graph.new_weight(dims=(64, 64)))
    returned, report = search.optimize(graph, Settings(Slower(), [rule("Identity(x) => x")], database()))
    assert report.measured_before is not None and report.ratio_low is not None
    assert (returned is graph) == (report.ratio_low <= 1.0) == (not report.changed)


def test_what_others_leave_in_the_caches_is_no_part_of_a_contest(monkeypatch: pytest.MonkeyPatch) -> None:
    now, last = [0.0], [0]

    class Cold:
        """Takes five times as long when another one has run before."""

        kernels, peak_bytes = 1, 0

        def __init__(self, number: int, seconds: float) -> None:
            self.number, self.seconds = number, seconds

        def __call__(self, feeds: object) -> dict[str, np.ndarray]:
            now[0] += self.seconds * (1 if last[0] == self.number else 5)
            last[0] = self.number
            return {}

    monkeypatch.setattr("taso.search.verify.time.perf_counter", lambda: now[0])
    timing, other = contest(Cold(1, 2e-3), [Cold(2, 1e-3), Cold(3, 4e-3)], {})
    assert (timing.original, timing.best) == pytest.approx((2e-3, 1e-3)) and timing.faster
    assert other.best == pytest.approx(4e-3) and not other.faster
