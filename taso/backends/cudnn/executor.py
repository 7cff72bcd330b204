"""From a graph to a program on a device: kernels designed, weights laid out, memory in one block, launches captured.

What follows each other without the host is one CUDA graph, captured when the program is made and replayed at each call,
on the caller's stream. Inputs may lie on the device; then outputs do, too.
"""

from __future__ import annotations

import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from taso.backends.arena import place_regions
from taso.backends.base import Array
from taso.backends.building import Builder, Lie, Task, is_object, opened
from taso.backends.cudnn.device import Device, Flag
from taso.backends.cudnn.kernels import design
from taso.backends.cudnn.launching import BytesLaunch, replays
from taso.backends.lowering import FLOAT32, PLAIN, Kernel, Lowering, Operand, with_wholes
from taso.backends.places import OPERAND, RESULT, ArraySpec, Block, Place, logical_spec, plain_spec
from taso.backends.programs import CompiledGraph
from taso.backends.recipe import Call, Launch, Recipe, Supply
from taso.backends.stages import EVALUATED
from taso.graph.evaluate import check_feeds, constant_value
from taso.graph.graph import Graph, Value

log = logging.getLogger(__name__)

NAME = "cudnn"
"""The backend's name, by which a graph knows what was chosen for it."""

ALIGNED = 16
"""Bytes at a multiple of which every tensor begins: what cuDNN is told, and what kernels of ours read at once."""


def name_of(precision: str) -> str:
    """The backend's name when it computes in that precision."""
    return NAME if precision == FLOAT32 else f"{NAME} {precision}"


# ── building a program ───────────────────────────────────────────────────────────────────────────────────────────


class _Builder(Builder):
    """Makes one `DeviceProgram` of a graph whose types are static."""

    library = "cuDNN"
    alignment = ALIGNED

    def __init__(self, graph: Graph, lowering: Lowering, device: Device) -> None:
        super().__init__(graph, lowering, name_of(lowering.precision))
        self.device = device

    # ── what differs from other backends ─────────────────────────────────────────────────────────────────────────

    def design(self, kernel: Kernel, supply: Supply, in_place: int | None, careful: bool) -> Recipe:
        return design(kernel, self.device, supply, self.lowering.precision, careful, in_place)

    def copying(self, operand: int, start: int, count: int) -> Launch:
        return BytesLaunch("copy", self.device, Place(OPERAND, operand), Place(RESULT, 0, start), count)

    def taken(self, operand: Operand, address: int) -> Callable[[], Array]:
        spec = logical_spec(Place(OPERAND), operand.type, operand.layout, 1)
        view = self.device.view(spec, address)
        return lambda: self.device.fetched(view, spec.dtype)

    def put(self, result: Operand, address: int) -> Callable[[Array], None]:
        view = self.device.view(logical_spec(Place(RESULT), result.type, result.layout, 1), address)
        return lambda found: self.device.fill(view, found)

    # ── binding ──────────────────────────────────────────────────────────────────────────────────────────────────

    def program(self) -> DeviceProgram:
        self.list_tasks()
        self.decide()
        size = place_regions(self.regions)
        arena = self.device.reserve(size)
        program = DeviceProgram(self.device, arena, size)
        for task in self.tasks:
            self.add(program, task, arena.address)
        for name, value in zip(self.graph.input_names, self.graph.inputs, strict=True):
            if value in self.cells:
                program.object_inputs.append((name, self.cells[value]))
            elif (value, PLAIN) in self.home:
                program.inputs.append((name, self.view((value, PLAIN), arena.address)))
        for name, value in self.graph.outputs:
            program.outputs.append((name, self.output(value, arena.address)))
        program.capture()
        return program

    def add(self, program: DeviceProgram, task: Task, base: int) -> None:
        launches = task.recipe.launches if task.recipe is not None else [None]
        constants = task.recipe.constants if task.recipe is not None else []
        bound = self.bind(task, base)
        for launch, (call, kept) in zip(launches, bound, strict=True):
            program.add(task.name, call, launch is not None and replays(launch), (kept, constants))
        program.watch(constants)
        program.operators += [(s.op.label, task.how) for s in task.kernel.steps]
        evaluates = task.how == EVALUATED
        if evaluates and not any(is_object(o.type) for o in (*task.kernel.operands, *task.kernel.results)):
            log.info("%s has no kernel on the GPU: it goes to the host and back", task.name)

    def view(self, lie: Lie, base: int) -> Array:
        return self.device.view(plain_spec(Place(OPERAND), lie[0].type), self.address(lie, base))

    def output(self, value: Value, base: int) -> Callable[[bool], Array]:
        """What gives an output, on the device where that is asked for."""
        device = self.device
        if value.node.constant:
            array = constant_value(value)
            if is_object(value.type):
                return lambda there: array.copy()
            return lambda there: _brought(device, array) if there else array.copy()
        if value in self.cells:
            get = opened(self.cells[value])
            return lambda there: get()
        have = self.plan.layouts[value]
        alike = (value, PLAIN) not in self.home and have != PLAIN
        view, dtype = self.view((value, have if alike else PLAIN), base), value.type.dtype.numpy
        return lambda there: device.own(view, dtype) if there else device.fetched(view, dtype)


def _brought(device: Device, array: Array) -> Array:
    """A copy of a host's array on the device."""
    block = device.lay_out(array)
    contiguous = np.ascontiguousarray(array)
    spec = ArraySpec(Place(OPERAND), contiguous.dtype, contiguous.shape, contiguous.strides)
    return device.own(device.view(spec, block.address), contiguous.dtype)


