"""The last word: the best few graphs get their exact plans, are run beside the original, and the clock decides.

What a search sums up are costs of kernels measured alone. The finalists are the best graph, graphs on the way to it
that the costs say are nearly as good, and the original itself; each is planned exactly (`taso.search.planning`), all of
them are timed together, and the fastest that is faster than the original for sure is the result.
"""

from __future__ import annotations

import copy
import hashlib
import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from taso.backends.base import Executable
from taso.backends.lowering import Choices, choices_of
from taso.backends.ordering import planned_peak
from taso.graph.cut import unrunnable, without_unrunnable
from taso.graph.errors import BackendError, GraphError, TasoError
from taso.graph.graph import Graph, Value
from taso.graph.onnx_shapes import freeze
from taso.graph.operator import Weight
from taso.search.costs import CostModel
from taso.search.frugal import Needs, shown
from taso.search.moves import Outcome, Taken
from taso.search.planning import SECONDS, Planned, kernels_of, plan
from taso.search.result import Report, Trial, to_graph
from taso.search.rewrite import Refused, apply
from taso.search.settings import Settings
from taso.search.state import NODE_COST, Cycle, Draft, State
from taso.search.verify import (
    OVERTIME_ROUNDS,
    OVERTIME_SECONDS,
    Check,
    Feeds,
    Timing,
    check_program,
    compare,
    contest,
    overtime,
    random_feeds,
)

log = logging.getLogger(__name__)

CONTEST = 4
"""Goes up when graphs are timed otherwise: verdicts from before count no more."""
LEAST_GAIN = 1e-4
"""Share of the summed kernel costs that must be saved for a measurement of the whole graph to be worth making."""

PROMISING = 0.01
"""Share of the summed kernel costs that a graph must save for it to be timed for longer, and again in a later call,
where a contest leaves open whether it is faster than the original and nothing else is."""

NEARLY = (0.002, 0.02)
"""Shares of the best cost: the shortest way to a graph that costs at most so much more is a finalist, too."""

MOST_WEIGHTS = 1 << 29
"""Bytes of weights above which there is one finalist: each of them lays out its own."""


@dataclass
class Finalist:
    """A graph that may be the result: the rewrites that lead to it, its state, and its plan."""

    graph: Graph
    path: tuple[Taken, ...]
    state: State
    planned: Planned | None = None
    timing: Timing | None = None
    checked: bool = False

    @property
    def cost(self) -> float:
        """Seconds by the sum of its kernels."""
        return self.state.cost if self.planned is None else self.planned.cost + NODE_COST * self.state.size

    @property
    def name(self) -> str:
        """What tells it and its plan from others in the database of verdicts."""
        plan = "" if self.planned is None or self.planned.choices is None else f":{_digest(self.planned.choices)}"
        return f"{self.state.fingerprint:016x}{plan}"


def _digest(choices: Choices) -> str:
    said = (choices.operators, sorted(choices.layouts.items()), sorted(choices.entries.items(), key=repr),
            sorted(choices.algorithms.items()))  # fmt: skip
    return hashlib.sha256(repr(said).encode()).hexdigest()[:16]


# ── finalists ────────────────────────────────────────────────────────────────────────────────────────────────────


def finalists(
    graph: Graph, outcome: Outcome, classes: dict[Value, int], costs: CostModel, settings: Settings, report: Report,
    seconds: float | None = None,
) -> list[Finalist]:  # fmt: skip
    """The graphs that may be the result, the one that costs least first; the original is one where it has a plan.

    `seconds` bounds what planning may take.
    """
    started = time.perf_counter()
    found = [_made(graph, outcome, path, state, classes) for path, state in _candidates(graph, outcome, settings)]
    if not settings.plan or not settings.backend.plans or settings.limits.budget == 0:
        return found
    original = Finalist(graph, (), outcome.initial)
    try:
        for finalist in (*found, original):
            left = SECONDS if seconds is None else min(SECONDS, seconds - (time.perf_counter() - started))
            if left > 0:
                _plan(finalist, costs, settings, left)
    except KeyboardInterrupt:
        report.stopped = report.stopped or "interrupted"
        report.messages.append("interrupted while the last graphs were planned: the rest goes without plans")
    known = choices_of(graph, settings.backend.name)
    if original.planned is not None and original.planned.choices not in (None, known):
        found.append(original)
    return sorted(found, key=lambda f: f.cost)


