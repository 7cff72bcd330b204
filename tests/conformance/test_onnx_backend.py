"""The ONNX backend interface: inputs as lists and mappings, single nodes, refusals, the same program each time."""

from __future__ import annotations

import numpy as np
import onnx.parser
import pytest
from numpy.typing import NDArray
from onnx import ModelProto, helper

import taso.onnx_backend
from taso.graph.errors import BackendUnavailable, InputError, ModelError, TasoError

MODEL = """<ir_version: 8, opset_import: ["" : 17]>
g (float[2,3] x, float[3] b) => (float[2,3] sum, float[2,3] y) { sum = Add(x, b)  t = Identity(sum)  y = Relu(t) }"""
X = np.array([[1, -2, 3], [-4, 5, -6]], np.float32)
B = np.array([1, 1, -9], np.float32)


def model(text: str = MODEL) -> ModelProto:
    return onnx.parser.parse_model(text)


@pytest.mark.parametrize("inputs", [[X, B], (X, B), {"x": X, "b": B}, {"b": B, "x": X}])
@pytest.mark.parametrize("backend", ["reference", "auto"])
def test_inputs_come_in_order_or_by_name(inputs: object, backend: str) -> None:
    outputs = taso.onnx_backend.prepare(model(), backend=backend).run(inputs)  # type: ignore[arg-type]
    assert len(outputs) == 2
    assert np.array_equal(outputs[0], X + B)
    assert np.array_equal(outputs[1], np.maximum(X + B, 0))
    assert outputs["y"] is outputs[1]  # type: ignore[call-overload]  # names serve as indices, as in other backends


def test_one_array_is_the_one_input() -> None:
    one = model('<ir_version: 8, opset_import: ["" : 17]> g (float[2,3] x) => (float[2,3] y) { y = Neg(x) }')
    assert np.array_equal(taso.onnx_backend.run_model(one, X)[0], -X)


def test_inputs_that_have_an_initializer_may_be_left_out() -> None:
    text = MODEL.replace("{ sum", "<float[3] b = {2, 2, 2}> { sum", 1)
    rep = taso.onnx_backend.prepare(model(text), backend="reference")
    assert np.array_equal(rep.run([X])[0], X + 2)
    assert np.array_equal(rep.run([X, None])[0], X + 2)
    assert np.array_equal(rep.run([X, B])[0], X + B)


def test_nodes_run_alone() -> None:
    node = helper.make_node("Split", ["x", "s"], ["a", "b"], axis=1)
    a, b = taso.onnx_backend.run_node(node, [X, np.array([1, 2])], backend="reference")
    assert np.array_equal(a, X[:, :1]) and np.array_equal(b, X[:, 1:])
    old = helper.make_node("Clip", ["x"], ["y"], min=-1.0, max=1.0)
    assert np.array_equal(taso.onnx_backend.run_node(old, X, opset_version=6)[0], X.clip(-1, 1))
    left_out = helper.make_node("Clip", ["x", "", "high"], ["y"])
    assert np.array_equal(taso.onnx_backend.run_node(left_out, [X, np.float32(1).reshape(())])[0], X.clip(None, 1))
    sequence = helper.make_node("SequenceAt", ["s", "i"], ["y"])
    assert np.array_equal(taso.onnx_backend.run_node(sequence, [[X, B], np.array(1)], backend="reference")[0], B)


def test_a_node_must_give_what_was_said_of_it() -> None:
    node = helper.make_node("Relu", ["x"], ["y"])
    said: list[tuple[np.dtype[np.generic], tuple[int, ...]]] = [(np.dtype(np.float32), (2, 3))]
    taso.onnx_backend.run_node(node, [X], outputs_info=said)
    with pytest.raises(TasoError, match="'y' of Relu"):
        taso.onnx_backend.run_node(node, [X], outputs_info=[(np.dtype(np.float64), (2, 3))])


@pytest.mark.parametrize(
    "inputs, message",
    [
        ([X], "'b'.*missing"), ([X, B, B], "3 inputs were given, and the model has 2"), ({"x": X, "c": B}, "'c'"),
        ([X.astype(np.float64), B], "float64"), ([B, X], "'x'"), ([None, B], "'x'.*missing"),
    ],
)  # fmt: skip
def test_inputs_that_do_not_fit_are_refused(inputs: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        taso.onnx_backend.prepare(model(), backend="reference").run(inputs)  # type: ignore[arg-type]


def test_the_device_is_the_processor_or_a_gpu() -> None:
    supported: dict[str, bool] = {d: taso.onnx_backend.supports_device(d) for d in ("CPU", "CPU:0", "GPU", "CUDA:x")}
    assert supported == {"CPU": True, "CPU:0": True, "GPU": False, "CUDA:x": False}
    with pytest.raises(BackendUnavailable, match="'GPU'"):
        taso.onnx_backend.prepare(model(), "GPU")


def test_unknown_options_and_models_are_refused() -> None:
    with pytest.raises(TasoError, match="option 'speed'"):
        taso.onnx_backend.prepare(model(), speed=2)
    with pytest.raises(TasoError, match="the backend is a name"):
        taso.onnx_backend.prepare(model(), budget="much")
    broken = model()
    broken.graph.node[0].input[1] = "nowhere"
    assert taso.onnx_backend.is_compatible(model()) and not taso.onnx_backend.is_compatible(broken)
    with pytest.raises(ModelError, match="nowhere"):
        taso.onnx_backend.prepare(broken)


def test_the_same_model_becomes_the_same_program() -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]>
    g (float[1,8,6,6] x) => (float[1,16,6,6] y) <float[8,8,1,1] v, float[16,8,1,1] w> { }"""
    proto = model(text.replace("<float[8,8,1,1] v, float[16,8,1,1] w> ", ""))
    rng = np.random.default_rng(0)
    arrays: dict[str, NDArray[np.float32]] = {n: rng.standard_normal((8, 8, 1, 1), np.float32) for n in "vw"}
    for name, array in arrays.items():
        proto.graph.initializer.append(helper.make_tensor(name, 1, array.shape, array.reshape(-1)))
    proto.graph.node.extend(
        [helper.make_node("Conv", ["x", "v"], ["a"]), helper.make_node("Conv", ["x", "w"], ["b"]),
         helper.make_node("Concat", ["a", "b"], ["y"], axis=1)]
    )  # fmt: skip
    reps = [taso.onnx_backend.prepare(proto, backend="reference") for _ in range(2)]
    first, second = ([n.op.name for n in rep.graph.operators] for rep in reps)
    assert first == second and first.count("Conv") == 1
    x = rng.standard_normal((1, 8, 6, 6), np.float32)
    wanted = np.concatenate([np.einsum("oc,bchw->bohw", arrays[n][:, :, 0, 0], x) for n in "vw"], 1)
    assert np.allclose(reps[0].run(x)[0], wanted, rtol=1e-4, atol=1e-5)
