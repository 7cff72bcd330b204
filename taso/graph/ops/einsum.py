"""Einsum."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from taso.graph.errors import DimensionMismatch, ShapeError
from taso.graph.index import Affine, Call, Expr, Loop, Meaning, Read, Reduce, at
from taso.graph.operator import REQUIRED, Attrs, Operator, Types, register
from taso.graph.ops.common import broadcast, output_loops, present, require_same_dtype, single_axes
from taso.graph.types import Dim, Shape, TensorType


@dataclass(frozen=True)
class Equation:
    """Letters of each input and of the output; "." stands for the axes that an ellipsis takes."""

    inputs: tuple[str, ...]
    output: str


@lru_cache(maxsize=256)
def parse(equation: str) -> Equation:
    """The equation in its parts; without an arrow the output has the letters that occur once, in order.

    Raises `ShapeError` for what is no equation.
    """
    plain = equation.replace(" ", "").replace("...", ".")
    left, arrow, right = plain.partition("->")
    terms = tuple(left.split(","))
    letters = "".join(terms)
    if not arrow:
        once = sorted(c for c in set(letters) if c.isalpha() and letters.count(c) == 1)
        right = ("." if "." in letters else "") + "".join(once)
    good = all(c.isalpha() or c == "." for c in letters + right)
    if not good or any(t.count(".") > 1 for t in (*terms, right)) or len(set(right)) != len(right):
        raise ShapeError(f"Einsum: '{equation}' is no equation")
    if set(right) - set(letters) - {"."}:
        raise ShapeError(f"Einsum: the output of '{equation}' has a letter that no input has")
    return Equation(terms, right)


def _sizes(types: Types, attrs: Attrs) -> tuple[Equation, dict[str, Dim], Shape]:
    """The equation, the size of each letter, and the shape that the ellipses broadcast to."""
    equation = parse(attrs.str("equation"))
    if len(equation.inputs) != len(types):
        raise ShapeError(f"Einsum: '{attrs.str('equation')}' has {len(equation.inputs)} inputs, not {len(types)}")
    require_same_dtype(types, "Einsum")
    sizes: dict[str, Dim] = {}
    taken: list[Shape] = [()]
    for position, term in enumerate(equation.inputs):
        for letter, dims in _axes(term, present(types, position, "Einsum")):
            if letter == ".":
                taken.append(dims)
            elif (known := sizes.setdefault(letter, dims[0])) != dims[0]:
                raise DimensionMismatch(f"Einsum: the letter {letter} is both {known} and {dims[0]}", known, dims[0])
    return equation, sizes, broadcast(taken, "Einsum")


def _axes(term: str, t: TensorType) -> list[tuple[str, Shape]]:
    """What each letter of a term stands for: one size, or those of the ellipsis."""
    letters = len(term) - term.count(".")
    spare = t.rank - letters
    if spare < 0 or spare and "." not in term:
        raise ShapeError(f"Einsum: the term '{term.replace('.', '...')}' does not fit an input of {t.rank} dimensions")
    found: list[tuple[str, Shape]] = []
    position = 0
    for letter in term:
        count = spare if letter == "." else 1
        found.append((letter, t.dims[position : position + count]))
        position += count
    return found


def _type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    equation, sizes, spread = _sizes(types, attrs)
    dims: list[Dim] = []
    for letter in equation.output:
        dims.extend(spread if letter == "." else (sizes[letter],))
    return (present(types, 0, "Einsum").with_shape(dims),)


def _meaning(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
    equation, sizes, spread = _sizes(types, attrs)
    (out,) = _type(types, attrs)
    loops = list(output_loops(out.dims))
    named: dict[str, Loop] = {}
    ellipsis: tuple[Loop, ...] = tuple(Loop(f"e{i}", d) for i, d in enumerate(spread))
    rest = iter(loops)
    for letter in equation.output:
        if letter == ".":
            ellipsis = tuple(next(rest) for _ in spread)
        else:
            named[letter] = next(rest)
    summed = [] if "." in equation.output else list(ellipsis)
    for letter, size in sizes.items():
        if letter not in named:
            named[letter] = Loop(f"k{letter}", size)
            summed.append(named[letter])
    body: Expr = _read(0, equation.inputs[0], types, named, ellipsis)
    for position, term in enumerate(equation.inputs[1:], 1):
        body = Call("mul", (body, _read(position, term, types, named, ellipsis)))
    if summed:
        body = Reduce("sum", tuple(summed), body)
    return (Meaning(single_axes(loops), body),)


def _read(position: int, term: str, types: Types, named: dict[str, Loop], ellipsis: tuple[Loop, ...]) -> Read:
    index: list[Affine] = []
    for letter, dims in _axes(term, present(types, position, "Einsum")):
        if letter != ".":
            index.append(at(named[letter]))
            continue
        for loop, dim in zip(ellipsis[len(ellipsis) - len(dims) :], dims, strict=True):
            index.append(Affine(()) if dim == 1 and loop.extent != 1 else at(loop))
    return Read(position, tuple(index))


EINSUM = register(
    Operator("Einsum", _type, {"equation": REQUIRED}, meaning=_meaning, arity=(1, 1 << 20), since=12)
)
