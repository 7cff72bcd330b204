"""`torch.compile(model, backend="taso")`: what PyTorch captures is converted, optimized, and run by taso.

PyTorch finds the backend by its entry point once taso is installed; importing this module makes it known, too. Settings
of `taso.optimize`, `backend` and `threads` come as `torch.compile(model, backend="taso", options={"time_limit": 60})`.

Dynamo captures a graph; at the first call with arguments of new shapes it goes through `torch.export` and `torch.onnx`,
with the module's parameters as constants, and its first results are compared with those of the eager graph. What cannot
be converted soundly (gradients are wanted, inputs are written to, numbers are random, outputs share memory, operators
that ONNX lacks) runs eagerly, with one `FallbackWarning` that says why.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Protocol, Union, cast

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from taso import api
from taso.backends.base import Executable
from taso.backends.lowering import FLOAT32
from taso.graph.errors import FallbackWarning, TasoError
from taso.search.verify import relative_error, tolerance_of
from taso.session import SECONDS

log = logging.getLogger(__name__)

NAME = "taso"
GROUP = "torch_dynamo_backends"
SIGNATURES = 16
"""Programs that are kept for one graph, each for other shapes or weights; what comes beyond runs eagerly."""
REBUILDS = 3
"""Times that weights may have been changed before a graph is left to PyTorch."""

Array = NDArray[np.generic]


class Storage(Protocol):
    def data_ptr(self) -> int: ...


class Tensor(Protocol):
    """A `torch.Tensor`, as far as it is used."""

    @property
    def shape(self) -> Sequence[int]: ...
    @property
    def dtype(self) -> object: ...
    @property
    def device(self) -> object: ...
    @property
    def layout(self) -> object: ...
    @property
    def requires_grad(self) -> bool: ...
    def detach(self) -> Tensor: ...
    def clone(self) -> Tensor: ...
    def contiguous(self) -> Tensor: ...
    def numpy(self) -> Array: ...
    def view(self, what: object) -> Tensor: ...
    def data_ptr(self) -> int: ...
    def is_inference(self) -> bool: ...
    def untyped_storage(self) -> Storage: ...


class FxNode(Protocol):
    op: str
    target: object


class FxGraph(Protocol):
    nodes: Sequence[FxNode]


class GraphModule(Protocol):
    graph: FxGraph

    def __call__(self, *args: object) -> Sequence[object]: ...


class Program(Protocol):
    """A `torch.export.ExportedProgram`."""

    graph: FxGraph
    graph_signature: object

    def run_decompositions(self) -> Program: ...


Options = Mapping[str, object]
Signature = tuple[object, ...]
Outputs = Union[tuple[object, ...], "list[object]"]
_BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


class _Torch:
    """PyTorch, imported when a graph is there to be compiled."""

    def __init__(self) -> None:
        self.torch = importlib.import_module("torch")

    def is_tensor(self, thing: object) -> bool:
        return isinstance(thing, self.torch.Tensor)

    def is_plain(self, thing: object) -> bool:
        return type(thing) in (self.torch.Tensor, self.torch.nn.Parameter)

    def is_constant(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter or a buffer of the module, and tells when it is changed."""
        belongs = isinstance(tensor, self.torch.nn.Parameter) or getattr(tensor, "_dynamo_static_input_type", None)
        return bool(belongs) and not tensor.is_inference()

    def wants_gradients(self, args: Sequence[object]) -> bool:
        grads = bool(self.torch.is_grad_enabled())
        return grads and any(self.is_tensor(a) and cast(Tensor, a).requires_grad for a in args)

    @contextlib.contextmanager
    def no_gradients(self) -> Iterator[None]:
        with self.torch.inference_mode(False), self.torch.no_grad():
            yield

    def array(self, tensor: Tensor) -> Array:
        """The elements as an array, which may share memory with the tensor."""
        plain = tensor.detach()
        if plain.dtype == self.torch.bfloat16:
            return plain.contiguous().view(self.torch.int16).numpy().view(_BFLOAT16)
        return plain.numpy()

    def tensor(self, array: Array) -> object:
        """An array's elements as a tensor, without a copy."""
        if array.dtype == _BFLOAT16:
            return self.torch.from_numpy(array.view(np.int16)).view(self.torch.bfloat16)
        return self.torch.from_numpy(array)

    def exported(self, module: object, inputs: tuple[object, ...]) -> Program:
        return cast(Program, self.torch.export.export(module, inputs, strict=False))

    def module(self, body: GraphModule, args: Sequence[object], fixed: Mapping[int, object]) -> object:
        """A module whose inputs are the arguments that are not `fixed`; fixed tensors are buffers of it."""

        def forward(module: object, *inputs: object) -> Sequence[object]:
            given = iter(inputs)
            held = {i: getattr(module, f"fixed{i}", value) for i, value in fixed.items()}
            return body(*(held[i] if i in held else next(given) for i in range(len(args))))

        made = type("Captured", (self.torch.nn.Module,), {"forward": forward})()
        for i, value in fixed.items():
            if self.is_tensor(value):
                made.register_buffer(f"fixed{i}", cast(Tensor, value).detach())
        return made

    def is_random(self, node: FxNode) -> bool:
        return self.torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


