"""Random operands and weights of kernels that are measured: the same each time."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from taso.backends.base import Array
from taso.backends.lowering import Kernel, Operand
from taso.backends.places import Block


class RandomSupply:
    """Constants of a kernel that is measured: random, laid out in blocks of its own, kept as long as this is."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._blocks: dict[tuple[int, str], Block] = {}
        self._arrays: dict[int, Array] = {}

    def array(self, operand: int) -> Array:
        if operand not in self._arrays:
            self._arrays[operand] = random_array(self._kernel.operands[operand], operand)
        return self._arrays[operand]

    def keep(self, operand: int, label: str, make: Callable[[Array], Block]) -> Block:
        key = (operand, label)
        if key not in self._blocks:
            self._blocks[key] = make(self.array(operand))
        return self._blocks[key]


class BlankSupply:
    """Constants that nobody lays out: ones, of which a number at most is looked at."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel

    def array(self, operand: int) -> Array:
        t = self._kernel.operands[operand].type
        return np.broadcast_to(np.ones((), t.dtype.numpy), t.static_shape)

    def keep(self, operand: int, label: str, make: Callable[[Array], Block]) -> Block:
        return Block(0, None)


def random_array(operand: Operand, seed: int) -> Array:
    """Reproducible values: normal floats (weights scaled by 1 / √fan-in, vectors positive), else 0 or 1."""
    shape, dtype = operand.type.static_shape, operand.type.dtype
    if not dtype.is_float:
        return np.random.default_rng(seed).integers(0, 2, shape).astype(dtype.numpy)
    numbers = _normal()[seed:]
    if operand.constant and len(shape) < 2:
        numbers = np.abs(numbers) + np.float32(0.5)
    elif operand.constant:
        numbers = numbers / np.float32(math.sqrt(max(math.prod(shape[1:]), 1)))
    return np.resize(numbers.astype(dtype.numpy, copy=False), shape)


@functools.lru_cache(maxsize=1)
def _normal() -> NDArray[np.float32]:
    """Normal numbers that larger arrays repeat: so many that no kernel meets them again at the same place of a row."""
    return np.random.default_rng(0).standard_normal((1 << 16) + 13, np.float32)
