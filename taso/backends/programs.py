"""Compiled graphs, which compile anew what is not known before they are called."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping

from taso.backends.base import Array
from taso.backends.stages import Runs, compiled, is_closed, is_known
from taso.graph import onnx_shapes
from taso.graph.evaluate import check_feeds
from taso.graph.graph import Graph, Value
from taso.graph.types import TensorType

MOST_SHAPES = 16
"""Combinations of input shapes whose programs are kept."""


class CompiledGraph(ABC):
    """A graph compiled for a backend with kernels of its own (an `Executable`), which says how to (`build`).

    Calls from several threads run one after the other. Where inputs have symbolic dimensions the graph is compiled at
    the first call with each combination of shapes; the latest such programs are kept. What depends on more than that,
    branches of Ifs above all, is compiled when it is known (`Stages`).
    """

    def __init__(self, graph: Graph) -> None:
        self._signature = _signature(graph)
        self._lock = threading.Lock()
        self._cache: OrderedDict[tuple[tuple[int, ...], ...], Runs] = OrderedDict()
        self._said: set[str] = set()
        static = all(map(is_known, (v.type for v in graph.inputs))) and is_closed(graph)
        self._fixed = self.build(graph) if static else None
        # a static program has laid out all it needs: the graph and its weights may go
        self._graph = self._signature if static else graph
        self._latest: Runs | None = self._fixed

    @abstractmethod
    def build(self, graph: Graph) -> Runs:
        """A program for a graph of which all is known."""

    def given(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """The feeds as arrays, defaults filled in."""
        return check_feeds(self._signature, feeds)

    def __call__(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs by name, arrays of their own. Raises `InputError` where `feeds` do not fit the inputs."""
        given = self.given(feeds)
        return self._for(given).run(given)

    def profile(self, feeds: Mapping[str, Array]) -> list[tuple[str, float]]:
        """One inference: for each kernel launched its operators and the seconds it took."""
        given = self.given(feeds)
        return self._for(given).profile(given)

    @property
    def kernels(self) -> int:
        """Kernels that one run launches, changes of layout included; of symbolic shapes those of the latest call."""
        return self._latest.kernels if self._latest is not None else 0

    @property
    def operators(self) -> list[tuple[str, str]]:
        """Each operator that one run computes, and how: "own" by a kernel of this backend, else "evaluated".

        Of symbolic shapes, and where branches are taken, those of the latest call.
        """
        return list(self._latest.operators) if self._latest is not None else []

    @property
    def peak_bytes(self) -> int:
        """Bytes of the arena that holds inputs, outputs and all between; as `kernels`, of the latest call."""
        return self._latest.peak_bytes if self._latest is not None else 0

    def _for(self, given: Mapping[str, Array]) -> Runs:
        if self._fixed is not None:
            return self._fixed
        key = tuple(getattr(given[name], "shape", ()) for name in self._signature.input_names)
        with self._lock:
            if key not in self._cache:
                self._cache[key] = compiled(specialise(self._graph, given), self.build, self._said)
            self._cache.move_to_end(key)
            while len(self._cache) > MOST_SHAPES:
                self._cache.popitem(last=False)
            self._latest = self._cache[key]
            return self._latest


def _signature(graph: Graph) -> Graph:
    """The inputs of a graph alone: enough to check what is fed."""
    alone = Graph()
    alone.inputs = list(graph.inputs)
    alone.input_names = list(graph.input_names)
    alone.info.input_defaults = dict(graph.info.input_defaults)
    return alone


def specialise(graph: Graph, given: Mapping[str, Array]) -> Graph:
    """The graph with its inputs' types those of the arrays `given`, and all types behind them inferred anew.

    Raises `ShapeError` where an operator does not take these shapes.
    """
    types: dict[Value, TensorType] = {}
    for name, value in zip(graph.input_names, graph.inputs, strict=True):
        array = given[name]
        if value.type.other is None and hasattr(array, "shape"):
            types[value] = TensorType(value.type.dtype, array.shape)
    return onnx_shapes.specialise(graph, types)