class NotConvertible(TasoError):
    """Why a captured graph is left to PyTorch."""


def taso_backend(
    gm: GraphModule, example_inputs: Sequence[object], *, options: Options | None = None, mode: str | None = None
) -> Callable[..., Outputs]:
    """A function that computes what the captured graph `gm` computes: the backend that `torch.compile` calls.

    `options` are keywords of `taso.optimize` (its `time_limit` is `taso.session.SECONDS` unless given); `mode` is for
    PyTorch's own compiler and without effect. Conversion waits for the first call.
    """
    return Captured(gm, dict(options or {}))


@dataclass
class _Compiled:
    """A program for arguments of one signature. `versions` are those that the weights had.

    `held` are the weights: while they are there, no other tensor is where they are.
    """

    run: Executable
    names: list[str]
    inputs: list[int]
    versions: Signature
    held: list[Tensor]
    outputs: list[object]
    """What is returned: the name of an output, or what it is in any case."""
    sources: list[int | None]
    """For each output the argument that it is itself."""

    def feeds(self, torch: _Torch, args: Sequence[object]) -> dict[str, Array]:
        return {n: torch.array(cast(Tensor, args[i])) for n, i in zip(self.names, self.inputs, strict=True)}


@dataclass
class Captured:
    """A graph that Dynamo captured, with its programs by the shapes of the arguments."""

    gm: GraphModule
    options: dict[str, object]
    programs: dict[Signature, _Compiled | None] = field(default_factory=dict)
    rebuilds: int = 0
    warned: bool = False
    torch: _Torch = field(default_factory=_Torch)

    def __call__(self, *args: object) -> Outputs:
        program = self._program(args)
        if program is None:
            return cast(Outputs, self.gm(*args))
        found = program.run(program.feeds(self.torch, args))
        return tuple(
            args[source] if source is not None else self.torch.tensor(found[o.name]) if isinstance(o, _Output) else o
            for source, o in zip(program.sources, program.outputs, strict=True)
        )

    def _program(self, args: Sequence[object]) -> _Compiled | None:
        if self.torch.wants_gradients(args):
            self._warn("gradients are asked for; call it under torch.inference_mode() or torch.no_grad()")
            return None
        signature = tuple(self._signature(a) for a in args)
        if signature not in self.programs:
            self.programs[signature] = self._converted(args, len(self.programs))
        program = self.programs[signature]
        if program is not None and program.versions != self._versions(args):
            self.rebuilds += 1
            program = self.programs[signature] = self._converted(args, len(self.programs) - 1)
        return program

    def _signature(self, argument: object) -> object:
        if not self.torch.is_tensor(argument):
            # 0.0 and -0.0 are equal and are not the same; no NaN is equal to itself
            return type(argument), argument.hex() if isinstance(argument, float) else argument
        tensor = cast(Tensor, argument)
        constant = self.torch.is_constant(tensor)
        # modules that are built alike share a captured graph
        return tuple(tensor.shape), tensor.dtype, tensor.data_ptr() if constant else None

    def _versions(self, args: Sequence[object]) -> Signature:
        tensors = [cast(Tensor, a) for a in args if self.torch.is_tensor(a)]
        # PyTorch counts what is written to a tensor; what goes around it by .data is not noticed
        return tuple(getattr(t, "_version", 0) for t in tensors if self.torch.is_constant(t))

    def _converted(self, args: Sequence[object], others: int) -> _Compiled | None:
        try:
            if others >= SIGNATURES:
                raise NotConvertible(f"it was called with more than {SIGNATURES} different shapes or sets of weights")
            if self.rebuilds > REBUILDS:
                raise NotConvertible("its weights are changed again and again")
            with self.torch.no_gradients(), _without_advice():
                return _convert(self.torch, self.gm, args, self._versions(args), self.options)
        except Exception as error:
            # exporters fail in their own ways on a user's code, and the eager graph is there
            log.info("a graph stays with PyTorch", exc_info=True)
            self._warn(_first_line(error))
            return None

    def _warn(self, why: str) -> None:
        if not self.warned:
            self.warned = True
            said = f"torch.compile(backend='taso') leaves a graph to PyTorch, which runs it eagerly: {why}"
            warnings.warn(said, FallbackWarning, stacklevel=4)


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """Keeps back what exporters say of their own future; what is said of models comes through."""
    exporter = logging.getLogger("torch.onnx")
    before = exporter.level
    exporter.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            for category in (FutureWarning, DeprecationWarning):
                warnings.simplefilter("ignore", category)
            yield
    finally:
        exporter.setLevel(before)


@dataclass(frozen=True)
class _Output:
    name: str


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if isinstance(error, TasoError) and lines else " ".join([f"{type(error).__name__}:", *lines[:1]])


# ── conversion ───────────────────────────────────────────────────────────────────────────────────────────────────


