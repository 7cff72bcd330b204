"""All modelled operators, one block each, by family."""

from taso.graph.operator import ONNX_NAMES, REGISTRY, operator_named
from taso.graph.ops import elementwise, linear, movement, normalization, pooling, reduction, structure
from taso.graph.ops.structure import INPUT, WEIGHT, opaque

__all__ = [
    "INPUT", "ONNX_NAMES", "REGISTRY", "WEIGHT", "elementwise", "linear", "movement", "normalization", "opaque",
    "operator_named", "pooling", "reduction", "structure",
]  # fmt: skip
