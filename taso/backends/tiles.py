"""Filters of Winograd's convolution (`taso.graph.winograd`) as products of tiles read them, on every backend."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from taso.backends.base import Array
from taso.graph.winograd import Matrix, Transforms

_AT_A_TIME = 1 << 16
"""Filters times channels that are transformed at a time."""


def products_of(first: Matrix, second: Matrix) -> NDArray[np.float64]:
    """The Kronecker product of two matrices."""
    return np.array([[float(a * b) for a in x for b in y] for x in first for y in second])


def transformed_filter(weight: Array, rows: Transforms, columns: Transforms) -> NDArray[np.float32]:
    """G g Gᵀ of every filter (M, C, r, r), computed in float64: (positions, C, M), those of rows behind columns."""
    # positions are numbered by column, then row, taps by row, then column
    both = products_of(columns.filter, rows.filter)
    both = both.reshape(len(both), columns.taps, rows.taps).transpose(0, 2, 1).reshape(len(both), -1)
    filters, channels = weight.shape[:2]
    taps = weight.reshape(filters, channels, -1).transpose(2, 1, 0)
    found = np.empty((len(both), channels, filters), np.float32)
    step = max(_AT_A_TIME // filters, 1)
    for start in range(0, channels, step):
        part = taps[:, start : start + step].astype(np.float64)
        found[:, start : start + step] = (both @ part.reshape(len(part), -1)).reshape(len(both), -1, filters)
    return found


__all__ = ["products_of", "transformed_filter"]
