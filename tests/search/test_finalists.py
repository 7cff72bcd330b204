"""The best few graphs are planned and timed together, the clock decides between them, and the verdict is kept."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from searching import by_id
from test_decisions import Clock, Timed, TimedBackend

import taso
from taso.backends.costs import CostDatabase
from taso.backends.lowering import Choices, Fusion, Kernel, Layouts, Lowering
from taso.backends.reference import ReferenceBackend
from taso.graph.graph import Graph
from taso.search import decision, integer, verify
from taso.search import optimize as search
from taso.search.backtracking import Limits
from taso.search.optimize import Settings
from taso.search.result import Report
from taso.search.verify import Check, contest


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(verify, "time", made)
    return made


def chain() -> taso.Graph:
    """A transpose of a large tensor that does nothing, and behind it a small one."""
    graph = taso.new_graph()
    large = graph.transpose(graph.new_input(dims=(400, 400)), (0, 1))
    small = graph.transpose(graph.new_input(dims=(24, 16)), (0, 1))
    graph.set_outputs([("large", graph.tanh(large)), ("small", graph.tanh(small))])
    return graph


def transposes(graph: Graph) -> int:
    return sum(node.op.name == "Transpose" for node in graph.nodes)


def decided(backend: ReferenceBackend, folder: Path, graph: taso.Graph) -> tuple[Graph, Report]:
    return search.optimize(graph, Settings(backend, [by_id()["drop-transpose"]], CostDatabase(folder)))


@pytest.mark.parametrize("of_both, of_one, left", [(1.0, 2.0, 0), (2.0, 1.0, 1), (3.0, 1.5, 1)])
def test_of_the_finalists_the_one_that_is_measured_to_be_faster_is_the_result(
    of_both: float, of_one: float, left: int, clock: Clock, tmp_path: Path
) -> None:
    backend = TimedBackend(clock, lambda g: (of_both, of_one, 2.5)[transposes(g)])
    best, report = decided(backend, tmp_path, chain())
    # without the small transpose is the cheapest by its kernels, and with it nearly as cheap
    assert [t.rewrites for t in report.finalists] == [2, 1]
    assert report.finalists[0].predicted_ms < report.finalists[1].predicted_ms
    assert [t.measured_ms for t in report.finalists] == [of_both * 1e3, of_one * 1e3]
    assert transposes(best) == left
    assert len(report.rewrites) == 2 - left and len(report.set_aside) == left
    assert report.measured_after == min(of_both, of_one) * 1e3
    assert report.cost_after == report.finalists[left].predicted_ms


def test_where_no_finalist_is_faster_the_original_comes_back(clock: Clock, tmp_path: Path) -> None:
    graph = chain()
    best, report = decided(TimedBackend(clock, lambda g: 1.0 if transposes(g) == 2 else 1.1), tmp_path, graph)
    assert best is graph and not report.rewrites and len(report.set_aside) == 2 and len(report.finalists) == 2


def test_a_second_call_times_nothing_and_decides_the_same(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = TimedBackend(clock, lambda g: (2.0, 1.0, 2.5)[transposes(g)])
    _, first = decided(backend, tmp_path, chain())
    monkeypatch.setattr(decision, "contest", lambda *given: pytest.fail("timed again"))
    best, second = decided(backend, tmp_path, chain())
    assert transposes(best) == 1 and second.decision == first.decision
    assert second.finalists == first.finalists and second.rewrites == first.rewrites


def test_a_program_is_checked_even_where_its_time_is_known(clock: Clock, tmp_path: Path) -> None:
    backend = TimedBackend(clock, lambda g: 1.0 + transposes(g), factor=2.0)
    settings = Settings(backend, [by_id()["drop-transpose"]], CostDatabase(tmp_path), verify=False)
    assert transposes(search.optimize(chain(), settings)[0]) == 0
    graph = chain()
    best, report = decided(backend, tmp_path, graph)
    assert best is graph and "of the compiled program is off by" in report.decision and not report.rewrites


def test_a_finalist_that_differs_is_passed_over_for_the_next_and_the_report_says_so(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def compared(original: Graph, best: Graph, *given: object) -> Check:
        return Check(transposes(best) == 0, 0.0 if transposes(best) == 0 else 1.0, "different on purpose", 2)

    monkeypatch.setattr(decision, "compare", compared)
    backend = TimedBackend(clock, lambda g: (2.0, 1.0, 2.5)[transposes(g)])
    best, report = decided(backend, tmp_path, chain())
    assert transposes(best) == 0 and report.verified and report.measured_after == 2000.0
    assert any("not used, for the outputs differ: different on purpose" in said for said in report.messages)


def test_an_early_end_of_a_contest_takes_more_than_luck(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of programs that take the same time, none is found faster more often than the interval says."""
    chance, faster = random.Random(0), 0
    for _ in range(300):
        own = Clock()
        monkeypatch.setattr(verify, "time", own)
        programs = [Noisy(own, chance), Noisy(own, chance)]
        faster += contest(programs[0], programs[1:], {}, seconds=0.3)[0].faster  # type: ignore[arg-type]  # a program
    assert faster <= 15