def _candidates(graph: Graph, outcome: Outcome, settings: Settings) -> Iterator[tuple[tuple[Taken, ...], State]]:
    if not outcome.path:
        return
    yield outcome.path, outcome.best
    if not settings.never_slower or not settings.backend.measures or weight_bytes(graph) > MOST_WEIGHTS:
        return
    states = _walked(outcome)
    taken = {len(outcome.path)}
    for share in NEARLY:
        bound = (1 + share) * outcome.best.cost
        number = next((i for i, s in enumerate(states) if s.cost <= bound), 0)
        if number and number not in taken:
            taken.add(number)
            yield outcome.path[:number], states[number]


def _walked(outcome: Outcome) -> list[State]:
    """The states on the way to the best one, the original first; none where the rewrites do not lead there one by one,
    as those of an e-graph need not."""
    states = [outcome.initial]
    for taken in outcome.path:
        try:
            draft = Draft(states[-1])
            apply(taken.match, draft)
            draft.sweep()
            draft.check_acyclic()
            states.append(draft.commit())
        except (Cycle, Refused, GraphError) as reason:
            log.debug("the way to the best graph cannot be walked: %s", reason)
            return []
    return states if states[-1].fingerprint == outcome.best.fingerprint else []


def _made(
    graph: Graph, outcome: Outcome, path: tuple[Taken, ...], state: State, classes: dict[Value, int]
) -> Finalist:
    order = outcome.order if state is outcome.best else None
    return Finalist(to_graph(state, graph, classes, type(graph), order), path, state)


def weight_bytes(graph: Graph) -> int:
    """Bytes of all weights as they are in memory, those of bodies left aside."""
    weights = (n.attrs.get("data") for n in graph.nodes)
    return sum(w.type.nbytes for w in weights if isinstance(w, Weight) and w.type.static)


def _plan(finalist: Finalist, costs: CostModel, settings: Settings, seconds: float) -> None:
    """Gives a finalist its exact plan, at the sizes measured at; none where these leave sizes open."""
    bound = bound_graph(finalist.graph, settings) if not unrunnable(finalist.graph) else None
    if bound is None:
        return
    lowering = settings.backend.lowering
    finalist.planned = plan(bound, lowering, costs, seconds)
    if finalist.planned.choices is None:
        return
    # not the graph that was given, which may be the user's
    finalist.graph = copy.copy(finalist.graph)
    finalist.graph.plans[settings.backend.name] = finalist.planned.choices


def bound_graph(graph: Graph, settings: Settings) -> Graph | None:
    """The graph at the sizes measured at; None where these leave sizes open."""
    try:
        bound = freeze(graph, dict(settings.sizes), {}) if graph.symbols else graph
    except TasoError as error:
        log.info("a graph is not planned as a whole: %s", error)
        return None
    return bound if all(v.type.other is None and v.type.static for n in bound.nodes for v in n.outputs) else None


# ── the decision ─────────────────────────────────────────────────────────────────────────────────────────────────


def decide(graph: Graph, found: Sequence[Finalist], settings: Settings, original: State, report: Report) -> Graph:
    """Compares outputs and whole-graph times of the finalists (at least one) with the original's."""
    left_out = unrunnable(graph)
    if left_out:
        names = ", ".join(sorted({n.op.label for n in left_out}))
        report.messages.append(f"nothing here can run {names}: what is around was compared and measured without")
    found, traded = _affordable(graph, found, settings)
    if not found:
        report.decision = f"{len(report.rewrites)} rewrites lead to graphs that need more memory: the original graph"
        return _set_aside(graph, report)
    measured = settings.never_slower and settings.backend.measures
    if measured and not traded and report.cost_before - found[0].cost * 1e3 < LEAST_GAIN * report.cost_before:
        report.decision = f"{len(report.rewrites)} rewrites save nothing that could be measured: the original graph"
        return _set_aside(graph, report)
    chosen = found[0]
    check = _compared(graph, chosen, settings)
    _tell_check(report, check)
    if check is not None and not check.passed:
        log.warning("the optimized graph is not used: %s", check.reason)
        report.decision = f"the outputs could not be shown equal ({check.reason}): the original graph"
        return _set_aside(graph, report)
    if not measured:
        if _planned(chosen):
            _check_program(chosen, settings)
        report.decision = f"{_what(chosen)}, not measured as a whole"
        return _taken(graph, chosen, settings, report)
    try:
        with settings.clock("racing"):
            ranked = _ranked(graph, found, settings, original, report.cost_before / 1e3)
    except KeyboardInterrupt:
        report.decision = f"{_what(chosen)}; interrupted before the whole graph was measured"
        return _taken(graph, chosen, settings, report)
    report.finalists = [_trial(f) for f in found]
    return _fastest(graph, ranked, chosen, traded, settings, report)


