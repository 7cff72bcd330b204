"""From a graph to a program: kernels designed, weights laid out, memory planned, everything bound before the first run.

A run copies the inputs to their places, makes the bound calls one after the other, and copies the outputs out.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from taso.backends.base import Array
from taso.backends.fallback import evaluated
from taso.backends.lowering import (
    FLOAT32,
    PLAIN,
    Kernel,
    Lowering,
    Operand,
    Plan,
    choices_of,
    is_view,
    lower,
    with_wholes,
)  # fmt: skip
from taso.backends.onednn.arena import Region, place_regions
from taso.backends.onednn.kernels import BY_DEFINITION, NotInPlace, design
from taso.backends.onednn.library import Library, library, status_error
from taso.backends.onednn.pages import zeroed
from taso.backends.onednn.places import (
    OPERAND,
    RESULT,
    ArraySpec,
    Block,
    Place,
    from_plain,
    logical_spec,
    plain_spec,
    tensor_bytes,
    to_plain,
)  # fmt: skip
from taso.backends.onednn.recipe import ArrayLaunch, Call, Recipe
from taso.backends.onednn.stages import EVALUATED, OWN, Runs, compiled, is_closed, is_known
from taso.backends.ordering import ordered, slice_offset
from taso.graph import onnx_shapes
from taso.graph.errors import BackendError
from taso.graph.evaluate import check_feeds, constant_value
from taso.graph.graph import Graph, Value
from taso.graph.operator import Operator, Trait, Weight
from taso.graph.types import DType, TensorType

log = logging.getLogger(__name__)

NAME = "onednn"
"""The backend's name, by which a graph knows what was chosen for it."""


def name_of(precision: str) -> str:
    """The backend's name when it computes in that precision."""
    return NAME if precision == FLOAT32 else f"{NAME} {precision}"


_MOST_SHAPES = 16

Lie = tuple[Value, str]


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


# ── values that are not finite ───────────────────────────────────────────────────────────────────────────────────
# How far a value may be from finite because of a weight: not at all; −∞ where a mask says so; anything.

_FINITE, _MASKED, _WILD = 0, 1, 2


def _wildness(array: Array) -> int:
    if array.dtype.kind not in "fV" or array.size == 0:
        return _FINITE
    low, high = (float(f(array.astype(np.float32, copy=False))) for f in (np.min, np.max))
    if np.isfinite(low) and np.isfinite(high):
        return _FINITE
    return _MASKED if low == -np.inf and np.isfinite(high) else _WILD


def _bears_masks(op: Operator) -> bool:
    return op.name in ("Add", "Where", "Softmax") or op.has(Trait.MOVES_DATA)


def _spread(kernel: Kernel, operands: Sequence[int]) -> tuple[bool, int]:
    """Whether a kernel meets values that oneDNN may treat otherwise than the operators say, and what comes out."""
    steps: list[int] = []
    careful = False
    for step in kernel.steps:
        given = [operands[i] if i >= 0 else steps[-1 - i] for i in step.inputs if i is not None]
        level = max(given, default=_FINITE)
        if level == _WILD or level == _MASKED and not _bears_masks(step.op):
            careful, level = True, _WILD
        # a softmax makes zeros of −∞
        steps.append(_FINITE if level == _MASKED and step.op.name == "Softmax" else level)
    return careful, steps[-1] if steps else max(operands, default=_FINITE)


# ── constants ────────────────────────────────────────────────────────────────────────────────────────────────────


_LAID_OUT: weakref.WeakValueDictionary[tuple[Hashable, str], Block] = weakref.WeakValueDictionary()
"""Constants as some program that still lives has them: programs of one model for several shapes, or of a graph and a
rewritten one, share what both read."""


def _content_key(value: Value) -> Hashable:
    """Equal for constants that are computed from the same weights in the same way, in whichever graph."""
    weight = value.node.attrs.get("data")
    if isinstance(weight, Weight):
        # not the weight itself, which may go once it is laid out
        return weakref.ref(weight)
    inputs = tuple(_content_key(v) if v is not None else None for v in value.node.inputs)
    return value.node.op.name, value.node.attrs, inputs, value.index


