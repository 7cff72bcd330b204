"""taso: makes deep-learning models run faster without changing what they compute."""

from taso.api import Graph, Report, Tensor, compile, export_onnx, load, load_onnx, new_graph, optimize, rule, save
from taso.graph.errors import (
    BackendError,
    BackendUnavailable,
    GraphError,
    InputError,
    InputNotFoundError,
    ModelError,
    RuleError,
    SearchError,
    ShapeError,
    TasoError,
)  # fmt: skip
from taso.version import __version__

__all__ = [
    "BackendError", "BackendUnavailable", "Graph", "GraphError", "InputError", "InputNotFoundError", "ModelError",
    "Report", "RuleError", "SearchError", "ShapeError", "TasoError", "Tensor", "__version__", "compile", "export_onnx",
    "load", "load_onnx", "new_graph", "optimize", "rule", "save",
]  # fmt: skip
