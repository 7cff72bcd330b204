"""Values that are not finite because a weight is not: a library may do otherwise than operators say."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from taso.backends.base import Array
from taso.backends.lowering import Kernel
from taso.graph.operator import Operator, Trait

FINITE, MASKED, WILD = 0, 1, 2
"""How far a value may be from finite because of a weight: not at all; −∞ where a mask says so; anything."""


def wildness(array: Array) -> int:
    """How far the values of an array are from finite."""
    if array.dtype.kind not in "fV" or array.size == 0:
        return FINITE
    low, high = (float(f(array.astype(np.float32, copy=False))) for f in (np.min, np.max))
    if np.isfinite(low) and np.isfinite(high):
        return FINITE
    return MASKED if low == -np.inf and np.isfinite(high) else WILD


def _bears_masks(op: Operator) -> bool:
    return op.name in ("Add", "Where", "Softmax") or op.has(Trait.MOVES_DATA)


def _is_mask(op: Operator, position: int) -> bool:
    """Whether an operator makes zeros of −∞ in that input."""
    return op.name == "Attention" and not op.domain and position == 3


def spread(kernel: Kernel, operands: Sequence[int]) -> tuple[bool, int]:
    """Whether a kernel meets values that a library may treat otherwise than the operators say, and what comes out."""
    steps: list[int] = []
    careful = False
    for step in kernel.steps:
        given = [
            operands[i] if i >= 0 else steps[-1 - i] for position, i in enumerate(step.inputs)
            if i is not None and not (_is_mask(step.op, position) and i >= 0 and operands[i] == MASKED)
        ]  # fmt: skip
        level = max(given, default=FINITE)
        if level == WILD or level == MASKED and not _bears_masks(step.op):
            careful, level = True, WILD
        # a softmax makes zeros of −∞
        steps.append(FINITE if level == MASKED and step.op.name == "Softmax" else level)
    return careful, steps[-1] if steps else max(operands, default=FINITE)
