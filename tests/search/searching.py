"""Helpers for tests of the search: a backend of formulas, single steps of a search, and random graphs."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import models
import numpy as np
import onnx.checker
import onnx.shape_inference
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from models import Arrays
from numpy.typing import NDArray
from onnx import ModelProto
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, NotImplemented

import taso
from taso.backends.costs import CostDatabase
from taso.backends.lowering import Fusion, Layouts, Lowering
from taso.backends.reference import ReferenceBackend
from taso.graph.graph import Value
from taso.graph.operator import Weight
from taso.graph.ops.linear import CONV
from taso.graph.ops.movement import PAD
from taso.rules.collection import library
from taso.rules.constants import CONSTANTS, constant_weight
from taso.rules.instances import Instance, draw_instances
from taso.rules.matcher import Match
from taso.rules.pattern import Rule, Status
from taso.rules.text import parse_rule
from taso.search.optimize import Prepared, Settings, measuring_sizes, prepare
from taso.search.rewrite import apply
from taso.search.state import Draft, State

FUZZ = settings(
    max_examples=400 if os.environ.get("TASO_NIGHTLY") else 40, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)  # fmt: skip
"""The same graphs on every run, so that a failure is one."""

SEEDS = st.integers(0, (1 << 32) - 1)

ROUNDED = 1e-5
"""Relative error allowed where all is computed in float64, but new weights are rounded to float32."""


class FormulaBackend(ReferenceBackend):
    """The reference backend with blocked layouts and fusion: what a search weighs on a real one, without measuring."""

    name = "formula"

    def __init__(self) -> None:
        super().__init__()
        self.lowering = Lowering(Layouts(16), Fusion())

    def device_key(self) -> str:
        return "formula for tests"


def rule(text: str, status: Status = Status.TESTED) -> Rule:
    """The rule that a paragraph says, admitted without trial."""
    parsed = parse_rule(text)
    return parsed.judged(status, parsed.certificate)


@cache
def by_id() -> dict[str, Rule]:
    return {r.id: r for r in library()}


def prepared(graph: taso.Graph, backend: FormulaBackend | None = None) -> Prepared:
    """A graph as the first state of a search."""
    sizes = {k: v for k, v in measuring_sizes(graph, {}).items() if isinstance(v, int)}
    return prepare(graph, Settings(backend or FormulaBackend(), (), database(), sizes=sizes))


@cache
def database() -> CostDatabase:
    """A database for backends that do not use it."""
    return CostDatabase(Path("/nonexistent/folder/of/no/use"))


def drafted(state: State, match: Match) -> Draft:
    """A match carried out, as the search does it; raises `Refused`, `Cycle` or `GraphError`."""
    draft = Draft(state)
    apply(match, draft)
    draft.sweep()
    draft.check_acyclic()
    return draft


def random_inputs(graph: taso.Graph, seed: int = 0) -> Arrays:
    """Positive values, which no logarithm or root refuses."""
    rng = np.random.default_rng(seed)
    return {
        name: np.asarray(np.abs(rng.normal(size=v.type.static_shape)) + 0.3).astype(v.type.dtype.numpy)
        for name, v in zip(graph.input_names, graph.inputs, strict=True)
    }


def run_unoptimized(proto: ModelProto, feeds: Arrays) -> list[NDArray[np.generic]]:
    """Outputs of ONNX Runtime with its optimizations off; of the reference where it has no kernel for that."""
    try:
        return models.by_onnxruntime(proto, feeds)
    except (NotImplemented, Fail, InvalidArgument):
        return models.by_reference(proto, feeds)


# ── random graphs ────────────────────────────────────────────────────────────────────────────────────────────────

_CHANNELS = (4, 8, 16, 32)
_MOST = 20000


class _Growing:
    """A graph under construction; each method adds something at random and may do nothing."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.graph = taso.new_graph()
        self.values: list[Value] = []
        self._weights: dict[tuple[int, ...], list[Value]] = {}
        image = rng.choice([(1, 16, 6, 6), (2, 4, 5, 5), (1, 32, 4, 4)])
        matrix = rng.choice([(3, 8), (4, 16)])
        for dims in (image, matrix):
            self.values += [self.graph.new_input(dims=dims) for _ in range(rng.choice([1, 2]))]

    def weight(self, *dims: int) -> Value:
        """A weight of that shape, in four of ten cases one that is there already."""
        known = self._weights.setdefault(dims, [])
        if known and self.rng.random() < 0.4:
            return self.rng.choice(known)
        known.append(self.graph.new_weight(dims=dims))
        return known[-1]

    def filled(self, dims: tuple[int, ...], value: float) -> Value:
        return self.graph.new_weight(dims=dims, data=np.full(dims, value, np.float32))

    def grow(self) -> None:
        recent = self.values[-6:] if self.rng.random() < 0.6 else self.values
        x = self.rng.choice(recent)
        kinds = _ON_IMAGES if x.nDim == 4 else _ON_MATRICES if x.nDim == 2 else _ANYWHERE
        made = self.rng.choice(kinds)(self, x)
        if all(0 < v.type.size <= _MOST for v in made):
            self.values += made

    def convolutions(self, x: Value) -> list[Value]:
        activation = self.rng.choice(["NONE", "RELU", "SIGMOID"])
        padding = self.rng.choice(["SAME", "SAME", "VALID"]) if min(x.dim(2), x.dim(3)) >= 3 else "SAME"
        stride = self.rng.choice([1, 1, 2])
        windows = self.rng.sample([1, 3, 3, 1], self.rng.choice([1, 2, 3]))
        return [
            self.graph.conv2d(
                input=x, weight=self.weight(self.rng.choice(_CHANNELS), x.dim(1), k, k), strides=(stride, stride),
                padding=padding, activation=activation,
            )
            for k in windows
        ]  # fmt: skip

    def biased(self, x: Value) -> list[Value]:
        made = []
        for _ in range(self.rng.choice([1, 2])):
            c = self.rng.choice(_CHANNELS)
            made.append(self.graph.make(CONV, (x, self.weight(c, x.dim(1), 1, 1), self.weight(c))).output)
        return [self.graph.relu(v) for v in made] if self.rng.random() < 0.5 else made

    def padded(self, x: Value) -> list[Value]:
        pads = (0, 0, 1, 0, 0, 0, 1, 2)
        return [self.graph.make(PAD, (x,), {"pads": pads}).output]

    def grouped(self, x: Value) -> list[Value]:
        groups = self.rng.choice([2, 4])
        weight = self.weight(x.dim(1) * self.rng.choice([1, 2]), x.dim(1) // groups, 3, 3)
        return [self.graph.conv2d(input=x, weight=weight, strides=(1, 1), padding="SAME")] if x.dim(1) % 4 == 0 else []

    def sum_of_convolutions(self, x: Value) -> list[Value]:
        alike = [v for v in self.values if v.nDim == 4 and v.type.dims[2:] == x.type.dims[2:] and v.dim(0) == x.dim(0)]
        c, y = self.rng.choice(_CHANNELS), self.rng.choice(alike)
        parts = [
            self.graph.conv2d(input=v, weight=self.weight(c, v.dim(1), 3, 3), strides=(1, 1), padding="SAME")
            for v in (x, y)
        ]
        return [self.graph.add(*parts)]

    def concatenated_convolutions(self, x: Value) -> list[Value]:
        parts = [
            self.graph.conv2d(
                input=x, weight=self.weight(self.rng.choice(_CHANNELS), x.dim(1), 1, 1), strides=(1, 1), padding="SAME"
            )
            for _ in range(2)
        ]
        return [self.graph.concat(1, parts)]

    def normalized(self, x: Value) -> list[Value]:
        c = x.dim(1)
        return [
            self.graph.batchnorm(
                input=x, scale=self.weight(c), bias=self.weight(c), mean=self.weight(c), var=self.filled((c,), 0.7)
            )
        ]

    def pooled(self, x: Value) -> list[Value]:
        pool = self.rng.choice([self.graph.maxpool2d, self.graph.avgpool2d])
        return [pool(input=x, kernels=(2, 2), strides=(1, 1), padding="SAME")]

    def products(self, x: Value) -> list[Value]:
        return [self.graph.matmul(x, self.weight(x.dim(1), self.rng.choice([8, 16]))) for _ in range(2)]

    def chain(self, x: Value) -> list[Value]:
        return [self.graph.matmul(self.graph.matmul(x, self.weight(x.dim(1), 8)), self.weight(8, 16))]

    def sum_of_products(self, x: Value) -> list[Value]:
        n = self.rng.choice([8, 16])
        y = self.rng.choice([v for v in self.values if v.nDim == 2 and v.dim(0) == x.dim(0)])
        return [self.graph.add(*(self.graph.matmul(v, self.weight(v.dim(1), n)) for v in (x, y)))]

    def mapped(self, x: Value) -> list[Value]:
        g = self.graph
        return [self.rng.choice([g.relu, g.sigmoid, g.tanh, lambda v: g.mul(v, self.filled((), 0.5))])(x)]

    def unchanged(self, x: Value) -> list[Value]:
        g = self.graph
        neutral = [
            g.identity, g.dropout, lambda v: g.relu(g.relu(v)), lambda v: g.concat(0, [v]),
            lambda v: g.transpose(v, tuple(range(v.nDim))), lambda v: g.add(v, self.filled((1,) * v.nDim, 0.0)),
            lambda v: g.mul(v, self.filled((), 1.0)),
        ]  # fmt: skip
        return [self.rng.choice(neutral)(x)]

    def combined(self, x: Value) -> list[Value]:
        g = self.graph
        y = self.rng.choice([v for v in self.values if v.type == x.type])
        return [self.rng.choice([g.add, g.mul, g.max, lambda a, b: g.sub(x=a, y=b)])(x, y)]

    def scaled(self, x: Value) -> list[Value]:
        per_channel = self.weight(1, x.dim(1), *(1,) * (x.nDim - 2))
        return [self.rng.choice([self.graph.add, self.graph.mul])(x, per_channel)]

    def concatenated(self, x: Value) -> list[Value]:
        axis = self.rng.randrange(x.nDim)

        def rest(v: Value) -> list[object]:
            return [d for i, d in enumerate(v.type.dims) if i != axis]

        alike = [v for v in self.values if v.nDim == x.nDim and rest(v) == rest(x)]
        return [self.graph.concat(axis, [x, *(self.rng.choice(alike) for _ in range(self.rng.choice([1, 1, 2])))])]

    def divided(self, x: Value) -> list[Value]:
        even = [i for i in range(x.nDim) if x.dim(i) % 2 == 0]
        return self.graph.split(x, self.rng.choice(even), 2) if even else []

    def transposed(self, x: Value) -> list[Value]:
        perm = list(range(x.nDim))
        self.rng.shuffle(perm)
        return [self.graph.transpose(x, perm)]

    def reshaped(self, x: Value) -> list[Value]:
        shape = x.type.static_shape
        return [self.graph.reshape(x, self.rng.choice([(shape[0], x.type.size // shape[0]), shape, (x.type.size,)]))]


_ANYWHERE = (
    _Growing.mapped, _Growing.unchanged, _Growing.unchanged, _Growing.combined, _Growing.concatenated,
    _Growing.divided, _Growing.transposed, _Growing.reshaped,
)  # fmt: skip
_ON_IMAGES = (
    *_ANYWHERE, _Growing.scaled, _Growing.convolutions, _Growing.convolutions, _Growing.biased, _Growing.padded,
    _Growing.grouped, _Growing.sum_of_convolutions, _Growing.concatenated_convolutions, _Growing.normalized,
    _Growing.pooled,
)  # fmt: skip
_ON_MATRICES = (
    *_ANYWHERE, _Growing.scaled, _Growing.products, _Growing.products, _Growing.chain, _Growing.sum_of_products,
)  # fmt: skip


def _name_outputs(graph: taso.Graph, values: Sequence[Value], rng: random.Random) -> taso.Graph:
    """What nothing reads, up to two values that something does read, and now and then one value twice."""
    named = [v for _, v in graph.outputs]
    named += [rng.choice(values) for _ in range(rng.choice([0, 0, 1, 2]))]
    if rng.random() < 0.15:
        named.append(named[0])
    graph.set_outputs([(f"o{i}", v) for i, v in enumerate(named)])
    return graph


def random_graph(rng: random.Random, steps: int = 12) -> taso.Graph:
    """Convolutions, products, element-wise operators and movements on shared values and shared weights."""
    growing = _Growing(rng)
    for _ in range(steps):
        growing.grow()
    return _name_outputs(growing.graph, growing.values, rng)


# ── graphs in which rules apply ──────────────────────────────────────────────────────────────────────────────────


@cache
def instances(known: Rule) -> tuple[Instance, ...]:
    """Some small instances of a rule that its verdict covers, that ONNX can say and some oracle can judge."""
    most = known.certificate.dimensions or 1 << 30
    small = (
        i for i in draw_instances(known, random.Random(known.id), 96)
        if all(t.size < 2000 and t.rank <= most for t in i.types.values())
    )  # fmt: skip
    return tuple(itertools.islice((i for i in small if _judged(known, i)), 5))


def _judged(known: Rule, instance: Instance) -> bool:
    """Whether an oracle runs the source: none does where a window lies in the padding, or an image has no axes."""
    graph = taso.Graph()
    plant(graph, known, instance, random.Random(0), [], apart=True)
    proto = taso.export_onnx(graph)
    try:
        onnx.checker.check_model(proto, full_check=True)
        run_unoptimized(proto, random_inputs(graph))
    except (ValueError, onnx.shape_inference.InferenceError):
        return False
    return True


def asked_to_be_weight(known: Rule, name: str) -> bool:
    return any(str(c) == f"is_weight({name})" for c in known.conditions)


def asked_to_vary(known: Rule, name: str) -> bool:
    return any(str(c) == f"not is_weight({name})" for c in known.conditions)


def plant(
    graph: taso.Graph, known: Rule, instance: Instance, rng: random.Random, values: list[Value], *, apart: bool = False
) -> list[Value]:
    """Adds the source of a rule, on values that are there where their types fit; gives the values it replaces.

    With `apart` each variable is an input of its own, or a weight where the rule asks for one.
    """
    variables: dict[str, Value] = {}
    for name in known.variables:
        variables[name] = _variable(graph, known, instance, name, rng, () if apart else values, 0 if apart else 0.2)
        values.append(variables[name])
    made: list[tuple[Value, ...]] = []
    for node in known.source:
        inputs = [
            None if r is None else variables[r] if isinstance(r, str) else made[r.node][r.output] for r in node.inputs
        ]
        attrs = node.attributes([None if v is None else v.type for v in inputs], instance.environment)
        if node.op in CONSTANTS:
            made.append((graph.add_weight(constant_weight(node.op, attrs)),))
        else:
            made.append(graph.make(node.op, inputs, attrs).outputs)
            values.extend(made[-1])
    return [made[p.node][p.output] for p, _ in known.outputs]


def _variable(
    graph: taso.Graph, known: Rule, instance: Instance, name: str, rng: random.Random, values: Sequence[Value],
    weights: float,
) -> Value:  # fmt: skip
    t = instance.types[name]
    if name in instance.fills:
        return graph.add_weight(Weight(t, np.full(t.static_shape, instance.fills[name], t.dtype.numpy)))
    weight = asked_to_be_weight(known, name)
    fitting = [v for v in values if v.type == t and (v.node.op.name == "Weight") == weight]
    if fitting and rng.random() < 0.7:
        return rng.choice(fitting)
    if weight or (not asked_to_vary(known, name) and rng.random() < weights):
        drawn = np.abs(np.random.default_rng(rng.randrange(1 << 30)).normal(size=t.static_shape)) + 0.3
        return graph.add_weight(Weight(t, np.asarray(drawn).astype(t.dtype.numpy)))
    return graph.add_input(f"input{len(graph.inputs)}", t)


def planted_graph(rng: random.Random, rules: Sequence[Rule] | None = None) -> taso.Graph:
    """The sources of some rules, one reading from the other where types allow it."""
    graph, values = taso.Graph(), list[Value]()
    rules = rules or library()
    for _ in range(rng.choice([1, 2, 3, 5])):
        have = {v.type for v in values}
        tried = [(r, rng.choice(instances(r))) for r in (rng.choice(rules) for _ in range(8)) if instances(r)]
        best = max(tried, key=lambda pair: sum(t in have for t in pair[1].types.values()))
        plant(graph, *best, rng, values)
    return _name_outputs(graph, [v for v in values if v.node.op.name != "Weight"], rng)