def _fastest(
    graph: Graph, ranked: Sequence[Finalist], chosen: Finalist, traded: bool, settings: Settings, report: Report
) -> Graph:
    """Of the finalists, the fastest first, the first that is faster than the original and computes the same.

    `chosen` has been compared already. Where time is `traded` for memory, none needs to be faster.
    """
    _tell_timing(report, ranked[0])
    for finalist in ranked:
        faster = finalist.timing is not None and finalist.timing.faster
        if not faster and not traded:
            break
        check = _compared(graph, finalist, settings) if finalist is not chosen else None
        if check is not None and not check.passed:
            report.messages.append(f"{_what(finalist)}: not used, for the outputs differ: {check.reason}")
            continue
        _check_program(finalist, settings)
        if check is not None:
            _tell_check(report, check)
        _tell_timing(report, finalist)
        clock = "is measured to be faster" if faster else "is not measurably faster, which memory makes up for"
        report.decision = f"{_what(finalist)}; the whole graph {clock}"
        return _taken(graph, finalist, settings, report)
    report.decision = (
        f"{_what(chosen)}: that lowers the summed kernel costs, but the whole graph is not measurably faster: "
        "the original graph"
    )
    return _set_aside(graph, report)


def _tell_timing(report: Report, finalist: Finalist) -> None:
    timing = finalist.timing
    if timing is not None:
        report.measured_before, report.measured_after = timing.original * 1e3, timing.best * 1e3
        report.ratio_low, report.ratio_high = timing.low, timing.high
        report.quartiles = None if timing.quartiles is None else [second * 1e3 for second in timing.quartiles]


def _planned(finalist: Finalist) -> bool:
    return finalist.planned is not None and finalist.planned.choices is not None


def _what(finalist: Finalist) -> str:
    if finalist.path:
        return f"{len(finalist.path)} rewrites" + (" and a plan" if _planned(finalist) else "")
    return "no rewrite, but a plan of fusions, layouts and algorithms"


def _set_aside(graph: Graph, report: Report) -> Graph:
    report.set_aside, report.rewrites = report.rewrites, []
    return graph


def _taken(graph: Graph, finalist: Finalist, settings: Settings, report: Report) -> Graph:
    """Says in the report which graph comes back; what was found beyond it is set aside."""
    kept = len(finalist.path)
    report.set_aside, report.rewrites = report.rewrites[kept:], report.rewrites[:kept]
    report.cost_after = finalist.cost * 1e3
    report.peak_before, report.peak_after = (peak(g, settings) for g in (graph, finalist.graph))
    bound = bound_graph(without_unrunnable(finalist.graph), settings)
    if bound is not None:
        choices = choices_of(finalist.graph, settings.backend.name)
        report.kernels_after = kernels_of(bound, settings.backend.lowering, choices)
    planned = finalist.planned
    if planned is not None:
        report.plan = dict(planned.told)
        if planned.choices is not None:
            report.plan["saves_ms"] = (planned.local_cost - planned.cost) * 1e3
            for name in sorted(set(planned.choices.algorithms.values())):
                report.plan[name] = float(sum(a == name for a in planned.choices.algorithms.values()))
    return finalist.graph


def _trial(finalist: Finalist) -> Trial:
    timing = finalist.timing
    measured = None if timing is None else timing.best * 1e3
    return Trial(len(finalist.path), finalist.cost * 1e3, measured, *((None,) * 2 if timing is None else (
        timing.low, timing.high)))  # fmt: skip


