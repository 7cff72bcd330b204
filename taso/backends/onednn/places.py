"""Where the tensors of a kernel are and how they lie: descriptors for oneDNN, shapes and strides for NumPy."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from taso.backends.base import Array
from taso.backends.lowering import BLOCKED, LAST, PLAIN, Layouts, axes_of
from taso.backends.onednn.memory import DataType, Memory, MemoryDesc, row_major_strides
from taso.backends.onednn.primitives import DST, SCRATCHPAD, SRC, reorder
from taso.graph.types import TensorType

OPERAND, RESULT, SCRATCH, CONSTANT = "operand", "result", "scratch", "constant"


@dataclass(frozen=True)
class Place:
    """One of a kernel's buffers: operand, result, scratch or constant number `index`, from byte `offset` on."""

    kind: str
    index: int = 0
    offset: int = 0


@dataclass(frozen=True)
class Block:
    """Bytes at an address that `owner` keeps alive."""

    address: int
    owner: object

    @staticmethod
    def of(array: Array) -> Block:
        return Block(array.ctypes.data, array)


@dataclass(frozen=True)
class ArraySpec:
    """How NumPy sees a buffer: shape and byte strides."""

    place: Place
    dtype: np.dtype[np.generic]
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def at(self, address: int) -> Array:
        """The array at this address, which the caller keeps alive."""
        if 0 in self.shape:
            return np.zeros(self.shape, self.dtype)
        span = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True)) + self.dtype.itemsize
        held = memoryview((ctypes.c_ubyte * span).from_address(address)).cast("B")
        found: Array = np.ndarray(self.shape, self.dtype, held, 0, self.strides)
        return found


def is_blocked(dims: Sequence[int], layout: str, block: int) -> bool:
    """Whether channels really lie in blocks: BLOCKED says nothing of what has no whole number of them."""
    return layout == BLOCKED and 3 <= len(dims) <= 5 and dims[1] % block == 0


def strides_of(dims: Sequence[int], layout: str) -> tuple[int, ...]:
    """Strides in elements of a dense tensor without blocks."""
    order = axes_of(layout, len(dims))
    inner = row_major_strides([dims[a] for a in order])
    strides = [0] * len(dims)
    for axis, stride in zip(order, inner, strict=True):
        strides[axis] = stride
    return tuple(strides)


def describe(dims: Sequence[int], layout: str, block: int, dtype: DataType = DataType.F32) -> MemoryDesc:
    """oneDNN's descriptor of a dense tensor of these dimensions (a scalar is one element)."""
    dims = tuple(dims) or (1,)
    if is_blocked(dims, layout, block):
        return MemoryDesc.tagged(dims, dtype, f"aB{'cde'[: len(dims) - 2]}{block}b")
    return MemoryDesc.strided(dims, dtype, strides_of(dims, layout))


def plain_spec(place: Place, t: TensorType) -> ArraySpec:
    """A plain tensor as an array of its own shape."""
    return ArraySpec(place, t.dtype.numpy, t.static_shape, _bytes(row_major_strides(t.static_shape), t))


def logical_spec(place: Place, t: TensorType, layout: str, block: int) -> ArraySpec:
    """A tensor as an array with axes of its own; where it is blocked its channels are split in two, the block last."""
    if is_blocked(t.static_shape, layout, block):
        return spread_spec(place, t, layout, t.static_shape, block)
    return ArraySpec(place, t.dtype.numpy, t.static_shape, _bytes(strides_of(t.static_shape, layout), t))


def spread_spec(place: Place, t: TensorType, layout: str, out: Sequence[int], block: int) -> ArraySpec:
    """A tensor that broadcasts to dimensions `out`, whose channels are split in two: (n, c / block, …, block)."""
    dims, missing = t.static_shape, len(out) - len(t.static_shape)
    if is_blocked(dims, layout, block):
        if missing:
            raise ValueError(f"a blocked tensor of dimensions {dims} does not broadcast to {tuple(out)}")
        shape = (dims[0], dims[1] // block, *dims[2:], block)
        return ArraySpec(place, t.dtype.numpy, shape, _bytes(row_major_strides(shape), t))
    full = (1,) * missing + dims
    strides = (0,) * missing + strides_of(dims, layout)
    if full[1] == 1:
        return ArraySpec(place, t.dtype.numpy, (full[0], 1, *full[2:], 1), _bytes((*strides, 0), t))
    shape = (full[0], full[1] // block, *full[2:], block)
    return ArraySpec(
        place, t.dtype.numpy, shape, _bytes((strides[0], strides[1] * block, *strides[2:], strides[1]), t)
    )  # fmt: skip


def _bytes(strides: Sequence[int], t: TensorType) -> tuple[int, ...]:
    return tuple(s * t.dtype.itemsize for s in strides)


def to_plain(array: Array, t: TensorType, layout: str, block: int) -> Array:
    """The plain array of what `logical_spec` shows; a copy where blocks have to be undone."""
    if not is_blocked(t.static_shape, layout, block):
        return array
    return np.moveaxis(array, -1, 2).reshape(t.static_shape)


def from_plain(target: Array, array: Array, t: TensorType, layout: str, block: int) -> None:
    """Writes a plain array into what `logical_spec` shows."""
    if is_blocked(t.static_shape, layout, block):
        dims = t.static_shape
        array = np.moveaxis(array.reshape((dims[0], dims[1] // block, block, *dims[2:])), 2, -1)
    np.copyto(target, array)


def tensor_bytes(t: TensorType) -> int:
    return math.prod(t.static_shape) * t.dtype.itemsize


def lay_out(array: Array, source: MemoryDesc, target: MemoryDesc) -> Block:
    """A copy of `array`, read as `source`, in the layout of `target`; the array itself where both agree."""
    if source == target:
        return Block.of(array)
    memory = Memory.allocate(target)
    primitive = reorder(source, target)
    arguments = {SRC: Memory.from_array(array, source), DST: memory}
    if SCRATCHPAD in primitive.arguments:
        arguments[SCRATCHPAD] = Memory.allocate(primitive.arguments[SCRATCHPAD])
    primitive.bind(arguments)()
    return Block(memory.address, memory)


def layouts_alike(layouts: Layouts, t: TensorType, layout: str, other: str) -> bool:
    return layout == other or layouts.alike(t, layout, other)


__all__ = [
    "BLOCKED", "CONSTANT", "LAST", "OPERAND", "PLAIN", "RESULT", "SCRATCH", "ArraySpec", "Block", "Place", "describe",
    "from_plain", "is_blocked", "lay_out", "layouts_alike", "logical_spec", "plain_spec", "spread_spec", "strides_of",
    "tensor_bytes", "to_plain",
]  # fmt: skip
