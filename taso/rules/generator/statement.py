"""Equations as rules: written in TASO's format, whose reading infers the conditions for both sides to have types."""

from __future__ import annotations

from collections.abc import Sequence

from taso.graph.errors import RuleError
from taso.rules.generator.equations import Equation, Node, Tree, operators
from taso.rules.generator.ours import Statement
from taso.rules.generator.templates import AXIS, Template
from taso.rules.pattern import Rule
from taso.rules.taso_files import NUMBERS, Published, PublishedOperator, converted


def rules(equation: Equation, templates: Sequence[Template], origin: str) -> list[Rule]:
    """The rules that an equation stands for, one for each direction that can be written down, trivial ones too."""
    found = []
    for source, target in equation.ways:
        rule = _written([source], [target], templates, origin)
        if rule is not None:
            found.append(rule)
    return found


def splitting(equation: Equation, templates: Sequence[Template], origin: str) -> Rule | None:
    """Of an equation that makes a concatenation one graph: the parts, all at once, as what that graph splits into."""
    for whole, joint in ((equation.left, equation.right), (equation.right, equation.left)):
        if not (isinstance(whole, Node) and isinstance(joint, Node)) or any(isinstance(o, int) for o in whole.operands):
            continue
        template = templates[whole.template]
        cut = next((i for i, t in enumerate(templates) if _cuts(t, template)), None)
        if cut is not None and joint.template != whole.template:
            parts = [Node(cut, port, (joint,)) for port in range(2)]
            return _written(whole.operands, parts, templates, origin)
    return None


def _cuts(split: Template, concat: Template) -> bool:
    axes = [t.settings.get(AXIS) for t in (split, concat)]
    return (split.number, concat.number, axes[0]) == (NUMBERS["Split"], NUMBERS["Concat"], axes[1])


def _written(
    sources: Sequence[Tree], targets: Sequence[Tree], templates: Sequence[Template], origin: str
) -> Rule | None:  # fmt: skip
    """`rewriting`, None where it means nothing, as a constant alone cannot be replaced."""
    try:
        return rewriting(sources, targets, templates, origin)
    except RuleError:
        return None


def rewriting(sources: Sequence[Tree], targets: Sequence[Tree], templates: Sequence[Template], origin: str) -> Rule:
    """The rule that replaces the values of some trees by those of others; raises `RuleError` where it means nothing."""
    sides = [_Side(side, templates) for side in (sources, targets)]
    outputs = []
    for source, target in zip(sources, targets, strict=True):
        (a, i), (b, j) = sides[0].place(source), sides[1].place(target)
        outputs.append((a, i, b, j))
    return converted(Published(sides[0].written, sides[1].written, tuple(outputs)), Statement, origin)


class _Side:
    def __init__(self, trees: Sequence[Tree], templates: Sequence[Template]) -> None:
        self._numbers = {key: i for i, key in enumerate(operators(*trees))}
        self.written = tuple(
            PublishedOperator(templates[t].number, tuple(map(self.place, operands)), templates[t].settings)
            for t, operands in self._numbers
        )

    def place(self, tree: Tree) -> tuple[int, int]:
        if isinstance(tree, Node):
            return self._numbers[tree.template, tree.operands], tree.port
        return -1 - tree, 0
