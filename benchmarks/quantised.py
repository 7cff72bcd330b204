"""A model of the suite quantised to 8 bits as ONNX Runtime's quantiser does by default, and how fast it runs.

QuantizeLinear and DequantizeLinear around every operator that can be of integers, a scale for each channel of weights,
activations of uint8 with zero points, ranges from random inputs. Compared are taso in float32 and with
`precision="int8"`, the model before it was quantised, and ONNX Runtime; all in turns, in one process and on the same
number of threads.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from numpy.typing import NDArray
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

sys.path.insert(0, str(Path(__file__).resolve().parent))

import zoo

import taso
from taso.search.verify import relative_error

Feeds = dict[str, NDArray[np.generic]]


class _Drawn(CalibrationDataReader):  # type: ignore[misc]  # onnxruntime says nothing of its types
    """Random inputs from which ranges are taken."""

    def __init__(self, feeds: Iterator[Feeds]) -> None:
        self._feeds = feeds

    def get_next(self) -> Feeds | None:
        return next(self._feeds, None)


def drawn(model: onnx.ModelProto, seed: int) -> Feeds:
    """Random values for the inputs of a model."""
    rng, feeds = np.random.default_rng(seed), Feeds()
    for given in model.graph.input:
        tensor = given.type.tensor_type
        shape = [d.dim_value for d in tensor.shape.dim]
        if tensor.elem_type == onnx.TensorProto.FLOAT:
            feeds[given.name] = rng.standard_normal(shape).astype(np.float32)
        else:
            feeds[given.name] = rng.integers(0, 2, shape)
    return feeds


def quantised(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model with its products in 8 bits, batch normalizations folded before."""
    with tempfile.TemporaryDirectory() as folder:
        plain, folded, made = (str(Path(folder) / f"{n}.onnx") for n in ("plain", "folded", "made"))
        onnx.save(model, plain)
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = folded
        onnxruntime.InferenceSession(plain, options, providers=["CPUExecutionProvider"])
        quantize_static(
            folded, made, _Drawn(drawn(model, seed) for seed in range(4)), quant_format=QuantFormat.QDQ,
            per_channel=True, activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8,
        )  # fmt: skip
        return onnx.load(made)


def runs(model: onnx.ModelProto, threads: int) -> dict[str, Callable[[Feeds], object]]:
    """What is timed, by name."""
    integer, options = quantised(model), onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = onnxruntime.InferenceSession(integer.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return {
        "taso, before it was quantised": taso.compile(taso.load(model), "onednn", threads),
        "taso, float32": taso.compile(taso.load(integer), "onednn", threads),
        "taso, int8": taso.compile(taso.load(integer), "onednn", threads, "int8"),
        "ONNX Runtime": lambda feeds: session.run(None, feeds),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=["resnet50"], help="names of models of the suite")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    for name in args.models:
        model = zoo.build(name)
        feeds, programs = drawn(model, 100), runs(model, args.threads)
        times: dict[str, list[float]] = {label: [] for label in programs}
        for _ in range(args.rounds + 1):
            for label, program in programs.items():
                program(feeds)
                started = time.perf_counter()
                program(feeds)
                times[label].append(time.perf_counter() - started)
        for label, taken in times.items():
            print(f"{name}: {label}: {statistics.median(taken[1:]) * 1e3:.2f} ms")
        outputs = [n.name for n in model.graph.output]
        names = ("taso, float32", "taso, int8", "ONNX Runtime")
        exact, ours, theirs = (_found(programs[n], feeds, outputs) for n in names)
        for other, found in (("taso in int8", ours), ("ONNX Runtime", theirs)):
            print(f"{name}: {other} differs from taso in float32 by {relative_error(found, exact):.1e}")


def _found(program: Callable[[Feeds], object], feeds: Feeds, outputs: Sequence[str]) -> NDArray[np.generic]:
    """The first output."""
    found = program(feeds)
    return np.asarray(found[outputs[0]] if isinstance(found, dict) else found[0] if isinstance(found, list) else found)


if __name__ == "__main__":
    main()
