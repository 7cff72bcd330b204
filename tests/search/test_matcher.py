"""Where rules apply: every match is one, none is missed, and a refusal has a reason."""

from __future__ import annotations

import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from searching import FUZZ, SEEDS, by_id, drafted, planted_graph, prepared, random_graph, rule

import taso
from taso.graph.errors import GraphError, RuleError
from taso.graph.operator import Trait, Weight
from taso.graph.ops.linear import CONV
from taso.graph.ops.movement import CONCAT, SPLIT
from taso.graph.ops.structure import IDENTITY
from taso.graph.types import DType, TensorType
from taso.rules.collection import library
from taso.rules.constants import IDENTITY_MATRIX, constant_weight
from taso.rules.expression import parse
from taso.rules.matcher import Match, Matcher
from taso.rules.pattern import Certificate, Rule, Status
from taso.search.rewrite import Refused
from taso.search.state import Cycle, State


def state_of(graph: taso.Graph) -> State:
    return prepared(graph).state


def matches(known: Rule, graph: taso.Graph) -> list[Match]:
    return Matcher([known]).find_all(state_of(graph))


def reasons(known: Rule, graph: taso.Graph) -> list[str]:
    """Why a rule does not apply, at each place where the shape of its source fits."""
    return [reason for _, reason in Matcher([known]).explain(state_of(graph), 0)]


def spelled_out(state: State, match: Match) -> None:
    """Asserts that each matched node is the operator that the rule says, on the very values that it says."""
    assert len(set(match.nodes)) == len(match.nodes), "one node stands for two"
    for pattern, node in zip(match.rule.source, match.nodes, strict=True):
        said = [
            None if r is None
            else match.variables[r] if isinstance(r, str)
            else state.outputs(match.nodes[r.node])[r.output]
            for r in pattern.inputs
        ]  # fmt: skip
        read = list(state.inputs(node))
        if pattern.op.has(Trait.COMMUTATIVE) and len(read) == 2:
            assert Counter(said) == Counter(read)
        else:
            assert said == read or state.op(node).has(Trait.SOURCE)


# ── what a verdict covers ────────────────────────────────────────────────────────────────────────────────────────

TWICE = rule("Relu(Relu(x)) => Relu(x)")


def relu_twice(shape: tuple[int, ...]) -> taso.Graph:
    graph = taso.new_graph()
    graph.relu(graph.relu(graph.new_input(dims=shape)))
    return graph


@pytest.mark.parametrize("rank, known, found", [(3, 3, 1), (4, 3, 0), (4, 0, 1), (7, 6, 0)])
def test_no_rule_applies_to_more_dimensions_than_its_verdict_covers(rank: int, known: int, found: int) -> None:
    judged = TWICE.judged(Status.PROVED, Certificate(dimensions=known))
    graph = relu_twice((2,) * rank)
    assert len(matches(judged, graph)) == found
    assert found or reasons(judged, graph) == [
        f"'x' has {rank} dimensions, and the rule is known to hold up to {known}"
    ]


def test_every_packaged_rule_says_how_many_dimensions_its_verdict_covers() -> None:
    assert {r.certificate.dimensions for r in library()} <= {4, 5, 6}


def test_no_rule_applies_to_a_tensor_without_elements() -> None:
    assert len(matches(TWICE, relu_twice((2, 3)))) == 1
    assert reasons(TWICE, relu_twice((2, 0))) == ["'x' has a size of 0"]


# ── one value, one place ─────────────────────────────────────────────────────────────────────────────────────────

BIAS = rule("Add(MatMul(x, w), c) => Gemm(x, w, c)\n where rank(x) == 2 and rank(w) == 2")


def test_an_exchanged_sum_never_lets_one_value_stand_for_two_places() -> None:
    graph = taso.new_graph()
    x, y = graph.new_input(dims=(4, 4)), graph.new_input(dims=(4, 4))
    left = graph.matmul(x, graph.new_weight(dims=(4, 4)))
    right = graph.matmul(y, graph.new_weight(dims=(4, 4)))
    graph.add(left, right)
    state = state_of(graph)
    found = Matcher([BIAS]).find_all(state)
    assert len(found) == 2
    for match in found:
        spelled_out(state, match)
        product = state.outputs(match.nodes[0])[0]
        assert match.variables["c"] != product


def test_a_sum_matches_whichever_way_it_is_written() -> None:
    for exchanged in (False, True):
        graph = taso.new_graph()
        product = graph.matmul(graph.new_input(dims=(2, 3)), graph.new_weight(dims=(3, 4)))
        other = graph.new_input(dims=(2, 4))
        graph.add(*((other, product) if exchanged else (product, other)))
        assert len(matches(BIAS, graph)) == 1


