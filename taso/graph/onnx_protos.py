"""Pieces of ONNX protobufs in our terms and back: types, attributes, tensors, nodes."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

import numpy as np
import onnx
import onnx.defs
from numpy.typing import NDArray
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, TypeProto, numpy_helper

from taso.graph.errors import ModelError
from taso.graph.operator import Array, Attrs, AttrValue, Operator, Spelling, Types, Unmodelled
from taso.graph.types import Dim, DType, SymDim, TensorType

# ── types ────────────────────────────────────────────────────────────────────────────────────────────────────────


class Symbols:
    """Names of symbolic dimensions in use; hands out fresh ones for dimensions of which nothing is known."""

    def __init__(self, used: Iterable[str] = ()) -> None:
        self._used = set(used)
        self._next = 0

    def use(self, names: Iterable[str]) -> None:
        self._used.update(names)

    def fresh(self) -> SymDim:
        while (name := f"unk__{self._next}") in self._used:
            self._next += 1
        self._used.add(name)
        return SymDim.named(name)


def element_type(code: int) -> DType | None:
    """The element type with ONNX's number `code`; None for one that we cannot hold."""
    try:
        found = DType(code)
    except ValueError:
        return None
    return found if found is not DType.UNDEFINED else None


UNKNOWN = TensorType(DType.UNDEFINED, None)


def tensor_type(proto: TypeProto, symbols: Symbols) -> TensorType:
    """The type that `proto` describes; dimensions without a name get fresh symbols."""
    kind = proto.WhichOneof("value")
    if kind is None:
        return UNKNOWN
    dtype = element_type(proto.tensor_type.elem_type) if kind == "tensor_type" else None
    if dtype is None:
        undefined = kind == "tensor_type" and proto.tensor_type.elem_type == TensorProto.UNDEFINED
        return UNKNOWN if undefined else TensorType(DType.UNDEFINED, None, proto.SerializeToString())
    if not proto.tensor_type.HasField("shape"):
        return TensorType(dtype, None)
    dims: list[Dim] = []
    for dim in proto.tensor_type.shape.dim:
        if dim.HasField("dim_value") and dim.dim_value >= 0:
            dims.append(dim.dim_value)
        elif dim.dim_param not in NAMELESS:
            dims.append(SymDim.named(dim.dim_param))
        else:
            dims.append(symbols.fresh())
    return TensorType(dtype, tuple(dims))


NAMELESS = ("", "?")
"""What says of a dimension that it is not known, not which: converters write "?" for height and width alike."""


def type_proto(type: TensorType) -> TypeProto:
    """`type` as a protobuf; a dimension that is no number and no lone symbol is left open."""
    if type.other is not None:
        return TypeProto.FromString(type.other)
    proto = TypeProto()
    if type.dtype is DType.UNDEFINED:
        return proto
    proto.tensor_type.elem_type = type.dtype.value
    if type.shape is None:
        return proto
    proto.tensor_type.shape.SetInParent()
    for dim in type.shape:
        written = proto.tensor_type.shape.dim.add()
        if isinstance(dim, int):
            written.dim_value = dim
        elif dim.symbol is not None:
            written.dim_param = dim.symbol
    return proto


# ── attributes ───────────────────────────────────────────────────────────────────────────────────────────────────


def shortest(value: float) -> float:
    """The shortest decimal that rounds to the float32 `value`: 0.1 rather than 0.10000000149011612."""
    return float(str(np.float32(value)))


def _text(value: bytes) -> str | bytes:
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


_PLAIN: dict[int, Callable[[AttributeProto], AttrValue]] = {
    AttributeProto.INT: lambda a: a.i,
    AttributeProto.FLOAT: lambda a: shortest(a.f),
    AttributeProto.STRING: lambda a: _text(a.s),
    AttributeProto.INTS: lambda a: tuple(a.ints),
    AttributeProto.FLOATS: lambda a: tuple(map(shortest, a.floats)),
    AttributeProto.STRINGS: lambda a: tuple(map(_text, a.strings)),
}


def attribute_value(proto: AttributeProto) -> AttrValue:
    """The value of an attribute; raises `Unmodelled` where it holds a tensor, a graph or a type."""
    read = _PLAIN.get(proto.type)
    if read is None or proto.ref_attr_name:
        raise Unmodelled(f"attribute '{proto.name}' holds no plain value")
    return read(proto)


