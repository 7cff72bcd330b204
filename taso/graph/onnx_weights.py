"""Weights of ONNX files: initializers, external data, Constant and ConstantOfShape nodes, made into arrays when asked.

No array is kept here: an initializer's values stay in the protobuf, or in the mapped file, that they came in. Pages of
a mapped file are given back to the system as soon as nothing reads them any more.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray
from onnx import AttributeProto, NodeProto, SparseTensorProto, TensorProto, helper

from taso.graph.errors import ModelError
from taso.graph.onnx_protos import BITS, array_of, array_of_bytes, element_type
from taso.graph.operator import Array, Weight
from taso.graph.types import DType, TensorType

# ── files in memory ──────────────────────────────────────────────────────────────────────────────────────────────


class Mapped:
    """Bytes of a file that is mapped into memory, which are resident only while something reads them.

    What `lease` gives reads them from the file. Once nothing that was made from it is left, their pages are dropped
    (madvise, MADV_DONTNEED): the system has them in its cache still, but the process no longer holds them. So what has
    laid a weight out in its own way need not think of the file's copy, and what works on the file's bytes keeps them.
    """

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._leased: weakref.ref[NDArray[np.uint8]] | None = None

    def __len__(self) -> int:
        return len(self._data)

    def __reduce__(self) -> tuple[Callable[[bytes], Mapped], tuple[bytes]]:
        # elsewhere the file may be another, or none
        return _unmapped, (bytes(self.lease()),)

    def lease(self) -> memoryview:
        """The bytes, for as long as it or an array over it lives."""
        if len(self._data) < mmap.PAGESIZE:
            return self._data
        window = self._leased() if self._leased is not None else None
        if window is None:
            window = np.frombuffer(self._data, np.uint8)
            self._leased = weakref.ref(window)
            # no one waits for pages when the process ends
            weakref.finalize(window, drop_pages, self._data).atexit = False
        return window.data


def _unmapped(data: bytes) -> Mapped:
    return Mapped(memoryview(data))


_AROUND = 1 << 21
"""Bytes that a fault may make resident at once, beginning at a multiple of it: a huge page."""


def drop_pages(data: memoryview) -> None:
    """Gives back the pages of `data`, bytes of a file mapped for reading; does nothing to other bytes.

    So it does with what reading them brought in around them. Who reads dropped pages, now or later, gets them from the
    file again.
    """
    mapped = data.obj
    if not isinstance(mapped, mmap.mmap) or not data.readonly or not hasattr(mapped, "madvise"):
        return
    begin, address = (np.frombuffer(b, np.uint8).ctypes.data for b in (mapped, data))
    first = max(address // _AROUND * _AROUND, begin)
    last = min(-(-(address + len(data)) // _AROUND) * _AROUND, begin + len(mapped))
    mapped.madvise(mmap.MADV_DONTNEED, first - begin, last - first)


# ── the forms in which files hold weights ────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, eq=False)
class Initializer:
    """A tensor with its own data."""

    tensor: TensorProto


@dataclass(frozen=True, eq=False)
class External:
    """A tensor whose bytes lie in another file, mapped into memory."""

    tensor: TensorProto
    held: Mapped

    @property
    def data(self) -> memoryview:
        """Its bytes; who no longer needs them lets go of them."""
        return self.held.lease()


@dataclass(frozen=True, eq=False)
class Sparse:
    """A sparse initializer."""

    tensor: SparseTensorProto


@dataclass(frozen=True, eq=False)
class ConstantNode:
    """A Constant node; `held` where its tensor's bytes lie in another file."""

    node: NodeProto
    held: Mapped | None = None

    @property
    def data(self) -> memoryview | None:
        """The bytes of its tensor where they lie in another file; who no longer needs them lets go of them."""
        return None if self.held is None else self.held.lease()


@dataclass(frozen=True, eq=False)
class Filled:
    """A ConstantOfShape node whose shape is the weight `shape`."""

    node: NodeProto
    shape: Weight


UNSTORED = Filled(NodeProto(), Weight(TensorType(DType.INT64, (0,)), np.zeros(0, np.int64)))
"""What stands for the origin of a weight that takes no room in a file, where the file itself is not at hand."""


# ── external data ────────────────────────────────────────────────────────────────────────────────────────────────


