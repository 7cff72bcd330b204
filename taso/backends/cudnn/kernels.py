"""From kernels to launches: cuDNN graphs where cuDNN has a plan, else kernels of ours, moves, or definitions.

`design` makes the recipe of one kernel. A cuDNN graph takes the anchor with all steps behind it; where cuDNN has no
plan for that, it takes the anchor alone and a kernel of ours the rest. What neither does is fetched to the host,
evaluated by its definition there, and brought back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from taso.backends.base import Array
from taso.backends.cudnn.describing import CudnnLaunch, described
from taso.backends.cudnn.device import Device
from taso.backends.cudnn.launching import GraphLaunch, HostLaunch, KernelLaunch, MoveLaunch
from taso.backends.cudnn.moves import moves
from taso.backends.cudnn.sources import Sourced, sourced
from taso.backends.fallback import evaluated
from taso.backends.lowering import FLOAT32, Kernel, Operand, Step
from taso.backends.places import OPERAND, RESULT, Place, logical_spec, tensor_bytes
from taso.backends.recipe import BY_DEFINITION, NotInPlace, Recipe, Supply
from taso.graph.errors import BackendError

log = logging.getLogger(__name__)

KERNEL_FORMAT = 1
"""Raised whenever kernels change so much that costs measured before no longer hold."""

OURS, APART = "ours", "apart"
"""Ways to compute a kernel beside the usual one: by kernels of ours alone; the anchor by cuDNN, the rest by ours."""


def design(
    kernel: Kernel, device: Device, supply: Supply, precision: str = FLOAT32, careful: bool = False,
    in_place: int | None = None,
) -> Recipe:  # fmt: skip
    """The recipe of `kernel` on a device.

    With `careful` cuDNN is left out: for operands that are not finite, with which its operations do as they like.
    Raises `NotInPlace` where `in_place` is asked for: cuDNN adds nothing to what lies there.
    """
    if in_place is not None:
        raise NotInPlace("cuDNN does not add in place")
    for way in _ways(kernel, careful):
        designer = _Designer(kernel, device, supply, precision)
        try:
            if way(designer):
                return designer.recipe
        except BackendError as reason:
            log.debug("%s otherwise: %s", kernel.key, reason)
    designer = _Designer(kernel, device, supply, precision)
    designer.evaluate()
    return designer.recipe


_Way = Callable[["_Designer"], bool]


def _ways(kernel: Kernel, careful: bool) -> tuple[_Way, ...]:
    """How to try to compute a kernel, in order."""
    if any(0 in r.type.static_shape for r in kernel.results):
        return (_Designer.nothing,) if all(0 in r.type.static_shape for r in kernel.results) else ()
    if any(0 in o.type.static_shape for o in kernel.operands):
        return ()
    if careful or kernel.algorithm == OURS:
        return (_Designer.ours, _Designer.moved)
    if kernel.algorithm == APART:
        return (_Designer.apart, _Designer.whole, _Designer.ours, _Designer.moved)
    return (_Designer.whole, _Designer.apart, _Designer.ours, _Designer.moved)


def ways(kernel: Kernel, precision: str) -> tuple[str, ...]:
    """Algorithms by which a kernel can be computed beside the usual one."""
    if not kernel.steps or described(kernel, precision) is None:
        return ()
    rest = APART if len(kernel.steps) > 1 and apart(kernel) is not None else ""
    mine = OURS if sourced(kernel) is not None else ""
    return tuple(way for way in (rest, mine) if way)


# ── kernels in two ───────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Halves:
    """A kernel as its anchor alone, and the steps behind it as a kernel whose operand 0 is what the anchor makes.

    The lists have the operands of each by their numbers in the kernel; None is what the anchor makes.
    """

    anchor: Kernel
    anchor_operands: tuple[int, ...]
    rest: Kernel
    rest_operands: tuple[int | None, ...]


def apart(kernel: Kernel) -> Halves | None:
    """The anchor and what comes behind it; None where nothing does, or the type between is not the result's."""
    if len(kernel.steps) < 2:
        return None
    first, between = kernel.steps[0], kernel.results[0]
    types = [None if i is None else kernel.operands[i].type for i in first.inputs]
    made = first.op.types_of(types, first.attrs)
    if len(made) != 1 or made[0] != between.type:
        return None
    anchor, anchor_operands = _part(kernel, kernel.steps[:1], None)
    rest, rest_operands = _part(kernel, kernel.steps[1:], between)
    return Halves(anchor, tuple(i for i in anchor_operands if i is not None), rest, rest_operands)


def _part(kernel: Kernel, steps: Sequence[Step], chained: Operand | None) -> tuple[Kernel, tuple[int | None, ...]]:
    """Some steps as a kernel of their own; with `chained` its operand 0 is what the step before the first makes."""
    found: dict[int | None, int] = {} if chained is None else {None: 0}
    first = 0 if chained is None else 1
    taken = []
    for step in steps:
        inputs: list[int | None] = []
        for reference in step.inputs:
            if reference is None:
                inputs.append(None)
            elif reference >= 0:
                inputs.append(found.setdefault(reference, len(found)))
            else:
                # step k of the kernel is step k − first here; the one before is operand 0
                inputs.append(0 if -1 - reference < first else reference + first)
        taken.append(replace(step, inputs=tuple(inputs)))
    operands = tuple(kernel.operands[i] if i is not None else chained for i in found)
    return Kernel(tuple(o for o in operands if o is not None), tuple(taken), kernel.results), tuple(found)


