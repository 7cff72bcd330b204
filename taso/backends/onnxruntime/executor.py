"""A graph in an ONNX Runtime session."""

from __future__ import annotations

import re
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

from onnx import ModelProto

from taso.backends.base import Array
from taso.backends.lowering import Lowering
from taso.backends.onnxruntime.runtime import Session, events, failures_as_errors, session
from taso.backends.ordering import planned_peak
from taso.graph.errors import BackendError
from taso.graph.evaluate import check_feeds
from taso.graph.graph import Graph
from taso.graph.onnx_export import LIMIT, export, save, stored_bytes
from taso.graph.types import TensorType


class RuntimeProgram:
    """A graph compiled by ONNX Runtime at its default level of optimization (an `Executable`).

    Symbolic dimensions are ONNX Runtime's own affair. Calls from several threads may run side by side; only the first,
    which counts the kernels, keeps others waiting. Raises `BackendError`, naming the node where ONNX Runtime does, for
    what it cannot run.
    """

    def __init__(self, graph: Graph, lowering: Lowering, threads: int) -> None:
        for name, value in (*zip(graph.input_names, graph.inputs, strict=True), *graph.outputs):
            _check_passable(name, value.type)
        self._graph = graph
        self._lowering = lowering
        self._names = [name for name, _ in graph.outputs]
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        self._lock = threading.Lock()
        self._kernels: int | None = None
        self._session = _session(graph, threads, Path(self._folder.name))

    def __call__(self, feeds: Mapping[str, Array]) -> dict[str, Array]:
        """Outputs by name, arrays of their own. Raises `InputError` where `feeds` do not fit the inputs."""
        given = check_feeds(self._graph, feeds)
        if self._kernels is None:
            with self._lock:
                if self._kernels is None:
                    found = self._run(given)
                    self._kernels = sum(len(event.seconds) for event in events(self._session))
                    self._folder.cleanup()
                    return found
        return self._run(given)

    def _run(self, given: Mapping[str, Array]) -> dict[str, Array]:
        with failures_as_errors("ONNX Runtime failed to run the model"):
            return dict(zip(self._names, self._session.run(self._names, given), strict=True))

    @property
    def kernels(self) -> int:
        """Nodes that the first call ran, changes of layout included; 0 before it."""
        return self._kernels or 0

    @property
    def peak_bytes(self) -> int:
        """Bytes of the intermediate values as the lowering plan has them, since ONNX Runtime does not tell; 0 where
        shapes are open."""
        known = all(v.type.other is None and v.type.static for n in self._graph.nodes for v in n.outputs)
        return planned_peak(self._graph, self._lowering) if known else 0


def _check_passable(name: str, t: TensorType) -> None:
    if t.other is None and t.dtype.numpy.kind == "V":
        raise BackendError(f"ONNX Runtime takes and gives no arrays of {t.dtype.name}, as '{name}' is one")


def _session(graph: Graph, threads: int, folder: Path) -> Session:
    """A session that profiles its first run; the weights of a large model pass through a file in `folder`."""
    profile = str(folder / "profile")
    if stored_bytes(graph) > LIMIT:
        path = str(folder / "model.onnx")
        save(graph, path, external_data=True)
        return session(path, threads, profile=profile)
    model = export(graph)
    try:
        return session(model.SerializeToString(), threads, profile=profile)
    except BackendError as error:
        raise BackendError(f"{error}{_culprits(model, str(error))}") from error


def _culprits(model: ModelProto, message: str) -> str:
    """The nodes of the operator that a message speaks of where it does not name a node."""
    names = [n.name for n in model.graph.node if re.search(rf"\b{re.escape(n.op_type)}\(", message)]
    if not names or any(name in message for name in names):
        return ""
    shown = ", ".join(f"'{name}'" for name in names[:3]) + (", …" if len(names) > 3 else "")
    return f" (node {shown})"
