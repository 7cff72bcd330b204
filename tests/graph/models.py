"""Models for tests: written as ONNX text, read from `tests/cases`, or the light models of the onnx package."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnx.checker
import onnx.parser
import onnx.reference
import onnxruntime
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, helper, numpy_helper
from onnx.backend.test.case.node import collect_testcases
from onnx.backend.test.case.test_case import TestCase

Arrays = dict[str, NDArray[np.generic]]

CASES = Path(__file__).resolve().parent.parent / "cases"
LIGHT = (
    "bvlc_alexnet", "densenet121", "inception_v1", "inception_v2", "resnet50", "shufflenet", "squeezenet", "vgg19",
    "zfnet512",
)  # fmt: skip


def case_names() -> list[str]:
    return sorted(path.stem for path in CASES.glob("*.onnxtxt"))


def case(name: str) -> ModelProto:
    """The model `tests/cases/<name>.onnxtxt`."""
    return onnx.parser.parse_model((CASES / f"{name}.onnxtxt").read_text())


def model(text: str, *, opset: int = 17, ir_version: int = 8, domains: Mapping[str, int] | None = None) -> ModelProto:
    """A model from the text of its graph (and functions); the header is written here."""
    imports = ", ".join(f'"{domain}" : {version}' for domain, version in {"": opset, **(domains or {})}.items())
    return onnx.parser.parse_model(f"<ir_version: {ir_version}, opset_import: [{imports}]>\n{text}")


@cache
def node_tests() -> dict[str, TestCase]:
    """The tests that the onnx package has for single operators and their expansions, by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return {test.name: test for test in collect_testcases()}


# ── oracles ──────────────────────────────────────────────────────────────────────────────────────────────────────


def by_onnxruntime(proto: ModelProto, feeds: Arrays) -> list[NDArray[np.generic]]:
    """Outputs of ONNX Runtime with all its optimizations off."""
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, feeds))


def by_reference(proto: ModelProto, feeds: Arrays) -> list[NDArray[np.generic]]:
    return list(onnx.reference.ReferenceEvaluator(proto).run(None, feeds))


def relative_error(a: NDArray[np.generic], b: NDArray[np.generic]) -> float:
    """max|a − b| / max|b|, where b is the truth; 0 where both are the same, not finite values included."""
    assert a.shape == b.shape and a.dtype == b.dtype, f"{a.dtype}{a.shape} is not {b.dtype}{b.shape}"
    if a.dtype.kind in "OSU" or a.dtype.kind == "b" or a.size == 0:
        return 0.0 if np.array_equal(a, b) else math.inf
    held = np.complex128 if b.dtype.kind == "c" else np.float64
    x, y = a.astype(held), b.astype(held)
    finite = np.isfinite(y)
    if not np.array_equal(x[~finite], y[~finite], equal_nan=True):
        return math.inf
    if not finite.any():
        return 0.0
    difference = float(np.max(np.abs(x[finite] - y[finite])))
    return difference / max(float(np.max(np.abs(y[finite]))), 1e-30) if difference else 0.0


def random_feeds(proto: ModelProto, seed: int = 0, symbols: Mapping[str, int] | None = None) -> Arrays:
    """Seeded random values for all inputs that have no initializer; symbolic dimensions from `symbols`."""
    rng = np.random.default_rng(seed)
    weights = {t.name for t in proto.graph.initializer}
    feeds: Arrays = {}
    for value in proto.graph.input:
        if value.name not in weights:
            said = value.type.tensor_type
            shape = [d.dim_value if d.HasField("dim_value") else (symbols or {})[d.dim_param] for d in said.shape.dim]
            feeds[value.name] = random_array(rng, shape, helper.tensor_dtype_to_np_dtype(said.elem_type))
    return feeds


def random_array(rng: np.random.Generator, shape: list[int], dtype: np.dtype[np.generic]) -> NDArray[np.generic]:
    if dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype.kind in "iu":
        return rng.integers(0 if dtype.kind == "u" else -5, 6, shape).astype(dtype)
    return np.asarray(rng.normal(size=shape)).astype(dtype)


# ── the light models ─────────────────────────────────────────────────────────────────────────────────────────────


@cache
def _light_file(name: str) -> bytes:
    folder = Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"
    return (folder / f"light_{name}.onnx").read_bytes()