class _Constants:
    """Constant operands laid out, shared by the kernels that read the same one in the same way."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[Hashable, str], Block] = {}
        self.wildness: dict[Value, int] = {}


class _JobSupply:
    """The constants of one kernel; what was loaded for it is dropped with it."""

    def __init__(self, constants: _Constants, operands: Sequence[Value]) -> None:
        self._constants = constants
        self._operands = operands
        self._loaded: dict[int, Array] = {}

    def array(self, operand: int) -> Array:
        if operand not in self._loaded:
            self._loaded[operand] = constant_value(self._operands[operand])
        return self._loaded[operand]

    def keep(self, operand: int, label: str, make: Callable[[Array], Block]) -> Block:
        key = (_content_key(self._operands[operand]), label)
        if key not in self._constants.blocks:
            shared = _LAID_OUT.get(key)
            if shared is None:
                shared = _LAID_OUT[key] = make(self.array(operand))
            self._constants.blocks[key] = shared
        return self._constants.blocks[key]

    def wildness(self, operand: int) -> int:
        value = self._operands[operand]
        if value not in self._constants.wildness:
            self._constants.wildness[value] = _wildness(self.array(operand))
        return self._constants.wildness[value]


# ── building a program ───────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class _Task:
    """A kernel in the program: what it reads (None: a constant) and makes, and what has been decided for it."""

    kernel: Kernel
    operands: tuple[Value, ...]
    reads: list[Lie | None]
    writes: list[Lie]
    recipe: Recipe | None = None
    scratch: list[Region] = field(default_factory=list)

    @property
    def name(self) -> str:
        return "+".join(s.op.name for s in self.kernel.steps) or "Reorder"

    @property
    def how(self) -> str:
        """Whether kernels of ours run it, or the operators' definitions."""
        launches = self.recipe.launches if self.recipe is not None else None
        if launches is None or any(launch.name.startswith(BY_DEFINITION) for launch in launches):
            return EVALUATED
        return OWN


def _is_object(t: TensorType) -> bool:
    """Whether values of this type have no place in the arena."""
    return t.other is not None or t.dtype in (DType.STRING, DType.UNDEFINED) or not t.static


