"""Large graphs in pieces: cut at narrow places, each distinct piece searched once, what is found applied everywhere.

A piece is a stretch of run-time nodes with the constants that it reads, cut loose from its graph: weights are known by
type, and by content only as far as rules ask for it (whether all elements are one number). Pieces that are equal so are
repeated blocks, whatever their weights hold. A piece is searched by itself, in this process or on an executor, and the
path of rewrites comes back by positions in the piece. It is walked again in the whole graph, where each rewrite must be
a match of its own, so that nothing rests on the pieces being alike but the time it takes.

Before that come rewrites of places in different pieces that share nothing but what they read, such as the products of
many inputs with one weight: no piece shows them, and what is done in a piece may take the weight away. Then the pieces
are searched, then the seams: each two neighbours of the second cut as one piece. What a search of a piece costs no
kernel is measured for: unknown kernels are told, measured where nothing else runs, and the piece is searched again, so
that the result does not depend on how many pieces are searched at once.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import pickle
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from typing import Union

import numpy as np

from taso.backends.lowering import Kernel, Lowering
from taso.backends.reference import ReferenceBackend
from taso.graph.errors import GraphError, SearchError
from taso.graph.onnx_weights import UNSTORED, Filled
from taso.graph.operator import Array, Attrs, AttrValue, Operator, Trait, Weight
from taso.graph.ops import INPUT, WEIGHT
from taso.graph.types import Dim, TensorType
from taso.rules.constants import ConstantWeight, constant_weight
from taso.rules.matcher import CompiledRule, Match, Matcher
from taso.rules.pattern import Rule
from taso.search.backtracking import backtrack
from taso.search.clock import Clock
from taso.search.costs import Costs
from taso.search.moves import IMPROVEMENT, Limits, Outcome, Progress, Statistics, Taken
from taso.search.rewrite import Refused, apply
from taso.search.state import MOST_CONTENT, Cycle, Draft, Setting, State, check, initial_state, is_costed
from taso.search.store import Store

log = logging.getLogger(__name__)

FROM = 150
"""Run-time nodes from which a graph is searched in pieces first."""

LEAST, MOST = 8, 48
"""Run-time nodes of a piece: at least so many, and no more where there is a narrow place."""

NARROW = 3
"""Values that may cross a cut."""

_ROUNDS = 12


# ── a piece by itself ────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Constant:
    """A weight as far as rules can tell it from others: `number` is what all elements are, in bytes, if that is so.

    `op` and `attrs` are those of a weight that a rule has made; `stored` is false of one that takes no room in a file.
    """

    type: TensorType
    number: bytes | None = None
    op: Operator | None = None
    attrs: Attrs | None = None
    stored: bool = True


@dataclass(frozen=True)
class Step:
    """A node of a piece; inputs are values of the piece by number, in the order in which they are made."""

    op: Operator
    attrs: Attrs | None
    inputs: tuple[int | None, ...]
    types: tuple[TensorType, ...]
    constant: Constant | None = None
    layout: str = ""


@dataclass(frozen=True)
class Piece:
    """A stretch of a graph: its nodes, sources first, and the values that are used outside. Equal pieces are twins."""

    steps: tuple[Step, ...]
    outputs: tuple[int, ...]


class NotAPiece(Exception):
    """A stretch holds what cannot be cut loose."""


def cut_loose(state: State, stretch: Sequence[int]) -> tuple[Piece, list[int]]:
    """The piece that some run-time nodes make, in order, and the class of each of its values.

    Raises `NotAPiece` where a node draws random numbers or holds tensors in its attributes.
    """
    cutting = _Cutting(state, stretch)
    for node in stretch:
        for value in state.inputs(node):
            if value is not None and value not in cutting.numbers:
                cutting.source(value)
        cutting.node(node)
    inside = set(stretch)
    used = [
        value for node in stretch for value in state.outputs(node)
        if state.is_output(value) or any(reader not in inside for reader in state.consumers(value))
    ]  # fmt: skip
    return Piece(tuple(cutting.steps), tuple(cutting.numbers[v] for v in used)), cutting.classes


class _Cutting:
    def __init__(self, state: State, stretch: Sequence[int]) -> None:
        self._state = state
        self._inside = set(stretch)
        self.steps: list[Step] = []
        self.numbers: dict[int, int] = {}
        self.classes: list[int] = []

    def _number(self, values: Sequence[int]) -> None:
        for value in values:
            self.numbers[value] = len(self.classes)
            self.classes.append(value)

    def source(self, value: int) -> None:
        """A value from outside, or a constant with all that it is made of."""
        state = self._state
        maker = state.producer(value)
        if maker in self._inside:
            raise NotAPiece("a node comes before what it reads")
        if not state.is_constant(value):
            name = Attrs({"name": f"value {len(self.classes)}"})
            self.steps.append(Step(INPUT, name, (), (state.symbolic_type(value),), layout=state.layout(value)))
            self._number((value,))
            return
        for needed in state.inputs(maker):
            if needed is not None and needed not in self.numbers:
                self.source(needed)
        self.node(maker)

    def node(self, node: int) -> None:
        state = self._state
        entry = state.setting.store.entries[node]
        weight = entry.attrs.get("data") if entry.op is WEIGHT else None
        if entry.op.has(Trait.RANDOM) or weight is None and any(map(_holds_weight, entry.attrs.values())):
            raise NotAPiece(f"{entry.op.name} cannot be cut loose")
        inputs = tuple(None if c is None else self.numbers[c] for c in entry.inputs)
        if isinstance(weight, Weight):
            self.steps.append(Step(WEIGHT, None, inputs, entry.types, _constant(weight)))
        else:
            self.steps.append(Step(entry.op, entry.attrs, inputs, entry.types))
        self._number(state.outputs(node))


def _holds_weight(value: AttrValue) -> bool:
    return isinstance(value, Weight) or isinstance(value, tuple) and any(map(_holds_weight, value))


def _constant(weight: Weight) -> Constant:
    if isinstance(weight, ConstantWeight):
        return Constant(weight.type, None, weight.op, weight.attrs)
    stored, t = not isinstance(weight.original, Filled), weight.type
    if t.other is not None or not t.static or t.size > MOST_CONTENT or not (t.dtype.is_float or t.dtype.is_integer):
        return Constant(t, stored=stored)
    array = weight.array()
    same = array.size > 0 and bool(np.all(array == array.flat[0]))
    return Constant(weight.type, array.flat[0].tobytes() if same else None, stored=stored)


def _stand_in(constant: Constant) -> Weight:
    """A weight of which the rules say the same as of the one it stands for."""
    if constant.op is not None and constant.attrs is not None:
        return constant_weight(constant.op, constant.attrs)
    t = constant.type

    def values() -> Array:
        dtype = t.dtype.numpy
        if constant.number is not None:
            return np.full(t.static_shape, np.frombuffer(constant.number, dtype)[0])
        return (np.arange(t.size) % 2).astype(dtype).reshape(t.static_shape)

    return Weight(t, values, original=None if constant.stored else UNSTORED)


def standing_alone(piece: Piece, setting: Setting) -> tuple[State, list[int]]:
    """The state of a piece in the empty store of `setting`, and the class of each of its values."""
    store, nodes, classes = setting.store, list[int](), list[int]()
    for step in piece.steps:
        inputs = tuple(None if i is None else classes[i] for i in step.inputs)
        attrs = step.attrs
        if step.constant is not None:
            attrs = Attrs({"data": _stand_in(step.constant)})
        given = step.types if step.op.has(Trait.SOURCE) or step.op.has(Trait.OPAQUE) else None
        label = "" if inputs else f"source {len(nodes)}"
        node = store.intern(step.op, attrs or Attrs({}), inputs, given, label=label)
        nodes.append(node)
        made = [store.natural(node, i) for i in range(len(store.entries[node].types))]
        if step.layout:
            store.class_layouts[made[0]] = step.layout
        classes += made
    return initial_state(setting, nodes, [classes[v] for v in piece.outputs]), classes


# ── searching a piece ────────────────────────────────────────────────────────────────────────────────────────────

Name = Union[int, tuple[int, int, int]]
"""A value of a piece: by its number, or (rewrite, new node, output) of what rewrites have made."""


@dataclass(frozen=True)
class Made:
    """A node that a rewrite has made, and what its outputs are called."""

    op: Operator
    attrs: Attrs | None
    inputs: tuple[Name | None, ...]
    outputs: tuple[Name, ...]
    constant: Constant | None = None


@dataclass(frozen=True)
class Move:
    """A rewrite of a piece: the rule by its number, the first output of each matched node, and what it makes."""

    rule: int
    nodes: tuple[Name, ...]
    variables: tuple[Name, ...]
    made: tuple[Made, ...]


@dataclass(frozen=True)
class Task:
    """All that it takes to search a piece anywhere. `rules` are pickled once for all pieces."""

    piece: Piece
    rules: bytes
    lowering: Lowering
    opset: int
    sizes: tuple[tuple[str, Dim], ...]
    limits: Limits
    verify: bool
    known: Mapping[Kernel, float]


@dataclass(frozen=True)
class Found:
    """The way to the best of a piece, the kernels whose costs were not known, and how many graphs were expanded."""

    moves: tuple[Move, ...]
    unknown: tuple[Kernel, ...]
    expanded: int
    candidates: int
    duplicates: int
    stopped: str


@dataclass
class KnownCosts:
    """Costs of kernels that are known; where one is not, a formula stands in and the kernel is noted."""

    known: Mapping[Kernel, float]
    clock: Clock = field(default_factory=Clock)
    device: str = ""
    unknown: dict[Kernel, None] = field(default_factory=dict)

    def kernel(self, kernel: Kernel) -> float:
        """Seconds of one run."""
        found = self.known.get(kernel)
        if found is None:
            self.unknown[kernel] = None
            return ReferenceBackend().measure(kernel)
        return found


@lru_cache(maxsize=2)
def _matcher(rules: bytes) -> Matcher:
    return Matcher(pickle.loads(rules))


def search_piece(task: Task) -> Found:
    """Searches a piece; works in any process."""
    costs = KnownCosts(task.known)
    store = Store(task.lowering.layouts, task.opset, dict(task.sizes))
    start, classes = standing_alone(task.piece, Setting(store, task.lowering, costs))
    return _searched(start, classes, _matcher(task.rules), task.limits, task.verify, costs)


def _searched(
    start: State, classes: Sequence[int], matcher: Matcher, limits: Limits, verify: bool, costs: KnownCosts | None
) -> Found:
    outcome = backtrack(start, matcher, limits, verify=verify, thorough=False)
    told = outcome.statistics
    return Found(
        tuple(_moves(start, classes, outcome.path)), () if costs is None else tuple(costs.unknown), told.expanded,
        told.candidates, told.duplicates, told.stopped,
    )  # fmt: skip


def _moves(state: State, classes: Sequence[int], path: Sequence[Taken]) -> Iterator[Move]:
    """A path in terms of what the piece and its rewrites have made."""
    names: dict[int, Name] = {c: i for i, c in enumerate(classes)}
    entries = state.setting.store.entries
    for number, taken in enumerate(path):
        match = taken.match
        nodes = tuple(names[state.outputs(n)[0]] for n in match.nodes)
        variables = tuple(names[v] for v in match.variables.values())
        draft = _carried_out(state, match)
        after, made = draft.commit(), list[Made]()
        for place, node in enumerate(draft.new_nodes):
            if not after.is_live(node):
                continue
            entry = entries[node]
            inputs = tuple(None if c is None else names[c] for c in entry.inputs)
            for output, value in enumerate(after.outputs(node)):
                names.setdefault(value, (number, place, output))
            weight = entry.attrs.get("data") if entry.op is WEIGHT else None
            constant = _constant(weight) if isinstance(weight, Weight) else None
            outputs = tuple(names[v] for v in after.outputs(node))
            made.append(Made(entry.op, None if constant else entry.attrs, inputs, outputs, constant))
        yield Move(match.number, nodes, variables, tuple(made))
        state = after


def _carried_out(state: State, match: Match) -> Draft:
    draft = Draft(state)
    apply(match, draft)
    draft.sweep()
    draft.check_acyclic()
    return draft


# ── walking a piece's way in the whole graph ─────────────────────────────────────────────────────────────────────


class _Lost(Exception):
    """The whole graph is no longer what the piece was."""


class _Whole:
    """The whole graph, in which the ways of its pieces are walked one after the other."""

    def __init__(self, state: State, path: Sequence[Taken], matcher: Matcher, limits: Limits) -> None:
        self.state, self.path = state, list(path)
        self._matcher, self._limits = matcher, limits
        self._aliases: dict[int, int] = {}
        # values that places in several pieces were made to share
        self.joined: set[int] = set()

    def walk(self, moves: Sequence[Move], classes: Sequence[int]) -> int:
        """Walks as far as it gets, and stays where the graph is the cheapest; gives the rewrites taken."""
        named: dict[Name, int] = {i: self._now(c) for i, c in enumerate(classes)}
        state, path, aliases = self.state, list[Taken](), dict(self._aliases)
        best, best_path, best_aliases = state, list[Taken](), self._aliases
        for move in moves:
            try:
                match = self._match(state, move, named)
                draft = _carried_out(state, match)
                after = draft.commit()
                for alias in draft.aliases:
                    aliases[alias] = draft.resolve(alias)
                named = {name: draft.resolve(c) for name, c in named.items()}
                _name_new(after, move, named)
            except (_Lost, Cycle, Refused, GraphError, KeyError) as reason:
                log.debug("a piece's way ends early: %s", reason)
                break
            path.append(Taken(match, state.cost - after.cost, after.cost))
            state = after
            if state.cost < best.cost - IMPROVEMENT and state.constant_bytes <= self._limits.constant_bytes:
                best, best_path, best_aliases = state, list(path), dict(aliases)
        self.state, self._aliases = best, best_aliases
        self.path += best_path
        return len(best_path)

    def tried(self, match: Match) -> tuple[Draft, State] | None:
        """What a rewrite leads to, None where it does not apply or saves nothing."""
        try:
            draft = _carried_out(self.state, match)
        except (Cycle, Refused, GraphError) as reason:
            log.debug("places are not joined: %s", reason)
            return None
        after = draft.commit()
        saves = after.cost < self.state.cost - IMPROVEMENT and after.constant_bytes <= self._limits.constant_bytes
        return (draft, after) if saves else None

    def take(self, match: Match) -> list[int]:
        """The nodes that a rewrite makes, none where it is not taken."""
        tried = self.tried(match)
        if tried is None:
            return []
        draft, after = tried
        for alias in draft.aliases:
            self._aliases[alias] = draft.resolve(alias)
        self.path.append(Taken(match, self.state.cost - after.cost, after.cost))
        self.state = after
        made = [n for n in draft.new_nodes if after.is_live(n)]
        self.joined.update(v for n in made for v in after.outputs(n))
        return made

    def _now(self, value: int) -> int:
        while value in self._aliases:
            value = self._aliases[value]
        return value

    def _match(self, state: State, move: Move, named: Mapping[Name, int]) -> Match:
        """The match of the whole graph that the move is: one that the matcher finds there itself."""
        nodes = tuple(state.producer(named[n]) for n in move.nodes)
        variables = tuple(named[v] for v in move.variables)
        for match in self._matcher.find_at(state, nodes[:1]):
            if match.number == move.rule and match.nodes == nodes and tuple(match.variables.values()) == variables:
                return match
        raise _Lost("the rule does not apply here")


def _name_new(state: State, move: Move, named: dict[Name, int]) -> None:
    store = state.setting.store
    for made in move.made:
        inputs = tuple(None if n is None else named[n] for n in made.inputs)
        attrs = made.attrs
        if made.constant is not None:
            attrs = Attrs({"data": _stand_in(made.constant)})
        node = store.intern(made.op, attrs or Attrs({}), inputs)
        if not state.is_live(node):
            raise _Lost("a node that the piece made is not there")
        for name, value in zip(made.outputs, state.outputs(node), strict=True):
            named.setdefault(name, value)


# ── where to cut ─────────────────────────────────────────────────────────────────────────────────────────────────


def _joins(compiled: CompiledRule) -> bool:
    """Whether a rule is about places that share nothing but a value that they read."""
    return any(hop.kind == "beside" for hop in compiled.routes[0]) and all(
        hop.kind != "anywhere" for hop in compiled.routes[0]
    )


def stretches(state: State, far: Set[int] = frozenset()) -> list[list[int]]:
    """The run-time nodes, cut where few values cross and no kernel does; values that are `far` from what reads them do
    not count."""
    order = [n for n in state.ordered() if is_costed(state, n)]
    crossing = _crossing(state, order, far)
    cuts, start = [0], 0
    while len(order) - start > MOST:
        near = [i for i in range(start + LEAST, start + MOST + 1) if crossing[i] <= NARROW]
        if near:
            least = min(crossing[i] for i in near)
            start = next(i for i in near if crossing[i] == least)
        else:
            later = (i for i in range(start + MOST + 1, len(order)) if crossing[i] <= NARROW)
            start = next(later, len(order))
        cuts.append(start)
    cuts.append(len(order))
    return [order[a:b] for a, b in zip(cuts, cuts[1:], strict=False) if b > a]


def _crossing(state: State, order: Sequence[int], far: Set[int]) -> list[int]:
    """For each place between nodes how many values cross it, more than there are where a kernel does."""
    place = {n: i for i, n in enumerate(order)}
    change = [0] * (len(order) + 1)

    def spans(first: int, last: int, times: int) -> None:
        if last > first:
            change[first + 1] += times
            change[last + 1] -= times

    for value, maker in state.producers.items():
        if state.is_constant(value) or value in far:
            continue
        read = [place[n] for n in state.consumers(value) if n in place]
        if read:
            spans(place.get(maker, -1), max(read), 1)
    lowering = state.setting.lowering
    for anchor in state.kernel_costs:
        at = [place[n] for n in lowering.group(state, anchor).nodes]
        spans(min(at), max(at), len(order))
    return list(accumulate(change))


# ── all pieces ───────────────────────────────────────────────────────────────────────────────────────────────────


def in_pieces(
    initial: State, matcher: Matcher, rules: Sequence[Rule], limits: Limits, executor: Executor | None = None,
    workers: int = 1, verify: bool = False, progress: Progress | None = None,
) -> Outcome:  # fmt: skip
    """The state that searching pieces and then seams leads to, for a search of the whole graph to start from.

    `executor` searches `workers` pieces at once. Of the time limit half is taken at most; graphs that were expanded are
    counted by the share of the whole graph that they are. `verify` recomputes everything after each step and compares.
    `progress` is told after each piece.
    """
    return _Pieces(initial, matcher, rules, limits, executor, workers, verify, progress).run()


class _Pieces:
    def __init__(
        self, initial: State, matcher: Matcher, rules: Sequence[Rule], limits: Limits, executor: Executor | None,
        workers: int, verify: bool, progress: Progress | None = None,
    ) -> None:  # fmt: skip
        self._initial, self._matcher, self._limits = initial, matcher, limits
        self._rules, self._progress = rules, progress
        self._executor, self._workers, self._verify = executor, workers, verify
        self._whole = _Whole(initial, (), matcher, limits)
        self._statistics = Statistics("pieces")
        self._started = time.perf_counter()
        self._expanded = 0.0
        self._budget = limits.budget
        self._counts = {
            "pieces": 0, "distinct pieces": 0, "rewrites carried over": 0, "rewrites of several pieces": 0,
        }  # fmt: skip

    def run(self) -> Outcome:
        told = self._statistics
        told.course.append((0.0, self._initial.cost))
        try:
            self._join()
            self._wave(stretches(self._whole.state, self._whole.joined))
            parts = stretches(self._whole.state, self._whole.joined)
            self._wave([a + b for a, b in zip(parts[1::2], parts[2::2], strict=False)])
        except KeyboardInterrupt:
            told.stopped = "interrupted"
        told.expanded = math.ceil(self._expanded)
        told.seconds = time.perf_counter() - self._started
        told.details.update(self._counts)
        return Outcome(self._initial, self._whole.state, tuple(self._whole.path), told)

    def _join(self) -> None:
        """Rewrites places in different pieces that share what they read, what saves most first, while that saves."""
        whole, numbers = self._whole, itertools.count()
        place = {n: i for i, part in enumerate(stretches(whole.state)) for n in part}
        joining = [c.number for c in self._matcher.rules if _joins(c)]
        matcher = Matcher([self._rules[n] for n in joining])
        queue: list[tuple[int, int, Match]] = []
        # what one of many that are alike saves: n products of one weight are n² / 2 pairs
        known: dict[tuple[object, ...], int] = {}

        def saved(match: Match) -> int:
            state = whole.state
            types = tuple(state.symbolic_type(v) for n in match.nodes for v in state.inputs(n) if v is not None)
            kind = match.number, types
            if kind not in known:
                self._statistics.candidates += 1
                tried = whole.tried(match)
                known[kind] = 0 if tried is None else round((state.cost - tried[1].cost) / IMPROVEMENT)
            return known[kind]

        def look(matches: Sequence[Match]) -> None:
            for match in matches:
                if self._late():
                    return
                apart = len({place.get(n) for n in match.nodes if is_costed(whole.state, n)}) > 1
                if apart and (gain := saved(match)) > 0:
                    heapq.heappush(queue, (-gain, next(numbers), replace(match, number=joining[match.number])))

        look(matcher.find_all(whole.state))
        while queue and not self._late():
            match = heapq.heappop(queue)[2]
            if not all(map(whole.state.is_live, match.nodes)):
                continue
            self._statistics.candidates += 1
            made = whole.take(match)
            self._counts["rewrites of several pieces"] += bool(made)
            if self._verify:
                check(whole.state)
            look(matcher.find_at(whole.state, made))

    def _late(self) -> bool:
        limit = self._limits.time_limit
        return limit is not None and time.perf_counter() - self._started >= limit / 2

    def _wave(self, parts: Sequence[Sequence[int]]) -> None:
        # pieces of one wave share nothing, so that it does not matter in which order they are searched
        self._budget = max(self._limits.budget - math.ceil(self._expanded), 0)
        twins: dict[Piece, list[list[int]]] = {}
        for part in parts:
            try:
                piece, classes = cut_loose(self._whole.state, part)
            except NotAPiece as reason:
                log.debug("a stretch stays in its graph: %s", reason)
                continue
            twins.setdefault(piece, []).append(classes)
        self._counts["pieces"] += sum(map(len, twins.values()))
        self._counts["distinct pieces"] += len(twins)
        pieces = list(twins)
        for piece, found in zip(pieces, self._search(pieces), strict=True):
            self._count(piece, found)
            for classes in twins[piece] if found.moves else ():
                self._counts["rewrites carried over"] += self._whole.walk(found.moves, classes)
            self._statistics.course.append((time.perf_counter() - self._started, self._whole.state.cost))
            if self._progress is not None:
                self._statistics.expanded = math.ceil(self._expanded)
                self._progress(self._statistics, self._initial.cost, self._whole.state.cost)

    def _count(self, piece: Piece, found: Found) -> None:
        size = sum(step.constant is None and not step.op.has(Trait.SOURCE) for step in piece.steps)
        self._expanded += found.expanded * size / max(self._initial.size, 1)
        self._statistics.candidates += found.candidates
        self._statistics.duplicates += found.duplicates
        if found.stopped == "interrupted":
            raise KeyboardInterrupt
        if found.stopped:
            self._statistics.stopped = found.stopped

    # with costs at hand

    def _search(self, pieces: Sequence[Piece]) -> Iterator[Found]:
        if self._executor is None or len(pieces) < 2:
            for number, piece in enumerate(pieces):
                yield self._search_here(piece, self._limits_for(len(pieces) - number))
        else:
            yield from self._search_there(pieces, self._executor)

    def _limits_for(self, left: int) -> Limits:
        limit = self._limits.time_limit
        if limit is not None:
            limit = max(limit / 2 - (time.perf_counter() - self._started), 0.0) / max(left, 1)
        return replace(self._limits, time_limit=limit, budget=self._budget)

    def _setting(self, costs: Costs) -> Setting:
        old = self._initial.setting
        return Setting(Store(old.lowering.layouts, old.store.opset, old.store.sizes), old.lowering, costs)

    def _search_here(self, piece: Piece, limits: Limits) -> Found:
        start, classes = standing_alone(piece, self._setting(self._initial.setting.costs))
        return _searched(start, classes, self._matcher, limits, self._verify, None)

    def _search_there(self, pieces: Sequence[Piece], executor: Executor) -> list[Found]:
        """On the executor, again and again until nothing is left whose cost is unknown."""
        setting = self._initial.setting
        sizes = tuple(setting.store.sizes.items())
        known: dict[Kernel, float] = {}
        found: dict[Piece, Found] = {}
        for _ in range(_ROUNDS):
            waiting = [p for p in pieces if p not in found or found[p].unknown]
            if not waiting:
                break
            limits = self._limits_for(-(-len(waiting) // self._workers))
            try:
                rules = pickle.dumps(list(self._rules))
                tasks = [
                    Task(p, rules, setting.lowering, setting.store.opset, sizes, limits, self._verify, known)
                    for p in waiting
                ]
                found.update(zip(waiting, executor.map(search_piece, tasks), strict=True))
            except SearchError:
                # a test mode that found a difference
                raise
            except Exception as error:
                # executors of many kinds, and whatever they fail with: all can be searched here as well
                self._statistics.details["workers"] = f"given up: {error or type(error).__name__}"
                log.warning("pieces are searched here, because workers failed: %s", error or type(error).__name__)
                break
            for kernel in dict.fromkeys(k for p in waiting for k in found[p].unknown):
                known[kernel] = setting.costs.kernel(kernel)
        whole = {p: f for p, f in found.items() if not f.unknown}
        return [whole[p] if p in whole else self._search_here(p, self._limits_for(1)) for p in pieces]
