"""Types of tensors: element types and shapes whose dimensions are integers or symbols."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Union

import ml_dtypes
import numpy as np

from taso.graph.errors import GraphError


class DType(enum.Enum):
    """Element types; the value is the code of ONNX's `TensorProto.DataType`."""

    UNDEFINED = 0
    FLOAT = 1
    UINT8 = 2
    INT8 = 3
    UINT16 = 4
    INT16 = 5
    INT32 = 6
    INT64 = 7
    STRING = 8
    BOOL = 9
    FLOAT16 = 10
    DOUBLE = 11
    UINT32 = 12
    UINT64 = 13
    COMPLEX64 = 14
    COMPLEX128 = 15
    BFLOAT16 = 16
    FLOAT8E4M3FN = 17
    FLOAT8E4M3FNUZ = 18
    FLOAT8E5M2 = 19
    FLOAT8E5M2FNUZ = 20
    UINT4 = 21
    INT4 = 22
    FLOAT4E2M1 = 23
    FLOAT8E8M0 = 24
    UINT2 = 25
    INT2 = 26
    FLOAT6E2M3 = 27
    FLOAT6E3M2 = 28

    @property
    def numpy(self) -> np.dtype[np.generic]:
        """The NumPy dtype that holds elements of this type.

        Raises `GraphError` for a type that NumPy (with ml_dtypes) cannot hold.
        """
        held = _NUMPY.get(self)
        if held is None:
            raise GraphError(f"element type {self.name} has no NumPy counterpart")
        return held

    @property
    def is_float(self) -> bool:
        return self in _FLOATS

    @property
    def is_integer(self) -> bool:
        return self in _INTEGERS

    @property
    def itemsize(self) -> int:
        """Bytes of one element in memory, unpacked."""
        return self.numpy.itemsize

    @staticmethod
    def from_numpy(dtype: np.dtype[np.generic]) -> DType:
        """The element type of arrays of `dtype`; raises `GraphError` where there is none."""
        if dtype.kind in "USO":
            return DType.STRING
        found = _FROM_NUMPY.get(dtype)
        if found is None:
            raise GraphError(f"arrays of dtype {dtype} are not ONNX tensors")
        return found


def _numpy_types() -> dict[DType, np.dtype[np.generic]]:
    plain = {
        DType.FLOAT: np.float32, DType.UINT8: np.uint8, DType.INT8: np.int8, DType.UINT16: np.uint16,
        DType.INT16: np.int16, DType.INT32: np.int32, DType.INT64: np.int64, DType.STRING: np.object_,
        DType.BOOL: np.bool_, DType.FLOAT16: np.float16, DType.DOUBLE: np.float64, DType.UINT32: np.uint32,
        DType.UINT64: np.uint64, DType.COMPLEX64: np.complex64, DType.COMPLEX128: np.complex128,
    }  # fmt: skip
    small = {
        DType.BFLOAT16: "bfloat16", DType.FLOAT8E4M3FN: "float8_e4m3fn", DType.FLOAT8E4M3FNUZ: "float8_e4m3fnuz",
        DType.FLOAT8E5M2: "float8_e5m2", DType.FLOAT8E5M2FNUZ: "float8_e5m2fnuz", DType.UINT4: "uint4",
        DType.INT4: "int4", DType.FLOAT4E2M1: "float4_e2m1fn", DType.FLOAT8E8M0: "float8_e8m0fnu",
        DType.UINT2: "uint2", DType.INT2: "int2", DType.FLOAT6E2M3: "float6_e2m3fn",
        DType.FLOAT6E3M2: "float6_e3m2fn",
    }  # fmt: skip
    table: dict[DType, np.dtype[np.generic]] = {d: np.dtype(t) for d, t in plain.items()}
    table.update({d: np.dtype(getattr(ml_dtypes, n)) for d, n in small.items() if hasattr(ml_dtypes, n)})
    return table


_NUMPY = _numpy_types()
_FROM_NUMPY = {n: d for d, n in _NUMPY.items()}
_FLOATS = frozenset(d for d in DType if "FLOAT" in d.name or d is DType.DOUBLE)
_INTEGERS = frozenset(d for d in DType if "INT" in d.name)


@dataclass(frozen=True)
class FloorDiv:
    """The atom ⌊dividend / divisor⌋ of a symbolic dimension."""

    dividend: SymDim
    divisor: int

    def __str__(self) -> str:
        return f"floor(({self.dividend})/{self.divisor})"


@dataclass(frozen=True)
class Larger:
    """The atom max(left, right): what broadcasting two symbolic dimensions gives."""

    left: Dim
    right: Dim

    def __str__(self) -> str:
        return f"max({self.left}, {self.right})"


Atom = Union[str, FloorDiv, Larger]
Monomial = tuple[Atom, ...]


