"""What a model needs at least: its operations and bytes against what this machine can do, measured here.

An operator takes no less than its multiplications and additions at the machine's best rate, and no less than reading
its weights; the larger of the two counts. Weights are read at the rate of reading an array as large as all of them
again and again, so that a model which fits a cache is held to the cache. Values between operators count nothing, those
that go in and come out once. Operations are those of the graph as it was given: a rewrite or an algorithm that needs
fewer (Winograd's) can go below this limit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

import taso
from taso.graph.graph import Node, Value
from taso.graph.operator import Weight

SIDE = 2048
READ = 1 << 30
"""Bytes that are read for the bandwidth of the memory: more than most caches hold."""


@dataclass(frozen=True)
class Peaks:
    """Operations and bytes from memory a second that this machine reaches with so many threads."""

    operations: float
    bytes: float


@dataclass(frozen=True)
class Needs:
    """What a graph needs: operations (a multiplication and an addition are two), bytes, and seconds at the limit.

    `rate` is at how many bytes a second so many can be read.
    """

    operations: float
    bytes: float
    rate: float
    seconds: float


def peaks(threads: int, side: int = SIDE, read: int = READ, seconds: float = 2.0) -> Peaks:
    """Measures a product of two square matrices on taso's own backend, and a read of one large array."""
    return Peaks(2 * side**3 / _best(_product(side, threads), seconds), reading_rate(read, threads, seconds))


def reading_rate(size: int, threads: int, seconds: float = 1.0) -> float:
    """Bytes a second at which an array of so many bytes is read again and again."""
    return size / _best(_reading(size, threads), seconds)


def _product(side: int, threads: int) -> Callable[[], object]:
    graph = taso.new_graph()
    graph.matmul(graph.new_input(dims=(side, side)), graph.new_weight(dims=(side, side)))
    program = taso.compile(graph, threads=threads)
    (name,) = graph.input_names
    feeds = {name: np.random.default_rng(0).standard_normal((side, side)).astype(np.float32)}
    return lambda: program(feeds)


def _reading(size: int, threads: int) -> Callable[[], object]:
    parts = [np.ones(size // 4 // threads, np.float32) for _ in range(threads)]
    pool = ThreadPoolExecutor(threads)
    # a maximum keeps up with the memory, and lets other threads run meanwhile
    return lambda: list(pool.map(np.max, parts))


def _best(call: Callable[[], object], seconds: float) -> float:
    call()
    times: list[float] = []
    deadline = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < deadline:
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return min(times)


def needs(graph: taso.Graph, peaks: Peaks, threads: int) -> Needs:
    """Counts a graph without open sizes, and measures how fast what it reads can be read."""
    operations, held, edges = counted(graph)
    read = edges + sum(held)
    rate = max(peaks.bytes, reading_rate(read, threads))
    pairs = zip(operations, held, strict=True)
    seconds = edges / rate + sum(max(own / peaks.operations, weights / rate) for own, weights in pairs)
    return Needs(sum(operations), float(read), rate, seconds)


def counted(graph: taso.Graph) -> tuple[list[float], list[int], int]:
    """Operations of each operator, bytes of the weights that no operator before it reads; bytes going in and out."""
    seen: set[Value] = set()
    operations, held = [], []
    for node in graph.run_time_nodes:
        weights = {v for v in node.inputs if v is not None and isinstance(v.node.attrs.get("data"), Weight)} - seen
        seen |= weights
        operations.append(operations_of(node))
        held.append(sum(v.type.nbytes for v in weights))
    return operations, held, sum(v.type.nbytes for v in (*graph.inputs, *(v for _, v in graph.outputs)))


def operations_of(node: Node) -> float:
    """Multiplications and additions of products; one for each element of what other operators give, none for views."""
    size = sum(math.prod(v.type.static_shape) for v in node.outputs)
    shapes = [v.type.static_shape for v in node.inputs if v is not None]
    match node.op.name:
        case "Conv":
            return 2.0 * size * math.prod(shapes[1][1:])
        case "MatMul":
            return 2.0 * size * shapes[0][-1]
        case "Gemm":
            return 2.0 * size * shapes[0][0 if node.attrs.int("transA") else 1]
        case name if name in MOVING:
            return 0.0
    return float(size)


MOVING = frozenset({
    "Concat", "Split", "Slice", "Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze", "Expand", "Gather", "Pad",
    "Identity",
})  # fmt: skip
"""Operators that compute nothing."""
