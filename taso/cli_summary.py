"""What is in a graph: operators, parameters, arithmetic, memory, and what taso knows of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from taso.graph.cut import unrunnable
from taso.graph.errors import GraphError
from taso.graph.evaluate import weight_of
from taso.graph.graph import Graph, Node, Value
from taso.graph.onnx_bodies import body_labels
from taso.graph.onnx_weights import stored_weight_bytes
from taso.graph.operator import ONNX_NAMES, Trait
from taso.graph.types import Dim, TensorType

Sizes = Mapping[str, Dim]


@dataclass
class Kind:
    """The nodes of one operator: how many, their arithmetic, and whether taso knows what they compute.

    `state` is "modelled"; "opaque": passes through unchanged, and runs by onnx.reference; or "unknown": passes through
    unchanged, and cannot be run here. `why` tells where an operator that is modelled is opaque all the same.
    """

    operator: str
    state: str
    count: int = 0
    flops: float = 0.0
    why: str = ""


@dataclass
class Summary:
    """A graph in numbers. Bytes are those of elements in memory; of weights, those that a file stores.

    `flops` counts a multiplication and an addition as two; what depends on weights alone counts nothing. `uncounted`
    nodes have no arithmetic that is known here. `peak_bytes` is the most that inputs and intermediate values take
    together when nodes run in order, None where some size is not known.
    """

    inputs: list[tuple[str, str]]
    outputs: list[tuple[str, str]]
    sizes: dict[str, int]
    opsets: dict[str, int]
    ir_version: int
    producer: str
    operators: list[Kind]
    parameters: int = 0
    weights: int = 0
    weight_bytes: int = 0
    flops: float = 0.0
    uncounted: int = 0
    peak_bytes: int | None = None
    bodies: list[str] = field(default_factory=list)


def summary(graph: Graph, sizes: Sizes) -> Summary:
    """What is in `graph`, with `sizes` for its symbolic dimensions.

    It is the graph as taso reads it: nodes that compute the same are one, constants are weights, and what no output
    depends on is gone.
    """
    kinds = _kinds(graph, sizes)
    weights = [weight_of(n.output) for n in graph.nodes if n.op.name == "Weight"]
    static = [w for w in weights if w.type.static]
    info = graph.info
    return Summary(
        [(name, str(v.type)) for name, v in zip(graph.input_names, graph.inputs, strict=True)],
        [(name, str(v.type)) for name, v in graph.outputs],
        {name: size for name, size in sorted(sizes.items()) if isinstance(size, int)},
        dict(info.opsets), info.ir_version, f"{info.producer_name} {info.producer_version}".strip(),
        sorted(kinds.values(), key=lambda k: (-k.flops, -k.count, k.operator)),
        parameters=sum(w.type.size for w in static), weights=len(weights),
        weight_bytes=sum(stored_weight_bytes(w) for w in static),
        flops=sum(k.flops for k in kinds.values()),
        uncounted=sum(_flops(n, sizes) is None for n in graph.run_time_nodes),
        peak_bytes=_peak(graph, sizes),
        bodies=[f"{n.op.label}: {label}" for n in graph.operators for label in body_labels(n)],
    )  # fmt: skip


def _kinds(graph: Graph, sizes: Sizes) -> dict[tuple[str, str], Kind]:
    foreign = set(unrunnable(graph))
    found: dict[tuple[str, str], Kind] = {}
    for node in graph.operators:
        state = "modelled"
        if node.op.has(Trait.OPAQUE):
            state = "unknown" if node in foreign else "opaque"
        name = f"{node.op.domain}.{node.op.label}" if node.op.domain else node.op.label
        kind = found.setdefault((name, state), Kind(name, state))
        if state == "opaque" and (node.op.domain, node.op.label) in ONNX_NAMES:
            kind.why = "known, but not in the way that these nodes use it"
        kind.count += 1
        kind.flops += 0 if node.constant else _flops(node, sizes) or 0
    return found


# ── arithmetic ───────────────────────────────────────────────────────────────────────────────────────────────────

Shape = tuple[int, ...]
Count = Callable[[Node, list[Shape], Shape], float]


def _flops(node: Node, sizes: Sizes) -> float | None:
    """Operations of a node on numbers; None where its arithmetic, or a size, is not known."""
    count = _COUNTS.get(node.op.name)
    if node.op.has(Trait.MOVES_DATA) or node.op.name in _FREE:
        return 0.0
    if count is None and (node.op.has(Trait.OPAQUE) or node.op.name in _UNCOUNTED):
        return None
    shapes = [() if v is None else _shape(v.type, sizes) for v in node.inputs]
    out = _shape(node.output.type, sizes)
    if out is None or any(s is None for s in shapes):
        return None
    known = [s for s in shapes if s is not None]
    # anything else: each element that is read or made is touched about once
    return count(node, known, out) if count else float(max([math.prod(out), *map(math.prod, known[:1])]))


def _shape(t: TensorType, sizes: Sizes) -> Shape | None:
    bound = t.bind(sizes)
    return bound.static_shape if bound.other is None and bound.static else None


def _conv(weight: int) -> Count:
    return lambda node, shapes, out: 2.0 * math.prod(out) * math.prod(shapes[weight][1:])


def _transposed(node: Node, shapes: list[Shape], out: Shape) -> float:
    return 2.0 * math.prod(shapes[0]) * math.prod(shapes[1][1:])


def _matmul(node: Node, shapes: list[Shape], out: Shape) -> float:
    return 2.0 * math.prod(out) * shapes[0][-1]


def _gemm(node: Node, shapes: list[Shape], out: Shape) -> float:
    return 2.0 * math.prod(out) * shapes[0][0 if node.attrs.int("transA") else -1]


def _window(node: Node, shapes: list[Shape], out: Shape) -> float:
    return float(math.prod(out) * math.prod(node.attrs.ints("kernel_shape")))


def _recurrent(node: Node, shapes: list[Shape], out: Shape) -> float:
    # inputs and the state before meet one matrix each, at every step and in each direction
    steps, batch = shapes[0][0], shapes[0][1]
    return 2.0 * steps * batch * (math.prod(shapes[1]) + math.prod(shapes[2]))


_COUNTS: dict[str, Count] = {
    "Conv": _conv(1), "ConvInteger": _conv(1), "QLinearConv": _conv(3), "DeformConv": _conv(1),
    "ConvTranspose": _transposed, "MatMul": _matmul, "MatMulInteger": _matmul, "QLinearMatMul": _matmul, "Gemm": _gemm,
    "MaxPool": _window, "AveragePool": _window, "LpPool": _window, "LSTM": _recurrent, "GRU": _recurrent,
    "RNN": _recurrent,
}  # fmt: skip
_FREE = frozenset({"Shape", "Size", "BitCast"})
_UNCOUNTED = frozenset({"Einsum", "Attention", "TopK"})


# ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────────


def _peak(graph: Graph, sizes: Sizes) -> int | None:
    """Most bytes that values take at one time: each from the node that makes it to the last that reads it."""
    order = [n for n in graph.nodes if not n.constant]
    left = Counter(v for n in order for v in dict.fromkeys(n.inputs) if v is not None)
    left.update(v for _, v in graph.outputs)
    live = most = 0
    try:
        for node in order:
            live += sum(_bytes(v, sizes) for v in node.outputs if left[v])
            most = max(most, live)
            for value in dict.fromkeys(node.inputs):
                if value is None or value.node.constant:
                    continue
                left[value] -= 1
                live -= 0 if left[value] else _bytes(value, sizes)
    except GraphError:
        return None
    return most


def _bytes(value: Value, sizes: Sizes) -> int:
    return value.type.bind(sizes).nbytes
