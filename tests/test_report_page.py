"""The report as a page: its numbers are the report's, and in a browser it works, is silent and asks for nothing."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import numpy as np
import onnx
import onnx.parser
import pytest
from browser import MISSING, Browser, browser
from searching import FormulaBackend

import taso
from taso import cli
from taso.graph.picture import LAYOUT, OPERATOR, PLANNED, REWRITTEN
from taso.search.result import Report
from taso.search.telling import Files, operator_costs

EVIL = "<script>window.hacked=1</script><img src=//127.0.0.1:9/x onerror=\"window.hacked=1\">"
FILES = Files("some/model.onnx", "out/fast.onnx", 2_000_000, 1_500_000)


@pytest.fixture(scope="module")
def report() -> Report:
    """Two convolutions of one input are merged, and what follows stays."""
    graph = taso.new_graph()
    x = graph.new_input(dims=(1, 32, 14, 14))
    rng = np.random.default_rng(0)
    parts = []
    for _ in range(2):
        weight = graph.new_weight(dims=(32, 32, 1, 1), data=rng.normal(size=(32, 32, 1, 1)).astype(np.float32))
        parts.append(graph.conv2d(input=x, weight=weight, strides=(1, 1), padding="SAME", activation="RELU"))
    left, right = (graph.maxpool2d(input=p, kernels=(3, 3), strides=(1, 1), padding="SAME") for p in parts)
    y = graph.mul(graph.tanh(left), right)
    for _ in range(2):
        y = graph.maxpool2d(input=graph.sigmoid(y), kernels=(3, 3), strides=(2, 2), padding="SAME")
    found = taso.optimize(graph, backend=FormulaBackend(), budget=20).report
    assert any("Conv" in rewrite.rule for rewrite in found.rewrites)
    return found


def words(page: str) -> str:
    """What a page says, without mark-up."""
    shown = re.sub(r"<(style|script).*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", shown)).split())


# ── what is told ─────────────────────────────────────────────────────────────────────────────────────────────────


def test_costs_of_kernels_in_the_pictures_add_up_to_those_of_the_report(report: Report) -> None:
    assert report.before is not None and report.after is not None
    for picture, cost, kernels in (
        (report.before, report.cost_before, report.kernels_before),
        (report.after, report.cost_after, report.kernels_after),
    ):
        ran = [b for b in picture.boxes if b.kind in (OPERATOR, LAYOUT) and b.cost_ms]
        assert sum(b.cost_ms or 0.0 for b in ran) == pytest.approx(cost, rel=1e-3) and len(ran) == kernels
    costs = operator_costs(report.before, report.after)
    assert sum(c.after_ms for c in costs) == pytest.approx(report.cost_after, rel=1e-3)


def test_what_rules_made_and_what_they_replaced_is_marked_and_nothing_else(report: Report) -> None:
    assert report.before is not None and report.after is not None
    for box in report.after.boxes:
        assert all(step.changed == bool(step.rule) for step in box.steps)
        assert (box.change == REWRITTEN) == any(step.changed for step in box.steps)
    gone = {step.operator for box in report.before.boxes for step in box.steps if step.changed}
    assert "Conv" in gone and "MaxPool" not in gone and "Tanh" not in gone
    made = {step.rule for box in report.after.boxes for step in box.steps}
    assert made & {rewrite.rule for rewrite in report.rewrites}
    assert {box.change for box in report.before.boxes} <= {"", REWRITTEN, PLANNED}


def test_the_report_survives_json_and_the_page_is_made_of_it_alone(report: Report) -> None:
    again = Report.from_json(report.to_json())
    assert again == report and again.to_html(FILES) == report.to_html(FILES)


def test_page_and_markdown_tell_the_same_numbers(report: Report) -> None:
    page, text = words(report.to_html(FILES)), report.to_markdown(FILES).replace("\\", "")
    told = [f"{report.cost_before:.3f} ms", f"{report.cost_after:.3f} ms", "2.00 MB", "1.50 MB", report.device,
            f"{report.relative_error:.1e}", *report.machine.values()]  # fmt: skip
    told += [f"{r.gain_ms:.3f} ms" for r in report.rewrites] + [r.where for r in report.rewrites]
    told += [r.certificate for r in report.rewrites] + [r.command for r in report.rewrites]
    assert all(said and said in page and said in text for said in told)
    assert all(r.rule in page and r.rule.replace("|", "\\|") in report.to_markdown() for r in report.rewrites)


def test_a_report_without_pictures_is_a_page_all_the_same() -> None:
    page = Report("b", "d", decision=EVIL).to_html(Files(EVIL))
    assert "viewer" not in words(page) and "<img" not in page and page.count("<script>") == 1


def test_measured_times_come_with_their_spread(report: Report) -> None:
    timed = Report.from_json(report.to_json())
    timed.measured_before, timed.measured_after, timed.ratio_low, timed.ratio_high = 3.0, 2.0, 1.4, 1.6
    timed.quartiles = [2.75, 3.25, 1.875, 2.125]
    page = words(timed.to_html())
    assert "1.50×" in page and "2.750 to 3.250 ms" in page and "1.875 to 2.125 ms" in page and "1.400 to 1.600" in page
    assert "2.750 to 3.250 ms" in timed.to_markdown() and Report.from_json(timed.to_json()) == timed


def test_the_command_line_writes_a_page(tmp_path: Path) -> None:
    text = '<ir_version: 8, opset_import: ["": 17]>\ng (float[2, 3] x) => (float[2, 3] y) { z = Relu (x) y = Relu (z) }'
    onnx.save(onnx.parser.parse_model(text), tmp_path / "m.onnx")
    asked = [str(tmp_path / "m.onnx"), "--backend", "reference", "-q", "-o", str(tmp_path / "o.onnx")]
    assert cli.main(["optimize", *asked, "--report", str(tmp_path / "r.html")]) == 0
    page = words((tmp_path / "r.html").read_text("utf-8"))
    assert "m.onnx → o.onnx" in page and "Relu(Relu(x)) => Relu(x)" in page
    assert f"{(tmp_path / 'o.onnx').stat().st_size} bytes" in page


# ── in a browser ─────────────────────────────────────────────────────────────────────────────────────────────────

in_a_browser = pytest.mark.skipif(bool(MISSING), reason=f"{MISSING} (Debian: chromium, chromium-driver)")


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    with browser() as opened:
        yield opened


READY = "return [...document.querySelectorAll('svg.canvas')].every((svg) => svg.dataset.scale)"


def opened(window: Browser, page: str, folder: Path) -> Path:
    path = folder / "page.html"
    path.write_text(page, "utf-8")
    window.console(), window.requests()
    window.open(path)
    window.until(READY)
    return path


def assert_quiet(window: Browser, path: Path) -> None:
    """Nothing was said on the console, and nothing asked for but the page."""
    assert window.console() == []
    assert {r for r in window.requests() if not r.startswith("data:,")} == {path.absolute().as_uri()}


@in_a_browser
def test_the_page_opens_silently_asks_for_nothing_and_marks_what_changed(
    window: Browser, report: Report, tmp_path: Path
) -> None:
    path = opened(window, report.to_html(FILES), tmp_path)
    assert report.after is not None
    found = window.run(
        "return [...document.querySelectorAll('#after .box')].map((b) => [b.classList.contains('rewritten'),"
        " getComputedStyle(b.querySelector('rect')).stroke])"
    )
    assert isinstance(found, list) and len(found) == len(report.after.boxes)
    colours = {changed: {colour for told, colour in found if told is changed} for changed in (True, False)}
    assert [told for told, _ in found] == [box.change == REWRITTEN for box in report.after.boxes]
    assert len(colours[True]) == 1 and not colours[True] & colours[False]
    assert window.run("return document.querySelectorAll('.course path.best').length") == 1
    assert_quiet(window, path)


@in_a_browser
def test_wheel_buttons_and_keys_zoom_and_dragging_moves(window: Browser, report: Report, tmp_path: Path) -> None:
    path = opened(window, report.to_html(FILES), tmp_path)
    window.run("document.getElementById('graphs').scrollIntoView()")
    at = window.run("const r = document.querySelector('#after .stage').getBoundingClientRect();"
                    "return [Math.round(r.x + r.width / 2), Math.round(r.y + r.height / 2)]")  # fmt: skip
    assert isinstance(at, list)
    wheel = {"type": "scroll", "x": at[0], "y": at[1], "deltaX": 0, "deltaY": -400, "duration": 0}
    view = "return document.querySelector('#after svg.canvas').getAttribute('viewBox').split(' ').map(Number)"
    start = window.run(view)
    window.act({"type": "wheel", "id": "w", "actions": [wheel]})
    zoomed = window.until(f"const now = (() => {{ {view} }})(); return now[2] < {start[2]} * 0.7 && now")  # type: ignore[index]  # four numbers
    window.act({"type": "pointer", "id": "m", "actions": [
        {"type": "pointerMove", "x": at[0], "y": at[1], "duration": 0}, {"type": "pointerDown", "button": 0},
        {"type": "pointerMove", "x": at[0] - 60, "y": at[1] - 40, "duration": 50}, {"type": "pointerUp", "button": 0},
    ]})  # fmt: skip
    moved = window.until(f"const now = (() => {{ {view} }})(); return now[0] > {zoomed[0]} && now")  # type: ignore[index]  # four numbers
    assert moved[1] > zoomed[1] and moved[2] == pytest.approx(zoomed[2])  # type: ignore[index]  # four numbers
    window.run("document.querySelector('#after [data-do=fit]').click()")
    whole = window.until(f"const now = (() => {{ {view} }})(); return now[0] <= 0 && now[1] <= 0 && now")
    size = window.run("const d = document.querySelector('#after svg.canvas').dataset; return [+d.width, +d.height]")
    assert whole[0] + whole[2] >= size[0] - 1 and whole[1] + whole[3] >= size[1] - 1  # type: ignore[index]  # numbers
    window.run("document.querySelector('#after [data-do=in]').click()")
    assert window.until(f"const now = (() => {{ {view} }})(); return now[2] < {whole[2]} * 0.8")  # type: ignore[index]  # four numbers
    assert_quiet(window, path)


@in_a_browser
def test_a_click_tells_a_box_and_a_rewrite_is_shown_in_both_graphs(
    window: Browser, report: Report, tmp_path: Path
) -> None:
    path = opened(window, report.to_html(FILES), tmp_path)
    window.run("document.querySelector('tr[data-rule]').click()")
    found = "return [...document.querySelectorAll('#{} .box.found')].map((b) => b.querySelector('.op').textContent)"
    assert "Conv" in window.run(found.format("after")) and "Conv" in window.run(found.format("before"))  # type: ignore[operator]  # lists
    details = str(window.run("return document.querySelector('#after .details').textContent"))
    assert report.rewrites[0].rule in details
    window.run("const s = document.querySelector('#before input'); s.value = 'maxpool'; "
               "s.dispatchEvent(new Event('input'))")  # fmt: skip
    assert set(window.run(found.format("before"))) == {"MaxPool"}  # type: ignore[call-overload]  # a list
    window.run("document.querySelector('#after [data-do=next]').click()")
    assert window.run("return document.querySelector('#after .box.chosen').classList.contains('rewritten')")
    assert_quiet(window, path)


@in_a_browser
def test_names_that_are_mark_up_do_nothing_and_are_shown_as_they_are(window: Browser, tmp_path: Path) -> None:
    node = onnx.helper.make_node("Relu", [EVIL], ["z"], name=EVIL)
    last = onnx.helper.make_node("Relu", ["z"], [EVIL + "!"], name="</script>" + EVIL)
    foreign = onnx.helper.make_node("<img src=x onerror=window.hacked=1>", ["z"], ["w"], domain="</style><b>")
    types = [onnx.helper.make_tensor_value_info(n, 1, [2, 3]) for n in (EVIL, EVIL + "!", "w")]
    made = onnx.helper.make_graph([node, last, foreign], EVIL, types[:1], types[1:])
    opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("</style><b>", 1)]
    graph = taso.load(onnx.helper.make_model(made, ir_version=8, opset_imports=opsets))
    best = taso.optimize(graph, backend="reference", budget=5)
    assert best.report.rewrites
    path = opened(window, best.report.to_html(Files(EVIL, EVIL)), tmp_path)
    window.run("document.querySelector('tr[data-rule]').click()")
    for box in range(len(graph.operators)):
        window.run("document.querySelectorAll('#before .box')[arguments[0]]"
                   ".dispatchEvent(new MouseEvent('click', {bubbles: true}))", box + 1)  # fmt: skip
    assert window.run("return document.querySelectorAll('img, b b, main script:not([type])').length") == 0
    assert window.run("return window.hacked === undefined && document.body.textContent.includes(arguments[0])", EVIL)
    assert_quiet(window, path)


@in_a_browser
def test_what_a_notebook_shows_works_inside_its_frame(window: Browser, report: Report, tmp_path: Path) -> None:
    path = tmp_path / "notebook.html"
    path.write_text(f"<!DOCTYPE html><link rel=icon href='data:,'><div>{report._repr_html_()}</div>", "utf-8")
    window.console(), window.requests()
    window.open(path)
    window.enter("iframe")
    window.until(READY)
    view = "document.querySelector('#after svg.canvas').dataset.scale"
    before = window.run(f"return {view}")
    window.run("document.querySelector('#after [data-do=in]').click()")
    assert window.until(f"return {view} > {before} * 1.2")
    assert window.console() == []
    assert not [r for r in window.requests() if r.startswith(("http", "ws", "//"))]