def _compared(graph: Graph, finalist: Finalist, settings: Settings) -> Check | None:
    """Whether a finalist computes what the original does; None where nobody asks, or where no rewrite led to it."""
    if not settings.verify or not finalist.path:
        return None
    with settings.clock("verifying"):
        sizes = dict(settings.sizes)
        return compare(without_unrunnable(graph), without_unrunnable(finalist.graph), sizes, settings.seed)


def _tell_check(report: Report, check: Check | None) -> None:
    if check is not None:
        report.verified, report.verification, report.relative_error = check.passed, check.reason, check.error


def _check_program(finalist: Finalist, settings: Settings) -> None:
    """Raises `BackendError` where the compiled program does not compute what the graph means.

    It is asked even where the times are known from an earlier call: that one may have had other weights.
    """
    if not settings.verify or finalist.checked:
        return
    with settings.clock("verifying"):
        runnable = without_unrunnable(finalist.graph)
        feeds = random_feeds(runnable, dict(settings.sizes), settings.seed)
        _checked(finalist, settings.backend.compile(runnable, settings.threads), runnable, feeds, _precision(settings))


def _precision(settings: Settings) -> str:
    return settings.backend.lowering.precision


def _checked(finalist: Finalist, program: Executable, graph: Graph, feeds: Feeds, precision: str) -> None:
    wrong = check_program(program, graph, feeds, precision)
    if wrong:
        raise BackendError(wrong)
    finalist.checked = True


def peak(graph: Graph, settings: Settings) -> int | None:
    """Bytes of intermediate values at the sizes measured at; None where these leave sizes open."""
    bound = bound_graph(without_unrunnable(graph), settings)
    if bound is None:
        return None
    return planned_peak(bound, settings.backend.lowering, choices_of(graph, settings.backend.name))


def known_peak(graph: Graph, settings: Settings) -> int:
    """As `peak`, of the values whose sizes are known where not all of them are."""
    found = peak(graph, settings)
    return planned_peak(without_unrunnable(graph), settings.backend.lowering) if found is None else found


def needs_of(graph: Graph, classes: dict[Value, int], settings: Settings) -> Needs:
    """Bytes that the graph of a state takes, its nodes in an order."""

    def needs(state: State, order: tuple[int, ...] | None) -> int:
        return known_peak(to_graph(state, graph, classes, type(graph), order), settings)

    return needs


def _affordable(graph: Graph, found: Sequence[Finalist], settings: Settings) -> tuple[list[Finalist], bool]:
    """Of the finalists those that serve best what the search is for, and whether they may be slower for it.

    One whose plan needs more memory than it would without goes without.
    """
    aim = settings.aim
    if not aim.frugal:
        return list(found), False
    before = known_peak(graph, settings)
    thrifty = (_thrifty(f, settings) for f in found)
    needs = [(known_peak(f.graph, settings), f) for f in thrifty if f.path or _planned(f)]
    allowed = [(aim.order(after, f.cost)[0], after, f) for after, f in needs if aim.allows(before, after)]
    if not allowed:
        return [], False
    best = min(rank for rank, _, _ in allowed)
    kept = [(after, f) for rank, after, f in allowed if rank == best]
    return [f for _, f in kept], all(aim.trades(before, after) for after, _ in kept)


def _thrifty(finalist: Finalist, settings: Settings) -> Finalist:
    """The finalist without its plan, if there is one that costs memory which the aim has not got."""
    if finalist.planned is None or finalist.planned.choices is None:
        return finalist
    bare = copy.copy(finalist.graph)
    bare.plans.pop(settings.backend.name, None)
    ranks = [settings.aim.order(known_peak(g, settings), 0.0) for g in (finalist.graph, bare)]
    return finalist if ranks[0] <= ranks[1] else Finalist(bare, finalist.path, finalist.state)


