"""Rules written in Python: a function that builds both sides of an equation.

    @taso.rule(where="rank(x) == 2 and rank(a) == 2 and rank(b) == 2")
    def merge_products(op, x, a, b):
        both = op.MatMul(x, op.Concat(a, b, axis=1))
        return [op.MatMul(x, a), op.MatMul(x, b)], op.Split(both, axis=1, split=("dim(a, 1)", "dim(b, 1)"))

`op` makes operators by their ONNX names; the other parameters are the tensors of the rule. An attribute is a value, or
an expression of the rule language as a string (a bare name in the source binds it). The function returns the source
and the target, each one term or a list of them. What comes out is the rule that the text of its equation says.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Union, overload

from taso.graph.errors import RuleError
from taso.graph.types import DType
from taso.rules.pattern import Rule
from taso.rules.text import parse_rule


@dataclass(frozen=True)
class Term:
    """A tensor of the rule, or an operator with its operands; `term[i]` is output i of an operator with several."""

    text: str

    def __getitem__(self, output: int) -> Term:
        return Term(f"{self.text}[{output}]")

    def __iter__(self) -> None:
        raise RuleError(f"take the outputs of {self.text} one by one, as in term[0]")


Setting = Union[None, bool, int, float, str, DType, "tuple[Setting, ...]", "list[Setting]"]
Operand = Union[Term, Setting]


class Operators:
    """`op.Conv(x, w, strides=(2, 2))` is the term Conv(x, w, strides=(2, 2)); None leaves an optional input out."""

    def __getattr__(self, name: str) -> Callable[..., Term]:
        if name.startswith("_"):
            raise AttributeError(name)

        def term(*inputs: Operand, **attributes: Operand) -> Term:
            given = [_operand(i) for i in inputs]
            given += [f"{key}={_setting(value)}" for key, value in attributes.items()]
            return Term(f"{name}({', '.join(given)})")

        return term


def _operand(value: Operand) -> str:
    return "_" if value is None else _setting(value)


def _setting(value: Operand) -> str:
    if isinstance(value, Term):
        return value.text
    if isinstance(value, DType):
        return value.name
    if isinstance(value, str):
        return value
    if isinstance(value, (tuple, list)):
        parts = [_setting(v) for v in value]
        return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    raise RuleError(f"a rule cannot speak of the setting {value!r}")


Side = Union[Term, Sequence[Term]]
Builder = Callable[..., "tuple[Side, Side]"]


@overload
def rule(build: str | Builder, *, where: str = "", exact: str = "reassociates", name: str = "") -> Rule: ...
@overload
def rule(*, where: str = "", exact: str = "reassociates", name: str = "") -> Callable[[Builder], Rule]: ...
def rule(
    build: str | Builder | None = None, *, where: str = "", exact: str = "reassociates", name: str = ""
) -> Rule | Callable[[Builder], Rule]:
    """A rule from its equation, `taso.rule("Relu(Relu(x)) => Relu(x)")`, or a function that builds it (a decorator).

    The function takes `op` and the rule's tensors, and returns source and target: `op.Relu(op.Relu(x)), op.Relu(x)`.
    `where` is the condition in the language of rule files, `exact` says how close the sides are in floating point
    ("exact", "reassociates", "approximates"), `name` is what the rule is called (the function's name). The rule is yet
    to be judged: `taso.optimize(rules=…)` does, `taso rules verify` too. Raises `RuleError` for what is no rule.
    """
    if build is None:
        return lambda function: _rule(function, where, exact, name)
    return _rule(build, where, exact, name)


def _rule(build: str | Builder, where: str, exact: str, name: str) -> Rule:
    if isinstance(build, str):
        equation = build
    elif callable(build):
        equation = _built(build)
        name = name or getattr(build, "__name__", "").strip("_<>").replace("_", "-").removesuffix("lambda")
    else:
        raise RuleError(f"a rule is an equation or a function that builds one, not {build!r}")
    lines = [f"[{name}]"] if name else []
    lines += [" ".join(equation.split())] + ([f"where {' '.join(where.split())}"] if where else [])
    return parse_rule("\n".join([*lines, f"exact: {exact}"]))


def _built(build: Builder) -> str:
    parameters = list(inspect.signature(build).parameters)
    if not parameters:
        raise RuleError("the function of a rule takes `op` and then the rule's tensors")
    try:
        sides = build(Operators(), *(Term(t) for t in parameters[1:]))
    except RuleError:
        raise
    except Exception as error:
        raise RuleError(f"the function of a rule failed: {type(error).__name__}: {error}") from error
    if not isinstance(sides, tuple) or len(sides) != 2:
        raise RuleError("the function of a rule returns two sides, the source and the target")
    return " => ".join(map(_side, sides))


def _side(side: Side) -> str:
    terms = [side] if isinstance(side, Term) else list(side) if isinstance(side, (list, tuple)) else []
    if not terms or not all(isinstance(t, Term) for t in terms):
        raise RuleError(f"a side of a rule is a term or a list of terms, not {side!r}")
    return " | ".join(t.text for t in terms)


__all__ = ["Operators", "Term", "rule"]
