"""LSTM, GRU and RNN (ONNX 7 to 22), with what onnx.reference leaves out: activations, clip, lengths of sequences.

Inputs are X, W, R, B, sequence_lens, initial_h, and for an LSTM initial_c and P. All computing is done with time first
and in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from taso.graph.errors import GraphError, ShapeError
from taso.graph.numbers import SCALAR_FUNCTIONS
from taso.graph.operator import Array, Attrs, AttrValue, Operator, Required, Types, register
from taso.graph.ops.common import (
    is_given,
    present,
    require_equal,
    require_rank,
    require_same_dtype,
    writes_changed,
)  # fmt: skip
from taso.graph.types import Dim, TensorType

Floats = NDArray[np.float64]

# ── types ────────────────────────────────────────────────────────────────────────────────────────────────────────

_DIRECTIONS = {"forward": 1, "reverse": 1, "bidirectional": 2}


def _sizes(op: str, gates: int, types: Types, attrs: Attrs) -> tuple[Dim, Dim, int, Dim]:
    """Steps, batch, directions and hidden size, once all inputs are known to fit."""
    x, w, r = (present(types, i, op) for i in range(3))
    for t, what in ((x, "the input"), (w, "the weight W"), (r, "the weight R")):
        require_rank(t, 3, op, what)
    require_same_dtype((x, w, r, *(types[i] for i in (3, 5, 6, 7) if i < len(types))), op)
    if attrs.str("direction") not in _DIRECTIONS:
        raise ShapeError(f"{op}: the direction must be one of {', '.join(_DIRECTIONS)}, not {attrs.str('direction')}")
    ways, hidden = _DIRECTIONS[attrs.str("direction")], r.dims[2]
    steps, batch = (x.dims[1], x.dims[0]) if attrs.int("layout") else x.dims[:2]
    wanted: list[tuple[int, tuple[Dim, ...]]] = [
        (1, (ways, hidden * gates, x.dims[2])), (2, (ways, hidden * gates, hidden)), (3, (ways, hidden * (2 * gates))),
        (4, (batch,)), (5, _state(ways, batch, hidden, attrs)), (6, _state(ways, batch, hidden, attrs)),
        (7, (ways, hidden * 3)),
    ]  # fmt: skip
    for position, dims in wanted:
        if is_given(types, position):
            t = present(types, position, op)
            require_rank(t, len(dims), op, f"input {position}")
            for a, b in zip(t.dims, dims, strict=True):
                require_equal(a, b, op, f"sizes of input {position}, {t}, and of what it should be")
    if attrs["hidden_size"] is not None:
        require_equal(hidden, attrs.int("hidden_size"), op, "hidden_size and last size of R")
    return steps, batch, ways, hidden


def _state(ways: int, batch: Dim, hidden: Dim, attrs: Attrs) -> tuple[Dim, ...]:
    return (batch, ways, hidden) if attrs.int("layout") else (ways, batch, hidden)


def _types(op: str, gates: int, states: int, types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    x = present(types, 0, op)
    steps, batch, ways, hidden = _sizes(op, gates, types, attrs)
    whole = (batch, steps, ways, hidden) if attrs.int("layout") else (steps, ways, batch, hidden)
    return (x.with_shape(whole), *(x.with_shape(_state(ways, batch, hidden, attrs)) for _ in range(states)))


# ── activations ──────────────────────────────────────────────────────────────────────────────────────────────────
# name → function of ONNX's scalar functions, defaults of alpha and beta where it takes them (None: must be given)

Activation = Callable[[Floats], Floats]


@dataclass(frozen=True)
class _Kind:
    function: Callable[..., Floats]
    defaults: tuple[float | None, ...] = ()


def _scalar(name: str) -> Callable[..., Floats]:
    floats = SCALAR_FUNCTIONS[name].floats
    return lambda *args: np.asarray(floats(*args), np.float64)


_KINDS: dict[str, _Kind] = {
    "relu": _Kind(_scalar("relu")),
    "tanh": _Kind(_scalar("tanh")),
    "sigmoid": _Kind(_scalar("sigmoid")),
    "softsign": _Kind(_scalar("softsign")),
    "softplus": _Kind(_scalar("softplus")),
    "leakyrelu": _Kind(_scalar("leaky_relu"), (0.01,)),
    "thresholdedrelu": _Kind(_scalar("thresholded_relu"), (1.0,)),
    "elu": _Kind(_scalar("elu"), (1.0,)),
    "hardsigmoid": _Kind(_scalar("hard_sigmoid"), (0.2, 0.5)),
    "affine": _Kind(lambda x, alpha, beta: alpha * x + beta, (None, None)),
    "scaledtanh": _Kind(lambda x, alpha, beta: alpha * np.tanh(beta * x), (None, None)),
}


def activations(attrs: Attrs, defaults: Sequence[str], ways: int) -> list[Activation]:
    """The activation functions of all directions, in order; each takes the next alpha and beta if it needs them."""
    given = attrs["activations"]
    names = [str(n) for n in given] if isinstance(given, tuple) and given else [*defaults] * ways
    if len(names) != len(defaults) * ways:
        raise GraphError(f"{len(defaults) * ways} activations are needed, not {len(names)}")
    lists = [_floats(attrs["activation_alpha"]), _floats(attrs["activation_beta"])]
    return [_activation(name, lists, attrs["clip"]) for name in names]


def _floats(value: AttrValue) -> list[float]:
    return [float(v) for v in value if isinstance(v, (int, float))] if isinstance(value, tuple) else []


def _activation(name: str, lists: list[list[float]], clip: AttrValue) -> Activation:
    kind = _KINDS.get(name.lower())
    if kind is None:
        raise GraphError(f"there is no activation '{name}'")
    numbers = []
    for default, rest in zip(kind.defaults, lists, strict=False):
        number = rest.pop(0) if rest else default
        if number is None:
            raise GraphError(f"the activation '{name}' needs its alpha and beta")
        numbers.append(np.float64(number))
    bound = float(clip) if isinstance(clip, (int, float)) else None

    def apply(x: Floats) -> Floats:
        return kind.function(x if bound is None else np.clip(x, -bound, bound), *numbers)

    return apply


# ── running along time ───────────────────────────────────────────────────────────────────────────────────────────

Step = Callable[[Floats, list[Floats]], list[Floats]]


def _along(
    x: Floats, lengths: NDArray[np.int64], states: list[Floats], step: Step, reverse: bool
) -> tuple[Floats, list[Floats]]:
    """All states h, and the last of every state, of one direction over x (time × batch × features)."""
    seen = np.zeros((x.shape[0], *states[0].shape), np.float64)
    for t in reversed(range(x.shape[0])) if reverse else range(x.shape[0]):
        # a sequence that has ended keeps its state and gives zeros
        runs = (t < lengths)[:, None]
        states = [np.where(runs, new, old) for new, old in zip(step(x[t], states), states, strict=True)]
        seen[t] = np.where(runs, states[0], 0)
    return seen, states


StepMaker = Callable[[Attrs, list[Activation], Floats, Floats, Floats, Floats], Step]


def _run(
    maker: StepMaker, defaults: Sequence[str], gates: int, states: int, arrays: Sequence[Array | None], attrs: Attrs
) -> tuple[Array, ...]:
    given = [np.asarray(a, np.float64) if a is not None else None for a in [*arrays, *[None] * (8 - len(arrays))]]
    x, w, r, bias, lengths, *initial, peepholes = given
    if x is None or w is None or r is None:
        raise GraphError("a recurrent operator needs X, W and R")
    ways, hidden = w.shape[0], r.shape[2]
    x = np.swapaxes(x, 0, 1) if attrs.int("layout") else x
    zeros = np.zeros((ways, x.shape[1], hidden))
    first = [_time_first(h, attrs) if h is not None else zeros for h in initial[:states]]
    bias = np.zeros((ways, 2 * gates * hidden)) if bias is None else bias
    peepholes = np.zeros((ways, 3 * hidden)) if peepholes is None else peepholes
    until = np.full(x.shape[1], x.shape[0]) if lengths is None else lengths.astype(np.int64)
    functions = activations(attrs, defaults, ways)
    each = len(functions) // ways
    found = []
    for way in range(ways):
        step = maker(attrs, functions[way * each : (way + 1) * each], w[way], r[way], bias[way], peepholes[way])
        reverse = way == 1 or attrs.str("direction") == "reverse"
        found.append(_along(x, until, [h[way] for h in first], step, reverse))
    whole = np.stack([y for y, _ in found], 1)
    last = [np.stack([s[i] for _, s in found]) for i in range(states)]
    if attrs.int("layout"):
        return np.transpose(whole, (2, 0, 1, 3)), *(np.swapaxes(h, 0, 1) for h in last)
    return whole, *last


def _time_first(h: Floats, attrs: Attrs) -> Floats:
    return np.swapaxes(h, 0, 1) if attrs.int("layout") else h


def _recurrent(
    name: str, gates: int, states: int, defaults: Sequence[str], maker: StepMaker, more: dict[str, AttrValue | Required]
) -> Operator:
    attrs: dict[str, AttrValue | Required] = {
        "activation_alpha": None, "activation_beta": None, "activations": None, "clip": None, "direction": "forward",
        "hidden_size": None, "layout": 0, **more,
    }  # fmt: skip
    return register(
        Operator(
            name, lambda types, given: _types(name, gates, states, types, given), attrs,
            arity=(3, 8 if states == 2 else 6), since=7, write=writes_changed(name, attrs, {"layout": 14}),
            compute=lambda arrays, given: _run(maker, defaults, gates, states, arrays, given),
            optional_outputs=frozenset(range(states + 1)),
        )
    )  # fmt: skip


# ── RNN: h' = f(x Wᵀ + h Rᵀ + b) ─────────────────────────────────────────────────────────────────────────────────


def _rnn(attrs: Attrs, f: list[Activation], w: Floats, r: Floats, bias: Floats, peepholes: Floats) -> Step:
    total = bias[: w.shape[0]] + bias[w.shape[0] :]
    return lambda x, states: [f[0](x @ w.T + states[0] @ r.T + total)]


RNN = _recurrent("RNN", 1, 1, ("Tanh",), _rnn, {})

# ── GRU: gates z, r, h ───────────────────────────────────────────────────────────────────────────────────────────


def _gru(attrs: Attrs, f: list[Activation], w: Floats, r: Floats, bias: Floats, peepholes: Floats) -> Step:
    n = r.shape[1]
    own, recurrent = bias[: 3 * n], bias[3 * n :]
    late = bool(attrs.int("linear_before_reset"))

    def step(x: Floats, states: list[Floats]) -> list[Floats]:
        (h,) = states
        from_x = x @ w.T + own
        gates = f[0](from_x[:, : 2 * n] + h @ r[: 2 * n].T + recurrent[: 2 * n])
        update, reset = gates[:, :n], gates[:, n:]
        new, shift = r[2 * n :].T, recurrent[2 * n :]
        from_h = reset * (h @ new + shift) if late else (reset * h) @ new + shift
        return [(1 - update) * f[1](from_x[:, 2 * n :] + from_h) + update * h]

    return step


GRU = _recurrent("GRU", 3, 1, ("Sigmoid", "Tanh"), _gru, {"linear_before_reset": 0})

# ── LSTM: gates i, o, f, c; peepholes i, o, f ────────────────────────────────────────────────────────────────────


def _lstm(attrs: Attrs, f: list[Activation], w: Floats, r: Floats, bias: Floats, peepholes: Floats) -> Step:
    n = r.shape[1]
    total = bias[: 4 * n] + bias[4 * n :]
    peep_i, peep_o, peep_f = np.split(peepholes, 3)
    coupled = bool(attrs.int("input_forget"))

    def step(x: Floats, states: list[Floats]) -> list[Floats]:
        h, c = states
        i, o, forget, new = np.split(x @ w.T + h @ r.T + total, 4, 1)
        i = f[0](i + peep_i * c)
        forget = 1 - i if coupled else f[0](forget + peep_f * c)
        c = forget * c + i * f[1](new)
        return [f[0](o + peep_o * c) * f[2](c), c]

    return step


LSTM = _recurrent("LSTM", 4, 2, ("Sigmoid", "Tanh", "Tanh"), _lstm, {"input_forget": 0})
