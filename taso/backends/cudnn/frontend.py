"""cuDNN's Python frontend: the one place that imports it. It is fed with nothing but descriptions.

A graph is built, cuDNN's heuristics are asked for plans (modes A and B, then what it falls back to), and those that
compute otherwise than the description's precision allows are left out. The first plan that can be built is taken, until
`PlannedGraph.tune` has timed the best few.
"""

from __future__ import annotations

import functools
import importlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np

from taso.backends.base import Array
from taso.backends.cudnn.description import FLOAT32, TF32, Attribute, Description, Operation, Tensor
from taso.graph.errors import BackendError, BackendUnavailable
from taso.graph.types import DType

log = logging.getLogger(__name__)

MOST_TIMED = 5
"""Plans that `PlannedGraph.tune` times."""

ALIGNMENT = 16
"""Bytes that the addresses of a graph's tensors are a multiple of: plans are made for that."""

_INSTALL = "pip install 'taso[cuda]'"


class GraphUnsupported(BackendError):
    """cuDNN has no plan for a graph: it has to be computed in another way."""


class DeviceMemoryFull(BackendError):
    """The GPU's memory does not hold what a plan needs."""


# ── the module, as far as it is used ─────────────────────────────────────────────────────────────────────────────


class FrontendTensor(Protocol):
    """A tensor of the frontend."""

    def set_uid(self, uid: int) -> object: ...
    def set_dim(self, dim: Sequence[int]) -> object: ...
    def set_stride(self, stride: Sequence[int]) -> object: ...
    def set_data_type(self, dtype: object) -> object: ...
    def set_output(self, value: bool) -> object: ...


class FrontendGraph(Protocol):
    """A graph of the frontend; its operations are found by name."""

    def tensor(
        self, dim: Sequence[int], stride: Sequence[int], data_type: object, is_pass_by_value: bool, name: str
    ) -> FrontendTensor: ...  # fmt: skip
    def validate(self) -> None: ...
    def build_operation_graph(self) -> None: ...
    def create_execution_plans(self, heuristics: Sequence[object]) -> None: ...
    def deselect_numeric_notes(self, notes: Sequence[object]) -> object: ...
    def get_execution_plan_count(self) -> int: ...
    def get_plan_name_at_index(self, index: int) -> str: ...
    def build_plan_at_index(self, index: int) -> object: ...
    def get_workspace_size_plan_at_index(self, index: int) -> int: ...
    def execute_plan_at_index(
        self, tensor_dict: Mapping[int, int], workspace: int | None, index: int, handle: object
    ) -> None: ...  # fmt: skip


class Frontend(Protocol):
    """The package cudnn."""

    __version__: str
    cudnnGraphNotSupportedError: type[Exception]
    pygraph: Callable[..., FrontendGraph]
    data_type: object
    heur_mode: object
    numerical_note: object
    reduction_mode: object
    norm_forward_phase: object
    diagonal_alignment: object

    def create_handle(self) -> object: ...
    def set_stream(self, handle: object, stream: int) -> None: ...
    def backend_version_string(self) -> str: ...


@functools.lru_cache(maxsize=1)
def frontend() -> Frontend:
    """The package cudnn; raises `BackendUnavailable` where it or the library behind it is missing, and how to get it.

    Looked for once; where it failed, a later call looks again.
    """
    try:
        found = cast(Frontend, importlib.import_module("cudnn"))
    except ModuleNotFoundError as error:
        if error.name != "cudnn":
            raise BackendUnavailable(f"cuDNN's frontend cannot be imported ({_line(error)}): {_INSTALL}") from error
        raise BackendUnavailable(f"cuDNN's frontend is not installed: {_INSTALL}") from error
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        raise BackendUnavailable(f"cuDNN cannot be loaded ({_line(error)}): {_INSTALL}") from error
    if not hasattr(found, "pygraph"):
        raise BackendUnavailable(f"the installed package cudnn is not NVIDIA's frontend: {_INSTALL}")
    _load_compilers()
    return found


def _load_compilers() -> None:
    """Loads what cuDNN looks for by name and finds only where it is loaded: NVRTC for fusion, cuBLASLt for products."""
    try:
        load = cast(Callable[[str], object], importlib.import_module("cuda.pathfinder").load_nvidia_dynamic_lib)
    except (ImportError, AttributeError):
        log.debug("cuda-pathfinder is not installed: cuDNN looks for NVRTC and cuBLASLt itself")
        return
    for name in ("nvrtc", "cublasLt"):
        try:
            load(name)
        except (RuntimeError, OSError) as error:
            log.warning("cuDNN will do without %s, which does not load (%s)", name, _line(error))