# ── programs ─────────────────────────────────────────────────────────────────────────────────────────────────────


class DeviceProgram:
    """Bound launches over one block of a device's memory, for inputs of one shape each."""

    def __init__(self, device: Device, arena: Block, peak_bytes: int) -> None:
        self.peak_bytes = peak_bytes
        self.inputs: list[tuple[str, Array]] = []
        self.object_inputs: list[tuple[str, list[object]]] = []
        self.outputs: list[tuple[str, Callable[[bool], Array]]] = []
        self.names: list[str] = []
        self.operators: list[tuple[str, str]] = []
        self._device = device
        self._launches: list[tuple[Call, bool]] = []
        self._calls: list[Call] = []
        self._kept: list[object] = [arena]
        self._flags: list[Flag] = []
        self._lock = threading.Lock()
        self._last: list[object] = [None]
        # memory must not go to others while a run of this is under way
        weakref.finalize(self, _settle, device, self._last).atexit = False

    def add(self, name: str, call: Call, replays: bool, kept: object) -> None:
        """Adds a launch; `replays` says whether it can be captured."""
        self.names.append(name)
        self._launches.append((call, replays))
        self._kept.append(kept)

    def watch(self, constants: Sequence[Block]) -> None:
        """Has what kernels report among these be looked at behind each run."""
        self._flags += [block.owner for block in constants if isinstance(block.owner, Flag)]

    def capture(self) -> None:
        """Makes one call of all launches between which the host has nothing to do."""
        with self._device.working("preparing a model"):
            for replays, together in itertools.groupby(self._launches, key=lambda pair: pair[1]):
                calls = [call for call, _ in together]
                self._calls += [self._device.replayed(calls)] if replays else calls

    @property
    def kernels(self) -> int:
        return len(self._launches)

    @property
    def replays(self) -> int:
        """Captured graphs that one run launches."""
        return len([1 for replays, _ in itertools.groupby(self._launches, key=lambda pair: pair[1]) if replays])

    def run(self, given: Mapping[str, Array]) -> dict[str, Array]:
        """One inference on checked inputs; outputs are on the device where an input is.

        Raises `BackendError` where an index pointed outside: in this run, or, where the outputs of the one before were
        not waited for, in that.
        """
        device = self._device
        there = any(device.given(array) is not None for array in given.values())
        with self._lock, device.working("running a model"), device.turn(self._last[0]) as done:
            with np.errstate(all="ignore"):
                self._enter(given)
                for call in self._calls:
                    call()
                outputs = {name: get(there) for name, get in self.outputs}
            self._last[0] = done()
            self._check()
            return outputs

    def profile(self, given: Mapping[str, Array]) -> list[tuple[str, float]]:
        """One inference, with the seconds that each launch took when the device waited for it."""
        device = self._device
        with self._lock, device.working("running a model"), device.turn(self._last[0]) as done:
            with np.errstate(all="ignore"):
                self._enter(given)
                pairs = zip(self.names, self._launches, strict=True)
                times = [(name, device.seconds(call)) for name, (call, _) in pairs]
            self._last[0] = done()
            self._check()
            return times

    def _check(self) -> None:
        for flag in self._flags:
            flag.check()

    def _enter(self, given: Mapping[str, Array]) -> None:
        for name, view in self.inputs:
            array = self._device.given(given[name])
            self._device.fill(view, given[name] if array is None else array)
        for name, cell in self.object_inputs:
            cell[0] = given[name]


def _settle(device: Device, last: list[object]) -> None:
    try:
        device.wait(last[0])
    except Exception as error:
        # what failed has been told where it ran
        log.debug("a program that goes away could not be waited for: %s", error)


class Program(CompiledGraph):
    """A graph compiled for a device (an `Executable`); inputs may be arrays of NumPy, CuPy, or of whoever has
    `__cuda_array_interface__` or `__dlpack__`.

    Outputs are NumPy arrays, or CuPy arrays where an input lies on the GPU. Work is ordered on the caller's current
    stream.
    """

    def __init__(self, graph: Graph, lowering: Lowering, device: Device) -> None:
        self._lowering = lowering
        self._device = device
        super().__init__(graph)

    def build(self, graph: Graph) -> DeviceProgram:
        return _Builder(with_wholes(graph, self._lowering), self._lowering, self._device).program()

    def given(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """The feeds as arrays, NumPy's or the device's, defaults filled in."""
        if not isinstance(feeds, Mapping):
            return check_feeds(self._signature, feeds)
        there = {name: self._device.given(fed) for name, fed in feeds.items()}
        stand_ins = {name: fed if (found := there[name]) is None else _like(found) for name, fed in feeds.items()}
        checked = check_feeds(self._signature, stand_ins)
        return {name: found if (found := there.get(name)) is not None else array for name, array in checked.items()}

    def __call__(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs by name, arrays of their own. Raises `InputError` where `feeds` do not fit the inputs."""
        given = self.given(feeds)
        runs, device = self._for(given), self._device
        if isinstance(runs, DeviceProgram):
            return runs.run(given)
        # what is decided between the parts is decided on the host
        there = {name for name, array in given.items() if device.given(array) is not None}
        found = runs.run({n: device.fetched(a, a.dtype) if n in there else a for n, a in given.items()})
        return {n: _brought(device, a) if there and isinstance(a, np.ndarray) else a for n, a in found.items()}


def _like(array: Array) -> Array:
    """An array of NumPy's of this element type and shape, in next to no memory."""
    return np.broadcast_to(np.zeros((), array.dtype), array.shape)
