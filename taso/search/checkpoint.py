"""The state of a search in a file, from which a later call goes on and reaches what it would have reached at once.

Nothing in the file is a program or a pickle: it is JSON, compressed, behind a line that names the format and a digest.
Whatever numbers it holds are looked up in the search at hand, and each state is reached again by its rewrites, as the
search itself does it, and compared with what the file says of it.
"""

from __future__ import annotations

import contextlib
import hashlib
import heapq
import itertools
import json
import logging
import os
import time
import zlib
from collections.abc import Iterator, Sequence

from taso.graph.errors import GraphError, ModelError, SearchError
from taso.graph.onnx_export import checked_target
from taso.graph.operator import Attrs, AttrValue, Operator, Trait, operator_named
from taso.graph.ops import WEIGHT
from taso.graph.types import DType, TensorType
from taso.rules.constants import ConstantWeight, constant_weight
from taso.search.backtracking import Backtracking
from taso.search.moves import Candidate, Evaluation, Key, Position, Refusal, Taken
from taso.search.rewrite import Refused
from taso.search.state import Cycle, State
from taso.search.store import Entry, Store

log = logging.getLogger(__name__)

EVERY = 30.0
"""Seconds between two checkpoints of a search; more where writing one takes long."""

MAGIC = b"taso checkpoint 1\n"
_DIGEST = 32
_MOST = 1 << 31
"""Bytes that the content of a checkpoint may have: what claims to be larger is not unpacked."""

Json = dict[str, object]


class Unfit(Exception):
    """A checkpoint that cannot be gone on from; the message is the reason."""


class Checkpoint:
    """Keeps one search in one file. `messages` are for the report; `resumed` is what earlier calls had expanded."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises `SearchError` where nothing can be written to `path`."""
        try:
            self.path = checked_target(path)
        except ModelError as error:
            raise SearchError(f"no checkpoint can be kept: {error}") from error
        self.messages: list[str] = []
        self.resumed = 0
        self._said = False
        self._identity = ""
        self._sizes = (0, 0)
        self._due = time.monotonic() + EVERY
        self._useless = False

    def resume(self, search: Backtracking, start: Position) -> bool:
        """Brings `search` to where the file says that an earlier call was; False where it has to begin.

        Raises `Unfit` where that fails half-way: then the search must begin on a store of its own.
        """
        store = search.initial.setting.store
        self._sizes = len(store.entries), len(store.class_types)
        if any(entry.op.has(Trait.RANDOM) for entry in store.entries):
            self._useless = True
            self._say("no checkpoint is kept: the graph holds random operators, which are never the same twice")
            return False
        try:
            with search.clock("resuming"):
                self._identity = identity(search)
                data = self._read()
        except FileNotFoundError:
            return False
        except (OSError, Unfit) as reason:
            self._set_aside(str(reason))
            return False
        try:
            with search.clock("resuming"):
                _Restored(search, start, data, self._sizes).run()
        except _WRONG as error:
            raise Unfit(f"it does not lead back to the search it was made of ({error})") from error
        self.resumed = search.statistics.expanded
        self._say(f"the search went on from '{self.path}', where {self.resumed} graphs had been expanded")
        return True

    def refuse(self, reason: Unfit) -> None:
        """Has the next call of `resume` begin: what the file holds is of no use."""
        self._set_aside(str(reason))

    def keep(self, search: Backtracking, last: bool = False) -> None:
        """Writes the state of `search`, if it is time to or the `last` there will be; a failure is told once."""
        if self._useless or not search.whole or not (last or time.monotonic() >= self._due):
            return
        started = time.monotonic()
        with search.clock("saving"):
            try:
                write(self.path, packed({"identity": self._identity, **_Kept(search, self._sizes).data()}))
            except (OSError, Unfit) as error:
                self._useless = True
                said = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                self._say(f"no checkpoint could be written to '{self.path}': {said}")
                log.warning("%s", self.messages[-1])
        now = time.monotonic()
        self._due = now + max(EVERY, 20 * (now - started))

    def _read(self) -> Json:
        with open(self.path, "rb") as file:
            data = unpacked(file.read())
        if data.get("identity") != self._identity:
            raise Unfit("it belongs to another graph, other rules, other costs or another alpha")
        return data

    def _set_aside(self, reason: str) -> None:
        aside = f"{self.path}.unfit"
        try:
            os.replace(self.path, aside)
            where = f"it was moved to '{aside}'"
        except OSError as error:
            where = f"it could not be moved to '{aside}' ({error.strerror or error}), and a new one takes its place"
        self._say(f"the checkpoint '{self.path}' cannot be used: {reason}; {where}")
        log.warning("%s", self.messages[-1])

    def _say(self, message: str) -> None:
        self.messages.append(message)