def about() -> str:
    """Versions of cuDNN and its frontend, on which times depend; raises `BackendUnavailable` where they are missing."""
    module = frontend()
    return f"cuDNN {module.backend_version_string()}; frontend {module.__version__}"


# ── from a description to a graph of the frontend ────────────────────────────────────────────────────────────────

_TYPES = {
    DType.FLOAT: "FLOAT", DType.FLOAT16: "HALF", DType.BFLOAT16: "BFLOAT16", DType.DOUBLE: "DOUBLE",
    DType.INT8: "INT8", DType.UINT8: "UINT8", DType.INT32: "INT32", DType.INT64: "INT64", DType.BOOL: "BOOLEAN",
}  # fmt: skip


def drawn(module: Frontend, description: Description, settings: Mapping[str, object]) -> FrontendGraph:
    """The description as a graph of the frontend, not yet checked; `settings` are more arguments of its constructor.

    Raises `GraphUnsupported` for an operation or a type that the installed frontend does not have.
    """
    graph = module.pygraph(
        io_data_type=_type(module, description.io),
        intermediate_data_type=_type(module, description.intermediate),
        compute_data_type=_type(module, description.compute),
        **settings,
    )
    made: dict[int, FrontendTensor] = {}
    for tensor in description.tensors:
        if tensor.uid not in description.produced:
            made[tensor.uid] = _input(module, graph, tensor)
    for number, operation in enumerate(description.operations):
        found = _operation(module, graph, operation, made, f"{number}.{operation.kind}")
        _settle(module, found, description.by_uid[operation.output])
        made[operation.output] = found
    return graph


def _type(module: Frontend, dtype: DType) -> object:
    return _member(module.data_type, _TYPES.get(dtype, dtype.name))


def _member(owner: object, name: str) -> object:
    found = getattr(owner, name, None)
    if found is None:
        raise GraphUnsupported(f"the installed cuDNN frontend has no {getattr(owner, '__name__', 'graph')}.{name}")
    return cast(object, found)


def _input(module: Frontend, graph: FrontendGraph, tensor: Tensor) -> FrontendTensor:
    found = graph.tensor(
        dim=list(tensor.dims), stride=list(tensor.strides), data_type=_type(module, tensor.dtype),
        is_pass_by_value=tensor.scalar is not None, name=f"t{tensor.uid}",
    )  # fmt: skip
    found.set_uid(tensor.uid)
    return found


def _settle(module: Frontend, found: FrontendTensor, tensor: Tensor) -> None:
    """Says of an operation's output what the description says; what the frontend would infer may differ."""
    found.set_uid(tensor.uid)
    found.set_dim(list(tensor.dims))
    found.set_stride(list(tensor.strides))
    found.set_data_type(_type(module, tensor.dtype))
    found.set_output(not tensor.virtual)


def _operation(
    module: Frontend, graph: FrontendGraph, op: Operation, made: Mapping[int, FrontendTensor], name: str
) -> FrontendTensor:
    """Calls the frontend's method for an operation; of several outputs the first is ours."""
    inputs = {role: made[uid] for role, uid in op.inputs}
    method = cast(Callable[..., object], _member(graph, op.word("mode") if op.kind == "pointwise" else op.kind))
    if op.kind == "pointwise":
        result = method(*inputs.values(), name=name, **_settings(op, "mode"))
    else:
        arguments = _ARGUMENTS.get(op.kind, _as_given)
        result = method(**inputs, **arguments(module, op), name=name)
    first = result[0] if isinstance(result, (list, tuple)) else result
    return cast(FrontendTensor, first)


def _settings(op: Operation, *others: str) -> dict[str, object]:
    """Attributes as the frontend takes them."""
    return {k: _plain(v) for k, v in op.attributes if k not in others}


def _as_given(module: Frontend, op: Operation) -> dict[str, object]:
    return _settings(op)


def _plain(value: Attribute) -> object:
    return list(value) if isinstance(value, tuple) else value


def _inference(module: Frontend, op: Operation) -> dict[str, object]:
    return {"norm_forward_phase": _member(module.norm_forward_phase, "INFERENCE")}


def _sdpa(module: Frontend, op: Operation) -> dict[str, object]:
    found: dict[str, object] = {"attn_scale": op.number("attn_scale", 1.0), "generate_stats": False}
    if op.settings.get("causal"):
        found["diagonal_alignment"] = _member(module.diagonal_alignment, "TOP_LEFT")
        found["diagonal_band_right_bound"] = 0
    return found


