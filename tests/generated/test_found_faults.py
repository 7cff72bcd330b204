"""Faults that real and generated models brought to light stay away."""

from __future__ import annotations

import models
import numpy as np
import pytest
from models import model
from searching import FormulaBackend

import taso


def test_dimensions_called_question_mark_need_not_be_equal() -> None:
    proto = model("g (float[1,?,?] x) => (float[1,?,?] y) { y = Relu(x) }")
    best = taso.optimize(proto, backend=FormulaBackend(), progress=False, input_shapes={"x": (1, 3, 5)})
    feeds = {"x": np.arange(-7, 8, dtype=np.float32).reshape(1, 3, 5)}
    assert np.array_equal(taso.compile(best, backend="reference")(feeds)["y"], np.maximum(feeds["x"], 0))
    assert taso.export_onnx(best).graph.output == proto.graph.output


@pytest.mark.parametrize("operator", ["ReduceMean<axes=[1]>", "ReduceMax<axes=[1]>", "ReduceSum<axes=[1]>"])
def test_reductions_of_one_element_run(operator: str) -> None:
    proto = model(f"g (float[2,1] x) => (float[2,1] y) {{ y = {operator}(x) }}", opset=11)
    feeds = models.random_feeds(proto)
    assert np.array_equal(taso.compile(taso.load(proto))(feeds)["y"], models.by_onnxruntime(proto, feeds)[0])


def test_pooled_regions_of_constants_come_through() -> None:
    image = ",".join(str(i % 7) for i in range(30))
    proto = model(f"""
        g (float[1] u) => (float[1,1,2,3] y, float[1] z)
        <float[1,1,5,6] x = {{{image}}}, float[1,5] r = {{0,1,1,3,3}}> {{
            a = MaxRoiPool<pooled_shape=[2,3]>(x, r)
            y = Relu(a)
            b = Identity(u)
            z = Relu(b)
        }}""")
    best = taso.optimize(proto, backend=FormulaBackend(), verify=False, never_slower=False, progress=False)
    feeds = models.random_feeds(proto)
    found, wanted = (models.by_onnxruntime(p, feeds) for p in (taso.export_onnx(best), proto))
    assert all(np.array_equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_pooled_regions_are_those_of_onnx_runtime() -> None:
    proto = model("""g (float[2,2,5,6] x, float[40,5] r) => (float[40,2,2,3] y) {
        y = MaxRoiPool<pooled_shape=[2,3], spatial_scale=0.5>(x, r) }""")
    rng = np.random.default_rng(0)
    # some regions lie outside, some end before they begin, some corners fall on halves
    corners = rng.integers(-2, 14, (40, 4))
    regions = np.concatenate([rng.integers(0, 2, (40, 1)), corners], 1).astype(np.float32)
    feeds = {"x": rng.normal(size=(2, 2, 5, 6)).astype(np.float32), "r": regions}
    ours = taso.compile(taso.load(proto), backend="reference")(feeds)["y"]
    assert np.array_equal(ours, models.by_onnxruntime(proto, feeds)[0])
