"""Convolutions in groups by machine code of our own (`taso.backends.x86.direct`): the algorithm `direct`."""

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
from taso.backends.onednn.winograd import second_level_cache
from taso.backends.x86.assembler import Isa
from taso.backends.x86.direct import Direct, by_together

NAME = "direct"

_SHARE = 4
"""What part of the second-level cache filters may take that are read again for every row of the result."""
_ITEM = 4


def algorithms(kernel: Kernel, layouts: Layouts) -> tuple[str, ...]:
    """`direct` where a kernel is a convolution in groups, channels last, and machine code for it runs here."""
    isa = isa_here()
    return (NAME,) if isa is not None and _problem(kernel, layouts, isa) is not None else ()


def _problem(kernel: Kernel, layouts: Layouts, isa: Isa) -> Direct | None:
    """The kernel's convolution where it is one in groups for which there is code, else None."""
    c = convolution(kernel, layouts)
    if c is None or c.groups == 1:
        return None
    weights = c.filters * c.channels // c.groups * c.rows.taps * c.columns.taps * _ITEM
    by_row = weights <= second_level_cache() // _SHARE
    found = Direct(c.images, c.channels, c.filters, c.groups, c.rows, c.columns, isa=isa, by_row=by_row)
    return found if found.possible else None


def build(host: Host, step: Step, followers: Sequence[Step]) -> frozenset[int]:
    """Adds the launch of a kernel by this algorithm; the operands whose memory may be the result's.

    Raises `Unimplemented` where the kernel is none for it.
    """
    problem = _problem(host.kernel, host.layouts, needed_isa())
    if problem is None:
        raise Unimplemented("there is no machine code for this convolution")

    def make(array: Array) -> Block:
        return Block.of(by_together(np.asarray(array, np.float32), problem.together))

    taken = take(host, followers, 1)
    posts = (*bias_of(host, step), *taken.posts)
    full = replace(problem, posts=tuple(p.post for p in posts), threads=library().get_max_threads())
    filters = host.constant(host.index(step, 1), f"{problem.together} together", make)
    launch(host, full, (host.place(host.index(step, 0)), filters, Place(RESULT)), posts)
    host.behind(followers[taken.count :])
    return taken.added


__all__ = ["NAME", "algorithms", "build"]
