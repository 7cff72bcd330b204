"""The sixteen blocks of ResNeXt-50 in 32 groups, with the layers before them (Xie et al. 2017; TASO's example)."""

from __future__ import annotations

from common import run

import taso

SIZE = 224
GROUPS = 32
STAGES = ((3, 128, 1), (4, 256, 2), (6, 512, 2), (3, 1024, 2))
"""Blocks, inner channels, stride of the first block."""


def convolution(
    graph: taso.Graph, x: taso.Tensor, channels: int, window: int, stride: int = 1, groups: int = 1,
    activation: str = "RELU",
) -> taso.Tensor:  # fmt: skip
    weight = graph.new_weight(dims=(channels, x.dim(1) // groups, window, window))
    return graph.conv2d(input=x, weight=weight, strides=(stride, stride), padding="SAME", activation=activation)


def block(graph: taso.Graph, x: taso.Tensor, inner: int, stride: int) -> taso.Tensor:
    """relu(shortcut + three convolutions, the middle one in groups); a projection where the shape changes."""
    y = convolution(graph, x, inner, 1)
    y = convolution(graph, y, inner, 3, stride, GROUPS)
    y = convolution(graph, y, 2 * inner, 1, activation="NONE")
    if stride > 1 or x.dim(1) != 2 * inner:
        x = convolution(graph, x, 2 * inner, 1, stride)
    return graph.relu(graph.add(x, y))


def build(graph: taso.Graph) -> None:
    x = graph.new_input(dims=(1, 3, SIZE, SIZE))
    x = convolution(graph, x, 64, 7, 2)
    x = graph.maxpool2d(input=x, kernels=(3, 3), strides=(2, 2), padding="SAME")
    for blocks, inner, first_stride in STAGES:
        for number in range(blocks):
            x = block(graph, x, inner, first_stride if number == 0 else 1)


def main() -> None:
    run(build, "Optimizes ResNeXt-50 in the shapes of TASO's example.")


if __name__ == "__main__":
    main()
