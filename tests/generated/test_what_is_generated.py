"""Random models hold all that they are said to: each operator, type, rank and form; none can vanish unseen."""

from __future__ import annotations

from collections import Counter
from functools import cache

import onnx.checker
import onnx.shape_inference
import pytest
from hypothesis import Phase, given, settings
from models import Arrays
from onnx import GraphProto, NodeProto, TensorProto
from strategy import DTYPES, THEMES, Generated, bodies_of, generated_models
from test_generated_models import ORACLES, SETTINGS, checked, told
from test_type_rules import NEWEST, OPERATORS

FEW = settings(SETTINGS, derandomize=True, phases=[Phase.generate])

WANTED = frozenset(
    {
        *(f"operator {op}" for op in (*OPERATORS, "Constant", "If", "Loop", "Scan")),
        *(f"{role} of type {TensorProto.DataType.Name(d)}" for d in DTYPES for role in ("input", "weight", "output")),
        *(f"{role} of rank {rank}" for rank in range(6) for role in ("input", "weight", "output")),
        *(f"body of {op} in a body" for op in ("If", "Loop", "Scan")),
        *(f"{op} that captures a {what}" for op in ("If", "Loop", "Scan") for what in ("value", "weight")),
        *(f"{op} with {what}" for op in ("Loop", "Scan") for what in ("state", "scanned outputs", "both", "two states")
          if (op, what) != ("Scan", "two states")),
        *(f"Loop ended by {end}" for end in ("count", "input", "condition")), "Loop whose state grows",
        "If with two outputs", "branches of one name", "Scan of two values",
        *(f"Scan with {of}" for of in ("scan_input_axes", "scan_output_axes", "scan_input_directions",
                                       "scan_output_directions")),
        *(f"opset {opset}" for opset in (7, 9, 10, 11, 12, 13, 18, 21, NEWEST)),
        "several outputs", "node with several outputs", "node with an output that nothing reads",
        "output that another node reads", "output that is an input",
        "weight read by two nodes", "value read by two nodes", "value read twice by a node",
        "input never read", "weight never read", "weight among the inputs", "optional input left empty",
        "operands that broadcast", "symbolic dimension", "dimension of 0",
        "node without a name", "two nodes of one name", "name that is no identifier", "name beyond ASCII",
        "name of digits", "value information",
    }
)  # fmt: skip


# ── what is in a model ───────────────────────────────────────────────────────────────────────────────────────────


def parts(made: Generated) -> set[str]:
    """What of `WANTED`, and what else, a model has."""
    graph = made.model.graph
    found = {f"opset {made.model.opset_import[0].version}", *made.marks}
    for one in (graph, *bodies_of(graph)):
        found |= {f"operator {node.op_type}" for node in one.node} | names(one) | reads(one)
        found |= {f"weight of type {TensorProto.DataType.Name(t.data_type)}" for t in one.initializer}
        found |= {f"weight of rank {len(t.dims)}" for t in one.initializer}
        for node in one.node:
            found |= nodes(node)
    return found | interface(made)


def interface(made: Generated) -> set[str]:
    graph = made.model.graph
    weights, found = {t.name for t in graph.initializer}, set[str]()
    for role, values in (("input", [v for v in graph.input if v.name not in weights]), ("output", graph.output)):
        for value in values:
            said = value.type.tensor_type
            found |= {f"{role} of type {TensorProto.DataType.Name(said.elem_type)}"}
            found |= {f"{role} of rank {len(said.shape.dim)}"}
            found |= {"symbolic dimension" for d in said.shape.dim if d.dim_param}
            found |= {"dimension of 0" for d in said.shape.dim if d.HasField("dim_value") and not d.dim_value}
    inputs, outputs = {v.name for v in graph.input}, [v.name for v in graph.output]
    used = Counter(n for one in (graph, *bodies_of(graph)) for node in one.node for n in node.input)
    said = {
        "several outputs": len(outputs) > 1, "output that is an input": bool(inputs & set(outputs)),
        "output that another node reads": any(used[n] for n in outputs),
        "input never read": any(not used[n] and n not in outputs for n in inputs - weights),
        "weight never read": any(not used[n] and n not in outputs for n in weights),
        "weight among the inputs": bool(inputs & weights), "value information": bool(graph.value_info),
    }  # fmt: skip
    return found | {what for what, holds in said.items() if holds}


