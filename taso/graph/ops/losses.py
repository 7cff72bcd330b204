"""Losses. Their meaning is that of onnx.reference."""

from __future__ import annotations

from taso.graph.errors import ShapeError
from taso.graph.operator import Attrs, AttrValue, Operator, Required, Types, register
from taso.graph.ops.common import is_given, present, require_equal, require_rank, writes_changed
from taso.graph.types import TensorType

_LOSS: dict[str, AttrValue | Required] = {"ignore_index": None, "reduction": "mean"}


def _loss(op: str, types: Types, attrs: Attrs) -> TensorType:
    """The type of the loss: one number for each target, or one for all."""
    x, target = present(types, 0, op), present(types, 1, op)
    if x.rank < 2 or target.rank != x.rank - 1:
        raise ShapeError(f"{op}: the targets {target} must have one dimension less than the input {x}")
    for a, b in zip(target.dims, (x.dims[0], *x.dims[2:]), strict=True):
        require_equal(a, b, op, "sizes of targets and input")
    if is_given(types, 2):
        require_rank(present(types, 2, op), 1, op, "the weights")
        require_equal(present(types, 2, op).dims[0], x.dims[1], op, "number of weights and of classes")
    return x.with_shape(target.dims if attrs.str("reduction") == "none" else ())


NEGATIVE_LOG_LIKELIHOOD_LOSS = register(
    Operator(
        "NegativeLogLikelihoodLoss", lambda types, attrs: (_loss("NegativeLogLikelihoodLoss", types, attrs),), _LOSS,
        arity=(2, 3), since=12, write=writes_changed("NegativeLogLikelihoodLoss", _LOSS),
    )
)  # fmt: skip


def _cross_entropy_type(types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    op = "SoftmaxCrossEntropyLoss"
    return _loss(op, types, attrs), present(types, 0, op)


SOFTMAX_CROSS_ENTROPY_LOSS = register(
    Operator(
        "SoftmaxCrossEntropyLoss", _cross_entropy_type, _LOSS, arity=(2, 3), since=12,
        write=writes_changed("SoftmaxCrossEntropyLoss", _LOSS), optional_outputs=frozenset({1}),
    )
)  # fmt: skip