class Trembling(TimedBackend):
    """Takes as long for all graphs, but that in `won` of 20 runs what has lost a Transpose is faster, else slower."""

    def __init__(self, clock: Clock, won: int) -> None:
        super().__init__(clock, lambda graph: 0.06)
        self._won = won

    def compile(self, graph: Graph, threads: int | None = None) -> Timed:
        if transposes(graph) == 2:
            return Timed(graph, self.clock, 0.06)
        return Timed(graph, self.clock, *(0.05 if i * self._won % 20 < self._won else 0.07 for i in range(20)))


@pytest.mark.parametrize("won", [13, 10])
def test_a_graph_that_promises_more_than_a_contest_shows_is_timed_for_longer(
    won: int, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    longer: list[verify.Timing] = []

    def recorded(*given: object) -> verify.Timing:
        longer.append(verify.overtime(*given))  # type: ignore[arg-type]  # what it is given
        return longer[-1]

    monkeypatch.setattr(decision, "overtime", recorded)
    best, report = decided(Trembling(clock, won), tmp_path, chain())
    assert len(longer) == 1 and longer[0].rounds >= 70
    assert (transposes(best) < 2) == longer[0].faster == (won == 13)
    if longer[0].faster:
        assert (report.measured_after, report.ratio_low) == (longer[0].best * 1e3, longer[0].low)


def test_what_promises_next_to_nothing_is_not_timed_for_longer(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decision, "PROMISING", 1.0)
    monkeypatch.setattr(decision, "overtime", lambda *given: pytest.fail("timed for longer"))
    assert decided(Trembling(clock, 13), tmp_path, chain())[1].set_aside


@pytest.mark.parametrize("promising, taken", [(decision.PROMISING, True), (1.0, False)])
def test_what_a_contest_left_open_is_timed_again_where_it_promises_something(
    promising: float, taken: bool, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decision, "PROMISING", promising)
    assert decided(Trembling(clock, 10), tmp_path, chain())[1].set_aside
    # the machine is quiet now
    steady = TimedBackend(clock, lambda g: (1.0, 1.5, 2.0)[transposes(g)])
    best, report = decided(steady, tmp_path, chain())
    assert (transposes(best) == 0) == taken == bool(report.rewrites)


def test_a_contest_that_one_of_several_wins_is_not_held_again_for_those_that_it_leaves_open(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held: list[list[verify.Timing]] = []

    def mixed(*given: object) -> list[verify.Timing]:
        held.append([verify.Timing(1.0, 0.99, 0.9, 1.1), verify.Timing(1.0, 0.5, 1.9, 2.1)])
        return held[-1]

    monkeypatch.setattr(decision, "contest", mixed)
    backend = TimedBackend(clock, lambda g: 1.0)
    for _ in range(2):
        best, report = decided(backend, tmp_path, chain())
        assert transposes(best) == 1 and len(report.finalists) == 2
    assert len(held) == 1


def test_programs_that_run_too_long_are_not_timed_for_longer(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decision, "overtime", lambda *given: pytest.fail("timed for longer"))
    slow = Trembling(clock, 13)
    monkeypatch.setattr(decision, "OVERTIME_SECONDS", 1.0)
    assert decided(slow, tmp_path, chain())[1].set_aside


class Noisy:
    """A program whose time varies by three in a hundred."""

    def __init__(self, clock: Clock, chance: random.Random) -> None:
        self._clock = clock
        self._chance = chance

    def __call__(self, feeds: object) -> dict[str, object]:
        self._clock.now += 1e-3 * (1 + self._chance.gauss(0, 0.03))
        return {}


def test_a_graph_that_has_its_plan_already_is_not_said_to_be_faster_by_it(clock: Clock, tmp_path: Path) -> None:
    backend = Planning(clock, lambda g: 1.0 if planned(g) else 2.0)
    best, first = decided(backend, tmp_path, product())
    assert planned(best) and first.decision.endswith("measured to be faster")
    again, second = decided(backend, tmp_path, best)  # type: ignore[arg-type]  # made of a public graph
    assert again is best and not second.finalists and "measured to be faster" not in second.decision


def test_a_report_of_finalists_is_the_same_from_its_data(clock: Clock, tmp_path: Path) -> None:
    _, report = decided(TimedBackend(clock, lambda g: 1.0 + transposes(g)), tmp_path, chain())
    assert report.finalists and Report.from_json(report.to_json()) == report
    assert "finalists, predicted and measured: 2 rewrites" in report.summary()


def test_a_contest_gives_none_of_many_an_advantage_by_its_place(clock: Clock) -> None:
    graph = chain()
    feeds = verify.random_feeds(graph, {}, 0)
    programs = [Timed(graph, clock, seconds) for seconds in (2.0, 1.0, 4.0, 2.0)]
    timings = contest(programs[0], programs[1:], feeds)
    assert [(t.original, t.best, t.low, t.high) for t in timings] == [
        (2.0, 1.0, 2.0, 2.0), (2.0, 4.0, 0.5, 0.5), (2.0, 2.0, 1.0, 1.0),
    ]  # fmt: skip
    assert len({p.runs for p in programs}) == 1


def test_a_contest_ends_when_all_are_decided(clock: Clock) -> None:
    graph = chain()
    feeds = verify.random_feeds(graph, {}, 0)
    clear = contest(Timed(graph, clock, 2e-3), [Timed(graph, clock, 1e-3), Timed(graph, clock, 3e-3)], feeds)
    open_one = contest(Timed(graph, clock, 2e-3), [Timed(graph, clock, 1e-3), Timed(graph, clock, 2e-3)], feeds)
    assert clear[0].rounds < open_one[0].rounds


# ── plans ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Planning(TimedBackend):
    """Follows plans, and has a second way to compute products, by which they take half as long."""

    plans = True

    def __init__(self, clock: Clock, takes: Callable[[Graph], float]) -> None:
        super().__init__(clock, takes)
        self.lowering = Lowering(Layouts(16), Fusion(), _another)

    def measure(self, kernel: Kernel) -> float:
        usual = super().measure(replace(kernel, algorithm=""))
        return usual / 2 if kernel.algorithm else usual


def _another(kernel: Kernel) -> tuple[str, ...]:
    return ("another",) if kernel.anchor is not None and kernel.anchor.op.name == "MatMul" else ()


def product() -> taso.Graph:
    graph = taso.new_graph()
    graph.matmul(graph.new_input(dims=(256, 256)), graph.new_weight(dims=(256, 256)))
    return graph


def planned(graph: Graph) -> bool:
    return "formula" in graph.plans


@pytest.mark.parametrize("seconds, taken", [(1.0, True), (2.0, False)])
@pytest.mark.parametrize("solver", [True, False])
def test_a_graph_without_rewrites_may_still_get_a_plan(
    seconds: float, taken: bool, solver: bool, clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not solver:
        monkeypatch.setattr(integer, "solver", lambda: None)
    graph = product()
    best, report = decided(Planning(clock, lambda g: seconds if planned(g) else 2.0), tmp_path, graph)
    assert planned(best) == taken and not planned(graph) and not report.rewrites
    assert ("plan of fusions, layouts and algorithms" in report.decision) and report.plan.get("another", 0) == taken
    assert report.decision.endswith("measured to be faster") == taken
    assert Report.from_json(report.to_json()) == report


def test_nothing_is_planned_for_a_backend_that_follows_no_plan(clock: Clock, tmp_path: Path) -> None:
    backend = Planning(clock, lambda g: 1.0)
    backend.plans = False
    graph = product()
    best, report = decided(backend, tmp_path, graph)
    assert best is graph and not report.finalists and "none of the" in report.decision


def test_nothing_is_planned_without_a_budget(clock: Clock, tmp_path: Path) -> None:
    graph = product()
    settings = Settings(Planning(clock, lambda g: 1.0), [], CostDatabase(tmp_path))
    settings.limits.budget = 0
    best, report = search.optimize(graph, settings)
    assert best is graph and report.decision == "the budget is 0: the original graph"


def test_an_interrupt_while_planning_leaves_the_rewrites(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*given: object) -> Choices:
        raise KeyboardInterrupt

    monkeypatch.setattr("taso.search.decision.plan", interrupted)
    best, report = decided(Planning(clock, lambda g: 1.0 + transposes(g)), tmp_path, chain())
    assert transposes(best) == 0 and not planned(best) and len(report.rewrites) == 2


def test_half_of_a_time_limit_is_left_to_plans_where_there_are_any(
    clock: Clock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[float | None] = []
    searched = search._searched

    def recorded(graph: Graph, settings: Settings, prepared: object, limits: Limits, *more: object) -> object:
        given.append(limits.time_limit)
        return searched(graph, settings, prepared, limits, *more)  # type: ignore[arg-type]  # what it is given

    monkeypatch.setattr(search, "_searched", recorded)
    for backend in (Planning(clock, lambda g: 1.0), TimedBackend(clock, lambda g: 1.0)):
        for seconds in (60.0, None):
            limits = Limits(time_limit=seconds)
            search.optimize(chain(), Settings(backend, [by_id()["drop-transpose"]], CostDatabase(tmp_path), limits))
    planned, unlimited, bare, bare_unlimited = given
    assert unlimited is None and bare_unlimited is None
    assert planned is not None and bare is not None
    assert planned == pytest.approx(30, abs=1) and bare == pytest.approx(60, abs=1)
