"""Runtimes on an NVIDIA GPU, as `peers` runs them: inputs and outputs stay on the GPU, and a run ends when it is done.

Float32 is float32 everywhere: TF32 is off in PyTorch, ONNX Runtime and TensorRT, and taso does not use it unless told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import metadata

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.generic]
Feeds = Mapping[str, Array]
Runner = Callable[[Feeds], Mapping[str, object]]


class Held:
    """An output that stays where it is until somebody asks for its values."""

    def __init__(self, fetch: Callable[[], Array]) -> None:
        self._fetch = fetch

    def __array__(self, dtype: object = None, copy: object = None) -> Array:
        return self._fetch()


class Inputs:
    """Feeds brought to the GPU once: a benchmark gives the same ones each time."""

    def __init__(self, bring: Callable[[Array], object]) -> None:
        self._bring = bring
        self._held: tuple[Feeds, dict[str, object]] | None = None

    def of(self, feeds: Feeds) -> dict[str, object]:
        if self._held is None or self._held[0] is not feeds:
            self._held = feeds, {name: self._bring(array) for name, array in feeds.items()}
        return self._held[1]


def taso_runner(path: str, threads: int) -> tuple[Runner, str]:
    """The graph on cuDNN, by the plan that its file holds, where it holds one."""
    import cupy

    import taso

    program = taso.compile(taso.load(path), "cudnn")
    inputs = Inputs(cupy.asarray)

    def run(feeds: Feeds) -> Mapping[str, object]:
        found = program(inputs.of(feeds))
        cupy.cuda.get_current_stream().synchronize()
        return {name: Held(lambda array=array: cupy.asnumpy(array)) for name, array in found.items()}

    return run, f"taso {taso.__version__}; {taso.backends.select.get_backend('cudnn').device_key()}"


def torch_runner(path: str, threads: int, compiled: bool) -> tuple[Runner, str]:
    """The module of `pytorch`, moved to the GPU; compiled with CUDA graphs where `compiled`."""
    import onnx
    import pytorch
    import torch

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.benchmark = True
    graph = onnx.load(path).graph
    module = pytorch.module_of(graph).cuda()
    run_module = torch.compile(module, mode="max-autotune") if compiled else module
    names, outputs = [i.name for i in graph.input], [o.name for o in graph.output]
    inputs = Inputs(lambda array: torch.from_numpy(np.ascontiguousarray(array)).cuda())

    def run(feeds: Feeds) -> Mapping[str, object]:
        held = inputs.of(feeds)
        with torch.no_grad():
            found = run_module(*(held[name] for name in names))
        torch.cuda.synchronize()
        return {name: Held(lambda t=t: t.cpu().numpy()) for name, t in zip(outputs, found, strict=True)}

    how = "torch.compile, max-autotune" if compiled else "eager, cudnn.benchmark"
    return run, f"PyTorch {metadata.version('torch')}, {how}, {torch.cuda.get_device_name()}"


def onnxruntime_runner(path: str, threads: int, provider: str) -> tuple[Runner, str]:
    """A session of the CUDA or the TensorRT provider; raises `RuntimeError` where ONNX Runtime falls back from it."""
    import onnxruntime as ort

    options = {
        "CUDAExecutionProvider": {"use_tf32": "0", "cudnn_conv_algo_search": "EXHAUSTIVE"},
        "TensorrtExecutionProvider": {"trt_fp16_enable": "0"},
    }  # fmt: skip
    settings = ort.SessionOptions()
    settings.log_severity_level = 3
    session = ort.InferenceSession(path, settings, providers=[(provider, options[provider])])
    if session.get_providers()[0] != provider:
        raise RuntimeError(f"ONNX Runtime does not run on {provider} here, but on {session.get_providers()}")
    outputs = [o.name for o in session.get_outputs()]
    inputs = Inputs(lambda array: ort.OrtValue.ortvalue_from_numpy(array, "cuda", 0))
    binding = session.io_binding()

    def run(feeds: Feeds) -> Mapping[str, object]:
        for name, value in inputs.of(feeds).items():
            binding.bind_ortvalue_input(name, value)
        for name in outputs:
            binding.bind_output(name, "cuda")
        session.run_with_iobinding(binding)
        binding.synchronize_outputs()
        values = dict(zip(outputs, binding.get_outputs(), strict=True))
        return {name: Held(lambda value=value: value.numpy()) for name, value in values.items()}

    return run, f"ONNX Runtime {ort.__version__}, {provider}"


def tensorrt_runner(path: str, threads: int) -> tuple[Runner, str]:
    """An engine that TensorRT builds of the file, without TF32; memory and streams are CuPy's."""
    import cupy
    import tensorrt as trt

    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(0)
    parser = trt.OnnxParser(network, logger)
    if not parser.parse_from_file(path):
        raise RuntimeError(f"TensorRT does not read the model: {parser.get_error(0)}")
    config = builder.create_builder_config()
    config.clear_flag(trt.BuilderFlag.TF32)
    engine = trt.Runtime(logger).deserialize_cuda_engine(builder.build_serialized_network(network, config))
    context = engine.create_execution_context()
    names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
    outputs = {
        name: cupy.empty(tuple(engine.get_tensor_shape(name)), trt.nptype(engine.get_tensor_dtype(name)))
        for name in names if engine.get_tensor_mode(name) == trt.TensorIOMode.OUTPUT
    }  # fmt: skip
    inputs, stream = Inputs(cupy.asarray), cupy.cuda.Stream(non_blocking=True)

    def run(feeds: Feeds) -> Mapping[str, object]:
        for name, array in {**inputs.of(feeds), **outputs}.items():
            context.set_tensor_address(name, array.data.ptr)
        if not context.execute_async_v3(stream.ptr):
            raise RuntimeError("TensorRT failed to run the model")
        stream.synchronize()
        return {name: Held(lambda array=array: cupy.asnumpy(array)) for name, array in outputs.items()}

    return run, f"TensorRT {trt.__version__}"
