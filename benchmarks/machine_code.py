"""Kernels by machine code of our own against oneDNN's primitives, layer by layer, with weights out of the caches.

    python benchmarks/machine_code.py
    python benchmarks/machine_code.py --threads 2

Each line is a layer of a model that people run, computed by every algorithm that the oneDNN backend has for it, in the
layout that serves it best: microseconds, and billions of the layer's own multiplications and additions a second. A
kernel is measured as the search measures it: `taso.backends.onednn.measuring`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass, replace

import taso
from taso.backends.lowering import BLOCKED, LAST, Kernel, lower
from taso.backends.onednn.backend import OneDNNBackend

SERIES = 3


@dataclass(frozen=True)
class Layer:
    """A convolution (data, filters, taps, stride, groups) or, of data of two dimensions, a matrix product."""

    what: str
    data: tuple[int, ...]
    columns: int
    taps: int = 1
    stride: int = 1
    groups: int = 1

    @property
    def operations(self) -> int:
        """Multiplications and additions of the direct way."""
        if len(self.data) == 2:
            return 2 * self.data[0] * self.data[1] * self.columns
        _, channels, height, width = self.data
        pixels = -(-height // self.stride) * -(-width // self.stride)
        return 2 * pixels * self.columns * channels // self.groups * self.taps**2

    def graph(self) -> taso.Graph:
        graph = taso.new_graph()
        x = graph.new_input(dims=self.data)
        if len(self.data) == 2:
            graph.matmul(x, graph.new_weight(dims=(self.data[1], self.columns)))
            return graph
        weight = graph.new_weight(dims=(self.columns, self.data[1] // self.groups, self.taps, self.taps))
        graph.conv2d(input=x, weight=weight, strides=(self.stride, self.stride), padding="SAME")
        return graph


LAYERS = (
    Layer("BERT, projection", (128, 768), 768),
    Layer("BERT, first of two", (128, 768), 3072),
    Layer("BERT, second of two", (128, 3072), 768),
    Layer("ViT-S, first of two", (197, 384), 1536),
    Layer("ResNet-50, pointwise", (1, 64, 56, 56), 256),
    Layer("ResNet-50, pointwise", (1, 1024, 14, 14), 256),
    Layer("ResNet-50, pointwise", (1, 2048, 7, 7), 512),
    Layer("ResNet-50, 3×3", (1, 64, 56, 56), 64, 3),
    Layer("ResNet-50, 3×3", (1, 256, 14, 14), 256, 3),
    Layer("VGG-16, 3×3", (1, 64, 224, 224), 64, 3),
    Layer("VGG-16, 3×3", (1, 512, 28, 28), 512, 3),
    Layer("EfficientNet-B0, depthwise", (1, 240, 28, 28), 240, 5, 1, 240),
    Layer("MobileNetV2, depthwise", (1, 144, 56, 56), 144, 3, 1, 144),
    Layer("NasNet-A, depthwise", (1, 168, 42, 42), 168, 7, 1, 168),
    Layer("ResNeXt-50, in groups", (1, 128, 56, 56), 128, 3, 1, 32),
    Layer("ResNeXt-50, in groups", (1, 512, 14, 14), 512, 3, 1, 32),
    Layer("ResNeXt-50, in groups", (1, 1024, 14, 14), 1024, 3, 2, 32),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    backend = OneDNNBackend(parser.parse_args().threads)
    print(backend.device_key())
    for layer in LAYERS:
        shape = "×".join(map(str, layer.data))
        print(f"\n{layer.what}: {shape}, {layer.columns} columns, {layer.taps}×{layer.taps}")
        for name, kernels in by_algorithm(layer, backend):
            seconds = min(backend.measure(kernel) for kernel in kernels for _ in range(SERIES))
            print(f"  {name or 'primitive':14}{seconds * 1e6:10.1f} µs {layer.operations / seconds / 1e9:8.1f} GFLOP/s")


def by_algorithm(layer: Layer, backend: OneDNNBackend) -> Iterator[tuple[str, list[Kernel]]]:
    """Every algorithm, and the kernel in the layouts that it may have."""
    jobs = lower(layer.graph(), backend.lowering).jobs
    kernel = next(job.kernel for job in jobs if job.kernel.anchor is not None)
    layouts = (kernel.operands[0].layout,) if len(layer.data) == 2 else (BLOCKED, LAST)
    found: dict[str, list[Kernel]] = {}
    for layout in layouts:
        lies = replace(
            kernel, operands=(replace(kernel.operands[0], layout=layout), *kernel.operands[1:]),
            results=(replace(kernel.results[0], layout=layout),),
        )  # fmt: skip
        for name in ("", *backend.lowering.algorithms(lies)):
            found.setdefault(name, []).append(replace(lies, algorithm=name))
    yield from found.items()


if __name__ == "__main__":
    main()
