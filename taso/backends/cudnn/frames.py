"""The axes of a kernel's tensors as axes of a cuDNN graph, where every tensor has as many as the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


class Unmapped(Exception):
    """cuDNN's graph API cannot say this; the message says what. Never leaves `described`."""


@dataclass(frozen=True)
class Frame:
    """Each axis of the graph is some neighbouring axes of the kernel's result taken as one; of none, it has size 1."""

    dims: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Dimensions of the result in the graph."""
        return tuple(math.prod(self.of(group)) for group in self.groups)

    def of(self, group: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.dims[a] for a in group)

    def placed(
        self, dims: Sequence[int], strides: Sequence[int]
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:  # fmt: skip
        """Dimensions and strides in the graph of a tensor that broadcasts to the result.

        Raises `Unmapped` where axes that are one in the graph do not lie or broadcast as one.
        """
        missing = len(self.dims) - len(dims)
        if missing < 0:
            raise Unmapped(f"an operand of dimensions {tuple(dims)} has more axes than the result, {self.dims}")
        sizes: list[int] = []
        steps: list[int | None] = []
        for group in self.groups:
            own = [a - missing for a in group if a >= missing]
            wanted = zip(group, self.of(group), strict=True)
            whole = all(d == 1 or a >= missing and dims[a - missing] == d for a, d in wanted)
            if not whole and any(dims[a] != 1 for a in own):
                raise Unmapped(f"an operand of dimensions {tuple(dims)} broadcasts along a part of {self.dims}")
            sizes.append(math.prod(dims[a] for a in own))
            steps.append(_merged([(dims[a], strides[a]) for a in own]))
        return tuple(sizes), _filled(sizes, steps)


def _merged(axes: Sequence[tuple[int, int]]) -> int | None:
    """The stride of axes taken as one, None where there are none; raises `Unmapped` where they are not dense."""
    real = [a for a in axes if a[0] != 1]
    for (_, outer), (size, inner) in zip(real, real[1:], strict=False):
        if outer != size * inner:
            raise Unmapped("axes that are to be one do not lie one behind the other")
    return real[-1][1] if real else axes[-1][1] if axes else None


def _filled(sizes: Sequence[int], steps: Sequence[int | None]) -> tuple[int, ...]:
    """Strides with those of axes of size 1 that a tensor does not have itself, as if it were dense."""
    found = list(steps)
    for i in reversed(range(len(sizes))):
        if found[i] is None:
            behind = [sizes[j] * s for j, s in enumerate(found) if j > i and s is not None]
            # a batch of one spans the whole tensor, any other axis what follows it
            found[i] = (max(behind) if i == 0 else behind[0]) if behind else 1
    return tuple(s if s is not None else 1 for s in found)


def single(dims: Sequence[int], least: int) -> Frame:
    """Every axis by itself, axes of size 1 in front up to `least` of them."""
    front = ((),) * max(0, least - len(dims))
    return Frame(tuple(dims), (*front, *((a,) for a in range(len(dims)))))


def spatial(dims: Sequence[int]) -> Frame:
    """Batch, channels and at least two more axes: what has one lies along the second of them."""
    axes = [(a,) for a in range(len(dims))]
    return Frame(tuple(dims), (axes[0], axes[1], *(((),) if len(dims) == 3 else ()), *axes[2:]))
