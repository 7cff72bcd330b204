"""What an operator is: name, attributes, type rule, algebra, meaning, and how ONNX files spell it.

Each operator is one block in `taso.graph.ops`; nothing else in the project lists operators by name.
"""

from __future__ import annotations

import builtins
import enum
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar, Union

import numpy as np
from numpy.typing import NDArray

from taso.graph.errors import GraphError
from taso.graph.index import Meaning
from taso.graph.types import DType, TensorType
from taso.graph.unknown import UnknownReal

Array = NDArray[np.generic]
M = TypeVar("M")


class Weight:
    """A constant tensor, materialised when asked for; identity, not content, makes two weights the same.

    `load` returns the array. `original` is the serialized ONNX node or initializer it came from, for writing it
    back in its original form; `name` is its name in the file.
    """

    __slots__ = ("__weakref__", "_array", "_load", "name", "original", "type")

    def __init__(
        self, type: TensorType, load: Callable[[], Array] | Array, name: str = "", original: object = None
    ) -> None:
        self.type = type
        self.name = name
        self.original = original
        self._array: Array | None = None if callable(load) else load
        self._load = load if callable(load) else None

    def array(self) -> Array:
        """The values, of shape and dtype `type`; not cached where they can be made again."""
        if self._array is not None:
            return self._array
        if self._load is None:
            raise GraphError(f"weight '{self.name}' has no values")
        return self._load()

    def __copy__(self) -> Weight:
        return self

    def __deepcopy__(self, memo: object) -> Weight:
        # nothing changes a weight, and another one would be another weight
        return self

    def __reduce__(self) -> tuple[Callable[..., Weight], tuple[object, ...]]:
        # what makes values of what a file says travels as it is; what makes them of a graph's nodes, as its values
        load = self._load if isinstance(self._load, partial) else self.array()
        return type(self), (self.type, load, self.name, self.original)

    def __repr__(self) -> str:
        return f"Weight({self.name or 'unnamed'}: {self.type})"


AttrValue = Union[
    None, bool, int, float, str, bytes, DType, TensorType, Weight, tuple[int, ...], tuple[float, ...],
    tuple[str, ...], tuple[TensorType, ...], tuple["AttrValue", ...],
]  # fmt: skip


class Attrs(Mapping[str, AttrValue]):
    """Attributes of a node: immutable, hashable, complete (defaults filled in), with typed access."""

    __slots__ = ("_hash", "_items")

    def __init__(self, values: Mapping[str, AttrValue]) -> None:
        self._items = dict(sorted(values.items()))
        # 1, 1.0 and True are equal in Python and different attributes
        self._hash = hash(tuple((k, type(v).__name__, v) for k, v in self._items.items()))

    def __getitem__(self, name: str) -> AttrValue:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Attrs):
            return NotImplemented
        return (
            self._hash == other._hash
            and self._items == other._items
            and all(type(v) is type(other._items[k]) for k, v in self._items.items())
        )

    def __reduce__(self) -> tuple[Callable[[Mapping[builtins.str, AttrValue]], Attrs], tuple[object]]:
        # hashes of strings differ from process to process
        return type(self), (self._items,)

    def __repr__(self) -> str:
        return f"Attrs({self._items})"

    def int(self, name: builtins.str) -> builtins.int:
        value = self._items[name]
        if isinstance(value, builtins.int):
            return value
        raise GraphError(f"attribute '{name}' must be an integer, not {value!r}")

    def float(self, name: builtins.str) -> builtins.float:
        value = self._items[name]
        if isinstance(value, UnknownReal):
            return value
        if isinstance(value, (builtins.int, builtins.float)):
            return builtins.float(value)
        raise GraphError(f"attribute '{name}' must be a number, not {value!r}")

    def str(self, name: builtins.str) -> builtins.str:
        value = self._items[name]
        if isinstance(value, builtins.str):
            return value
        raise GraphError(f"attribute '{name}' must be a string, not {value!r}")

    def ints(self, name: builtins.str) -> tuple[builtins.int, ...]:
        value = self._items[name]
        if isinstance(value, tuple) and all(isinstance(v, builtins.int) for v in value):
            return tuple(v for v in value if isinstance(v, builtins.int))
        raise GraphError(f"attribute '{name}' must be a list of integers, not {value!r}")

    def dtype(self, name: builtins.str) -> DType:
        value = self._items[name]
        if isinstance(value, DType):
            return value
        raise GraphError(f"attribute '{name}' must be an element type, not {value!r}")


