"""Convolutions of pictures that machine code may compute where they lie: channels last, filters constant."""

from __future__ import annotations

from dataclasses import dataclass

from taso.backends.lowering import LAST, Kernel, Layouts
from taso.backends.onednn.places import layouts_alike
from taso.backends.x86.depthwise import Span, possible
from taso.graph.ops.linear import conv_settings
from taso.graph.types import DType


@dataclass(frozen=True)
class Convolution:
    """Pictures, channels of data, filters, groups, and the windows in both directions."""

    images: int
    channels: int
    filters: int
    groups: int
    rows: Span
    columns: Span


def convolution(kernel: Kernel, layouts: Layouts) -> Convolution | None:
    """The kernel's convolution where it is one of float32 without gaps, channels last in data and result, else None."""
    step = kernel.anchor
    if step is None or step.op.domain or kernel.chained or step.op.name != "Conv":
        return None
    given = [kernel.operands[i] for i in step.inputs if i is not None and i >= 0]
    if len(given) != sum(i is not None for i in step.inputs) or given[0].constant or not given[1].constant:
        return None
    tensors = [o.type for o in (*kernel.operands, *kernel.results)]
    if given[0].type.rank != 4 or not all(t.static and t.dtype is DType.FLOAT for t in tensors):
        return None
    (n, channels, *sizes), weight = given[0].type.static_shape, given[1].type.static_shape
    out, full = kernel.results[0], conv_settings(given[1].type, step.attrs)
    if any(0 in t.static_shape for t in tensors) or set(full.ints("dilations")) != {1}:
        return None
    if not all(layouts_alike(layouts, o.type, o.layout, LAST) for o in (given[0], out)):
        return None
    strides, pads = full.ints("strides"), full.ints("pads")
    rows, columns = (
        Span(sizes[a], out.type.static_shape[2 + a], weight[2 + a], strides[a], pads[a]) for a in range(2)
    )
    found = Convolution(n, channels, weight[0], full.int("group"), rows, columns)
    return found if possible(rows, columns, max(channels, weight[0])) else None


__all__ = ["Convolution", "convolution"]
