"""In which order a program runs its kernels: the one that needs the least memory for what lies between them.

Kernels compute the same in any order that has producers first, and take as long; what differs is how much is held at
once. The orders are gone through as the sets of kernels that have run, only the most promising of them (a beam): of two
ways to the same set the one with the lower peak is kept, so that graphs with few branches are searched whole.

What is held is what a program of the plan places in its arena: views and the parts of a Concat share memory, a change
of layout makes a copy just before its first reader runs, a result takes the place of an operand where the backend says
so, and kernels have scratch memory. `Course` follows this to the byte for one order; the beam takes a simpler view.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Generic, TypeVar

from taso.backends.lowering import PLAIN, Choices, Kernel, Lowering, Operand, Plan, is_view, lower
from taso.backends.packing import Span, packed
from taso.graph.graph import Graph, Value
from taso.graph.ops.movement import slice_ranges
from taso.graph.types import DType, TensorType

V = TypeVar("V", bound=Hashable)
Lie = tuple[V, str]
"""A value in a layout."""

BEAM = 24
"""Sets of kernels that are followed at once."""

WORTH = 0.99
"""Share of the memory of the order given above which another order is not taken."""

LINE = 64
"""Values begin at whole cache lines."""


# ── kernels as what needs memory ─────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Work(Generic[V]):
    """What a kernel reads and makes, each with its bytes.

    A view makes nothing new: its results lie in what it reads, at `offsets`, or, where it `joins`, what it reads in its
    result, one behind the other. `overwrites` are operands whose place the result may take, `scratch` the bytes that
    the kernel works in beside.
    """

    reads: tuple[tuple[Lie[V], int], ...]
    makes: tuple[tuple[Lie[V], int], ...]
    view: bool = False
    joins: bool = False
    offsets: tuple[int, ...] = ()
    overwrites: tuple[Lie[V], ...] = ()
    scratch: int = 0


def work_of(
    kernel: Kernel, operands: Sequence[V], results: Sequence[V], layout: Callable[[V], str], lowering: Lowering
) -> Work[V]:
    """The work of a kernel on these values, which lie as `layout` says."""
    lies = [
        _asked(v, o.type, layout(v), o.layout, lowering) if not o.constant else None
        for v, o in zip(operands, kernel.operands, strict=True)
    ]
    reads = tuple((lie, _bytes(o)) for lie, o in zip(lies, kernel.operands, strict=True) if lie is not None)
    makes = tuple(((v, layout(v)), _bytes(r)) for v, r in zip(results, kernel.results, strict=True))
    if not is_view(kernel) or not reads or not all(_placed(o.type) for o in (*kernel.operands, *kernel.results)):
        over = tuple(lie for i in lowering.in_place(kernel) if (lie := lies[i]) is not None)
        return Work(reads, makes, overwrites=over, scratch=lowering.scratch(kernel))
    step = kernel.steps[0]
    if step.op.name == "Concat":
        # in the order in which they lie
        parts = [lies[i] for i in step.inputs if i is not None]
        sizes = dict(reads)
        return Work(tuple((lie, sizes[lie]) for lie in parts if lie is not None), makes, view=True, joins=True)
    start = slice_offset(kernel) if step.op.name == "Slice" else 0
    return Work(reads, makes, view=True, offsets=tuple(accumulate((size for _, size in makes[:-1]), initial=start)))


def _asked(value: V, t: TensorType, have: str, layout: str, lowering: Lowering) -> Lie[V]:
    """How a value lies for one who asks for `layout`."""
    as_it_is = have == layout or not _placed(t) or lowering.layouts.alike(t, have, layout)
    return value, have if as_it_is else layout


def asked_for(value: V, t: TensorType, have: str, lowering: Lowering) -> tuple[Lie[V], int]:
    """How an output of a graph lies, which is asked for as ONNX has it, and its bytes."""
    return _asked(value, t, have, PLAIN, lowering), _bytes(Operand(t, PLAIN, False))


def slice_offset(kernel: Kernel) -> int:
    """Bytes of the operand of a Slice that lie before the first element that it takes."""
    t = kernel.operands[0].type
    offset, stride = 0, 2 if kernel.operands[0].narrow else t.dtype.itemsize
    ranges = slice_ranges(t, kernel.steps[0].attrs)
    for axis in reversed(range(t.rank)):
        offset += ranges[axis][0] * stride if axis in ranges else 0
        stride *= t.static_shape[axis]
    return offset


def _placed(t: TensorType) -> bool:
    """Whether values of the type lie in the memory of a program; text, sequences and open sizes do not."""
    return t.other is None and t.static and t.dtype not in (DType.STRING, DType.UNDEFINED)


def _bytes(operand: Operand) -> int:
    return operand.nbytes if _placed(operand.type) else 0


def _lines(size: int) -> int:
    return -(-size // LINE) * LINE


def with_changes(
    works: Sequence[Work[V]], outputs: Sequence[tuple[Lie[V], int]]
) -> Iterator[tuple[int, Work[V]]]:
    """The works with the changes of layout that they imply in front of the first who asks for one.

    Each with the number of the work that it is, or is for; those for the outputs come last.
    """
    made = {lie[0]: lie for work in works for lie, _ in work.makes}
    there: set[Lie[V]] = set()
    for number, work in enumerate((*works, None)):
        for lie, size in outputs if work is None else work.reads:
            own = made.get(lie[0], (lie[0], PLAIN))
            if lie != own and lie not in there:
                there.add(lie)
                yield number, Work(((own, size),), ((lie, size),))
        if work is not None:
            yield number, work


# ── what is held, to the byte ────────────────────────────────────────────────────────────────────────────────────


@dataclass(eq=False)
class _Region(Generic[V]):
    """A stretch of memory in use from step `first` to step `last`; inside another one at `offset` where that is so."""

    size: int
    first: int
    last: int
    inside: _Region[V] | None = None
    offset: int = 0
    values: list[V] = field(default_factory=list)


class Course(Generic[V]):
    """What lies in memory while works run in the order given, and `outputs` until after the last.

    `most` are the bytes in use at most during each, and at last for the outputs.
    """

    def __init__(self, works: Sequence[Work[V]], outputs: Sequence[tuple[Lie[V], int]]) -> None:
        self._steps = list(with_changes(works, outputs))
        self._last_use = {lie: step for step, (_, work) in enumerate(self._steps) for lie, _ in work.reads}
        self._last_use.update((lie, len(self._steps)) for lie, _ in outputs)
        self._places: dict[Lie[V], tuple[_Region[V], int, int]] = {}
        self._roots: list[_Region[V]] = []
        for step, (_, work) in enumerate(self._steps):
            self._place(work, step)
        self._demand(outputs)
        self.most = self._followed(len(works))

    @property
    def peak(self) -> int:
        """Bytes in use at most."""
        return max(self.most)

    @property
    def arena(self) -> int:
        """Bytes of a stretch of memory that holds it all: a little more than the peak where gaps stay."""
        scratch = [Span(_lines(work.scratch), step, step) for step, (_, work) in enumerate(self._steps) if work.scratch]
        return packed([*(Span(_lines(r.size), r.first, r.last) for r in self._roots), *scratch])[1]

    def held(self, at_least: int) -> set[V]:
        """Values of which something lies in memory while so many bytes or more are in use."""
        crowded = [step for step, used in enumerate(self._used) if used >= at_least]
        return {v for r in self._roots if any(r.first <= s <= r.last for s in crowded) for v in r.values}

    def _followed(self, count: int) -> list[int]:
        change = [0] * (len(self._steps) + 2)
        for region in self._roots:
            size = _lines(region.size)
            change[max(region.first, 0)] += size
            change[region.last + 1] -= size
        self._used = list(accumulate(change[:-1]))
        most = [0] * (count + 1)
        for step, (number, work) in enumerate(self._steps):
            self._used[step] += work.scratch
            most[number] = max(most[number], self._used[step])
        most[count] = max(most[count], self._used[-1])
        return most

    # ── places ───────────────────────────────────────────────────────────────────────────────────────────────────

    def _demand(self, lies: Iterable[tuple[Lie[V], int]]) -> None:
        """What is asked for and nothing has made is there from the start."""
        for lie, size in lies:
            if lie not in self._places:
                self._fresh(lie, size, -1)

    def _place(self, work: Work[V], step: int) -> None:
        self._demand(work.reads)
        if work.joins:
            return self._join(work, step)
        over = next((lie for lie in work.overwrites if self._may_overwrite(lie, work, step)), None)
        for number, (lie, size) in enumerate(work.makes):
            if work.view:
                region, start, _ = self._places[work.reads[0][0]]
                self._settle(lie, size, region, start + work.offsets[number], step)
            elif over is not None:
                region, start, _ = self._places[over]
                self._settle(lie, size, region, start, step)
            else:
                self._fresh(lie, size, step)

    def _fresh(self, lie: Lie[V], size: int, step: int) -> None:
        self._roots.append(_Region(size, step, step))
        self._settle(lie, size, self._roots[-1], 0, step)

    def _settle(self, lie: Lie[V], size: int, region: _Region[V], start: int, step: int) -> None:
        self._places[lie] = region, start, size
        root, _ = self._root(lie)
        root.first, root.last = min(root.first, step), max(root.last, step, self._last_use.get(lie, step))
        root.values.append(lie[0])

    def _root(self, lie: Lie[V]) -> tuple[_Region[V], int]:
        """The region around all that a value shares memory with, and where in it the value begins."""
        region, start, _ = self._places[lie]
        while region.inside is not None:
            region, start = region.inside, start + region.offset
        return region, start

    def _join(self, work: Work[V], step: int) -> None:
        """Has the parts of a whole made where they belong; what lies elsewhere for good is copied."""
        (result, total), = work.makes
        self._fresh(result, total, step)
        whole, _ = self._root(result)
        start = 0
        for lie, size in work.reads:
            root, _ = self._root(lie)
            if root is not whole and root.size == size:
                root.inside, root.offset = whole, start
                whole.first, whole.last = min(whole.first, root.first), max(whole.last, root.last)
                whole.values += root.values
                self._roots.remove(root)
            start += size

    def _may_overwrite(self, lie: Lie[V], work: Work[V], step: int) -> bool:
        """Whether nobody needs the memory of an operand any more once this step has run."""
        (_, wanted), = work.makes
        root, start = self._root(lie)
        size = self._places[lie][2]
        if size != wanted or root.last > step:
            return False
        for other, length in work.reads:
            at, begin = self._root(other)
            if other != lie and at is root and begin < start + size and start < begin + length:
                return False
        return True


# ── orders ───────────────────────────────────────────────────────────────────────────────────────────────────────


class _Regions(Generic[V]):
    """Which values share memory, found out in the order in which they are made; regions are known by number."""

    def __init__(self) -> None:
        self.of: dict[Lie[V], int] = {}
        self.bytes: dict[Lie[V], int] = {}
        self.sizes: list[int] = []
        self._inside: list[int] = []

    def place(self, work: Work[V]) -> None:
        """Places what a kernel makes; what it reads and nothing has made is there from the start."""
        for lie, size in work.reads:
            if lie not in self.of:
                self._fresh(lie, size)
        for lie, size in work.makes:
            if work.view and not work.joins and work.reads:
                self.of[lie], self.bytes[lie] = self.of[work.reads[0][0]], size
            else:
                self._fresh(lie, size)
        if work.joins:
            for lie, _ in work.reads:
                self._join(lie, work.makes[0][0])

    def _fresh(self, lie: Lie[V], size: int) -> None:
        self.of[lie], self.bytes[lie] = len(self.sizes), size
        self._inside.append(len(self.sizes))
        self.sizes.append(size)

    def _join(self, part: Lie[V], whole: Lie[V]) -> None:
        """Puts a part into a whole; what lies inside something else for good is copied there."""
        if self.alone(part) and self.root(part) != self.root(whole):
            self._inside[self.root(part)] = self.root(whole)

    def root(self, lie: Lie[V]) -> int:
        """The region around all that a value shares memory with."""
        region = self.of[lie]
        while self._inside[region] != region:
            region = self._inside[region]
        return region

    def alone(self, lie: Lie[V]) -> bool:
        """Whether a value takes all of its region."""
        return self.bytes[lie] == self.sizes[self.root(lie)]


@dataclass(eq=False)
class _Buffer:
    """A region, in whole lines; `makers` and `users` are sets of acts, as bits, the makers among the users."""

    size: int
    makers: int = 0
    users: int = 0

    @property
    def numbers(self) -> tuple[int, int, int]:
        return self.size, self.makers, self.users


@dataclass(frozen=True, eq=False)
class _Act:
    """A job, or a change of layout: the buffers that it touches, and those of them that it may overwrite."""

    bit: int
    touched: tuple[tuple[int, int, int], ...]
    overwrites: tuple[tuple[int, int, int], ...]
    scratch: int


_Reached = tuple[int, int, int, int, object]
"""A set of acts that are done: bytes in use at most so far and now, the set, the last job, and what was before it.

