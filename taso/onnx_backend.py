"""ONNX's backend interface (`onnx.backend.base`): models are loaded, optimized and run, all in one call.

    import taso.onnx_backend
    outputs = taso.onnx_backend.run_model(model, [x])

The optimizer works with a formula of costs instead of measurements and with a small budget, so that preparing a model
is quick and gives the same program on every machine. `taso.optimize` is the way to a program that is fast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Union

import numpy as np
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TypeProto, ValueInfoProto, defs, helper
from onnx.backend.base import Backend, BackendRep, namedtupledict

from taso import api
from taso.backends.base import Backend as TasosBackend
from taso.backends.base import Executable
from taso.backends.reference import ReferenceBackend
from taso.backends.select import get_backend, on_cpu, on_gpu
from taso.graph.errors import BackendError, BackendUnavailable, InputError, TasoError

Array = NDArray[np.generic]
Inputs = Union[Array, Sequence[object], Mapping[str, object]]
Info = Sequence[tuple["np.dtype[np.generic]", tuple[int, ...]]]

BUDGET = 30
"""Graphs that the search takes off its queue when nothing else is said."""
IR_VERSION = 10


class TasoRep(BackendRep):
    """A prepared model: `graph` is what the optimizer made of it, `program` runs it."""

    def __init__(self, graph: api.Graph, program: Executable) -> None:
        self.graph = graph
        self.program = program
        self._outputs = namedtupledict("Outputs", [name for name, _ in graph.outputs])

    def run(self, inputs: Inputs, **kwargs: object) -> tuple[object, ...]:
        """The outputs, in the model's order and by name (`outputs[0]`, `outputs["y"]`).

        `inputs` is a sequence in the order of the model's inputs (initializers aside; None leaves out one that has a
        default), a mapping of names, or the one array. Raises `InputError` where they do not fit.
        """
        _refuse(kwargs)
        found = self.program(self._named(inputs))  # type: ignore[arg-type]  # what is no array (a sequence) is passed on
        return self._outputs(*(found[name] for name, _ in self.graph.outputs))

    def _named(self, inputs: Inputs) -> dict[str, object]:
        names = self.graph.input_names
        if isinstance(inputs, Mapping):
            return dict(inputs)
        given = [inputs] if isinstance(inputs, np.ndarray) else list(inputs)
        if len(given) > len(names):
            raise InputError(f"{len(given)} inputs were given, and the model has {len(names)}: {names}")
        objects = {n for n, v in zip(names, self.graph.inputs, strict=True) if v.type.other is not None}
        named = dict(zip(names, given, strict=False))
        # an empty optional is a value; of a tensor None says that it is left out
        return {name: value for name, value in named.items() if value is not None or name in objects}


class TasoBackend(Backend):
    """taso as an ONNX backend. Subclasses may set which of taso's backends runs, and how much is searched.

    Keywords of all methods: `backend` ("auto", "cudnn", "onednn", "reference"), `budget`, `threads`. Devices are "CPU"
    and, on machines with an NVIDIA GPU, "CUDA"; a number may follow, as in "CUDA:0".
    """

    backend: ClassVar[str] = "auto"
    budget: ClassVar[int] = BUDGET

    @classmethod
    def prepare(cls, model: ModelProto, device: str = "CPU", **kwargs: object) -> TasoRep:
        """Loads, optimizes and compiles `model`.

        "auto" is the backend of the device. Raises `ModelError` for a model that cannot be read, `BackendUnavailable`
        for a device that is not there, `BackendError` where no program can be made.
        """
        name, budget = kwargs.pop("backend", cls.backend), kwargs.pop("budget", cls.budget)
        threads = kwargs.pop("threads", None)
        _refuse(kwargs)
        if not (isinstance(name, str) and isinstance(budget, int) and isinstance(threads, (int, type(None)))):
            given = f"backend={name!r}, budget={budget!r}, threads={threads!r}"
            raise TasoError(f"{given}: the backend is a name, the others are numbers")
        backend = _backend_on(device, name, threads)
        graph = api.optimize(
            model, budget=budget, backend=ReferenceBackend(), verify=False, never_slower=False, progress=False
        )
        return TasoRep(graph, api.compile(graph, backend, threads))

    @classmethod
    def run_model(cls, model: ModelProto, inputs: Inputs, device: str = "CPU", **kwargs: object) -> tuple[object, ...]:
        """Outputs of `model` on `inputs` (as for `TasoRep.run`)."""
        return cls.prepare(model, device, **kwargs).run(inputs)

    @classmethod
    def run_node(
        cls, node: NodeProto, inputs: Inputs, device: str = "CPU", outputs_info: Info | None = None, **kwargs: object
    ) -> tuple[object, ...]:
        """Outputs of one node on `inputs`, one for each input name that is not empty.

        `opset_version` is the opset that the node is meant in, by default the newest that the installed onnx has.
        `outputs_info`, where it is given, states dtype and shape of each output; `TasoError` where they come out
        otherwise.
        """
        opset = kwargs.pop("opset_version", defs.onnx_opset_version())
        if not isinstance(opset, int):
            raise TasoError(f"opset_version must be a number, not {opset!r}")
        names = list(dict.fromkeys(name for name in node.input if name))
        found = cls.run_model(_model_of(node, _by_name(node, names, inputs), opset), inputs, device, **kwargs)
        for name, array, (dtype, shape) in zip(node.output, found, outputs_info or (), strict=False):
            if not isinstance(array, np.ndarray) or (array.dtype, array.shape) != (np.dtype(dtype), tuple(shape)):
                raise TasoError(f"output '{name}' of {node.op_type} is not of type {dtype} and shape {tuple(shape)}")
        return found

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Whether models run on `device`: "CPU", or "CUDA" where a GPU answers, with or without a number ("CUDA:0")."""
        try:
            _backend_on(device, "auto", None)
        except BackendError:
            return False
        return True

    @classmethod
    def is_compatible(cls, model: ModelProto, device: str = "CPU", **kwargs: object) -> bool:
        """Whether `model` can be read and `device` is there."""
        try:
            api.load(model)
        except TasoError:
            return False
        return cls.supports_device(device)


