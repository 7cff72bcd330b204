"""What the frontend is told of a description: against a stand-in that records it, and against the installed package."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import pytest
from describing_cases import Given, made, part
from recording import FakeCudnn, FakeTensor, Unsupported

from taso.backends.cudnn import frontend as front
from taso.backends.cudnn.attention import Heads, attention
from taso.backends.cudnn.describing import described
from taso.backends.cudnn.description import BF16, FLOAT32, FP16, TF32, Description, Operation, Tensor
from taso.backends.cudnn.elementwise import RULES
from taso.backends.cudnn.frontend import DeviceMemoryFull, Frontend, GraphUnsupported, PlannedGraph, drawn, planned
from taso.backends.lowering import LAST, PLAIN
from taso.graph.errors import BackendError, BackendUnavailable
from taso.graph.operator import AttrValue
from taso.graph.types import DType

INSTALLED = importlib.util.find_spec("cudnn") is not None
needs_cudnn = pytest.mark.skipif(not INSTALLED, reason="nvidia-cudnn-frontend is not installed")


# ── descriptions of everything that there is ─────────────────────────────────────────────────────────────────────


def graph_of(given: list[Given], parts: list[object], layout: str = PLAIN, precision: str = FLOAT32) -> Description:
    launch = described(made(given, parts, layout), precision)  # type: ignore[arg-type]  # parts of all kinds
    assert launch is not None
    return launch.description


def block(layout: str = PLAIN, precision: str = FLOAT32) -> Description:
    weights = [Given((8, 8, 3, 3), constant=True), Given((8,), constant=True)]
    operands = [Given((1, 8, 6, 6), layout), *weights, Given((1, 8, 6, 6), layout)]
    parts = [part("Conv", 0, 1, 2, pads=(1, 0, 1, 2), strides=(1, 1)), part("Add", -1, 3), part("Relu", -1)]
    return graph_of(operands, list(parts), layout, precision)


def everything() -> dict[str, Description]:
    """A description for every kind of operation and every pointwise mode."""
    x, image = Given((2, 3, 4, 5)), Given((1, 4, 6, 6))
    heads, three = Heads((2, 4, 5, 8)), Given((4,), constant=True)
    one: dict[str, AttrValue] = {"axis": -1}
    found = {
        "conv": block(), "conv last": block(LAST, BF16),
        "dgrad": graph_of([image, Given((4, 2, 3, 3), constant=True)], [part("ConvTranspose", 0, 1, strides=(2, 2))]),
        "matmul": graph_of([Given((2, 5, 8)), Given((8, 4))], [part("MatMul", 0, 1)], precision=TF32),
        "gemm": graph_of([Given((5, 8)), Given((4, 8)), Given((4,))], [part("Gemm", 0, 1, 2, transB=1, alpha=0.5)]),
        "layernorm": graph_of([x, Given((5,)), Given((5,))], [part("LayerNormalization", 0, 1, 2, **one)]),
        "rmsnorm": graph_of([x, Given((5,))], [part("RMSNormalization", 0, 1, **one)]),
        "instancenorm": graph_of([image, three, three], [part("InstanceNormalization", 0, 1, 2)]),
        "batchnorm": graph_of([image, *[three] * 4], [part("BatchNormalization", 0, 1, 2, 3, 4)]),
        "softmax": graph_of([x], [part("Softmax", 0, axis=1)]),
        "attention": attention(heads, heads, heads, heads, 0.5, True, (1, 1, 5, 5)),
    }  # fmt: skip
    for name in ("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2"):
        found[name] = graph_of([x], [part(name, 0, axes=(1,))])
    for name in RULES:
        inputs = (0, 1) if name in {"Add", "Sub", "Mul", "Div", "Pow", "PRelu", "Sum", "Mean", "Max", "Min"} else (0,)
        attrs: dict[str, AttrValue] = {"min": -1.0, "max": 1.0} if name == "Clip" else {}
        found[name] = graph_of([x, Given((5,))][: len(inputs)], [part(name, *inputs, **attrs)])
    return found


EVERYTHING = everything()


# ── what is said of tensors and operations ───────────────────────────────────────────────────────────────────────


def recorded(description: Description) -> tuple[FakeCudnn, dict[int, FakeTensor]]:
    module = FakeCudnn()
    drawn(module, description, {"handle": "h"})
    return module, {cast(int, t.said["uid"]): t for t in module.graphs[0].tensors}


@pytest.mark.parametrize("name", EVERYTHING)
def test_the_frontend_is_told_of_every_tensor_what_the_description_says(name: str) -> None:
    description = EVERYTHING[name]
    module, tensors = recorded(description)
    assert set(tensors) == {t.uid for t in description.tensors}
    for tensor in description.tensors:
        said = tensors[tensor.uid].said
        assert tuple(cast("list[int]", said["dim"])) == tensor.dims
        assert tuple(cast("list[int]", said["stride"])) == tensor.strides
        assert said["data_type"] == f"data_type.{front._TYPES[tensor.dtype]}"
        if tensor.uid in description.produced:
            assert said["output"] is not tensor.virtual
        else:
            assert said["is_pass_by_value"] is (tensor.scalar is not None)


@pytest.mark.parametrize("name", EVERYTHING)
def test_the_frontend_is_told_of_every_operation_with_its_inputs(name: str) -> None:
    description = EVERYTHING[name]
    module, tensors = recorded(description)
    for operation in description.operations:
        made_by = tensors[operation.output]
        assert made_by.made_by == (operation.word("mode") if operation.kind == "pointwise" else operation.kind)
        assert made_by.inputs == tuple(tensors[uid] for _, uid in operation.inputs)


def test_a_convolutions_attributes_are_said_by_name() -> None:
    module, _ = recorded(block())
    call = next(c for c in module.graphs[0].calls if c.method == "conv_fprop")
    assert call.named["pre_padding"] == [1, 0] and call.named["post_padding"] == [1, 2]
    assert call.named["stride"] == [1, 1] and call.named["dilation"] == [1, 1]


def test_types_and_the_handle_are_said_of_the_graph() -> None:
    module, _ = recorded(block())
    types = {f"{what}_data_type": "data_type.FLOAT" for what in ("io", "intermediate", "compute")}
    assert module.graphs[0].settings == {**types, "handle": "h"}


def test_causal_attention_is_said_as_a_band() -> None:
    module, _ = recorded(EVERYTHING["attention"])
    call = next(c for c in module.graphs[0].calls if c.method == "sdpa")
    assert call.named["diagonal_alignment"] == "diagonal_alignment.TOP_LEFT"
    assert call.named["diagonal_band_right_bound"] == 0 and call.named["generate_stats"] is False


# ── against the installed package ────────────────────────────────────────────────────────────────────────────────


def parameters(method: str) -> list[set[str]]:
    """Names of the parameters of each overload of a method of the compiled graph, from its documentation."""
    compiled = importlib.import_module("cudnn")._compiled_module.backend_graph
    found = []
    for line in (getattr(compiled, method).__doc__ or "").splitlines():
        if line.startswith(f"{method}(self"):
            found.append({p.partition(":")[0].strip() for p in split_outside(line[len(method) + 1 : line.rindex(")")])})
    return found


def split_outside(text: str) -> list[str]:
    """Parts between commas that are in no brackets."""
    parts, depth = [""], 0
    for c in text:
        depth += (c in "[(") - (c in "])")
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return parts


@needs_cudnn
@pytest.mark.parametrize("name", EVERYTHING)
def test_every_call_fits_a_signature_of_the_installed_package(name: str) -> None:
    module, _ = recorded(EVERYTHING[name])
    for call in module.graphs[0].calls:
        if call.method == "tensor":
            inspect.signature(importlib.import_module("cudnn").pygraph.tensor).bind(None, **call.named)
            continue
        overloads = parameters(call.method)
        assert any(set(call.named) | {"self"} <= o and len(call.positional) < len(o) for o in overloads), call


@needs_cudnn
@pytest.mark.parametrize("name", EVERYTHING)
def test_the_installed_package_makes_the_same_graph(name: str) -> None:
    """As far as it goes without a driver: nodes and tensors."""
    description = EVERYTHING[name]
    graph = drawn(cast(Frontend, importlib.import_module("cudnn")), description, {})
    nodes = graph.nodes  # type: ignore[attr-defined]  # of the installed package only
    assert len(nodes) == len(description.operations)
    for node, operation in zip(nodes, description.operations, strict=True):
        assert [t.uid for t in node.inputs.values()] == [uid for _, uid in operation.inputs]
        out = next(iter(node.outputs.values()))
        tensor = description.by_uid[operation.output]
        assert (out.uid, tuple(out.dim), tuple(out.stride)) == (tensor.uid, tensor.dims, tensor.strides)
        assert out.is_virtual is tensor.virtual


@needs_cudnn
def test_planning_methods_take_what_they_are_given() -> None:
    real = importlib.import_module("cudnn")
    module = FakeCudnn([16])
    graph = planned(module, block(), lambda: 7, {})
    graph.bind({t.uid: 16 for t in graph.description.stored}, 32)()
    named = {c.method: c for c in module.graphs[0].calls}
    for method in (
        "validate", "build_operation_graph", "create_execution_plans", "deselect_numeric_notes", "build_plan_at_index",
        "execute_plan_at_index",
    ):  # fmt: skip
        inspect.signature(getattr(real.pygraph, method)).bind(None, **named[method].named)
    for method in ("get_execution_plan_count", "get_plan_name_at_index", "get_workspace_size_plan_at_index"):
        assert hasattr(real.pygraph, method)
    inspect.signature(real.set_stream).bind(handle=None, stream=0)


@needs_cudnn
def test_all_enumerations_that_are_named_are_there() -> None:
    real = importlib.import_module("cudnn")
    for name in front._TYPES.values():
        assert hasattr(real.data_type, name)
    for precision in (FLOAT32, TF32, FP16):
        for note in front._barred(block(precision=precision)):
            assert hasattr(real.numerical_note, note)
    assert all(hasattr(real.heur_mode, mode) for mode in ("A", "B", "FALLBACK"))
    assert issubclass(real.cudnnGraphNotSupportedError, Exception)


# ── plans ────────────────────────────────────────────────────────────────────────────────────────────────────────


def notes(description: Description) -> set[object]:
    module = FakeCudnn()
    planned(module, description, lambda: 0, {})
    call = next(c for c in module.graphs[0].calls if c.method == "deselect_numeric_notes")
    return {str(n).partition(".")[2] for n in cast("list[object]", call.named["notes"])}


def test_float32_bars_tensor_cores_and_tf32_does_not() -> None:
    assert {"TENSOR_CORE", "DOWN_CONVERT_INPUTS"} <= notes(block())
    assert "TENSOR_CORE" not in notes(block(precision=TF32)) and "DOWN_CONVERT_INPUTS" in notes(block(precision=TF32))
    assert not {"TENSOR_CORE", "DOWN_CONVERT_INPUTS"} & notes(block(precision=FP16))


def test_graphs_without_products_bar_no_tensor_cores() -> None:
    assert "TENSOR_CORE" not in notes(EVERYTHING["Relu"]) and "NONDETERMINISTIC" in notes(EVERYTHING["Relu"])


def test_the_first_plan_that_builds_is_taken() -> None:
    module = FakeCudnn([Unsupported("not this one"), RuntimeError("CUDNN_STATUS_NOT_SUPPORTED"), 64, 0])
    graph = planned(module, block(), lambda: 0, {})
    assert graph.name == "plan 2" and graph.workspace == 64 and module.graphs[0].built == [2]


def test_a_graph_of_which_no_plan_builds_is_unsupported_and_says_why() -> None:
    with pytest.raises(GraphUnsupported, match="conv_fprop.*no room for it"):
        planned(FakeCudnn([Unsupported("no room for it")]), block(), lambda: 0, {})
    with pytest.raises(GraphUnsupported, match="no plan"):
        planned(FakeCudnn([]), block(), lambda: 0, {})


@pytest.mark.parametrize("stage", ["validate", "build_operation_graph", "create_execution_plans"])
@pytest.mark.parametrize("failure, kind", [
    (Unsupported("no engine"), GraphUnsupported),
    (RuntimeError("finalize failed: CUDNN_STATUS_NOT_SUPPORTED"), GraphUnsupported),
    (ValueError("dims do not broadcast"), GraphUnsupported),
    (RuntimeError("CUDNN_STATUS_ALLOC_FAILED"), DeviceMemoryFull),
    (RuntimeError("cudaErrorMemoryAllocation: out of memory"), DeviceMemoryFull),
    (MemoryError(), DeviceMemoryFull),
    (RuntimeError("CUDNN_STATUS_INTERNAL_ERROR"), BackendError),
])  # fmt: skip
def test_failures_are_told_apart(stage: str, failure: Exception, kind: type[BackendError]) -> None:
    with pytest.raises(BackendError) as caught:
        planned(FakeCudnn(failing={stage: failure}), block(), lambda: 0, {})
    assert type(caught.value) is kind and "\n" not in str(caught.value)


def test_an_error_of_ours_is_passed_on() -> None:
    with pytest.raises(KeyError):
        planned(FakeCudnn(failing={"validate": KeyError("a defect")}), block(), lambda: 0, {})


def test_operations_that_the_installed_frontend_does_not_have_are_unsupported() -> None:
    pool = graph_of([Given((1, 4, 6, 6))], [part("MaxPool", 0, kernel_shape=(2, 2))])
    with pytest.raises(GraphUnsupported, match="no graph.resample"):
        planned(FakeCudnn(lacks=frozenset({"resample"})), pool, lambda: 0, {})


def test_types_that_the_frontend_does_not_have_are_unsupported() -> None:
    odd = Tensor(1, (1, 1), (1, 1), DType.UINT16)
    out = Tensor(2, (1, 1), (1, 1), DType.UINT16)
    same = Operation.of("pointwise", {"IN_0": 1}, {"OUT_0": 2}, {"mode": "identity"})

    class Few(FakeCudnn):
        data_type = type("data_type", (), {"FLOAT": 1})  # type: ignore[assignment]  # an enumeration of one

    with pytest.raises(GraphUnsupported, match="data_type.UINT16"):
        planned(Few(), Description((odd, out), (same,)), lambda: 0, {})


# ── running ──────────────────────────────────────────────────────────────────────────────────────────────────────


def addresses(graph: PlannedGraph) -> dict[int, int]:
    return {t.uid: 1024 * (1 + i) for i, t in enumerate(graph.description.stored)}


def test_a_run_binds_addresses_and_numbers_on_the_stream_there_is_then() -> None:
    module, streams = FakeCudnn([256]), [5]
    graph = planned(module, EVERYTHING["gemm"], lambda: streams[0], {})
    given = addresses(graph)
    run = graph.bind(given, 4096)
    streams[0] = 9
    run()
    ran = module.graphs[0].ran[0]
    pointers = cast("dict[int, int]", ran["tensor_dict"])
    assert module.streams[-1][1] == 9 and ran["workspace"] == 4096 and ran["index"] == 0
    assert {uid: p for uid, p in pointers.items() if uid in given} == given
    (number,) = (t for t in graph.description.tensors if t.scalar is not None)
    held = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_float * 1).from_address(pointers[number.uid]))
    assert held[0] == np.float32(0.5) and set(pointers) == {*given, number.uid}


def test_a_plan_that_needs_no_workspace_is_given_none() -> None:
    module = FakeCudnn([0])
    graph = planned(module, block(), lambda: 0, {})
    graph.bind(addresses(graph), 4096)()
    assert module.graphs[0].ran[0]["workspace"] is None


def test_addresses_that_are_missing_or_odd_are_refused() -> None:
    graph = planned(FakeCudnn(), block(), lambda: 0, {})
    given = addresses(graph)
    with pytest.raises(BackendError, match="no address"):
        graph.bind({}, 0)
    given[next(iter(given))] += 4
    with pytest.raises(BackendError, match="multiple of 16"):
        graph.bind(given, 0)


@pytest.mark.parametrize("failure, kind", [
    (RuntimeError("CUDNN_STATUS_EXECUTION_FAILED"), BackendError), (RuntimeError("ALLOC_FAILED"), DeviceMemoryFull),
])  # fmt: skip
def test_a_run_that_fails_is_one_sentence(failure: Exception, kind: type[BackendError]) -> None:
    graph = planned(FakeCudnn(runs={0: failure}), block(), lambda: 0, {})
    with pytest.raises(BackendError, match="running a graph") as caught:
        graph.bind(addresses(graph), 0)()
    assert type(caught.value) is kind


# ── timing ───────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Block:
    address: int


@dataclass
class Clock:
    """A device on which plan n takes `times[n]`, with room for blocks of `room` bytes."""

    module: FakeCudnn
    times: list[float]
    room: int = 1 << 20
    reserved: list[int] = field(default_factory=list)

    def reserve(self, size: int) -> Block:
        if size > self.room:
            raise BackendError("the GPU's memory is full")
        self.reserved.append(size)
        return Block(4096 * len(self.reserved))

    def seconds(self, call: Callable[[], object]) -> float:
        call()
        return self.times[cast(int, self.module.graphs[0].ran[-1]["index"])]


def tuned(module: FakeCudnn, times: list[float], most: int = 5, room: int = 1 << 20) -> PlannedGraph:
    graph = planned(module, block(), lambda: 0, {})
    graph.tune(Clock(module, times, room), most)
    return graph


def test_the_fastest_of_the_best_few_is_taken() -> None:
    assert tuned(FakeCudnn([0, 8, 16]), [3.0, 1.0, 2.0]).name == "plan 1"
    assert tuned(FakeCudnn([0, 8, 16]), [3.0, 2.0, 1.0], most=2).name == "plan 1"


def test_plans_that_fail_or_do_not_fit_are_left_out_of_the_timing() -> None:
    broken = RuntimeError("CUDNN_STATUS_EXECUTION_FAILED")
    assert tuned(FakeCudnn([0, 8, 16], runs={1: broken}), [3.0, 1.0, 2.0]).name == "plan 2"
    assert tuned(FakeCudnn([0, 1 << 30, 16]), [3.0, 1.0, 2.0]).name == "plan 2"
    assert tuned(FakeCudnn([0, 8], runs={0: broken, 1: broken}), [1.0, 1.0]).name == "plan 0"
    assert tuned(FakeCudnn([0, 8]), [2.0, 1.0], room=1).name == "plan 0"


# ── the package itself ───────────────────────────────────────────────────────────────────────────────────────────


def test_a_missing_package_is_said_with_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    front.frontend.cache_clear()
    monkeypatch.setitem(sys.modules, "cudnn", None)
    with pytest.raises(BackendUnavailable, match="pip install"):
        front.frontend()


@pytest.mark.parametrize("failure", [OSError("libcudnn.so.9: cannot open"), RuntimeError("no libcudnn")])
def test_a_library_that_does_not_load_is_said(monkeypatch: pytest.MonkeyPatch, failure: Exception) -> None:
    def broken(name: str) -> object:
        raise failure

    front.frontend.cache_clear()
    monkeypatch.setattr(front.importlib, "import_module", broken)
    with pytest.raises(BackendUnavailable, match="cannot be loaded.*libcudnn"):
        front.frontend()


def test_what_was_refused_once_is_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    module = FakeCudnn([])
    monkeypatch.setattr(front, "frontend", lambda: module)
    monkeypatch.setattr(front, "_refused", {})
    for _ in range(2):
        with pytest.raises(GraphUnsupported):
            front.planner(block(), lambda: 0)
    assert len(module.graphs) == 1 and module.handles == 1


def test_versions_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front, "frontend", lambda: FakeCudnn())
    assert front.about() == "cuDNN 9.9.9; frontend 0.0"
