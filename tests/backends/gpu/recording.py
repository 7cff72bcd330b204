"""A stand-in for the package cudnn that records what is asked of it, and fails where a test says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


class Unsupported(Exception):
    """What the frontend raises where cuDNN has no engine."""


@dataclass
class Recorded:
    """One call of a method of a graph."""

    method: str
    positional: tuple[object, ...]
    named: dict[str, object]


class Member:
    """Anything of an enumeration, by name."""

    def __init__(self, owner: str) -> None:
        self._owner = owner

    def __getattr__(self, name: str) -> str:
        return f"{self._owner}.{name}"


@dataclass
class FakeTensor:
    """A tensor, and what was set of it."""

    made_by: str
    inputs: tuple[object, ...] = ()
    said: dict[str, object] = field(default_factory=dict)

    def _say(self, name: str, value: object) -> FakeTensor:
        self.said[name] = value
        return self

    def set_uid(self, uid: int) -> FakeTensor:
        return self._say("uid", uid)

    def set_dim(self, dim: Sequence[int]) -> FakeTensor:
        return self._say("dim", tuple(dim))

    def set_stride(self, stride: Sequence[int]) -> FakeTensor:
        return self._say("stride", tuple(stride))

    def set_data_type(self, dtype: object) -> FakeTensor:
        return self._say("data_type", dtype)

    def set_output(self, value: bool) -> FakeTensor:
        return self._say("output", value)


class FakeGraph:
    """A graph: every operation is recorded; plans are those that the module has."""

    def __init__(self, module: FakeCudnn, settings: dict[str, object]) -> None:
        self.module, self.settings = module, settings
        self.calls: list[Recorded] = []
        self.tensors: list[FakeTensor] = []
        self.built: list[int] = []
        self.ran: list[dict[str, object]] = []

    def tensor(self, **named: object) -> FakeTensor:
        self.calls.append(Recorded("tensor", (), named))
        self.tensors.append(FakeTensor("tensor", said=dict(named)))
        return self.tensors[-1]

    def __getattr__(self, name: str) -> Callable[..., object]:
        if name.startswith("_") or name in self.module.lacks:
            raise AttributeError(name)

        def operation(*positional: object, **named: object) -> object:
            self.calls.append(Recorded(name, positional, named))
            given = (*positional, *named.values())
            self.tensors.append(FakeTensor(name, tuple(x for x in given if isinstance(x, FakeTensor))))
            several = name in ("layernorm", "rmsnorm", "instancenorm", "sdpa")
            return [self.tensors[-1], None, None] if several else self.tensors[-1]

        return operation

    def _did(self, method: str, **named: object) -> None:
        self.calls.append(Recorded(method, (), named))
        failure = self.module.failing.get(method)
        if failure is not None:
            raise failure

    def validate(self) -> None:
        self._did("validate")

    def build_operation_graph(self) -> None:
        self._did("build_operation_graph")

    def create_execution_plans(self, heuristics: Sequence[object]) -> None:
        self._did("create_execution_plans", heuristics=heuristics)

    def deselect_numeric_notes(self, notes: Sequence[object]) -> None:
        self._did("deselect_numeric_notes", notes=notes)

    def get_execution_plan_count(self) -> int:
        return len(self.module.plans)

    def get_plan_name_at_index(self, index: int) -> str:
        return f"plan {index}"

    def build_plan_at_index(self, index: int) -> None:
        self._did("build_plan_at_index", index=index)
        if isinstance(self.module.plans[index], Exception):
            raise self.module.plans[index]
        self.built.append(index)

    def get_workspace_size_plan_at_index(self, index: int) -> int:
        size = self.module.plans[index]
        assert isinstance(size, int)
        return size

    def execute_plan_at_index(self, **named: object) -> None:
        self._did("execute_plan_at_index", **named)
        index = named["index"]
        failure = self.module.runs.get(index) if isinstance(index, int) else None
        if failure is not None:
            raise failure
        self.ran.append(named)


@dataclass
class FakeCudnn:
    """The package. `plans` are workspace bytes of plans, or why one does not build; `runs` why one does not run."""

    plans: list[int | Exception] = field(default_factory=lambda: [0])
    failing: dict[str, Exception] = field(default_factory=dict)
    runs: dict[int, Exception] = field(default_factory=dict)
    lacks: frozenset[str] = frozenset()
    graphs: list[FakeGraph] = field(default_factory=list)
    streams: list[tuple[object, int]] = field(default_factory=list)
    handles: int = 0

    __version__ = "0.0"
    cudnnGraphNotSupportedError = Unsupported
    data_type = Member("data_type")
    heur_mode = Member("heur_mode")
    numerical_note = Member("numerical_note")
    reduction_mode = Member("reduction_mode")
    norm_forward_phase = Member("norm_forward_phase")
    diagonal_alignment = Member("diagonal_alignment")

    def pygraph(self, **settings: object) -> FakeGraph:
        self.graphs.append(FakeGraph(self, settings))
        return self.graphs[-1]

    def create_handle(self) -> object:
        self.handles += 1
        return f"handle {self.handles}"

    def set_stream(self, handle: object, stream: int) -> None:
        self.streams.append((handle, stream))

    def backend_version_string(self) -> str:
        return "9.9.9"
