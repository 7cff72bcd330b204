"""What a kernel costs: measured once per device and kept, or by the backend's formula where it cannot measure."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Protocol

from taso.backends.base import Backend, cost_key
from taso.backends.costs import CostDatabase
from taso.backends.lowering import BLOCKED, IN_TURN, LAST, Kernel, Operand, in_parts
from taso.backends.reference import ReferenceBackend
from taso.graph.operator import Trait
from taso.search.clock import Clock

log = logging.getLogger(__name__)

PENALTY = 1e3
"""Seconds charged for a kernel that cannot run: finite, so that differences of costs stay meaningful."""

WORTHWHILE = 5e-5
"""Seconds of a kernel below which no other algorithm is tried: there is too little to gain."""


class Costs(Protocol):
    """What a search asks of costs."""

    clock: Clock

    @property
    def device(self) -> str:
        """What decides about costs beside the kernels themselves."""
        ...

    def kernel(self, kernel: Kernel) -> float:
        """Seconds of one run."""
        ...


@dataclass
class CostModel:
    """Seconds per kernel on one backend.

    `measured` counts kernels that had to be measured, `known` those found in the database; `clock` tells the time spent
    on costing (formulas, the database) and on measuring. A kernel that fails to run costs `PENALTY`: a candidate that
    needs it is never better. While `lenient` (for the original, which needs what it needs) a formula stands in for it.
    `algorithms` says whether other algorithms than the usual one may be used.
    """

    backend: Backend
    database: CostDatabase
    trace: Callable[[str], None] | None = None
    measured: int = 0
    known: int = 0
    clock: Clock = field(default_factory=Clock)
    lenient: bool = False
    algorithms: bool = False
    failures: dict[str, str] = field(default_factory=dict)
    _device: str = ""
    _costs: dict[Kernel, float] = field(default_factory=dict)
    _cheapest: dict[Kernel, tuple[float, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._device = self.backend.device_key()

    @property
    def device(self) -> str:
        """The backend's `device_key`."""
        return self._device

    def cheapest(self, kernel: Kernel) -> tuple[float, str]:
        """Seconds of one run, and the name of the algorithm that takes them ("": the usual one)."""
        found = self._cheapest.get(kernel)
        if found is None:
            usual = self.kernel(kernel)
            others = self.backend.lowering.algorithms(kernel) if self.algorithms and usual >= WORTHWHILE else ()
            ways = [(usual, ""), *((self.kernel(replace(kernel, algorithm=a)), a) for a in others)]
            found = self._cheapest[kernel] = min(ways)
        return found

    def kernel(self, kernel: Kernel) -> float:
        """Seconds of one run."""
        found = self._costs.get(kernel)
        if found is None:
            with self.clock("costing"):
                found = self._costs[kernel] = self._cost(kernel)
        return found

    def _cost(self, kernel: Kernel) -> float:
        if not self.backend.measures:
            return self._asked(kernel)
        if not kernel.chained or kernel.algorithm:
            return self._stored(kernel)
        # side by side, since kernels are compared that were measured at another time; and one after the other, since
        # what the first one leaves in a cache is there for the next
        share = self._stored(kernel) / self._stored(replace(kernel, algorithm=IN_TURN))
        return share * sum(self.kernel(part) for part in in_parts(kernel))

    def _stored(self, kernel: Kernel) -> float:
        key = cost_key(self.backend, kernel)
        stored = self.database.cost(self._device, key)
        if stored is not None:
            self.known += 1
            return stored
        with self.clock("measuring"):
            seconds = self._asked(kernel)
        if kernel.key in self.failures:
            return seconds
        self.measured += 1
        if self.trace is not None:
            self.trace(f"measured {seconds * 1e3:.4f} ms  {key}")
        return self.database.keep_cost(self._device, key, seconds)

    def _asked(self, kernel: Kernel) -> float:
        try:
            return self.backend.measure(kernel)
        except Exception as error:
            # whatever a kernel fails with: the search goes on without it, and the report says so
            self.failures[kernel.key] = str(error) or type(error).__name__
            log.warning("a kernel could not be measured: %s (%s)", kernel.key, error)
            return ReferenceBackend().measure(kernel) if self.lenient else PENALTY


@dataclass
class PlannedCosts:
    """Costs of kernels as a plan has them, which chooses layouts and algorithms when the search is over.

    A kernel costs what `model` says, times what the best way takes of the usual one where its anchor stands alone: the
    ways are measured once for all that may stand behind it.
    """

    model: CostModel
    clock: Clock = field(init=False)
    _shares: dict[Kernel, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clock = self.model.clock

    @property
    def device(self) -> str:
        """The model's, and that costs are a plan's."""
        return f"{self.model.device}; planned"

    def kernel(self, kernel: Kernel) -> float:
        """Seconds of one run."""
        usual = self.model.kernel(kernel)
        alone = anchor_alone(kernel) if WORTHWHILE <= usual < PENALTY else None
        if alone is None:
            return usual
        if alone not in self._shares:
            self._shares[alone] = self._share(alone)
        return usual * self._shares[alone]

    def _share(self, alone: Kernel) -> float:
        """What part of its usual time an anchor takes in the best way."""
        lowering, model = self.model.backend.lowering, self.model
        placed = dict.fromkeys((alone, with_channels_last(alone)))
        if not any(map(lowering.algorithms, placed)):
            return 1.0
        return min(1.0, *(model.cheapest(k)[0] / model.kernel(alone) for k in placed))


def anchor_alone(kernel: Kernel) -> Kernel | None:
    """The kernel of an anchor without what stands behind it; None where it has none, or several."""
    step = kernel.anchor
    if step is None or kernel.chained or kernel.algorithm or step.op.has(Trait.ELEMENTWISE):
        return None
    if len(kernel.steps) == 1:
        return kernel
    given = list(dict.fromkeys(i for i in step.inputs if i is not None))
    types = [None if i is None else kernel.operands[i].type for i in step.inputs]
    result = replace(kernel.results[0], type=step.op.types_of(types, step.attrs)[0])
    first = replace(step, inputs=tuple(None if i is None else given.index(i) for i in step.inputs))
    return Kernel(tuple(kernel.operands[i] for i in given), (first,), (result,))


def with_channels_last(kernel: Kernel) -> Kernel:
    """The kernel with its channels last wherever they are in blocks."""

    def last(operands: tuple[Operand, ...]) -> tuple[Operand, ...]:
        return tuple(replace(o, layout=LAST) if o.layout == BLOCKED else o for o in operands)

    return replace(kernel, operands=last(kernel.operands), results=last(kernel.results))
