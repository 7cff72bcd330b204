"""taso: makes deep-learning models run faster without changing what they compute."""

from taso.api import (
    Graph,
    Progress,
    Report,
    Tensor,
    compile,
    export_onnx,
    load,
    load_onnx,
    new_graph,
    optimize,
    rule,
    save,
)  # fmt: skip
from taso.graph.errors import (
    BackendError,
    BackendUnavailable,
    CallbackWarning,
    FallbackWarning,
    GraphError,
    InputError,
    InputNotFoundError,
    ModelError,
    NaNWarning,
    PluginWarning,
    RuleError,
    SearchError,
    ShapeError,
    TasoError,
    TasoWarning,
)  # fmt: skip
from taso.session import InferenceSession
from taso.version import __version__

__all__ = [
    "BackendError", "BackendUnavailable", "CallbackWarning", "FallbackWarning", "Graph", "GraphError",
    "InferenceSession", "InputError", "InputNotFoundError", "ModelError", "NaNWarning", "PluginWarning", "Progress",
    "Report", "RuleError", "SearchError", "ShapeError", "TasoError", "TasoWarning", "Tensor", "__version__", "compile",
    "export_onnx", "load", "load_onnx", "new_graph", "optimize", "rule", "save",
]  # fmt: skip
