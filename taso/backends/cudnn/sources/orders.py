"""TopK of short rows: an element's place among the largest is how many of its row come before it."""

from __future__ import annotations

import math
from collections.abc import Callable

from taso.backends.cudnn.sources.launches import Place, Source, Sourced, SourceLaunch
from taso.backends.cudnn.sources.nests import Access, Nest, Parameters, memory_order, operand_strides
from taso.backends.cudnn.sources.prelude import PRELUDE
from taso.backends.cudnn.sources.results import operand_access
from taso.backends.cudnn.sources.scalars import INTEGER, REAL, computed
from taso.backends.lowering import Kernel
from taso.backends.places import RESULT
from taso.graph.types import DType

_THREADS = 256
_LONGEST = 1 << 13
"""Elements of a row up to which comparing each with each is done."""


def top_k(kernel: Kernel) -> Sourced | None:
    """TopK 1 to 24, always sorted; of equals the first one comes first, and NaN before all numbers."""
    step = kernel.steps[0]
    index, attrs = step.inputs[0], step.attrs
    if len(kernel.steps) > 1 or len(kernel.results) != 2 or index is None:
        return None
    operand = kernel.operands[index]
    dims, dtype = operand.type.static_shape, operand.type.dtype
    axis = attrs.int("axis") % len(dims)
    length = dims[axis]
    if dtype not in REAL | INTEGER or length > _LONGEST:
        return None
    others = [a for a in memory_order(operand) if a != axis]
    strides = [operand_strides(o) for o in (operand, *kernel.results)]
    rows = [tuple(s[a] for a in others) for s in strides]
    data = operand_access(kernel, index, (*rows[0], 0))
    values = Access(Place(RESULT, 0), dtype, (*rows[1], 0))
    indices = Access(Place(RESULT, 1), DType.INT64, (*rows[2], 0))
    nest = Nest((*(dims[a] for a in others), 1), [data, values, indices], cut=len(others))
    parameters = Parameters()
    source = f"{parameters.name(data.place, dtype)}[{nest.offset(data)} + {{}} * {strides[0][axis]}]"
    value = f"{parameters.name(values.place, dtype, True)}[{nest.offset(values)} + before * {strides[1][axis]}]"
    where = f"{parameters.name(indices.place, DType.INT64, True)}[{nest.offset(indices)} + before * {strides[2][axis]}]"
    t, largest = computed(dtype), "true" if attrs.int("largest") else "false"
    count = math.prod(dims)
    lines = [
        PRELUDE, f"typedef {'i64' if nest.wide_index or count >= 1 << 31 else 'i32'} I;",
        f'extern "C" __global__ void __launch_bounds__({_THREADS}) ENTRY({parameters.declared}) {{',
        f"    const I item = (I)blockIdx.x * {_THREADS} + (I)threadIdx.x;", f"    if (item >= {count}) return;",
        f"    const I at = item % {length}, row = item / {length};",
        *("    " + x for x in nest.decoded("row", loops=range(nest.outer))),
        f"    const Found<{t}> own = {{widen({source.format('at')}), at}};", "    I before = 0;",
        f"    for (I k = 0; k < {length}; ++k) {{",
        f"        const Found<{t}> other = {{widen({source.format('k')}), k}};",
        f"        before += Extreme<{largest}, true>::join(other, own).place != at;", "    }",
        f"    if (before < {attrs.int('k')}) {{", f"        {value} = {source.format('at')};",
        f"        {where} = at;", "    }", "}", "",
    ]  # fmt: skip
    text = Source.named("TopK", "\n".join(lines))
    return Sourced((SourceLaunch(text, (-(-count // _THREADS), 1, 1), (_THREADS, 1, 1), 0, parameters.places),))


ORDERS: dict[str, Callable[[Kernel], Sourced | None]] = {"TopK": top_k}

__all__ = ["ORDERS"]
