"""Constants of programs, laid out as kernels read them: each once for all who read it in the same way."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence

from taso.backends.base import Array
from taso.backends.places import Block
from taso.backends.wildness import wildness
from taso.graph.evaluate import constant_value
from taso.graph.graph import Value
from taso.graph.operator import Weight

LAID_OUT: weakref.WeakValueDictionary[tuple[Hashable, str], Block] = weakref.WeakValueDictionary()
"""Constants as some program that still lives has them: programs of one model for several shapes, or of a graph and a
rewritten one, share what both read."""


def content_key(value: Value) -> Hashable:
    """Equal for constants that are computed from the same weights in the same way, in whichever graph."""
    weight = value.node.attrs.get("data")
    if isinstance(weight, Weight):
        # not the weight itself, which may go once it is laid out
        return weakref.ref(weight)
    inputs = tuple(content_key(v) if v is not None else None for v in value.node.inputs)
    return value.node.op.name, value.node.attrs, inputs, value.index


class Constants:
    """Constant operands laid out, shared by the kernels that read the same one in the same way."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[Hashable, str], Block] = {}
        self.wildness: dict[Value, int] = {}


class JobSupply:
    """The constants of one kernel; what was loaded for it is dropped with it."""

    def __init__(self, constants: Constants, operands: Sequence[Value]) -> None:
        self._constants = constants
        self._operands = operands
        self._loaded: dict[int, Array] = {}

    def array(self, operand: int) -> Array:
        if operand not in self._loaded:
            self._loaded[operand] = constant_value(self._operands[operand])
        return self._loaded[operand]

    def keep(self, operand: int, label: str, make: Callable[[Array], Block]) -> Block:
        key = (content_key(self._operands[operand]), label)
        if key not in self._constants.blocks:
            shared = LAID_OUT.get(key)
            if shared is None:
                shared = LAID_OUT[key] = make(self.array(operand))
            self._constants.blocks[key] = shared
        return self._constants.blocks[key]

    def wildness(self, operand: int) -> int:
        value = self._operands[operand]
        if value not in self._constants.wildness:
            self._constants.wildness[value] = wildness(self.array(operand))
        return self._constants.wildness[value]