By the first three what is better comes first; the set itself decides ties, the same way on every run.
"""


class Schedule(Generic[V]):
    """Works, in an order with producers first, for which to look for another; `outputs` are asked for at the end.

    It takes a simpler view than `Course`: which parts of a Concat are made where they belong is what it is in the order
    given, and a result takes the place of what nobody shares alone.
    """

    def __init__(self, works: Sequence[Work[V]], outputs: Sequence[tuple[Lie[V], int]]) -> None:
        self.works, self.outputs = works, outputs
        self._steps = list(works)
        changes: dict[Lie[V], int] = {}
        self._regions = _Regions[V]()
        for number, work in with_changes(works, outputs):
            self._regions.place(work)
            if number == len(works) or work is not works[number]:
                changes[work.makes[0][0]] = len(self._steps)
                self._steps.append(work)
        self._regions.place(Work(tuple(outputs), ()))
        acts = self._enact([lie for lie, _ in outputs])
        # each job with the changes of layout that come before it where nobody had them made yet
        self._acts = [
            (*(acts[changes[lie]] for lie, _ in work.reads if lie in changes), acts[number])
            for number, work in enumerate(works)
        ]
        maker = {lie[0]: number for number, work in enumerate(works) for lie, _ in work.makes}
        self.needed = [tuple(dict.fromkeys(maker[v] for (v, _), _ in w.reads if v in maker)) for w in works]

    def _enact(self, outputs: Sequence[Lie[V]]) -> list[_Act]:
        """Works and changes on the buffers that the regions turn out to be."""
        regions, outside = self._regions, 1 << len(self._steps)
        buffers = {root: _Buffer(_lines(regions.sizes[root])) for root in map(regions.root, regions.of)}
        made: set[Lie[V]] = set()
        for number, work in enumerate(self._steps):
            for lie, _ in work.makes:
                made.add(lie)
                buffers[regions.root(lie)].makers |= 1 << number
            for lie, _ in (*work.makes, *work.reads):
                buffers[regions.root(lie)].users |= 1 << number
        for lie in regions.of:
            if lie not in made:
                buffers[regions.root(lie)].makers |= outside
        for lie in outputs:
            # nothing ever sets this bit, so that it is never free
            buffers[regions.root(lie)].users |= outside << 1
        live = sum(b.size for b in buffers.values() if b.makers & outside)
        self._start: _Reached = live, live, outside, -1, None
        return [self._act(number, work, buffers) for number, work in enumerate(self._steps)]

    def _act(self, number: int, work: Work[V], buffers: dict[int, _Buffer]) -> _Act:
        regions = self._regions
        touched = dict.fromkeys(regions.root(lie) for lie, _ in (*work.reads, *work.makes))
        over = []
        if len(work.makes) == 1 and regions.alone(work.makes[0][0]):
            size, own = work.makes[0][1], regions.root(work.makes[0][0])
            over = [
                buffers[regions.root(lie)].numbers for lie in work.overwrites
                if regions.alone(lie) and regions.bytes[lie] == size and regions.root(lie) != own
            ]  # fmt: skip
        held = tuple(buffers[r].numbers for r in touched if buffers[r].size)
        return _Act(1 << number, held, tuple(over), work.scratch)

    def course(self, order: Iterable[int] | None = None) -> Course[V]:
        """What lies in memory in an order, by default the one given."""
        works = self.works if order is None else [self.works[i] for i in order]
        return Course(works, self.outputs)

    def lowest(self, below: int | None = None) -> list[int] | None:
        """The order found to need the least; None where none is found that stays `below` so many bytes."""
        beam = [(self._start, tuple(i for i, needed in enumerate(self.needed) if not needed))]
        bits = [sum(1 << n for n in needed) for needed in self.needed]
        readers: list[list[int]] = [[] for _ in self.needed]
        for number, needed in enumerate(self.needed):
            for other in needed:
                readers[other].append(number)
        for _ in self.needed:
            found: dict[int, tuple[_Reached, tuple[int, ...]]] = {}
            for reached, ready in beam:
                for made in self._worth_following(reached, ready):
                    peak, _, done, last, _ = made
                    if below is not None and peak >= below:
                        continue
                    known = found.get(done)
                    if known is None:
                        fresh = (n for n in readers[last] if bits[n] & done == bits[n])
                        found[done] = made, (*(r for r in ready if r != last), *fresh)
                    elif made[:3] < known[0][:3]:
                        found[done] = made, known[1]
            beam = sorted(found.values(), key=lambda f: f[0][:3])[:BEAM]
        return _order(beam[0][0]) if beam else None

    def _worth_following(self, reached: _Reached, ready: tuple[int, ...]) -> list[_Reached]:
        """One step further: by a job that costs nothing and frees what it can, or else by each that could run."""
        found = []
        for job in ready:
            made = self._after(reached, job)
            if made[1] <= reached[1] and made[0] <= reached[0]:
                # whatever else runs first, this one never costs less
                return [made]
            found.append(made)
        return found

    def _after(self, reached: _Reached, job: int) -> _Reached:
        peak, live, done, _, _ = reached
        for act in self._acts[job]:
            if done & act.bit:
                continue
            before, done = done, done | act.bit
            missing, ended, over = ~done, 0, 0
            for size, makers, users in act.touched:
                if not makers & before:
                    live += size
                if not users & missing:
                    ended += size
            for size, _, users in act.overwrites:
                if not users & missing:
                    over = size
                    break
            peak = max(peak, live - over + act.scratch)
            live -= ended
        return peak, live, done, job, reached


def _order(reached: _Reached) -> list[int]:
    """The jobs in the order in which they ran."""
    found: list[int] = []
    at: object = reached
    while isinstance(at, tuple):
        found.append(at[3])
        at = at[4]
    return found[-2::-1]


# ── graphs ───────────────────────────────────────────────────────────────────────────────────────────────────────


def schedule(graph: Graph, plan: Plan, lowering: Lowering) -> Schedule[Value]:
    """The schedule of a plan, in its own order."""
    layout = plan.layouts.__getitem__
    outputs = [asked_for(v, v.type, layout(v), lowering) for _, v in graph.outputs if not v.node.constant]
    return Schedule([work_of(j.kernel, j.operands, j.results, layout, lowering) for j in plan.jobs], outputs)


def ordered(graph: Graph, plan: Plan, lowering: Lowering) -> Plan:
    """The plan with its jobs in the order of the lowest peak, or as it is where that is not clearly lower."""
    given = schedule(graph, plan, lowering)
    order = given.lowest()
    if order is None or given.course(order).arena >= WORTH * given.course().arena:
        return plan
    return replace(plan, jobs=tuple(plan.jobs[i] for i in order))


def planned_peak(graph: Graph, lowering: Lowering, choices: Choices | None = None) -> int:
    """Bytes of the memory in which a program of a graph of static types works, in the order in which it would run."""
    return schedule(graph, ordered(graph, lower(graph, lowering, choices), lowering), lowering).course().arena


__all__ = [
    "Course", "Lie", "Schedule", "Work", "asked_for", "ordered", "planned_peak", "schedule", "slice_offset", "work_of",
]  # fmt: skip