_ARGUMENTS: dict[str, Callable[[Frontend, Operation], dict[str, object]]] = {
    "reduction": lambda module, op: {"mode": _member(module.reduction_mode, op.word("mode"))},
    "layernorm": _inference,
    "rmsnorm": _inference,
    "instancenorm": _inference,
    "sdpa": _sdpa,
}


# ── plans ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _barred(description: Description) -> tuple[str, ...]:
    """Notes of plans that compute otherwise than asked for: cuDNN may round float32 factors unless it is told not to.

    What does not give the same result on each run is left out, too. Graphs without products round nothing, whatever
    their plans' notes say.
    """
    always = ("REDUCED_PRECISION_REDUCTION", "NONDETERMINISTIC")
    multiplies = any(op.kind in _PRODUCTS for op in description.operations)
    if description.io is not DType.FLOAT or not multiplies or description.precision not in (FLOAT32, TF32):
        return always
    return (*always, "DOWN_CONVERT_INPUTS", *(("TENSOR_CORE",) if description.precision == FLOAT32 else ()))


_PRODUCTS = frozenset({"conv_fprop", "conv_dgrad", "matmul", "sdpa"})


@dataclass(frozen=True)
class Plan:
    """A plan that is built: its place in the frontend's list, its name, and the bytes that it works in."""

    index: int
    name: str
    workspace: int


class Timing(Protocol):
    """What plans are timed on: memory that is freed with what is returned, and seconds of a call."""

    def reserve(self, size: int) -> Reserved: ...
    def seconds(self, call: Callable[[], object]) -> float: ...


class Reserved(Protocol):
    @property
    def address(self) -> int: ...


class PlannedGraph:
    """A graph with at least one plan that is built; `stream` gives the stream's address to run on, at each call."""

    def __init__(
        self, module: Frontend, graph: FrontendGraph, description: Description, stream: Callable[[], int]
    ) -> None:
        self.description = description
        self._module, self._graph, self._stream = module, graph, stream
        self._scalars = {t.uid: _scalar(t) for t in description.tensors if t.scalar is not None}
        self._reasons: list[str] = []
        self._further = self._built()
        first = next(self._further, None)
        if first is None:
            raise GraphUnsupported(f"cuDNN has no plan for {_shown(description)}: {'; '.join(self._reasons[:3])}")
        self.plan = first

    def _built(self) -> Iterator[Plan]:
        """Plans that can be built, in the order of the heuristics."""
        for index in range(self._graph.get_execution_plan_count()):
            try:
                with _explained(self._module, "building a plan"):
                    self._graph.build_plan_at_index(index)
                    size = self._graph.get_workspace_size_plan_at_index(index)
                    plan = Plan(index, self._graph.get_plan_name_at_index(index), max(0, size))
            except GraphUnsupported as reason:
                self._reasons.append(str(reason))
                continue
            yield plan

    @property
    def workspace(self) -> int:
        """Bytes that the plan works in beside the tensors."""
        return self.plan.workspace

    @property
    def name(self) -> str:
        return self.plan.name

    def bind(self, addresses: Mapping[int, int], workspace: int) -> Callable[[], None]:
        """What runs the graph by the plan there is now, on tensors at these addresses (by uid).

        Raises `BackendError` where an address is missing or no multiple of `ALIGNMENT`.
        """
        return self._bound(self.plan, addresses, workspace)

    def _bound(self, plan: Plan, addresses: Mapping[int, int], workspace: int) -> Callable[[], None]:
        pointers = {t.uid: self._address(t, addresses) for t in self.description.stored}
        pointers.update({uid: held.ctypes.data for uid, held in self._scalars.items()})
        module, graph, stream = self._module, self._graph, self._stream
        space = workspace if plan.workspace else None

        def run() -> None:
            handle = _handle(module)
            with _explained(module, "running a graph"):
                module.set_stream(handle=handle, stream=stream())
                graph.execute_plan_at_index(tensor_dict=pointers, workspace=space, index=plan.index, handle=handle)

        return run

    def _address(self, tensor: Tensor, addresses: Mapping[int, int]) -> int:
        found = addresses.get(tensor.uid)
        if found is None:
            raise BackendError(f"no address for a tensor of a cuDNN graph: {tensor.text}")
        if found % ALIGNMENT:
            raise BackendError(f"a tensor of a cuDNN graph lies at no multiple of {ALIGNMENT} bytes: {tensor.text}")
        return found

    def tune(self, device: Timing, most: int = MOST_TIMED) -> None:
        """Takes the fastest of the first `most` plans that can be built and run, timed on memory of its own.

        A plan that fails, or for which there is no memory, is left out; where none runs, the one there was stays.
        """
        plans = [self.plan, *(p for _, p in zip(range(most - 1), self._further, strict=False))]
        if len(plans) < 2:
            return
        try:
            held = {t.uid: device.reserve(t.span * t.dtype.itemsize) for t in self.description.stored}
        except BackendError as reason:
            log.warning("plans of a cuDNN graph are not timed: %s", reason)
            return
        addresses = {uid: block.address for uid, block in held.items()}
        times = {plan: self._timed(plan, device, addresses) for plan in plans}
        best = min(plans, key=lambda plan: times[plan])
        if times[best] < float("inf"):
            self.plan = best

    def _timed(self, plan: Plan, device: Timing, addresses: Mapping[int, int]) -> float:
        try:
            space = device.reserve(max(plan.workspace, 1))
            call = self._bound(plan, addresses, space.address)
            device.seconds(call)
            return min(device.seconds(call) for _ in range(3))
        except BackendError as reason:
            log.debug("plan %s is left out: %s", plan.name, reason)
            return float("inf")


