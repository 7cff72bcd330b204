"""Winograd's minimal filtering: transforms over the rationals, found from interpolation points and proved.

F(m, r) gives m outputs of a filter of r taps by n = m + r − 1 products (Winograd 1980; Lavin and Gray 2016, section 4):

    y = Aᵀ [(G g) ⊙ (Bᵀ d)],        in two dimensions  Y = Aᵀ [(G g Gᵀ) ⊙ (Bᵀ d B)] A

The matrices are those of `taso.graph.winograd`, with which the oneDNN backend's kernels compute.

Two proofs go with them. `tile_defect` compares all coefficients of one tile's outputs, which are polynomials in its
entries. The rules of `taso/rules/lowering/winograd.rules` say what that makes of ONNX's Conv on whole tensors: any
number of images and channels, groups, padding, sizes that are no multiple of m. Each of them transforms one axis and
leaves a Conv behind, with the transformed positions as groups, to which the rule for the other axis applies again;
both together are the formula above. They go through the same gates as all rules. In floating point the result
`approximates`: the transforms lose digits, the more the larger m is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fractions import Fraction
from itertools import product
from math import prod

from taso.graph.errors import ShapeError, TasoError
from taso.graph.index import Call, Const, Expr, Loop, Meaning, Pick, Read, at
from taso.graph.operator import REQUIRED, Attrs, AttrValue, MeaningFunction, Operator, Required, Types, register
from taso.graph.ops.common import output_loops, present, require_equal, single_axes
from taso.graph.types import Dim, TensorType
from taso.graph.winograd import Matrix, Transforms, from_points, transforms

# ── one tile ─────────────────────────────────────────────────────────────────────────────────────────────────────


def tile_defect(f: Transforms, dimensions: int = 2) -> str:
    """The first coefficient in a tile's outputs that is not the convolution's; "" where there is none.

    Both are polynomials in the entries of data and filter, and polynomials are equal where all coefficients are: that
    of d[j]·g[k] in output i is Σ_u Aᵀ[i, u]·G[u, k]·Bᵀ[u, j], and must be 1 where j = i + k, else 0; in two dimensions
    it is the product of those of the axes. This is for one channel: sums over channels follow, as all is linear in the
    products. Raises `TasoError` where the matrices do not fit together.
    """
    _require_sizes(f)
    single = {(i, k, j): _coefficient(f, i, k, j)
              for i in range(f.outputs) for k in range(f.taps) for j in range(f.products)}  # fmt: skip
    for places in product(single, repeat=dimensions):
        found = prod((single[place] for place in places), start=Fraction(1))
        wanted = all(j == i + k for i, k, j in places)
        if found != wanted:
            i, k, j = (", ".join(map(str, axis)) for axis in zip(*places, strict=True))
            return f"the coefficient of d[{j}]·g[{k}] in output [{i}] is {found}, not {int(wanted)}"
    return ""


def _coefficient(f: Transforms, i: int, k: int, j: int) -> Fraction:
    return sum((f.output[i][u] * f.filter[u][k] * f.data[u][j] for u in range(f.products)), Fraction(0))


def _require_sizes(f: Transforms) -> None:
    n = f.products
    fits = len(f.filter) == n == f.outputs + f.taps - 1
    if not fits or any(len(row) != n for row in (*f.data, *f.output)) or any(len(r) != f.taps for r in f.filter):
        raise TasoError(f"matrices of {f.outputs} outputs, {f.taps} taps and {n} products do not fit together")


# ── whole tensors: what the rules speak of ───────────────────────────────────────────────────────────────────────
# One axis is transformed; its n positions u stand before the channels, as groups of a convolution


_InferType = Callable[[Types, Attrs], tuple[TensorType, ...]]
_ElementOf = Callable[[int], Expr]


def _define(
    name: str, infer: _InferType, meaning: MeaningFunction, attributes: dict[str, AttrValue | Required]
) -> Operator:
    return register(
        Operator(name, infer, {**attributes, "axis": REQUIRED, "tile": REQUIRED, "taps": REQUIRED}, meaning=meaning,
                 domain="winograd", internal=True)
    )  # fmt: skip


def _settings(name: str, types: Types, attrs: Attrs) -> tuple[TensorType, int, Transforms]:
    x, axis = present(types, 0, name), attrs.int("axis")
    if not 2 <= axis < x.rank:
        raise ShapeError(f"{name}: {x} has no spatial axis {axis}")
    return x, axis, transforms(attrs.int("tile"), attrs.int("taps"))


def _combination(row: Sequence[Fraction], element: _ElementOf) -> Expr:
    """Σ row[j] · element(j), without terms that are 0."""
    parts = [Call("mul", (Const(c), element(j))) for j, c in enumerate(row) if c]
    total: Expr = parts[0] if parts else Const(Fraction(0))
    for part in parts[1:]:
        total = Call("add", (total, part))
    return total


def _rows(loop: Loop, matrix: Matrix, element: _ElementOf) -> Pick:
    """Row `loop` of a matrix times elements."""
    return Pick(loop.name, tuple((1, _combination(row, element)) for row in matrix))


def _input_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, axis, f = _settings("winograd_input", types, attrs)
    before, after = attrs.ints("pads")
    tiles = (x.dims[axis] + (before + after + f.outputs - f.taps)) // f.outputs
    return (x.with_shape((x.dims[0], x.dims[1] * f.products, *_with(x.dims, axis, tiles)[2:])),)


def _with(dims: tuple[Dim, ...], axis: int, size: Dim) -> tuple[Dim, ...]:
    return (*dims[:axis], size, *dims[axis + 1 :])


def _input_meaning(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
    """Bᵀ d of every tile: tile t looks at positions t·m − pad and following, zeros in the padding."""
    (out,), (x, axis, f) = _input_type(types, attrs), _settings("winograd_input", types, attrs)
    loops, u, before = output_loops(_with(out.dims, 1, x.dims[1])), Loop("u", f.products), attrs.ints("pads")[0]

    def element(j: int) -> Expr:
        return Read(0, tuple(at(p, f.outputs, j - before) if a == axis else at(p) for a, p in enumerate(loops)), "zero")

    axes = ((loops[0],), (u, loops[1]), *single_axes(loops[2:]))
    return (Meaning(axes, _rows(u, f.data, element)),)


WINOGRAD_INPUT = _define("winograd_input", _input_type, _input_meaning, {"pads": REQUIRED})
"""(N, C, …, L, …) to (N, n·C, …, tiles, …); as many tiles of m as the padded convolution of r taps has outputs."""


def _filter_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    w, axis, f = _settings("winograd_filter", types, attrs)
    require_equal(w.dims[axis], f.taps, "winograd_filter", "taps of the weight and of the transforms")
    return (w.with_shape((w.dims[0] * f.products, *_with(w.dims, axis, 1)[1:])),)


def _filter_meaning(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
    """G g."""
    (out,), (w, axis, f) = _filter_type(types, attrs), _settings("winograd_filter", types, attrs)
    loops, u = output_loops(_with(out.dims, 0, w.dims[0])), Loop("u", f.products)

    def element(k: int) -> Expr:
        return Read(0, tuple(at(p, 1, k) if a == axis else at(p) for a, p in enumerate(loops)))

    axes = ((u, loops[0]), *single_axes(loops[1:]))
    return (Meaning(axes, _rows(u, f.filter, element)),)


WINOGRAD_FILTER = _define("winograd_filter", _filter_type, _filter_meaning, {})
"""(O, C, …, r, …) to (n·O, C, …, 1, …)."""


def _output_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    y, axis, f = _settings("winograd_output", types, attrs)
    channels = y.dims[1] // f.products
    require_equal(y.dims[1], channels * f.products, "winograd_output", "channels and whole groups of products")
    return (y.with_shape((y.dims[0], channels, *_with(y.dims, axis, y.dims[axis] * f.outputs)[2:])),)


def _output_meaning(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
    """Aᵀ of the products of every tile."""
    (out,), (y, axis, f) = _output_type(types, attrs), _settings("winograd_output", types, attrs)
    loops, i, channels = output_loops(_with(out.dims, axis, y.dims[axis])), Loop("i", f.outputs), out.dims[1]

    def element(u: int) -> Expr:
        return Read(0, tuple(at(p, 1, channels * u) if a == 1 else at(p) for a, p in enumerate(loops)))

    axes = tuple((p, i) if a == axis else (p,) for a, p in enumerate(loops))
    return (Meaning(axes, _rows(i, f.output, element)),)


WINOGRAD_OUTPUT = _define("winograd_output", _output_type, _output_meaning, {})
"""(N, n·O, …, tiles, …) to (N, O, …, m·tiles, …)."""

__all__ = [
    "WINOGRAD_FILTER", "WINOGRAD_INPUT", "WINOGRAD_OUTPUT", "Matrix", "Transforms", "from_points", "tile_defect",
    "transforms",
]  # fmt: skip
