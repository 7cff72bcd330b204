"""The twelve models of the benchmark suite, by script: real layers at their real sizes, weights from a seed.

    python benchmarks/zoo.py resnet50 resnet50.onnx --batch 8

Batch normalization stands where the trained models have it. Layers, paddings and epsilons are those of the papers, and
where these leave a choice of torchvision (pictures), timm (ViT) and Cadene's pretrained models (NASNet-A). BERT begins
behind its embeddings; the NAS cell has its weights shared by all steps, as a recurrent network does.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from network import RECTIFIED, Network

# ── residual networks ────────────────────────────────────────────────────────────────────────────────────────────

BRANCH = 0.25
"""Scale of the last batch normalization of a residual branch: small, so that sums over many blocks stay near 1."""


def _normed(
    net: Network, x: str, channels: int, window: int, stride: int = 1, groups: int = 1, gain: float = RECTIFIED
) -> str:
    return net.norm(net.conv(x, channels, window, stride, window // 2, groups, gain=gain))


def _bottleneck(net: Network, x: str, width: int, out: int, stride: int, groups: int) -> str:
    """Three convolutions beside a way that keeps x, or brings it to the new size (He et al. 2016)."""
    y = net.relu(_normed(net, x, width, 1))
    y = net.relu(_normed(net, y, width, 3, stride, groups))
    y = net.norm(net.conv(y, out, 1), BRANCH)
    if stride != 1 or net.channels[x] != out:
        x = net.norm(net.conv(x, out, 1, stride))
    return net.relu(net.add(y, x))


def _residual(net: Network, size: int, groups: int, width: int) -> onnx.ModelProto:
    x = net.relu(_normed(net, net.image(size), 64, 7, 2))
    x = net.max_pool(x, 3, 2, 1)
    for stage, blocks in enumerate((3, 4, 6, 3)):
        for block in range(blocks):
            stride = 2 if stage > 0 and block == 0 else 1
            x = _bottleneck(net, x, width << stage, 256 << stage, stride, groups)
    return net.scores(net.classifier(x))


def resnet50(net: Network, size: int) -> onnx.ModelProto:
    """He et al. 2016, with the stride in the window of 3."""
    return _residual(net, size, groups=1, width=64)


def resnext50(net: Network, size: int) -> onnx.ModelProto:
    """Xie et al. 2017: 32 groups of 4 channels."""
    return _residual(net, size, groups=32, width=128)


# ── NASNet-A (6 @ 4032), Zoph et al. 2018 ────────────────────────────────────────────────────────────────────────

FILTERS = 168
EPSILON = 1e-3


def _pointwise(net: Network, x: str, channels: int) -> str:
    return net.norm(net.conv(net.relu(x), channels, 1), epsilon=EPSILON)


def _separable(net: Network, x: str, channels: int, window: int, stride: int = 1, stem: bool = False) -> str:
    """Two separable convolutions; in the stem the first one makes the channels, elsewhere the second."""
    for first in (True, False):
        out = channels if stem or not first else net.channels[x]
        x = net.conv(net.relu(x), net.channels[x], window, stride if first else 1, window // 2, net.channels[x])
        x = net.norm(net.conv(x, out, 1, gain=1.0), BRANCH if not first else 1.0, EPSILON)
    return x


def _halved(net: Network, x: str, channels: int) -> str:
    """Half the size by two ways, one of them shifted by a pixel; each gives half of the channels."""
    x = net.relu(x)
    straight = net.conv(net.average(x, 1, 2), channels // 2, 1)
    padded = net.apply("Pad", x, net.whole(0, 0, 0, 0, 0, 0, 1, 1))
    shifted = net.apply("Slice", padded, net.whole(1, 1), net.whole(1 << 40, 1 << 40), net.whole(2, 3))
    shifted = net.conv(net.average(shifted, 1, 2), channels // 2, 1)
    return net.norm(net.concat(straight, shifted), epsilon=EPSILON)


def _normal_cell(net: Network, left: str, right: str, channels: int) -> str:
    """`left` is of the cell before the last, `right` of the last one, both with `channels` channels."""
    sums = [
        net.add(_separable(net, right, channels, 5), _separable(net, left, channels, 3)),
        net.add(_separable(net, left, channels, 5), _separable(net, left, channels, 3)),
        net.add(net.average(right, 3, 1, 1), left),
        net.add(net.average(left, 3, 1, 1), net.average(left, 3, 1, 1)),
        net.add(_separable(net, right, channels, 3), right),
    ]
    return net.concat(left, *sums)


def _reduction_cell(net: Network, pooled: str, seen: str, channels: int, stem: bool = False) -> str:
    """`pooled` goes through the pools, `seen` through the larger windows."""
    first = net.add(_separable(net, pooled, channels, 5, 2), _separable(net, seen, channels, 7, 2, stem))
    second = net.add(net.max_pool(pooled, 3, 2, 1), _separable(net, seen, channels, 7, 2, stem))
    third = net.add(net.average(pooled, 3, 2, 1), _separable(net, seen, channels, 5, 2, stem))
    fourth = net.add(net.average(first, 3, 1, 1), second)
    fifth = net.add(_separable(net, first, channels, 3), net.max_pool(pooled, 3, 2, 1))
    return net.concat(second, third, fourth, fifth)


def nasnet_a(net: Network, size: int) -> onnx.ModelProto:
    """The large one: six normal cells a stage, 4032 channels at the end."""
    stem = net.norm(net.conv(net.image(size), 96, 3, 2), epsilon=EPSILON)
    before = _reduction_cell(net, _pointwise(net, stem, FILTERS // 4), stem, FILTERS // 4, stem=True)
    x = _reduction_cell(net, _pointwise(net, before, FILTERS // 2), _halved(net, stem, FILTERS // 2), FILTERS // 2)
    for stage in range(3):
        channels = FILTERS << stage
        for cell in range(6):
            # behind a reduction the output before it is twice as large
            left = _halved(net, before, channels) if cell == 0 else _pointwise(net, before, channels)
            before, x = x, _normal_cell(net, left, _pointwise(net, x, channels), channels)
        if stage < 2:
            # the next cell looks back past the reduction, to what the cell before the last one has made
            seen, pooled = _pointwise(net, before, 2 * channels), _pointwise(net, x, 2 * channels)
            x = _reduction_cell(net, pooled, seen, 2 * channels)
    return net.scores(net.classifier(net.relu(x)))


# ── the recurrent cell of Zoph and Le 2017 ───────────────────────────────────────────────────────────────────────

HIDDEN = 512
STEPS = 5
LEAVES = (
    ("Add", "Sigmoid"), ("Add", "Relu"), ("Add", "Sigmoid"), ("Mul", "Relu"), ("Add", "Tanh"), ("Add", "Sigmoid"),
    ("Add", "Tanh"), ("Add", "Sigmoid"),
)  # fmt: skip
"""How the products of input and of state are joined in each of the eight leaves, and what is applied."""


def nasrnn(net: Network, size: int) -> onnx.ModelProto:
    """Five steps, each a tree over eight leaves; `size` numbers in a state. Every product stands by itself."""
    inputs = [net.input(f"x{i}", (net.batch, size), size) for i in range(STEPS)]
    state, cell = (net.input(name, (net.batch, size), size) for name in ("state", "cell"))
    weights = [[net.weight((size, size), 1 / math.sqrt(size)) for _ in range(2)] for _ in LEAVES]
    biases = [net.weight((size,), 0.1) for _ in LEAVES]
    for x in inputs:
        leaves = []
        for (join, function), (on_x, on_state), bias in zip(LEAVES, weights, biases, strict=True):
            products = net.add(net.apply("MatMul", x, on_x), bias), net.apply("MatMul", state, on_state)
            leaves.append(net.apply(function, net.apply(join, *products)))
        a, b, c, d, e, f, g, h = leaves
        first = net.apply("Tanh", net.add(net.apply("Tanh", net.apply("Mul", a, b)), cell))
        second = net.apply("Tanh", net.add(c, d))
        third, fourth = net.apply("Tanh", net.apply("Mul", e, f)), net.apply("Sigmoid", net.add(g, h))
        cell = net.apply("Mul", first, second)
        inner, outer = net.apply("Tanh", cell), net.apply("Tanh", net.add(third, fourth))
        state = net.apply("Tanh", net.apply("Mul", inner, outer))
    return net.model(**{state: (net.batch, size), cell: (net.batch, size)})


# ── transformers ─────────────────────────────────────────────────────────────────────────────────────────────────

TOKENS = 128


def _heads(net: Network, x: str, tokens: int, heads: int, order: tuple[int, ...]) -> str:
    return net.transpose(net.reshape(x, net.batch, tokens, heads, net.channels[x] // heads), *order)


def _joined(net: Network, x: str, tokens: int, width: int) -> str:
    y = net.reshape(net.transpose(x, 0, 2, 1, 3), net.batch, tokens, width)
    net.channels[y] = width
    return y


def bert_base(net: Network, size: int) -> onnx.ModelProto:
    """Devlin et al. 2019: 12 layers of 768, 12 heads, from the sum of embeddings; `size` tokens; a mask to be added."""
    width, heads = 768, 12
    x = net.layer_norm(net.input("embeddings", (net.batch, size, width), width), 1e-12)
    mask = net.input("mask", (net.batch, 1, 1, size), 1)
    for _ in range(12):
        query, key, value = (net.linear(x, width) for _ in range(3))
        query = _heads(net, query, size, heads, (0, 2, 1, 3))
        key = _heads(net, key, size, heads, (0, 2, 3, 1))
        value = _heads(net, value, size, heads, (0, 2, 1, 3))
        scores = net.apply("Div", net.apply("MatMul", query, key), net.number(math.sqrt(width // heads)))
        attended = net.apply("MatMul", net.apply("Softmax", net.add(scores, mask), axis=-1), value)
        attended = net.linear(_joined(net, attended, size, width), width)
        x = net.layer_norm(net.add(attended, x), 1e-12)
        y = net.linear(net.gelu(net.linear(x, 4 * width)), width)
        x = net.layer_norm(net.add(y, x), 1e-12)
    return net.model(**{x: (net.batch, size, width)})


def vit_s16(net: Network, size: int) -> onnx.ModelProto:
    """Dosovitskiy et al. 2021, Touvron et al. 2021: 12 layers of 384, 6 heads, patches of 16 × 16."""
    width, heads, patches = 384, 6, (size // 16) ** 2
    tokens = patches + 1
    x = net.conv(net.image(size), width, 16, 16, bias=True, gain=1.0)
    x = net.transpose(net.reshape(x, net.batch, width, patches), 0, 2, 1)
    first = net.apply("Expand", net.weight((1, 1, width), 1.0), net.whole(net.batch, 1, width))
    x = net.apply("Concat", first, x, axis=1)
    net.channels[x] = width
    x = net.add(x, net.weight((1, tokens, width), 0.5))
    for _ in range(12):
        y = net.linear(net.layer_norm(x, 1e-6), 3 * width)
        y = net.transpose(net.reshape(y, net.batch, tokens, 3, heads, width // heads), 2, 0, 3, 1, 4)
        parts = net.several("Split", y, net.whole(1, 1, 1), outputs=3, axis=0)
        query, key, value = (net.apply("Squeeze", part, net.whole(0)) for part in parts)
        query = net.apply("Mul", query, net.number((width // heads) ** -0.5))
        scores = net.apply("MatMul", query, net.transpose(key, 0, 1, 3, 2))
        attended = net.apply("MatMul", net.apply("Softmax", scores, axis=-1), value)
        x = net.add(x, net.linear(_joined(net, attended, tokens, width), width))
        x = net.add(x, net.linear(net.gelu(net.linear(net.layer_norm(x, 1e-6), 4 * width)), width))
    x = net.apply("Gather", net.layer_norm(x, 1e-6), net.constant(np.array(0)), axis=1)
    return net.scores(net.dense(x, 1000))


# ── Inception-v3, Szegedy et al. 2016 ────────────────────────────────────────────────────────────────────────────

Window = tuple[int, int]
TALL, BROAD = (7, 1), (1, 7)


def _basic(net: Network, x: str, channels: int, window: int | Window = 1, stride: int = 1, same: bool = True) -> str:
    high, wide = (window, window) if isinstance(window, int) else window
    pad = (high // 2, wide // 2) if same else 0
    return net.relu(net.norm(net.conv(x, channels, (high, wide), stride, pad), epsilon=EPSILON))


def _pooled(net: Network, x: str, channels: int) -> str:
    return _basic(net, net.average(x, 3, 1, 1, counts_pad=True), channels)


def _inception_a(net: Network, x: str, pooled: int) -> str:
    wide = _basic(net, _basic(net, x, 48), 64, 5)
    twice = _basic(net, _basic(net, _basic(net, x, 64), 96, 3), 96, 3)
    return net.concat(_basic(net, x, 64), wide, twice, _pooled(net, x, pooled))


def _inception_b(net: Network, x: str) -> str:
    twice = _basic(net, _basic(net, _basic(net, x, 64), 96, 3), 96, 3, 2, same=False)
    return net.concat(_basic(net, x, 384, 3, 2, same=False), twice, net.max_pool(x, 3, 2))


def _inception_c(net: Network, x: str, channels: int) -> str:
    once = _basic(net, _basic(net, _basic(net, x, channels), channels, BROAD), 192, TALL)
    twice = _basic(net, x, channels)
    for window in (TALL, BROAD, TALL):
        twice = _basic(net, twice, channels, window)
    return net.concat(_basic(net, x, 192), once, _basic(net, twice, 192, BROAD), _pooled(net, x, 192))


def _inception_d(net: Network, x: str) -> str:
    once = _basic(net, _basic(net, x, 192), 320, 3, 2, same=False)
    other = _basic(net, _basic(net, _basic(net, x, 192), 192, BROAD), 192, TALL)
    return net.concat(once, _basic(net, other, 192, 3, 2, same=False), net.max_pool(x, 3, 2))


def _inception_e(net: Network, x: str) -> str:
    once = _basic(net, x, 384)
    twice = _basic(net, _basic(net, x, 448), 384, 3)
    pairs = [_basic(net, y, 384, window) for y in (once, twice) for window in ((1, 3), (3, 1))]
    return net.concat(_basic(net, x, 320), net.concat(*pairs[:2]), net.concat(*pairs[2:]), _pooled(net, x, 192))


def inception_v3(net: Network, size: int) -> onnx.ModelProto:
    """Without the auxiliary classifier, which inference does not have."""
    x = _basic(net, net.image(size), 32, 3, 2, same=False)
    x = _basic(net, _basic(net, x, 32, 3, same=False), 64, 3)
    x = _basic(net, _basic(net, net.max_pool(x, 3, 2), 80), 192, 3, same=False)
    x = net.max_pool(x, 3, 2)
    for pooled in (32, 64, 64):
        x = _inception_a(net, x, pooled)
    x = _inception_b(net, x)
    for channels in (128, 160, 160, 192):
        x = _inception_c(net, x, channels)
    x = _inception_e(net, _inception_e(net, _inception_d(net, x)))
    return net.scores(net.classifier(x))


# ── plain and dense ──────────────────────────────────────────────────────────────────────────────────────────────


def squeezenet(net: Network, size: int) -> onnx.ModelProto:
    """Version 1.1 (Iandola et al. 2016)."""
    x = net.relu(net.conv(net.image(size), 64, 3, 2, bias=True))
    fires = ((16, 64), (16, 64), (32, 128), (32, 128), (48, 192), (48, 192), (64, 256), (64, 256))
    for number, (squeezed, expanded) in enumerate(fires):
        if number in (0, 2, 4):
            x = net.max_pool(x, 3, 2, ceil=True)
        y = net.relu(net.conv(x, squeezed, 1, bias=True))
        parts = [net.relu(net.conv(y, expanded, window, pad=window // 2, bias=True)) for window in (1, 3)]
        x = net.concat(*parts)
    x = net.relu(net.conv(x, 1000, 1, bias=True))
    return net.scores(net.apply("Flatten", net.apply("GlobalAveragePool", x), axis=1))


def vgg16(net: Network, size: int) -> onnx.ModelProto:
    """Simonyan and Zisserman 2015, configuration D, which has no batch normalization."""
    x = net.image(size)
    for stage, layers in enumerate((2, 2, 3, 3, 3)):
        for _ in range(layers):
            x = net.relu(net.conv(x, min(64 << stage, 512), 3, pad=1, bias=True))
        x = net.max_pool(x, 2, 2)
    x = net.apply("Flatten", x, axis=1)
    net.channels[x] = 512 * (size // 32) ** 2
    for features in (4096, 4096):
        x = net.relu(net.dense(x, features, gain=math.sqrt(2)))
    return net.scores(net.dense(x, 1000))


def densenet121(net: Network, size: int) -> onnx.ModelProto:
    """Huang et al. 2017: blocks of 6, 12, 24 and 16 layers of 32 channels."""
    x = net.relu(_normed(net, net.image(size), 64, 7, 2))
    x = net.max_pool(x, 3, 2, 1)
    for stage, layers in enumerate((6, 12, 24, 16)):
        for _ in range(layers):
            y = net.relu(net.norm(net.conv(net.relu(net.norm(x)), 128, 1)))
            x = net.concat(x, net.conv(y, 32, 3, pad=1, gain=1.0))
        if stage < 3:
            x = net.average(net.conv(net.relu(net.norm(x)), net.channels[x] // 2, 1), 2, 2)
    return net.scores(net.classifier(net.relu(net.norm(x))))


# ── small ones ───────────────────────────────────────────────────────────────────────────────────────────────────


def _relu6(net: Network, x: str) -> str:
    return net.apply("Clip", x, net.number(0), net.number(6))


def mobilenet_v2(net: Network, size: int) -> onnx.ModelProto:
    """Sandler et al. 2018."""
    x = _relu6(net, _normed(net, net.image(size), 32, 3, 2))
    stages = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    for widen, channels, blocks, first in stages:
        for block in range(blocks):
            y, wide = x, widen * net.channels[x]
            if widen != 1:
                y = _relu6(net, _normed(net, y, wide, 1, gain=1.0))
            y = _relu6(net, _normed(net, y, wide, 3, first if block == 0 else 1, wide))
            kept = block > 0
            y = net.norm(net.conv(y, channels, 1), 0.7 if kept else 1.0)
            x = net.add(x, y) if kept else y
    return net.scores(net.classifier(_relu6(net, _normed(net, x, 1280, 1))))


def efficientnet_b0(net: Network, size: int) -> onnx.ModelProto:
    """Tan and Le 2019: inverted residuals with squeeze and excitation, x · sigmoid(x) as activation."""
    x = net.silu(_normed(net, net.image(size), 32, 3, 2))
    stages = (
        (1, 3, 1, 16, 1), (6, 3, 2, 24, 2), (6, 5, 2, 40, 2), (6, 3, 2, 80, 3), (6, 5, 1, 112, 3), (6, 5, 2, 192, 4),
        (6, 3, 1, 320, 1),
    )  # fmt: skip
    for widen, window, first, channels, blocks in stages:
        for block in range(blocks):
            y, wide, squeezed = x, widen * net.channels[x], max(net.channels[x] // 4, 1)
            if widen != 1:
                y = net.silu(_normed(net, y, wide, 1, gain=1.0))
            y = net.silu(_normed(net, y, wide, window, first if block == 0 else 1, wide))
            gate = net.silu(net.conv(net.apply("GlobalAveragePool", y), squeezed, 1, bias=True))
            y = net.apply("Mul", y, net.apply("Sigmoid", net.conv(gate, wide, 1, bias=True)))
            kept = block > 0
            # the gate halves, and the activation leaves less than a rectifier does
            y = net.norm(net.conv(y, channels, 1, gain=3.0), 0.7 if kept else 1.0)
            x = net.add(x, y) if kept else y
    return net.scores(net.classifier(net.silu(_normed(net, x, 1280, 1))))


# ── by name ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Entry:
    """A model's script, the size of its picture (sequence, state), and a small size for a quick look.

    `parameters` is the published count, `left_out` what of it this form has not; None where nothing is published.
    """

    write: Callable[[Network, int], onnx.ModelProto]
    size: int
    small: int
    parameters: int | None
    left_out: int = 0


ZOO: Mapping[str, Entry] = {
    "resnet50": Entry(resnet50, 224, 64, 25_557_032),
    "resnext50": Entry(resnext50, 224, 64, 25_028_904),
    "nasnet_a": Entry(nasnet_a, 331, 75, 88_753_150),
    "nasrnn": Entry(nasrnn, HIDDEN, 64, 8 * (2 * HIDDEN * HIDDEN + HIDDEN)),
    # word, position and type embeddings; the pooler
    "bert_base": Entry(bert_base, TOKENS, 16, 109_482_240, (30_522 + 512 + 2) * 768 + 768 * 769),
    "inception_v3": Entry(inception_v3, 299, 107, 27_161_264, 3_326_696),
    "squeezenet": Entry(squeezenet, 224, 64, 1_235_496),
    "vgg16": Entry(vgg16, 224, 64, 138_357_544),
    "densenet121": Entry(densenet121, 224, 64, 7_978_856),
    "mobilenet_v2": Entry(mobilenet_v2, 224, 64, 3_504_872),
    "efficientnet_b0": Entry(efficientnet_b0, 224, 64, 5_288_548),
    "vit_s16": Entry(vit_s16, 224, 64, 22_050_664),
}


def build(name: str, batch: int = 1, seed: int = 0, size: int | None = None) -> onnx.ModelProto:
    """A model of the zoo; `size` is that of its picture, sequence or state where it is to be another than the real one.

    Raises `KeyError` for a name that is none of `ZOO`.
    """
    entry = ZOO[name]
    return entry.write(Network(name, batch, seed), entry.size if size is None else size)


def parameters(model: onnx.ModelProto) -> int:
    """Trained numbers of a model: what is a float and no scalar, statistics of batch normalization left aside."""
    statistics = {i for n in model.graph.node if n.op_type == "BatchNormalization" for i in n.input[3:]}
    floats = (w for w in model.graph.initializer if w.data_type == onnx.TensorProto.FLOAT and w.dims)
    return sum(math.prod(w.dims) for w in floats if w.name not in statistics)


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes a model of the zoo as an ONNX file.")
    parser.add_argument("name", choices=tuple(ZOO))
    parser.add_argument("file", type=Path)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, help="of picture, sequence or state (default: the model's own)")
    told = parser.parse_args()
    onnx.save(build(told.name, told.batch, told.seed, told.size), told.file)


if __name__ == "__main__":
    main()