def _scalar(tensor: Tensor) -> Array:
    return np.full(1, tensor.scalar, tensor.dtype.numpy)


def _shown(description: Description) -> str:
    return "+".join(op.word("mode") if op.kind == "pointwise" else op.kind for op in description.operations)


def planned(
    module: Frontend, description: Description, stream: Callable[[], int], settings: Mapping[str, object]
) -> PlannedGraph:
    """A graph with its plans; `settings` are the frontend's for a graph: a handle, or a device that is described.

    Raises `GraphUnsupported` where cuDNN has no plan for it, `DeviceMemoryFull` where memory is short, `BackendError`
    for any other failure.
    """
    with _explained(module, f"planning {_shown(description)}"):
        graph = drawn(module, description, settings)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([_member(module.heur_mode, n) for n in ("A", "B", "FALLBACK")])
        notes = [getattr(module.numerical_note, n, None) for n in _barred(description)]
        graph.deselect_numeric_notes([note for note in notes if note is not None])
    return PlannedGraph(module, graph, description, stream)


def planner(description: Description, stream: Callable[[], int]) -> PlannedGraph:
    """The description's plans on the current GPU. What cuDNN had no plan for once is not asked for again.

    Raises as `planned` and `frontend` do.
    """
    refused = _refused.get(description.key)
    if refused is not None:
        raise GraphUnsupported(refused)
    module = frontend()
    try:
        return planned(module, description, stream, {"handle": _handle(module)})
    except GraphUnsupported as reason:
        _refused[description.key] = str(reason)
        raise


_refused: dict[str, str] = {}
_local = threading.local()


def _handle(module: Frontend) -> object:
    """This thread's handle: cuDNN's are for one thread each."""
    held = getattr(_local, "handles", None)
    if held is None:
        held = _local.handles = {}
    if id(module) not in held:
        with _explained(module, "opening cuDNN"):
            held[id(module)] = module.create_handle()
    return cast(object, held[id(module)])


# ── failures ─────────────────────────────────────────────────────────────────────────────────────────────────────

_FULL = ("ALLOC_FAILED", "OUT_OF_MEMORY", "out of memory", "cudaErrorMemoryAllocation")
_UNSUPPORTED = ("NOT_SUPPORTED", "not supported", "No valid engine", "no engine")


@contextmanager
def _explained(module: Frontend, doing: str) -> Iterator[None]:
    """Makes one sentence of whatever cuDNN or its frontend raises."""
    try:
        yield
    except BackendError:
        raise
    except module.cudnnGraphNotSupportedError as error:
        if any(word in str(error) for word in _FULL):
            raise DeviceMemoryFull(f"the GPU's memory is full ({doing}): {_line(error)}") from error
        raise GraphUnsupported(f"cuDNN has no plan ({doing}): {_line(error)}") from error
    except (RuntimeError, ValueError) as error:
        if any(word in str(error) for word in _FULL):
            raise DeviceMemoryFull(f"the GPU's memory is full ({doing}): {_line(error)}") from error
        if isinstance(error, ValueError) or any(word in str(error) for word in _UNSUPPORTED):
            raise GraphUnsupported(f"cuDNN does not take the graph ({doing}): {_line(error)}") from error
        raise BackendError(f"cuDNN failed ({doing}): {_line(error)}") from error
    except MemoryError as error:
        raise DeviceMemoryFull(f"memory is full ({doing})") from error


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
