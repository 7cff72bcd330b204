"""The documents: every block of code runs, every link leads somewhere, the site builds without a warning."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import numpy as np
import onnx
import pytest
import qdq_models
from onnx import TensorProto, helper, numpy_helper

import taso
from taso import cli
from taso.cli_common import DONE, FAILED

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"])
BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.M | re.S)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
PARSED_ONLY = {"command-line.md", "generator.md"}
"""Pages whose commands take minutes, or files that are not here: that their options exist is all that is tried."""
LONG = {
    "taso rules verify": "judges the whole library",
    "taso rules verify taso/rules/lowering/onednn.rules": "judges a whole file",
    "taso bench model.onnx": "runs for a minute",
}
OTHER_COMMANDS = ("pip install", "python3 -m venv", ".venv/bin/", "python -m taso")
"""What is tried elsewhere: by `.ci/run`, or by whoever contributes."""

RULES = "[twice]\nRelu(Relu(x)) => Relu(x)\nexact: exact\n"


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> Iterator[tuple[str, str]]:
    for found in BLOCK.finditer(page.read_text("utf-8")):
        yield found[1], found[2]


WITH_CODE = [page for page in PAGES if any(language in ("python", "sh") for language, _ in blocks(page))]


def small_model() -> onnx.ModelProto:
    """image → convolution → relu → mean → product, for any number of images."""
    rng = np.random.default_rng(0)
    arrays = {"w": rng.standard_normal((8, 3, 3, 3)) / 5, "v": rng.standard_normal((8, 4))}
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["image", "w"], ["c"], pads=[1, 1, 1, 1]), helper.make_node("Relu", ["c"], ["r"]),
            helper.make_node("GlobalAveragePool", ["r"], ["p"]), helper.make_node("Flatten", ["p"], ["f"]),
            helper.make_node("MatMul", ["f", "v"], ["scores"]),
        ],
        "small", [helper.make_tensor_value_info("image", TensorProto.FLOAT, ["n", 3, 8, 8])],
        [helper.make_tensor_value_info("scores", TensorProto.FLOAT, ["n", 4])],
        [numpy_helper.from_array(a.astype(np.float32), name) for name, a in arrays.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the pages speak of."""
    monkeypatch.chdir(tmp_path)
    onnx.save(small_model(), "model.onnx")
    onnx.save(qdq_models.convnet(), "quantised.onnx")
    Path("my.rules").write_text(RULES, encoding="utf-8")
    # some commands speak of files of the checkout
    Path("taso").symlink_to(Path(taso.__file__).parent)
    np.save("image.npy", np.zeros((1, 3, 8, 8), np.float32))
    return tmp_path


def commands(block: str) -> Iterator[list[str]]:
    for line in block.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if words:
            yield words


def run_command(words: list[str], page: Path) -> None:
    line = shlex.join(words)
    if words[0] != "taso":
        assert line.startswith(OTHER_COMMANDS) or page.name in {"README.md", *PARSED_ONLY}, f"what is `{line}`?"
        return
    until = next((i for i, word in enumerate(words) if word in ("|", "&&", ">", "|&")), len(words))
    if page.name in PARSED_ONLY | {"README.md"} or " ".join(words[:until]) in LONG:
        cli.parser().parse_args(words[1:until])
        return
    assert cli.main(words[1:until]) in (DONE, FAILED), line


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_CODE, ids=name_of)
def test_every_block_of_code_runs(page: Path, desk: Path) -> None:
    if "onnxruntime" in page.read_text("utf-8"):
        pytest.importorskip("onnxruntime")
    if 'precision="int8"' in page.read_text("utf-8"):
        try:
            taso.backends.onednn.backend.OneDNNBackend(1, "int8")
        except taso.TasoError as reason:
            pytest.skip(str(reason))
    # pages may go on from a model that is at hand
    space: dict[str, object] = {"taso": taso, "graph": taso.load("model.onnx")}
    registered = dict(taso.graph.ops.REGISTRY)
    try:
        for number, (language, block) in enumerate(blocks(page)):
            if language == "python":
                exec(compile(block, f"{name_of(page)}, block {number}", "exec"), space)
            elif language == "sh":
                for words in commands(block):
                    run_command(words, page)
    finally:
        for added in taso.graph.ops.REGISTRY.keys() - registered.keys():
            taso.graph.ops.ONNX_NAMES.pop((taso.graph.ops.REGISTRY.pop(added).domain, added))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_say_their_language_and_extras_exist(page: Path) -> None:
    extras = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text("utf-8"), re.M))
    for language, _ in blocks(page):
        assert language in ("python", "sh", "text", "toml", ""), language
    for named in re.findall(r"pip install (?:-e )?'[\w.]*\[([\w,]+)\]'", page.read_text("utf-8")):
        assert set(named.split(",")) <= extras


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_inside_leads_to_a_file_and_a_heading(page: Path) -> None:
    for link in LINK.findall(BLOCK.sub("", page.read_text("utf-8"))):
        if re.match(r"https?://|mailto:", link):
            continue
        path, _, heading = unquote(link).partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        if heading:
            assert heading in headings(target), link


def headings(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.*)$", BLOCK.sub("", page.read_text("utf-8")), re.M)
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip()) for title in titles}


def test_every_page_is_in_the_navigation_and_every_entry_is_a_page() -> None:
    listed = set(re.findall(r": ([\w./-]+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.M))
    assert listed == {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}


def test_the_drawings_are_what_the_code_draws() -> None:
    spec = importlib.util.spec_from_file_location("drawings", DOCS / "drawings.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    drawn = module.drawings()
    assert drawn["before.svg"] != drawn["after.svg"]
    for name, drawing in drawn.items():
        assert (DOCS / "drawings" / name).read_text("utf-8") == drawing, f"run python docs/drawings.py ({name})"


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    )
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    reference = (tmp_path / "site" / "reference" / "python" / "index.html").read_text("utf-8")
    for name in ("taso.optimize", "taso.Graph.conv2d", "taso.InferenceSession.run"):
        assert f'id="{name}"' in reference