_WRONG = (
    KeyError, IndexError, TypeError, ValueError, AttributeError, OverflowError, GraphError, SearchError, Refused, Cycle,
)  # fmt: skip
"""What comes of data that has the right digest and the wrong content."""


def identity(search: Backtracking) -> str:
    """Names what a search depends on besides its limits: graph, small weights, sizes, rules, costs and alpha."""
    state = search.initial
    store = state.setting.store
    digest = hashlib.blake2b(digest_size=_DIGEST)

    def add(*said: object) -> None:
        digest.update(("\0".join(map(str, said)) + "\n").encode())

    for number, entry in enumerate(store.entries):
        add(number, entry.op.domain, entry.op.name, entry.hash, entry.inputs, *map(str, entry.types), entry.classes)
        if entry.op is WEIGHT and state.is_live(number):
            # a condition may look at what small weights hold
            content = state.content(entry.classes[0]) if entry.classes[0] is not None else None
            if content is not None:
                add(content.dtype, repr(content.tolist()) if content.dtype == object else content.tobytes().hex())
    add("outputs", state.graph_outputs, store.opset, sorted((k, str(v)) for k, v in store.sizes.items()))
    for compiled in search.matcher.rules:
        rule = compiled.rule
        conditions = " and ".join(map(str, rule.conditions))
        add(compiled.number, rule.name, conditions, rule.exactness, rule.certificate.dimensions)
    add(state.setting.costs.device, search.thorough, search.limits.alpha, search.limits.constant_bytes)
    add(state.cost.hex())
    add(sorted((n, c.hex()) for n, c in state.kernel_costs.items()))
    return digest.hexdigest()


# ── the file ─────────────────────────────────────────────────────────────────────────────────────────────────────


def packed(data: Json) -> bytes:
    """Plain data as the bytes of a checkpoint."""
    body = zlib.compress(json.dumps(data, separators=(",", ":")).encode(), 1)
    return MAGIC + hashlib.blake2b(body, digest_size=_DIGEST).digest() + body


def unpacked(content: bytes) -> Json:
    """The data in the bytes of a checkpoint; raises `Unfit` where they are none, or damaged."""
    if not content.startswith(MAGIC):
        raise Unfit("it is no checkpoint of this version of taso")
    start = len(MAGIC) + _DIGEST
    body = content[start:]
    if hashlib.blake2b(body, digest_size=_DIGEST).digest() != content[len(MAGIC) : start]:
        raise Unfit("it is damaged")
    try:
        unpacker = zlib.decompressobj()
        text = unpacker.decompress(body, _MOST)
        if not unpacker.eof:
            raise Unfit("it is damaged")
        data = json.loads(text)
    except (zlib.error, ValueError, RecursionError) as error:
        raise Unfit("it is damaged") from error
    if not isinstance(data, dict):
        raise Unfit("it is damaged")
    return data


