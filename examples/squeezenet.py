"""SqueezeNet 1.1: eight fire modules (Iandola et al. 2016)."""

from __future__ import annotations

from common import run

import taso

SIZE = 224
CLASSES = 1000
STAGES = (((16, 64), (16, 64)), ((32, 128), (32, 128)), ((48, 192), (48, 192), (64, 256), (64, 256)))
"""For each stage its fire modules: channels that it squeezes to, and channels of each of its two expansions."""


def convolution(graph: taso.Graph, x: taso.Tensor, channels: int, window: int, stride: int = 1) -> taso.Tensor:
    weight = graph.new_weight(dims=(channels, x.dim(1), window, window))
    return graph.conv2d(input=x, weight=weight, strides=(stride, stride), padding="SAME", activation="RELU")


def fire(graph: taso.Graph, x: taso.Tensor, squeezed: int, expanded: int) -> taso.Tensor:
    x = convolution(graph, x, squeezed, 1)
    return graph.concat(1, [convolution(graph, x, expanded, 1), convolution(graph, x, expanded, 3)])


def build(graph: taso.Graph) -> None:
    x = graph.new_input(dims=(1, 3, SIZE, SIZE))
    x = convolution(graph, x, 64, 3, 2)
    for modules in STAGES:
        x = graph.maxpool2d(input=x, kernels=(3, 3), strides=(2, 2), padding="VALID")
        for squeezed, expanded in modules:
            x = fire(graph, x, squeezed, expanded)
    x = convolution(graph, x, CLASSES, 1)
    graph.avgpool2d(input=x, kernels=(x.dim(2), x.dim(3)), strides=(1, 1), padding="VALID")


def main() -> None:
    run(build, "Optimizes SqueezeNet 1.1 on images of 224×224.")


if __name__ == "__main__":
    main()
