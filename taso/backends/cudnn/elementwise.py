"""Element-wise operators as cuDNN's pointwise operations."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from taso.backends.cudnn.frames import Frame, Unmapped
from taso.backends.cudnn.sketch import Sketch
from taso.backends.lowering import Step
from taso.graph.operator import Attrs

Rule = Callable[[Sketch, Sequence[int], Attrs], int]
"""What an operator is made of: a sketch, the uids of its inputs and its attributes give the uid of its output."""


def _one(mode: str) -> Rule:
    return lambda s, x, attrs: s.pointwise(mode, *x)


def _chain(mode: str) -> Rule:
    def rule(s: Sketch, x: Sequence[int], attrs: Attrs) -> int:
        total = x[0]
        for other in x[1:]:
            total = s.pointwise(mode, total, other)
        return total

    return rule


def _number(s: Sketch, like: int, value: float) -> int:
    return s.scalar(value, len(s.tensors[like].dims))


def _with(s: Sketch, mode: str, x: int, value: float) -> int:
    """x op value."""
    return s.pointwise(mode, x, _number(s, x, value))


def _below(s: Sketch, x: int) -> int:
    """min(x, 0)."""
    return _with(s, "min", x, 0.0)


def _clip(s: Sketch, x: Sequence[int], attrs: Attrs) -> int:
    """min(max(x, low), high): the upper bound is taken last, also where it is below the lower one."""
    low = None if attrs["min"] is None else attrs.float("min")
    high = None if attrs["max"] is None else attrs.float("max")
    if low is None and high is None:
        return s.pointwise("identity", x[0])
    if low is not None and high is not None and math.isfinite(low) and math.isfinite(high):
        return s.pointwise("relu", x[0], lower_clip=min(low, high), upper_clip=high)
    total = x[0] if low is None else _with(s, "max", x[0], low)
    return total if high is None else _with(s, "min", total, high)


def _leaky(s: Sketch, x: Sequence[int], attrs: Attrs) -> int:
    return s.pointwise("leaky_relu", x[0], negative_slope=attrs.float("alpha"))


def _prelu(s: Sketch, x: Sequence[int], attrs: Attrs) -> int:
    """max(x, 0) + slope · min(x, 0)."""
    return s.pointwise("add", s.pointwise("relu", x[0]), s.pointwise("mul", _below(s, x[0]), x[1]))


def _scaled_elu(s: Sketch, x: int, alpha: float) -> int:
    """x where it is positive, alpha · (exp(x) − 1) elsewhere; the frontend's elu has no alpha."""
    elu = s.pointwise("elu", x)
    if alpha == 1:
        return elu
    return s.pointwise("add", s.pointwise("relu", x), _with(s, "mul", _below(s, elu), alpha))


def _celu(s: Sketch, x: Sequence[int], attrs: Attrs) -> int:
    """max(x, 0) + min(alpha · (exp(x / alpha) − 1), 0)."""
    alpha = attrs.float("alpha")
    if alpha <= 0:
        raise Unmapped("Celu of an alpha that is not positive")
    if alpha == 1:
        return s.pointwise("elu", x[0])
    inner = s.pointwise("elu", _with(s, "div", x[0], alpha))
    return s.pointwise("add", s.pointwise("relu", x[0]), _with(s, "mul", _below(s, inner), alpha))


def _selu(s: Sketch, x: Sequence[int], attrs: Attrs) -> int:
    return _with(s, "mul", _scaled_elu(s, x[0], attrs.float("alpha")), attrs.float("gamma"))


def _hard_sigmoid(s: Sketch, x: int, alpha: float, beta: float) -> int:
    line = _with(s, "add", _with(s, "mul", x, alpha), beta)
    return s.pointwise("relu", line, lower_clip=0.0, upper_clip=1.0)


def _hard_swish(s: Sketch, x: Sequence[int], attrs: Attrs) -> int:
    """x · min(max(x + 3, 0), 6) / 6."""
    clipped = s.pointwise("relu", _with(s, "add", x[0], 3.0), lower_clip=0.0, upper_clip=6.0)
    return _with(s, "mul", s.pointwise("mul", x[0], clipped), 1 / 6)


def _mish(s: Sketch, x: Sequence[int], attrs: Attrs) -> int:
    return s.pointwise("mul", x[0], s.pointwise("tanh", s.pointwise("softplus", x[0])))


def _softsign(s: Sketch, x: Sequence[int], attrs: Attrs) -> int:
    return s.pointwise("div", x[0], _with(s, "add", s.pointwise("abs", x[0]), 1.0))


def _mean(s: Sketch, x: Sequence[int], attrs: Attrs) -> int:
    total = _chain("add")(s, x, attrs)
    return total if len(x) == 1 else _with(s, "div", total, float(len(x)))


RULES: dict[str, Rule] = {
    "Relu": _one("relu"),
    "Sigmoid": _one("sigmoid"),
    "Tanh": _one("tanh"),
    "Exp": _one("exp"),
    "Log": _one("log"),
    "Sqrt": _one("sqrt"),
    "Abs": _one("abs"),
    "Neg": _one("neg"),
    "Reciprocal": _one("reciprocal"),
    "Erf": _one("erf"),
    "Floor": _one("floor"),
    "Ceil": _one("ceil"),
    "Sin": _one("sin"),
    "Cos": _one("cos"),
    "Tan": _one("tan"),
    "Softplus": _one("softplus"),
    "Softsign": _softsign,
    "Elu": lambda s, x, attrs: _scaled_elu(s, x[0], attrs.float("alpha")),
    "Celu": _celu,
    "Selu": _selu,
    "LeakyRelu": _leaky,
    "PRelu": _prelu,
    "HardSigmoid": lambda s, x, attrs: _hard_sigmoid(s, x[0], attrs.float("alpha"), attrs.float("beta")),
    "HardSwish": _hard_swish,
    "Mish": _mish,
    "Swish": lambda s, x, attrs: s.pointwise("swish", x[0], swish_beta=attrs.float("alpha")),
    "Gelu": lambda s, x, attrs: s.pointwise("gelu_approx_tanh" if attrs.str("approximate") == "tanh" else "gelu", x[0]),
    "Clip": _clip,
    "Add": _one("add"),
    "Sub": _one("sub"),
    "Mul": _one("mul"),
    "Div": _one("div"),
    "Pow": _one("pow"),
    "Sum": _chain("add"),
    "Mean": _mean,
    "Max": _chain("max"),
    "Min": _chain("min"),
}


def joined(sketch: Sketch, frame: Frame, step: Step, previous: int | None) -> int:
    """The uid of what an element-wise step makes; its inputs are operands and what the step before made."""
    rule = RULES.get(step.op.name) if not step.op.domain else None
    if rule is None:
        raise Unmapped(f"cuDNN has no pointwise {step.op.name}")
    inputs = []
    for position, reference in enumerate(step.inputs):
        if reference is not None and reference < 0:
            if previous is None:
                raise Unmapped(f"input {position} of {step.op.name} is made by nothing")
            inputs.append(previous)
        else:
            inputs.append(sketch.operand(sketch.index(step, position), frame))
    return rule(sketch, inputs, step.attrs)
