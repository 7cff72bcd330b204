"""What a cuDNN graph means, by NumPy: the side of the tests that reads descriptions as the device would.

Every operation is computed in float64 and rounded to the type of the tensor that it makes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from taso.backends.base import Array
from taso.backends.cudnn.description import Description, Operation, Tensor
from taso.backends.places import OPERAND, ArraySpec, Place
from taso.graph.errors import BackendError

Real = NDArray[np.float64]


def viewed(tensor: Tensor, memory: Array) -> Array:
    """A tensor in `memory` (an array of one axis that begins where the tensor does), not copied.

    Raises `BackendError` where the memory is too short or of another type.
    """
    if memory.ndim != 1 or memory.size < tensor.span or memory.dtype != tensor.dtype.numpy:
        raise BackendError(f"memory of {memory.size} {memory.dtype} does not hold the tensor {tensor.text}")
    steps = tuple(s * memory.itemsize for s in tensor.strides)
    return np.lib.stride_tricks.as_strided(memory, tensor.dims, steps)


class Interpreted:
    """A graph made ready to run in ordinary memory, as a device's plan is made ready there."""

    workspace = 0

    def __init__(self, description: Description) -> None:
        self.description = description

    def bind(self, addresses: Mapping[int, int], workspace: int) -> Callable[[], None]:
        """What runs the graph on tensors at these addresses, by uid; raises `BackendError` where one is missing."""
        missing = [t.text for t in self.description.stored if t.uid not in addresses]
        if missing:
            raise BackendError(f"no address for tensors of a cuDNN graph: {', '.join(missing)}")
        memories = {t.uid: _memory(t, addresses[t.uid]) for t in self.description.stored}
        return lambda: interpret(self.description, memories)


def _memory(tensor: Tensor, address: int) -> Array:
    dtype = tensor.dtype.numpy
    return ArraySpec(Place(OPERAND), dtype, (tensor.span,), (dtype.itemsize,)).at(address)


def interpret(description: Description, memories: Mapping[int, Array]) -> None:
    """Runs a graph on the memories of its stored tensors (by uid), as `viewed` sees them; results are written there.

    Raises `BackendError` where a memory is missing or does not fit, or where an operation's tensors do not fit it.
    """
    missing = [t.text for t in description.stored if t.uid not in memories]
    if missing:
        raise BackendError(f"no memory for tensors of a cuDNN graph: {', '.join(missing)}")
    found: dict[int, Real] = {}
    for tensor in description.tensors:
        if tensor.scalar is not None:
            found[tensor.uid] = np.full(tensor.dims, np.float32(tensor.scalar), np.float64)
        elif not tensor.virtual and tensor.uid not in description.produced:
            found[tensor.uid] = viewed(tensor, memories[tensor.uid]).astype(np.float64)
    for op in description.operations:
        tensor = description.by_uid[op.output]
        value = _computed(op, description, found)
        if value.shape != tensor.dims:
            raise BackendError(f"{op.text} gives {value.shape}, its tensor is {tensor.text}")
        with np.errstate(over="ignore"):
            rounded = value.astype(tensor.dtype.numpy)
        found[tensor.uid] = rounded.astype(np.float64)
        if not tensor.virtual:
            viewed(tensor, memories[tensor.uid])[...] = rounded


def _computed(op: Operation, description: Description, found: Mapping[int, Real]) -> Real:
    inputs = {role: found[uid] for role, uid in op.inputs}
    function = _OPERATIONS.get(op.kind)
    if function is None:
        raise BackendError(f"no meaning of the cuDNN operation {op.kind} is known")
    with np.errstate(all="ignore"):
        return np.asarray(function(op, inputs, description.by_uid[op.output].dims), np.float64)


# ── convolutions ─────────────────────────────────────────────────────────────────────────────────────────────────


def _window_slices(
    place: Sequence[int], sizes: Sequence[int], stride: Sequence[int], dilation: Sequence[int]
) -> tuple[slice, ...]:
    """Positions in padded data that element `place` of a window meets, for each output position."""
    each = zip(place, sizes, stride, dilation, strict=True)
    return tuple(slice(k * d, k * d + (n - 1) * s + 1, s) for k, n, s, d in each)


