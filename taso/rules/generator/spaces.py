"""The spaces that rules are generated from, by name."""

from __future__ import annotations

from taso.rules.generator import ours as o
from taso.rules.generator import templates as t
from taso.rules.generator.universe import Space

MATRIX = (t.SIDE, t.SIDE)
IMAGES = (1, t.CHANNELS, *t.IMAGE)
KERNEL, NARROW, DEPTHWISE = ((t.CHANNELS, t.CHANNELS, 3, 3), (t.CHANNELS, t.CHANNELS, 1, 3), (t.CHANNELS, 1, 3, 3))
SCALARS: tuple[tuple[str, tuple[int, ...]], ...] = (("s", ()), ("t", ()))

TASO_MATRICES = Space(
    "taso-matrices",
    (
        t.RELU, t.ADD, t.MUL, t.SCALE, t.MATMUL, t.TRANSPOSE, *t.CONCATS[:2], *t.SPLITS, t.IDENTITY_MATRIX, t.ONES,
    ),
    (*((n, MATRIX) for n in "xyza"), *SCALARS), 3,
)  # fmt: skip
"""TASO's operators on matrices."""

TASO_IMAGES = Space(
    "taso-images",
    (
        t.RELU, t.ADD, t.MUL, t.SCALE, *t.CONVOLUTIONS, *t.POOLS, *t.CONCATS[2:], *t.SPLITS, t.ENLARGE,
        t.IDENTITY_KERNEL, t.ONES_IMAGE, t.AVERAGING_KERNEL,
    ),
    (
        *((n, IMAGES) for n in "xyza"), *((n, KERNEL) for n in ("w", "w2")), *((n, NARROW) for n in ("v", "v2")),
        ("k", DEPTHWISE), SCALARS[0],
    ), 3,
)  # fmt: skip
"""TASO's operators on images and kernels: together with those on matrices, the templates of its published generator."""

ROWS, SQUARE, COLUMN = (2, 3), (3, 3), (2, 1)

NORMALISATION = Space(
    "normalisation",
    (
        t.ADD, o.SUB, t.MUL, t.SCALE, o.EXP, o.SUM, o.MEAN, o.SUB_COLUMN, o.MUL_COLUMN, o.DIV_COLUMN, o.SOFTMAX,
        t.MATMUL,
    ),
    (*((n, ROWS) for n in "xyz"), ("w", SQUARE), ("v", SQUARE), ("c", COLUMN), ("b", COLUMN), *SCALARS), 3,
)  # fmt: skip
"""The pieces that normalisations and softmax are made of, along the rows of a matrix."""

BATCHES = Space(
    "batches",
    (t.RELU, t.ADD, o.SUB, t.SCALE, o.BATCHED, o.STACKED, o.MERGE, o.SWAP, t.MATMUL),
    (
        *((n, (2, 2, 3)) for n in "xyz"), *((n, (2, 3, 3)) for n in "uv"), *((n, SQUARE) for n in "wa"), ("s", ()),
    ), 3,
)  # fmt: skip
"""Products of batches of matrices, with one another and with one matrix, and the reshape that makes them one."""

CHANNELWISE = Space(
    "depthwise",
    (t.RELU, t.ADD, t.SCALE, o.DEPTHWISE, *t.CONCATS[2:], *t.SPLITS),
    (*((n, IMAGES) for n in "xyz"), ("k", DEPTHWISE), ("l", DEPTHWISE), *SCALARS), 3,
)
"""Convolutions of each channel by itself."""

FOUR = Space(
    "matrices-of-four",
    (t.RELU, t.ADD, t.MUL, t.SCALE, t.MATMUL, t.TRANSPOSE, *t.CONCATS[:2], *t.SPLITS),
    (("x", MATRIX), ("y", MATRIX), ("z", MATRIX), ("s", ())), 4,
)
"""Four operators, of ten templates."""

FIVE = Space(
    "matrices-of-five", (t.RELU, t.ADD, t.MATMUL, t.TRANSPOSE, t.CONCATS[1]), (("x", MATRIX), ("y", MATRIX)), 5
)
"""Five operators, of five templates."""

TASO = (TASO_MATRICES, TASO_IMAGES)
PACKAGED = (*TASO, NORMALISATION, BATCHES, CHANNELWISE)
"""The spaces that the packaged rules come from."""

SPACES = {space.name: space for space in (*PACKAGED, FOUR, FIVE)}
