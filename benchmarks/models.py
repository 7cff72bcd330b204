"""The models that benchmarks speak of by name: ONNX files, the suite's, those of the onnx package, and the examples."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import taso

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = (
    "resnet50", "resnext50", "nasnet_a", "nasrnn", "bert", "inception_v3", "squeezenet", "two_branch",
)  # fmt: skip


def load(name: str) -> taso.Graph:
    """`light:resnet50` is a model of the onnx package with seeded weights, `example:nasrnn` ours, `zoo:vgg16` of the
    suite (benchmarks/zoo.py), all else a path.
    """
    kind, _, rest = name.partition(":")
    if kind == "light":
        sys.path.insert(0, str(ROOT / "tests"))
        return taso.load(importlib.import_module("graph.models").seeded_light(rest))
    if kind == "zoo":
        return taso.load(importlib.import_module("zoo").build(rest))
    if kind == "example":
        sys.path.insert(0, str(ROOT / "examples"))
        graph = taso.new_graph()
        importlib.import_module(rest).build(graph)
        return graph
    return taso.load(name)
