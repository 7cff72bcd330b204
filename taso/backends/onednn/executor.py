"""From a graph to a program: kernels designed, weights laid out, memory planned, everything bound before the first run.

A run copies the inputs to their places, makes the bound calls one after the other, and copies the outputs out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from taso.backends.arena import place_regions
from taso.backends.base import Array
from taso.backends.building import Builder, Lie, opened
from taso.backends.lowering import FLOAT32, PLAIN, Kernel, Lowering, Operand, with_wholes
from taso.backends.onednn.kernels import design
from taso.backends.onednn.library import Library, library, status_error
from taso.backends.onednn.recipe import ArrayLaunch, Call, Recipe, Supply
from taso.backends.pages import zeroed
from taso.backends.places import (
    OPERAND,
    RESULT,
    ArraySpec,
    Block,
    Place,
    from_plain,
    logical_spec,
    plain_spec,
    to_plain,
)  # fmt: skip
from taso.backends.programs import CompiledGraph
from taso.graph.errors import BackendError
from taso.graph.evaluate import constant_value
from taso.graph.graph import Graph, Value

NAME = "onednn"
"""The backend's name, by which a graph knows what was chosen for it."""


def name_of(precision: str) -> str:
    """The backend's name when it computes in that precision."""
    return NAME if precision == FLOAT32 else f"{NAME} {precision}"


@contextmanager
def threads_in_force(lib: Library, count: int) -> Iterator[None]:
    """Has oneDNN use `count` threads when called from this thread, and puts back what was."""
    before = lib.get_max_threads()
    if before == count:
        yield
        return
    lib.set_num_threads(count)
    try:
        yield
    finally:
        lib.set_num_threads(before)


# ── building a program ───────────────────────────────────────────────────────────────────────────────────────────


class _Builder(Builder):
    """Makes one `StaticProgram` of a graph whose types are static."""

    library = "oneDNN"

    def __init__(self, graph: Graph, lowering: Lowering) -> None:
        super().__init__(graph, lowering, name_of(lowering.precision))

    def design(self, kernel: Kernel, supply: Supply, in_place: int | None, careful: bool) -> Recipe:
        return design(kernel, self.layouts, supply, in_place, careful, self.lowering.precision)

    def copying(self, operand: int, start: int, count: int) -> ArrayLaunch:
        return _copy_bytes(operand, start, count)

    def taken(self, operand: Operand, address: int) -> Callable[[], Array]:
        view = logical_spec(Place(OPERAND), operand.type, operand.layout, self.block).at(address)
        block = self.block
        return lambda: to_plain(view, operand.type, operand.layout, block)

    def put(self, result: Operand, address: int) -> Callable[[Array], None]:
        view = logical_spec(Place(RESULT), result.type, result.layout, self.block).at(address)
        block = self.block
        return lambda found: from_plain(view, found, result.type, result.layout, block)

    def program(self, threads: int) -> StaticProgram:
        self.list_tasks()
        self.decide()
        size = place_regions(self.regions)
        arena = zeroed(size)
        base = arena.ctypes.data
        program = StaticProgram(threads, arena, size)
        for task in self.tasks:
            calls = self.bind(task, base)
            program.add(task.name, calls, task.recipe.constants if task.recipe is not None else [])
            program.operators += [(s.op.label, task.how) for s in task.kernel.steps]
        for name, value in zip(self.graph.input_names, self.graph.inputs, strict=True):
            if value in self.cells:
                program.object_inputs.append((name, self.cells[value]))
            elif (value, PLAIN) in self.home:
                program.inputs.append((name, self.view((value, PLAIN), base)))
        for name, value in self.graph.outputs:
            program.outputs.append((name, self.output(value, base)))
        return program

    def view(self, lie: Lie, base: int) -> Array:
        return plain_spec(Place(OPERAND), lie[0].type).at(self.address(lie, base))

    def output(self, value: Value, base: int) -> Callable[[], Array]:
        if value.node.constant:
            array = constant_value(value)
            return array.copy
        if value in self.cells:
            return opened(self.cells[value])
        have = self.plan.layouts[value]
        alike = (value, PLAIN) not in self.home and have != PLAIN
        return self.view((value, have if alike else PLAIN), base).copy


def _copy_bytes(operand: int, start: int, count: int) -> ArrayLaunch:
    byte = np.dtype(np.uint8)

    def copy(inputs: Sequence[Array], outs: Sequence[Array]) -> None:
        np.copyto(outs[0][start:], inputs[0])

    source = ArraySpec(Place(OPERAND, operand), byte, (count,), (1,))
    return ArrayLaunch("copy", copy, (source,), (ArraySpec(Place(RESULT), byte, (start + count,), (1,)),))


# ── programs ────────────────────────────────────────────────────────────────────────────────────────────────────────


class StaticProgram:
    """Bound calls over one arena, for inputs of one shape each."""

    def __init__(self, threads: int, arena: Array, peak_bytes: int) -> None:
        self.peak_bytes = peak_bytes
        self.inputs: list[tuple[str, Array]] = []
        self.object_inputs: list[tuple[str, list[object]]] = []
        self.outputs: list[tuple[str, Callable[[], Array]]] = []
        self.names: list[str] = []
        self.operators: list[tuple[str, str]] = []
        self._calls: list[Call] = []
        self._kept: list[object] = [arena]
        self._threads = threads
        self._library = library()
        self._lock = threading.Lock()

    def add(self, name: str, calls: Sequence[tuple[Call, object]], constants: Sequence[Block]) -> None:
        """Adds the calls of a kernel."""
        self._kept.append(constants)
        for call, kept in calls:
            self.names.append(name)
            self._calls.append(call)
            self._kept.append(kept)

    @property
    def kernels(self) -> int:
        return len(self._calls)

    def run(self, given: Mapping[str, Array]) -> dict[str, Array]:
        """One inference on checked inputs."""
        with self._lock, threads_in_force(self._library, self._threads), np.errstate(all="ignore"):
            self._enter(given)
            for call in self._calls:
                status = call()
                if status:
                    raise _failed(status)
            return self._leave()

    def profile(self, given: Mapping[str, Array]) -> list[tuple[str, float]]:
        """One inference, with the seconds that each call took."""
        with self._lock, threads_in_force(self._library, self._threads), np.errstate(all="ignore"):
            self._enter(given)
            times = []
            for name, call in zip(self.names, self._calls, strict=True):
                started = time.perf_counter()
                status = call()
                times.append((name, time.perf_counter() - started))
                if status:
                    raise _failed(status)
            self._leave()
            return times

    def _enter(self, given: Mapping[str, Array]) -> None:
        for name, place in self.inputs:
            np.copyto(place, given[name])
        for name, cell in self.object_inputs:
            cell[0] = given[name]

    def _leave(self) -> dict[str, Array]:
        return {name: get() for name, get in self.outputs}


def _failed(status: object) -> BackendError:
    return status_error("dnnl_primitive_execute", status if isinstance(status, int) else -1)


class Program(CompiledGraph):
    """A graph compiled for oneDNN (an `Executable`). Calls from several threads run one after the other.

    Inputs that are not finite are passed to oneDNN as they are: its activations and pools do not all pass NaN on.
    """

    def __init__(self, graph: Graph, lowering: Lowering, threads: int) -> None:
        self._lowering = lowering
        self._threads = threads
        super().__init__(graph)

    def build(self, graph: Graph) -> StaticProgram:
        with threads_in_force(library(), self._threads):
            return _Builder(with_wholes(graph, self._lowering), self._lowering).program(self._threads)
