"""Statements as texts that do not depend on what their variables are called."""

from __future__ import annotations

import re
from collections.abc import Sequence

from taso.rules.expression import Expr, show
from taso.rules.pattern import PatternNode, Port, Rule


def spelled(rule: Rule) -> str:
    """A statement with its variables called by their order of appearance, so that renamings are one text."""
    names = {name: f"t{i}" for i, name in enumerate(rule.variables)}
    names |= {name: f"s{i}" for i, name in enumerate(rule.attribute_variables)}

    def renamed(expr: Expr) -> str:
        return re.sub(r"\b[A-Za-z_]\w*\b(?!\()", lambda m: names.get(m.group(), m.group()), show(expr))

    def side(nodes: Sequence[PatternNode]) -> list[str]:
        return [
            f"{n.op.name}{[_ref(r, names) for r in n.inputs]}{[(a, renamed(e)) for a, e in n.attrs]}{n.n_outputs}"
            for n in nodes
        ]  # fmt: skip

    outputs = [(_ref(a, names), _ref(b, names)) for a, b in rule.outputs]
    return f"{side(rule.source)} {side(rule.target)} {outputs} {sorted(map(renamed, rule.conditions))}"


def _ref(ref: str | Port | None, names: dict[str, str]) -> str:
    return names[ref] if isinstance(ref, str) else str(ref)