def test_a_value_added_to_itself_matches_a_variable_that_stands_twice_and_nothing_else_does() -> None:
    twice = rule("Add(x, x) => Mul(x, Constant(2.0, like=x))")
    for same in (True, False):
        graph = taso.new_graph()
        x, y = graph.new_input(dims=(3,)), graph.new_input(dims=(3,))
        graph.add(x, x if same else y)
        assert len(matches(twice, graph)) == same


def test_a_sum_of_one_product_twice_is_one_node_for_one_place() -> None:
    graph = taso.new_graph()
    product = graph.matmul(graph.new_input(dims=(3, 3)), graph.new_weight(dims=(3, 3)))
    graph.add(product, product)
    assert matches(by_id()["merge-matmul-sum"], graph) == []


def test_a_subtraction_is_not_read_the_other_way_round() -> None:
    difference = rule("Sub(Relu(x), y) => Sub(y, Relu(x))")
    for first in (True, False):
        graph = taso.new_graph()
        x, y = graph.new_input(dims=(3,)), graph.new_input(dims=(3,))
        graph.sub(x=graph.relu(x) if first else y, y=y if first else graph.relu(x))
        assert len(matches(difference, graph)) == first


def test_products_of_different_inputs_are_not_merged_as_of_one() -> None:
    merge = by_id()["merge-matmul"]
    for same in (True, False):
        graph = taso.new_graph()
        x, y = graph.new_input(dims=(2, 3)), graph.new_input(dims=(2, 3))
        graph.matmul(x, graph.new_weight(dims=(3, 4)))
        graph.matmul(x if same else y, graph.new_weight(dims=(3, 5)))
        assert len(matches(merge, graph)) == same


@FUZZ
@given(SEEDS)
def test_every_match_in_a_random_graph_is_what_its_rule_says(seed: int) -> None:
    state = state_of(random_graph(random.Random(seed)))
    for match in Matcher(library()).find_all(state):
        spelled_out(state, match)


# ── several outputs ──────────────────────────────────────────────────────────────────────────────────────────────


def split_and_joined(order: tuple[int, int], axis: int = 1, more: bool = False) -> taso.Graph:
    graph = taso.new_graph()
    x = graph.new_input(dims=(2, 6))
    parts = graph.split(x, 1, [2, 2, 2]) if more else graph.split(x, 1, [2, 4])
    graph.concat(axis, [parts[order[0]], parts[order[1]]])
    return graph


def test_a_split_put_together_again_matches_in_its_own_order_along_its_own_axis_only() -> None:
    back = by_id()["concat-of-split"]
    assert len(matches(back, split_and_joined((0, 1)))) == 1
    assert matches(back, split_and_joined((1, 0))) == []
    assert matches(back, split_and_joined((0, 1), more=True)) == []
    assert matches(back, split_and_joined((0, 1), axis=0, more=True)) == []


def test_a_rule_may_replace_outputs_that_no_operator_joins() -> None:
    graph = taso.new_graph()
    for part in graph.split(graph.new_input(dims=(2, 6)), 1, [2, 4]):
        graph.relu(part)
    (match,) = matches(by_id()["relu-before-split"], graph)
    assert len(match.rule.outputs) == 2 and len(match.nodes) == 3


# ── attributes ───────────────────────────────────────────────────────────────────────────────────────────────────

SCALE = rule("Mul(Conv(x, w, pads=p, strides=s), c) => Conv(x, Mul(w, c), pads=p, strides=s)\n where size(c) == 1")


@pytest.mark.parametrize(
    "changed, found",
    [({}, 1), ({"strides": (2, 2)}, 1), ({"pads": (0, 1, 2, 0)}, 1), ({"dilations": (2, 2)}, 0), ({"group": 2}, 0)],
)
def test_an_attribute_that_the_equation_does_not_mention_must_have_its_default(
    changed: dict[str, object], found: int
) -> None:
    graph = taso.new_graph()
    x = graph.new_input(dims=(1, 4, 9, 9))
    w = graph.new_weight(dims=(4, 2 if "group" in changed else 4, 3, 3))
    graph.mul(graph.make(CONV, (x, w), changed).output, graph.new_weight(dims=(1,)))
    assert len(matches(SCALE, graph)) == found


def test_an_attribute_written_short_is_the_same_as_written_out() -> None:
    merge = by_id()["merge-conv"]
    graph = taso.new_graph()
    x = graph.new_input(dims=(1, 4, 9, 9))
    for attrs in ({}, {"strides": (1, 1), "pads": (0, 0, 0, 0), "dilations": (1, 1)}):
        graph.make(CONV, (x, graph.new_weight(dims=(4, 4, 3, 3))), attrs)
    assert len(matches(merge, graph)) == 1


