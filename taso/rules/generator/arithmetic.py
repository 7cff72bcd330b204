"""Exact arithmetic on many small tensors at once: residues modulo a prime, the first axis counting the tensors.

Every residue is below 2²¹, so that a sum of up to 2²¹ products is exact in 64-bit integers and is reduced once. The
functions here only tell which values are candidates for being equal; that they are is proved by other means.
"""

from __future__ import annotations

from functools import reduce

import numpy as np
from numpy.typing import NDArray

PRIME = 2097143
"""The largest prime below 2²¹."""

Values = NDArray[np.int64]
Fingerprints = NDArray[np.uint64]


def drawn(shape: tuple[int, ...], seed: int) -> Values:
    """A tensor of random residues, none of them 0."""
    return np.random.default_rng(seed).integers(1, PRIME, shape, np.int64)


def fingerprints(values: Values) -> Fingerprints:
    """One number for each tensor: equal for equal ones, and for others with a probability of about 2⁻⁶⁴.

    The shape takes part, so that tensors of the same elements in another shape differ.
    """
    flat = values.reshape(len(values), -1).astype(np.uint64)
    key = reduce(lambda k, d: k * 1_000_003 + d, values.shape[1:], 1) % (1 << 32)
    weights = np.random.default_rng(key).integers(0, 1 << 63, flat.shape[1], np.uint64) * np.uint64(2) + np.uint64(1)
    return _mixed((flat * weights).sum(1, dtype=np.uint64) + np.uint64(key))


def _mixed(x: Fingerprints) -> Fingerprints:
    """A permutation of the 64-bit numbers that spreads every bit over all others (the finalizer of MurmurHash3)."""
    for shift, factor in ((33, 0xFF51AFD7ED558CCD), (33, 0xC4CEB9FE1A85EC53)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return np.asarray(x ^ (x >> np.uint64(33)))


def random_function(salt: int, x: Values) -> Values:
    """A function of one argument of which nothing is known but that it is one; another for each `salt`."""
    start = np.uint64(np.random.default_rng(salt).integers(1, 1 << 62))
    return np.asarray(_mixed(x.astype(np.uint64) + start) % np.uint64(PRIME)).astype(np.int64)


def inverse(x: Values) -> Values:
    """1 / x for each element, by Fermat's little theorem; that of 0 is 0."""
    result, power, exponent = np.ones_like(x), x, PRIME - 2
    while exponent:
        if exponent & 1:
            result = result * power % PRIME
        power, exponent = power * power % PRIME, exponent >> 1
    return result


def matmul(a: Values, b: Values) -> Values:
    """(…, m, k) by (…, k, n), batch by batch."""
    return np.asarray((a[..., :, :, None] * b[..., None, :, :]).sum(-2) % PRIME)


def convolution(x: Values, w: Values) -> Values:
    """(N, C, H, W) with (O, C / groups, kh, kw), stride 1, SAME padding (the odd one before); groups from the sizes."""
    count, images, channels, height, width = x.shape
    outputs, per_group, kh, kw = w.shape[1:]
    groups = channels // per_group
    padded = np.pad(x, ((0, 0), (0, 0), (0, 0), (kh // 2, (kh - 1) // 2), (kw // 2, (kw - 1) // 2)))
    padded = padded.reshape(count, images, groups, per_group, *padded.shape[3:])
    kernels = w.reshape(count, groups, outputs // groups, per_group, kh, kw)
    total = np.zeros((count, images, groups, outputs // groups, height, width), np.int64)
    for i in range(per_group):
        for j in range(kh):
            for k in range(kw):
                window = padded[:, :, :, i, j : j + height, k : k + width]
                total += window[:, :, :, None] * kernels[:, None, :, :, i, j, k, None, None]
    return total.reshape(count, images, outputs, height, width) % PRIME


def _windows(x: Values, kernel: tuple[int, int], fill: int) -> Values:
    """All windows of a pool with stride 1 and SAME padding, along a new last axis."""
    kh, kw = kernel
    height, width = x.shape[-2:]
    before = [(0, 0)] * (x.ndim - 2)
    padded = np.pad(x, (*before, (kh // 2, (kh - 1) // 2), (kw // 2, (kw - 1) // 2)), constant_values=fill)
    return np.stack([padded[..., j : j + height, k : k + width] for j in range(kh) for k in range(kw)], -1)


def average_pool(kernel: tuple[int, int], x: Values) -> Values:
    """The mean of each window, the padding counted."""
    share = pow(kernel[0] * kernel[1], -1, PRIME)
    return np.asarray(_windows(x, kernel, 0).sum(-1) % PRIME * share % PRIME)


def max_pool(kernel: tuple[int, int], x: Values) -> Values:
    """The largest of each window in the order of 0 … p − 1: as good a symmetric function as any."""
    return np.asarray(_windows(x, kernel, -1).max(-1))


def enlarge(kernel: tuple[int, int], w: Values) -> Values:
    """The last two axes padded with zeros, centred; a larger window stays as it is."""
    extra = [max(0, k - d) for k, d in zip(kernel, w.shape[-2:], strict=True)]
    pads = [(0, 0)] * (w.ndim - 2) + [(e // 2, e - e // 2) for e in extra]
    return np.pad(w, pads)
