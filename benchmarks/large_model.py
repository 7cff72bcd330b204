"""How much memory a large model takes on its way through: load, optimize, compile and run, save.

    python benchmarks/large_model.py --gigabytes 3 --backend onednn

makes a model with external data in a temporary folder, sends it through in a process of its own and prints that
process's peaks in MB. `VmHWM` is the most memory that it ever had resident, pages of mapped files among it: it must
stay below the weights once, the largest weight and `BESIDE`. `RssAnon` and `RssFile`, sampled step by step, say what
was memory of its own and what mapped pages. The programs stay in use while the model is saved, except where it all goes
into one file.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TypeVar

import numpy as np
import onnx
from onnx import TensorProto, helper

import taso

MB = 1 << 20
BESIDE = 400
"""MB beside the weights: the interpreter, its libraries, the protobuf, buffers, and the largest weight a second time
while it is laid out."""


def build(folder: Path, gigabytes: float, width: int, single_file: bool) -> Path:
    """A stack of MatMul, Add and Relu of `width` columns with `gigabytes` of weights; written layer by layer."""
    layers = max(1, round(gigabytes * (1 << 30) / (4 * width * width)))
    rng = np.random.default_rng(0)
    graph = helper.make_graph([], "large", [_float("x", ["N", width])], [_float("y", ["N", width])])
    with open(folder / "weights.bin", "wb") as file:
        for layer in range(layers):
            _write_layer(graph, file.write, rng, layer, layers, width, file.tell())
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path = folder / "model.onnx"
    if single_file:
        onnx.load_external_data_for_model(model, str(folder))
        for tensor in model.graph.initializer:
            tensor.ClearField("external_data")
            tensor.data_location = TensorProto.DEFAULT
        (folder / "weights.bin").unlink()
    path.write_bytes(model.SerializeToString())
    return path


def _float(name: str, shape: list[str | int]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def _write_layer(
    graph: onnx.GraphProto, write: Callable[[bytes], int], rng: np.random.Generator, layer: int, layers: int,
    width: int, offset: int,
) -> None:  # fmt: skip
    rows = rng.standard_normal((width // 64, width), np.float32) * np.float32(math.sqrt(2 / width))
    for block in range(64):
        write(np.roll(rows, block, 1).tobytes())
    tensor = graph.initializer.add(name=f"w{layer}", data_type=TensorProto.FLOAT, dims=[width, width])
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": "weights.bin", "offset": offset, "length": 4 * width * width}.items():
        tensor.external_data.add(key=key, value=str(value))
    graph.initializer.append(onnx.numpy_helper.from_array(np.full(width, 0.1, np.float32), f"b{layer}"))
    before, after = ("x" if layer == 0 else f"h{layer}"), ("y" if layer == layers - 1 else f"h{layer + 1}")
    graph.node.append(helper.make_node("MatMul", [before, f"w{layer}"], [f"m{layer}"]))
    graph.node.append(helper.make_node("Add", [f"m{layer}", f"b{layer}"], [f"a{layer}"]))
    graph.node.append(helper.make_node("Relu", [f"a{layer}"], [after]))


# ── the process that is measured ─────────────────────────────────────────────────────────────────────────────────


def status(field: str) -> float:
    """A line of /proc/self/status, in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) / 1024
    raise KeyError(field)


class Peaks:
    """The most memory that this process has resident while the block runs, looked at every few milliseconds, in MB."""

    FIELDS = ("VmRSS", "RssAnon", "RssFile")

    def __init__(self) -> None:
        self.most = dict.fromkeys(self.FIELDS, 0.0)
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def _look(self) -> None:
        for name in self.FIELDS:
            self.most[name] = max(self.most[name], status(name))

    def _watch(self) -> None:
        while not self._done.wait(0.004):
            self._look()

    def __enter__(self) -> Peaks:
        self._look()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.set()
        self._thread.join()
        self._look()


Step = TypeVar("Step")


