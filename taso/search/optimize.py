"""From a graph to the fastest equal one that a search finds: the whole of `taso.optimize`."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace

from taso.backends.base import Backend, cost_key, in_model
from taso.backends.lowering import Kernel, choices_of, is_view, with_wholes
from taso.graph.errors import GraphError, InputError, TasoError
from taso.graph.graph import Graph, Value
from taso.graph.onnx_bodies import body_labels
from taso.graph.onnx_shapes import fold_shapes, freeze
from taso.graph.types import Dim, SymDim, symbols_of
from taso.rules.matcher import Matcher
from taso.rules.pattern import Exactness, Rule, Status
from taso.search.backtracking import Limits, Outcome, Progress, Taken
from taso.search.bodies import optimize_bodies
from taso.search.checkpoint import Checkpoint, Unfit
from taso.search.clock import Clock
from taso.search.costs import CostModel, PlannedCosts
from taso.search.decision import bound_graph, decide, finalists, needs_of, tell_memory, weight_bytes
from taso.search.explain import Explainer, Names, Question, questions
from taso.search.frugal import frugal
from taso.search.picturing import before_and_after
from taso.search.planning import cost_of
from taso.search.progress import busy, progress_line
from taso.search.result import Report, Rewrite
from taso.search.settings import Settings
from taso.search.state import Setting, State, initial_state
from taso.search.store import Store, load
from taso.search.strategies import Search
from taso.search.verify import compare
from taso.search.watching import Watch

log = logging.getLogger(__name__)

ALLOWED = (Exactness.EXACT, Exactness.REASSOCIATES)
UNFOLDED = 16 << 20
"""Bytes by which rewrites may make weights grow beyond twice what they were stored in."""
ADMITTED = (Status.PROVED,)
"""The statuses of rules that are taken where a user does not say otherwise."""

PHASES = (
    "preparing", "resuming", "searching", "matching", "evaluating", "costing", "measuring", "saving", "explaining",
    "planning", "verifying", "racing", "drawing",
)  # fmt: skip
"""What a search spends its time on. "costing" are formulas and the database, "measuring" is what runs on the target,
"resuming" and "saving" are for checkpoints, "planning" and "racing" are the last word, "drawing" is for the report's
pictures; "searching" is what the search does besides."""


@dataclass
class Prepared:
    """A graph in a store, with its cost: that of the state, which may be a plan's, and the `usual` one."""

    state: State
    classes: dict[Value, int]
    costs: CostModel
    sizes: dict[str, Dim]
    usual: float


def usable(
    rules: Sequence[Rule], exactness: Sequence[Exactness] = ALLOWED, statuses: Sequence[Status] = ADMITTED
) -> list[Rule]:
    """The rules that a search may take: of the statuses and no less exact than is allowed."""
    return [r for r in rules if r.status in statuses and r.exactness in exactness]


def measuring_sizes(graph: Graph, input_shapes: Mapping[str, Sequence[int]]) -> dict[str, Dim]:
    """Numbers for the symbolic dimensions: from `input_shapes` (name → shape), 1 where nothing is said.

    Raises `InputError` for a name that is no input, or a shape that does not fit it.
    """
    sizes: dict[str, Dim] = {**given_sizes(graph, input_shapes)}
    sizes.update({s: 1 for s in sorted(graph.symbols) if s not in sizes})
    return sizes


