"""What a search gives back: the best state as a graph, and a report of how it came about."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields

from taso.graph.drawing import framed
from taso.graph.errors import GraphError, SearchError
from taso.graph.evaluate import constant_value, defined, weight_of
from taso.graph.graph import Graph, Node, Value
from taso.graph.onnx_weights import stored_weight_bytes
from taso.graph.operator import Trait, Weight
from taso.graph.picture import Picture, read_picture
from taso.search.course import course_svg
from taso.search.explain import ABSENT, Explanation
from taso.search.state import State
from taso.search.store import Entry
from taso.search.telling import NO_FILES, Files, by_rule
from taso.search.telling_html import html
from taso.search.telling_markdown import markdown

log = logging.getLogger(__name__)


def to_graph(
    state: State, original: Graph, classes: dict[Value, int], graph_class: type[Graph],
    order: Sequence[int] | None = None,
) -> Graph:  # fmt: skip
    """The graph of a state. Values that survive keep their names; constants that rules made are folded lazily.

    `order` are its nodes, producers first, where they are to be in another order than its own.
    """
    fresh = graph_class()
    entries = state.setting.store.entries
    values: dict[int, Value] = {}
    for number in state.ordered() if order is None else order:
        entry = entries[number]
        inputs = [values[c] if c is not None else None for c in entry.inputs]
        node = _make(fresh, entry, inputs)
        for value, c in zip(node.outputs, state.made[number], strict=True):
            if state.producers.get(c) == number:
                values[c] = value
    mapping = {v: values[c] for v, c in classes.items() if c in values}
    for old, (_, value) in zip(state.graph_outputs, original.outputs, strict=True):
        mapping[value] = values[old]
    original.transfer(fresh, mapping)
    # what was chosen for the original is not for this one
    fresh.plans.clear()
    return fold(fresh)


def _make(graph: Graph, entry: Entry, inputs: Sequence[Value | None]) -> Node:
    given = entry.types if entry.op.has(Trait.SOURCE) or entry.op.has(Trait.OPAQUE) else None
    return graph.make(entry.op, inputs, entry.attrs, given, entry.origin)


def fold(graph: Graph, slack: int = 1 << 16) -> Graph:
    """Turns what depends on weights alone into weights, computed when asked for.

    A constant larger than all it was made of plus `slack` bytes stays as nodes, so that no file is blown up; so does
    one that the reference cannot compute, though a runtime may.
    """
    read = {v for v in _read_at_run_time(graph) if _computable(v)}
    made_of = _weight_bytes(graph)

    def replacement(fresh: Graph, node: Node, inputs: tuple[Value | None, ...]) -> Sequence[Value]:
        if not node.constant or node.op.name == "Weight":
            given = [v.type for v in node.outputs]
            return fresh.make(node.op, inputs, node.attrs, given, node.origin).outputs
        return [
            fresh.add_weight(_lazy(v)) if v in read and _worth_folding(v, made_of[node], slack, node)
            else fresh.make(node.op, inputs, node.attrs, [u.type for u in node.outputs], node.origin).outputs[v.index]
            for v in node.outputs
        ]  # fmt: skip

    return graph.rebuilt(replacement)


def _lazy(value: Value) -> Weight:
    return Weight(value.type, lambda: constant_value(value))


def _computable(value: Value) -> bool:
    """Whether a constant can be computed: what is not of our own definitions alone is tried."""
    stack, seen = [value.node], set[Node]()
    while stack:
        node = stack.pop()
        if node in seen or node.op.name == "Weight":
            continue
        seen.add(node)
        if not node.op.internal and not defined(node):
            try:
                constant_value(value)
            except GraphError as error:
                log.info("%r stays as it is: %s", value, error)
                return False
            return True
        stack.extend(v.node for v in node.inputs if v is not None)
    return True


def _worth_folding(value: Value, made_of: int, slack: int, node: Node) -> bool:
    # quantised weights are kept as integers: runtimes multiply those
    if not value.type.static or node.op.name == "DequantizeLinear" and not node.op.domain:
        return False
    # what rules made and ONNX cannot write must be folded whatever its size
    return node.op.internal or value.type.nbytes <= made_of + slack


def _read_at_run_time(graph: Graph) -> set[Value]:
    read = {v for _, v in graph.outputs}
    for node in graph.nodes:
        if not node.constant:
            read.update(v for v in node.inputs if v is not None)
    return {v for v in read if v.node.constant}


def _weight_bytes(graph: Graph) -> dict[Node, int]:
    """For each constant node the bytes of the weights beneath it."""
    beneath: dict[Node, frozenset[Node]] = {}
    for node in graph.nodes:
        if node.op.name == "Weight":
            beneath[node] = frozenset({node})
        elif node.constant:
            beneath[node] = frozenset().union(*(beneath[v.node] for v in node.inputs if v is not None))
    return {n: sum(stored_weight_bytes(weight_of(w.output)) for w in ws) for n, ws in beneath.items()}


@dataclass
class Rewrite:
    """One rewrite that was taken: the rule's equation, where it applied, and what it saved by the cost model.

    `certificate` says how the rule's status was reached, `command` judges it again.
    """

    rule: str
    identifier: str
    where: str
    gain_ms: float
    exactness: str
    status: str
    certificate: str = ""
    command: str = ""


@dataclass
class Trial:
    """A graph that came last: its rewrites, what it takes by its kernels and measured, and the ratio to the original.

    Milliseconds; None where it was not run.
    """

    rewrites: int
    predicted_ms: float
    measured_ms: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None


@dataclass
class Report:
    """What `optimize` did. Times in milliseconds; `measured_*` are whole-graph medians, None where nothing was run.
    `peak_*` are the most bytes that intermediate values take up, None where sizes are not known.

    `rewrites` lead to the graph that came back; `set_aside` are those that were found and not kept in the end.
    `finalists` were run side by side with the original; `plan` says how the plan of the one that was taken came about:
    what the solver said, what it saves against the local rule (`saves_ms`), how many kernels use which algorithm.
    `body_rewrites` were taken in bodies of If, Loop and the like, whose search expanded `bodies_expanded` graphs.
    `phases` says where the seconds went, each counted once; `course` are pairs of seconds since the search began and of
    the best cost from then on. `resumed` graphs of those expanded were so by earlier calls, which left a checkpoint.
    `quartiles` are those of the times of both graphs, two of the original and two of the other. `before` and `after`
    are what the graphs look like, kernel by kernel; `machine` says where all that was found.
    """

    backend: str
    device: str
    cost_before: float = 0.0
    cost_after: float = 0.0
    costs_are_measured: bool = True
    measured_before: float | None = None
    measured_after: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    quartiles: list[float] | None = None
    peak_before: int | None = None
    peak_after: int | None = None
    kernels_before: int = 0
    kernels_after: int = 0
    shapes_folded: int = 0
    body_rewrites: int = 0
    bodies_expanded: int = 0
    rewrites: list[Rewrite] = field(default_factory=list)
    set_aside: list[Rewrite] = field(default_factory=list)
    finalists: list[Trial] = field(default_factory=list)
    plan: dict[str, float | str] = field(default_factory=dict)
    near_misses: list[tuple[str, float]] = field(default_factory=list)
    explanations: list[Explanation] = field(default_factory=list)
    decision: str = ""
    messages: list[str] = field(default_factory=list)
    verified: bool | None = None
    verification: str = ""
    relative_error: float | None = None
    search: str = "backtracking"
    search_details: dict[str, float | str] = field(default_factory=dict)
    expanded: int = 0
    candidates: int = 0
    duplicates: int = 0
    refused: int = 0
    reused: int = 0
    resumed: int = 0
    stopped: str = ""
    course: list[tuple[float, float]] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)
    search_seconds: float = 0.0
    measuring_seconds: float = 0.0
    kernels_measured: int = 0
    kernels_known: int = 0
    total_seconds: float = 0.0
    machine: dict[str, str] = field(default_factory=dict)
    before: Picture | None = field(default=None, repr=False)
    after: Picture | None = field(default=None, repr=False)

    @property
    def changed(self) -> bool:
        """Whether the graph that came back differs from the one given."""
        return bool(self.rewrites or self.shapes_folded or self.body_rewrites)

    def to_dict(self) -> dict[str, object]:
        """The report as plain data, ready for JSON: what is not finite is told as text ("inf"), for JSON lacks it."""
        data = _plain(asdict(self))
        return data if isinstance(data, dict) else {}

    def to_json(self) -> str:
        """The report as JSON, which `Report.from_json` reads."""
        return json.dumps(self.to_dict(), indent=2, allow_nan=False)

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Report:
        """The report that `to_dict` made `data` of; raises `SearchError` where it is not one."""
        known = {f.name for f in fields(cls)}
        if not isinstance(data, Mapping) or not {"backend", "device"} <= data.keys() <= known:
            raise SearchError("this is not the data of a report of this version of taso")
        return _read(cls, data)

    @classmethod
    def from_json(cls, text: str) -> Report:
        """The report that `to_json` wrote; raises `SearchError` where it is not one."""
        try:
            return cls.from_dict(json.loads(text))
        except (ValueError, RecursionError) as error:
            raise SearchError(f"this is not a report: {error}") from error

    def course_svg(self) -> str:
        """A picture of the search, an SVG: the best cost against the seconds it took to find it."""
        title = f"best cost on {self.backend}: {self.cost_before:.3f} → {self.cost_after:.3f} ms"
        return course_svg(self.course, self.search_seconds, title)

    def to_markdown(self, files: Files = NO_FILES) -> str:
        """The report as Markdown; `files` says which files it speaks of."""
        return markdown(self, files)

    def to_html(self, files: Files = NO_FILES) -> str:
        """The report as one HTML page that needs nothing else, with both graphs to look at."""
        return html(self, files)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return framed(self.to_html(), _FRAME_HEIGHT)

    def summary(self) -> str:
        """The report as text."""
        lines = [self.decision or "nothing was done"]
        lines += [f"  {count}× {rule}  (saves {gain:.3f} ms)" for rule, count, gain in by_rule(self.rewrites)]
        if self.set_aside:
            lines.append("found and not kept:")
            lines += [f"  {count}× {rule}  ({gain:.3f} ms)" for rule, count, gain in by_rule(self.set_aside)]
        kind = "measured kernels" if self.costs_are_measured else "a formula, not measured"
        lines.append(
            f"cost ({kind}): {self.cost_before:.3f} → {self.cost_after:.3f} ms, "
            f"kernels: {self.kernels_before} → {self.kernels_after}"
        )
        if self.peak_before is not None and self.peak_after is not None:
            lines.append(f"memory between kernels: {_megabytes(self.peak_before)} → {_megabytes(self.peak_after)}")
        if self.measured_before is not None and self.measured_after is not None:
            lines.append(
                f"whole graph on {self.backend}: {self.measured_before:.3f} → {self.measured_after:.3f} ms "
                f"(ratio {self.ratio_low:.3f} to {self.ratio_high:.3f})"
            )
        if len(self.finalists) > 1:
            lines.append("finalists, predicted and measured: " + ", ".join(map(_trial, self.finalists)))
        if self.plan:
            lines.append(f"plan: {', '.join(_detail(k, v) for k, v in self.plan.items())}")
        if self.verified is not None:
            said = f"equal, largest relative error {self.relative_error:.1e}"
            said = said if self.verified else f"not shown equal, {self.verification}"
            lines.append(f"outputs compared with the original's: {said}")
        lines.append(
            f"search: {self.expanded} graphs expanded, {self.candidates} candidates, {self.duplicates} duplicates, "
            f"{self.search_seconds:.2f} s of which {self.measuring_seconds:.2f} s measuring "
            f"({self.kernels_measured} kernels measured, {self.kernels_known} known)"
            + (f"; stopped by {self.stopped}" if self.stopped else "")
        )
        if self.search_details:
            lines.append(f"{self.search}: {', '.join(_detail(k, v) for k, v in self.search_details.items())}")
        if self.phases:
            longest = sorted(self.phases.items(), key=lambda p: -p[1])
            lines.append(f"seconds: {', '.join(f'{phase} {spent:.2f}' for phase, spent in longest)}")
        if not self.rewrites and self.near_misses:
            closest: dict[str, float] = {}
            for rule, change in self.near_misses:
                closest.setdefault(rule, change)
            lines.append("closest rewrites that did not pay:")
            lines += [f"  +{change:.3f} ms  {rule}" for rule, change in list(closest.items())[:5]]
        lines += _explained(self.explanations)
        lines += self.messages
        return "\n".join(lines)

    __str__ = summary


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.3f} MB"


def _trial(trial: Trial) -> str:
    measured = "not run" if trial.measured_ms is None else f"{trial.measured_ms:.3f} ms"
    return f"{trial.rewrites} rewrites {trial.predicted_ms:.3f} and {measured}"


def _detail(name: str, value: float | str) -> str:
    return f"{name.replace('_', ' ')} {value:.4g}" if isinstance(value, float) else f"{name.replace('_', ' ')} {value}"


def _explained(explanations: Sequence[Explanation]) -> list[str]:
    """Text of what was explained: under each question and rule, place by place."""
    lines: list[str] = []
    last = ""
    for said in explanations:
        head = f"{said.identifier or said.rule or said.asked}, {said.graph} graph:"
        if said.outcome == ABSENT:
            lines.append(f"{head} {said}")
            continue
        if head != last:
            lines += [head, *([f"  {said.not_used}"] if said.not_used else [])]
            last = head
        lines.append(f"  {said}")
    return lines


def _plain(data: object) -> object:
    if isinstance(data, float) and not math.isfinite(data):
        return repr(data)
    if isinstance(data, Mapping):
        return {str(name): _plain(value) for name, value in data.items()}
    return [_plain(v) for v in data] if isinstance(data, (list, tuple)) else data


_NOT_FINITE = {repr(v): v for v in (math.inf, -math.inf, math.nan)}


def _read(kind: type[Report], data: Mapping[str, object]) -> Report:
    """Plain data as a report: parts become what they were, and every value must be of its kind."""
    report = kind(_text(data["backend"]), _text(data["device"]))
    for name, value in data.items():
        try:
            setattr(report, name, _part(name, getattr(report, name), value))
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise SearchError(f"this is not the data of a report: '{name}' cannot be {value!r}") from error
    return report


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise SearchError(f"this is not the data of a report: a text was expected and not {value!r}")
    return value


def _part(name: str, default: object, value: object) -> object:
    """One field of a report; its default says of what kind it is, None that it is a number, a truth or nothing."""
    if name in _PARTS and isinstance(value, list):
        return [_PARTS[name](part) for part in value]
    if name in _PAIRS and isinstance(value, list):
        return [(first if isinstance(first, str) else _float(first), _float(second)) for first, second in value]
    if name in _PICTURES and value is not None:
        return read_picture(value)
    if name == "quartiles" and isinstance(value, list):
        return [_float(part) for part in value]
    if name == "machine" and isinstance(value, dict):
        return {str(k): _text(v) for k, v in value.items()}
    if name == "phases" and isinstance(value, dict):
        return {str(k): _float(v) for k, v in value.items()}
    if default is None:
        return value if value is None or isinstance(value, int) else _float(value)
    if isinstance(default, float):
        return _float(value)
    if type(value) is not type(default):
        raise TypeError(name)
    return value


def _as_rewrite(part: Mapping[str, object]) -> Rewrite:
    said = (_text(part[name]) for name in ("exactness", "status", "certificate", "command"))
    return Rewrite(_text(part["rule"]), _text(part["identifier"]), _text(part["where"]), _float(part["gain_ms"]), *said)


def _as_trial(part: Mapping[str, object]) -> Trial:
    rewrites = part["rewrites"]
    if isinstance(rewrites, bool) or not isinstance(rewrites, int):
        raise TypeError("a number of rewrites was expected")
    given = [part[name] for name in ("measured_ms", "ratio_low", "ratio_high")]
    return Trial(rewrites, _float(part["predicted_ms"]), *(None if x is None else _float(x) for x in given))


def _as_explanation(part: Mapping[str, object]) -> Explanation:
    asked, rule, identifier, graph, outcome, reason, not_used = (
        _text(part[name]) for name in ("asked", "rule", "identifier", "graph", "outcome", "reason", "not_used")
    )
    nodes, change = part["nodes"], part["change_ms"]
    if not isinstance(nodes, list):
        raise TypeError("a list of nodes was expected")
    found = None if change is None else _float(change)
    where = [_text(n) for n in nodes]
    return Explanation(asked, rule, identifier, graph, outcome, where, reason, found, not_used)


def _float(value: object) -> float:
    if isinstance(value, str) and value in _NOT_FINITE:
        return _NOT_FINITE[value]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError("a number was expected")
    return float(value)


_PARTS: dict[str, Callable[[Mapping[str, object]], object]] = {
    "rewrites": _as_rewrite, "set_aside": _as_rewrite, "explanations": _as_explanation, "finalists": _as_trial,
}  # fmt: skip
_PAIRS = {"near_misses", "course"}
_PICTURES = {"before", "after"}
_FRAME_HEIGHT = 760