Kind = AttributeProto.AttributeType


def attribute_proto(name: str, value: AttrValue, kind: Kind | None) -> AttributeProto:
    """An attribute; `kind` is the type that the operator's schema gives it, where there is one."""
    proto = AttributeProto(name=name)
    if isinstance(value, DType):
        value = value.value
    proto.type = _kind_of(name, value) if kind is None else kind
    items = list(value) if isinstance(value, tuple) else [value]
    numbers = [v for v in items if isinstance(v, (int, float))]
    texts = [v.encode() if isinstance(v, str) else v for v in items if isinstance(v, (str, bytes))]
    if len(numbers) + len(texts) != len(items):
        raise ModelError(f"attribute '{name}' cannot be written with the value {value!r}")
    if proto.type == AttributeProto.INT:
        proto.i = int(numbers[0])
    elif proto.type == AttributeProto.FLOAT:
        proto.f = numbers[0]
    elif proto.type == AttributeProto.STRING:
        proto.s = texts[0]
    elif proto.type == AttributeProto.INTS:
        proto.ints.extend(map(int, numbers))
    elif proto.type == AttributeProto.FLOATS:
        proto.floats.extend(numbers)
    else:
        proto.strings.extend(texts)
    return proto


def _kind_of(name: str, value: AttrValue) -> Kind:
    first = value[0] if isinstance(value, tuple) and value else value
    several = isinstance(value, tuple)
    if isinstance(first, float):
        return AttributeProto.FLOATS if several else AttributeProto.FLOAT
    if isinstance(first, (str, bytes)):
        return AttributeProto.STRINGS if several else AttributeProto.STRING
    if isinstance(first, int) or several:
        return AttributeProto.INTS if several else AttributeProto.INT
    raise ModelError(f"attribute '{name}' cannot be written with the value {value!r}")


# ── schemas ──────────────────────────────────────────────────────────────────────────────────────────────────────


@lru_cache(maxsize=4096)
def schema(op_type: str, opset: int, domain: str) -> onnx.defs.OpSchema | None:
    """The schema in force for an operator at `opset`; None where ONNX has none."""
    try:
        return onnx.defs.get_schema(op_type, opset, domain)
    except onnx.defs.SchemaError:
        return None


_Stated = onnx.defs.OpSchema.AttrType
_KINDS = {
    _Stated.INT: AttributeProto.INT, _Stated.FLOAT: AttributeProto.FLOAT, _Stated.STRING: AttributeProto.STRING,
    _Stated.INTS: AttributeProto.INTS, _Stated.FLOATS: AttributeProto.FLOATS, _Stated.STRINGS: AttributeProto.STRINGS,
}  # fmt: skip


@lru_cache(maxsize=4096)
def attribute_kinds(op_type: str, opset: int, domain: str) -> Mapping[str, Kind]:
    """The types of the attributes that hold plain values, as the schema in force gives them."""
    found = schema(op_type, opset, domain)
    return {} if found is None else {n: _KINDS[a.type] for n, a in found.attributes.items() if a.type in _KINDS}


def spelled_node(spelling: Spelling, opset: int, domain: str) -> NodeProto:
    """The node that `spelling` describes, without inputs and outputs."""
    node = NodeProto(op_type=spelling.op_type)
    if domain:
        node.domain = domain
    kinds = attribute_kinds(spelling.op_type, opset, domain)
    for name, value in spelling.attrs.items():
        if value is not None:
            node.attribute.append(attribute_proto(name, value, kinds.get(name)))
    return node


def spell(op: Operator, attrs: Attrs, types: Types, opset: int) -> tuple[NodeProto, Sequence[int | Array | None]]:
    """The node that writes `op` in ONNX of `opset`, and its inputs: positions among ours, constants, or None."""
    spelling = op.spell(attrs, types, opset)
    inputs = list(spelling.inputs)
    while inputs and inputs[-1] is None:
        inputs.pop()
    return spelled_node(spelling, opset, op.domain), inputs


# ── tensors ──────────────────────────────────────────────────────────────────────────────────────────────────────


