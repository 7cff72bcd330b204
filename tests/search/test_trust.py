"""Whatever ends a search early, the best so far comes back and the report says so; tests see what is followed."""

from __future__ import annotations

import random
import xml.etree.ElementTree as ElementTree

import numpy as np
import onnx.parser
import pytest
from searching import FormulaBackend, database, planted_graph, prepared, random_graph, random_inputs, rule

import taso
from taso.backends.lowering import Kernel
from taso.graph.errors import SearchError
from taso.graph.evaluate import evaluate_graph
from taso.rules.collection import library
from taso.rules.matcher import Matcher
from taso.search import checkpoint, memory, moves
from taso.search import optimize as search
from taso.search import state as states
from taso.search.backtracking import Backtracking
from taso.search.clock import Clock
from taso.search.moves import Evaluation, Limits, Refusal
from taso.search.optimize import PHASES, Settings
from taso.search.result import Report
from taso.search.verify import relative_error


def chain(layers: int = 8) -> taso.Graph:
    graph = taso.new_graph()
    x = graph.new_input(dims=(8, 8))
    for _ in range(layers):
        x = graph.tanh(graph.transpose(graph.relu(graph.relu(x)), (0, 1)))
    return graph


def optimized(graph: taso.Graph, **settings: object) -> taso.Graph:
    given = {"backend": FormulaBackend(), "never_slower": False, **settings}
    return taso.optimize(graph, **given)  # type: ignore[arg-type]  # settings of optimize


def assert_same(graph: taso.Graph, other: taso.Graph) -> None:
    feeds = random_inputs(graph)
    wanted, found = (evaluate_graph(g, feeds, wide=True) for g in (graph, other))
    assert all(relative_error(found[n], v) <= 1e-5 for n, v in wanted.items())


# ── what ends a search ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_memory_limit_gives_the_best_so_far_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    held = iter(range(0, 1 << 40, 1 << 20))
    monkeypatch.setattr(moves, "resident_bytes", lambda: next(held))
    graph = chain()
    whole = optimized(graph, search_memory_limit=1 << 40).report
    best = optimized(graph, search_memory_limit=3 << 20)
    report = best.report
    assert report.stopped == "memory limit" and "stopped by memory limit" in str(report)
    assert 0 < len(report.rewrites) < len(whole.rewrites) and whole.stopped == ""
    assert_same(graph, best)


def test_a_memory_limit_is_for_all_stages_together(monkeypatch: pytest.MonkeyPatch) -> None:
    # half of what is allowed is held when the second stage begins
    stages = iter([0, 2 << 20])
    held = [0]
    monkeypatch.setattr(moves, "resident_bytes", lambda: held[0])
    limits = Limits(memory=3 << 20).from_now()
    began = []
    for grown in stages:
        held[0] = grown
        search = Backtracking(prepared(chain()).state, Matcher(library()), limits)
        began.append(search._held)
        held[0] = 3 << 20
        assert search._too_large() is True
    assert began == [0, 0]
    monkeypatch.setattr(moves.os, "getpid", lambda: -1)
    assert Backtracking(prepared(chain()).state, Matcher(library()), limits)._held == 3 << 20, "a worker begins anew"


def test_without_a_memory_limit_nobody_looks_at_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves, "resident_bytes", lambda: pytest.fail("looked"))
    assert optimized(chain(2)).report.changed


def test_the_memory_of_this_process_grows_by_what_is_allocated() -> None:
    before = memory.resident_bytes()
    held = np.ones(1 << 23)
    assert memory.resident_bytes() - before > held.nbytes // 2


@pytest.mark.parametrize("limit", [-1, 1.5, "much", True])
def test_a_memory_limit_that_makes_no_sense_is_one_sentence(limit: object) -> None:
    with pytest.raises(SearchError, match="search memory limit"):
        optimized(chain(1), search_memory_limit=limit)


