"""Depthwise convolutions by machine code of our own (`taso.backends.x86.depthwise`): the algorithm `channelwise`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from taso.backends.base import Array
from taso.backends.lowering import LAST, Kernel, Layouts, Step
from taso.backends.onednn.coded import Host, bias_of, code_runs, launch, take
from taso.backends.onednn.library import library
from taso.backends.onednn.places import RESULT, Block, Place, layouts_alike
from taso.backends.onednn.primitives import Unimplemented
from taso.backends.x86.depthwise import Depthwise, Span, by_vector, possible
from taso.graph.ops.linear import conv_settings
from taso.graph.types import DType

NAME = "channelwise"


def algorithms(kernel: Kernel, layouts: Layouts) -> tuple[str, ...]:
    """`channelwise` where a kernel is a depthwise convolution, channels last, and the processor has AVX-512."""
    return (NAME,) if _problem(kernel, layouts) is not None and code_runs() else ()


def _problem(kernel: Kernel, layouts: Layouts) -> Depthwise | None:
    """The kernel's convolution where it is depthwise, else None."""
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
    out = kernel.results[0]
    full = conv_settings(given[1].type, step.attrs)
    if any(0 in t.static_shape for t in tensors) or not channels == weight[0] == full.int("group"):
        return None
    strides, pads = full.ints("strides"), full.ints("pads")
    if set(full.ints("dilations")) != {1}:
        return None
    if not all(layouts_alike(layouts, o.type, o.layout, LAST) for o in (given[0], out)):
        return None
    rows, columns = (
        Span(sizes[a], out.type.static_shape[2 + a], weight[2 + a], strides[a], pads[a]) for a in range(2)
    )
    return Depthwise(n, channels, rows, columns) if possible(rows, columns, channels) else None


def build(host: Host, step: Step, followers: Sequence[Step]) -> frozenset[int]:
    """Adds the launch of a kernel by this algorithm; the operands whose memory may be the result's.

    Raises `Unimplemented` where the kernel is none for it.
    """
    problem = _problem(host.kernel, host.layouts)
    if problem is None or not code_runs():
        raise Unimplemented("there is no machine code for this convolution")

    def make(array: Array) -> Block:
        taps = problem.rows.taps, problem.columns.taps
        return Block.of(by_vector(np.asarray(array, np.float32).reshape(problem.channels, *taps)))

    taken = take(host, followers, 1)
    posts = (*bias_of(host, step), *taken.posts)
    full = replace(problem, posts=tuple(p.post for p in posts), threads=library().get_max_threads())
    filters = host.constant(host.index(step, 1), "by vector", make)
    launch(host, full, (host.place(host.index(step, 0)), filters, Place(RESULT)), posts)
    host.behind(followers[taken.count :])
    return taken.added


__all__ = ["NAME", "algorithms", "build"]
