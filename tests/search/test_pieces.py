"""Searching in pieces: repeated blocks once, the same result wherever pieces are searched, and never a wrong graph."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from typing import Any

import numpy as np
import onnx.parser
import pytest
from hypothesis import given
from searching import FUZZ, SEEDS, FormulaBackend, planted_graph, prepared, random_graph, random_inputs, rule

import taso
from taso.graph.evaluate import evaluate_graph
from taso.rules.collection import library
from taso.rules.matcher import Matcher
from taso.rules.pattern import Rule
from taso.search import pieces
from taso.search.backtracking import backtrack
from taso.search.moves import Limits, Outcome
from taso.search.optimize import Prepared
from taso.search.pieces import Piece, cut_loose, in_pieces, stretches
from taso.search.result import to_graph
from taso.search.state import State, check, is_costed
from taso.search.verify import relative_error

RULES = library()


def drawn(rows: int, columns: int, seed: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.random.default_rng(seed).standard_normal((rows, columns), np.float32)


def layer(graph: taso.Graph, x: taso.Value, seed: int) -> taso.Value:
    """Two products that one can be made of, of weights of its own."""
    left = graph.matmul(x, graph.new_weight(dims=(16, 8), data=drawn(16, 8, seed)))
    right = graph.matmul(x, graph.new_weight(dims=(16, 8), data=drawn(16, 8, seed + 1)))
    both = graph.concat(1, [graph.relu(graph.relu(left)), graph.tanh(right)])
    scaled = graph.mul(both, graph.new_weight(dims=(1, 16), data=drawn(1, 16, seed + 2)))
    return graph.sigmoid(graph.add(graph.transpose(graph.transpose(scaled, (1, 0)), (1, 0)), x))


def tower(layers: int) -> taso.Graph:
    graph = taso.new_graph()
    x = graph.new_input(dims=(4, 16))
    for number in range(layers):
        x = layer(graph, x, 10 * number)
    return graph


def searched(graph: taso.Graph, executor: Executor | None = None, rules: list[Rule] | None = None) -> Outcome:
    known = RULES if rules is None else rules
    return in_pieces(prepared(graph).state, Matcher(known), known, Limits(), executor, 2)


def assert_equal_outputs(prepared: Prepared, graph: taso.Graph, best: State) -> None:
    result = to_graph(best, graph, prepared.classes, taso.Graph)
    feeds = random_inputs(graph)
    found = evaluate_graph(result, feeds, wide=True)
    for name, value in evaluate_graph(graph, feeds, wide=True).items():
        assert relative_error(found[name], value) <= 1e-5


class Here(Executor):
    """An executor that does the work at once, through a pickle and back as processes do."""

    def __init__(self) -> None:
        self.done = 0

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:  # type: ignore[override]
        import pickle

        self.done += 1
        result: Future[Any] = Future()
        function, given = pickle.loads(pickle.dumps((fn, args)))
        result.set_result(pickle.loads(pickle.dumps(function(*given))))
        return result


class Dying(Executor):
    """An executor whose worker dies."""

    def map(self, fn: Callable[..., Any], *iterables: Iterable[Any], **kwargs: Any) -> Iterator[Any]:
        raise BrokenProcessPool("a process was terminated abruptly")


# ── cutting ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_stretches_hold_every_run_time_node_once_and_are_cut_at_narrow_places() -> None:
    state = prepared(tower(40)).state
    found = stretches(state)
    assert sorted(n for s in found for n in s) == sorted(n for n in state.made if is_costed(state, n))
    assert len(found) > 10 and all(len(s) <= pieces.MOST for s in found)
    for stretch in found:
        inside = set(stretch)
        read = {v for n in stretch for v in state.inputs(n) if v is not None and not state.is_constant(v)}
        assert len({v for v in read if state.producer(v) not in inside}) <= pieces.NARROW


def test_no_kernel_is_cut() -> None:
    state = prepared(tower(40)).state
    place = {n: i for i, stretch in enumerate(stretches(state)) for n in stretch}
    for anchor in state.kernel_costs:
        assert len({place[n] for n in state.setting.lowering.group(state, anchor).nodes}) == 1


def pieces_of(graph: taso.Graph) -> list[Piece]:
    state = prepared(graph).state
    return [cut_loose(state, stretch)[0] for stretch in stretches(state)]


def test_blocks_with_other_weights_are_one_piece() -> None:
    found = pieces_of(tower(40))
    assert len(found) > 10 and len(set(found)) <= 4


def test_blocks_are_told_apart_where_a_rule_could() -> None:
    graph = taso.new_graph()
    x = graph.new_input(dims=(4, 16))
    for number in range(40):
        x = graph.mul(layer(graph, x, 10 * number), graph.new_weight(dims=(), data=np.float32(1 + number % 2)))
    plain = taso.new_graph()
    y = plain.new_input(dims=(4, 16))
    for number in range(40):
        y = plain.mul(layer(plain, y, 10 * number), plain.new_weight(dims=(), data=np.float32(2)))
    assert len(set(pieces_of(graph))) > len(set(pieces_of(plain)))


def test_a_random_operator_stays_in_its_graph() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[4, 16] x) => (float[4, 16] y) '
        "{ noise = RandomNormalLike(x) s = Add(x, noise) y = Relu(s) }"
    )
    state = prepared(taso.load(model)).state
    with pytest.raises(pieces.NotAPiece, match="RandomNormalLike"):
        cut_loose(state, [n for n in state.ordered() if is_costed(state, n)])


# ── searching ────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_repeated_block_is_searched_once_and_optimized_everywhere() -> None:
    graph = tower(40)
    first = prepared(graph)
    outcome = in_pieces(first.state, Matcher(RULES), RULES, Limits())
    told = outcome.statistics.details
    assert isinstance(told["pieces"], int) and isinstance(told["distinct pieces"], int)
    assert told["pieces"] >= 4 * told["distinct pieces"]
    assert told["rewrites carried over"] == len(outcome.path) >= 80
    check(outcome.best)
    assert_equal_outputs(first, graph, outcome.best)
    alone = backtrack(first.state, Matcher(RULES), Limits())
    final = backtrack(first.state, Matcher(RULES), Limits(), earlier=outcome)
    assert final.best.cost <= alone.best.cost * (1 + 1e-9)
    assert outcome.statistics.expanded + final.statistics.expanded < alone.statistics.expanded / 4


def unrolled(steps: int, width: int = 16) -> taso.Graph:
    """A recurrent cell, step after step: in each the same weights multiply an input of its own and the state."""
    graph = taso.new_graph()
    inputs = [graph.new_input(dims=(1, width)) for _ in range(steps)]
    state = graph.new_input(dims=(1, width))
    weights = [
        [graph.new_weight(dims=(width, width), data=drawn(width, width, 2 * gate + side)) for side in (0, 1)]
        for gate in range(4)
    ]
    for x in inputs:
        a, b, c, d = (graph.mul(graph.matmul(x, w), graph.matmul(state, u)) for w, u in weights)
        left, right = graph.mul(graph.sigmoid(a), graph.tanh(b)), graph.mul(graph.relu(c), graph.sigmoid(d))
        state = graph.tanh(graph.mul(left, right))
    graph.set_outputs([("y", state)])
    return graph


def products(state: State) -> list[tuple[int, int]]:
    """Of each product of a constant the rows, and the constant."""
    found = []
    for node in state.made:
        if state.is_live(node) and state.op(node).name == "MatMul" and is_costed(state, node):
            left, right = state.inputs(node)
            if left is not None and right is not None and state.is_constant(right):
                found.append((state.symbolic_type(left).static_shape[0], right))
    return found


def test_products_of_one_weight_that_lie_in_different_pieces_become_one() -> None:
    graph, steps = unrolled(8), 8
    start = prepared(graph)
    assert len(stretches(start.state)) > 1
    outcome = in_pieces(start.state, Matcher(RULES), RULES, Limits(), verify=True)
    assert outcome.statistics.details["rewrites of several pieces"] >= steps - 1
    found = products(outcome.best)
    # those of the inputs at once, those of the states one after the other, by the same constants in each step
    assert {rows for rows, _ in found} == {1, steps}
    assert sum(rows == steps for rows, _ in found) <= 4
    constants = [constant for rows, constant in found if rows == 1]
    assert {constants.count(c) for c in constants} == {steps}
    assert outcome.best.constant_bytes <= start.state.constant_bytes
    assert_equal_outputs(start, graph, outcome.best)


def test_a_search_in_pieces_that_has_no_time_joins_nothing() -> None:
    outcome = in_pieces(prepared(unrolled(8)).state, Matcher(RULES), RULES, Limits(time_limit=0.0))
    assert outcome.path == () and outcome.statistics.details["rewrites of several pieces"] == 0


def test_a_rule_that_asks_for_contents_is_applied_where_it_holds_alone() -> None:
    graph = taso.new_graph()
    x = graph.new_input(dims=(4, 16))
    for number in range(40):
        x = graph.mul(layer(graph, x, 10 * number), graph.new_weight(dims=(), data=np.float32(1 + number % 2)))
    first = prepared(graph)
    neutral = rule("Mul(x, c) => x\nwhere filled(c, 1) and broadcasts_to(shape(c), shape(x))")
    outcome = in_pieces(first.state, Matcher([neutral]), [neutral], Limits())
    assert len(outcome.path) == 20
    assert_equal_outputs(first, graph, outcome.best)


@pytest.mark.parametrize("executor", [Here, ProcessPoolExecutor])
def test_the_result_does_not_depend_on_where_pieces_are_searched(executor: Callable[[], Executor]) -> None:
    graph = tower(30)
    here = searched(graph)
    with executor() as workers:
        there = searched(graph, workers)
    assert there.best.fingerprint == here.best.fingerprint and there.best.cost == here.best.cost
    assert [t.match.key for t in there.path] == [t.match.key for t in here.path] != []
    assert "workers" not in there.statistics.details


def test_every_kernel_is_costed_in_this_process() -> None:
    """What a worker does not know is told, costed here, and the piece searched again."""
    graph = tower(30)
    state = prepared(graph).state
    workers = Here()
    outcome = in_pieces(state, Matcher(RULES), RULES, Limits(), workers, 2)
    distinct = outcome.statistics.details["distinct pieces"]
    assert isinstance(distinct, int) and workers.done > distinct


def test_a_dying_worker_is_told_and_changes_nothing() -> None:
    graph = tower(30)
    outcome = searched(graph, Dying())
    assert outcome.best.fingerprint == searched(graph).best.fingerprint
    assert "terminated" in str(outcome.statistics.details["workers"])


def test_the_way_of_another_piece_leads_nowhere_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = tower(30)
    first = prepared(graph)
    real = pieces._Pieces._search_here
    kept: list[pieces.Found] = []

    def exchanged(self: pieces._Pieces, piece: Piece, limits: Limits) -> pieces.Found:
        kept.append(real(self, piece, limits))
        moves = kept[0].moves
        shuffled = tuple(replace(m, nodes=tuple(reversed(m.nodes)), rule=m.rule + 1) for m in moves)
        return replace(kept[-1], moves=shuffled if len(kept) % 2 else moves)

    monkeypatch.setattr(pieces._Pieces, "_search_here", exchanged)
    outcome = in_pieces(first.state, Matcher(RULES), RULES, Limits())
    check(outcome.best)
    assert_equal_outputs(first, graph, outcome.best)


def test_no_time_leaves_the_graph_as_it_is() -> None:
    state = prepared(tower(30)).state
    outcome = in_pieces(state, Matcher(RULES), RULES, Limits(time_limit=0))
    assert outcome.best is state and outcome.statistics.stopped == "time limit"


def test_seams_have_what_the_pieces_left_of_the_budget() -> None:
    search = pieces._Pieces(prepared(tower(30)).state, Matcher(RULES), RULES, Limits(budget=40), None, 1, False)
    budgets = []

    def searched(piece: Piece, limits: Limits) -> pieces.Found:
        budgets.append(limits.budget)
        return pieces.Found((), (), 500, 0, 0, "")

    search._search_here = searched  # type: ignore[method-assign]
    outcome = search.run()
    assert budgets[0] == 40 and budgets[-1] < 40
    assert sorted(set(budgets), reverse=True) == list(dict.fromkeys(budgets)), "all pieces of a wave have the same"
    assert outcome.statistics.expanded > 0


@given(SEEDS)
@FUZZ
def test_random_graphs_in_small_pieces_compute_the_same(seed: int) -> None:
    rng = random.Random(seed)
    graph = random_graph(rng) if seed % 2 else planted_graph(rng)
    first = prepared(graph, FormulaBackend())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pieces, "LEAST", 2)
        patch.setattr(pieces, "MOST", 6)
        outcome = in_pieces(first.state, Matcher(RULES), RULES, Limits())
    check(outcome.best)
    assert outcome.best.cost <= first.state.cost
    assert_equal_outputs(first, graph, outcome.best)


# ── from the outside ─────────────────────────────────────────────────────────────────────────────────────────────


def test_a_large_graph_is_searched_in_pieces_unless_that_is_not_wanted(formula_backend: FormulaBackend) -> None:
    graph = tower(30)
    results = [
        taso.optimize(graph, backend=formula_backend, never_slower=False, pieces=wanted, budget=200, workers=workers)
        for wanted, workers in ((True, None), (True, Here()), (False, None))
    ]
    told = [r.report.search_details.get("pieces") for r in results]
    assert told[0] and told[1] == told[0] and told[2] is None
    exported = [taso.export_onnx(r).SerializeToString(deterministic=True) for r in results]
    assert exported[0] == exported[1]
    assert results[0].report.cost_after <= results[2].report.cost_after * (1 + 1e-9)
    assert results[0].report.expanded < results[2].report.expanded
    assert results[0].report.verified


def test_a_small_graph_is_searched_whole(formula_backend: FormulaBackend) -> None:
    best = taso.optimize(tower(2), backend=formula_backend, never_slower=False)
    assert "pieces" not in best.report.search_details


@pytest.mark.parametrize("workers", [0, -1, 1.5, "many", True, 100000])
def test_a_number_of_workers_that_makes_no_sense_is_one_sentence(workers: object) -> None:
    with pytest.raises(taso.TasoError, match=r"workers is a whole number .*Executor") as caught:
        taso.optimize(tower(2), workers=workers)  # type: ignore[arg-type]  # wrong on purpose
    assert "\n" not in str(caught.value)
