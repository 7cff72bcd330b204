"""In which order a program runs its kernels: the one that needs the least memory for what lies between them.

Kernels compute the same in any order that has producers first, and take as long; what differs is how much is held at
once. The orders are gone through as the sets of kernels that have run, only the most promising of them (a beam): of two
ways to the same set the one with the lower peak is kept, so that graphs with few branches are searched whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from taso.backends.lowering import Job, Lowering, Plan, is_view, lower
from taso.graph.graph import Graph, Value

BEAM = 24
"""Sets of kernels that are followed at once."""

WORTH = 0.99
"""Share of the peak of the order given above which another order is not taken."""


@dataclass
class _Buffer:
    """Memory that some values share; `makers` and `users` are sets of jobs, as bits, the makers among the users."""

    size: int = 0
    makers: int = 0
    users: int = 0
    at_start: bool = False
    at_end: bool = False

    def taken_by(self, done: int) -> bool:
        """Whether it is in use or has been, once the jobs `done` have run."""
        return self.at_start or bool(self.makers & done)

    def free_after(self, done: int) -> bool:
        """Whether nobody needs it any more once the jobs `done` have run."""
        return not self.at_end and self.users & done == self.users


@dataclass(frozen=True)
class _Reached:
    """A set of jobs that have run: bytes in use now and at most so far, and how it was reached."""

    done: int
    live: int
    peak: int
    last: int = -1
    before: _Reached | None = field(default=None, repr=False)

    @property
    def rank(self) -> tuple[int, int, int]:
        """What is better comes first; the set itself decides ties, the same way on every run."""
        return self.peak, self.live, self.done

    def order(self) -> list[int]:
        """The jobs in the order in which they ran."""
        found, at = [], self
        while at.before is not None:
            found.append(at.last)
            at = at.before
        return found[::-1]


class Schedule:
    """The jobs of a plan as what needs memory."""

    def __init__(self, graph: Graph, plan: Plan) -> None:
        self._jobs = plan.jobs
        buffers, of = _buffers(graph, plan.jobs)
        self._touched = [
            [buffers[b] for b in dict.fromkeys(of[v] for v in (*j.operands, *j.results) if v in of)] for j in plan.jobs
        ]
        live = sum(b.size for b in buffers if b.at_start)
        self._start = _Reached(0, live, live)
        maker = {v: i for i, job in enumerate(plan.jobs) for v in job.results}
        self._needed = [sum({1 << maker[v] for v in job.operands if v in maker}) for job in plan.jobs]
        self._next: list[list[int]] = [[] for _ in plan.jobs]
        for number, needed in enumerate(self._needed):
            for other in _bits(needed):
                self._next[other].append(number)

    def peak(self, order: Iterable[int]) -> int:
        """Bytes in use at most when the jobs run in this order."""
        reached = self._start
        for job in order:
            reached = self._after(reached, job)
        return reached.peak

    def lowest(self) -> list[int]:
        """The order found to need the least."""
        ready = tuple(i for i, needed in enumerate(self._needed) if not needed)
        beam = [(self._start, ready)]
        for _ in self._jobs:
            found: dict[int, tuple[_Reached, tuple[int, ...]]] = {}
            for reached, ready in beam:
                for job in ready:
                    made = self._after(reached, job)
                    known = found.get(made.done)
                    if known is None:
                        found[made.done] = made, self._ready_after(ready, job, made.done)
                    elif made.rank < known[0].rank:
                        found[made.done] = made, known[1]
            beam = sorted(found.values(), key=lambda f: f[0].rank)[:BEAM]
        return beam[0][0].order()

    def _after(self, reached: _Reached, job: int) -> _Reached:
        done, live = reached.done | 1 << job, reached.live
        live += sum(b.size for b in self._touched[job] if not b.taken_by(reached.done))
        ended = sum(b.size for b in self._touched[job] if b.free_after(done))
        return _Reached(done, live - ended, max(reached.peak, live), job, reached)

    def _ready_after(self, ready: tuple[int, ...], job: int, done: int) -> tuple[int, ...]:
        fresh = [n for n in self._next[job] if self._needed[n] & done == self._needed[n]]
        return (*(r for r in ready if r != job), *fresh)


def ordered(graph: Graph, plan: Plan) -> Plan:
    """The plan with its jobs in the order of the lowest peak, or as it is where that is not clearly lower."""
    schedule = Schedule(graph, plan)
    order = schedule.lowest()
    if schedule.peak(order) >= WORTH * schedule.peak(range(len(plan.jobs))):
        return plan
    return replace(plan, jobs=tuple(plan.jobs[i] for i in order))


def planned_peak(graph: Graph, lowering: Lowering) -> int:
    """Bytes that the values of a graph of static types take up at most, in the order in which it would run."""
    plan = ordered(graph, lower(graph, lowering))
    return Schedule(graph, plan).peak(range(len(plan.jobs)))


def _buffers(graph: Graph, jobs: tuple[Job, ...]) -> tuple[list[_Buffer], dict[Value, int]]:
    """All buffers, and the one of each value that has bytes: views share that of what they are views of."""
    shared: dict[Value, Value] = {}

    def root(value: Value) -> Value:
        while value in shared:
            value = shared[value]
        return value

    for job in jobs:
        if is_view(job.kernel):
            for other in (*job.operands, *job.results[1:]):
                if not other.node.constant and root(other) is not root(job.results[0]):
                    shared[root(other)] = root(job.results[0])
    buffers: dict[Value, _Buffer] = {}

    def buffer(value: Value) -> _Buffer:
        found = buffers.setdefault(root(value), _Buffer())
        found.size = max(found.size, _bytes(value))
        return found

    for value in graph.inputs:
        buffer(value).at_start = True
    for number, job in enumerate(jobs):
        for value in job.results:
            made = buffer(value)
            made.makers |= 1 << number
            made.users |= 1 << number
        for value in job.operands:
            if not value.node.constant:
                buffer(value).users |= 1 << number
    for _, value in graph.outputs:
        if not value.node.constant:
            buffer(value).at_end = True
    places = {value: i for i, value in enumerate(buffers)}
    values = {v for job in jobs for v in (*job.operands, *job.results) if not v.node.constant}
    return list(buffers.values()), {v: places[root(v)] for v in values}


def _bytes(value: Value) -> int:
    t = value.type
    return t.nbytes if t.other is None and t.static else 0


def _bits(number: int) -> Iterable[int]:
    while number:
        lowest = number & -number
        yield lowest.bit_length() - 1
        number ^= lowest
