"""`taso.InferenceSession`: ONNX Runtime's session, as far as inference needs it, on taso.

    import taso as ort
    session = ort.InferenceSession("model.onnx")
    outputs = session.run(None, {"input": array})
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Union

import numpy as np
import onnx
from onnx import TypeProto, ValueInfoProto

from taso import api
from taso.backends.base import Backend
from taso.backends.cudnn.backend import CudnnBackend
from taso.backends.select import get_backend, on_cpu, on_gpu
from taso.graph.errors import BackendUnavailable, FallbackWarning, InputError, TasoError
from taso.graph.graph import Value
from taso.graph.onnx_protos import type_proto

log = logging.getLogger(__name__)

SECONDS = 10.0
"""Seconds that a session may search for a better graph, where nothing else is said."""
PROVIDER = "CPUExecutionProvider"
CUDA = "CUDAExecutionProvider"

Model = Union[str, "os.PathLike[str]", bytes, onnx.ModelProto, api.Graph]
Provider = Union[str, "tuple[str, Mapping[str, object]]"]


@dataclass(frozen=True)
class NodeArg:
    """An input or output: its name, its type ("tensor(float)"), and its shape.

    A dimension is a number, the name of a symbol, or None where nothing is known of it. A shape of unknown rank, and
    that of what is no tensor, is an empty list, as ONNX Runtime says it.
    """

    name: str
    type: str
    shape: list[int | str | None]


@dataclass(frozen=True)
class ModelMetadata:
    """What a file says of itself, by ONNX Runtime's names."""

    producer_name: str
    graph_name: str
    domain: str
    description: str
    graph_description: str
    version: int
    custom_metadata_map: dict[str, str]


class InferenceSession:
    """A model that is ready to run, with the interface of `onnxruntime.InferenceSession`.

    The model is a path, the bytes of a file, an `onnx.ModelProto` or a `taso.Graph`. A graph runs as it is; anything
    else is optimized first, for `SECONDS` seconds at most: `settings` are those of `taso.optimize` (`time_limit=`,
    `budget=`, `backend=`, `precision=`, …), and `optimize=False` runs the model as it is. Of `sess_options` the number
    of threads is followed (`intra_op_num_threads`) and `ORT_DISABLE_ALL`, which is `optimize=False`.

    `providers` are tried in order, as ONNX Runtime does: `CUDAExecutionProvider` is the cuDNN backend on the current
    GPU (its option `device_id` must be that one's number), `CPUExecutionProvider` the CPU. For others, and for a GPU
    that is missing, the next one in the list serves, which a `FallbackWarning` says; a list of `CUDAExecutionProvider`
    alone raises `BackendUnavailable` then. A `backend` that is named runs whatever the list says.

    Raises `ModelError` for a model that cannot be read, `BackendError` where it cannot be run.
    """

    def __init__(
        self, path_or_bytes: Model, sess_options: object = None, providers: Sequence[Provider] | None = None,
        provider_options: Sequence[Mapping[str, object]] | None = None, *, optimize: bool = True,
        backend: str | Backend = "auto", threads: int | None = None, precision: str = "float32", **settings: object,
    ) -> None:  # fmt: skip
        threads = _threads(sess_options) if threads is None else threads
        backend = _served_by(_wanted(providers, provider_options), backend, threads, precision)
        built = isinstance(path_or_bytes, api.Graph)
        graph = path_or_bytes if isinstance(path_or_bytes, api.Graph) else api.load(path_or_bytes)
        if optimize and not built and not _disabled(sess_options):
            settings.setdefault("time_limit", SECONDS)
            settings.update(backend=backend, threads=threads, precision=precision)
            graph = api.optimize(graph, **settings)  # type: ignore[arg-type]  # checked there
        elif settings:
            raise TasoError(f"'{next(iter(settings))}' is a setting of the search, and this model is not optimized")
        self.graph = graph
        self._options = sess_options
        self._program = api.compile(graph, backend, threads, precision)
        self._providers = [CUDA, PROVIDER] if isinstance(backend, CudnnBackend) else [PROVIDER]
        self._inputs = [_argument(graph, name, v) for name, v in zip(graph.input_names, graph.inputs, strict=True)]
        self._outputs = [_argument(graph, name, v) for name, v in graph.outputs]
        self._types = {name: v.type for name, v in zip(graph.input_names, graph.inputs, strict=True)}

    def run(
        self, output_names: Sequence[str] | None, input_feed: Mapping[str, object], run_options: object = None
    ) -> list[object]:
        """The outputs of those names, in that order; None asks for all. A list is made an array of the input's type.

        Raises `InputError` for an output that the model does not have, and where names, element types or shapes of the
        feeds do not fit its inputs.
        """
        known = [a.name for a in self._outputs]
        wanted = known if not output_names else [output_names] if isinstance(output_names, str) else output_names
        for name in wanted:
            if name not in known:
                raise InputError(f"the model has no output '{name}'; its outputs are {known}")
        if not isinstance(input_feed, Mapping):
            raise InputError(f"inputs are given as a dictionary of arrays by name, not as {type(input_feed).__name__}")
        found = self._program({name: self._fed(name, value) for name, value in input_feed.items()})
        return [found[name] for name in wanted]

    def _fed(self, name: str, value: object) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
        declared = self._types.get(name)
        if declared is not None and declared.other is None and isinstance(value, (list, tuple, bool, int, float, str)):
            try:
                return np.asarray(value, declared.dtype.numpy)
            except (ValueError, TypeError, OverflowError) as error:
                raise InputError(f"input '{name}' must be {declared}, which the value given is not: {error}") from error
        return value  # type: ignore[return-value]  # an array, or a sequence or map, which programs check

    def get_inputs(self) -> list[NodeArg]:
        """The inputs that must be given, in the model's order."""
        return [a for a in self._inputs if a.name not in self.graph.info.input_defaults]

    def get_overridable_initializers(self) -> list[NodeArg]:
        """The inputs that have a default, which is used where they are left out."""
        return [a for a in self._inputs if a.name in self.graph.info.input_defaults]

    def get_outputs(self) -> list[NodeArg]:
        """The outputs, in the model's order."""
        return list(self._outputs)

    def get_providers(self) -> list[str]:
        """Where the model runs, by ONNX Runtime's names for it: on a GPU, and beside it on the CPU, or there alone."""
        return list(self._providers)

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        """Settings of the providers: there are none."""
        return {name: {} for name in self._providers}

    def get_session_options(self) -> object:
        """The options that were given."""
        return self._options

    def get_modelmeta(self) -> ModelMetadata:
        """What the file says of itself."""
        info = self.graph.info
        return ModelMetadata(
            info.producer_name, info.graph_name, info.domain, info.doc, info.graph_doc, info.model_version,
            dict(info.metadata),
        )  # fmt: skip

    def __repr__(self) -> str:
        return f"<InferenceSession: {self.graph!r}>"


