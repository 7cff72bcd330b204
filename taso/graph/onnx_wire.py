"""Large tensors of ONNX files, read and written without passing through protobuf, which would copy them.

A serialized model is a tree of messages in protobuf's wire format (protobuf.dev, "Encoding"). Reading, the bytes of
each large tensor are cut out, so that they stay in the mapped file; writing, they are put in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Union

from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto

LARGE = 1 << 16
"""Bytes from which on a tensor is cut out."""
_DELIMITED = 2


def _number(message: type[ModelProto | GraphProto | NodeProto | AttributeProto | TensorProto], field: str) -> int:
    return message.DESCRIPTOR.fields_by_name[field].number


# (message, field) → the message in it, for the ways that lead to tensors
_INNER: dict[tuple[str, int], str] = {
    ("model", _number(ModelProto, "graph")): "graph",
    ("graph", _number(GraphProto, "initializer")): "tensor",
    ("graph", _number(GraphProto, "node")): "node",
    ("node", _number(NodeProto, "attribute")): "attribute",
    ("attribute", _number(AttributeProto, "t")): "tensor",
}
_RAW = ("tensor", _number(TensorProto, "raw_data"))


class Malformed(ValueError):
    """Bytes that are no message of protobuf."""


@dataclass(frozen=True)
class _Field:
    """One field of a message: where it, and what it holds, begins and ends."""

    number: int
    wire: int
    start: int
    inside: int
    stop: int


def _varint(data: memoryview, position: int, stop: int) -> tuple[int, int]:
    value = shift = 0
    while position < stop and shift < 70:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise Malformed("a number does not end")


def _as_varint(value: int) -> bytes:
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)


def _fields(data: memoryview, position: int, stop: int) -> Iterator[_Field]:
    while position < stop:
        start = position
        tag, position = _varint(data, position, stop)
        wire, inside = tag & 7, position
        if wire == 0:
            _, position = _varint(data, position, stop)
        elif wire in (1, 5):
            position += 8 if wire == 1 else 4
        elif wire == _DELIMITED:
            length, inside = _varint(data, position, stop)
            position = inside + length
        else:
            raise Malformed(f"wire type {wire}")
        if position > stop:
            raise Malformed("a field reaches beyond its message")
        yield _Field(tag >> 3, wire, start, inside, position)


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────


def cut(data: memoryview, large: int = LARGE) -> bytes:
    """A serialized model in which each tensor of `large` bytes and more says instead where in `data` its bytes lie.

    It says so as if they lay in an external file without a name (ONNX's ExternalData.md). Raises `Malformed` where
    `data` is no message.
    """
    return b"".join(_cut(data, 0, len(data), "model", large))


def _cut(data: memoryview, start: int, stop: int, kind: str, large: int) -> list[bytes | memoryview]:
    parts: list[bytes | memoryview] = []
    kept, said = start, b""
    for field in _fields(data, start, stop):
        if field.wire != _DELIMITED or field.stop - field.inside < large:
            continue
        inner = _INNER.get((kind, field.number))
        if inner is None and (kind, field.number) != _RAW:
            continue
        parts.append(data[kept : field.start])
        kept = field.stop
        if inner is None:
            said = _whereabouts(field.inside, field.stop - field.inside)
        else:
            body = _cut(data, field.inside, field.stop, inner, large)
            parts += [_as_varint(field.number << 3 | _DELIMITED), _as_varint(sum(map(len, body))), *body]
    # of a field that is there twice the last one counts, and the tensor may say where its data lies itself
    return [*parts, data[kept:stop], said]


def _whereabouts(offset: int, length: int) -> bytes:
    said = TensorProto(data_location=TensorProto.EXTERNAL)
    for key, value in {"location": "", "offset": str(offset), "length": str(length)}.items():
        said.external_data.add(key=key, value=value)
    return said.SerializeToString()


# ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Held:
    """Bytes that are made when they are written: how many, and by what."""

    length: int
    make: Callable[[], memoryview]


Part = Union[bytes, memoryview, Held]


def spliced(skeleton: bytes, mark: bytes, held: Mapping[bytes, Held]) -> Iterator[bytes | memoryview]:
    """The serialized model `skeleton` in pieces, with what `held` has for them in place of the bytes of tensors.

    The keys of `held` begin with `mark`, which occurs nowhere else.
    """
    for part in _spliced(skeleton, 0, len(skeleton), "model", mark, held):
        yield part.make() if isinstance(part, Held) else part


def _spliced(
    skeleton: bytes, start: int, stop: int, kind: str, mark: bytes, held: Mapping[bytes, Held]
) -> list[Part]:
    data = memoryview(skeleton)
    parts: list[Part] = []
    kept = start
    for field in _fields(data, start, stop):
        if field.wire != _DELIMITED or skeleton.find(mark, field.inside, field.stop) < 0:
            continue
        inner = _INNER.get((kind, field.number))
        if inner is not None:
            body = _spliced(skeleton, field.inside, field.stop, inner, mark, held)
        else:
            body = [held[bytes(data[field.inside : field.stop])]]
        length = sum(p.length if isinstance(p, Held) else len(p) for p in body)
        parts += [data[kept : field.start], _as_varint(field.number << 3 | _DELIMITED), _as_varint(length), *body]
        kept = field.stop
    parts.append(data[kept:stop])
    return parts