# ── one kernel ───────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class _Designer:
    kernel: Kernel
    device: Device
    supply: Supply
    precision: str
    recipe: Recipe = field(default_factory=Recipe)
    constants: dict[int, Place] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return "+".join(step.op.name for step in self.kernel.steps) or "Reorder"

    def place(self, index: int) -> Place:
        """Where operand `index` is; constants are laid out on the device, plainly."""
        if not self.kernel.operands[index].constant:
            return Place(OPERAND, index)
        if index not in self.constants:
            block = self.supply.keep(index, f"{self.device.label} plain", self.device.lay_out)
            self.constants[index] = self.recipe.add_constant(block)
        return self.constants[index]

    def places(self, operands: Sequence[int | None], between: Place | None = None) -> list[Place]:
        """Where operands of a part of the kernel are; None is what the anchor makes, `between`."""
        return [between if i is None and between is not None else self.place(i or 0) for i in operands]

    # ── ways ─────────────────────────────────────────────────────────────────────────────────────────────────────

    def nothing(self) -> bool:
        """There is nothing to compute."""
        return True

    def whole(self) -> bool:
        """All steps in one cuDNN graph."""
        found = described(self.kernel, self.precision) if self.kernel.steps else None
        if found is not None:
            self.graph(found, self.places(range(len(self.kernel.operands))), Place(RESULT))
        return found is not None

    def apart(self) -> bool:
        """The anchor as a cuDNN graph, the rest by a kernel of ours on what it made."""
        halves = apart(self.kernel)
        found = described(halves.anchor, self.precision) if halves is not None else None
        rest = sourced(halves.rest) if halves is not None and found is not None and self.device.compiles else None
        if halves is None or found is None or rest is None:
            return False
        between = Place(RESULT)
        if 0 not in rest.shares:
            between = self.recipe.add_scratch(tensor_bytes(self.kernel.results[0].type))
        self.graph(found, self.places(halves.anchor_operands), between)
        self.sources(rest, self.places(halves.rest_operands, between))
        return True

    def ours(self) -> bool:
        """All steps by kernels of ours."""
        found = sourced(self.kernel) if self.device.compiles else None
        if found is not None:
            self.sources(found, self.places(range(len(self.kernel.operands))))
            self.recipe.shares = frozenset(i for i in found.shares if not self.kernel.operands[i].constant)
        return found is not None

    def moved(self) -> bool:
        """Moves of elements."""
        found = moves(self.kernel, self.place)
        for source, target in found or ():
            self.recipe.launches.append(MoveLaunch(f"moved:{self.name}", self.device, source, target))
        return found is not None

    # ── launches ─────────────────────────────────────────────────────────────────────────────────────────────────

    def graph(self, found: CudnnLaunch, operands: Sequence[Place], result: Place) -> None:
        """Launches a cuDNN graph on operands at these places."""
        planned = self.device.plan(found.description)
        arguments = {number: _settled(p, operands, result, ()) for number, p in found.arguments.items()}
        workspace = self.recipe.add_scratch(planned.workspace) if planned.workspace else None
        self.recipe.launches.append(GraphLaunch(f"cudnn:{self.name}", planned, arguments, workspace))

    def sources(self, found: Sourced, operands: Sequence[Place]) -> None:
        """Launches kernels of ours on operands at these places."""
        scratch = [self.recipe.add_scratch(size) for size in found.scratch]
        for launch in found.launches:
            arguments = tuple(
                _settled(a, operands, Place(RESULT), scratch) if isinstance(a, Place) else a for a in launch.arguments
            )
            source = launch.source
            function = self.device.function(source.code, source.entry)
            self.recipe.launches.append(
                KernelLaunch(source.name, function, launch.grid, launch.block, launch.shared, arguments)
            )

    def evaluate(self) -> None:
        """All steps by their definitions, on the host."""
        operands, results = self.kernel.operands, self.kernel.results
        run, last = evaluated(self.kernel), self.kernel.steps[-1].op.name

        def whole(arrays: Sequence[Array]) -> Sequence[Array]:
            found = run(arrays)
            for array, result in zip(found, results, strict=True):
                if not isinstance(array, np.ndarray) or array.shape != result.type.static_shape:
                    shown = getattr(array, "shape", "no tensor")
                    raise BackendError(f"{last} gave {shown} where {result.type} was declared")
            return found

        inputs = tuple(logical_spec(self.place(i), o.type, o.layout, 1) for i, o in enumerate(operands))
        outs = tuple(logical_spec(Place(RESULT, i), r.type, r.layout, 1) for i, r in enumerate(results))
        self.recipe.launches.append(HostLaunch(f"{BY_DEFINITION}{self.name}", self.device, whole, inputs, outs))


def _settled(place: Place, operands: Sequence[Place], result: Place, scratch: Sequence[Place]) -> Place:
    """A place of a part of the kernel, as one of the kernel."""
    if place.kind == RESULT:
        found = replace(result, index=place.index) if result.kind == RESULT else result
    else:
        found = (operands if place.kind == OPERAND else scratch)[place.index]
    return replace(found, offset=found.offset + place.offset)


__all__ = ["APART", "KERNEL_FORMAT", "OURS", "apart", "design", "ways"]
