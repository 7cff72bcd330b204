"""A cuDNN graph as plain data: what the frontend is fed with, what tests interpret, what costs are keyed by."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Union

from taso.graph.errors import BackendError
from taso.graph.types import DType

FLOAT32, TF32, FP16, BF16 = "float32", "tf32", "fp16", "bf16"
"""Precisions of products: float32 all through; factors rounded to TensorFloat-32, half or bfloat16, sums in float32."""

PRECISIONS = (FLOAT32, TF32, FP16, BF16)

Attribute = Union[int, float, str, bool, tuple[int, ...]]


@dataclass(frozen=True)
class Tensor:
    """A tensor of a graph: logical dimensions (batch, channels, …, whatever the layout), strides in elements.

    A `virtual` one lies between two operations and is never stored. `scalar` is the value of one element that is passed
    by value from the host.
    """

    uid: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: DType
    virtual: bool = False
    scalar: float | None = None

    @property
    def span(self) -> int:
        """Elements from the first to the last one in memory."""
        return 1 + sum((d - 1) * s for d, s in zip(self.dims, self.strides, strict=True))

    @property
    def text(self) -> str:
        kind = "v" if self.virtual else f"={self.scalar!r}" if self.scalar is not None else ""
        dims, strides = ("x".join(map(str, n)) for n in (self.dims, self.strides))
        return f"{self.uid}:{self.dtype.name.lower()}[{dims}/{strides}]{kind}"


@dataclass(frozen=True)
class Operation:
    """One operation, its tensors by role; roles and attributes are named as cuDNN's Python frontend names them.

    `kind` is the frontend's method, "pointwise" for all element-wise ones (attribute `mode` is then the method, and
    the roles are IN_0, IN_1, IN_2 and OUT_0).
    """

    kind: str
    inputs: tuple[tuple[str, int], ...]
    outputs: tuple[tuple[str, int], ...]
    attributes: tuple[tuple[str, Attribute], ...] = ()

    @staticmethod
    def of(
        kind: str, inputs: Mapping[str, int], outputs: Mapping[str, int], attributes: Mapping[str, Attribute]
    ) -> Operation:
        return Operation(kind, tuple(inputs.items()), tuple(outputs.items()), tuple(sorted(attributes.items())))

    def input(self, role: str) -> int:
        """The uid in a role; raises `BackendError` where the operation has none in it."""
        found = dict(self.inputs).get(role)
        if found is None:
            raise BackendError(f"the cuDNN operation {self.kind} has no input {role!r}")
        return found

    @property
    def output(self) -> int:
        return self.outputs[0][1]

    @cached_property
    def settings(self) -> dict[str, Attribute]:
        return dict(self.attributes)

    def ints(self, name: str) -> tuple[int, ...]:
        found = self.settings.get(name)
        if not isinstance(found, tuple):
            raise BackendError(f"attribute {name} of the cuDNN operation {self.kind} is no list of whole numbers")
        return found

    def word(self, name: str) -> str:
        found = self.settings.get(name)
        if not isinstance(found, str):
            raise BackendError(f"attribute {name} of the cuDNN operation {self.kind} is no name")
        return found

    def number(self, name: str, otherwise: float) -> float:
        found = self.settings.get(name, otherwise)
        if isinstance(found, (str, tuple)):
            raise BackendError(f"attribute {name} of the cuDNN operation {self.kind} is no number")
        return float(found)

    @property
    def text(self) -> str:
        parts = (",".join(f"{k}={v}" for k, v in n) for n in (self.inputs, self.outputs, self.attributes))
        return f"{self.kind}({';'.join(parts)})"


@dataclass(frozen=True)
class Description:
    """A graph: tensors, operations in an order in which they can run, and the types of what has none of its own.

    `precision` says what may be made of products of float32 tensors (`PRECISIONS`). Raises `BackendError` where the
    operations do not fit the tensors.
    """

    tensors: tuple[Tensor, ...]
    operations: tuple[Operation, ...]
    precision: str = FLOAT32
    io: DType = DType.FLOAT
    intermediate: DType = DType.FLOAT
    compute: DType = DType.FLOAT

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise BackendError(f"{self.precision!r} is no precision; there are {', '.join(PRECISIONS)}")
        if len(self.by_uid) != len(self.tensors):
            raise BackendError("two tensors of a cuDNN graph have one uid")
        for tensor in self.tensors:
            if len(tensor.dims) != len(tensor.strides) or any(d < 1 for d in tensor.dims):
                raise BackendError(f"dimensions and strides of a tensor of a cuDNN graph do not fit: {tensor.text}")
        self._check_order()

    def _check_order(self) -> None:
        made = {t.uid for t in self.tensors} - {uid for op in self.operations for _, uid in op.outputs}
        bad = [t.text for t in self.tensors if t.virtual and t.uid in made]
        if bad:
            raise BackendError(f"nothing makes tensors of a cuDNN graph that are not stored: {', '.join(bad)}")
        for op in self.operations:
            if any(uid not in made for _, uid in op.inputs):
                raise BackendError(f"a cuDNN graph reads what is not there yet: {op.text}")
            for _, uid in op.outputs:
                if uid in made or uid not in self.by_uid:
                    raise BackendError(f"a cuDNN graph makes a tensor twice, or one that it does not have: {op.text}")
                made.add(uid)

    @cached_property
    def by_uid(self) -> dict[int, Tensor]:
        return {t.uid: t for t in self.tensors}

    @cached_property
    def produced(self) -> frozenset[int]:
        """The uids that operations write."""
        return frozenset(uid for op in self.operations for _, uid in op.outputs)

    @property
    def stored(self) -> tuple[Tensor, ...]:
        """The tensors that lie in memory of the device: what has to be bound to run the graph."""
        return tuple(t for t in self.tensors if not t.virtual and t.scalar is None)

    @cached_property
    def key(self) -> str:
        """Text that is equal for equal graphs, in every process."""
        types = f"{self.precision};{self.io.name};{self.intermediate.name};{self.compute.name}"
        whole = "\n".join([types, *(t.text for t in self.tensors), *(op.text for op in self.operations)])
        return hashlib.sha256(whole.encode()).hexdigest()