def _check_sizes(op: Operation, data: Sequence[int], out: Sequence[int], kernel: Sequence[int]) -> None:
    """Raises `BackendError` unless a window over `data` gives exactly `out` positions."""
    dilation = op.ints("dilation") if "dilation" in op.settings else (1,) * len(kernel)
    each = zip(data, op.ints("pre_padding"), op.ints("post_padding"), kernel, op.ints("stride"), dilation, strict=True)
    sizes = tuple((n + b + e - (k - 1) * d - 1) // s + 1 for n, b, e, k, s, d in each)
    if sizes != tuple(out):
        raise BackendError(f"{op.text} of {tuple(data)} gives {sizes} and not {tuple(out)}")


def _padded(x: Real, op: Operation, value: float) -> Real:
    pads = zip(op.ints("pre_padding"), op.ints("post_padding"), strict=True)
    return np.pad(x, [(0, 0), (0, 0), *pads], constant_values=value)


def _conv_fprop(op: Operation, inputs: Mapping[str, Real], dims: Sequence[int]) -> Real:
    x, w = inputs["image"], inputs["weight"]
    _check_sizes(op, x.shape[2:], dims[2:], w.shape[2:])
    groups = x.shape[1] // w.shape[1]
    padded = _padded(x, op, 0.0)
    grouped = padded.reshape(x.shape[0], groups, w.shape[1], *padded.shape[2:])
    windows = w.reshape(groups, w.shape[0] // groups, *w.shape[1:])
    total = np.zeros((x.shape[0], groups, w.shape[0] // groups, *dims[2:]))
    for place in np.ndindex(*w.shape[2:]):
        spots = _window_slices(place, dims[2:], op.ints("stride"), op.ints("dilation"))
        near = grouped[(slice(None),) * 3 + spots]
        total += np.einsum("ngc...,goc->ngo...", near, windows[(slice(None),) * 3 + place])
    return total.reshape(tuple(dims))


def _conv_dgrad(op: Operation, inputs: Mapping[str, Real], dims: Sequence[int]) -> Real:
    loss, w = inputs["loss"], inputs["filter"]
    _check_sizes(op, dims[2:], loss.shape[2:], w.shape[2:])
    groups = dims[1] // w.shape[1]
    begin, end = op.ints("pre_padding"), op.ints("post_padding")
    whole = [d + b + e for d, b, e in zip(dims[2:], begin, end, strict=True)]
    total = np.zeros((dims[0], groups, w.shape[1], *whole))
    grouped = loss.reshape(loss.shape[0], groups, loss.shape[1] // groups, *loss.shape[2:])
    windows = w.reshape(groups, w.shape[0] // groups, *w.shape[1:])
    for place in np.ndindex(*w.shape[2:]):
        spots = _window_slices(place, loss.shape[2:], op.ints("stride"), op.ints("dilation"))
        share = np.einsum("ngo...,goc->ngc...", grouped, windows[(slice(None),) * 3 + place])
        total[(slice(None),) * 3 + spots] += share
    kept = tuple(slice(b, b + d) for b, d in zip(begin, dims[2:], strict=True))
    result: Real = total[(slice(None),) * 3 + kept].reshape(tuple(dims))
    return result


# ── products, attention ──────────────────────────────────────────────────────────────────────────────────────────


def _matmul(op: Operation, inputs: Mapping[str, Real], dims: Sequence[int]) -> Real:
    result: Real = np.matmul(inputs["A"], inputs["B"])
    return result


def _sdpa(op: Operation, inputs: Mapping[str, Real], dims: Sequence[int]) -> Real:
    q, k, v = inputs["q"], inputs["k"], inputs["v"]
    shared = q.shape[1] // k.shape[1]
    k, v = np.repeat(k, shared, axis=1), np.repeat(v, shared, axis=1)
    scores = op.number("attn_scale", 1.0) * np.matmul(q, np.swapaxes(k, 2, 3))
    if "bias" in inputs:
        scores = scores + inputs["bias"]
    if op.settings.get("causal"):
        later = np.arange(scores.shape[3])[None, :] > np.arange(scores.shape[2])[:, None]
        scores = np.where(later, -np.inf, scores)
    powers = np.exp(scores - scores.max(axis=3, keepdims=True))
    result: Real = np.matmul(powers / powers.sum(axis=3, keepdims=True), v)
    return result


# ── pools, reductions, normalisations ────────────────────────────────────────────────────────────────────────────


def _resample(op: Operation, inputs: Mapping[str, Real], dims: Sequence[int]) -> Real:
    x, window, mode = inputs["X"], op.ints("window"), op.word("mode")
    _check_sizes(op, x.shape[2:], dims[2:], window)
    most = mode == "MAXPOOL"
    wanted = "NEG_INF_PAD" if most else "ZERO_PAD"
    if op.word("padding_mode") != wanted:
        raise BackendError(f"a resample of mode {mode} takes {wanted}, not {op.word('padding_mode')}")
    padded = _padded(x, op, -np.inf if most else 0.0)
    inside = _padded(np.ones_like(x), op, 0.0)
    total, count = np.full(tuple(dims), -np.inf if most else 0.0), np.zeros(tuple(dims))
    for place in np.ndindex(*window):
        spots = _window_slices(place, dims[2:], op.ints("stride"), (1,) * len(window))
        near = padded[(slice(None),) * 2 + spots]
        total = np.maximum(total, near) if most else total + near
        count += inside[(slice(None),) * 2 + spots]
    if most:
        return total
    return total / (count if mode == "AVGPOOL_EXCLUDE_PADDING" else math.prod(window))


def _reduction(op: Operation, inputs: Mapping[str, Real], dims: Sequence[int]) -> Real:
    x = inputs["input"]
    axes = tuple(a for a, (n, m) in enumerate(zip(x.shape, dims, strict=True)) if n != m)
    functions: dict[str, Callable[[], Real]] = {
        "ADD": lambda: x.sum(axis=axes, keepdims=True),
        "AVG": lambda: x.mean(axis=axes, keepdims=True),
        "MUL": lambda: x.prod(axis=axes, keepdims=True),
        "MAX": lambda: x.max(axis=axes, keepdims=True),
        "MIN": lambda: x.min(axis=axes, keepdims=True),
        "AMAX": lambda: np.abs(x).max(axis=axes, keepdims=True),
        "NORM1": lambda: np.abs(x).sum(axis=axes, keepdims=True),
        "NORM2": lambda: np.sqrt((x * x).sum(axis=axes, keepdims=True)),
    }
    return functions[op.word("mode")]()


def _normalised(op: Operation, inputs: Mapping[str, Real], axes: tuple[int, ...], centred: bool) -> Real:
    x = inputs["input"]
    apart = x - x.mean(axis=axes, keepdims=True) if centred else x
    y: Real = apart / np.sqrt((apart * apart).mean(axis=axes, keepdims=True) + inputs["epsilon"])
    y = y * inputs["scale"] if "scale" in inputs else y
    return y + inputs["bias"] if "bias" in inputs else y


def _by_scale(centred: bool) -> Callable[[Operation, Mapping[str, Real], Sequence[int]], Real]:
    """Normalised over the axes that the scale has, all but the first where there is none."""

    def function(op: Operation, inputs: Mapping[str, Real], dims: Sequence[int]) -> Real:
        x = inputs["input"]
        like = inputs["scale"].shape if "scale" in inputs else (1, *x.shape[1:])
        axes = tuple(a for a, n in enumerate(like) if a and n == x.shape[a])
        return _normalised(op, inputs, axes, centred)

    return function


def _instancenorm(op: Operation, inputs: Mapping[str, Real], dims: Sequence[int]) -> Real:
    return _normalised(op, inputs, tuple(range(2, len(dims))), True)


# ── element-wise ─────────────────────────────────────────────────────────────────────────────────────────────────


def _relu(op: Operation, x: Real) -> Real:
    low, high = op.number("lower_clip", 0.0), op.number("upper_clip", math.inf)
    slope = op.number("negative_slope", 0.0)
    below = low + slope * (x - low) if slope else np.full_like(x, low)
    return np.where(x < low, below, np.where(x > high, high, x))


def _swish(op: Operation, x: Real) -> Real:
    result: Real = x / (1 + np.exp(-op.number("swish_beta", 1.0) * x))
    return result


_erf = np.vectorize(math.erf, otypes=[np.float64])

_UNARY: dict[str, Callable[[Operation, Real], Real]] = {
    "identity": lambda op, x: x,
    "relu": _relu,
    "leaky_relu": _relu,
    "sigmoid": lambda op, x: 1 / (1 + np.exp(-x)),
    "tanh": lambda op, x: np.tanh(x),
    "exp": lambda op, x: np.exp(x),
    "log": lambda op, x: np.log(x),
    "sqrt": lambda op, x: np.sqrt(x),
    "rsqrt": lambda op, x: 1 / np.sqrt(x),
    "abs": lambda op, x: np.abs(x),
    "neg": lambda op, x: -x,
    "reciprocal": lambda op, x: 1 / x,
    "erf": lambda op, x: _erf(x),
    "floor": lambda op, x: np.floor(x),
    "ceil": lambda op, x: np.ceil(x),
    "sin": lambda op, x: np.sin(x),
    "cos": lambda op, x: np.cos(x),
    "tan": lambda op, x: np.tan(x),
    "softplus": lambda op, x: np.logaddexp(0.0, x),
    "elu": lambda op, x: np.where(x < 0, np.expm1(x), x),
    "swish": _swish,
    "gelu": lambda op, x: x * 0.5 * (1 + _erf(x / math.sqrt(2))),
    "gelu_approx_tanh": lambda op, x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
}
_BINARY: dict[str, Callable[[Real, Real], Real]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "max": np.maximum, "min": np.minimum,
    "pow": np.power,
}  # fmt: skip


def _pointwise(op: Operation, inputs: Mapping[str, Real], dims: Sequence[int]) -> Real:
    mode, args = op.word("mode"), [inputs[f"IN_{i}"] for i in itertools.takewhile(
        lambda i: f"IN_{i}" in inputs, itertools.count())]  # fmt: skip
    if mode in _UNARY and len(args) == 1:
        return _UNARY[mode](op, args[0])
    if mode in _BINARY and len(args) == 2:
        return _BINARY[mode](args[0], args[1])
    raise BackendError(f"no meaning of the pointwise operation {mode} of {len(args)} inputs is known")


_OPERATIONS: dict[str, Callable[[Operation, Mapping[str, Real], Sequence[int]], Real]] = {
    "conv_fprop": _conv_fprop,
    "conv_dgrad": _conv_dgrad,
    "matmul": _matmul,
    "sdpa": _sdpa,
    "resample": _resample,
    "reduction": _reduction,
    "layernorm": _by_scale(True),
    "rmsnorm": _by_scale(False),
    "instancenorm": _instancenorm,
    "pointwise": _pointwise,
}
