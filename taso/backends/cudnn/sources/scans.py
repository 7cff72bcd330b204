"""Running sums and products: CumSum and CumProd.

Their axis is a tensor, whose value text cannot know: the kernel has a way for each axis and takes that which it reads.
Along the axis that lies side by side a warp takes a row, thirty-two elements at a time; along any other each thread
takes a row of its own, its neighbours the rows beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from taso.backends.cudnn.sources.launches import Place, Source, Sourced, SourceLaunch
from taso.backends.cudnn.sources.nests import Access, Nest, Parameters, memory_order, operand_strides
from taso.backends.cudnn.sources.prelude import PRELUDE
from taso.backends.cudnn.sources.results import operand_access
from taso.backends.cudnn.sources.scalars import REAL, computed, stored
from taso.backends.lowering import Kernel
from taso.backends.places import OPERAND, RESULT
from taso.graph.types import DType

_THREADS = 256
_WARP = 32
_ALLOWED = REAL | {DType.INT32, DType.INT64, DType.UINT32, DType.UINT64}


def scan(kernel: Kernel) -> Sourced | None:
    step = kernel.steps[0]
    index, axis = step.inputs
    if len(kernel.steps) > 1 or index is None or axis is None or kernel.operands[index].type.dtype not in _ALLOWED:
        return None
    parameters = Parameters()
    kernel_axis = kernel.operands[axis].type
    if kernel_axis.size != 1:
        return None
    read = f"place_of(widen(*{parameters.name(Place(OPERAND, axis), kernel_axis.dtype)}), {_rank(kernel, index)})"
    ways = [_way(kernel, index, a, parameters) for a in range(_rank(kernel, index))]
    wide = any(nest.wide_index for nest, _, _ in ways)
    lines = [PRELUDE, f"typedef {'i64' if wide else 'i32'} I;"]
    for a, (_, body, _) in enumerate(ways):
        lines += [f"DEVICE void along{a}({parameters.declared}) {{", *("    " + x for x in body), "}"]
    lines += [
        f'extern "C" __global__ void __launch_bounds__({_THREADS}) ENTRY({parameters.declared}) {{',
        f"    const i64 axis = {read};",
        *(f"    if (axis == {a}) along{a}({parameters.passed});" for a in range(len(ways))), "}", "",
    ]  # fmt: skip
    blocks = max(count for _, _, count in ways)
    source = Source.named(step.op.name, "\n".join(lines))
    return Sourced((SourceLaunch(source, (blocks, 1, 1), (_THREADS, 1, 1), 0, parameters.places),))


def _rank(kernel: Kernel, index: int) -> int:
    return kernel.operands[index].type.rank


def _way(kernel: Kernel, index: int, axis: int, parameters: Parameters) -> tuple[Nest, list[str], int]:
    """The loops over rows along `axis`, the text of a thread, and how many blocks there are."""
    operand, result = kernel.operands[index], kernel.results[0]
    strides, targets, dims = operand_strides(operand), operand_strides(result), operand.type.static_shape
    others = [a for a in memory_order(operand) if a != axis]
    data = operand_access(kernel, index, (*(strides[a] for a in others), 0))
    target = Access(Place(RESULT), result.type.dtype, (*(targets[a] for a in others), 0))
    nest = Nest((*(dims[a] for a in others), 1), [data, target], cut=len(others))
    rows = math.prod(dims[a] for a in others)
    along = strides[axis] == 1
    read = f"{parameters.name(data.place, data.dtype)}[{nest.offset(data)} + place * {strides[axis]}]"
    write = f"{parameters.name(target.place, target.dtype, True)}[{nest.offset(target)} + place * {targets[axis]}]"
    text = _by_warp if along else _by_thread
    per_block = _THREADS // _WARP if along else _THREADS
    unit = f"(I)blockIdx.x * {per_block} + (I)(threadIdx.x{f' / {_WARP}' if along else ''})"
    lines = [
        f"const I unit = {unit};", f"const bool live = unit < {rows};", f"const I row = live ? unit : {rows - 1};",
        *nest.decoded("row", loops=range(nest.outer)), *text(kernel, operand.type.dtype, dims[axis], read, write),
    ]  # fmt: skip
    return nest, lines, -(-rows // per_block)


def _parts(kernel: Kernel, dtype: DType, length: int) -> tuple[str, str, str, str, bool]:
    """The type of sums, what they begin with, how they are joined, the place of a number of the row, exclusive."""
    step, t = kernel.steps[0], computed(dtype)
    total = step.op.name == "CumSum"
    place = f"{length - 1} - at" if step.attrs.int("reverse") else "at"
    return t, f"({t}){0 if total else 1}", "Add" if total else "Mul", place, bool(step.attrs.int("exclusive"))


def _by_warp(kernel: Kernel, dtype: DType, length: int, read: str, write: str) -> Sequence[str]:
    t, start, join, place, exclusive = _parts(kernel, dtype, length)
    given = "before" if exclusive else "own"
    return [
        f"const int lane = threadIdx.x % {_WARP};", f"{t} carried = {start};",
        f"for (I begin = 0; begin < {length}; begin += {_WARP}) {{",
        "    const I at = begin + lane;", f"    const bool inside = at < {length};",
        f"    const I place = inside ? {place} : 0;",
        f"    const {t} own = scanned_in_warp<{join}>(inside ? widen({read}) : {start});",
        f"    const {t} up = __shfl_up_sync(WHOLE_WARP, own, 1);",
        f"    const {t} before = lane == 0 ? {start} : up;",
        f"    if (live && inside) {write} = narrow<{stored(dtype)}>({join}::join(carried, {given}));",
        f"    carried = {join}::join(carried, __shfl_sync(WHOLE_WARP, own, {_WARP - 1}));", "}",
    ]  # fmt: skip


def _by_thread(kernel: Kernel, dtype: DType, length: int, read: str, write: str) -> Sequence[str]:
    t, start, join, place, exclusive = _parts(kernel, dtype, length)
    return [
        "if (!live) return;", f"{t} total = {start};", f"for (I at = 0; at < {length}; ++at) {{",
        f"    const I place = {place};", f"    const {t} next = {join}::join(total, widen({read}));",
        f"    {write} = narrow<{stored(dtype)}>({'total' if exclusive else 'next'});", "    total = next;", "}",
    ]  # fmt: skip


SCANS: dict[str, Callable[[Kernel], Sourced | None]] = {"CumSum": scan, "CumProd": scan}

__all__ = ["SCANS"]