def write(path: str, content: bytes) -> None:
    """Writes a file that is at each moment either what it was or what it becomes; raises `OSError`."""
    part = f"{path}.{os.getpid()}.part"
    try:
        with open(part, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        with contextlib.suppress(OSError):
            os.unlink(part)


# ── from a search to data ────────────────────────────────────────────────────────────────────────────────────────


class _Kept:
    """The state of a search as plain data.

    Positions are numbered, 0 being where the search started, each with the one it comes from and the rewrite between
    the two. Matches and findings are numbered as well, for many positions share them.
    """

    def __init__(self, search: Backtracking, sizes: tuple[int, int]) -> None:
        self.search = search
        self.sizes = sizes
        self.matches: dict[Key, int] = {}
        self.findings: dict[int, int] = {}
        self.told: list[object] = []
        self.positions: list[tuple[int, int]] = []
        self.children: dict[tuple[int, int], int] = {}
        self.wanted: dict[int, Position] = {}

    def data(self) -> Json:
        search = self.search
        best = self._position(search.best)
        opened = None if search.opened is None else self._candidate(search.opened)
        queue = [self._candidate(c) for c in search.queue]
        candidates, reused, duplicates, refused = search.counted
        kept = {str(n): self._state(n, position) for n, position in sorted(self.wanted.items())}
        return {
            "store": kept_store(search.initial.setting.store, *self.sizes),
            "best": best, "opened": opened, "place": search.place, "queue": queue, "kept": kept,
            "positions": self.positions, "matches": list(self.matches), "findings": self.told,
            "seen": sorted(search._seen), "expanded": search.statistics.expanded,
            "counts": [candidates, reused, duplicates, refused], "course": search.statistics.course,
            "seconds": search.elapsed,
        }  # fmt: skip

    def _candidate(self, c: Candidate) -> list[object]:
        match = -1 if c.match is None else self._match(c.match.key)
        return [c.cost, c.fingerprint, c.number, self._position(c.position), match, c.witness]

    def _position(self, position: Position) -> int:
        number = 0
        for taken in position.path:
            number = self._child(number, taken)
        self.wanted[number] = position
        return number

    def _child(self, parent: int, taken: Taken) -> int:
        found = self.children.get((parent, id(taken)))
        if found is None:
            self.positions.append((parent, self._match(taken.match.key)))
            found = self.children[parent, id(taken)] = len(self.positions)
        return found

    def _match(self, key: Key) -> int:
        return self.matches.setdefault(key, len(self.matches))

    def _state(self, number: int, position: Position) -> list[object]:
        """What is to come out again, and what differs from the findings of the nearest position before it."""
        before = self.positions[number - 1][0] if number else 0
        while before and before not in self.wanted:
            before = self.positions[before - 1][0]
        known = self.wanted[before].findings if before in self.wanted and before != number else {}
        added = [
            (self._match(k), self._finding(f)) for k, f in sorted(position.findings.items()) if known.get(k) is not f
        ]
        gone = [self._match(k) for k in sorted(known) if k not in position.findings]
        state = position.state
        return [before, state.fingerprint, state.witness, state.cost, added, gone]

    def _finding(self, found: Evaluation | Refusal) -> int:
        number = self.findings.get(id(found))
        if number is None:
            number = self.findings[id(found)] = len(self.told)
            footprint = sorted(found.footprint)
            if isinstance(found, Refusal):
                self.told.append([found.reason, footprint])
            else:
                change = found.cost, found.fingerprint, found.witness, found.size, found.constant_bytes
                self.told.append([*change, found.crowded, footprint])
        return number


def kept_store(store: Store, nodes: int, classes: int) -> Json:
    """What was added to a store after its first `nodes` and `classes`."""
    by_attrs: dict[Attrs, int] = {}
    by_types: dict[tuple[TensorType, ...], int] = {}
    by_op: dict[int, int] = {}
    entries: list[object] = []
    for number, entry in enumerate(store.entries):
        if number >= nodes:
            entries.append(_kept_entry(entry, by_attrs, by_types, by_op))
        by_attrs.setdefault(entry.attrs, number)
        by_types.setdefault(entry.types, number)
        by_op.setdefault(id(entry.op), number)
    names = [(n, e.classes) for n, e in enumerate(store.entries)]
    return {"entries": entries, "origins": store.class_origins[classes:], "names": names}


def _kept_entry(
    entry: Entry, by_attrs: dict[Attrs, int], by_types: dict[tuple[TensorType, ...], int], by_op: dict[int, int]
) -> list[object]:
    data = entry.attrs.get("data")
    if isinstance(data, ConstantWeight):
        return ["weight", data.op.name, [[k, _kept_value(v)] for k, v in data.attrs.items()]]
    like = by_attrs.get(entry.attrs)
    attrs: object = like if like is not None else [[k, _kept_value(v)] for k, v in entry.attrs.items()]
    # what an operator cannot tell from its inputs comes from the node that was rewired
    types = by_types[entry.types] if entry.op.has(Trait.OPAQUE) else -1
    return ["node", by_op.get(id(entry.op), entry.op.name), attrs, entry.inputs, types, entry.origin]


def _kept_value(value: AttrValue) -> object:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, DType):
        return {"dtype": value.name}
    if isinstance(value, tuple):
        return [_kept_value(v) for v in value]
    raise Unfit(f"it would have to hold the attribute value {value!r}")


