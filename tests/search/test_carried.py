"""What a search carries over from graph to graph: findings, matches, kernels; and what it must not take at all."""

from __future__ import annotations

import random
import zlib

import pytest
import searching
from searching import FormulaBackend, prepared, random_graph, rule

import taso
from taso.backends.lowering import Kernel
from taso.rules.collection import library
from taso.rules.matcher import Matcher
from taso.search.backtracking import Backtracking, Limits, Outcome
from taso.search.moves import Candidate, Evaluation, Key, Position
from taso.search.rewrite import Refused
from taso.search.state import Draft

MERGE = "Conv(x, a) | Conv(x, b) => Split(Conv(x, Concat(a, b, axis=0)), axis=1, split=(dim(a, 0), dim(b, 0)))"


class ArbitraryBackend(FormulaBackend):
    """Kernels cost anything from one to two microseconds: what one is fused with shows in the cost."""

    def measure(self, kernel: Kernel) -> float:
        return 1e-6 * (1 + zlib.crc32(kernel.key.encode()) / (1 << 32))


def branches(count: int) -> taso.Graph:
    """Convolutions of one input, each with an activation."""
    graph = taso.new_graph()
    x = graph.relu(graph.new_input(dims=(1, 16, 8, 8)))
    for _ in range(count):
        weight = graph.new_weight(dims=(16, 16, 1, 1))
        graph.conv2d(input=x, weight=weight, strides=(1, 1), padding="VALID", activation="TANH")
    return graph


def started(graph: taso.Graph, *rules: str) -> tuple[Backtracking, Position]:
    """A search with everything found out about its first graph."""
    matcher = Matcher([rule(text) for text in rules])
    run = Backtracking(prepared(graph, ArbitraryBackend()).state, matcher, Limits(), verify=True)
    start = run._start()
    candidates(run, start)
    return run, start


def candidates(run: Backtracking, position: Position) -> dict[Key, Candidate]:
    """Every rewrite of a state that leads somewhere new, by its match."""
    found: dict[Key, Candidate] = {}
    for key in sorted(position.matches):
        candidate = run._candidate(position, key)
        if candidate is not None:
            run._seen.add(candidate.known_as)
            found[key] = candidate
    return found


def taken(run: Backtracking, position: Position, key: Key) -> Position:
    reached = run._take(candidates(run, position)[key])
    assert reached is not None
    return reached


@pytest.mark.parametrize("count", [4, 5, 6])
def test_merging_two_of_many_branches_leaves_what_is_known_of_the_others(count: int) -> None:
    run, start = started(branches(count), MERGE)
    run._seen.clear()
    first = start.keys[0]
    others = [k for k in start.keys if not {*k[1]} & {*first[1]}]  # type: ignore[misc]  # numbers of nodes
    after = taken(run, start, first)
    assert {k for k in others if k in after.findings} == {*others} and others


@pytest.mark.parametrize("more, holds", [(0, False), (1, True)])
def test_a_finding_is_void_once_it_would_leave_a_value_a_single_reader(more: int, holds: bool) -> None:
    """With one reader left, its producer is fused with that: nothing but the number of readers tells."""
    graph = taso.new_graph()
    x, y = (graph.relu(graph.new_input(dims=(4, 8))) for _ in range(2))
    graph.add(graph.tanh(x), graph.sigmoid(x))
    graph.relu(graph.mul(graph.exp(input=x), y))
    for _ in range(more):
        graph.sqrt(input=x)
    run, start = started(graph, "Tanh(x) | Sigmoid(x) => Neg(x) | Neg(x)", "Mul(Exp(x), y) => y")
    run._seen.clear()
    merge, drop = start.keys
    assert isinstance(start.findings[merge], Evaluation)
    assert (merge in taken(run, start, drop).findings) == holds


def test_pairs_that_only_a_reader_connects_come_with_it() -> None:
    graph = taso.new_graph()
    outputs = []
    for _ in range(2):
        x = graph.relu(graph.new_input(dims=(1, 16, 8, 8)))
        weight = graph.new_weight(dims=(16, 16, 1, 1))
        outputs.append(graph.conv2d(input=x, weight=weight, strides=(1, 1), padding="VALID"))
    graph.add(*outputs)
    join = "Add(Conv(x, a), Conv(y, b)) => Conv(Concat(x, y, axis=1), Concat(a, b, axis=1))"
    pair = "Relu(x) | Relu(y) => Split(Relu(Concat(x, y, axis=1)), axis=1, split=(dim(x, 1), dim(y, 1)))"
    run, start = started(graph, join, pair)
    run._seen.clear()
    assert {k[0] for k in start.keys} == {0}
    after = taken(run, start, start.keys[0])
    assert 1 in {k[0] for k in after.keys}


def test_a_weight_is_not_computed_from_what_is_known_at_run_time() -> None:
    graph = taso.new_graph()
    x, shared, left = graph.new_input(dims=(4, 8)), graph.new_weight(dims=(8, 8)), graph.new_weight(dims=(2, 8))
    graph.add(graph.matmul(x, shared), graph.new_weight(dims=(4, 8)))
    graph.relu(graph.concat(0, [graph.matmul(left, shared), x]))
    text = "MatMul(x, y) | MatMul(z, y) => Split(MatMul(Concat(x, z, axis=0), y), axis=0, split=(dim(x, 0), dim(z, 0)))"
    state = prepared(graph).state
    matches = Matcher([rule(text)]).find_all(state)
    assert matches
    for match in matches:
        with pytest.raises(Refused, match="weights alone"):
            searching.apply(match, Draft(state))


def searched(seed: int) -> Outcome:
    rng = random.Random(seed)
    state = prepared(random_graph(rng), ArbitraryBackend()).state
    return Backtracking(state, Matcher(library()), Limits(1.1, 6), verify=True).run()


def test_everything_carried_over_is_checked_on_random_graphs_whose_costs_follow_no_rule() -> None:
    reused = 0
    for seed in range(12):
        outcome = searched(seed)
        assert outcome.statistics.stopped in ("", "budget")
        reused += outcome.statistics.reused
    assert reused > 100
