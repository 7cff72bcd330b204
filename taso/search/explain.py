"""Why a rule did not apply: where its shape fits, what stands against it there, and what it would cost.

Asked for by `taso.optimize(..., explain=...)`, looked up on the original graph and on the best one found.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from taso.graph.errors import GraphError, RuleError, SearchError
from taso.graph.graph import Graph, Node, Value
from taso.graph.operator import Trait
from taso.rules.collection import equations, is_equation, library, statement
from taso.rules.constants import CONSTANTS, ConstantWeight
from taso.rules.expression import Value as AttributeValue
from taso.rules.matcher import Match, Matcher
from taso.rules.pattern import PatternNode, Port, Ref, Rule
from taso.search.moves import Limits, Outcome
from taso.search.rewrite import Refused, apply
from taso.search.state import Cycle, Draft, State

log = logging.getLogger(__name__)

MOST_PLACES = 50
"""Places of one rule in one graph that are told of."""

_ALONE = "this part of the rule's shape fits here, and the rest nowhere in connection with it"

MOST_NEAR = 3
"""Near misses of one rule in one graph that are told of, where its shape fits nowhere."""

TAKEN, APPLIES, REFUSED, NEAR, ABSENT = "taken", "applies", "refused", "near miss", "absent"


@dataclass
class Explanation:
    """What became of one rule at one place.

    `asked` is the question; `graph` "original" or "best". `outcome` is "taken" (on the way to the best graph),
    "applies" (and was not taken), "refused" (its shape fits, it does not apply), "near miss" (a part of its shape
    fits) or "absent". `reason` says why, `nodes` where; `change_ms` is what it would change the cost by, where it
    applies; `not_used` says why the search did not use the rule at all, "" where it did.
    """

    asked: str
    rule: str
    identifier: str
    graph: str
    outcome: str
    nodes: list[str] = field(default_factory=list)
    reason: str = ""
    change_ms: float | None = None
    not_used: str = ""

    def __str__(self) -> str:
        place = ", ".join(self.nodes)
        change = "" if self.change_ms is None else f" ({self.change_ms:+.3f} ms)"
        return f"{self.outcome}{change}{' at ' + place if place else ''}{': ' + self.reason if self.reason else ''}"


class Names:
    """What a user calls the nodes of a state: by the names of the original graph where they have some."""

    def __init__(self, graph: Graph, classes: dict[Value, int], initial: State) -> None:
        self._nodes: dict[int, str] = {}
        self._classes: dict[int, str] = {}
        self.known: dict[str, set[int]] = {}
        """Names of nodes and of values, and the classes that they stand for."""
        outputs = {v: n for n, v in (*graph.outputs, *zip(graph.input_names, graph.inputs, strict=True))}
        for node in graph.nodes:
            made = [classes[v] for v in node.outputs if v in classes]
            names = [*(graph.info.value_names.get(node.outputs[0], ()) if node.outputs else ())]
            names += [outputs[v] for v in node.outputs if v in outputs]
            for value in node.outputs:
                for name in (*graph.info.value_names.get(value, ()), *([outputs[value]] if value in outputs else [])):
                    if value in classes:
                        self._classes.setdefault(classes[value], name)
                        self._add(name, [classes[value]])
            self._name_node(graph, node, made, names, initial)

    def _name_node(self, graph: Graph, node: Node, made: list[int], names: list[str], initial: State) -> None:
        name = graph.info.node_names.get(node) or (names[0] if names else "")
        if made and made[0] in initial.producers:
            number = initial.producers[made[0]]
            self._nodes[number] = f"{node.op.label} '{name}'" if name else f"{node.op.label}#{number}"
            self._add(self._nodes[number], made)
        if name:
            self._add(name, made)

    def _add(self, name: str, classes: Sequence[int]) -> None:
        self.known.setdefault(name, set()).update(classes)

    def of(self, state: State, node: int) -> str:
        """A node as a user would call it: its operator with its name, or with that of what it computes."""
        found = self._nodes.get(node)
        if found is not None:
            return found
        op = state.setting.store.entries[node].op.label
        classes = state.made.get(node) or state.setting.store.entries[node].classes
        made = next((self._classes[c] for c in classes if c in self._classes), "")
        return f"{op} computing '{made}'" if made else f"{op}#{node}"


@dataclass
class Question:
    """Something to explain: rules, or the node that computes some classes."""

    asked: str
    rules: list[Rule] = field(default_factory=list)
    classes: set[int] = field(default_factory=set)


def questions(asked: Sequence[str], names: Names, used: Sequence[Rule]) -> list[Question]:
    """What a user wants explained: rules by equation, name or pattern (* stands for anything), or nodes by name.

    Raises `SearchError` for what is neither, `RuleError` for an equation that cannot be read.
    """
    rules = list({statement(r): r for r in (*used, *library())}.values())
    return [_question(text, names, rules) for text in asked]


def _question(text: str, names: Names, rules: Sequence[Rule]) -> Question:
    if not isinstance(text, str) or not text.strip():
        raise SearchError(f"explain is the name of a rule or of a node, or a list of them, and not {text!r}")
    if is_equation(text):
        plain = "".join(text.split())
        said = [r for r in rules if "".join(r.name.split()) == plain]
        return Question(text, said or equations(text))
    if text in names.known:
        return Question(text, [], names.known[text])
    meant = [r for r in rules if r.id and fnmatchcase(r.id, text)]
    if not meant:
        raise SearchError(f"explain: there is neither a rule nor a node called '{text}'")
    return Question(text, meant)


class Explainer:
    """Looks up questions on the graphs of one search."""

    def __init__(
        self, names: Names, outcome: Outcome, limits: Limits, used: Sequence[Rule]
    ) -> None:
        self.names = names
        self.outcome = outcome
        self.limits = limits
        self.used = {statement(r): r for r in used}
        self.messages: list[str] = []
        self._taken = {(t.match.rule.name, t.match.nodes) for t in outcome.path}

    def explain(self, asked: Sequence[Question]) -> Iterator[Explanation]:
        """Everything there is to say to some questions, one place after the other."""
        for question in asked:
            graphs = [("original", self.outcome.initial)]
            if self.outcome.path:
                graphs.append(("best", self.outcome.best))
            for which, state in graphs:
                if question.rules:
                    for rule in question.rules:
                        yield from self._of_rule(question, which, state, rule)
                else:
                    yield from self._of_node(question, which, state)

    def _of_rule(self, question: Question, which: str, state: State, rule: Rule) -> Iterator[Explanation]:
        found = list(self._places(question, which, state, rule, None))
        yield from found[:MOST_PLACES]
        if len(found) > MOST_PLACES:
            more = f"explain: {rule.name} fits at {len(found)} places of the {which} graph, {MOST_PLACES} are told"
            self.messages.append(more)
        if not found:
            for nodes, reason in almost(state, rule, self.names)[:MOST_NEAR]:
                outcome = NEAR if nodes else ABSENT
                yield self._said(question, which, state, rule, outcome, nodes, reason)

    def _of_node(self, question: Question, which: str, state: State) -> Iterator[Explanation]:
        nodes = {state.producers[c] for c in question.classes if c in state.producers}
        found: list[Explanation] = []
        for rule in self.used.values():
            found += self._places(question, which, state, rule, nodes)
        yield from found[:MOST_PLACES]
        if len(found) > MOST_PLACES:
            self.messages.append(f"explain: {len(found)} rules fit at '{question.asked}', {MOST_PLACES} are told")
        if not found:
            why = "no rule has a shape that takes it in" if nodes else "nothing computes it any more"
            yield Explanation(question.asked, "", "", which, ABSENT, [], why)

    def _places(
        self, question: Question, which: str, state: State, rule: Rule, nodes: set[int] | None
    ) -> Iterator[Explanation]:
        """Where the shape of a rule fits, at one of `nodes` if these are given; each set of nodes once."""
        if rule.trivial:
            return
        matcher = Matcher([rule])
        matches = {m.nodes: m for m in matcher.find_all(state)}
        told: dict[tuple[int, ...], tuple[tuple[int, ...], str]] = {}
        for place, reason in matcher.explain(state, 0):
            if nodes is None or not nodes.isdisjoint(place):
                key = tuple(sorted(place))
                if key not in told or place in matches:
                    told[key] = place, reason
        for _, (place, reason) in sorted(told.items()):
            match = matches.get(place)
            if match is None:
                why = reason or "it applies with the roles of its parts exchanged"
                yield self._said(question, which, state, rule, REFUSED, place, why)
            else:
                yield self._tried(question, which, state, match)

    def _tried(self, question: Question, which: str, state: State, match: Match) -> Explanation:
        draft = Draft(state)
        try:
            apply(match, draft)
            draft.sweep()
            draft.check_acyclic()
            change = draft.cost() - state.cost
        except (Refused, Cycle, GraphError) as reason:
            return self._said(question, which, state, match.rule, REFUSED, match.nodes, str(reason))
        if which == "original" and (match.rule.name, match.nodes) in self._taken:
            return self._said(question, which, state, match.rule, TAKEN, match.nodes, "", change)
        why = self._why_not(which, state, draft, change)
        return self._said(question, which, state, match.rule, APPLIES, match.nodes, why, change)

    def _why_not(self, which: str, state: State, draft: Draft, change: float) -> str:
        limits, bound = self.limits, self.limits.alpha * self.outcome.best.cost
        if state.size + draft.size_change() > 2 * self.outcome.initial.size:
            return "the graph would grow to more than twice the nodes of the original"
        if draft.constant_bytes() > limits.constant_bytes:
            return "the weights to be stored would grow beyond what may be folded"
        if state.cost + change >= bound and change >= 0:
            return f"it does not pay, and the graph would cost more than alpha ({limits.alpha:g}) × the best"
        stopped = self.outcome.statistics.stopped
        if which == "best" and change < 0:
            return f"it would pay, and the search ended before it was taken{f' ({stopped})' if stopped else ''}"
        if change < 0:
            return "it pays by itself; the way to the best graph led over other rewrites"
        return "it does not pay, and nothing that was found behind it does"

    def _said(
        self, question: Question, which: str, state: State, rule: Rule, outcome: str, nodes: Sequence[int],
        reason: str, change: float | None = None,
    ) -> Explanation:  # fmt: skip
        where = [self.names.of(state, n) for n in nodes]
        milliseconds = None if change is None else change * 1e3
        unused = "" if statement(rule) in self.used else _not_used(rule)
        return Explanation(question.asked, rule.name, rule.id, which, outcome, where, reason, milliseconds, unused)


def _not_used(rule: Rule) -> str:
    return (
        f"it is not among the rules of this search (it is {rule.status.value}, {rule.exactness.value}; "
        "rules, rule_statuses and exactness say which are)"
    )


# ── where a part of a shape fits ─────────────────────────────────────────────────────────────────────────────────


def almost(state: State, rule: Rule, names: Names) -> list[tuple[tuple[int, ...], str]]:
    """Where most of a rule's shape fits, with what does not, for a shape that fits nowhere: the best places first.

    Without nodes it says which operator the graph lacks.
    """
    by_op: dict[str, list[int]] = {}
    for node in state.live_nodes():
        by_op.setdefault(state.op(node).name, []).append(node)
    lacking = dict.fromkeys(
        n.op.name for n in rule.source if n.op not in CONSTANTS and n.op.name not in by_op
    )
    if lacking:
        return [((), f"the graph holds no {' and no '.join(lacking)}")]
    found: list[tuple[tuple[int, ...], str]] = []
    for root in dict.fromkeys(port.node for port, _ in rule.outputs):
        for node in by_op.get(rule.source[root].op.name, ()):
            walk = _Walk(state, rule, names)
            walk.compare(root, node)
            reason = walk.reason or _ALONE
            found.append((tuple(walk.nodes.values()), reason))
    best = sorted(dict.fromkeys(found), key=lambda f: (-len(f[0]), f[0]))
    return best or [((), "no operator of its shape is in the graph")]


class _Walk:
    """Lays a source over a graph, from one node against the edges, as far as it fits."""

    def __init__(self, state: State, rule: Rule, names: Names) -> None:
        self.state = state
        self.rule = rule
        self.names = names
        self.nodes: dict[int, int] = {}
        self.bound: dict[str, AttributeValue] = {}
        self.reason = ""

    def compare(self, place: int, node: int) -> None:
        pattern, state = self.rule.source[place], self.state
        if place in self.nodes:
            self._say(self.nodes[place] == node, "the same node is asked for in two places")
            return
        if pattern.op in CONSTANTS:
            weight = state.attrs(node).get("data")
            made = isinstance(weight, ConstantWeight) and weight.op is pattern.op
            if self._say(made, f"{self._name(node)} is not known to be the constant {pattern.op.name}"):
                self.nodes[place] = node
            return
        if not self._say(
            state.op(node) is pattern.op, f"{self._name(node)} stands where {pattern.op.name} is asked for"
        ):
            return
        inputs = state.inputs(node)
        fits = len(inputs) == len(pattern.inputs) and len(state.outputs(node)) == pattern.n_outputs
        if not self._say(fits, f"{self._name(node)} has another number of inputs or outputs than the rule says"):
            return
        self.nodes[place] = node
        self._attributes(pattern, node)
        for ref, value in self._paired(pattern, inputs):
            if (ref is None) != (value is None):
                self._say(False, f"an optional input of {self._name(node)} is {'given' if value else 'left out'}")
            elif isinstance(ref, Port) and value is not None:
                self.compare(ref.node, state.producer(value))

    def _attributes(self, pattern: PatternNode, node: int) -> None:
        types = [self.state.symbolic_type(v) if v is not None else None for v in self.state.inputs(node)]
        try:
            against = pattern.bind(types, self.state.attrs(node), self.bound)
        except (GraphError, RuleError) as error:
            against = str(error)
        self._say(against is None, f"{against} ({self._name(node)})")

    def _paired(
        self, pattern: PatternNode, inputs: Sequence[int | None]
    ) -> list[tuple[Ref | None, int | None]]:
        """Inputs as the rule says them; those of a commutative operator the way that more of them fit."""
        pairs = list(zip(pattern.inputs, inputs, strict=True))
        if not pattern.op.has(Trait.COMMUTATIVE) or len(inputs) != 2:
            return pairs
        turned = list(zip(pattern.inputs, reversed(inputs), strict=True))
        return max(pairs, turned, key=self._fitting)

    def _fitting(self, pairs: list[tuple[Ref | None, int | None]]) -> int:
        state, source = self.state, self.rule.source
        made = ((source[r.node].op, state.producer(v)) for r, v in pairs if isinstance(r, Port) and v is not None)
        return sum(state.op(node) is op for op, node in made)

    def _say(self, holds: bool, otherwise: str) -> bool:
        if not holds and not self.reason:
            self.reason = otherwise
        return holds

    def _name(self, node: int) -> str:
        return self.names.of(self.state, node)


__all__ = ["Explainer", "Explanation", "Names", "Question", "questions"]
