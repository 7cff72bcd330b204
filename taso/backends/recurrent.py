"""LSTM, GRU and RNN with NumPy: the products with the input for all steps at once, the others step by step.

In the element type of the operator, time first; ONNX LSTM, GRU and RNN 7 to 22, all attributes and inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import numpy as np
from numpy.typing import NDArray

from taso.backends.base import Array
from taso.graph.errors import GraphError
from taso.graph.operator import Attrs, Operator, Types
from taso.graph.ops.recurrent import activations
from taso.graph.types import DType

Run = Callable[[Sequence["Array | None"], Sequence[Array]], object]
Floats = NDArray[np.float32]
"""What is computed with: float32 or, in an operator of that type, float64."""
Activation = Callable[[Floats], Floats]
Step = Callable[[Floats, list[Floats]], list[Floats]]

RECURRENT = ("LSTM", "GRU", "RNN")
_DEFAULTS = {"LSTM": ("Sigmoid", "Tanh", "Tanh"), "GRU": ("Sigmoid", "Tanh"), "RNN": ("Tanh",)}


def recurrent(op: Operator, attrs: Attrs, types: Types) -> Run | None:
    """What computes a recurrent operator from arrays for its inputs (None: absent), None where there is no kernel."""
    x = types[0] if types else None
    if op.domain or op.name not in RECURRENT or x is None or x.dtype not in (DType.FLOAT, DType.DOUBLE):
        return None
    ways = 2 if attrs.str("direction") == "bidirectional" else 1
    try:
        functions = _functions(attrs, _DEFAULTS[op.name], ways, x.dtype)
    except GraphError:
        # what is asked for does not exist: the definition says so
        return None
    states = 2 if op.name == "LSTM" else 1
    each = len(functions) // ways

    def run(inputs: Sequence[Array | None], outs: Sequence[Array]) -> None:
        given = cast("list[Floats | None]", [*inputs, *[None] * (8 - len(inputs))])
        x, w, r, bias, lengths, h, c, peepholes = given
        if x is None or w is None or r is None:
            raise GraphError(f"{op.name} needs X, W and R")
        layout = bool(attrs.int("layout"))
        x = np.swapaxes(x, 0, 1) if layout else x
        whole = outs[0].transpose(1, 2, 0, 3) if layout else outs[0]
        last = [np.swapaxes(o, 0, 1) if layout else o for o in outs[1:]]
        first = [None if s is None else np.swapaxes(s, 0, 1) if layout else s for s in (h, c)[:states]]
        for way in range(ways):
            rows = None if bias is None else bias[way]
            extra = None if peepholes is None else peepholes[way]
            from_x, step = _MAKERS[op.name](
                attrs, functions[way * each : (way + 1) * each], x, w[way], r[way], rows, extra
            )  # fmt: skip
            start = [np.zeros(whole.shape[2:], x.dtype) if s is None else s[way] for s in first]
            backwards = way == 1 or attrs.str("direction") == "reverse"
            ends = _along(from_x, lengths, start, step, whole[:, way], backwards)
            # states that nobody reads have no place
            for target, found in zip(last, ends, strict=False):
                np.copyto(target[way], found)

    return run


def _along(
    from_x: Floats, lengths: NDArray[np.generic] | None, states: list[Floats], step: Step, out: Array, backwards: bool
) -> list[Floats]:
    """Writes all states h of one direction to `out` and gives the last of every state."""
    steps = len(from_x)
    until = None if lengths is None else lengths.astype(np.int64)
    for t in reversed(range(steps)) if backwards else range(steps):
        new = step(from_x[t], states)
        if until is None:
            states = new
            np.copyto(out[t], states[0])
        else:
            # a sequence that has ended keeps its state and gives zeros
            runs = (t < until)[:, None]
            states = [np.where(runs, a, b) for a, b in zip(new, states, strict=True)]
            np.copyto(out[t], np.where(runs, states[0], np.zeros((), out.dtype)))
    return states


# ── activations ──────────────────────────────────────────────────────────────────────────────────────────────────


def _sigmoid(x: Floats) -> Floats:
    half = x.dtype.type(0.5)
    found: Floats = np.tanh(x * half) * half + half
    return found


_DIRECT: dict[str, Activation] = {
    "sigmoid": _sigmoid,
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, x.dtype.type(0)),
}


def _functions(attrs: Attrs, defaults: Sequence[str], ways: int, dtype: DType) -> list[Activation]:
    """The activations of all directions; the usual ones in the element type, the others by their definition."""
    given = attrs["activations"]
    names = [str(n).lower() for n in given] if isinstance(given, tuple) and given else None
    names = names or [n.lower() for n in defaults] * ways
    defined = activations(attrs, defaults, ways)
    if attrs["clip"] is None:
        return [_DIRECT.get(n) or _rounded(f, dtype) for n, f in zip(names, defined, strict=True)]
    return [_rounded(f, dtype) for f in defined]


def _rounded(function: Callable[[NDArray[np.float64]], NDArray[np.float64]], dtype: DType) -> Activation:
    return lambda x: np.asarray(function(x.astype(np.float64)), dtype.numpy)


# ── one step ─────────────────────────────────────────────────────────────────────────────────────────────────────

Maker = Callable[
    [Attrs, Sequence[Activation], Floats, Floats, Floats, "Floats | None", "Floats | None"], tuple[Floats, Step]
]  # fmt: skip


def _rnn(
    attrs: Attrs, f: Sequence[Activation], x: Floats, w: Floats, r: Floats, bias: Floats | None,
    peepholes: Floats | None,
) -> tuple[Floats, Step]:  # fmt: skip
    from_x, turned = _from_x(x, w, _total(bias, len(w))), np.ascontiguousarray(r.T)
    return from_x, lambda row, states: [f[0](row + states[0] @ turned)]


def _gru(
    attrs: Attrs, f: Sequence[Activation], x: Floats, w: Floats, r: Floats, bias: Floats | None,
    peepholes: Floats | None,
) -> tuple[Floats, Step]:  # fmt: skip
    """Gates z, r, h (ONNX GRU)."""
    n, late = r.shape[1], bool(attrs.int("linear_before_reset"))
    own, recurrent = (None, None) if bias is None else (bias[: 3 * n], bias[3 * n :].copy())
    from_x = _from_x(x, w, own)
    gates, new = (np.ascontiguousarray(part.T) for part in (r[: 2 * n], r[2 * n :]))
    shift = np.zeros(3 * n, x.dtype) if recurrent is None else recurrent

    def step(row: Floats, states: list[Floats]) -> list[Floats]:
        (h,) = states
        both = f[0](row[:, : 2 * n] + h @ gates + shift[: 2 * n])
        update, reset = both[:, :n], both[:, n:]
        from_h = reset * (h @ new + shift[2 * n :]) if late else (reset * h) @ new + shift[2 * n :]
        return [(1 - update) * f[1](row[:, 2 * n :] + from_h) + update * h]

    return from_x, step


def _lstm(
    attrs: Attrs, f: Sequence[Activation], x: Floats, w: Floats, r: Floats, bias: Floats | None,
    peepholes: Floats | None,
) -> tuple[Floats, Step]:  # fmt: skip
    """Gates i, o, f, c, peepholes i, o, f (ONNX LSTM)."""
    n, coupled = r.shape[1], bool(attrs.int("input_forget"))
    from_x, turned = _from_x(x, w, _total(bias, len(w))), np.ascontiguousarray(r.T)
    peep = None if peepholes is None else np.split(peepholes, 3)

    def step(row: Floats, states: list[Floats]) -> list[Floats]:
        h, c = states
        all_gates = row + h @ turned
        i, o, forget, new = (all_gates[:, k * n : (k + 1) * n] for k in range(4))
        i = f[0](i if peep is None else i + peep[0] * c)
        keep = 1 - i if coupled else f[0](forget if peep is None else forget + peep[2] * c)
        c = keep * c + i * f[1](new)
        return [f[0](o if peep is None else o + peep[1] * c) * f[2](c), c]

    return from_x, step


def _total(bias: Floats | None, rows: int) -> Floats | None:
    return None if bias is None else bias[:rows] + bias[rows:]


def _from_x(x: Floats, w: Floats, bias: Floats | None) -> Floats:
    """x Wᵀ + b for all steps: one product."""
    steps, batch, size = x.shape
    found: Floats = (x.reshape(steps * batch, size) @ w.T).reshape(steps, batch, len(w))
    return found if bias is None else found + bias


_MAKERS: dict[str, Maker] = {"LSTM": _lstm, "GRU": _gru, "RNN": _rnn}

__all__ = ["RECURRENT", "recurrent"]