@pytest.mark.parametrize(
    ("error", "said"),
    [(MemoryError(), "no memory left"), (RuntimeError("a fault"), "an error (RuntimeError: a fault)"),
     (KeyboardInterrupt(), "interrupted")],
)  # fmt: skip
def test_whatever_breaks_out_of_a_search_leaves_the_best_so_far(
    error: BaseException, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached, left = Backtracking._reached, [5]

    def breaking(self: Backtracking, *given: object) -> object:
        left[0] -= 1
        if left[0] < 0:
            raise error
        return reached(self, *given)  # type: ignore[arg-type]  # as it was called

    monkeypatch.setattr(Backtracking, "_reached", breaking)
    graph = chain()
    best = optimized(graph)
    assert best.report.stopped == said and len(best.report.rewrites) == 5
    assert said in str(best.report)
    assert_same(graph, best)


class Broken(FormulaBackend):
    """A kernel of products of more than 100 columns fails with something else than the errors of this project."""

    def measure(self, kernel: Kernel) -> float:
        anchor = kernel.anchor
        if anchor is not None and anchor.op.name == "MatMul" and kernel.results[0].type.static_shape[-1] > 100:
            raise OSError("the device is gone")
        return super().measure(kernel)


def test_a_kernel_that_fails_in_any_way_while_it_is_measured_is_passed_over_and_told() -> None:
    graph = taso.new_graph()
    x = graph.identity(graph.new_input(dims=(1, 64)))
    for _ in range(2):
        graph.matmul(x, graph.new_weight(dims=(64, 64)))
    report = optimized(graph, backend=Broken()).report
    assert [r.identifier for r in report.rewrites] == ["drop-identity"]
    assert any("could not be measured" in m and "the device is gone" in m for m in report.messages)


class Racing(FormulaBackend):
    """Measures, and its programs fail when they run."""

    measures = True

    def device_key(self) -> str:
        return "fails when it runs"

    def compile(self, graph: object, threads: int | None = None) -> object:  # type: ignore[override]  # a broken one
        def fail(feeds: object) -> None:
            raise RuntimeError("segment lost")

        return fail


def test_a_kernel_that_fails_when_it_runs_gives_the_original_and_says_so() -> None:
    graph = chain(2)
    settings = Settings(Racing(), library(), database())
    best, report = search.optimize(graph, settings)
    assert best is graph and "segment lost" in report.decision and report.set_aside


# ── what tests look at ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("seed", range(8))
def test_all_that_is_followed_from_step_to_step_is_what_comes_out_anew(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TASO_CHECK_EVERY_STEP", "1")
    rng = random.Random(seed)
    graph = random_graph(rng, 14) if seed % 2 else planted_graph(rng)
    checked: list[int] = []
    whole = Backtracking._check
    monkeypatch.setattr(Backtracking, "_check", lambda self, p: checked.append(1) or whole(self, p))
    report = optimized(graph, alpha=1.05, budget=4, verify=False, search="backtracking").report
    assert report.expanded > 0 and len(checked) >= report.expanded - 1


SPOILED = {
    "fingerprint": lambda state: setattr(state, "fingerprint", state.fingerprint ^ 1),
    "witness": lambda state: setattr(state, "witness", state.witness ^ 1),
    "cost": lambda state: setattr(state, "cost", state.cost * 1.01),
    "size": lambda state: setattr(state, "size", state.size + 1),
    "constant bytes": lambda state: setattr(state, "constant_bytes", state.constant_bytes + 4),
    "kernel costs": lambda state: state.kernel_costs.popitem(),
    "readers": lambda state: state.readers.popitem(),
    "order": lambda state: setattr(state, "_order", {n: -place for n, place in state.order.items()}),
}  # fmt: skip


@pytest.mark.parametrize("what", SPOILED)
def test_a_quantity_of_a_state_that_went_wrong_is_found(what: str) -> None:
    state = prepared(chain(2)).state
    states.check(state)
    SPOILED[what](state)
    with pytest.raises(SearchError, match=what):
        states.check(state)


def search_of(graph: taso.Graph) -> Backtracking:
    return Backtracking(prepared(graph).state, Matcher(library()), Limits(budget=3), verify=True)


def test_a_match_that_was_lost_or_kept_wrongly_is_found() -> None:
    found = search_of(chain(2))
    position = found._start()
    found._check(position)
    lost = position.matches.pop(next(iter(position.matches)))
    with pytest.raises(SearchError, match="matches followed step by step"):
        found._check(position)
    position.matches[lost.key] = lost
    found._check(position)


def test_a_finding_that_does_not_hold_any_more_is_found() -> None:
    found = search_of(chain(2))
    position = found._start()
    key, match = next(iter(sorted(position.matches.items())))
    true = found._evaluated(position.state, match)
    assert isinstance(true, Evaluation)
    position.findings[key] = true
    found._check(position)
    for wrong in (
        Evaluation(true.cost + 1e-6, true.fingerprint, true.witness, true.size, 0, true.footprint, true.crowded),
        Evaluation(true.cost, true.fingerprint, true.witness, true.size + 1, 0, true.footprint, true.crowded),
        Refusal("not now", true.footprint),
    ):
        position.findings[key] = wrong
        with pytest.raises(SearchError, match="what was found out about"):
            found._check(position)


def test_a_wrong_step_ends_a_checked_search_with_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states.Draft, "fingerprint", lambda self: self.parent.fingerprint + 1)
    assert optimized(chain(2)).report.expanded > 0
    monkeypatch.setenv("TASO_CHECK_EVERY_STEP", "1")
    with pytest.raises(SearchError, match="fingerprint"):
        optimized(chain(2))


# ── what is told ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_every_second_belongs_to_one_phase(tmp_path: object) -> None:
    report = optimized(chain(), explain="relu-twice", checkpoint=f"{tmp_path}/c").report
    assert list(report.phases) == [*PHASES, "other"]
    assert {phase for phase, seconds in report.phases.items() if not seconds} <= {"measuring", "racing", "other"}
    assert sum(report.phases.values()) == pytest.approx(report.total_seconds, rel=1e-6)
    assert all(phase in str(report) for phase in PHASES)


def test_a_phase_within_another_stops_the_outer_one(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("taso.search.clock.time.perf_counter", lambda: now[0])
    clock = Clock()
    with clock("outer"):
        now[0] += 1.0
        with pytest.raises(ValueError), clock("inner"):
            now[0] += 10.0
            raise ValueError
        now[0] += 100.0
    now[0] += 1000.0
    with clock("inner"):
        now[0] += 20.0
    assert clock.seconds == {"outer": 101.0, "inner": 30.0}


def test_a_report_comes_back_from_its_data() -> None:
    wild = Report("b", "d", relative_error=float("inf"), near_misses=[("r", 0.5)], course=[(0.0, 2.0), (0.1, 1.0)])
    wild.peak_before = 12
    for report in (wild, optimized(chain(2)).report, optimized(chain(1), budget=0).report, Report("b", "d")):
        again = Report.from_json(report.to_json())
        assert again == report and again.to_dict() == report.to_dict() and str(again) == str(report)
    assert "Infinity" not in wild.to_json()


@pytest.mark.parametrize(
    "change",
    [
        {"unknown": 1}, {"backend": 3}, {"expanded": "many"}, {"rewrites": [{"rule": "r"}]}, {"rewrites": "none"},
        {"course": [[1]]}, {"cost_before": "much"}, {"explanations": [3]}, {"phases": {"a": "b"}}, {"messages": None},
    ],
)  # fmt: skip
def test_data_that_is_no_report_is_one_sentence(change: dict[str, object]) -> None:
    data = {**Report("b", "d").to_dict(), **change}
    with pytest.raises(SearchError, match="not the data of a report"):
        Report.from_dict(data)
    for text in ("", "[]", "{", "nul"):
        with pytest.raises(SearchError, match="not .*report"):
            Report.from_json(text)


def test_the_picture_shows_each_better_graph_and_needs_nothing_else() -> None:
    report = optimized(chain()).report
    svg = report.course_svg()
    tree = ElementTree.fromstring(svg)
    space = "{http://www.w3.org/2000/svg}"
    assert tree.tag == f"{space}svg"
    assert len(tree.findall(f"{space}circle")) == len(report.course) > 5
    heights = [float(c.get("cy", "")) for c in tree.iter(f"{space}circle")]
    assert heights == sorted(heights)
    assert "href" not in svg and "<script" not in svg and "url(" not in svg


@pytest.mark.parametrize(
    "course", [[], [(0.0, 1.0)], [(0.0, 0.0)], [(0.0, 5.0), (0.0, 4.0)], [(1e-9, 1e-12), (5e3, 1e-13)]]
)
def test_a_picture_of_any_course_is_whole(course: list[tuple[float, float]]) -> None:
    svg = Report("<back & end>", "d", course=course).course_svg()
    ElementTree.fromstring(svg)
    assert "nan" not in svg


def test_only_whole_searches_are_kept(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    monkeypatch.setattr(checkpoint, "write", lambda path, content: written.append(path))
    keeper = checkpoint.Checkpoint(f"{tmp_path}/c")
    found = search_of(chain(1))
    found.run()
    found.whole = False
    keeper.keep(found, last=True)
    assert written == []
    found.whole = True
    keeper.keep(found, last=True)
    assert len(written) == 1


def test_a_result_does_not_depend_on_rules_that_do_not_apply() -> None:
    model = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[4] x) => (float[4] y) { a = Relu (x) y = Relu (a) }'
    )
    alone = taso.optimize(model, backend=FormulaBackend(), never_slower=False, rules=rule("Relu(Relu(x)) => Relu(x)"))
    whole = taso.optimize(model, backend=FormulaBackend(), never_slower=False)
    assert taso.export_onnx(alone).SerializeToString() == taso.export_onnx(whole).SerializeToString()
