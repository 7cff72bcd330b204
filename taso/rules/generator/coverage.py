"""Whether rules of TASO's format follow from equations: a derivation on concrete tensors, by equality saturation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product

from taso.rules.generator.arithmetic import Values
from taso.rules.generator.egraph import EGraph, Limits, follows, values_of
from taso.rules.generator.equations import Equation, Node, Tree, operators
from taso.rules.generator.generation import Generated
from taso.rules.generator.templates import Shape, Template
from taso.rules.taso_files import NUMBERS, Published, PublishedOperator

Goals = list[tuple[Tree, Tree]]

_EFFORTS = (Limits(4, 400), Limits(6, 1500))


def derivable(
    published: Published, templates: Sequence[Template], shapes: Sequence[Shape], equations: Sequence[Equation]
) -> bool:
    """Whether both sides of a rule become equal, its variables having some of `shapes`.

    False also where the rule uses operators or settings that are not among `templates`.
    """
    templates = [_anywhere(t) for t in templates]
    reading = next(_readings(published, templates, shapes), None)
    if reading is None:
        return False
    sides, inputs = reading
    return any(_derived(sides, EGraph(templates, inputs), equations, limits) for limits in _EFFORTS)


def _derived(sides: Goals, graph: EGraph, equations: Sequence[Equation], limits: Limits) -> bool:
    goals = [(graph.add(a), graph.add(b)) for a, b in sides]
    known = [(a, b) for a, b in goals if a is not None and b is not None]
    return len(known) == len(goals) and follows(graph, known, equations, limits)


def derivable_from(published: Published, found: Sequence[Generated]) -> bool:
    """`derivable` from all that some spaces gave."""
    templates = tuple(dict.fromkeys(t for f in found for t in f.space.templates))
    shapes = tuple(dict.fromkeys(shape for f in found for _, shape in f.space.variables))
    equations = [e for f in found for e in _moved(f, templates)]
    return derivable(published, templates, shapes, equations)


def _moved(found: Generated, templates: Sequence[Template]) -> Iterator[Equation]:
    """The equations of a space, their templates numbered as in `templates`."""
    numbers = [templates.index(t) for t in found.space.templates]

    def moved(tree: Tree) -> Tree:
        if isinstance(tree, int):
            return tree
        return Node(numbers[tree.template], tree.port, tuple(map(moved, tree.operands)))

    return (Equation(moved(e.left), moved(e.right)) for e in found.equations)


def _anywhere(template: Template) -> Template:
    """A pool on tensors of any size, as TASO's rules pool kernels too."""
    pools = NUMBERS["MaxPool"], NUMBERS["AveragePool"]
    return replace(template, shape=_four) if template.number in pools else template


def _four(x: Shape) -> Shape | None:
    return x if len(x) == 4 else None


def _readings(
    published: Published, templates: Sequence[Template], shapes: Sequence[Shape]
) -> Iterator[tuple[Goals, Mapping[int, Values]]]:
    """The outputs of both sides as trees, with values of the variables of each choice of shapes that fits."""
    numbers = sorted({n for op in (*published.source, *published.target) for n, _ in op.inputs if n < 0}, reverse=True)
    options = [_options(op, templates) for op in (*published.source, *published.target)]
    if not all(options):
        return
    for choice in product(*options):
        source, target = choice[: len(published.source)], choice[len(published.source) :]
        goals: Goals = [
            (_tree(published.source, source, a, i), _tree(published.target, target, b, j))
            for a, i, b, j in published.outputs
        ]
        for chosen in product(shapes, repeat=len(numbers)):
            found = dict(zip((-n - 1 for n in numbers), chosen, strict=True))
            if all(_shape(t, templates, found) is not None for pair in goals for t in pair):
                inputs = values_of([(str(n), s) for n, s in found.items()])
                yield goals, dict(zip(found, inputs.values(), strict=True))


def _options(op: PublishedOperator, templates: Sequence[Template]) -> list[int]:
    """The templates that an operator may be: more than one for constants of several shapes."""
    found = []
    for place, template in enumerate(templates):
        same = template.number == op.type and template.arity == len(op.inputs)
        if same and all(op.settings.get(key, 0) == value for key, value in template.settings.items()):
            found.append(place)
    return found


def _tree(ops: Sequence[PublishedOperator], chosen: Sequence[int], number: int, port: int) -> Tree:
    if number < 0:
        return -number - 1
    return Node(chosen[number], port, tuple(_tree(ops, chosen, n, p) for n, p in ops[number].inputs))


def _shape(tree: Tree, templates: Sequence[Template], shapes: Mapping[int, Shape]) -> Shape | None:
    found: dict[Tree, Shape] = {}
    found.update(shapes.items())
    for template, operands in operators(tree):
        shape = templates[template].shape(*(found[o] for o in operands))
        if shape is None:
            return None
        for port in range(templates[template].outputs):
            found[Node(template, port, operands)] = shape
    return found[tree]