@dataclass(frozen=True)
class SymDim:
    """A dimension known only as a polynomial with integer coefficients over named symbols.

    Two are equal exactly where their normal forms are, so equality holds for every value of the symbols.
    """

    terms: tuple[tuple[Monomial, int], ...]

    @staticmethod
    def named(name: str) -> SymDim:
        return SymDim((((name,), 1),))

    def __add__(self, other: Dim) -> Dim:
        return _normal([*self.terms, *_terms(other)])

    def __sub__(self, other: Dim) -> Dim:
        return _normal([*self.terms, *((m, -c) for m, c in _terms(other))])

    def __mul__(self, other: Dim) -> Dim:
        return _normal([(m + n, c * d) for m, c in self.terms for n, d in _terms(other)])

    __radd__ = __add__
    __rmul__ = __mul__

    def __rsub__(self, other: Dim) -> Dim:
        return self * -1 + other

    def __neg__(self) -> Dim:
        return self * -1

    def __floordiv__(self, divisor: int) -> Dim:
        if divisor == 1:
            return self
        if all(c % divisor == 0 for _, c in self.terms):
            return _normal([(m, c // divisor) for m, c in self.terms])
        return _normal([((FloorDiv(self, divisor),), 1)])

    def __str__(self) -> str:
        shown = []
        for monomial, coefficient in self.terms:
            factors = [str(a) for a in monomial]
            if coefficient != 1 or not factors:
                factors.insert(0, str(coefficient))
            shown.append("*".join(factors))
        return " + ".join(shown).replace("+ -", "- ")

    __repr__ = __str__

    @property
    def symbol(self) -> str | None:
        """The name, where this is one lone symbol."""
        if len(self.terms) == 1 and self.terms[0][1] == 1 and len(self.terms[0][0]) == 1:
            atom = self.terms[0][0][0]
            return atom if isinstance(atom, str) else None
        return None


Dim = Union[int, SymDim]
Shape = tuple[Dim, ...]


def _terms(dim: Dim) -> tuple[tuple[Monomial, int], ...]:
    return dim.terms if isinstance(dim, SymDim) else (((), dim),)


def _normal(terms: Iterable[tuple[Monomial, int]]) -> Dim:
    summed: dict[Monomial, int] = {}
    for monomial, coefficient in terms:
        key = tuple(sorted(monomial, key=str))
        summed[key] = summed.get(key, 0) + coefficient
    kept = sorted(((m, c) for m, c in summed.items() if c), key=lambda t: (tuple(map(str, t[0])), t[1]))
    if not kept:
        return 0
    if len(kept) == 1 and not kept[0][0]:
        return kept[0][1]
    return SymDim(tuple(kept))


def ceil_div(dim: Dim, divisor: int) -> Dim:
    """⌈dim / divisor⌉, symbolic or not."""
    return -(-dim // divisor)


def larger(a: Dim, b: Dim) -> Dim:
    """max(a, b), decided where it can be."""
    if a == b:
        return a
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    first, second = sorted((a, b), key=str)
    return _normal([((Larger(first, second),), 1)])


def product(dims: Iterable[Dim]) -> Dim:
    result: Dim = 1
    for dim in dims:
        result = result * dim
    return result


def symbols_of(dim: Dim) -> frozenset[str]:
    """Names of all symbols in `dim`."""
    if isinstance(dim, int):
        return frozenset()
    found: set[str] = set()
    for monomial, _ in dim.terms:
        for atom in monomial:
            if isinstance(atom, str):
                found.add(atom)
            elif isinstance(atom, FloorDiv):
                found |= symbols_of(atom.dividend)
            else:
                found |= symbols_of(atom.left) | symbols_of(atom.right)
    return frozenset(found)


def substitute(dim: Dim, values: Mapping[str, Dim]) -> Dim:
    """`dim` with the symbols that `values` names replaced."""
    if isinstance(dim, int):
        return dim
    total: Dim = 0
    for monomial, coefficient in dim.terms:
        term: Dim = coefficient
        for atom in monomial:
            term = term * _substitute_atom(atom, values)
        total = total + term
    return total


def _substitute_atom(atom: Atom, values: Mapping[str, Dim]) -> Dim:
    if isinstance(atom, str):
        return values.get(atom, SymDim.named(atom))
    if isinstance(atom, FloorDiv):
        return substitute(atom.dividend, values) // atom.divisor
    return larger(substitute(atom.left, values), substitute(atom.right, values))


def substitute_shape(shape: Shape, values: Mapping[str, Dim]) -> Shape:
    return tuple(substitute(d, values) for d in shape)


def is_static(shape: Shape) -> bool:
    return all(isinstance(d, int) for d in shape)


def show_shape(shape: Shape | None) -> str:
    return "unknown rank" if shape is None else "×".join(map(str, shape)) if shape else "scalar"


@dataclass(frozen=True)
class TensorType:
    """Element type and shape of a value.

    `shape` is None where not even the rank is known. `other` holds ONNX's serialized `TypeProto` for a
    value that is no tensor (sequence, map, optional, sparse); then `dtype` is UNDEFINED.
    """

    dtype: DType
    shape: Shape | None
    other: bytes | None = None

    def __str__(self) -> str:
        if self.other is not None:
            return "non-tensor"
        return f"{self.dtype.name.lower()}[{show_shape(self.shape)}]"

    @property
    def rank(self) -> int:
        return len(self.dims)

    @property
    def dims(self) -> Shape:
        """The shape; raises `GraphError` where the rank is unknown."""
        if self.shape is None:
            raise GraphError("a value of unknown rank was used where the rank must be known")
        return self.shape

    @property
    def static_shape(self) -> tuple[int, ...]:
        """The shape as integers; raises `GraphError` where a dimension is symbolic or the rank unknown."""
        dims = [d for d in self.dims if isinstance(d, int)]
        if len(dims) != len(self.dims):
            raise GraphError(f"shape {show_shape(self.shape)} must be known in numbers here")
        return tuple(dims)

    @property
    def static(self) -> bool:
        return self.shape is not None and is_static(self.shape)

    @property
    def size(self) -> int:
        """Number of elements of a static type."""
        return math.prod(self.static_shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def bind(self, values: Mapping[str, Dim]) -> TensorType:
        """This type with symbols replaced by what `values` gives for them."""
        if self.shape is None:
            return self
        return TensorType(self.dtype, substitute_shape(self.shape, values), self.other)

    def with_shape(self, shape: Iterable[Dim]) -> TensorType:
        return TensorType(self.dtype, tuple(shape))


TypeRule = Callable[..., tuple[TensorType, ...]]
