"""From a graph to the parts of a program: kernels listed and designed, and where in one arena every value lies.

What all backends with kernels of their own share. A backend says how a kernel is designed, how bytes are copied, and
how values get into its memory and out of it (`Builder`'s abstract methods); it puts the bound calls together itself.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from taso.backends.arena import Region
from taso.backends.base import Array
from taso.backends.constants import Constants, JobSupply
from taso.backends.fallback import evaluated
from taso.backends.lowering import (
    PLAIN,
    Kernel,
    Lowering,
    Operand,
    Plan,
    change_of_layout,
    choices_of,
    is_view,
    lower,
    stored_bytes,
)
from taso.backends.ordering import ordered, slice_offset
from taso.backends.recipe import BY_DEFINITION, Call, Launch, NotInPlace, Recipe, Supply
from taso.backends.stages import EVALUATED, OWN
from taso.backends.wildness import FINITE, spread
from taso.graph.errors import BackendError
from taso.graph.evaluate import constant_value
from taso.graph.graph import Graph, Value
from taso.graph.types import DType, TensorType

log = logging.getLogger(__name__)

Lie = tuple[Value, str]
"""A value in a layout."""


@dataclass
class Task:
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


def is_object(t: TensorType) -> bool:
    """Whether values of this type have no place in the arena."""
    return t.other is not None or t.dtype in (DType.STRING, DType.UNDEFINED) or not t.static


class Builder(ABC):
    """The parts of a program of a graph whose types are static, for the backend of that name.

    `library` is what a user knows the kernels by; every tensor begins at a multiple of `alignment` bytes.
    """

    library: str
    alignment = 1

    def __init__(self, graph: Graph, lowering: Lowering, name: str) -> None:
        self.graph = graph
        self.lowering = lowering
        self.layouts = lowering.layouts
        self.block = lowering.layouts.block or 1
        choices = choices_of(graph, name)
        self.plan: Plan = ordered(graph, lower(graph, lowering, choices), lowering)
        self.tasks: list[Task] = []
        self.last_use: dict[Lie, int] = {}
        self.home: dict[Lie, tuple[Region, int]] = {}
        self.regions: list[Region] = []
        self.constants = Constants()
        self.wildness: dict[Value, int] = {}
        self.cells: dict[Value, list[object]] = {}
        self.warned = False

    # ── what a backend says ──────────────────────────────────────────────────────────────────────────────────────

    @abstractmethod
    def design(self, kernel: Kernel, supply: Supply, in_place: int | None, careful: bool) -> Recipe:
        """How a kernel runs; as `taso.backends.onednn.kernels.design`."""

    @abstractmethod
    def copying(self, operand: int, start: int, count: int) -> Launch:
        """A copy of the `count` bytes of an operand to the result's, from byte `start` on."""

    @abstractmethod
    def taken(self, operand: Operand, address: int) -> Callable[[], Array]:
        """What gives the plain array of an operand that lies there."""

    @abstractmethod
    def put(self, result: Operand, address: int) -> Callable[[Array], None]:
        """What writes a plain array there as the result lies."""

    # ── tasks ────────────────────────────────────────────────────────────────────────────────────────────────────

    def list_tasks(self) -> None:
        changed: set[Lie] = set()
        for job in self.plan.jobs:
            reads = [self.asked(v, o, changed) for v, o in zip(job.operands, job.kernel.operands, strict=True)]
            writes = [(v, self.plan.layouts[v]) for v in job.results]
            self.tasks.append(Task(job.kernel, job.operands, reads, writes))
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
        if have == operand.layout or is_object(value.type) or self.layouts.alike(value.type, have, operand.layout):
            return value, have
        lie = (value, operand.layout)
        if lie not in changed:
            changed.add(lie)
            kernel = change_of_layout(value.type, have, operand.layout, value in self.plan.narrow)
            self.tasks.append(Task(kernel, (value,), [(value, have)], [lie]))
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
        self.settle(lie, self.new_region(self.bytes_of(lie), number, number), 0, number)

    def bytes_of(self, lie: Lie) -> int:
        return stored_bytes(lie[0].type, lie[0] in self.plan.narrow)

    def span(self, lie: Lie) -> tuple[Region, int, int]:
        """Root region, first and last byte (exclusive) of a tensor."""
        region, offset = self.home[lie]
        root, base = region.root()
        return root, base + offset, base + offset + self.bytes_of(lie)

    def overwritable(self, task: Task, number: int, operand: int) -> bool:
        """Whether nothing else needs the memory of an operand once this task has run."""
        lie, result = task.reads[operand], task.kernel.results[0]
        if lie is None or self.bytes_of(lie) != result.nbytes or len(task.writes) != 1:
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
            if is_object(value.type):
                self.cells[value] = [None]
            elif (value, PLAIN) in self.last_use:
                self.fresh((value, PLAIN), -1)
        for number, task in enumerate(self.tasks):
            if any(is_object(t.type) for t in (*task.kernel.operands, *task.kernel.results)):
                self.decide_object(task, number)
            elif is_view(task.kernel) and self.stays(task):
                self.decide_view(task, number)
            else:
                self.decide_kernel(task, number)

    def decide_object(self, task: Task, number: int) -> None:
        self.note_wildness(task)
        for lie in task.writes:
            if is_object(lie[0].type):
                self.cells[lie[0]] = [None]
            else:
                self.fresh(lie, number)

    def decide_view(self, task: Task, number: int) -> None:
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
                offset += self.bytes_of(lie)
        task.recipe = Recipe()

    def stays(self, task: Task) -> bool:
        """Whether the results of a view begin where kernels can read them; parts of a Concat are copied where not."""
        source, step = task.reads[0], task.kernel.steps[0]
        if step.op.name == "Concat" or source is None:
            return True
        start = self.home[source][1] + (slice_offset(task.kernel) if step.op.name == "Slice" else 0)
        sizes = [r.nbytes for r in task.kernel.results]
        return all((start + before) % self.alignment == 0 for before in accumulate(sizes[:-1], initial=0))

    def decide_concat(self, task: Task, number: int) -> None:
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
            if root is not whole and first == 0 and last == root.size and start % self.alignment == 0:
                whole.absorb(root, start)
            else:
                recipe.launches.append(self.copying(index, start, last - first))
            start += last - first
        task.recipe = recipe

    def decide_kernel(self, task: Task, number: int) -> None:
        supply = JobSupply(self.constants, task.operands)
        careful = self.note_wildness(task, supply)
        recipe = self.design(task.kernel, supply, None, careful)
        shared = None
        for operand in recipe.sums:
            if self.overwritable(task, number, operand):
                try:
                    recipe = self.design(task.kernel, supply, operand, careful)
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

    def note_wildness(self, task: Task, supply: JobSupply | None = None) -> bool:
        supply = supply or JobSupply(self.constants, task.operands)
        levels = [
            supply.wildness(i) if o.constant else self.wildness.get(v, FINITE)
            for i, (v, o) in enumerate(zip(task.operands, task.kernel.operands, strict=True))
        ]
        careful, level = spread(task.kernel, levels)
        self.wildness.update((v, level) for v, _ in task.writes)
        if careful and not self.warned:
            self.warned = True
            log.warning(
                "weights of the model are not finite: what depends on them runs without %s, slowly", self.library
            )
        return careful

    # ── binding ──────────────────────────────────────────────────────────────────────────────────────────────────

    def address(self, lie: Lie | None, base: int) -> int:
        if lie is None or lie not in self.home:
            return 0
        root, start, _ = self.span(lie)
        return base + root.offset + start

    def bind(self, task: Task, base: int) -> list[tuple[Call, object]]:
        if task.recipe is None:
            return [(self.object_call(task, base), None)]
        if any(lie is not None and lie not in self.home for lie in task.reads):
            raise BackendError(f"{task.name} reads what no kernel makes")
        return task.recipe.bind(
            [self.address(lie, base) for lie in task.reads], [self.address(lie, base) for lie in task.writes],
            [base + region.root()[0].offset for region in task.scratch],
        )  # fmt: skip

    def object_call(self, task: Task, base: int) -> Call:
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
            return opened(self.cells[value])
        return self.taken(operand, self.address(lie, base))

    def writer(self, lie: Lie, result: Operand, base: int) -> Callable[[object], None]:
        value = lie[0]
        if value in self.cells:
            cell = self.cells[value]
            return lambda found: cell.__setitem__(0, found)
        if lie not in self.last_use:
            return lambda found: None
        put, t, name = self.put(result, self.address(lie, base)), result.type, value.node.op.name

        def store(found: object) -> None:
            if not isinstance(found, np.ndarray) or found.shape != t.static_shape or found.dtype != t.dtype.numpy:
                raise BackendError(f"{name} gave {_shown(found)} where {t} was declared")
            put(found)

        return store


def opened(cell: list[object]) -> Callable[[], Array]:
    return lambda: cell[0]  # type: ignore[return-value]  # strings are arrays; sequences travel as they are


def _shown(found: object) -> str:
    return f"{found.dtype}{list(found.shape)}" if isinstance(found, np.ndarray) else type(found).__name__
