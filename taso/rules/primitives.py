"""The primitives of oneDNN that backends launch, as operators: each one's documented formula in index notation.

They are written from oneDNN's developer guide (version 3.2), not from ONNX's definitions, so that a rule "this ONNX
operator => that primitive with these parameters" says something that can be false. Such rules stand in
`taso/rules/lowering/onednn.rules` and go through the same gates as all others; the search never takes them, and no
graph ever holds one of these operators. Names are those of oneDNN's C interface, in which

- `alpha`, `beta` and the like are reals: a number, or a pair (n, d) for n / d, since 1 / 6 is no decimal;
- `dilations` count the elements left out, so that 0 is a dense window;
- padding may be unequal: `padding_l` before, `padding_r` behind;
- what is only read otherwise (permuted axes, groups of weights, a part of a tensor) is a memory descriptor; these are
  operators here too (`dnnl_permute_axes`, …), and what lies alike read in another shape is ONNX's Reshape.

A post-op works on the result of what stands before it, one after the other ("Primitive Attributes: post-ops"), which is
composition: dnnl_eltwise_relu(dnnl_convolution(…)) is both the primitive behind the other and the post-op within.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction

from taso.graph.errors import GraphError, ShapeError
from taso.graph.index import Affine, Call, Const, Expr, Inside, Loop, Meaning, Pick, Read, Reduce, at, same
from taso.graph.operator import REQUIRED, Attrs, AttrValue, MeaningFunction, Operator, Required, Types, register
from taso.graph.ops.common import (
    broadcast,
    broadcast_index,
    broadcast_read,
    is_given,
    normal_axis,
    output_loops,
    present,
    require_equal,
    require_rank,
    require_same_dtype,
    single_axes,
)  # fmt: skip
from taso.graph.ops.elementwise import constant
from taso.graph.types import Dim, TensorType

_Attributes = Mapping[str, AttrValue | Required]
_Infer = Callable[[Types, Attrs], tuple[TensorType, ...]]
_ONE, _NULL = Const(Fraction(1)), Const(Fraction(0))


def _define(
    name: str, infer: _Infer, meaning: MeaningFunction, attributes: _Attributes | None = None,
    arity: tuple[int, int] = (1, 1),
) -> Operator:  # fmt: skip
    made = Operator(name, infer, attributes or {}, meaning=meaning, arity=arity, domain="dnnl", internal=True)
    return register(made)


# ── reals ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _real(value: AttrValue, name: str) -> Expr:
    """The exact number that a parameter stands for; of a pair it is the quotient."""
    if isinstance(value, tuple) and len(value) == 2:
        over, under = value
        return Call("div", (_real(over, name), _real(under, name)))
    return constant(Attrs({name: value}).float(name))


def _parameter(attrs: Attrs, name: str) -> Expr:
    return _real(attrs[name], name)


def _call(function: str, *args: Expr) -> Expr:
    return Call(function, args)


# ── eltwise: developer guide "Eltwise", forward formulas; s is the element, a and b are alpha and beta ───────────


def _relu(s: Expr, attrs: Attrs) -> Expr:
    """s for s > 0, else a·s."""
    below = _call("mul", _parameter(attrs, "alpha"), _call("min", s, _NULL))
    return _call("add", _call("max", s, _NULL), below)


def _elu(s: Expr, attrs: Attrs) -> Expr:
    """s for s > 0, else a·(eˢ − 1)."""
    power = _call("sub", _call("exp", _call("min", s, _NULL)), _ONE)
    return _call("add", _call("max", s, _NULL), _call("mul", _parameter(attrs, "alpha"), power))


def _linear(s: Expr, attrs: Attrs) -> Expr:
    """a·s + b."""
    return _call("add", _call("mul", _parameter(attrs, "alpha"), s), _parameter(attrs, "beta"))


def _hard_sigmoid(s: Expr, attrs: Attrs) -> Expr:
    """max(0, min(1, a·s + b))."""
    return _call("max", _NULL, _call("min", _ONE, _linear(s, attrs)))


def _hard_swish(s: Expr, attrs: Attrs) -> Expr:
    """s · max(0, min(1, a·s + b))."""
    return _call("mul", s, _hard_sigmoid(s, attrs))


def _log_one_plus_exp(s: Expr) -> Expr:
    return _call("log", _call("add", _ONE, _call("exp", s)))


def _soft_relu(s: Expr, attrs: Attrs) -> Expr:
    """ln(1 + e^(a·s)) / a."""
    alpha = _parameter(attrs, "alpha")
    return _call("div", _log_one_plus_exp(_call("mul", alpha, s)), alpha)


def _logistic(s: Expr, attrs: Attrs) -> Expr:
    """1 / (1 + e⁻ˢ)."""
    return _call("div", _ONE, _call("add", _ONE, _call("exp", _call("neg", s))))


def _swish(s: Expr, attrs: Attrs) -> Expr:
    """s / (1 + e^(−a·s))."""
    return _call("mul", s, _logistic(_call("mul", _parameter(attrs, "alpha"), s), attrs))


def _mish(s: Expr, attrs: Attrs) -> Expr:
    """s · tanh(ln(1 + eˢ))."""
    return _call("mul", s, _call("tanh", _log_one_plus_exp(s)))


def _clip(s: Expr, attrs: Attrs) -> Expr:
    """To [a, b]; None stands for what is not finite. The library takes no a > b, for which the guide has no value."""
    body = s
    if attrs["alpha"] is not None:
        body = _call("max", body, _parameter(attrs, "alpha"))
    if attrs["beta"] is not None:
        body = _call("min", body, _parameter(attrs, "beta"))
    return body


def _half_times(s: Expr, inner: Expr) -> Expr:
    return _call("mul", _call("mul", Const(Fraction(1, 2)), s), _call("add", _ONE, inner))


# the decimals that stand for √2 and √(2/π) wherever they are written down
_ROOT, _SLOPE = constant(1.4142135623730951), constant(0.7978845608028654)


def _gelu_erf(s: Expr, attrs: Attrs) -> Expr:
    """½·s·(1 + erf(s / √2))."""
    return _half_times(s, _call("erf", _call("div", s, _ROOT)))


def _gelu_tanh(s: Expr, attrs: Attrs) -> Expr:
    """½·s·(1 + tanh(√(2/π)·(s + 0.044715·s³)))."""
    cube = _call("mul", _call("mul", s, s), s)
    inner = _call("add", s, _call("mul", constant(0.044715), cube))
    return _half_times(s, _call("tanh", _call("mul", _SLOPE, inner)))


def _power(s: Expr, attrs: Attrs) -> Expr:
    """a · s^b."""
    return _call("mul", _parameter(attrs, "alpha"), _call("pow", s, _parameter(attrs, "beta")))


def _plain(function: str) -> Callable[[Expr, Attrs], Expr]:
    return lambda s, attrs: _call(function, s)


_Formula = Callable[[Expr, Attrs], Expr]

_NO: dict[str, AttrValue | Required] = {}
_ALPHA: dict[str, AttrValue | Required] = {"alpha": REQUIRED}
_BOTH: dict[str, AttrValue | Required] = {"alpha": REQUIRED, "beta": REQUIRED}

_ELTWISE: dict[str, tuple[_Formula, dict[str, AttrValue | Required]]] = {
    "relu": (_relu, {"alpha": 0}),
    "elu": (_elu, _ALPHA),
    "linear": (_linear, _BOTH),
    "hardsigmoid": (_hard_sigmoid, _BOTH),
    "hardswish": (_hard_swish, _BOTH),
    "soft_relu": (_soft_relu, _ALPHA),
    "logistic": (_logistic, _NO),
    "mish": (_mish, _NO),
    "swish": (_swish, _ALPHA),
    "clip_v2": (_clip, _BOTH),
    "gelu_erf": (_gelu_erf, _NO),
    "gelu_tanh": (_gelu_tanh, _NO),
    "pow": (_power, _BOTH),
    "square": (lambda s, attrs: _call("mul", s, s), _NO),
    # half to even (header dnnl_types.h)
    "round": (lambda s, attrs: _call("round", s), _NO),
    **{name: (_plain(name), _NO) for name in ("tanh", "abs", "sqrt", "exp", "log")},
}


def _eltwise(name: str, formula: _Formula, attributes: _Attributes) -> Operator:
    def infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        return (present(types, 0, name),)

    def meaning(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
        loops = output_loops(present(types, 0, name).dims)
        return (Meaning(single_axes(loops), formula(Read(0, tuple(map(at, loops))), attrs)),)

    return _define(name, infer, meaning, attributes)


ELTWISE = {name: _eltwise(f"dnnl_eltwise_{name}", *said) for name, said in _ELTWISE.items()}


# ── binary: src0 op src1, where src1 broadcasts to src0 (developer guide "Binary"); sum as a post-op ─────────────


def _binary_type(name: str) -> _Infer:
    def infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        first, second = present(types, 0, name), present(types, 1, name)
        require_same_dtype(types, name)
        if second.rank > first.rank:
            raise ShapeError(f"{name}: {second} has more dimensions than {first}")
        for a, b in zip(first.dims, broadcast([first.dims, second.dims], name), strict=True):
            require_equal(a, b, name, f"sizes of {first} and of what broadcasting {second} to it gives")
        return (first,)

    return infer


def _binary(name: str, body: Callable[[Expr, Expr, Attrs], Expr], attributes: _Attributes | None = None) -> Operator:
    infer = _binary_type(name)

    def meaning(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
        (out,) = infer(types, attrs)
        loops = output_loops(out.dims)
        first, second = (broadcast_read(i, present(types, i, name), loops) for i in (0, 1))
        return (Meaning(single_axes(loops), body(first, second, attrs)),)

    return _define(name, infer, meaning, attributes, (2, 2))


def _of_two(function: str) -> Callable[[Expr, Expr, Attrs], Expr]:
    return lambda a, b, attrs: _call(function, a, b)


BINARY = {name: _binary(f"dnnl_binary_{name}", _of_two(name)) for name in ("add", "sub", "mul", "div", "max", "min")}

SUM = _binary(
    "dnnl_sum", lambda new, old, attrs: _call("add", new, _call("mul", _parameter(attrs, "scale"), old)), {"scale": 1}
)
"""The post-op: inputs are the result so far and what dst held before; result + scale · before."""


# ── memory descriptors ───────────────────────────────────────────────────────────────────────────────────────────


def _permuted_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, order = present(types, 0, "dnnl_permute_axes"), attrs.ints("order")
    if sorted(order) != list(range(x.rank)):
        raise ShapeError(f"dnnl_permute_axes: {order} is no permutation of the axes of {x}")
    return (x.with_shape(tuple(x.dims[a] for a in order)),)


def _permuted_meaning(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
    (out,), order = _permuted_type(types, attrs), attrs.ints("order")
    loops = output_loops(out.dims)
    index = tuple(at(loops[order.index(a)]) for a in range(len(order)))
    return (Meaning(single_axes(loops), Read(0, index)),)


PERMUTE_AXES = _define("dnnl_permute_axes", _permuted_type, _permuted_meaning, {"order": REQUIRED})
"""Axis i of the result is axis order[i] (`dnnl_memory_desc_permute_axes` takes the inverse)."""


def _units_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x = present(types, 0, "dnnl_unit_axes")
    return (x.with_shape((1,) * attrs.int("count") + x.dims),)


def _units_meaning(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
    (out,) = _units_type(types, attrs)
    loops = output_loops(out.dims)
    return (Meaning(single_axes(loops), Read(0, tuple(map(at, loops[attrs.int("count") :])))),)


UNIT_AXES = _define("dnnl_unit_axes", _units_type, _units_meaning, {"count": REQUIRED})
"""`count` axes of size 1 in front (`dnnl_memory_desc_reshape`)."""


def _part_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x, dims, offsets = present(types, 0, "dnnl_submemory"), attrs.ints("dims"), attrs.ints("offsets")
    if not len(dims) == len(offsets) == x.rank:
        raise ShapeError(f"dnnl_submemory: {dims} at {offsets} is no part of {x}")
    for size, start, whole in zip(dims, offsets, x.dims, strict=True):
        if not (start >= 0 and size >= 0) or (isinstance(whole, int) and start + size > whole):
            raise ShapeError(f"dnnl_submemory: {dims} at {offsets} is no part of {x}")
    return (x.with_shape(dims),)


def _part_meaning(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
    (out,) = _part_type(types, attrs)
    loops = output_loops(out.dims)
    index = tuple(at(loop, 1, start) for loop, start in zip(loops, attrs.ints("offsets"), strict=True))
    return (Meaning(single_axes(loops), Read(0, index)),)


SUBMEMORY = _define("dnnl_submemory", _part_type, _part_meaning, {"dims": REQUIRED, "offsets": REQUIRED})


def _goihw_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    w, groups = present(types, 0, "dnnl_goihw"), attrs.int("groups")
    if groups < 1 or isinstance(w.dims[0], int) and w.dims[0] % groups:
        raise ShapeError(f"dnnl_goihw: {groups} groups do not divide {w}")
    return (w.with_shape((groups, w.dims[0] // groups, *w.dims[1:])),)


def _goihw_meaning(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
    (out,) = _goihw_type(types, attrs)
    loops = output_loops(out.dims)
    first = at(loops[0], out.dims[1]) + at(loops[1])
    return (Meaning(single_axes(loops), Read(0, (first, *map(at, loops[2:])))),)


GOIHW = _define("dnnl_goihw", _goihw_type, _goihw_meaning, {"groups": REQUIRED})
"""Weights with their groups as an axis of their own, on the same bytes."""


def _reordered(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
    loops = output_loops(present(types, 0, "dnnl_reorder").dims)
    return (Meaning(single_axes(loops), Read(0, tuple(map(at, loops)))),)


REORDER = _define("dnnl_reorder", lambda types, attrs: (present(types, 0, "dnnl_reorder"),), _reordered)
"""Developer guide "Reorder": the same logical tensor in another layout."""


def _concat_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    first = present(types, 0, "dnnl_concat")
    require_same_dtype(types, "dnnl_concat")
    axis = normal_axis(attrs.int("axis"), first.rank, "dnnl_concat")
    total = first.dims[axis]
    for position in range(1, len(types)):
        t = present(types, position, "dnnl_concat")
        require_rank(t, first.rank, "dnnl_concat", f"source {position}")
        for a, (own, wanted) in enumerate(zip(t.dims, first.dims, strict=True)):
            if a != axis:
                require_equal(own, wanted, "dnnl_concat", f"sizes of axis {a}")
        total = total + t.dims[axis]
    return (first.with_shape((*first.dims[:axis], total, *first.dims[axis + 1 :])),)


def _concat_meaning(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
    (out,) = _concat_type(types, attrs)
    axis, loops = normal_axis(attrs.int("axis"), out.rank, "dnnl_concat"), output_loops(out.dims)
    index = tuple(map(at, loops))
    pieces = tuple((present(types, i, "dnnl_concat").dims[axis], Read(i, index)) for i in range(len(types)))
    return (Meaning(single_axes(loops), Pick(loops[axis].name, pieces)),)


CONCAT = _define("dnnl_concat", _concat_type, _concat_meaning, {"axis": REQUIRED}, (1, 1 << 20))
"""Developer guide "Concat": the sources side by side along an axis."""


# ── convolution and deconvolution: developer guide "Convolution" ─────────────────────────────────────────────────

_WINDOW: dict[str, AttrValue | Required] = dict.fromkeys(
    ("strides", "dilations", "padding_l", "padding_r"), REQUIRED
)  # fmt: skip
_Axes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]


def _axes(name: str, attrs: Attrs, count: int) -> _Axes:
    """Strides, steps of the window (dilations + 1) and both paddings of `count` spatial axes."""
    strides, dilations, left, right = (attrs.ints(n) for n in ("strides", "dilations", "padding_l", "padding_r"))
    if any(len(v) != count for v in (strides, dilations, left, right)):
        raise GraphError(f"{name}: all settings must have {count} numbers")
    if any(s < 1 for s in strides) or any(d < 0 for d in dilations):
        raise ShapeError(f"{name}: strides must be at least 1 and dilations at least 0")
    return strides, tuple(d + 1 for d in dilations), left, right


def _window_sizes(name: str, sizes: Sequence[Dim], kernel: Sequence[Dim], axes: _Axes) -> tuple[Dim, ...]:
    """OH = ⌊(IH − DKH + PH_L + PH_R) / SH⌋ + 1 where DKH = 1 + (KH − 1)·(DH + 1)."""
    strides, steps, left, right = axes
    made = tuple(
        (size - ((k - 1) * steps[a] + 1) + (left[a] + right[a])) // strides[a] + 1
        for a, (size, k) in enumerate(zip(sizes, kernel, strict=True))
    )
    if any(isinstance(d, int) and d < 0 for d in made):
        raise ShapeError(f"{name}: the window does not fit into {tuple(sizes)}")
    return made


def _looked_at(spatial: Sequence[Loop], window: Sequence[Loop], axes: _Axes) -> tuple[Affine, ...]:
    """oh·SH + kh·(DH + 1) − PH_L, per axis."""
    strides, steps, left, _ = axes
    return tuple(at(spatial[a], strides[a]) + at(window[a], steps[a], 0 - left[a]) for a in range(len(spatial)))


def _grouped(types: Types, name: str) -> tuple[TensorType, TensorType, Dim, tuple[Dim, ...]]:
    """src, weights, number of groups and the weights without them; weights have one axis more if there are groups."""
    x, w = present(types, 0, name), present(types, 1, name)
    require_same_dtype(types, name)
    if x.rank < 3 or w.rank not in (x.rank, x.rank + 1):
        raise ShapeError(f"{name}: {w} are no weights for {x}")
    groups: Dim = w.dims[0] if w.rank > x.rank else 1
    own = w.dims[1:] if w.rank > x.rank else w.dims
    require_equal(x.dims[1], own[1] * groups, name, "channels of src and of the weights times groups")
    if is_given(types, 2):
        bias = present(types, 2, name)
        require_rank(bias, 1, name, "the bias")
        require_equal(bias.dims[0], own[0] * groups, name, "size of the bias and output channels")
    return x, w, groups, own


def _convolution_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    name = "dnnl_convolution"
    x, _, groups, own = _grouped(types, name)
    sizes = _window_sizes(name, x.dims[2:], own[2:], _axes(name, attrs, x.rank - 2))
    return (x.with_shape((x.dims[0], own[0] * groups, *sizes)),)


def _with_bias(types: Types, body: Expr, channel: Affine) -> Expr:
    return _call("add", Read(2, (channel,)), body) if is_given(types, 2) else body


def _convolution_meaning(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
    (out,), (x, w, groups, own) = _convolution_type(types, attrs), _grouped(types, "dnnl_convolution")
    n, g, oc, ic = Loop("n", out.dims[0]), Loop("g", groups), Loop("oc", own[0]), Loop("ic", own[1])
    spatial = tuple(Loop(f"o{a}", d) for a, d in enumerate(out.dims[2:]))
    window = tuple(Loop(f"k{a}", d) for a, d in enumerate(own[2:]))
    looked_at = _looked_at(spatial, window, _axes("dnnl_convolution", attrs, x.rank - 2))
    data = Read(0, (at(n), at(g, ic.extent) + at(ic), *looked_at), "zero")
    group = (at(g),) if w.rank > x.rank else ()
    weight = Read(1, (*group, at(oc), at(ic), *map(at, window)))
    body = Reduce("sum", (ic, *window), Call("mul", (data, weight)))
    whole = _with_bias(types, body, at(g, oc.extent) + at(oc))
    return (Meaning(((n,), (g, oc), *single_axes(spatial)), whole),)


CONVOLUTION = _define("dnnl_convolution", _convolution_type, _convolution_meaning, _WINDOW, (2, 3))


def _deconvolution_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    name = "dnnl_deconvolution"
    x, _, groups, own = _grouped(types, name)
    strides, steps, left, right = _axes(name, attrs, x.rank - 2)
    sizes = tuple(
        (size - 1) * strides[a] + ((k - 1) * steps[a] + 1) - (left[a] + right[a])
        for a, (size, k) in enumerate(zip(x.dims[2:], own[2:], strict=True))
    )
    if any(isinstance(d, int) and d < 0 for d in sizes):
        raise ShapeError(f"{name}: paddings {left}, {right} leave nothing")
    return (x.with_shape((x.dims[0], own[0] * groups, *sizes)),)


def _deconvolution_meaning(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
    """The convolution's map from dst to src turned round: src (ih, iw) meets dst where ih·SH + kh·(DH + 1) − PH_L."""
    (out,), (x, w, groups, own) = _deconvolution_type(types, attrs), _grouped(types, "dnnl_deconvolution")
    n, g, oc, ic = Loop("n", out.dims[0]), Loop("g", groups), Loop("oc", own[0]), Loop("ic", own[1])
    spatial = tuple(Loop(f"o{a}", d) for a, d in enumerate(out.dims[2:]))
    position = tuple(Loop(f"i{a}", d) for a, d in enumerate(x.dims[2:]))
    window = tuple(Loop(f"k{a}", d) for a, d in enumerate(own[2:]))
    meets = same(*zip(map(at, spatial), _looked_at(position, window, _axes("dnnl_deconvolution", attrs, x.rank - 2)),
                      strict=True))  # fmt: skip
    data = Read(0, (at(n), at(g, ic.extent) + at(ic), *map(at, position)))
    group = (at(g),) if w.rank > x.rank else ()
    weight = Call("mul", (Read(1, (*group, at(oc), at(ic), *map(at, window))), meets))
    body = Reduce("sum", (ic, *position, *window), Call("mul", (data, weight)))
    whole = _with_bias(types, body, at(g, oc.extent) + at(oc))
    return (Meaning(((n,), (g, oc), *single_axes(spatial)), whole),)