def test_an_attribute_variable_that_stands_twice_has_one_value() -> None:
    merge = by_id()["merge-conv"]
    for strides in ((1, 1), (2, 2)):
        graph = taso.new_graph()
        x = graph.new_input(dims=(1, 4, 9, 9))
        for s in ((1, 1), strides):
            graph.make(CONV, (x, graph.new_weight(dims=(4, 4, 3, 3))), {"strides": s})
        assert len(matches(merge, graph)) == (strides == (1, 1))


def test_negative_axes_are_the_axes_that_they_mean() -> None:
    graph = taso.new_graph()
    x = graph.new_input(dims=(2, 6))
    parts = graph.make(SPLIT, (x,), {"axis": -1, "split": (2, 4)}).outputs
    graph.make(CONCAT, parts, {"axis": 1})
    assert len(matches(by_id()["concat-of-split"], graph)) == 1


# ── conditions ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_condition_that_does_not_hold_is_told_with_the_values_it_met() -> None:
    graph = taso.new_graph()
    graph.sub(x=graph.new_input(dims=(3,)), y=graph.new_weight(dims=(2, 3), data=np.zeros((2, 3))))
    graph.sub(x=graph.new_input(dims=(2, 3)), y=graph.new_weight(dims=(2, 3), data=np.ones((2, 3))))
    broadcast, nonzero = reasons(by_id()["drop-sub-zero"], graph)
    assert "broadcasts_to(shape(c), shape(x))" in broadcast and "2×3" in broadcast
    assert "filled(c, 0)" in nonzero


def test_a_rule_that_applies_has_no_reason_against_it() -> None:
    graph = taso.new_graph()
    graph.identity(graph.new_input(dims=(3,)))
    assert reasons(by_id()["drop-identity"], graph) == [""]


def test_an_attribute_that_is_computed_must_have_that_value() -> None:
    merge = by_id()["enlarge-merge-conv"]
    for pad in (1, 2):
        graph = taso.new_graph()
        x = graph.new_input(dims=(1, 4, 9, 9))
        graph.make(CONV, (x, graph.new_weight(dims=(4, 4, 1, 1))), {"pads": (0, 0, 0, 0)})
        graph.make(CONV, (x, graph.new_weight(dims=(4, 4, 3, 3))), {"pads": (pad,) * 4})
        assert len(matches(merge, graph)) == (pad == 1)
        if pad == 2:
            assert any("pads" in reason for reason in reasons(merge, graph))


def test_what_depends_on_weights_alone_is_left_to_folding() -> None:
    graph = taso.new_graph()
    graph.add(graph.identity(graph.new_weight(dims=(3,))), graph.new_input(dims=(3,)))
    assert matches(by_id()["drop-identity"], graph) == []
    assert "weights alone" in reasons(by_id()["drop-identity"], graph)[0]


@pytest.mark.parametrize("first, second, found", [("N", "N", 1), (4, 4, 1), ("N", "M", 0), (4, "N", 0), ("N", 4, 0)])
def test_what_symbolic_dimensions_leave_undecided_is_refused(
    first: int | str, second: int | str, found: int
) -> None:
    stack = by_id()["stack-matmul"].with_conditions(parse("same_shape(x, y)"))
    graph = taso.new_graph()
    w = graph.new_weight(dims=(3, 5))
    for size in (first, second):
        graph.matmul(graph.new_input(dims=(size, 3)), w)
    assert len(matches(stack, graph)) == found
    assert all(("same_shape" in reason) == (not found) for reason in reasons(stack, graph))


def test_integers_are_not_taken_for_real_numbers() -> None:
    for dtype, found in (("FLOAT", 1), ("INT64", 0)):
        graph = taso.new_graph()
        x = graph.new_input(dims=(3,), dtype=dtype)
        graph.add(x, graph.new_weight(dims=(3,), data=np.zeros(3), dtype=dtype))
        assert len(matches(by_id()["drop-add-zero"], graph)) == found


def test_a_value_of_unknown_rank_is_left_alone() -> None:
    graph = taso.Graph()
    x = graph.add_input("x", TensorType(DType.FLOAT, None))
    graph.make(IDENTITY, (x,))
    assert matches(by_id()["drop-identity"], graph) == []


def test_explaining_a_rule_that_is_not_searched_with_says_so() -> None:
    graph = taso.new_graph()
    graph.relu(graph.new_input(dims=(3,)))
    with pytest.raises(RuleError, match="not among"):
        Matcher([]).explain(state_of(graph), 5)