def _convert(
    torch: _Torch, gm: GraphModule, args: Sequence[object], versions: Signature, options: Options
) -> _Compiled:  # fmt: skip
    """A program for such arguments; raises `NotConvertible`, or what an exporter raises."""
    _check_arguments(torch, args)
    fixed = {i: a for i, a in enumerate(args) if not torch.is_tensor(a) or torch.is_constant(cast(Tensor, a))}
    inputs = [i for i in range(len(args)) if i not in fixed]
    examples = tuple(cast(Tensor, args[i]).detach().clone() for i in inputs)
    exported = torch.exported(torch.module(gm, args, fixed), examples)
    _check_effects(torch, exported)
    # nothing is written to and nothing is random: the eager graph may run
    expected = list(gm(*args))
    sources = [next((i for i, a in enumerate(args) if a is out), None) for out in expected]
    _check_memory(torch, args, expected, sources)
    run, graph = _program(exported, options)
    if len(graph.input_names) != len(inputs):
        raise NotConvertible(f"of {len(inputs)} inputs {len(graph.input_names)} came through torch.onnx")
    tensors = [i for i, out in enumerate(expected) if torch.is_tensor(out)]
    if len(graph.outputs) != len(tensors):
        raise NotConvertible(f"of {len(tensors)} outputs {len(graph.outputs)} came through torch.onnx")
    outputs: list[object] = list(expected)
    for i, (name, _) in zip(tensors, graph.outputs, strict=True):
        outputs[i] = _Output(name)
    held = [cast(Tensor, a).detach() for a in fixed.values() if torch.is_tensor(a)]
    compiled = _Compiled(run, list(graph.input_names), inputs, versions, held, outputs, sources)
    _check_results(torch, compiled, args, expected, tolerance_of(graph, str(options.get("precision", FLOAT32))))
    return compiled


def _program(exported: Program, options: Options) -> tuple[Executable, api.Graph]:
    best = api.optimize(api.load(exported), **{"time_limit": SECONDS, **options})  # type: ignore[arg-type]  # checked there
    target = {name: options[name] for name in ("backend", "threads", "precision") if name in options}
    return api.compile(best, **target), best  # type: ignore[arg-type]  # optimize has checked it


def _check_arguments(torch: _Torch, args: Sequence[object]) -> None:
    for argument in args:
        if not torch.is_tensor(argument):
            if not isinstance(argument, (bool, int, float)):
                raise NotConvertible(f"an argument is a {type(argument).__name__}")
            continue
        tensor = cast(Tensor, argument)
        if not torch.is_plain(tensor):
            raise NotConvertible(f"an argument is a {type(tensor).__name__}, which may mean anything")
        if str(tensor.device) != "cpu":
            raise NotConvertible(f"a tensor is on the device {tensor.device}, and taso runs on the CPU")
        if str(tensor.layout) != "torch.strided":
            raise NotConvertible(f"a tensor has the layout {tensor.layout}")


def _check_effects(torch: _Torch, exported: Program) -> None:
    # what is written in place shows only where it has been made functional, and dropout at inference goes there
    functional = exported.run_decompositions()
    for spec in getattr(functional.graph_signature, "output_specs", ()):
        if spec.kind.name != "USER_OUTPUT":
            raise NotConvertible("it writes to its inputs or to buffers of the module")
    if any(torch.is_random(node) for node in functional.graph.nodes if node.op == "call_function"):
        raise NotConvertible("it draws random numbers")


def _check_memory(
    torch: _Torch, args: Sequence[object], outputs: Sequence[object], sources: Sequence[int | None]
) -> None:
    """Raises where writing to an output would change another tensor: copies would not."""
    held = {cast(Tensor, a).untyped_storage().data_ptr() for a in args if torch.is_tensor(a)}
    for output, source in zip(outputs, sources, strict=True):
        if not torch.is_tensor(output) or source is not None:
            continue
        where = cast(Tensor, output).untyped_storage().data_ptr()
        if where and where in held:
            raise NotConvertible("an output shares memory with an input or with another output")
        held.add(where)


def _check_results(
    torch: _Torch, compiled: _Compiled, args: Sequence[object], expected: Sequence[object], tolerance: float
) -> None:
    found = compiled.run(compiled.feeds(torch, args))
    for output, wanted in zip(compiled.outputs, expected, strict=True):
        if not isinstance(output, _Output):
            continue
        array, right = found[output.name], torch.array(cast(Tensor, wanted))
        if array.dtype != right.dtype or array.shape != right.shape:
            raise NotConvertible(
                f"an output is {right.dtype} of shape {right.shape}, and came out {array.dtype} of shape {array.shape}"
            )
        error = relative_error(array, right)
        if not error <= tolerance:
            raise NotConvertible(f"its results differ from the eager ones by {error:.1e}, more than {tolerance:.1e}")


# ── registration ─────────────────────────────────────────────────────────────────────────────────────────────────


def register() -> None:
    """Makes the name known to PyTorch where no entry point does: in a checkout that is not installed."""
    if not any(e.name == NAME for e in metadata.entry_points(group=GROUP)):
        registry = importlib.import_module("torch._dynamo")
        if NAME not in registry.list_backends():
            registry.register_backend(taso_backend, name=NAME)


register()

__all__ = ["Captured", "NotConvertible", "register", "taso_backend"]
