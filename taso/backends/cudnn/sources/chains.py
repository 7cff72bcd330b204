"""Chains of element-wise steps: what they read, and their text for one element."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from taso.backends.cudnn.sources.fetches import Straight
from taso.backends.cudnn.sources.launches import Place
from taso.backends.cudnn.sources.nests import Access, broadcast_strides, channel_strides
from taso.backends.cudnn.sources.scalars import computed, expression
from taso.backends.lowering import Kernel, Step
from taso.backends.places import OPERAND
from taso.graph.types import DType, TensorType


@dataclass(frozen=True)
class Use:
    """An operand as a step reads it: broadcast, or, with an axis, one number for each position along that."""

    operand: int
    axis: int | None = None


@dataclass(frozen=True)
class Chain:
    """Steps of a kernel from `first` on, as statements about the elements at one position.

    The elements of use n stand under the name `x<n>`, widened; what step `first` − 1 gave under `head`.
    """

    uses: tuple[Use, ...]
    statements: tuple[str, ...]
    result: str
    dtype: DType

    def fetches(self, kernel: Kernel, loops: Sequence[int]) -> list[Straight] | None:
        """How each use is read, where the result's axis loops[n] runs along loop n; None where it does not fit."""
        dims = kernel.results[0].type.static_shape
        found = []
        for use in self.uses:
            operand = kernel.operands[use.operand]
            strides = broadcast_strides(operand, dims)
            if use.axis is not None:
                strides = channel_strides(operand.type, dims, use.axis)
            if strides is None:
                return None
            ordered = tuple(strides[a] for a in loops)
            found.append(Straight(Access(Place(OPERAND, use.operand), operand.type.dtype, ordered)))
        return found


# inputs of an operator that have one number for each position along an axis of the first one
_ALONG_AXIS = {"BatchNormalization": (1, 2, 3, 4), "QuantizeLinear": (1, 2), "DequantizeLinear": (1, 2)}


def chain(kernel: Kernel, first: int) -> Chain | None:
    """The steps from `first` on, None where one of them is not covered or is not element-wise."""
    builder = _Builder(kernel)
    held: dict[int, tuple[str, DType]] = {}
    if first:
        held[first - 1] = ("head", builder.type_of(first - 1).dtype)
    for number in range(first, len(kernel.steps)):
        step = kernel.steps[number]
        args = builder.arguments(step, held)
        if args is None:
            return None
        out = builder.type_of(number)
        text = expression(step.op, step.attrs, args, out.dtype)
        if text is None:
            return None
        held[number] = (f"s{number}", out.dtype)
        builder.statements.append(f"const {computed(out.dtype)} s{number} = {text};")
    name, dtype = held[len(kernel.steps) - 1]
    return Chain(tuple(builder.uses), tuple(builder.statements), name, dtype)


class _Builder:
    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.uses: dict[Use, int] = {}
        self.statements: list[str] = []
        self._types: list[TensorType] = []

    def type_of(self, number: int) -> TensorType:
        """The type of the first result of a step."""
        while len(self._types) <= number:
            step, last = self.kernel.steps[len(self._types)], len(self._types) == len(self.kernel.steps) - 1
            given = [self.input_type(r) for r in step.inputs]
            self._types.append(self.kernel.results[0].type if last else step.op.types_of(given, step.attrs)[0])
        return self._types[number]

    def input_type(self, reference: int | None) -> TensorType | None:
        if reference is None:
            return None
        return self.kernel.operands[reference].type if reference >= 0 else self.type_of(-1 - reference)

    def arguments(self, step: Step, held: dict[int, tuple[str, DType]]) -> list[tuple[str, DType] | None] | None:
        """Names and element types of a step's inputs, None where it reads what is not there."""
        found: list[tuple[str, DType] | None] = []
        inputs = step.inputs[:1] if step.op.name == "CastLike" else step.inputs
        if step.op.name in _ALONG_AXIS and step.inputs[-1] is None:
            inputs = inputs[:-1]
        for position, reference in enumerate(inputs):
            if reference is None:
                found.append(None)
            elif reference >= 0:
                along = position in _ALONG_AXIS.get(step.op.name, ())
                use = Use(reference, self.axis(step) if along else None)
                number = self.uses.setdefault(use, len(self.uses))
                found.append((f"x{number}", self.kernel.operands[reference].type.dtype))
            elif -1 - reference in held:
                found.append(held[-1 - reference])
            else:
                return None
        if any(step.attrs.get(name) for name in ("block_size",)):
            return None
        return found

    def axis(self, step: Step) -> int:
        """The axis of the kernel's result along which numbers of a step's vectors count."""
        given = self.input_type(step.inputs[0])
        rank = self.kernel.results[0].type.rank
        own = given.rank if given is not None else rank
        axis = 1 if step.op.name == "BatchNormalization" else step.attrs.int("axis") % max(own, 1)
        return axis + rank - own


__all__ = ["Chain", "Use", "chain"]