def names(graph: GraphProto) -> set[str]:
    every = {n for node in graph.node for n in node.output if n} | {v.name for v in graph.input}
    called = [node.name for node in graph.node]
    said = {
        "node without a name": "" in called, "two nodes of one name": len(set(called) - {""}) < len(called),
        "name that is no identifier": any(" " in n or "/" in n for n in every),
        "name beyond ASCII": any(not n.isascii() for n in every), "name of digits": any(n.isdigit() for n in every),
    }  # fmt: skip
    return {what for what, holds in said.items() if holds}


def reads(graph: GraphProto) -> set[str]:
    weights = {t.name for t in graph.initializer}
    made = {n for node in graph.node for n in node.output}
    readers = Counter(n for node in graph.node for n in set(node.input) if n)
    left = {v.name for v in graph.output} | set(readers)
    said = {
        "weight read by two nodes": any(readers[n] > 1 for n in weights),
        "value read by two nodes": any(readers[n] > 1 for n in made),
        "node with an output that nothing reads": bool(made - left - {""}),
    }
    return {what for what, holds in said.items() if holds}


def nodes(node: NodeProto) -> set[str]:
    given = [n for n in node.input if n]
    said = {
        "node with several outputs": len(node.output) > 1,
        "value read twice by a node": len(set(given)) < len(given),
        "optional input left empty": "" in list(node.input)[: len(given)],
    }
    found = {what for what, holds in said.items() if holds}
    if node.op_type in ("If", "Loop", "Scan"):
        inner = {n.op_type for body in bodies_of(GraphProto(node=[node]), deep=False) for n in body.node}
        found |= {f"body of {op} in a body" for op in ("If", "Loop", "Scan") if op in inner}
        found |= {f"{node.op_type} with {a.name}" for a in node.attribute}
        if node.op_type == "If" and len(node.output) > 1:
            found.add("If with two outputs")
        if node.op_type == "If" and len({n for a in node.attribute for b in a.g.node for n in b.output}) < sum(
            len(b.output) for a in node.attribute for b in a.g.node
        ):
            found.add("branches of one name")
    return found


@cache
def census() -> Counter[str]:
    """In how many models of a few for each theme, and of some for none, each part is; all of them are valid."""
    seen: Counter[str] = Counter()

    def count(made: Generated) -> None:
        try:
            onnx.checker.check_model(made.model, full_check=True)
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError):
            return
        seen["models"] += 1
        seen.update(parts(made))

    for theme in ("", *sorted(set(THEMES))):
        most = 100 if not theme else 4 * THEMES.count(theme)
        settings(FEW, max_examples=most)(given(generated_models(theme))(count))()
    return seen


def absent(seen: Counter[str]) -> list[str]:
    return sorted(part for part in WANTED if not seen[part])


# ── claims ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_nothing_that_is_to_be_generated_is_absent() -> None:
    assert not absent(census())


def test_what_vanishes_is_noticed() -> None:
    for part in WANTED:
        without = Counter(census())
        del without[part]
        assert absent(without) == [part]
    lone: Counter[str] = Counter()
    settings(FEW, max_examples=5)(given(generated_models("Relu"))(lambda made: lone.update(parts(made))))()
    assert lone["operator Relu"] and len(absent(lone)) > len(WANTED) // 2


def test_most_models_have_an_oracle() -> None:
    judged: Counter[bool] = Counter()

    def judge(made: Generated) -> None:
        feeds: Arrays = made.feeds(0)
        judged[any(told(oracle, made.model, feeds) is not None for oracle in ORACLES)] += 1

    settings(FEW, max_examples=100)(given(generated_models())(judge))()
    assert judged[True] >= 0.9 * judged.total()


@pytest.mark.parametrize("op", ["If", "Loop", "Scan"])
def test_bodies_are_rewritten_and_come_out_equal(op: str) -> None:
    found: list[int] = []
    settings(FEW, max_examples=30)(given(generated_models(op))(lambda m: found.append(checked(m).body_rewrites)))()
    assert any(found)