def _backend_on(device: str, name: str, threads: int | None) -> TasosBackend:
    """The backend that runs on a device: the one of that name, where it does."""
    kind, _, number = device.partition(":")
    if kind not in ("CPU", "CUDA") or number and not number.isdecimal():
        raise BackendUnavailable(f"taso's ONNX backend runs on the devices 'CPU' and 'CUDA', not on {device!r}")
    if kind == "CPU":
        return on_cpu(threads) if name == "auto" else get_backend(name, threads)
    if name not in ("auto", "cudnn"):
        raise BackendError(f"the backend '{name}' does not run on the device {device!r}; 'cudnn' does")
    return on_gpu(int(number) if number else None)


def _refuse(kwargs: Mapping[str, object]) -> None:
    if kwargs:
        raise TasoError(f"taso's ONNX backend knows no option '{next(iter(kwargs))}'")


def _by_name(node: NodeProto, names: Sequence[str], inputs: Inputs) -> dict[str, object]:
    if isinstance(inputs, Mapping):
        return {name: inputs[name] for name in names if name in inputs}
    given = [inputs] if isinstance(inputs, np.ndarray) else list(inputs)
    if len(given) != len(names):
        raise InputError(f"{node.op_type} has {len(names)} inputs {names}, and {len(given)} were given")
    return dict(zip(names, given, strict=True))


def _model_of(node: NodeProto, given: Mapping[str, object], opset: int) -> ModelProto:
    inputs = [helper.make_value_info(name, _type_of(value)) for name, value in given.items()]
    outputs = [ValueInfoProto(name=name) for name in node.output if name]
    graph = helper.make_graph([node], node.op_type, inputs, outputs)
    imports = {"": opset, node.domain: opset if node.domain == "" else 1}
    opsets = [helper.make_opsetid(domain, version) for domain, version in imports.items()]
    return helper.make_model(graph, opset_imports=opsets, ir_version=IR_VERSION)


def _type_of(value: object) -> TypeProto:
    if isinstance(value, (np.ndarray, np.generic)):
        code = helper.np_dtype_to_tensor_dtype(np.dtype(object) if value.dtype.kind in "US" else value.dtype)
        return helper.make_tensor_type_proto(code, value.shape)
    if isinstance(value, (list, tuple)) and value:
        element = _type_of(value[0])
        # the elements of a sequence need not have one shape
        element.tensor_type.ClearField("shape")
        return helper.make_sequence_type_proto(element)
    raise InputError(f"the type of the input {value!r} is not known; give an array, or a list of arrays")


prepare = TasoBackend.prepare
run_model = TasoBackend.run_model
run_node = TasoBackend.run_node
supports_device = TasoBackend.supports_device
is_compatible = TasoBackend.is_compatible

__all__ = ["TasoBackend", "TasoRep", "is_compatible", "prepare", "run_model", "run_node", "supports_device"]
