"""Constants of rules: their values against ONNX's own reference, and that equal ones are one weight."""

from __future__ import annotations

import numpy as np
import onnx.helper
import onnx.reference
import pytest

from taso.graph.errors import GraphError
from taso.graph.operator import Operator
from taso.graph.types import DType
from taso.graph.winograd import transforms
from taso.rules.constants import (
    AVERAGING_KERNEL,
    CONSTANT,
    IDENTITY_KERNEL,
    IDENTITY_MATRIX,
    ONES,
    TILE_BIAS,
    TILE_DATA,
    TILE_OUTPUT,
    constant_weight,
)
from taso.rules.expression import Bindings, evaluate, parse


def _array(op: Operator, **attrs: object) -> np.ndarray:
    return constant_weight(op, op.complete({"dtype": DType.FLOAT, **attrs})).array()  # type: ignore[dict-item]  # plain values


def _run(op_type: str, *inputs: np.ndarray, **attrs: object) -> np.ndarray:
    names = [f"i{n}" for n in range(len(inputs))]
    node = onnx.helper.make_node(op_type, names, ["out"], **attrs)
    return onnx.reference.ReferenceEvaluator(node).run(None, dict(zip(names, inputs, strict=True)))[0]


@pytest.mark.parametrize("kernel", [(1, 1), (3, 3), (2, 4), (5, 2)])
def test_the_identity_kernel_reproduces_a_same_lower_convolution_s_input(kernel: tuple[int, int]) -> None:
    x = np.random.default_rng(0).normal(size=(2, 3, 6, 5)).astype(np.float32)
    weight = _array(IDENTITY_KERNEL, channels=3, kernel_shape=kernel)
    pads = evaluate(parse(f"same_pads({kernel})"), Bindings({}))
    np.testing.assert_array_equal(_run("Conv", x, weight, pads=list(pads)), x)  # type: ignore[arg-type]  # a tuple of ints


def test_the_averaging_kernel_is_an_average_pool_that_counts_its_padding() -> None:
    x = np.random.default_rng(1).normal(size=(2, 3, 6, 5)).astype(np.float32)
    weight = _array(AVERAGING_KERNEL, channels=3, kernel_shape=(3, 2))
    got = _run("Conv", x, weight, pads=[1, 1, 1, 0], group=3)
    counted, uncounted = (
        _run("AveragePool", x, kernel_shape=[3, 2], pads=[1, 1, 1, 0], count_include_pad=c) for c in (1, 0)
    )
    assert np.abs(got - counted).max() <= 1e-6 * np.abs(counted).max()
    assert np.abs(got - uncounted).max() > 0.1 * np.abs(uncounted).max()


def test_ones_identity_matrix_and_scalars_have_their_values_and_types() -> None:
    np.testing.assert_array_equal(_array(ONES, shape=(2, 3)), np.ones((2, 3), np.float32))
    np.testing.assert_array_equal(_array(IDENTITY_MATRIX, size=4), np.eye(4, dtype=np.float32))
    scalar = _array(CONSTANT, value=0.1, dtype=DType.DOUBLE)
    assert scalar.shape == () and scalar.dtype == np.float64 and scalar == 0.1
    assert _array(CONSTANT, value=2, shape=(2,)).tolist() == [2, 2]


@pytest.mark.parametrize(("tile", "taps"), [((4, 4), (3, 3)), ((2, 4), (3, 5)), ((1, 4), (1, 7)), ((2, 1), (7, 1))])
def test_what_transforms_tiles_makes_a_convolution_of_products(tile: tuple[int, int], taps: tuple[int, int]) -> None:
    """Y[i, j] = Σ A[i, j, u, v] · (G g Gᵀ)[u, v] · (Bᵀ d B)[u, v], for filters of which one tap is 1."""
    data, output, bias = (_array(op, tile=tile, taps=taps, dtype=DType.DOUBLE) for op in (
        TILE_DATA, TILE_OUTPUT, TILE_BIAS))  # fmt: skip
    d = np.random.default_rng(2).normal(size=data.shape[2:])
    filters = [
        np.ones((1, 1)) if m == r == 1 else np.asarray(transforms(m, r).filter, np.float64)
        for m, r in zip(tile, taps, strict=True)
    ]
    made = np.einsum("uvrs,rs->uv", data, d)
    for k, w in np.ndindex(*taps):
        products = np.multiply.outer(filters[0][:, k], filters[1][:, w]) * made
        y = np.einsum("ijuv,uv->ij", output, products + 3.0 * bias)
        np.testing.assert_allclose(y, d[k : k + tile[0], w : w + tile[1]] + 3.0, rtol=0, atol=1e-11)


def test_a_tile_has_two_dimensions() -> None:
    with pytest.raises(GraphError, match="are not two-dimensional"):
        _array(TILE_DATA, tile=(4,), taps=(3,))


def test_equal_constants_are_one_weight_and_different_ones_are_not() -> None:
    def made(n: int) -> object:
        return constant_weight(ONES, ONES.complete({"dtype": DType.FLOAT, "shape": (n,)}))

    assert made(3) is made(3) and made(3) is not made(4)