class ExternalFiles:
    """The files beside a model that hold its tensors' bytes; each is mapped once and stays mapped while in use.

    Paths must stay inside `folder` (ONNX's ExternalData.md), also after following links. `own` are the bytes of the
    model's file itself, where tensors without a file name were cut out of it.
    """

    def __init__(self, folder: str | None, own: memoryview | None = None) -> None:
        self._folder = folder
        self._own = own
        self._mapped: dict[str, memoryview] = {}
        if own is not None:
            # cutting tensors out of it has read around each
            drop_pages(own)

    def bytes_of(self, tensor: TensorProto) -> Mapped:
        """The bytes of `tensor`; raises `ModelError` where they are not there as it says."""
        said = {e.key: e.value for e in tensor.external_data}
        location = said.get("location", "")
        whole = self._own if self._own is not None and not location else self._map(location, tensor.name)
        offset = _whole_number(said.get("offset", "0"), "offset", tensor.name)
        stop = len(whole)
        if "length" in said:
            stop = offset + _whole_number(said["length"], "length", tensor.name)
        if offset > len(whole) or stop > len(whole):
            raise ModelError(
                f"tensor '{tensor.name}' wants bytes {offset} to {stop} of '{said.get('location')}', "
                f"which has only {len(whole)}"
            )
        return Mapped(whole[offset:stop])

    def _map(self, location: str, tensor: str) -> memoryview:
        path = self._path(location, tensor)
        if path not in self._mapped:
            try:
                with open(path, "rb") as file:
                    size = os.fstat(file.fileno()).st_size
                    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
            except OSError as error:
                raise ModelError(f"the data file '{location}' of '{tensor}' cannot be read: {error}") from error
            self._mapped[path] = memoryview(mapped)
        return self._mapped[path]

    def _path(self, location: str, tensor: str) -> str:
        if self._folder is None:
            raise ModelError(
                f"tensor '{tensor}' lies in the file '{location}', and a model given without a path has no folder to "
                "look in; give the path of the model"
            )
        folder = os.path.realpath(self._folder or ".")
        parts = location.replace("\\", "/").split("/")
        path = os.path.realpath(os.path.join(folder, location))
        inside = os.path.commonpath([folder, path]) == folder if os.path.isabs(path) else False
        if not location or os.path.isabs(location) or ".." in parts or not inside:
            raise ModelError(f"tensor '{tensor}' points to '{location}', outside the folder of the model")
        if not os.path.isfile(path):
            raise ModelError(f"the data file '{location}' of tensor '{tensor}' is not there")
        return path