# elements of fewer than eight bits lie side by side, the first in the lowest bits of the first byte
BITS = {
    DType.UINT4: 4, DType.INT4: 4, DType.FLOAT4E2M1: 4, DType.UINT2: 2, DType.INT2: 2, DType.FLOAT6E2M3: 6,
    DType.FLOAT6E3M2: 6,
}  # fmt: skip
_LITTLE = sys.byteorder == "little"


def tensor_proto(array: Array, dtype: DType, name: str) -> TensorProto:
    """`array` as a tensor of element type `dtype`."""
    proto = TensorProto()
    fill_tensor(proto, array, dtype, name)
    return proto


def fill_tensor(proto: TensorProto, array: Array, dtype: DType, name: str) -> None:
    """Makes `proto` the tensor `array` of element type `dtype`."""
    proto.name, proto.data_type = name, dtype.value
    proto.dims[:] = array.shape
    if dtype is DType.STRING:
        proto.string_data.extend(s if isinstance(s, bytes) else str(s).encode() for s in array.reshape(-1).tolist())
        return
    proto.raw_data = array_bytes(array, dtype).tobytes()


def array_bytes(array: Array, dtype: DType) -> memoryview:
    """The bytes of `array` as files hold elements of type `dtype`: those of the array itself where it lies so."""
    held = np.ascontiguousarray(array.astype(dtype.numpy, copy=False)).reshape(-1)
    if dtype in BITS:
        held = _packed(held, BITS[dtype])
    return (held if _LITTLE else held.byteswap()).view(np.uint8).data


def _packed(array: Array, bits: int) -> NDArray[np.uint8]:
    flat = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    if 8 % bits:
        # an element lies across two bytes
        return np.packbits(np.unpackbits(flat[:, None], axis=1, count=bits, bitorder="little"), bitorder="little")
    lanes = 8 // bits
    flat = flat & np.uint8((1 << bits) - 1)
    rows = np.concatenate([flat, np.zeros(-flat.size % lanes, np.uint8)]).reshape(-1, lanes)
    shifted = rows << (np.arange(lanes, dtype=np.uint8) * np.uint8(bits))
    joined: NDArray[np.uint8] = np.bitwise_or.reduce(shifted, axis=1)
    return joined


def array_of(proto: TensorProto) -> Array:
    """The values of a tensor that holds its own data."""
    dtype = element_type(proto.data_type)
    if dtype is None:
        return numpy_helper.to_array(proto)
    shape = tuple(proto.dims)
    if dtype is DType.STRING:
        texts: Array = np.empty(len(proto.string_data), object)
        texts[:] = [_text(s) for s in proto.string_data]
        return texts.reshape(shape)
    if proto.HasField("raw_data"):
        return array_of_bytes(proto.raw_data, dtype, shape)
    return _array_of_fields(proto, dtype).reshape(shape)


def array_of_bytes(data: bytes | memoryview, dtype: DType, shape: tuple[int, ...]) -> Array:
    """A view of little-endian `data` as an array; elements of fewer than eight bits are unpacked into a new one."""
    if dtype in BITS:
        return _unpacked(np.frombuffer(data, np.uint8), dtype, math.prod(shape)).reshape(shape)
    array: Array = np.frombuffer(data, dtype.numpy).reshape(shape)
    return array if _LITTLE else array.byteswap()