# ── from data to a search ────────────────────────────────────────────────────────────────────────────────────────


class _Restored:
    """Brings a search that has not begun to where the data says. Wrong data raises one of `_WRONG`."""

    def __init__(self, search: Backtracking, start: Position, data: Json, sizes: tuple[int, int]) -> None:
        self.search = search
        self.data = data
        self.sizes = sizes
        self.positions = [start]
        self.matches: list[Key] = []
        self.findings: list[Evaluation | Refusal] = []

    def run(self) -> None:
        data, search = self.data, self.search
        store = search.initial.setting.store
        restore_store(store, _mapping(data["store"]), *self.sizes)
        size = len(store.entries)
        self.matches = [_key(k) for k in _list(data["matches"])]
        self.findings = [_finding(f) for f in _list(data["findings"])]
        self._reach()
        if len(store.entries) != size:
            raise ValueError("its states do not follow from its rewrites")
        queue = [self._candidate(c) for c in _list(data["queue"])]
        opened = None if data["opened"] is None else self._candidate(data["opened"])
        best, place = self.positions[_int(data["best"])], _int(data["place"])
        seen = {(_int(a), _int(b)) for a, b in map(_list, _list(data["seen"]))}
        counts = [_int(c) for c in _list(data["counts"])]
        course = [(_float(s), _float(c)) for s, c in map(_list, _list(data["course"]))]
        told = search.statistics
        told.candidates, told.reused, told.duplicates, told.refused = counts
        told.expanded, told.course = _int(data["expanded"]), course
        search.seconds_before = _float(data["seconds"])
        for position in self.positions:
            # only what was reached from the graph that is open has more to take over from it
            if opened is None or position.parent is not opened.position:
                position.parent = None
        heapq.heapify(queue)
        search.queue, search.opened, search.place, search.best, search._seen = queue, opened, place, best, seen
        search.counted = search._counts()
        numbers = [c.number for c in (*queue, *([opened] if opened else []))]
        search._numbers = itertools.count(max(numbers, default=0) + 1)

    def _reach(self) -> None:
        """All positions, each by its rewrite from the one before; those still needed with their findings."""
        kept = {int(n): _list(k) for n, k in _mapping(self.data["kept"]).items()}
        self._settle(0, kept)
        for number, (parent, match) in enumerate(map(_list, _list(self.data["positions"])), 1):
            before = self.positions[_int(parent)]
            self.positions.append(self.search._reached(before, before.matches[self.matches[_int(match)]]))
            self._settle(number, kept)

    def _settle(self, number: int, kept: dict[int, list[object]]) -> None:
        position = self.positions[number]
        if number not in kept:
            # what is not needed any more served as a step
            position.findings = {}
            return
        before, fingerprint, witness, cost, added, gone = kept[number]
        state = position.state
        if (state.fingerprint, state.witness) != (fingerprint, witness):
            raise ValueError("a rewrite leads to another graph")
        _check_cost(state, _float(cost))
        base = _int(before)
        findings = dict(self.positions[base].findings) if base in kept and base != number else {}
        for match in _list(gone):
            del findings[self.matches[_int(match)]]
        for match, found in map(_list, _list(added)):
            key = self.matches[_int(match)]
            if key not in position.matches:
                raise ValueError("a finding speaks of no match")
            findings[key] = self.findings[_int(found)]
        position.findings = findings

    def _candidate(self, told: object) -> Candidate:
        cost, fingerprint, number, position, match, witness = _list(told)
        found = self.positions[_int(position)]
        taken = None if match == -1 else found.matches[self.matches[_int(match)]]
        return Candidate(_float(cost), _int(fingerprint), _int(number), found, taken, _int(witness))


def _check_cost(state: State, cost: float) -> None:
    """The cost that the file says is the one to go on with; it may differ by rounding only."""
    if not abs(state.cost - cost) <= 1e-9 * max(abs(cost), 1e-6):
        raise ValueError("costs have changed")
    state.cost = cost


