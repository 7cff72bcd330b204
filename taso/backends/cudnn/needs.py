"""What a kernel needs of memory beside its operands and results, told from the kernel alone: what plans go by.

That is what its recipe has, workspaces of cuDNN's plans included: on a GPU cuDNN is asked for them, and times the best
few, as it does when the kernel is measured or built. Both keep what was found.
"""

from __future__ import annotations

import logging

import numpy as np

from taso.backends.arena import aligned
from taso.backends.cudnn.device import Device
from taso.backends.cudnn.kernels import design
from taso.backends.lowering import Kernel, is_view
from taso.backends.sampling import BlankSupply
from taso.graph.errors import BackendError
from taso.graph.operator import Trait
from taso.graph.types import DType, TensorType

log = logging.getLogger(__name__)


class Needs:
    """The needs of kernels on one device, in one precision of products; what was found is kept."""

    def __init__(self, device: Device, precision: str) -> None:
        self._device = device
        self._precision = precision
        self._found: dict[Kernel, tuple[tuple[int, ...], int]] = {}

    def overwritable(self, kernel: Kernel) -> tuple[int, ...]:
        """Operands whose memory the result may take, in the order in which that is tried."""
        return self._of(kernel)[0]

    def scratch(self, kernel: Kernel) -> int:
        """Bytes that it works in beside its operands and results."""
        return self._of(kernel)[1]

    def _of(self, kernel: Kernel) -> tuple[tuple[int, ...], int]:
        found = self._found.get(kernel)
        if found is None:
            found = self._found[kernel] = self._asked(kernel)
        return found

    def _asked(self, kernel: Kernel) -> tuple[tuple[int, ...], int]:
        tensors = [o.type for o in (*kernel.operands, *kernel.results)]
        opaque = any(s.op.has(Trait.OPAQUE) for s in kernel.steps)
        if is_view(kernel) or opaque or not kernel.steps or not all(map(placed, tensors)):
            return (), 0
        try:
            with self._device.working("planning memory"), np.errstate(all="ignore"):
                recipe = design(kernel, self._device, BlankSupply(kernel), self._precision)
        except BackendError as reason:
            # whoever runs it will say why it cannot be built
            log.debug("what a kernel needs of memory is not known: %s", str(reason))
            return (), 0
        return tuple(sorted(recipe.shares)), sum(map(aligned, recipe.scratch))


def placed(t: TensorType) -> bool:
    """Whether tensors of the type have a place in memory that is known beforehand."""
    return t.other is None and t.static and t.dtype not in (DType.STRING, DType.UNDEFINED)


__all__ = ["Needs", "placed"]