def tell_memory(graph: Graph, best: Graph, settings: Settings, report: Report) -> None:
    """Says in the report what the graph that comes back needs, where that matters, and by how much a limit is missed.
    """
    aim = settings.aim
    if not aim.frugal:
        return
    report.peak_before, report.peak_after = (peak(g, settings) for g in (graph, best))
    if report.peak_after is None:
        report.messages.append("the memory of values whose sizes are not known is left out of what is compared")
    before, after = (known_peak(g, settings) for g in (graph, best))
    missed = aim.missed(after)
    if after < before:
        report.decision += f"; {shown(after)} between kernels in place of {shown(before)}"
    if missed:
        report.decision += f"; {missed}"
        report.messages.append(f"{missed}: nothing lower was found than {shown(after)}")


def _ranked(
    graph: Graph, found: Sequence[Finalist], settings: Settings, original: State, cost: float
) -> list[Finalist]:
    """Times the finalists against the original, or takes stored verdicts; gives them with the fastest first.

    `cost` is what the original costs as it runs.
    """
    device = settings.backend.device_key()
    sizes = ",".join(f"{k}={v}" for k, v in sorted(settings.sizes.items()))
    # the original may have a plan from an earlier search; the threads may be other than those the backend measures at
    own = choices_of(graph, settings.backend.name)
    plan = "" if own is None else _digest(own)
    first = f"{CONTEST}:{original.fingerprint:016x}:{sizes}:{settings.threads or ''}:{plan}"
    # the set as a whole is what was timed together
    names = [f"{f.name}:{sizes}" for f in found]
    together = hashlib.sha256(";".join(names).encode()).hexdigest()[:16] if len(names) > 1 else ""
    stored = [settings.database.verdict(device, f"{first}{together}", name) for name in names]
    if all(verdict is not None for verdict in stored):
        timings = [Timing(*verdict) for verdict in stored if verdict is not None]
        for name, timing in zip(names, timings, strict=True):
            timing.quartiles = settings.database.spread(device, f"{first}{together}", name)
    else:
        timings = _timed(graph, found, settings, cost)
        # where none is faster for sure and one should be, the machine may be quieter when it is asked again
        left_open = not any(t.faster for t in timings) and any(
            not t.decided and _promises(f, cost) for f, t in zip(found, timings, strict=True)
        )
        for name, t in () if left_open else zip(names, timings, strict=True):
            settings.database.keep_verdict(device, f"{first}{together}", name, (t.original, t.best, t.low, t.high))
            if t.quartiles is not None:
                settings.database.keep_spread(device, f"{first}{together}", name, t.quartiles)
    for finalist, timing in zip(found, timings, strict=True):
        finalist.timing = timing
    pairs = sorted(zip(found, timings, strict=True), key=lambda p: (not p[1].faster, p[1].best / p[1].original))
    return [finalist for finalist, _ in pairs]


def _promises(finalist: Finalist, cost: float) -> bool:
    """Whether the sum of its kernels is lower than `cost`, the original's, by more than a contest overlooks."""
    return finalist.cost < (1 - PROMISING) * cost


def _timed(graph: Graph, found: Sequence[Finalist], settings: Settings, cost: float) -> list[Timing]:
    """The times of all, beside the original's, which costs `cost` by the sum of its kernels.

    Where none is faster for sure, the one that seems to be and should be runs against the original for longer.
    """
    runnable = without_unrunnable(graph)
    feeds = random_feeds(runnable, dict(settings.sizes), settings.seed)
    candidates = [without_unrunnable(f.graph) for f in found]
    programs = [settings.backend.compile(g, settings.threads) for g in (runnable, *candidates)]
    if settings.verify:
        for finalist, program, candidate in zip(found, programs[1:], candidates, strict=True):
            _checked(finalist, program, candidate, feeds, _precision(settings))
    timings = contest(programs[0], programs[1:], feeds)
    open_ones = [
        i for i, t in enumerate(timings)
        if not t.decided and _promises(found[i], cost)
        and t.original + t.best < OVERTIME_SECONDS / OVERTIME_ROUNDS
    ]  # fmt: skip
    if open_ones and not any(t.faster for t in timings):
        best = max(open_ones, key=lambda i: timings[i].original / timings[i].best)
        timings[best] = overtime(programs[0], programs[1 + best], feeds)
    return timings


__all__ = ["Finalist", "bound_graph", "decide", "finalists", "needs_of", "peak", "tell_memory", "weight_bytes"]
