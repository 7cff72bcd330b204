"""All modelled operators, one block each, by family."""

from taso.graph.operator import ONNX_NAMES, REGISTRY, operator_named
from taso.graph.ops import (
    attention,
    einsum,
    elementwise,
    indexing,
    linear,
    losses,
    movement,
    normalization,
    pooling,
    quantization,
    recurrent,
    reduction,
    spatial,
    structure,
    transposed,
)  # fmt: skip
from taso.graph.ops.structure import INPUT, WEIGHT, opaque

__all__ = [
    "INPUT", "ONNX_NAMES", "REGISTRY", "WEIGHT", "attention", "einsum", "elementwise", "indexing", "linear", "losses",
    "movement", "normalization", "opaque", "operator_named", "pooling", "quantization", "recurrent", "reduction",
    "spatial", "structure", "transposed",
]  # fmt: skip