# ── what ONNX Runtime's callers hand over ────────────────────────────────────────────────────────────────────────


def _wanted(
    providers: Sequence[Provider] | None, options: Sequence[Mapping[str, object]] | None
) -> list[tuple[str, Mapping[str, object]]]:
    """The providers that are asked for, each with its options."""
    pairs = [(p, {}) if isinstance(p, str) else (p[0], p[1]) for p in providers or ()]
    if options is None:
        return pairs
    if len(options) != len(pairs):
        raise TasoError(f"{len(options)} provider_options are given for {len(pairs)} providers")
    return [(name, own or given) for (name, own), given in zip(pairs, options, strict=True)]


def _served_by(
    wanted: Sequence[tuple[str, Mapping[str, object]]], backend: str | Backend, threads: int | None, precision: str
) -> Backend:
    """The backend of the first provider that there is; the one that was named, if one was."""
    if not wanted or backend != "auto":
        found = get_backend(backend, threads, precision)
        runs = CUDA if isinstance(found, CudnnBackend) else PROVIDER
        if wanted and runs not in [name for name, _ in wanted]:
            where = "the GPU" if runs == CUDA else "the CPU"
            _warn(f"taso runs the model on {where}, by the backend {found.name}, not with {_listed(wanted)}")
        return found
    unserved: list[str] = []
    for name, options in wanted:
        if name == PROVIDER:
            break
        if name != CUDA:
            unserved.append(f"taso has no {name}")
            continue
        try:
            found = on_gpu(_number(options), precision)
        except BackendUnavailable as error:
            if len(wanted) == 1:
                raise
            unserved.append(f"{CUDA} is not available ({error})")
        else:
            if unserved:
                _warn(f"{'; '.join(unserved)}: the model runs on the GPU")
            return found
    if unserved:
        _warn(f"{'; '.join(unserved)}: the model runs on the CPU")
    return on_cpu(threads, precision)


def _listed(wanted: Sequence[tuple[str, Mapping[str, object]]]) -> str:
    return ", ".join(str(name) for name, _ in wanted)


def _warn(text: str) -> None:
    warnings.warn(text, FallbackWarning, stacklevel=4)


def _number(options: Mapping[str, object]) -> int | None:
    """The number of the GPU that a provider's options ask for."""
    asked = options.get("device_id")
    if asked is None:
        return None
    try:
        return int(str(asked))
    except ValueError as error:
        raise TasoError(f"device_id must be the number of a GPU, not {asked!r}") from error


def _threads(options: object) -> int | None:
    """Threads that ONNX Runtime's options ask for; 0 leaves the choice open there."""
    asked = getattr(options, "intra_op_num_threads", 0)
    return asked if isinstance(asked, int) and asked > 0 else None


def _disabled(options: object) -> bool:
    return getattr(getattr(options, "graph_optimization_level", None), "name", "") == "ORT_DISABLE_ALL"


# ── types as ONNX Runtime tells them ─────────────────────────────────────────────────────────────────────────────


def _argument(graph: api.Graph, name: str, value: Value) -> NodeArg:
    stated = graph.info.value_infos.get(name)
    proto = type_proto(value.type)
    if stated is not None:
        declared = ValueInfoProto.FromString(stated).type
        # a file may state no type of an output, or no shape
        if declared.WhichOneof("value") != "tensor_type" or declared.tensor_type.HasField("shape"):
            proto = declared if declared.WhichOneof("value") else proto
    dims = proto.tensor_type.shape.dim if proto.WhichOneof("value") == "tensor_type" else ()
    shape = [d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in dims]
    return NodeArg(name, _type_text(proto), shape)


def _element(code: int) -> str:
    return onnx.TensorProto.DataType.Name(code).lower()


def _type_text(proto: TypeProto) -> str:
    """ONNX's text of a type: "tensor(float)", "seq(tensor(int64))", "map(string,tensor(float))"."""
    kind = proto.WhichOneof("value")
    if kind == "tensor_type":
        return f"tensor({_element(proto.tensor_type.elem_type)})"
    if kind == "sparse_tensor_type":
        return f"sparse_tensor({_element(proto.sparse_tensor_type.elem_type)})"
    if kind == "sequence_type":
        return f"seq({_type_text(proto.sequence_type.elem_type)})"
    if kind == "optional_type":
        return f"optional({_type_text(proto.optional_type.elem_type)})"
    if kind == "map_type":
        return f"map({_element(proto.map_type.key_type)},{_type_text(proto.map_type.value_type)})"
    return "unknown"


__all__ = ["InferenceSession", "ModelMetadata", "NodeArg"]