def restore_store(store: Store, data: Json, nodes: int, classes: int) -> None:
    """Adds to a store what `kept_store` told, under the same numbers; raises one of `_WRONG` where it does not fit."""
    if (len(store.entries), len(store.class_types)) != (nodes, classes):
        raise ValueError("the store is not as it was")
    origins = iter([_list(o) for o in _list(data["origins"])])
    for number, told in enumerate(_list(data["entries"]), nodes):
        if _restored_entry(store, _list(told), origins) != number:
            raise ValueError("a node is there twice")
    for origin in origins:
        _next_class(store, origin)
    for told, named in map(_list, _list(data["names"])):
        node = _in(told, len(store.entries))
        for index, value in enumerate(_list(named)):
            if value is not None:
                store.name(node, index, _in(value, len(store.class_types)))
        if store.entries[node].classes != named:
            raise ValueError("a class has another name")


def _restored_entry(store: Store, told: Sequence[object], origins: Iterator[list[object]]) -> int:
    kind, *rest = told
    if kind == "weight":
        name, attrs = rest
        op = operator_named(_str(name))
        weight = constant_weight(op, op.complete(_attrs(attrs)))
        label = f"{op.name}:{weight.attrs}"
        return store.intern(WEIGHT, Attrs({"data": weight}), (), (weight.type,), label=label)
    named, attrs, inputs, types, origin = rest
    read = tuple(None if c is None else _int(c) for c in _list(inputs))
    while any(c is not None and c >= len(store.class_types) for c in read):
        _next_class(store, next(origins))
    known = store.entries
    found: Operator = operator_named(named) if isinstance(named, str) else known[_in(named, len(known))].op
    given = known[_in(attrs, len(known))].attrs if isinstance(attrs, int) else Attrs(_attrs(attrs))
    like = _int(types)
    return store.intern(found, given, read, None if like < 0 else known[like].types, _str(origin))


def _next_class(store: Store, origin: Sequence[object]) -> None:
    node, index = origin
    before = len(store.class_types)
    if store.natural(_in(node, len(store.entries)), _int(index)) != before:
        raise ValueError("a class is there twice")


def _attrs(told: object) -> dict[str, AttrValue]:
    return {_str(name): _value(value) for name, value in map(_list, _list(told))}


def _value(told: object) -> AttrValue:
    if told is None or isinstance(told, (bool, int, float, str)):
        return told
    if isinstance(told, list):
        return tuple(_value(v) for v in told)
    return DType[_str(_mapping(told)["dtype"])]


def _key(told: object) -> Key:
    number, nodes, variables = _list(told)
    return _int(number), tuple(map(_int, _list(nodes))), tuple(map(_int, _list(variables)))


def _finding(told: object) -> Evaluation | Refusal:
    *said, footprint = _list(told)
    nodes = frozenset(map(_int, _list(footprint)))
    if len(said) == 1:
        return Refusal(_str(said[0]), nodes)
    cost, fingerprint, witness, size, constant_bytes, crowded = said
    few = tuple((_int(value), _int(readers)) for value, readers in map(_list, _list(crowded)))
    return Evaluation(_float(cost), _int(fingerprint), _int(witness), _int(size), _int(constant_bytes), nodes, few)


def _list(told: object) -> list[object]:
    if not isinstance(told, list):
        raise TypeError("a list was expected")
    return told


def _mapping(told: object) -> Json:
    if not isinstance(told, dict):
        raise TypeError("a mapping was expected")
    return told


def _int(told: object) -> int:
    if not isinstance(told, int) or isinstance(told, bool):
        raise TypeError("a whole number was expected")
    return told


def _in(told: object, size: int) -> int:
    number = _int(told)
    if not 0 <= number < size:
        raise IndexError(f"there is no number {number}")
    return number


def _float(told: object) -> float:
    if not isinstance(told, (int, float)) or isinstance(told, bool):
        raise TypeError("a number was expected")
    return told


def _str(told: object) -> str:
    if not isinstance(told, str):
        raise TypeError("a text was expected")
    return told


__all__ = ["Checkpoint", "Unfit"]
