"""How the tensors of a kernel lie for oneDNN: descriptors, and constants laid out as one wants them.

What is said of places and of arrays is that of all backends (`taso.backends.places`).
"""

from __future__ import annotations

from collections.abc import Sequence

from taso.backends.base import Array
from taso.backends.onednn.memory import DataType, Memory, MemoryDesc
from taso.backends.onednn.primitives import DST, SCRATCHPAD, SRC, reorder
from taso.backends.places import (
    BLOCKED,
    CONSTANT,
    LAST,
    OPERAND,
    PLAIN,
    RESULT,
    SCRATCH,
    ArraySpec,
    Block,
    Place,
    from_plain,
    is_blocked,
    layouts_alike,
    logical_spec,
    plain_spec,
    spread_spec,
    strides_of,
    tensor_bytes,
    to_plain,
)


def describe(dims: Sequence[int], layout: str, block: int, dtype: DataType = DataType.F32) -> MemoryDesc:
    """oneDNN's descriptor of a dense tensor of these dimensions (a scalar is one element)."""
    dims = tuple(dims) or (1,)
    if is_blocked(dims, layout, block):
        return MemoryDesc.tagged(dims, dtype, f"aB{'cde'[: len(dims) - 2]}{block}b")
    return MemoryDesc.strided(dims, dtype, strides_of(dims, layout))


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


__all__ = [
    "BLOCKED", "CONSTANT", "LAST", "OPERAND", "PLAIN", "RESULT", "SCRATCH", "ArraySpec", "Block", "Place", "describe",
    "from_plain", "is_blocked", "lay_out", "layouts_alike", "logical_spec", "plain_spec", "spread_spec", "strides_of",
    "tensor_bytes", "to_plain",
]  # fmt: skip
