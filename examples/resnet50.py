"""The sixteen bottleneck blocks of ResNet-50, from 64 channels of 56×56 on (He et al. 2016; TASO's example)."""

from __future__ import annotations

from common import run

import taso

STAGES = ((3, 64, 1), (4, 128, 2), (6, 256, 2), (3, 512, 2))
"""Blocks, inner channels, stride of the first block."""


def convolution(
    graph: taso.Graph, x: taso.Tensor, channels: int, window: int, stride: int = 1, activation: str = "RELU"
) -> taso.Tensor:
    weight = graph.new_weight(dims=(channels, x.dim(1), window, window))
    return graph.conv2d(input=x, weight=weight, strides=(stride, stride), padding="SAME", activation=activation)


def bottleneck(graph: taso.Graph, x: taso.Tensor, inner: int, stride: int) -> taso.Tensor:
    """relu(shortcut + three convolutions); the shortcut is a projection where the shape changes."""
    y = convolution(graph, x, inner, 1)
    y = convolution(graph, y, inner, 3, stride)
    y = convolution(graph, y, 4 * inner, 1, activation="NONE")
    if stride > 1 or x.dim(1) != 4 * inner:
        x = convolution(graph, x, 4 * inner, 1, stride)
    return graph.relu(graph.add(x, y))


def build(graph: taso.Graph) -> None:
    x = graph.new_input(dims=(1, 64, 56, 56))
    for blocks, inner, first_stride in STAGES:
        for block in range(blocks):
            x = bottleneck(graph, x, inner, first_stride if block == 0 else 1)


def main() -> None:
    run(build, "Optimizes ResNet-50 in the shapes of TASO's example.")


if __name__ == "__main__":
    main()