class Trait(enum.Enum):
    """Algebra of an operator, as data that generic rules and backends ask for."""

    ELEMENTWISE = "each output element depends on the elements at its (broadcast) position alone"
    COMMUTATIVE = "op(a, b) = op(b, a)"
    ASSOCIATIVE = "op(op(a, b), c) = op(a, op(b, c)) over the reals"
    IDEMPOTENT = "op(op(x)) = op(x)"
    MOVES_DATA = "every output element is a copy of an input element"
    IDENTITY = "the output is the first input"
    RANDOM = "two runs differ: never merged, never folded"
    TYPED = "its result depends on the element types themselves: in wider ones it is another"
    OPAQUE = "not modelled: passes through unchanged"
    SOURCE = "no inputs: a graph input or a weight"


class Required:
    """Marks an attribute without a default."""

    def __repr__(self) -> str:
        return "REQUIRED"


REQUIRED = Required()

Types = Sequence[Union[TensorType, None]]
InferFunction = Callable[[Types, Attrs], tuple[TensorType, ...]]
MeaningFunction = Callable[[Types, Attrs], tuple[Meaning, ...]]
ComputeFunction = Callable[[Sequence[Union[Array, None]], Attrs], tuple[Array, ...]]


class Unmodelled(Exception):
    """What a file asks of an operator lies outside what is modelled; the node becomes opaque. Carries the reason."""


class Unspellable(GraphError):
    """An operator's attributes cannot be written in the asked opset."""


@dataclass(frozen=True)
class FileNode:
    """A node as a file has it, already free of protobuf.

    `version` is the version of the operator's schema in force; `constant(i)` gives the value of input i where that is
    a small constant, else None; `types[i]` is None for a missing input; `outputs` are the names in use ("" unused).
    """

    op_type: str
    version: int
    opset: int
    attrs: Mapping[str, AttrValue]
    types: tuple[TensorType | None, ...]
    constant: Callable[[int], Array | None]
    outputs: tuple[str, ...]

    def needs(self, position: int) -> Array:
        """The constant value of input `position`; raises `Unmodelled` where it is not known."""
        value = self.constant(position)
        if value is None:
            raise Unmodelled(f"input {position} of {self.op_type} is not a constant")
        return value

    def has(self, position: int) -> bool:
        return position < len(self.types) and self.types[position] is not None

    def type(self, position: int) -> TensorType:
        """Type of a present input of known rank; raises `Unmodelled` otherwise."""
        found = self.types[position] if position < len(self.types) else None
        if found is None or found.shape is None:
            raise Unmodelled(f"input {position} of {self.op_type} has no known rank")
        return found

    def ints(self, name: str) -> tuple[int, ...] | None:
        value = self.attrs.get(name)
        return tuple(v for v in value if isinstance(v, int)) if isinstance(value, tuple) else None


@dataclass(frozen=True)
class Reading:
    """A file's node in our terms: attributes, and which of the file's inputs stay inputs (None: left out)."""

    attrs: Mapping[str, AttrValue]
    inputs: tuple[int | None, ...]


@dataclass(frozen=True)
class Spelling:
    """One of our nodes in a file's terms: an input is a position among ours, a constant to add, or None (empty)."""

    op_type: str
    attrs: Mapping[str, AttrValue]
    inputs: tuple[int | Array | None, ...]


class Maker(Protocol[M]):
    """Makes the value of an operator, by name, of values and numbers: what an operator's parts are written with."""

    def __call__(self, name: str, inputs: Sequence[M | float], attrs: Mapping[str, AttrValue] | None = None) -> M: ...


@dataclass(frozen=True)
class Parts:
    """How opsets that lack an operator say it all the same: `make` makes it of others, which they have from `since` on.

    What it makes is the operator's meaning, written with those others; ONNX's function bodies do the same.
    """

    since: int
    make: PartsFunction


class PartsFunction(Protocol):
    """The value of an operator, made of others."""

    def __call__(self, make: Maker[M], inputs: Sequence[M], attrs: Attrs) -> M: ...


