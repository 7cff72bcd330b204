"""Pictures of graphs: what a box tells, what is the same in two graphs, and that no name of a model is mark-up."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict

import pytest
from models import model

import taso
from taso.graph.drawing import data_island, graph_page, heat, safe, svg
from taso.graph.picture import INPUT, OUTPUT, counterparts, picture, read_picture

EVIL = "</script><script>window.hacked=1</script><img src=x onerror='hacked=1'>\"&\x00\ud800"


def two_convolutions() -> taso.Graph:
    graph = taso.new_graph()
    x = graph.new_input(dims=(1, 4, 8, 8))
    for window in (1, 3):
        weight = graph.new_weight(dims=(4, 4, window, window))
        x = graph.conv2d(input=x, weight=weight, strides=(window, window), padding="SAME", activation="RELU")
    return graph


def test_a_box_tells_operator_window_settings_and_weights() -> None:
    boxes = picture(two_convolutions()).boxes
    assert [box.label for box in boxes] == ["Input", "Conv", "Relu", "Conv", "Relu", "Output"]
    assert boxes[0].kind == INPUT and boxes[-1].kind == OUTPUT
    assert boxes[1].steps[0].detail == "1×1" and boxes[3].steps[0].detail.startswith("3×3, pad (")
    assert boxes[3].steps[0].attributes["strides"] == "(3, 3)" and "group" not in boxes[3].steps[0].attributes
    assert boxes[3].steps[0].weights == ["float[4×4×3×3]"] and boxes[3].outputs == ["float[1×4×3×3]"]
    assert [box.inputs for box in boxes[1:3]] == [[(0, "float[1×4×8×8]")], [(1, "float[1×4×8×8]")]]


def test_a_drawing_is_xml_that_shows_every_box_whatever_the_names() -> None:
    graph = two_convolutions()
    graph.set_outputs([(EVIL, graph.outputs[0][1])])
    made = picture(graph)
    root = ElementTree.fromstring(svg(made))
    names = {"svg", "g", "rect", "text", "tspan", "path", "title", "style"}
    assert {e.tag.removeprefix("{http://www.w3.org/2000/svg}") for e in root.iter()} <= names
    assert len([e for e in root.iter() if e.get("data-box")]) == len(made.boxes)
    assert "window.hacked=1" in "".join(root.itertext())


def test_no_text_of_a_model_ends_what_it_stands_in() -> None:
    graph = two_convolutions()
    graph.set_outputs([(EVIL, graph.outputs[0][1])])
    page = graph_page(picture(graph), EVIL)
    assert page.count("<script>") == 1 and page.count("</script>") == 2 and "<img" not in page
    page.encode("utf-8")
    island = data_island("x", [EVIL])
    assert json.loads(island[island.index(">") + 1 : island.rindex("<")]) == [EVIL]
    assert safe("a\x00<b>'\"&\n") == "a\ufffd&lt;b&gt;&#x27;&quot;&amp;\n"


def test_a_picture_survives_json_and_what_is_none_is_refused() -> None:
    made = picture(two_convolutions())
    data = json.loads(json.dumps(asdict(made)))
    assert read_picture(data) == made
    for spoilt in (
        {}, [], {"boxes": [1]}, {"boxes": [{**data["boxes"][1], "inputs": [[99, "x"]]}]},
        {"boxes": [{**data["boxes"][0], "kind": "other"}]}, {"boxes": [{**data["boxes"][0], "cost_ms": "1"}]},
    ):  # fmt: skip
        with pytest.raises((TypeError, KeyError)):
            read_picture(spoilt)


def test_colours_of_costs_run_from_pale_to_red() -> None:
    channels = [int(heat(share)[3:5], 16) for share in (0.0, 0.1, 0.3, 0.6, 1.0)]
    assert channels == sorted(channels, reverse=True) and heat(2.0) == heat(1.0)


def test_nodes_that_rewrites_left_alone_are_found_again_below_those_they_changed() -> None:
    text = """g (float[4, 4] x) => (float[4, 4] y)
    { a = Tanh (x) b = Relu (a) c = Relu (b) d = Tanh (c) e = Relu (d) y = Tanh (e) }"""
    graph = taso.load(model(text))
    best = taso.optimize(graph, backend="reference", budget=5, rules="Relu(Relu(x)) => Relu(x)", verify=False)
    same = counterparts(graph, best)
    names = {name: value for value, said in graph.info.value_names.items() for name in said}
    kept = {name for name, value in names.items() if value.node in same.values()}
    # of two in a row the first is what the second becomes
    assert kept == {"a", "b", "d", "e", "y"} | {name for name in ("x",) if name in names}
    tanh = [(n.guid, same[n].guid) for n in best.operators if n.op.name == "Tanh"]
    assert len(tanh) == 3 and tanh == sorted(tanh)