def given_sizes(graph: Graph, input_shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    """Numbers for the symbolic dimensions that `input_shapes` speaks of; raises `InputError` as `measuring_sizes`."""
    sizes: dict[str, int] = {}
    types = dict(zip(graph.input_names, (v.type for v in graph.inputs), strict=True))
    if not isinstance(input_shapes, Mapping):
        raise InputError(f"input_shapes maps the names of inputs to shapes, it cannot be {input_shapes!r}")
    for name, shape in input_shapes.items():
        if not isinstance(shape, Sequence) or isinstance(shape, str):
            raise InputError(f"input_shapes gives '{name}' {shape!r}, which is no shape")
        if name not in types:
            raise InputError(f"input_shapes names '{name}', but the inputs are {sorted(types)}")
        if not all(isinstance(size, int) and 0 < size < 1 << 31 for size in shape):
            raise InputError(f"input_shapes gives '{name}' the shape {tuple(shape)}; sizes are whole numbers above 0")
        declared = types[name].shape
        if declared is None:
            continue
        if len(declared) != len(shape):
            raise InputError(f"input '{name}' has {len(declared)} dimensions, input_shapes gives {len(shape)}")
        for dim, size in zip(declared, shape, strict=True):
            _bind(name, dim, size, sizes)
    return sizes


def frozen(graph: Graph, input_shapes: Mapping[str, Sequence[int]]) -> Graph:
    """The graph for the shapes `input_shapes` of its inputs alone.

    Raises `InputError` where a dimension of an input stays open, `ShapeError` where operators do not take these shapes.
    """
    sizes = given_sizes(graph, input_shapes)
    for name, value in zip(graph.input_names, graph.inputs, strict=True):
        t = value.type
        unsaid = sorted(s for d in t.shape or () for s in symbols_of(d) if s not in sizes)
        if unsaid or t.shape is None and t.other is None and name not in input_shapes:
            missing = f"dimension '{unsaid[0]}'" if unsaid else "shape"
            raise InputError(f"freeze=True needs the {missing} of input '{name}': say it in input_shapes")
    return freeze(graph, sizes, input_shapes)


def _bind(name: str, dim: Dim, size: int, sizes: dict[str, int]) -> None:
    if isinstance(dim, int):
        if dim != size:
            raise InputError(f"input '{name}' has a dimension of {dim}, input_shapes gives {size}")
    elif isinstance(dim, SymDim) and dim.symbol is not None:
        known = sizes.setdefault(dim.symbol, size)
        if known != size:
            raise InputError(f"input_shapes gives the dimension '{dim.symbol}' two sizes, {known} and {size}")


def prepare(graph: Graph, settings: Settings, planned: bool = False) -> Prepared:
    """Puts `graph` into a store and costs it, kernel by kernel; `planned`: as a plan will have it, further on, too."""
    sizes: dict[str, Dim] = dict(settings.sizes)
    trace = print if settings.print_measurements else None
    costs = CostModel(settings.backend, settings.database, trace, clock=settings.clock, algorithms=settings.algorithms)
    store = Store(settings.backend.lowering.layouts, graph.info.opset, sizes)
    setting = Setting(store, settings.backend.lowering, costs)
    classes, nodes = load(store, graph)
    costs.lenient = True
    outputs = [classes[v] for _, v in graph.outputs]
    state = initial_state(setting, nodes, outputs)
    usual = state.cost
    if planned:
        state = initial_state(Setting(store, settings.backend.lowering, PlannedCosts(costs)), nodes, outputs)
    costs.lenient = False
    return Prepared(state, classes, costs, sizes, usual)


def _for_plans(settings: Settings) -> bool:
    """Whether what the search finds is planned with all algorithms that there are."""
    return settings.plan and settings.backend.plans and settings.algorithms


def cost(graph: Graph, settings: Settings) -> float:
    """Seconds of one inference as the sum of the kernels that a program of the graph launches."""
    settings = replace(settings, backend=_backend_for(graph, settings))
    graph = with_wholes(graph, settings.backend.lowering)
    bound = bound_graph(graph, settings) if settings.backend.plans else None
    if bound is None:
        return prepare(graph, replace(settings, plan=False)).state.cost
    trace = print if settings.print_measurements else None
    costs = CostModel(settings.backend, settings.database, trace, clock=settings.clock, lenient=True)
    return cost_of(bound, settings.backend.lowering, costs, choices_of(graph, settings.backend.name))


def _backend_for(graph: Graph, settings: Settings) -> Backend:
    """The backend with the costs of kernels in this model; of one that has bodies it is not known what it reads."""
    if any(body_labels(node) for node in graph.operators):
        return settings.backend
    return in_model(settings.backend, weight_bytes(graph))


def optimize(graph: Graph, settings: Settings) -> tuple[Graph, Report]:
    """The best graph found and the report; `graph` itself is never changed.

    The original comes back where nothing better is found, where the outputs could not be shown equal, or where the
    whole-graph measurement does not show the best to be faster, unless time was to be traded for memory.
    """
    started, given = time.perf_counter(), graph
    settings = replace(settings, clock=Clock(), limits=settings.limits.from_now())
    settings = replace(settings, backend=_backend_for(graph, settings))
    report = Report(settings.backend.name, settings.backend.device_key())
    try:
        settings.watch.enter("preparing")
        with settings.clock("preparing"):
            graph = _folded(graph, settings, report)
        graph, settings = _with_bodies(graph, settings, report)
        best = _optimized(graph, settings, report)
    except KeyboardInterrupt:
        report.decision = "interrupted before a better graph was found and checked: the original graph"
        report.set_aside, report.rewrites = report.rewrites, []
        best = graph
    if report.shapes_folded:
        report.decision += ", with what is known of its shapes folded"
    if report.body_rewrites:
        report.decision += f", with {report.body_rewrites} rewrites in bodies"
    try:
        tell_memory(given, best, settings, report)
    except KeyboardInterrupt:
        report.messages.append("interrupted before the memory was told")
    _picture(given, best, settings, report)
    _tell_watched(settings.watch, report)
    report.total_seconds = time.perf_counter() - started
    report.phases = phases(settings.clock, report.total_seconds)
    return best, report


def _tell_watched(watch: Watch, report: Report) -> None:
    if watch.stopped:
        report.stopped = "the callback"
    watch.enter("done")
    if watch.failure:
        report.messages.append(f"the callback failed and was not called again: {watch.failure}")


def _picture(given: Graph, best: Graph, settings: Settings, report: Report) -> None:
    """Keeps in the report what both graphs look like. Nothing is measured for that."""
    backend = settings.backend
    device = backend.device_key()

    def known(kernel: Kernel) -> float | None:
        if not backend.measures:
            return backend.measure(kernel)
        return settings.database.cost(device, cost_key(backend, kernel))

    try:
        with settings.clock("drawing"):
            whole = with_wholes(given, backend.lowering)
            report.before, report.after = before_and_after(
                whole, best, lambda graph: bound_graph(graph, settings), backend.name, backend.lowering, known
            )
    except KeyboardInterrupt:
        report.messages.append("interrupted before the graphs were drawn")
    except Exception as error:
        # whatever a drawing fails with, the graph that was found is there
        log.warning("the report has no pictures of the graphs: %s", error, exc_info=not isinstance(error, TasoError))
        report.messages.append(f"the graphs could not be drawn: {error}")


def phases(clock: Clock, total: float) -> dict[str, float]:
    """Seconds per phase, in the order of a search; "other" is what none of them took of the `total`."""
    spent = {phase: clock.seconds.get(phase, 0.0) for phase in dict.fromkeys((*PHASES, *clock.seconds))}
    return {**spent, "other": max(total - sum(spent.values()), 0.0)}


def _folded(graph: Graph, settings: Settings, report: Report) -> Graph:
    """The graph with its shape arithmetic folded, which the search starts from; itself where that changes nothing."""
    if settings.limits.budget == 0:
        return graph
    try:
        folded = fold_shapes(graph)
        if folded is graph:
            return graph
        if settings.verify:
            check = compare(graph, folded, settings.sizes, settings.seed)
            if not check.passed:
                raise GraphError(check.reason)
    except TasoError as error:
        log.warning("shape arithmetic stays as it is: %s", error)
        report.messages.append(f"shape arithmetic stays as it is: {error}")
        return graph
    report.shapes_folded = len(graph.operators) - len(folded.operators)
    report.messages.append(f"what is known of shapes was folded: {report.shapes_folded} operators fewer")
    return folded


def _with_bodies(graph: Graph, settings: Settings, report: Report) -> tuple[Graph, Settings]:
    """The graph with its bodies optimized, and what that left of budget and time."""
    started = time.perf_counter()
    best = optimize_bodies(graph, settings, report, _best_body)
    if not report.bodies_expanded:
        return best, settings
    limits = replace(
        settings.limits, budget=max(settings.limits.budget - report.bodies_expanded, 0),
        time_limit=_left(settings.limits.time_limit, started),
    )  # fmt: skip
    return best, replace(settings, limits=limits)


def _best_body(graph: Graph, settings: Settings, report: Report) -> Graph:
    """`optimize` for a body: an interruption ends everything and not this body alone."""
    settings = replace(settings, explain=(), checkpoint=None, plan=False)
    graph = _folded(graph, settings, report)
    graph, settings = _with_bodies(graph, settings, report)
    return _optimized(graph, settings, report)


def _optimized(graph: Graph, settings: Settings, report: Report) -> Graph:
    """The best graph found, from operators that are whole on; `graph` where nothing better is found."""
    whole = with_wholes(graph, settings.backend.lowering)
    best = _best(whole, settings, report)
    return graph if best is whole else best


def _best(graph: Graph, settings: Settings, report: Report) -> Graph:
    started = time.perf_counter()
    with settings.clock("preparing"), busy("costing the graph", settings.progress):
        prepared = prepare(graph, settings, _for_plans(settings))
    names = Names(graph, prepared.classes, prepared.state)
    asked = questions(settings.explain, names, settings.rules)
    report.costs_are_measured = settings.backend.measures
    limits = replace(
        settings.limits, constant_bytes=2 * prepared.state.constant_bytes + UNFOLDED,
        time_limit=_left(settings.limits.time_limit, started),
    )  # fmt: skip
    settings.watch.enter("searching")
    with progress_line(limits.budget, settings.progress) as line:
        with settings.clock("searching"):
            shared, follow = settings.aim.share(_for_search(limits, settings)), settings.watch.following(line)
            prepared, outcome = _searched(graph, settings, prepared, shared, follow, report)
            limits = replace(limits, time_limit=_left(settings.limits.time_limit, started))
            needs = needs_of(graph, prepared.classes, settings)
            outcome = frugal(outcome, settings.rules, limits, settings.aim, needs, settings.check_every_step)
    settings.watch.found(outcome.statistics, outcome.initial.cost, outcome.best.cost)
    _describe(report, prepared, outcome, names, time.perf_counter() - started)
    _explain(report, Explainer(names, outcome, limits, settings.rules), asked, settings)
    try:
        settings.watch.enter("planning")
        with settings.clock("planning"), busy("planning the best graphs", settings.progress):
            left = _left(settings.limits.time_limit, started)
            found = finalists(graph, outcome, prepared.classes, prepared.costs, settings, report, left)
        _tell_costs(report, prepared)
        report.cost_after = min([f.cost for f in found], default=prepared.usual) * 1e3
        if not found:
            report.decision = _nothing_found(limits, outcome, settings)
            return graph
        settings.watch.enter("comparing")
        with busy("comparing and timing the best graphs", settings.progress):
            return decide(graph, found, settings, outcome.initial, report)
    except Exception as error:
        # whatever a kernel fails with when it runs
        log.warning("the optimized graph could not be used: %s", error, exc_info=not isinstance(error, TasoError))
        report.decision = f"the optimized graph could not be used ({error}): the original graph"
        report.set_aside, report.rewrites = report.rewrites, []
        return graph


def _searched(
    graph: Graph, settings: Settings, prepared: Prepared, limits: Limits, line: Progress | None, report: Report
) -> tuple[Prepared, Outcome]:
    """The search, which goes on from its checkpoint where there is one that fits."""
    matcher, verify = Matcher(settings.rules), settings.check_every_step
    search = Search(prepared.state, matcher, limits, line, verify, seed=settings.seed)
    if settings.checkpoint is None:
        search.rules = settings.rules if settings.pieces else ()
        with _workers(settings.workers) as (search.executor, search.workers):
            return prepared, search.run(settings.search)
    keeper = search.keeper = Checkpoint(settings.checkpoint)
    try:
        outcome = search.run(settings.search)
    except Unfit as reason:
        # what it had put into the store by then must not change the numbers of a new beginning
        keeper.refuse(reason)
        prepared = prepare(graph, settings, _for_plans(settings))
        outcome = replace(search, initial=prepared.state).run(settings.search)
    report.resumed = keeper.resumed
    report.messages += keeper.messages
    return prepared, outcome


@contextmanager
def _workers(workers: int | Executor | None) -> Iterator[tuple[Executor | None, int]]:
    """An executor for so many pieces at once; none for one, which is searched here."""
    if isinstance(workers, Executor):
        yield workers, os.cpu_count() or 1
    elif workers is None or workers == 1:
        yield None, 1
    else:
        with ProcessPoolExecutor(workers) as executor:
            yield executor, workers


def _explain(report: Report, explainer: Explainer, asked: Sequence[Question], settings: Settings) -> None:
    """Answers what was asked; an interruption leaves the rest unanswered."""
    try:
        with settings.clock("explaining"):
            for explanation in explainer.explain(asked):
                report.explanations.append(explanation)
    except KeyboardInterrupt:
        report.messages.append("interrupted while it was explained why rules did not apply")
    report.messages += explainer.messages


PLANNED = 0.5
"""Share of a time limit that is left to the plans of the best graphs, which measure kernels of their own."""


def _for_search(limits: Limits, settings: Settings) -> Limits:
    """The limits of a search behind which the best graphs are planned, where they are."""
    if limits.time_limit is None or not (settings.plan and settings.backend.plans):
        return limits
    return replace(limits, time_limit=(1 - PLANNED) * limits.time_limit)


def _left(time_limit: float | None, started: float) -> float | None:
    """What measuring the original has left of the time limit."""
    return None if time_limit is None else max(time_limit - (time.perf_counter() - started), 0.0)


def _nothing_found(limits: Limits, outcome: Outcome, settings: Settings) -> str:
    if limits.budget == 0:
        return "the budget is 0: the original graph"
    tried = outcome.statistics.candidates
    lowers = "serves" if settings.aim.frugal else "lowers the cost"
    return f"none of the {tried} rewrites that apply {lowers}: the original graph is the best found"


def _describe(report: Report, prepared: Prepared, outcome: Outcome, names: Names, seconds: float) -> None:
    statistics = outcome.statistics
    report.cost_before = prepared.usual * 1e3
    report.cost_after = outcome.best.cost * 1e3 if outcome.path else report.cost_before
    report.kernels_before = kernel_count(outcome.initial)
    report.kernels_after = kernel_count(outcome.best)
    report.rewrites = [_rewrite(t, outcome.initial, names) for t in outcome.path]
    report.near_misses = [(m.match.rule.name, m.change * 1e3) for m in outcome.near_misses]
    report.search, report.search_details = statistics.search, dict(statistics.details)
    report.expanded = statistics.expanded
    report.candidates = statistics.candidates
    report.duplicates = statistics.duplicates
    report.refused, report.reused = statistics.refused, statistics.reused
    report.course = [(second, cost * 1e3) for second, cost in statistics.course]
    report.stopped = statistics.stopped
    report.search_seconds = seconds
    if prepared.sizes and prepared.state.setting.store.sizes:
        shown = ", ".join(f"{k}={v}" for k, v in sorted(prepared.sizes.items()))
        report.messages.append(f"measured with {shown}")


def _tell_costs(report: Report, prepared: Prepared) -> None:
    """What costing came to, the plans of the finalists included."""
    report.measuring_seconds = prepared.costs.clock.seconds.get("measuring", 0.0)
    report.kernels_measured = prepared.costs.measured
    report.kernels_known = prepared.costs.known
    for kernel, reason in prepared.costs.failures.items():
        report.messages.append(f"a kernel could not be measured: {kernel}: {reason}")


def kernel_count(state: State) -> int:
    """Kernels of a state that do work: not views, and changes of layout included."""
    lowering, count = state.setting.lowering, len(state.layout_costs)
    for anchor in state.kernel_costs:
        kernel, _ = lowering.kernel(state, lowering.group(state, anchor))
        count += not is_view(kernel)
    return count


def _rewrite(taken: Taken, initial: State, names: Names) -> Rewrite:
    rule = taken.match.rule
    where = ", ".join(names.of(initial, n) for n in taken.match.nodes)
    certificate = rule.certificate.method, rule.certificate.command
    return Rewrite(
        rule.name, rule.id, where, taken.gain * 1e3, rule.exactness.value, rule.status.value, *certificate
    )


__all__ = ["Settings", "frozen", "measuring_sizes", "optimize", "prepare", "usable"]
