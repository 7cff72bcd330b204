"""cuDNN's own planner asked for the graphs of common kernels, for GPUs that are described (no GPU is needed).

This says that cuDNN has engines for what is described, not that they give the right numbers: nothing runs here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from describing_cases import Given, Part, made, part
from deviceless import missing, plans

from taso.backends.cudnn.attention import Heads, attended, attention
from taso.backends.cudnn.describing import described
from taso.backends.cudnn.description import BF16, FLOAT32, FP16, TF32, Description
from taso.backends.lowering import LAST, PLAIN, Kernel
from taso.graph.types import DType

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(missing()), reason=missing() or "all is there")]

CONV, BIAS = part("Conv", 0, 1, 2, pads=(1, 1, 1, 1)), Given((64,), constant=True)


def graph(
    given: Sequence[Given], parts: Sequence[Part], layout: str = PLAIN, precision: str = FLOAT32
) -> Description:  # fmt: skip
    launch = described(made(given, parts, layout), precision)
    assert launch is not None
    return launch.description


def weights(*dims: int) -> Given:
    return Given(dims, constant=True)


def heads_of_a_layer() -> dict[str, Kernel]:
    """Products of an attention whose heads lie side by side, and the whole as one kernel."""
    aside, turned = "axes 0213", "axes 0312"
    q, k, v = Given((2, 4, 128, 64), aside), Given((2, 4, 64, 128), turned), Given((2, 4, 128, 64), aside)
    one_q, one_k, one_v = (replace(given, dims=(1, *given.dims[1:])) for given in (q, k, v))
    scores, mask = Given((1, 4, 128, 128)), Given((2, 1, 1, 128))
    steps = [part("MatMul", 0, 1), part("Mul", -1, 2), part("Add", -1, 3), part("Softmax", -1), part("MatMul", -1, 4)]
    return {
        "scores of heads side by side": made([one_q, one_k], [part("MatMul", 0, 1)]),
        "values of heads side by side": made([scores, one_v], [part("MatMul", 0, 1)], aside),
        "an attention of a layer": made([q, k, Given((), constant=True), mask, v], steps, aside),
    }


def graph_of(kernel: Kernel, precision: str) -> Description:
    found = attended(kernel)
    if found is not None:
        return found.description(0.125, precision, precision == TF32)
    launch = described(kernel, precision)
    assert launch is not None
    return launch.description


def planned_for() -> dict[str, Description]:
    """What cuDNN has plans for."""
    found = {}
    for layout in (PLAIN, LAST):
        x = Given((4, 64, 28, 28), layout)
        block = [x, weights(64, 64, 3, 3), BIAS, x], [CONV, part("Add", -1, 3), part("Relu", -1)]
        found[f"a residual block, {layout}"] = graph(*block, layout)
        found[f"a residual block, {layout}, TF32"] = graph(*block, layout, TF32)
        clipped = [x, weights(64, 1, 3, 3), BIAS], [part("Conv", 0, 1, 2, pads=(1, 1, 1, 1), group=64)]
        found[f"a depthwise convolution, {layout}"] = graph(*clipped, layout)
        uneven = [x, weights(64, 64, 3, 3), BIAS], [part("Conv", 0, 1, 2, pads=(0, 0, 1, 1), strides=(2, 2))]
        found[f"uneven pads, {layout}"] = graph(*uneven, layout)
        line = [Given((4, 64, 100), layout), weights(64, 64, 3), BIAS], [part("Conv", 0, 1, 2, pads=(1, 1))]
        found[f"a convolution of one axis, {layout}"] = graph(*line, layout)
        back = [x, weights(64, 32, 4, 4)], [part("ConvTranspose", 0, 1, pads=(1, 1, 1, 1), strides=(2, 2))]
        found[f"a transposed convolution, {layout}"] = graph(*back, layout)
        norm = [x, BIAS, BIAS], [part("InstanceNormalization", 0, 1, 2)]
        found[f"instance normalization, {layout}"] = graph(*norm, layout)
    x = Given((4, 64, 28, 28), LAST)
    block = [x, weights(64, 64, 3, 3), BIAS, x], [CONV, part("Add", -1, 3), part("HardSwish", -1)]
    for precision in (FLOAT32, FP16, BF16):
        found[f"an activation that is composed, {precision}"] = graph(*block, LAST, precision)
    found["batch normalization, last"] = graph([x, *[BIAS] * 4], [part("BatchNormalization", 0, 1, 2, 3, 4)], LAST)
    rows = Given((4, 128, 256))
    dense = [rows, weights(256, 512), weights(512)], [part("MatMul", 0, 1), part("Add", -1, 2), part("Gelu", -1)]
    for precision in (TF32, FP16, BF16):
        found[f"a dense layer, {precision}"] = graph(*dense, PLAIN, precision)
    gemm = [Given((8, 256)), weights(64, 256), weights(64)], [part("Gemm", 0, 1, 2, transB=1)]
    found["gemm"] = graph(*gemm, PLAIN, TF32)
    scores = [Given((4, 4, 128, 64)), Given((4, 4, 64, 128))], [part("MatMul", 0, 1)]
    found["products of many batches"] = graph(*scores, PLAIN, TF32)
    norm = [rows, weights(256), weights(256)]
    found["layer normalization"] = graph(norm, [part("LayerNormalization", 0, 1, 2)])
    found["RMS normalization"] = graph(norm[:2], [part("RMSNormalization", 0, 1)])
    for precision in (TF32, FP16, BF16):
        for name, kernel in heads_of_a_layer().items():
            found[f"{name}, {precision}"] = graph_of(kernel, precision)
    heads = Heads.side_by_side(2, 4, 128, 64)
    found["attention"] = attention(heads, heads, heads, heads, 0.125, precision=TF32)
    found["attention with a mask"] = attention(
        heads, heads, heads, heads, 0.125, True, (2, 1, 1, 128), DType.FLOAT16, FP16
    )  # fmt: skip
    return found


def left_to_others() -> dict[str, Description]:
    """What cuDNN has no plans for: kernels of ours and cuBLAS have to do it."""
    rows = Given((4, 128, 256))
    heads = Heads.side_by_side(2, 4, 128, 64)
    image = Given((4, 64, 28, 28))
    return {
        "a product of heads of several batches": graph(
            [Given((2, 4, 128, 64), "axes 0213"), Given((2, 4, 64, 128))], [part("MatMul", 0, 1)], PLAIN, TF32
        ),
        "a product in float32": graph([rows, weights(256, 512)], [part("MatMul", 0, 1)]),
        "attention in float32": attention(heads, heads, heads, heads, 0.125),
        "softmax": graph([rows], [part("Softmax", 0)]),
        "a reduction": graph([rows], [part("ReduceSum", 0, axes=(2,))]),
        "a pool": graph([image], [part("MaxPool", 0, kernel_shape=(2, 2))]),
    }  # fmt: skip


@pytest.mark.parametrize("compute", [80, 90])
def test_cudnn_has_plans_for_what_is_described_and_refuses_the_rest_plainly(compute: int, tmp_path: Path) -> None:
    good, bad = planned_for(), left_to_others()
    found = plans({**good, **bad}, compute, tmp_path)
    assert {name: said for name, said in found.items() if name in good and "plans" not in said} == {}
    assert {name: said.get("error") for name, said in found.items() if name in bad} == dict.fromkeys(
        bad, "GraphUnsupported"
    )  # fmt: skip
