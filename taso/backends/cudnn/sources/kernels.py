"""Which of a kernel's steps our own CUDA C++ computes, and by which launches."""

from __future__ import annotations

from functools import lru_cache

from taso.backends.cudnn.sources.chains import chain
from taso.backends.cudnn.sources.fetches import Straight
from taso.backends.cudnn.sources.launches import Place, Sourced
from taso.backends.cudnn.sources.movement import MOVERS, change_of_layout
from taso.backends.cudnn.sources.nests import lies_in_strides
from taso.backends.cudnn.sources.orders import ORDERS
from taso.backends.cudnn.sources.reductions import REDUCERS
from taso.backends.cudnn.sources.results import Loops, result_access
from taso.backends.cudnn.sources.scalars import HELD
from taso.backends.cudnn.sources.scans import SCANS
from taso.backends.cudnn.sources.sections import Section, launches
from taso.backends.cudnn.sources.windows import WINDOWS
from taso.backends.lowering import Kernel
from taso.backends.places import OPERAND, RESULT
from taso.graph.unknown import UnknownReal


@lru_cache(maxsize=4096)
def sourced(kernel: Kernel) -> Sourced | None:
    """The kernel as launches of CUDA C++, None where a step, an element type or a layout is not covered."""
    if not _is_held(kernel):
        return None
    if all(0 in r.type.static_shape for r in kernel.results):
        return Sourced(())
    if not kernel.steps:
        return change_of_layout(kernel)
    anchor = kernel.steps[0]
    if anchor.op.domain or any(isinstance(v, UnknownReal) for step in kernel.steps for v in step.attrs.values()):
        return None
    make = MAKERS.get(anchor.op.name)
    if make is None:
        return element_wise(kernel)
    # sizes of nothing have no place to read from
    if any(0 in o.type.static_shape for o in kernel.operands) and anchor.op.name not in ("Concat", "Pad", "Gather"):
        return None
    if len(kernel.steps) > 1 and _shape_behind_anchor(kernel) != kernel.results[0].type.static_shape:
        return None
    return make(kernel)


MAKERS = {**MOVERS, **ORDERS, **REDUCERS, **SCANS, **WINDOWS}


def _is_held(kernel: Kernel) -> bool:
    """Whether all tensors have sizes, layouts and element types that the text can speak of."""
    held = (*kernel.operands, *kernel.results)
    return bool(kernel.results) and all(
        o.type.static and o.type.other is None and o.type.dtype in HELD and lies_in_strides(o) for o in held
    )


def _shape_behind_anchor(kernel: Kernel) -> tuple[int, ...]:
    anchor = kernel.steps[0]
    types = [None if r is None else kernel.operands[r].type for r in anchor.inputs]
    return anchor.op.types_of(types, anchor.attrs)[0].static_shape


def element_wise(kernel: Kernel) -> Sourced | None:
    """A chain of element-wise steps: one pass over memory."""
    if len(kernel.results) != 1 or any(0 in o.type.static_shape for o in kernel.operands):
        return None
    steps, loops = chain(kernel, 0), Loops.of(kernel.results[0])
    reads = None if steps is None else steps.fetches(kernel, [x.axis for x in loops.loops])
    if steps is None or reads is None:
        return None
    section = Section(loops.extents, tuple(reads), result_access(kernel, loops), steps)
    shares = _shared(kernel, section, reads)
    names = " ".join(dict.fromkeys(s.op.name for s in kernel.steps))
    aliased = frozenset({Place(RESULT), *(Place(OPERAND, i) for i in shares)}) if shares else frozenset()
    return Sourced(tuple(launches(names[:60], [section], aliased)), (), shares)


def _shared(kernel: Kernel, section: Section, reads: list[Straight]) -> frozenset[int]:
    """Operands that each thread reads where it then writes, and nowhere else."""
    if section.crossed is not None:
        return frozenset()
    target = kernel.results[0].type
    found = set()
    for index, operand in enumerate(kernel.operands):
        own = [r.access for r in reads if r.access.place == Place(OPERAND, index)]
        alike = operand.type.static_shape == target.static_shape
        alike = alike and operand.type.dtype.itemsize == target.dtype.itemsize and not operand.constant
        if alike and own and all(a.strides == section.target.strides for a in own):
            found.add(index)
    return frozenset(found)


__all__ = ["sourced"]
