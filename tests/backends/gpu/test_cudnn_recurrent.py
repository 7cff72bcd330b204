"""LSTM, GRU and RNN on the device against their definitions in float64, which ONNX Runtime is compared with, too."""

from __future__ import annotations

from itertools import product

import numpy as np
import onnxruntime
import pytest
from fake_cupy import FakeCupy
from hosted import compiled_by_nvrtc, compiler, nvrtc
from hosts import host_backend, kernels
from onnx import TensorProto, helper
from test_cudnn_executor import static
from test_device import device_of
from test_onednn_executor import feeds_for, worst

import taso
from taso.backends.cudnn.backend import CudnnBackend
from taso.backends.cudnn.sources.recurrence import Cell, gru, gru_end, gru_reset, lstm, rnn
from taso.backends.places import SCRATCH, Place
from taso.graph.evaluate import evaluate_graph

pytestmark = pytest.mark.skipif(not compiler(), reason="there is no C++ compiler here")

GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
STEPS, BATCH, INPUTS, SIZE = 4, 3, 5, 6


def model(
    op: str, direction: str = "forward", more: str = "", steps: int = STEPS, lengths: list[int] | None = None,
    constant: bool = True, read: tuple[str, ...] = ("Y", "Y_h", "Y_c"), **attrs: object,
) -> taso.Graph:  # fmt: skip
    """A layer; `more` are letters of its inputs beside X, W and R: b(ias), h, c, p(eepholes), l(engths).

    Of its outputs those that are `read` go out of the graph.
    """
    ways, gates = 2 if direction == "bidirectional" else 1, GATES[op]
    shapes = {
        "X": (steps, BATCH, INPUTS), "W": (ways, gates * SIZE, INPUTS), "R": (ways, gates * SIZE, SIZE),
        "b": (ways, 2 * gates * SIZE), "l": (BATCH,), "h": (ways, BATCH, SIZE), "c": (ways, BATCH, SIZE),
        "p": (ways, 3 * SIZE),
    }  # fmt: skip
    asked = ["X", "W", "R", *(n if n in more else "" for n in ("blhcp" if op == "LSTM" else "blh"))]
    while not asked[-1]:
        asked.pop()
    weights = [n for n in asked if n in ("W", "R", "b", "p", "l")] if constant else ["l"] * ("l" in asked)
    random = np.random.default_rng(1)
    arrays = {n: random.standard_normal(shapes[n]).astype(np.float32) for n in weights if n != "l"}
    held = [helper.make_tensor(n, TensorProto.FLOAT, a.shape, a.reshape(-1)) for n, a in arrays.items()]
    if "l" in asked:
        held.append(helper.make_tensor("l", TensorProto.INT32, (BATCH,), lengths or [steps] * BATCH))
    given = [helper.make_tensor_value_info(n, TensorProto.FLOAT, shapes[n]) for n in asked if n and n not in weights]
    outs = ["Y", "Y_h", "Y_c"][: 3 if op == "LSTM" else 2]
    node = helper.make_node(op, asked, outs, hidden_size=SIZE, direction=direction, **attrs)
    made = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in outs if n in read]
    graph = helper.make_graph([node], "g", given, made, held)
    return taso.load(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9))


CASES = {
    **{f"{op}, {d}, '{more}'": model(op, d, more) for op, d, more in product(
        GATES, ("forward", "reverse", "bidirectional"), ("", "b", "bh"))},
    "LSTM of all inputs": model("LSTM", "bidirectional", "bhcpl"),
    "LSTM with a state c alone": model("LSTM", more="c"),
    "LSTM, coupled": model("LSTM", more="bp", input_forget=1),
    "LSTM of computed weights": model("LSTM", "bidirectional", "bhcp", constant=False),
    "LSTM of other activations": model("LSTM", more="b", activations=["Tanh", "Relu", "Sigmoid"]),
    "GRU, late": model("GRU", "bidirectional", "bh", linear_before_reset=1),
    "GRU, late and without a state": model("GRU", more="b", linear_before_reset=1),
    "GRU of computed weights": model("GRU", "bidirectional", "bhl", constant=False),
    "RNN of two activations": model("RNN", "bidirectional", "bh", activations=["Relu", "Tanh"]),
    **{f"{op}, {d}, of which {read} is read": model(op, d, "b", read=(read,)) for op, d, read in product(
        GATES, ("forward", "bidirectional"), ("Y", "Y_h"))},
    "one step": model("GRU", "bidirectional", "b", steps=1),
}  # fmt: skip


@pytest.mark.parametrize("names", [list(CASES)[i::4] for i in range(4)])
def test_recurrent_layers_run_on_the_device_as_their_definitions_say(names: list[str]) -> None:
    backend = host_backend()
    programs = {name: backend.compile(CASES[name]) for name in names}
    for name, program in programs.items():
        graph = CASES[name]
        assert {how for _, how in program.operators} == {"own"} and static(program).replays == 1, name
        for seed in (0, 1):
            feeds = feeds_for(graph, seed)
            assert worst(program(feeds), evaluate_graph(graph, feeds, wide=True)) <= 2e-6, name


@pytest.mark.parametrize("op", GATES)
def test_they_give_what_onnx_runtime_gives(op: str) -> None:
    graph = model(op, "bidirectional", "bh")
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    proto = taso.export_onnx(graph).SerializeToString()
    session = onnxruntime.InferenceSession(proto, options, providers=["CPUExecutionProvider"])
    feeds = feeds_for(graph)
    wanted = dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))
    assert worst(host_backend().compile(graph)(feeds), wanted) <= 1e-5


@pytest.mark.parametrize("name", ["LSTM of all inputs", "GRU, late"])
def test_a_layer_is_captured_and_runs_again(name: str) -> None:
    graph = CASES[name]
    program = CudnnBackend(device=device_of(FakeCupy(compiler=kernels()))).compile(graph)
    for seed in (0, 1, 0):
        feeds = feeds_for(graph, seed)
        assert worst(program(feeds), evaluate_graph(graph, feeds, wide=True)) <= 2e-6


LEFT = {
    "clip": model("LSTM", clip=0.5), "short sequences": model("GRU", more="l", lengths=[4, 2, 1]),
    "another activation": model("RNN", activations=["Softsign"]),
}  # fmt: skip


@pytest.mark.parametrize("what", LEFT)
def test_what_is_not_covered_goes_to_the_host(what: str) -> None:
    graph = LEFT[what]
    program, feeds = host_backend().compile(graph), feeds_for(graph)
    assert {how for _, how in program.operators} == {"evaluated"}
    assert worst(program(feeds), evaluate_graph(graph, feeds, wide=True)) <= 2e-6


@pytest.mark.skipif(nvrtc() is None, reason="NVRTC is not installed")
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_nvrtc_compiles_the_kernels_of_steps(architecture: str) -> None:
    names = ("x", "g", "bias", "before", "peep", "last", "made", "h")
    given = {n: Place(SCRATCH, i) for i, n in enumerate(names)}
    for make, op in ((lstm, "LSTM"), (gru, "GRU"), (gru_reset, "GRU"), (gru_end, "GRU"), (rnn, "RNN")):
        cell = Cell(op, ("sigmoid", "tanh", "relu"), 3, 6)
        assert compiled_by_nvrtc(make(cell, given).source.code, architecture) == ""