class _Builder:
    """Makes one `Program` of a graph whose types are static."""

    def __init__(self, graph: Graph, lowering: Lowering) -> None:
        self.graph = graph
        self.layouts = lowering.layouts
        self.block = lowering.layouts.block or 1
        self.precision = lowering.precision
        choices = choices_of(graph, name_of(lowering.precision))
        self.plan: Plan = ordered(graph, lower(graph, lowering, choices), lowering)
        self.tasks: list[_Task] = []
        self.last_use: dict[Lie, int] = {}
        self.home: dict[Lie, tuple[Region, int]] = {}
        self.regions: list[Region] = []
        self.constants = _Constants()
        self.wildness: dict[Value, int] = {}
        self.cells: dict[Value, list[object]] = {}
        self.warned = False

    # ── tasks ────────────────────────────────────────────────────────────────────────────────────────────────────

    def list_tasks(self) -> None:
        changed: set[Lie] = set()
        for job in self.plan.jobs:
            reads = [self.asked(v, o, changed) for v, o in zip(job.operands, job.kernel.operands, strict=True)]
            writes = [(v, self.plan.layouts[v]) for v in job.results]
            self.tasks.append(_Task(job.kernel, job.operands, reads, writes))
        outputs = [
            self.asked(v, Operand(v.type, PLAIN, v.node.constant), changed) for _, v in self.graph.outputs
        ]  # fmt: skip
        for number, task in enumerate(self.tasks):
            self.last_use.update((lie, number) for lie in task.reads if lie is not None)
        self.last_use.update((lie, len(self.tasks)) for lie in outputs if lie is not None)

    def asked(self, value: Value, operand: Operand, changed: set[Lie]) -> Lie | None:
        """How a value lies for one who asks; adds the change of layout where there is none yet."""
        if operand.constant:
            return None
        have = self.plan.layouts[value]
        if have == operand.layout or _is_object(value.type) or self.layouts.alike(value.type, have, operand.layout):
            return value, have
        lie = (value, operand.layout)
        if lie not in changed:
            changed.add(lie)
            kernel = Kernel((Operand(value.type, have, False),), (), (Operand(value.type, operand.layout, False),))
            self.tasks.append(_Task(kernel, (value,), [(value, have)], [lie]))
        return lie

    # ── memory ───────────────────────────────────────────────────────────────────────────────────────────────────

    def new_region(self, size: int, first: int, last: int) -> Region:
        region = Region(size)
        region.live(first, last)
        self.regions.append(region)
        return region

    def settle(self, lie: Lie, region: Region, offset: int, number: int) -> None:
        """Says where a tensor that step `number` makes is."""
        self.home[lie] = (region, offset)
        root, _ = region.root()
        root.members.append(lie)
        root.live(number, max(number, self.last_use.get(lie, number)))

    def fresh(self, lie: Lie, number: int) -> None:
        self.settle(lie, self.new_region(tensor_bytes(lie[0].type), number, number), 0, number)

    def span(self, lie: Lie) -> tuple[Region, int, int]:
        """Root region, first and last byte (exclusive) of a tensor."""
        region, offset = self.home[lie]
        root, base = region.root()
        return root, base + offset, base + offset + tensor_bytes(lie[0].type)

    def overwritable(self, task: _Task, number: int, operand: int) -> bool:
        """Whether nothing else needs the memory of an operand once this task has run."""
        lie, result = task.reads[operand], task.kernel.results[0]
        if lie is None or tensor_bytes(lie[0].type) != tensor_bytes(result.type) or len(task.writes) != 1:
            return False
        root, start, stop = self.span(lie)
        if root.last > number:
            return False
        others = [r for i, r in enumerate(task.reads) if i != operand and r is not None]
        spans = [self.span(r) for r in others]
        return all(r is not root or e <= start or s >= stop for r, s, e in spans)

    # ── tasks to recipes ─────────────────────────────────────────────────────────────────────────────────────────

    def decide(self) -> None:
        for value in self.graph.inputs:
            if _is_object(value.type):
                self.cells[value] = [None]
            elif (value, PLAIN) in self.last_use:
                self.fresh((value, PLAIN), -1)
        for number, task in enumerate(self.tasks):
            if any(_is_object(t.type) for t in (*task.kernel.operands, *task.kernel.results)):
                self.decide_object(task, number)
            elif is_view(task.kernel):
                self.decide_view(task, number)
            else:
                self.decide_kernel(task, number)

    def decide_object(self, task: _Task, number: int) -> None:
        self.note_wildness(task)
        for lie in task.writes:
            if _is_object(lie[0].type):
                self.cells[lie[0]] = [None]
            else:
                self.fresh(lie, number)

    def decide_view(self, task: _Task, number: int) -> None:
        self.note_wildness(task)
        step = task.kernel.steps[0]
        if step.op.name == "Concat":
            return self.decide_concat(task, number)
        source = task.reads[0]
        if source is None:
            raise BackendError(f"{step.op.name} of a constant was not computed beforehand")
        region, offset = self.home[source]
        if step.op.name == "Slice":
            offset += slice_offset(task.kernel)
        for lie in task.writes:
            self.settle(lie, region, offset, number)
            if step.op.name == "Split":
                offset += tensor_bytes(lie[0].type)
        task.recipe = Recipe()

    def decide_concat(self, task: _Task, number: int) -> None:
        """Has the parts computed where they belong; what lies elsewhere for good is copied."""
        (result,) = task.writes
        self.fresh(result, number)
        whole, _ = self.home[result]
        step, recipe, start = task.kernel.steps[0], Recipe(), 0
        for reference in step.inputs:
            index = 0 if reference is None else reference
            lie = task.reads[index]
            if lie is None:
                raise BackendError("a Concat of constants was not computed beforehand")
            root, first, last = self.span(lie)
            if root is not whole and first == 0 and last == root.size:
                whole.absorb(root, start)
            else:
                recipe.launches.append(_copy_bytes(index, start, last - first))
            start += last - first
        task.recipe = recipe

    def decide_kernel(self, task: _Task, number: int) -> None:
        supply = _JobSupply(self.constants, task.operands)
        careful = self.note_wildness(task, supply)
        recipe = design(task.kernel, self.layouts, supply, None, careful, self.precision)
        shared = None
        for operand in recipe.sums:
            if self.overwritable(task, number, operand):
                try:
                    recipe = design(task.kernel, self.layouts, supply, operand, careful, self.precision)
                    shared = operand
                    break
                except NotInPlace as reason:
                    log.debug("%s does not add in place: %s", task.name, reason)
        if shared is None:
            free = (i for i in sorted(recipe.shares) if self.overwritable(task, number, i))
            shared = next(free, None)
        task.recipe = recipe
        task.scratch = [self.new_region(size, number, number) for size in recipe.scratch]
        source = None if shared is None else task.reads[shared]
        if source is None:
            for lie in task.writes:
                self.fresh(lie, number)
        else:
            self.settle(task.writes[0], *self.home[source], number)

    def note_wildness(self, task: _Task, supply: _JobSupply | None = None) -> bool:
        supply = supply or _JobSupply(self.constants, task.operands)
        levels = [
            supply.wildness(i) if o.constant else self.wildness.get(v, _FINITE)
            for i, (v, o) in enumerate(zip(task.operands, task.kernel.operands, strict=True))
        ]
        careful, level = _spread(task.kernel, levels)
        self.wildness.update((v, level) for v, _ in task.writes)
        if careful and not self.warned:
            self.warned = True
            log.warning("weights of the model are not finite: what depends on them runs without oneDNN, slowly")
        return careful

    # ── binding ──────────────────────────────────────────────────────────────────────────────────────────────────

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

    def address(self, lie: Lie | None, base: int) -> int:
        if lie is None or lie not in self.home:
            return 0
        root, start, _ = self.span(lie)
        return base + root.offset + start

    def view(self, lie: Lie, base: int) -> Array:
        return plain_spec(Place(OPERAND), lie[0].type).at(self.address(lie, base))

    def output(self, value: Value, base: int) -> Callable[[], Array]:
        if value.node.constant:
            array = constant_value(value)
            return array.copy
        if value in self.cells:
            return _opened(self.cells[value])
        have = self.plan.layouts[value]
        alike = (value, PLAIN) not in self.home and have != PLAIN
        return self.view((value, have if alike else PLAIN), base).copy

    def bind(self, task: _Task, base: int) -> list[tuple[Call, object]]:
        if task.recipe is None:
            return [(self.object_call(task, base), None)]
        if any(lie is not None and lie not in self.home for lie in task.reads):
            raise BackendError(f"{task.name} reads what no kernel makes")
        return task.recipe.bind(
            [self.address(lie, base) for lie in task.reads], [self.address(lie, base) for lie in task.writes],
            [base + region.root()[0].offset for region in task.scratch],
        )  # fmt: skip

    def object_call(self, task: _Task, base: int) -> Call:
        """A kernel that reads or makes what has no place in the arena, by the operators' definitions."""
        get = [self.reader(v, lie, o, base) for v, lie, o in zip(
            task.operands, task.reads, task.kernel.operands, strict=True)]  # fmt: skip
        put = [self.writer(lie, o, base) for lie, o in zip(task.writes, task.kernel.results, strict=True)]
        run = evaluated(task.kernel)

        def call() -> None:
            for store, found in zip(put, run([g() for g in get]), strict=True):
                store(found)

        return call

    def reader(self, value: Value, lie: Lie | None, operand: Operand, base: int) -> Callable[[], Array]:
        if lie is None:
            array = constant_value(value)
            return lambda: array
        if value in self.cells:
            return _opened(self.cells[value])
        view = logical_spec(Place(OPERAND), operand.type, operand.layout, self.block).at(self.address(lie, base))
        block = self.block
        return lambda: to_plain(view, operand.type, operand.layout, block)

    def writer(self, lie: Lie, result: Operand, base: int) -> Callable[[object], None]:
        value = lie[0]
        if value in self.cells:
            cell = self.cells[value]
            return lambda found: cell.__setitem__(0, found)
        if lie not in self.last_use:
            return lambda found: None
        view = logical_spec(Place(RESULT), result.type, result.layout, self.block).at(self.address(lie, base))
        block, t, layout, name = self.block, result.type, result.layout, value.node.op.name

        def store(found: object) -> None:
            if not isinstance(found, np.ndarray) or found.shape != t.static_shape or found.dtype != t.dtype.numpy:
                raise BackendError(f"{name} gave {_shown(found)} where {t} was declared")
            from_plain(view, found, t, layout, block)

        return store


