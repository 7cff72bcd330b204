"""Depthwise convolutions by machine code of our own (`taso.backends.x86.depthwise`): the algorithm `channelwise`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from taso.backends.base import Array
from taso.backends.lowering import Kernel, Layouts, Step
from taso.backends.onednn.coded import Host, bias_of, isa_here, launch, needed_isa, take
from taso.backends.onednn.library import library
from taso.backends.onednn.places import RESULT, Block, Place
from taso.backends.onednn.primitives import Unimplemented
from taso.backends.onednn.windows import convolution
from taso.backends.x86.depthwise import Depthwise, by_vector

NAME = "channelwise"


def algorithms(kernel: Kernel, layouts: Layouts) -> tuple[str, ...]:
    """`channelwise` where a kernel is a depthwise convolution, channels last, and machine code runs here."""
    return (NAME,) if _problem(kernel, layouts) is not None and isa_here() is not None else ()


def _problem(kernel: Kernel, layouts: Layouts) -> Depthwise | None:
    """The kernel's convolution where it is depthwise, else None."""
    found = convolution(kernel, layouts)
    if found is None or not found.channels == found.filters == found.groups:
        return None
    return Depthwise(found.images, found.channels, found.rows, found.columns)


def build(host: Host, step: Step, followers: Sequence[Step]) -> frozenset[int]:
    """Adds the launch of a kernel by this algorithm; the operands whose memory may be the result's.

    Raises `Unimplemented` where the kernel is none for it.
    """
    isa, problem = needed_isa(), _problem(host.kernel, host.layouts)
    if problem is None:
        raise Unimplemented("there is no machine code for this convolution")

    def make(array: Array) -> Block:
        taps = problem.rows.taps, problem.columns.taps
        return Block.of(by_vector(np.asarray(array, np.float32).reshape(problem.channels, *taps), isa))

    taken = take(host, followers, 1)
    posts = (*bias_of(host, step), *taken.posts)
    full = replace(problem, posts=tuple(p.post for p in posts), threads=library().get_max_threads(), isa=isa)
    filters = host.constant(host.index(step, 1), "by vector", make)
    launch(host, full, (host.place(host.index(step, 0)), filters, Place(RESULT)), posts)
    host.behind(followers[taken.count :])
    return taken.added


__all__ = ["NAME", "algorithms", "build"]
