"""What a kernel needs of memory beside its operands and results, told from the kernel alone: what plans go by.

The executor asks recipes, which are made when a program is built; this says the same beforehand, or as good as.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial

import numpy as np

from taso.backends.arena import aligned
from taso.backends.lowering import Kernel, Layouts, Step, is_view
from taso.backends.onednn import panels
from taso.backends.onednn.executor import threads_in_force
from taso.backends.onednn.kernels import depth_first_fits, design
from taso.backends.onednn.library import library
from taso.backends.sampling import BlankSupply
from taso.graph.errors import BackendError
from taso.graph.operator import Trait
from taso.graph.types import DType, TensorType

_SUMMED = frozenset({"Conv", "ConvTranspose", "MatMul", "Gemm"})
"""Anchors that add to what lies where their result is to be."""


def overwritable(kernel: Kernel) -> tuple[int, ...]:
    """Operands whose memory the result may take where nobody needs them any more, in the order in which to try."""
    anchor = kernel.anchor
    if anchor is None or len(kernel.results) != 1 or anchor.op.domain or kernel.chained:
        return ()
    if any(o.type.dtype is not DType.FLOAT for o in (*kernel.operands, *kernel.results)):
        return ()
    if kernel.algorithm == panels.NAME and not panels.adds_in_place(kernel):
        return ()
    if anchor.op.name in _SUMMED:
        return tuple(i for step in kernel.steps[1:] if step.op.name == "Add" for i in _like_result(kernel, step))
    if anchor.op.name == "BatchNormalization" or anchor.op.has(Trait.ELEMENTWISE):
        return _like_result(kernel, anchor)[:1]
    return ()


def _like_result(kernel: Kernel, step: Step) -> tuple[int, ...]:
    """Operands of a step that are read once and lie as the result does."""
    read = [i for s in kernel.steps for i in s.inputs]
    out = kernel.results[0]
    return tuple(
        i for i in step.inputs
        if i is not None and i >= 0 and read.count(i) == 1 and not kernel.operands[i].constant
        and kernel.operands[i] == out
    )  # fmt: skip


def scratch_of(layouts: Layouts, threads: int, precision: str) -> Callable[[Kernel], int]:
    """Bytes of scratch memory that a kernel works in on so many threads."""
    return partial(_scratch, layouts, threads, precision)


@lru_cache(maxsize=1 << 14)
def _scratch(layouts: Layouts, threads: int, precision: str, kernel: Kernel) -> int:
    tensors = [o.type for o in (*kernel.operands, *kernel.results)]
    if is_view(kernel) or not kernel.steps or not all(map(_placed, tensors)):
        return 0
    lib = library()
    try:
        with threads_in_force(lib, threads), np.errstate(all="ignore"):
            recipe = design(kernel, layouts, BlankSupply(kernel), precision=precision)
    except BackendError:
        # whoever runs it will say why it cannot be built
        return 0
    return sum(map(aligned, recipe.scratch))


@lru_cache(maxsize=1 << 12)
def runs_chain(layouts: Layouts, threads: int, kernel: Kernel) -> bool:
    """Whether there are primitives for a kernel of several layers in a row."""
    with threads_in_force(library(), threads):
        return depth_first_fits(kernel, layouts, BlankSupply(kernel))


def _placed(t: TensorType) -> bool:
    return t.other is None and t.static and t.dtype not in (DType.STRING, DType.UNDEFINED)