def worker(source: str, target: str, backend: str, budget: int, width: int, single_file: bool) -> dict[str, object]:
    """Sends one model through and says what each step took."""
    steps: dict[str, object] = {"started with": status("VmRSS")}

    def measured(name: str, step: Callable[[], Step]) -> Step:
        started = time.perf_counter()
        with Peaks() as memory:
            result = step()
        steps[name] = {**memory.most, "seconds": time.perf_counter() - started}
        return result

    graph = measured("load", lambda: taso.load(source))
    best = measured("optimize", lambda: taso.optimize(graph, budget=budget, backend=backend, progress=False))
    x = {graph.input_names[0]: np.ones((1, width), np.float32)}
    programs = [measured(f"compile and run the {name} graph", lambda g=g: _run_once(g, backend, x))
                for name, g in (("original", graph), ("best", best))]  # fmt: skip
    if single_file:
        programs.clear()
    measured("save", lambda: taso.save(best, target, external_data=not single_file))
    programs.clear()
    report = best.report
    steps |= {"VmHWM": status("VmHWM"), "verified": report.verified, "decision": report.decision}
    steps["relative error"] = report.relative_error
    return steps


def _run_once(graph: taso.Graph, backend: str, feeds: dict[str, np.ndarray]) -> object:
    program = taso.compile(graph, backend=backend)
    program(feeds)
    return program


# ── the process that measures ────────────────────────────────────────────────────────────────────────────────────


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--gigabytes", type=float, default=3.0, help="weights of the model (default: %(default)s)")
    parser.add_argument("--width", type=int, default=8192, help="rows and columns of a weight (default: %(default)s)")
    parser.add_argument("--backend", default="reference", help="where to measure (default: %(default)s)")
    parser.add_argument("--budget", type=int, default=2, help="graphs to expand (default: %(default)s)")
    parser.add_argument("--single-file", action="store_true", help="weights inside the model's file (below 2 GB)")
    parser.add_argument("--worker", nargs=2, metavar=("IN", "OUT"), help=argparse.SUPPRESS)
    settings = parser.parse_args()
    if settings.worker:
        source, target = settings.worker
        single = settings.single_file
        print(json.dumps(worker(source, target, settings.backend, settings.budget, settings.width, single)))
        return 0
    needed = int(2.5 * settings.gigabytes * (1 << 30)) + (1 << 30)
    with tempfile.TemporaryDirectory(prefix="large_model_") as name:
        free = shutil.disk_usage(name).free
        if free < needed:
            print(f"{free // MB} MB are free in {name}, and {needed // MB} are needed", file=sys.stderr)
            return 1
        return _run(Path(name), settings)


def _run(folder: Path, settings: argparse.Namespace) -> int:
    source = build(folder, settings.gigabytes, settings.width, settings.single_file)
    target = folder / "best.onnx"
    command = [
        sys.executable, __file__, "--backend", settings.backend, "--budget", str(settings.budget),
        "--width", str(settings.width), "--worker", str(source), str(target),
        *(["--single-file"] if settings.single_file else []),
    ]  # fmt: skip
    found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])
    size = sum(f.stat().st_size for f in folder.iterdir() if not f.name.startswith("best")) / MB
    written = sum(f.stat().st_size for f in folder.iterdir() if f.name.startswith("best")) / MB
    largest = 4 * settings.width**2 / MB
    print(f"model: {size:.0f} MB, of which the largest weight {largest:.0f} MB; written: {written:.0f} MB")
    for name, value in found.items():
        if isinstance(value, dict):
            print(f"{name}: {value['VmRSS']:.0f} MB resident at most ({value['RssAnon']:.0f} anonymous at most, "
                  f"{value['RssFile']:.0f} of files at most), {value['seconds']:.1f} s")  # fmt: skip
        else:
            print(f"{name}: {value:.3g}" if isinstance(value, float) else f"{name}: {value}")
    bound = size + largest + BESIDE
    print(f"resident peak {found['VmHWM']:.0f} MB, {found['VmHWM'] / size:.2f} × the model; bound {bound:.0f} MB")
    return 0 if found["VmHWM"] <= bound else 1


if __name__ == "__main__":
    sys.exit(main())