def _unpacked(data: NDArray[np.uint8], dtype: DType, size: int) -> Array:
    bits = BITS[dtype]
    if 8 % bits:
        rows = np.unpackbits(data, count=size * bits, bitorder="little").reshape(size, bits)
        return np.packbits(rows, axis=1, bitorder="little").reshape(-1).view(dtype.numpy)
    lanes = np.arange(8 // bits, dtype=np.uint8) * np.uint8(bits)
    flat = ((data[:, None] >> lanes) & np.uint8((1 << bits) - 1)).reshape(-1)[:size]
    return np.ascontiguousarray(flat, np.uint8).view(dtype.numpy)


_DIRECT = {
    DType.FLOAT: "float_data", DType.DOUBLE: "double_data", DType.INT64: "int64_data", DType.UINT64: "uint64_data",
    DType.UINT32: "uint64_data", DType.INT32: "int32_data", DType.INT16: "int32_data", DType.INT8: "int32_data",
    DType.UINT16: "int32_data", DType.UINT8: "int32_data", DType.BOOL: "int32_data",
}  # fmt: skip


def _array_of_fields(proto: TensorProto, dtype: DType) -> Array:
    """Values from the typed fields of a tensor (onnx.proto, TensorProto)."""
    if dtype in _DIRECT:
        return np.asarray(getattr(proto, _DIRECT[dtype])).astype(dtype.numpy)
    if dtype in (DType.COMPLEX64, DType.COMPLEX128):
        parts = proto.float_data if dtype is DType.COMPLEX64 else proto.double_data
        return np.asarray(parts, np.float32 if dtype is DType.COMPLEX64 else np.float64).view(dtype.numpy)
    # what is left is stored by its bits
    stored = np.asarray(proto.int32_data, np.int32)
    if dtype in BITS and 8 % BITS[dtype] == 0:
        return _unpacked(stored.astype(np.uint8), dtype, math.prod(proto.dims))
    # of six bits, too, each number is one element
    return stored.astype(np.uint16 if dtype.itemsize == 2 else np.uint8).view(dtype.numpy)


# ── bodies: the graphs inside If, Loop, Scan and the like ────────────────────────────────────────────────────────


def bodies(node: NodeProto) -> list[GraphProto]:
    """All graphs that are attributes of `node`."""
    found = [a.g for a in node.attribute if a.type == AttributeProto.GRAPH]
    found.extend(g for a in node.attribute if a.type == AttributeProto.GRAPHS for g in a.graphs)
    return found


def defined_names(graph: GraphProto) -> set[str]:
    """Names that `graph` itself defines: inputs, initializers and what its nodes compute."""
    names = {v.name for v in graph.input} | {t.name for t in graph.initializer}
    names |= {t.values.name for t in graph.sparse_initializer}
    names |= {name for node in graph.node for name in node.output}
    return names - {""}


def captured_names(node: NodeProto) -> tuple[str, ...]:
    """Names of the surrounding graph that the bodies of `node` read, in order of first use."""
    found: dict[str, None] = {}
    for body in bodies(node):
        found.update(dict.fromkeys(_free_names(body)))
    return tuple(found)


def _free_names(graph: GraphProto) -> list[str]:
    own = defined_names(graph)
    read: dict[str, None] = {}
    for node in graph.node:
        read.update(dict.fromkeys(node.input))
        read.update(dict.fromkeys(captured_names(node)))
    read.update((v.name, None) for v in graph.output)
    return [name for name in read if name and name not in own]


def all_names(node: NodeProto) -> set[str]:
    """Every name that occurs in the bodies of `node`, at any depth."""
    names: set[str] = set()
    for body in bodies(node):
        names |= defined_names(body) | {v.name for v in body.output}
        for inner in body.node:
            names.update(inner.input)
            names |= all_names(inner)
    return names


def rename_captures(
    node: NodeProto, outer: Mapping[str, str], taken: Callable[[str], bool], fresh: Callable[[str], str]
) -> None:
    """Renames in the bodies of `node` what they read of the surrounding graph, as `outer` says.

    A name that a body defines itself and that the surrounding graph uses too (`taken`) gives way to a `fresh` one.
    """
    for body in bodies(node):
        _rename_body(body, outer, taken, fresh)


def _rename_body(
    body: GraphProto, outer: Mapping[str, str], taken: Callable[[str], bool], fresh: Callable[[str], str]
) -> None:
    own = defined_names(body)
    names = {old: new for old, new in outer.items() if old not in own and old != new}
    names.update((name, fresh(name)) for name in sorted(own) if taken(name))
    inner = {**{old: new for old, new in outer.items() if old not in own}, **names}
    for declared in (*body.input, *body.output, *body.value_info):
        declared.name = names.get(declared.name, declared.name)
    for tensor in body.initializer:
        tensor.name = names.get(tensor.name, tensor.name)
    for sparse in body.sparse_initializer:
        sparse.values.name = names.get(sparse.values.name, sparse.values.name)
    for node in body.node:
        node.input[:] = [names.get(n, n) for n in node.input]
        node.output[:] = [names.get(n, n) for n in node.output]
        rename_captures(node, inner, taken, fresh)

