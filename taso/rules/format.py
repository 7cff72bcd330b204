"""Rule files: reading TASO's and ours, writing ours (`rules.proto`). Nothing here trusts what a file says of a rule."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from google.protobuf.message import DecodeError

from taso.graph.errors import GraphError, RuleError
from taso.graph.operator import Operator
from taso.graph.ops import operator_named
from taso.rules import rules_pb2 as pb
from taso.rules.expression import parse, show
from taso.rules.pattern import Certificate, Exactness, PatternNode, Port, Ref, Rule, Status
from taso.rules.taso_files import NUMBERS, Published, PublishedOperator, from_published

FORMAT_VERSION = 1
_ANY = 2

_EXACTNESS = {
    Exactness.EXACT: pb.EXACT, Exactness.REASSOCIATES: pb.REASSOCIATES, Exactness.APPROXIMATES: pb.APPROXIMATES,
}  # fmt: skip
_STATUS = {
    Status.PROVED: pb.PROVED, Status.BOUNDED: pb.BOUNDED, Status.TESTED: pb.TESTED, Status.UNPROVED: pb.UNPROVED,
    Status.REFUTED: pb.REFUTED,
}  # fmt: skip


def load(path: str | os.PathLike[str]) -> list[Rule]:
    """The rules of a file, TASO's or ours, in order.

    A rule of TASO's gets the status `unproved`; one of ours keeps what its file says. Raises `RuleError` where the file
    is missing, cut off, no rule file, or speaks of operators that do not exist.
    """
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise RuleError(f"the rule file {path} cannot be read: {error.strerror or error}") from error
    return loads(data, Path(path).name)


def loads(data: bytes, name: str = "rules") -> list[Rule]:
    """As `load`, of the bytes of a file called `name`."""
    collection = pb.RuleCollection()
    try:
        collection.ParseFromString(data)
    except DecodeError as error:
        raise RuleError(f"{name} is not a rule file, or is cut off") from error
    if not collection.rule and not collection.HasField("format_version"):
        raise RuleError(f"{name} is not a rule file: it holds no rules")
    ours = collection.HasField("format_version") or any(r.HasField("name") for r in collection.rule)
    if ours and collection.rules != len(collection.rule):
        raise RuleError(f"{name} is cut off: it holds {len(collection.rule)} rules and should hold {collection.rules}")
    if ours and not collection.HasField("rules"):
        raise RuleError(f"{name} is cut off: it does not say how many rules it holds")
    if collection.format_version > FORMAT_VERSION:
        raise RuleError(f"{name} was written by a newer taso, in format {collection.format_version}")
    rules = []
    for number, message in enumerate(collection.rule):
        try:
            ours = message.HasField("name")
            rules.append(_read(message) if ours else from_published(_published(message), f"{name}#{number}"))
        except RuleError as error:
            raise RuleError(f"{name}, rule {number}: {error}") from error
    return rules


def read_published(path: str | os.PathLike[str]) -> list[Published]:
    """The rules of a file of TASO's as they are written there; raises `RuleError` as `load` does."""
    load(path)
    collection = pb.RuleCollection()
    collection.ParseFromString(Path(path).read_bytes())
    return [_published(message) for message in collection.rule]


def save(rules: Sequence[Rule], path: str | os.PathLike[str]) -> None:
    """Writes a rule file of ours, whole or not at all; raises `RuleError` where the place cannot be written."""
    target = Path(path)
    try:
        handle, partial = tempfile.mkstemp(dir=target.parent, prefix=target.name, suffix=".partial")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(dumps(rules))
            os.chmod(partial, 0o644)
            os.replace(partial, target)
        except BaseException:
            os.unlink(partial)
            raise
    except OSError as error:
        raise RuleError(f"the rule file {path} cannot be written: {error.strerror or error}") from error


def dumps(rules: Sequence[Rule]) -> bytes:
    """The bytes of a rule file; the same rules always give the same bytes."""
    collection = pb.RuleCollection(format_version=FORMAT_VERSION, rules=len(rules))
    collection.rule.extend(_write(rule) for rule in rules)
    return collection.SerializeToString(deterministic=True)


# ── writing ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _write(rule: Rule) -> pb.Rule:
    numbers = {name: -1 - i for i, name in enumerate(rule.variables)}
    message = pb.Rule(
        name=rule.name, exactness=_EXACTNESS[rule.exactness], status=_STATUS[rule.status],
        condition=[show(c) for c in rule.conditions],
    )  # fmt: skip
    for nodes, side in ((rule.source, message.srcOp), (rule.target, message.dstOp)):
        side.extend(_write_node(node, numbers) for node in nodes)
    for source, target in rule.outputs:
        message.mappedOutput.append(_write_output(source, target, numbers))
    if rule.certificate != Certificate():
        message.certificate.CopyFrom(_write_certificate(rule.certificate))
    if rule.origin:
        message.origin = rule.origin
    if rule.id:
        message.id = rule.id
    return message