DECONVOLUTION = _define("dnnl_deconvolution", _deconvolution_type, _deconvolution_meaning, _WINDOW, (2, 3))


# ── matmul: developer guide "Matrix Multiplication" ──────────────────────────────────────────────────────────────


def _matmul_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    name = "dnnl_matmul"
    a, b = present(types, 0, name), present(types, 1, name)
    require_same_dtype(types, name)
    if a.rank < 2 or a.rank != b.rank:
        raise ShapeError(f"{name}: {a} and {b} must have equal rank ≥ 2")
    require_equal(a.dims[-1], b.dims[-2], name, f"inner dimensions of {a} and {b}")
    out = (*(broadcast([a.dims[:-2], b.dims[:-2]], name) if a.rank > 2 else ()), a.dims[-2], b.dims[-1])
    if is_given(types, 2):
        bias = present(types, 2, name)
        require_rank(bias, 1, name, "the bias")
        require_equal(bias.dims[0], b.dims[-1], name, "size of the bias and columns")
    return (a.with_shape(out),)


def _matmul_meaning(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
    """dst(m, n) = Σ_k src(m, k) · weights(k, n) + bias(n), for each of the batch, which broadcasts."""
    a, b, (out,) = present(types, 0, "dnnl_matmul"), present(types, 1, "dnnl_matmul"), _matmul_type(types, attrs)
    loops, inner = output_loops(out.dims), Loop("k", a.dims[-1])
    left, right = (
        tuple(broadcast_index(d, loop) for d, loop in zip(t.dims[:-2], loops[:-2], strict=True)) for t in (a, b)
    )
    factors = Read(0, (*left, at(loops[-2]), at(inner))), Read(1, (*right, at(inner), at(loops[-1])))
    body: Expr = Reduce("sum", (inner,), Call("mul", factors))
    if is_given(types, 2):
        body = _call("add", body, Read(2, (at(loops[-1]),)))
    return (Meaning(single_axes(loops), body),)


MATMUL = _define("dnnl_matmul", _matmul_type, _matmul_meaning, {}, (2, 3))


# ── pooling: developer guide "Pooling" ───────────────────────────────────────────────────────────────────────────


def _pooling(kind: str) -> Operator:
    name = f"dnnl_pooling_{kind}"

    def kernel_of(x: TensorType, attrs: Attrs) -> tuple[int, ...]:
        kernel = attrs.ints("kernel")
        if x.rank < 3 or len(kernel) != x.rank - 2:
            raise ShapeError(f"{name}: a window of {kernel} does not fit {x}")
        return kernel

    def infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        x = present(types, 0, name)
        kernel = kernel_of(x, attrs)
        sizes = _window_sizes(name, x.dims[2:], kernel, _axes(name, attrs, len(kernel)))
        return (x.with_shape((*x.dims[:2], *sizes)),)

    def meaning(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
        x, (out,) = present(types, 0, name), infer(types, attrs)
        loops, kernel = output_loops(out.dims), kernel_of(x, attrs)
        window = tuple(Loop(f"k{a}", d) for a, d in enumerate(kernel))
        index = (*map(at, loops[:2]), *_looked_at(loops[2:], window, _axes(name, attrs, len(kernel))))
        if kind == "max":
            return (Meaning(single_axes(loops), Reduce("max", window, Read(0, index, "least"))),)
        # the size of the window, or of what it has in common with the image
        counted: Expr = _ONE if kind == "avg_include_padding" else Inside(0, index)
        total = Reduce("sum", window, Read(0, index, "zero"))
        return (Meaning(single_axes(loops), Call("div", (total, Reduce("sum", window, counted)))),)

    return _define(name, infer, meaning, {"kernel": REQUIRED, **_WINDOW})


POOLING = {kind: _pooling(kind) for kind in ("max", "avg_include_padding", "avg_exclude_padding")}


# ── reduction: developer guide "Reduction", along the last axis ──────────────────────────────────────────────────


def _reduction(kind: str) -> Operator:
    name = f"dnnl_reduction_{kind}"

    def infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        x = present(types, 0, name)
        if x.rank < 1:
            raise ShapeError(f"{name}: a scalar has no axis to reduce")
        return (x.with_shape((*x.dims[:-1], 1)),)

    def meaning(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
        x, (out,) = present(types, 0, name), infer(types, attrs)
        loops, inner = output_loops(out.dims), Loop("r", x.dims[-1])
        read = Read(0, (*map(at, loops[:-1]), at(inner)))
        body: Expr = Reduce("sum" if kind == "mean" else kind, (inner,), read)
        if kind == "mean":
            body = Call("div", (body, Reduce("sum", (inner,), _ONE)))
        return (Meaning(single_axes(loops), body),)

    return _define(name, infer, meaning)


REDUCTION = {kind: _reduction(kind) for kind in ("sum", "mean", "max", "min")}


# ── softmax, layer normalization, LRN ────────────────────────────────────────────────────────────────────────────


def _softmax(name: str, log: bool) -> Operator:
    """Developer guide "Softmax": e^(src − ν) / Σ e^(src − ν), ν the largest along the axis; or its logarithm."""

    def infer(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        x = present(types, 0, name)
        normal_axis(attrs.int("axis"), x.rank, name)
        return (x,)

    def meaning(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
        x = present(types, 0, name)
        axis, loops = normal_axis(attrs.int("axis"), x.rank, name), output_loops(x.dims)

        def along(loop: Loop) -> Read:
            return Read(0, tuple(at(loop if a == axis else own) for a, own in enumerate(loops)))

        def lowered(loop: Loop) -> Expr:
            largest = Loop(f"v{loop.name}", x.dims[axis])
            return _call("sub", along(loop), Reduce("max", (largest,), along(largest)))

        inner = Loop("ic", x.dims[axis])
        total = Reduce("sum", (inner,), _call("exp", lowered(inner)))
        own = lowered(loops[axis])
        body = _call("sub", own, _call("log", total)) if log else _call("div", _call("exp", own), total)
        return (Meaning(single_axes(loops), body),)

    return _define(name, infer, meaning, {"axis": REQUIRED})


SOFTMAX, LOG_SOFTMAX = _softmax("dnnl_softmax", False), _softmax("dnnl_logsoftmax", True)


def _layer_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    name = "dnnl_layer_normalization"
    x = present(types, 0, name)
    require_same_dtype(types, name)
    if x.rank < 1:
        raise ShapeError(f"{name}: a scalar has no axis to normalize")
    for position, what in ((1, "scale"), (2, "shift")):
        if is_given(types, position):
            require_rank(present(types, position, name), 1, name, f"the {what}")
            require_equal(present(types, position, name).dims[0], x.dims[-1], name, f"size of the {what} and last axis")
    return (x,)


def _layer_meaning(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
    """Developer guide "Layer Normalization": γ(c) · (src − μ) / √(σ² + ε) + β(c) along the last axis."""
    (x,) = _layer_type(types, attrs)
    loops = output_loops(x.dims)

    def along(loop: Loop) -> Read:
        return Read(0, (*map(at, loops[:-1]), at(loop)))

    def mean(loop: Loop, body: Expr) -> Expr:
        return _call("div", Reduce("sum", (loop,), body), Reduce("sum", (loop,), _ONE))

    c, inner = Loop("c", x.dims[-1]), Loop("m", x.dims[-1])
    centred = _call("sub", along(c), mean(inner, along(inner)))
    variance = mean(c, _call("mul", centred, centred))
    deviation = _call("sqrt", _call("add", variance, _parameter(attrs, "epsilon")))
    own = _call("sub", along(loops[-1]), mean(inner, along(inner)))
    body = _call("mul", Read(1, (at(loops[-1]),)), _call("div", own, deviation))
    if is_given(types, 2):
        body = _call("add", body, Read(2, (at(loops[-1]),)))
    return (Meaning(single_axes(loops), body),)


LAYER_NORMALIZATION = _define(
    "dnnl_layer_normalization", _layer_type, _layer_meaning, {"epsilon": REQUIRED}, (2, 3)
)  # fmt: skip


def _lrn_meaning(types: Types, attrs: Attrs) -> tuple[Meaning, ...]:
    """Developer guide "LRN": {k + alpha / n · Σ src(c + i)²}^−beta · src for i = −(n − 1)/2 … (n + 1)/2 − 1."""
    x, size = present(types, 0, "dnnl_lrn_across_channels"), attrs.int("local_size")
    loops, before = output_loops(x.dims), (size - 1) // 2
    # whole numbers divided, so that an even window is one element smaller than it says
    near = Loop("i", (size + 1) // 2 - 1 + before + 1)
    channel = at(loops[1]) + at(near, 1, 0 - before)
    read = Read(0, (at(loops[0]), channel, *map(at, loops[2:])), "zero")
    total = Reduce("sum", (near,), Call("mul", (read, read)))
    share = _call("mul", _call("div", _parameter(attrs, "alpha"), Const(Fraction(size))), total)
    base = _call("add", _parameter(attrs, "k"), share)
    power = _call("pow", base, _parameter(attrs, "beta"))
    return (Meaning(single_axes(loops), _call("div", Read(0, tuple(map(at, loops))), power)),)


def _lrn_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x = present(types, 0, "dnnl_lrn_across_channels")
    if x.rank < 2 or attrs.int("local_size") < 1:
        raise ShapeError(f"dnnl_lrn_across_channels: no window of {attrs.int('local_size')} channels in {x}")
    return (x,)


LRN = _define(
    "dnnl_lrn_across_channels", _lrn_type, _lrn_meaning, dict.fromkeys(("local_size", "alpha", "beta", "k"), REQUIRED)
)

__all__ = [
    "BINARY", "CONCAT", "CONVOLUTION", "DECONVOLUTION", "ELTWISE", "GOIHW", "LAYER_NORMALIZATION", "LOG_SOFTMAX", "LRN",
    "MATMUL", "PERMUTE_AXES", "POOLING", "REDUCTION", "REORDER", "SOFTMAX", "SUBMEMORY", "SUM", "UNIT_AXES",
]  # fmt: skip
