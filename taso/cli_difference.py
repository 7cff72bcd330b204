"""What differs between two graphs: what they look like from outside, their weights, their operators, their outputs."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np

from taso.backends.base import Array, Backend, Executable
from taso.graph.cut import without_unrunnable
from taso.graph.errors import InputError
from taso.graph.evaluate import constant_value
from taso.graph.graph import Graph, Node, Value
from taso.graph.operator import AttrValue, Trait, Weight
from taso.graph.types import Dim, DType, TensorType, show_shape
from taso.search.verify import Check, Feeds, compare


@dataclass
class Difference:
    """From one graph to another. `interface` are sentences about inputs and outputs, `opsets` and the like aside.

    `operators` has for each type that counts otherwise the numbers of nodes before and after; `nodes` are sentences
    about nodes that make a value of the same name in both. `weights` are those of both names: added, removed, changed.
    """

    interface: list[str] = field(default_factory=list)
    header: list[str] = field(default_factory=list)
    operators: dict[str, tuple[int, int]] = field(default_factory=dict)
    nodes: list[str] = field(default_factory=list)
    weights_added: list[str] = field(default_factory=list)
    weights_removed: list[str] = field(default_factory=list)
    weights_changed: list[str] = field(default_factory=list)

    @property
    def any(self) -> bool:
        """Whether the two files differ in anything that is looked at."""
        return any(vars(self).values())


def difference(a: Graph, b: Graph) -> Difference:
    """What is in `b` and not, or otherwise, in `a`; nothing is run."""
    before, after = (Counter(_kind(n) for n in g.operators) for g in (a, b))
    ours, theirs = _weights(a), _weights(b)
    both = ours.keys() & theirs.keys()
    return Difference(
        [*_inputs(a, b), *_outputs(a, b)], list(_header(a, b)),
        {name: (before[name], after[name]) for name in sorted(before | after) if before[name] != after[name]},
        list(_changed_nodes(a, b)), sorted(theirs.keys() - both), sorted(ours.keys() - both),
        sorted(name for name in both if not _same_weight(ours[name], theirs[name])),
    )  # fmt: skip


def _kind(node: Node) -> str:
    return f"{node.op.domain}.{node.op.label}" if node.op.domain else node.op.label


# ── interface ────────────────────────────────────────────────────────────────────────────────────────────────────


def _inputs(a: Graph, b: Graph) -> Iterator[str]:
    ours = dict(zip(a.input_names, (v.type for v in a.inputs), strict=True))
    theirs = dict(zip(b.input_names, (v.type for v in b.inputs), strict=True))
    yield from _names("input", list(ours), list(theirs))
    for name in (n for n in ours if n in theirs):
        if _shown(ours[name]) != _shown(theirs[name]) or ours[name].other != theirs[name].other:
            yield f"input '{name}': {ours[name]} → {theirs[name]}"


def _outputs(a: Graph, b: Graph) -> Iterator[str]:
    ours, theirs = ({name: v.type for name, v in g.outputs} for g in (a, b))
    yield from _names("output", list(ours), list(theirs))
    for name in (n for n in ours if n in theirs):
        if _contradict(ours[name], theirs[name]):
            yield f"output '{name}': {ours[name]} → {theirs[name]}"


def _names(what: str, ours: list[str], theirs: list[str]) -> Iterator[str]:
    yield from (f"{what} '{name}' is gone" for name in ours if name not in theirs)
    yield from (f"{what} '{name}' is new" for name in theirs if name not in ours)
    kept, now = [n for n in ours if n in theirs], [n for n in theirs if n in ours]
    if kept != now:
        yield f"the {what}s come in another order: {', '.join(kept)} → {', '.join(now)}"


def _shown(t: TensorType) -> tuple[object, ...]:
    """What a caller meets: a dimension is a number or open, whatever its name."""
    return t.dtype, None if t.shape is None else tuple(d if isinstance(d, int) else None for d in t.shape)


def _contradict(a: TensorType, b: TensorType) -> bool:
    """Whether one value cannot be of both types; what is known of one and not of the other is no contradiction."""
    if a.other is not None or b.other is not None:
        return (a.other is None) != (b.other is None)
    if a.dtype is not b.dtype:
        return True
    if a.shape is None or b.shape is None:
        return False
    pairs = list(zip(a.shape, b.shape, strict=False))
    return len(a.shape) != len(b.shape) or any(isinstance(x, int) and isinstance(y, int) and x != y for x, y in pairs)


def _header(a: Graph, b: Graph) -> Iterator[str]:
    for domain in sorted(a.info.opsets.keys() | b.info.opsets.keys()):
        before, after = a.info.opsets.get(domain), b.info.opsets.get(domain)
        if before != after:
            yield f"opset of {domain or 'ai.onnx'}: {before or 'none'} → {after or 'none'}"
    if a.info.ir_version != b.info.ir_version:
        yield f"IR version: {a.info.ir_version} → {b.info.ir_version}"


# ── weights and nodes ────────────────────────────────────────────────────────────────────────────────────────────


def _weights(graph: Graph) -> dict[str, Value]:
    """Weights by name; several that hold the same name are told apart by number."""
    found: dict[str, Value] = {}
    for node in graph.nodes:
        data = node.attrs["data"] if node.op.name == "Weight" else None
        if isinstance(data, Weight):
            names = graph.info.value_names.get(node.output) or [data.name or "unnamed"]
            name, number = names[0], 1
            while name in found:
                number += 1
                name = f"{names[0]} ({number})"
            found[name] = node.output
    return found


def _same_weight(a: Value, b: Value) -> bool:
    if a.type != b.type:
        return False
    left, right = constant_value(a), constant_value(b)
    if left.dtype == object or right.dtype == object:
        return bool(np.array_equal(left, right))
    # bit by bit: NaN is itself, and 0 is not -0
    return bool(np.array_equal(_bits(left), _bits(right)))


def _bits(array: Array) -> Array:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _changed_nodes(a: Graph, b: Graph) -> Iterator[str]:
    ours, theirs = _named(a), _named(b)
    for name, node in ours.items():
        other = theirs.get(name)
        if other is None:
            continue
        if _kind(node) != _kind(other):
            yield f"'{name}': {_kind(node)} → {_kind(other)}"
            continue
        if node.op is not other.op:
            yield f"'{name}' ({_kind(node)}): {_known(node)} → {_known(other)}"
        elif node.op.has(Trait.OPAQUE):
            if node.attrs["proto"] != other.attrs["proto"]:
                yield f"'{name}' ({_kind(node)}): its attributes, or its bodies, differ"
        else:
            yield from (f"'{name}' ({_kind(node)}): {change}" for change in _changed_attributes(node, other))


def _changed_attributes(node: Node, other: Node) -> Iterator[str]:
    for attribute, before in node.attrs.items():
        after = other.attrs[attribute]
        if _plain(before) != _plain(after):
            yield f"{attribute} {_told(before)} → {_told(after)}"


def _known(node: Node) -> str:
    return "passed through unchanged" if node.op.has(Trait.OPAQUE) else "modelled"


def _named(graph: Graph) -> dict[str, Node]:
    """Operators by the name of their first output."""
    names = {value: name for name, value in graph.outputs}
    names |= {value: known[0] for value, known in graph.info.value_names.items() if known}
    return {names[n.output]: n for n in graph.operators if n.output in names}


def _plain(value: AttrValue) -> object:
    """An attribute to be compared by content."""
    return value.array().tobytes() if isinstance(value, Weight) else value


def _told(value: AttrValue) -> str:
    if isinstance(value, (bytes, Weight)):
        return "…"
    if isinstance(value, DType):
        return value.name.lower()
    if isinstance(value, tuple) and all(isinstance(v, int) for v in value):
        return show_shape(tuple(v for v in value if isinstance(v, int)))
    return str(value)


# ── outputs ──────────────────────────────────────────────────────────────────────────────────────────────────────


def numeric(
    a: Graph, b: Graph, sizes: Mapping[str, Dim], seed: int, tolerance: float | None, backend: Backend | None
) -> Check:
    """Compares the outputs that both graphs have, on the same random inputs.

    They are evaluated in float64 by the operators' definitions, or as `backend` computes them. What cannot be run here
    is cut out of both. Raises `InputError` where the two do not take the same inputs, or have no output in common.
    """
    a, b = without_unrunnable(a), without_unrunnable(b)
    for name, value in zip(a.input_names, a.inputs, strict=True):
        other = dict(zip(b.input_names, b.inputs, strict=True)).get(name)
        if other is None or _contradict(value.type, other.type):
            raise InputError(f"the second model takes no such input '{name}'")
    if len(a.inputs) != len(b.inputs):
        extra = [name for name in b.input_names if name not in a.input_names]
        raise InputError(f"the second model has another input, '{extra[0]}'")
    shared = [name for name, _ in a.outputs if name in dict(b.outputs)]
    if not shared:
        raise InputError("the models have no output in common")
    return compare(
        _with_outputs(a, shared), _with_outputs(b, shared), sizes, seed, tolerance, _runs(backend) if backend else None
    )


def _with_outputs(graph: Graph, names: list[str]) -> Graph:
    fresh = copy.copy(graph)
    by_name = dict(graph.outputs)
    fresh.set_outputs([(name, by_name[name]) for name in names])
    return fresh


def _runs(backend: Backend) -> Callable[[Graph, Feeds], Feeds]:
    """Runs graphs on a backend; each is compiled once."""
    compiled: dict[Graph, Executable] = {}

    def run(graph: Graph, feeds: Feeds) -> Feeds:
        if graph not in compiled:
            compiled[graph] = backend.compile(graph)
        return compiled[graph](feeds)

    return run