# ── symmetry and neighbourhood ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("convolutions, pairs", [(1, 0), (2, 1), (3, 3), (4, 6)])
def test_a_symmetric_rule_matches_each_pair_once(convolutions: int, pairs: int) -> None:
    graph = taso.new_graph()
    x = graph.new_input(dims=(1, 4, 5, 5))
    for _ in range(convolutions):
        graph.conv2d(input=x, weight=graph.new_weight(dims=(4, 4, 3, 3)), strides=(1, 1), padding="SAME")
    assert len(matches(by_id()["merge-conv"], graph)) == pairs


def test_a_rule_that_a_condition_makes_asymmetric_matches_each_pair_the_way_that_fits() -> None:
    ordered = by_id()["merge-matmul"].with_conditions(parse("dim(a, 1) < dim(b, 1)"))
    graph = taso.new_graph()
    x = graph.new_input(dims=(2, 3))
    for n in (6, 4, 5):
        graph.matmul(x, graph.new_weight(dims=(3, n)))
    assert len(matches(ordered, graph)) == 3


TWO_RELUS = rule(
    "Relu(x) | Relu(y) => Split(Relu(Concat(x, y, axis=0)), axis=0, split=(dim(x, 0), dim(y, 0)))\n"
    " where rank(x) == 2 and rank(y) == 2 and dim(x, 1) == dim(y, 1)"
)


def test_sources_that_nothing_connects_are_paired_where_they_share_a_reader_or_an_operand() -> None:
    graph = taso.new_graph()
    inputs = [graph.new_input(dims=(2, 3)) for _ in range(4)]
    near = [graph.relu(v) for v in inputs[:2]]
    far = [graph.relu(v) for v in inputs[2:]]
    graph.add(*near)
    for v in far:
        graph.tanh(v)
    state = state_of(graph)
    found = Matcher([TWO_RELUS]).find_all(state)
    assert [{state.op(n).name for n in m.nodes} for m in found] == [{"Relu"}]
    assert len({m.nodes for m in found}) == 1


# ── constants ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_constant_in_a_source_matches_a_weight_made_as_that_constant_only() -> None:
    unit = rule("MatMul(x, IdentityMatrix(size=n, like=x)) => x\n where n == dim(x, 1) and rank(x) == 2")
    attrs = IDENTITY_MATRIX.complete({"size": 3, "dtype": DType.FLOAT})
    made = constant_weight(IDENTITY_MATRIX, attrs)
    for weight, found in ((made, 1), (Weight(made.type, np.eye(3, dtype=np.float32)), 0)):
        graph = taso.Graph()
        x = graph.new_input(dims=(2, 3))
        graph.matmul(x, graph.add_weight(weight))
        assert len(matches(unit, graph)) == found
    other = constant_weight(IDENTITY_MATRIX, IDENTITY_MATRIX.complete({"size": 4, "dtype": DType.FLOAT}))
    graph = taso.Graph()
    graph.matmul(graph.new_input(dims=(2, 4)), graph.add_weight(other))
    assert len(matches(unit, graph)) == 1


# ── step by step ─────────────────────────────────────────────────────────────────────────────────────────────────


def assert_incremental_matches_are_all(graph: taso.Graph, rng: random.Random, steps: int = 6) -> None:
    """Rewrites at random; after each step, what was carried over and found anew must be all that there is."""
    matcher, state = Matcher(library()), state_of(graph)
    known = {m.key: m for m in matcher.find_all(state)}
    for _ in range(steps):
        if not known:
            return
        match = known[rng.choice(sorted(known))]
        try:
            draft = drafted(state, match)
        except (Refused, Cycle, GraphError):
            continue
        state = draft.commit()
        known = {k: m for k, m in known.items() if all(n in state.made for n in m.nodes)}
        fresh = [n for n in draft.new_nodes if n in state.made]
        known.update((m.key, m) for m in matcher.find_at(state, fresh))
        assert known.keys() == {m.key for m in matcher.find_all(state)}, match.rule.name


@FUZZ
@given(SEEDS)
def test_matches_followed_step_by_step_are_those_found_from_scratch(seed: int) -> None:
    rng = random.Random(seed)
    assert_incremental_matches_are_all(random_graph(rng), rng)


@FUZZ
@given(SEEDS)
def test_matches_of_every_rule_followed_step_by_step_are_those_found_from_scratch(seed: int) -> None:
    rng = random.Random(seed)
    assert_incremental_matches_are_all(planted_graph(rng), rng)


def test_matches_and_their_order_do_not_depend_on_the_order_of_rules_found() -> None:
    graph = random_graph(random.Random(7), 20)
    first = [m.key for m in Matcher(library()).find_all(state_of(graph))]
    second = [m.key for m in Matcher(library()).find_all(state_of(graph))]
    assert first == second and len(first) > 3