ReadFunction = Callable[[FileNode], Reading]
WriteFunction = Callable[[Attrs, Types, int], Spelling]


@dataclass(frozen=True, eq=False)
class Operator:
    """One operator. `infer` is its type rule; `meaning` its definition in index notation, where rules speak of it.

    `compute` is its definition in NumPy where index notation cannot say it and ONNX's reference does not do all of it:
    floats come and go in float64. `optional_outputs` are those that a file may leave out. `linear` lists the inputs in
    which it is linear (all others held). `read` and `write` map the versions of its ONNX
    schema to and from these attributes; None means "as they are". `since` is the first opset that has it;
    `internal` operators have no ONNX name and live on weights only. `parts` say it where an opset lacks it.
    """

    name: str
    infer: InferFunction
    attributes: Mapping[str, AttrValue | Required] = field(default_factory=dict)
    traits: frozenset[Trait] = frozenset()
    linear: frozenset[int] = frozenset()
    meaning: MeaningFunction | None = None
    arity: tuple[int, int] = (1, 1)
    domain: str = ""
    read: ReadFunction | None = None
    write: WriteFunction | None = None
    since: int = 1
    internal: bool = False
    compute: ComputeFunction | None = None
    optional_outputs: frozenset[int] = frozenset()
    parts: Parts | None = None

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Callable[[str], Operator], tuple[str]]:
        return _registered, (self.name,)

    def complete(self, attrs: Mapping[str, AttrValue]) -> Attrs:
        """`attrs` with defaults filled in; raises `GraphError` for an unknown or missing one."""
        if isinstance(attrs, Attrs) and attrs.keys() == self.attributes.keys():
            return attrs
        unknown = attrs.keys() - self.attributes.keys()
        if unknown:
            raise GraphError(f"{self.name} has no attribute {sorted(unknown)}; it has {sorted(self.attributes)}")
        full: dict[str, AttrValue] = {}
        for name, default in self.attributes.items():
            if name in attrs:
                full[name] = attrs[name]
            elif isinstance(default, Required):
                raise GraphError(f"{self.name} needs the attribute '{name}'")
            else:
                full[name] = default
        return Attrs(full)

    def types_of(self, inputs: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        """Output types; raises `ShapeError` where the inputs do not fit."""
        low, high = self.arity
        if not low <= len(inputs) <= high:
            wanted = str(low) if low == high else f"{low} to {high}"
            raise GraphError(f"{self.name} takes {wanted} inputs, not {len(inputs)}")
        return self.infer(inputs, attrs)

    @property
    def label(self) -> str:
        """ONNX's name for it, also where it is opaque."""
        return self.name

    def has(self, trait: Trait) -> bool:
        return trait in self.traits

    @property
    def foldable(self) -> bool:
        """Whether its value is fixed once its inputs are."""
        return not self.traits & {Trait.RANDOM, Trait.OPAQUE, Trait.SOURCE}

    def spell(self, attrs: Attrs, types: Types, opset: int) -> Spelling:
        """How ONNX of `opset` says it; raises `Unspellable` where it cannot."""
        if self.internal or opset < self.since:
            raise Unspellable(f"{self.name} cannot be written in ONNX opset {opset}")
        if self.write is not None:
            return self.write(attrs, types, opset)
        inputs = tuple(i if t is not None else None for i, t in enumerate(types))
        return Spelling(self.name, attrs, inputs)


REGISTRY: dict[str, Operator] = {}
ONNX_NAMES: dict[tuple[str, str], Operator] = {}


def register(operator: Operator, *file_names: str) -> Operator:
    """Adds an operator under its name, and under the names by which files call it."""
    if operator.name in REGISTRY:
        raise ValueError(f"operator {operator.name} is registered twice")
    REGISTRY[operator.name] = operator
    if not operator.internal:
        for name in file_names or (operator.name,):
            ONNX_NAMES[operator.domain, name] = operator
    return operator


def _registered(name: str) -> Operator:
    return operator_named(name)


def operator_named(name: str) -> Operator:
    """The registered operator `name`; raises `GraphError` where there is none."""
    found = REGISTRY.get(name)
    if found is None:
        raise GraphError(f"there is no operator named '{name}'")
    return found