def _whole_number(text: str, what: str, tensor: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ModelError(f"the {what} of the external data of tensor '{tensor}' is '{text}', not a number of bytes")
    return int(text)


def is_external(tensor: TensorProto) -> bool:
    return tensor.data_location == TensorProto.EXTERNAL


# ── tensors to weights ───────────────────────────────────────────────────────────────────────────────────────────


def stated_type(tensor: TensorProto) -> TensorType:
    """The type of a tensor; raises `ModelError` where it has none or its shape is none."""
    if any(d < 0 for d in tensor.dims):
        raise ModelError(f"tensor '{tensor.name}' has a negative size in its shape {tuple(tensor.dims)}")
    if tensor.data_type == TensorProto.UNDEFINED:
        raise ModelError(f"tensor '{tensor.name}' has no element type")
    dtype = element_type(tensor.data_type)
    if dtype is not None:
        return TensorType(dtype, tuple(tensor.dims))
    from_code = _tensor_type_bytes(tensor)
    return TensorType(DType.UNDEFINED, None, from_code)


def _tensor_type_bytes(tensor: TensorProto) -> bytes:
    return helper.make_tensor_type_proto(tensor.data_type, list(tensor.dims)).SerializeToString()


def bytes_needed(type: TensorType) -> int:
    """Bytes that the elements of `type` take in a file."""
    bits = BITS.get(type.dtype)
    return -(-type.size * bits // 8) if bits else type.nbytes


def stored_weight_bytes(weight: Weight) -> int:
    """Bytes that the elements of a weight take in a file: none where it says how to make them."""
    if isinstance(weight.original, Filled) or weight.type.other is not None or weight.type.dtype is DType.STRING:
        return 0
    if isinstance(weight.original, Sparse):
        return bytes_needed(stated_type(weight.original.tensor.values))
    return bytes_needed(weight.type)


def tensor_weight(tensor: TensorProto, files: ExternalFiles, name: str = "") -> Weight:
    """The weight that an initializer is; raises `ModelError` where data and shape do not fit."""
    data = _checked_data(tensor, files)
    type = stated_type(tensor)
    original = Initializer(tensor) if data is None else External(tensor, data)
    return Weight(type, _loader(tensor, data, type), name or tensor.name, original)


def _checked_data(tensor: TensorProto, files: ExternalFiles) -> Mapped | None:
    """The mapped bytes of an external tensor, None for one with its own data; sizes are compared with the shape."""
    type = stated_type(tensor)
    if tensor.HasField("segment"):
        raise ModelError(f"tensor '{tensor.name}' is stored in segments, which nothing reads")
    if not is_external(tensor):
        _check_own_data(tensor, type)
        return None
    if type.dtype is DType.STRING:
        raise ModelError(f"tensor '{tensor.name}' holds strings, which cannot lie in another file")
    data = files.bytes_of(tensor)
    if type.other is None and len(data) != bytes_needed(type):
        raise ModelError(
            f"tensor '{tensor.name}' of type {type} needs {bytes_needed(type)} bytes, but its data file holds "
            f"{len(data)} for it"
        )
    return data


_COUNTED = {
    DType.FLOAT: "float_data", DType.DOUBLE: "double_data", DType.INT64: "int64_data", DType.STRING: "string_data",
    DType.INT32: "int32_data", DType.INT16: "int32_data", DType.INT8: "int32_data", DType.UINT16: "int32_data",
    DType.UINT8: "int32_data", DType.BOOL: "int32_data", DType.UINT32: "uint64_data",
    DType.UINT64: "uint64_data",
}  # fmt: skip


def _check_own_data(tensor: TensorProto, type: TensorType) -> None:
    if type.other is not None:
        return
    if tensor.HasField("raw_data"):
        found, wanted, what = len(tensor.raw_data), bytes_needed(type), "bytes"
    elif type.dtype in (DType.COMPLEX64, DType.COMPLEX128):
        parts = tensor.float_data if type.dtype is DType.COMPLEX64 else tensor.double_data
        found, wanted, what = len(parts), 2 * type.size, "parts"
    elif type.dtype in BITS and 8 % BITS[type.dtype] == 0:
        found, wanted, what = len(tensor.int32_data), bytes_needed(type), "bytes"
    else:
        # the small floats are stored by their bits, each on its own
        counted = getattr(tensor, _COUNTED.get(type.dtype, "int32_data"))
        found, wanted, what = len(counted), type.size, "elements"
    if found != wanted:
        raise ModelError(f"tensor '{tensor.name}' of type {type} needs {wanted} {what} and has {found}")


def _loader(tensor: TensorProto, data: Mapped | None, type: TensorType) -> Callable[[], Array]:
    if data is None:
        return partial(array_of, tensor)
    return partial(_embedded_array, tensor, data) if type.other is not None else partial(_mapped_array, data, type)


def _embedded_array(tensor: TensorProto, data: Mapped) -> Array:
    return array_of(embedded(tensor, data))


def _mapped_array(data: Mapped, type: TensorType) -> Array:
    return array_of_bytes(data.lease(), type.dtype, type.static_shape)


def embedded(tensor: TensorProto, data: Mapped) -> TensorProto:
    """A copy of an external tensor that holds its own data."""
    copy = TensorProto()
    copy.CopyFrom(tensor)
    copy.ClearField("data_location")
    copy.ClearField("external_data")
    copy.raw_data = bytes(data.lease())
    return copy


def embed_all(node: NodeProto, files: ExternalFiles) -> None:
    """Gives every external tensor inside `node`, bodies included, its own data."""
    for attribute in node.attribute:
        tensors = [attribute.t] if attribute.type == AttributeProto.TENSOR else list(attribute.tensors)
        graphs = [attribute.g] if attribute.type == AttributeProto.GRAPH else list(attribute.graphs)
        for graph in graphs:
            tensors.extend(graph.initializer)
            for inner in graph.node:
                embed_all(inner, files)
        for tensor in tensors:
            data = _checked_data(tensor, files) if is_external(tensor) else None
            if data is not None:
                tensor.CopyFrom(embedded(tensor, data))


# ── sparse initializers ──────────────────────────────────────────────────────────────────────────────────────────


def sparse_weight(sparse: SparseTensorProto, name: str, original: object = None) -> Weight:
    """The dense weight of a sparse tensor."""
    dtype = element_type(sparse.values.data_type)
    if dtype is None or any(d < 0 for d in sparse.dims):
        raise ModelError(f"the sparse tensor '{name}' has no element type or no shape")
    type = TensorType(dtype, tuple(sparse.dims))
    return Weight(type, partial(_dense, sparse, type), name, original or Sparse(sparse))


UNFOLDED = 1 << 31
"""Bytes that a sparse tensor may take when it is written out."""


def _dense(sparse: SparseTensorProto, type: TensorType) -> Array:
    if type.nbytes > UNFOLDED:
        raise ModelError(
            f"the sparse tensor '{sparse.values.name}' of type {type} would take {type.nbytes} bytes written out, more "
            f"than the limit of {UNFOLDED}"
        )
    dense = np.zeros(type.static_shape, type.dtype.numpy)
    indices = array_of(sparse.indices)
    place = indices if indices.ndim == 1 else np.ravel_multi_index(tuple(indices.T), dense.shape)
    dense.reshape(-1)[place] = array_of(sparse.values)
    return dense


# ── Constant, ConstantOfShape ────────────────────────────────────────────────────────────────────────────────────

_SCALARS: dict[str, Callable[[AttributeProto], tuple[DType, list[object]]]] = {
    "value_int": lambda a: (DType.INT64, [a.i]),
    "value_float": lambda a: (DType.FLOAT, [a.f]),
    "value_string": lambda a: (DType.STRING, [a.s.decode()]),
}
_VECTORS: dict[str, Callable[[AttributeProto], tuple[DType, list[object]]]] = {
    "value_ints": lambda a: (DType.INT64, list(a.ints)),
    "value_floats": lambda a: (DType.FLOAT, list(a.floats)),
    "value_strings": lambda a: (DType.STRING, [s.decode() for s in a.strings]),
}


def constant_weight(node: NodeProto, files: ExternalFiles) -> Weight:
    """The weight that a Constant node is (Constant 1 to 25)."""
    name = node.output[0]
    if len(node.attribute) != 1:
        raise ModelError(f"the Constant '{name}' must have one value, not {len(node.attribute)}")
    attribute = node.attribute[0]
    if attribute.name == "value":
        data = _checked_data(attribute.t, files)
        type = stated_type(attribute.t)
        return Weight(type, _loader(attribute.t, data, type), name, ConstantNode(node, data))
    if attribute.name == "sparse_value":
        return sparse_weight(attribute.sparse_tensor, name, ConstantNode(node))
    several = attribute.name in _VECTORS
    read = _VECTORS.get(attribute.name) or _SCALARS.get(attribute.name)
    if read is None:
        raise ModelError(f"the Constant '{name}' has the unknown attribute '{attribute.name}'")
    dtype, items = read(attribute)
    array = np.asarray(items, dtype.numpy).reshape((len(items),) if several else ())
    return Weight(TensorType(dtype, array.shape), array, name, ConstantNode(node))


def filled_weight(node: NodeProto, shape: Weight) -> Weight:
    """The weight that a ConstantOfShape node is; its elements are one element seen many times."""
    name = node.output[0]
    value: Array = np.zeros(1, np.float32)
    for attribute in node.attribute:
        if attribute.name == "value":
            _check_own_data(attribute.t, stated_type(attribute.t))
            value = array_of(attribute.t)
    dims = tuple(int(d) for d in shape.array().reshape(-1).tolist())
    if value.size != 1 or any(d < 0 for d in dims):
        raise ModelError(f"the ConstantOfShape '{name}' has a bad value or the impossible shape {dims}")
    type = TensorType(DType.from_numpy(value.dtype), dims)
    return Weight(type, partial(np.broadcast_to, value.reshape(-1)[0], dims), name, Filled(node, shape))