def _write_node(node: PatternNode, numbers: dict[str, int]) -> pb.Operator:
    message = pb.Operator(type=NUMBERS.get(node.op.name, _ANY), name=node.op.name)
    message.input.extend(_write_ref(ref, numbers) for ref in node.inputs)
    message.attribute.extend(pb.Attribute(name=name, expression=show(expr)) for name, expr in node.attrs)
    if node.n_outputs != 1:
        message.outputs = node.n_outputs
    return message


def _write_ref(ref: Ref | None, numbers: dict[str, int]) -> pb.Tensor:
    if ref is None:
        return pb.Tensor(opId=-1 - len(numbers), tsId=0, absent=True)
    if isinstance(ref, str):
        return pb.Tensor(opId=numbers[ref], tsId=0, variable=ref)
    return pb.Tensor(opId=ref.node, tsId=ref.output)


def _write_output(source: Port, target: Ref, numbers: dict[str, int]) -> pb.MapOutput:
    if isinstance(target, str):
        return pb.MapOutput(
            srcOpId=source.node, srcTsId=source.output, dstOpId=numbers[target], dstTsId=0, dstVariable=target
        )
    return pb.MapOutput(srcOpId=source.node, srcTsId=source.output, dstOpId=target.node, dstTsId=target.output)


def _write_certificate(certificate: Certificate) -> pb.Certificate:
    message = pb.Certificate(primes=certificate.primes)
    if certificate.seed is not None:
        message.seed = certificate.seed
    if certificate.trials:
        message.trials = certificate.trials
    if certificate.dimensions:
        message.dimensions = certificate.dimensions
    if certificate.error_bound is not None:
        message.error_bound = certificate.error_bound
    for name in ("method", "command", "counterexample", "reason", "digest"):
        if getattr(certificate, name):
            setattr(message, name, getattr(certificate, name))
    return message


# ── reading ──────────────────────────────────────────────────────────────────────────────────────────────────────


def _read(message: pb.Rule) -> Rule:
    outputs: list[tuple[Port, Ref]] = []
    for m in message.mappedOutput:
        target: Ref = _text(m.dstVariable) if m.HasField("dstVariable") else Port(m.dstOpId, m.dstTsId)
        outputs.append((Port(m.srcOpId, m.srcTsId), target))
    rule = Rule(
        tuple(map(_read_node, message.srcOp)), tuple(map(_read_node, message.dstOp)), tuple(outputs),
        tuple(parse(_text(c)) for c in message.condition), _read_exactness(message), _read_status(message),
        _read_certificate(message.certificate), _text(message.origin), _text(message.id),
    )  # fmt: skip
    if rule.name != _text(message.name):
        raise RuleError(f"it is called '{message.name[:200]}', but says '{rule.name[:200]}'")
    return rule


def _text(value: str | bytes) -> str:
    """A string of a file, which protobuf hands over as bytes where it is no UTF-8."""
    if isinstance(value, bytes):
        raise RuleError("a text in it is not UTF-8")
    return value


def _read_node(message: pb.Operator) -> PatternNode:
    attrs = tuple((_text(a.name), parse(_text(a.expression))) for a in message.attribute)
    return PatternNode(_operator(message), tuple(map(_read_ref, message.input)), attrs, message.outputs)


def _operator(message: pb.Operator) -> Operator:
    if not message.HasField("name"):
        raise RuleError(f"an operator of number {message.type} has no name")
    try:
        return operator_named(_text(message.name))
    except GraphError as error:
        raise RuleError(str(error)) from error


def _read_ref(message: pb.Tensor) -> Ref | None:
    if message.absent:
        return None
    return _text(message.variable) if message.HasField("variable") else Port(message.opId, message.tsId)


def _read_exactness(message: pb.Rule) -> Exactness:
    """What a file does not say, or says in a newer taso's words, is the weakest claim."""
    known = {number: exactness for exactness, number in _EXACTNESS.items()}
    return known[message.exactness] if message.HasField("exactness") else Exactness.APPROXIMATES


def _read_status(message: pb.Rule) -> Status:
    known = {number: status for status, number in _STATUS.items()}
    return known[message.status] if message.HasField("status") else Status.UNPROVED


def _read_certificate(message: pb.Certificate) -> Certificate:
    return Certificate(
        _text(message.method), _text(message.command), message.seed if message.HasField("seed") else None,
        message.trials, tuple(message.primes), message.error_bound if message.HasField("error_bound") else None,
        _text(message.counterexample), _text(message.reason), _text(message.digest),
        message.dimensions,
    )  # fmt: skip


def _published(message: pb.Rule) -> Published:
    return Published(
        tuple(map(_published_operator, message.srcOp)),
        tuple(map(_published_operator, message.dstOp)),
        tuple((m.srcOpId, m.srcTsId, m.dstOpId, m.dstTsId) for m in message.mappedOutput),
    )


def _published_operator(message: pb.Operator) -> PublishedOperator:
    return PublishedOperator(
        message.type, tuple((t.opId, t.tsId) for t in message.input), {p.key: p.value for p in message.para}
    )