def _opened(cell: list[object]) -> Callable[[], Array]:
    return lambda: cell[0]  # type: ignore[return-value]  # strings are arrays; sequences travel as they are


def _shown(found: object) -> str:
    return f"{found.dtype}{list(found.shape)}" if isinstance(found, np.ndarray) else type(found).__name__


def _copy_bytes(operand: int, start: int, count: int) -> ArrayLaunch:
    byte = np.dtype(np.uint8)

    def copy(inputs: Sequence[Array], outs: Sequence[Array]) -> None:
        np.copyto(outs[0][start:], inputs[0])

    source = ArraySpec(Place(OPERAND, operand), byte, (count,), (1,))
    return ArrayLaunch("copy", copy, (source,), (ArraySpec(Place(RESULT), byte, (start + count,), (1,)),))


# ── programs ─────────────────────────────────────────────────────────────────────────────────────────────────────


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


class Program:
    """A graph compiled for oneDNN (an `Executable`). Calls from several threads run one after the other.

    Where inputs have symbolic dimensions the graph is compiled at the first call with each combination of shapes; the
    latest such programs are kept. What depends on more than that, branches of Ifs above all, is compiled when it is
    known (`Stages`). Inputs that are not finite are passed to oneDNN as they are: its activations and pools do not all
    pass NaN on.
    """

    def __init__(self, graph: Graph, lowering: Lowering, threads: int) -> None:
        self._lowering = lowering
        self._threads = threads
        self._signature = _signature(graph)
        self._lock = threading.Lock()
        self._cache: OrderedDict[tuple[tuple[int, ...], ...], Runs] = OrderedDict()
        self._said: set[str] = set()
        static = all(map(is_known, (v.type for v in graph.inputs))) and is_closed(graph)
        self._fixed = self._build(graph) if static else None
        # a static program has laid out all it needs: the graph and its weights may go
        self._graph = self._signature if static else graph
        self._latest: Runs | None = self._fixed

    def __call__(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs by name, arrays of their own. Raises `InputError` where `feeds` do not fit the inputs."""
        given = check_feeds(self._signature, feeds)
        return self._for(given).run(given)

    def profile(self, feeds: Mapping[str, Array]) -> list[tuple[str, float]]:
        """One inference: for each kernel launched its operators and the seconds it took."""
        given = check_feeds(self._signature, feeds)
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

    def _build(self, graph: Graph) -> StaticProgram:
        with threads_in_force(library(), self._threads):
            return _Builder(with_wholes(graph, self._lowering), self._lowering).program(self._threads)

    def _for(self, given: Mapping[str, Array]) -> Runs:
        if self._fixed is not None:
            return self._fixed
        key = tuple(getattr(given[name], "shape", ()) for name in self._signature.input_names)
        with self._lock:
            if key not in self._cache:
                self._cache[key] = compiled(specialise(self._graph, given), self._build, self._said)
            self._cache.move_to_end(key)
            while len(self._cache) > _MOST_SHAPES:
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
        if value.type.other is None and isinstance(array, np.ndarray):
            types[value] = TensorType(value.type.dtype, array.shape)
    return onnx_shapes.specialise(graph, types)