def light(name: str) -> ModelProto:
    """A light model as the onnx package ships it: every generated weight is 0.02."""
    return ModelProto.FromString(_light_file(name))


def seeded_light(name: str, seed: int = 0) -> ModelProto:
    """A light model whose ConstantOfShape weights are seeded random initializers of sane scale.

    Kernels are normal with variance 2 / fan-in, batch-norm scales lie near 1, shifts and means near 0, variances
    between 0.5 and 1.5, so that the output depends on the input and stays finite.
    """
    proto = light(name)
    rng = np.random.default_rng(seed)
    shapes = {t.name: numpy_helper.to_array(t) for t in proto.graph.initializer}
    roles = _roles(proto)
    kept: list[NodeProto] = []
    for node in proto.graph.node:
        if node.op_type != "ConstantOfShape":
            kept.append(node)
            continue
        shape = [int(d) for d in shapes[node.input[0]]]
        array = _sane(rng, shape, roles.get(node.output[0], "bias"))
        tensor = proto.graph.initializer.add(name=node.output[0], data_type=1, dims=shape)
        tensor.raw_data = array.tobytes()
        proto.graph.input.append(helper.make_tensor_value_info(node.output[0], 1, shape))
    del proto.graph.node[:]
    proto.graph.node.extend(kept)
    _calm(_without_unused(proto))
    return proto


def _calm(proto: ModelProto) -> None:
    """Scales the last weights by a power of two that brings what the softmax sees near a deviation of 2.

    Without that it saturates, and an output that is 0 and 1 hides any error before it.
    """
    nodes = {name: node for node in proto.graph.node for name in node.output}
    last = nodes.get(proto.graph.output[0].name)
    while last is not None and last.op_type not in ("Conv", "Gemm"):
        last = nodes.get(last.input[0])
    if last is None:
        return
    probe = ModelProto()
    probe.CopyFrom(proto)
    probe.graph.output[0].CopyFrom(onnx.ValueInfoProto(name=last.output[0]))
    deviation = float(np.std(by_onnxruntime(probe, random_feeds(proto))[0].astype(np.float64)))
    factor = np.float32(2.0 ** round(math.log2(2 / deviation)))
    weights = {nodes[name].input[0] if name in nodes else name for name in last.input[1:]}
    for tensor in proto.graph.initializer:
        if tensor.name in weights:
            tensor.raw_data = (numpy_helper.to_array(tensor) * factor).tobytes()


def _roles(proto: ModelProto) -> dict[str, str]:
    """What each weight is for: kernel, scale, bias, mean or variance."""
    roles: dict[str, str] = {}
    behind: dict[str, str] = {}
    for node in proto.graph.node:
        if node.op_type in ("Unsqueeze", "Reshape"):
            behind[node.output[0]] = node.input[0]
    for node in proto.graph.node:
        names = [behind.get(n, n) for n in node.input]
        if node.op_type in ("Conv", "Gemm", "MatMul"):
            roles.setdefault(names[1], "matrix" if node.op_type != "Conv" else "kernel")
        elif node.op_type == "BatchNormalization":
            roles.update(zip(names[1:], ("scale", "bias", "mean", "variance"), strict=True))
        elif node.op_type == "Mul":
            roles.setdefault(names[1], "scale")
    return roles


def _sane(rng: np.random.Generator, shape: list[int], role: str) -> NDArray[np.float32]:
    if role == "variance":
        return rng.random(shape, np.float32) + np.float32(0.5)
    if role == "scale":
        return 1 + rng.standard_normal(shape, np.float32) * np.float32(0.1)
    # a Gemm of these models has its fan-in last
    fan_in = {"kernel": math.prod(shape[1:]), "matrix": shape[-1]}.get(role)
    deviation = math.sqrt(2 / fan_in) if fan_in else 0.1
    return rng.standard_normal(shape, np.float32) * np.float32(deviation)


def _without_unused(proto: ModelProto) -> ModelProto:
    """Drops the shapes that nothing reads any more."""
    graph = proto.graph
    read = {name for node in graph.node for name in node.input}
    gone = {t.name for t in graph.initializer if t.name not in read}
    for position in reversed([i for i, t in enumerate(graph.initializer) if t.name in gone]):
        del graph.initializer[position]
    for position in reversed([i for i, v in enumerate(graph.input) if v.name in gone]):
        del graph.input[position]
    return proto
