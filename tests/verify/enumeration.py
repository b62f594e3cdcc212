"""The law of what a rule commits, computed exactly on toy models.

A rule meets chance only through its `RandomSource`. Here that source takes one branch of each decision and knows
the branch's probability; running drafter and rule once for every combination of branches gives the law of the
committed text, to be compared with the target's. No sampling, no tolerance beyond rounding.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from draftwood.core.proposal import Proposal
from draftwood.core.rule import RandomSource, Rule, SeededSource
from draftwood.core.tree import ROOT, TokenTree
from draftwood.verify import Rejection, Traversal

T = TypeVar("T")
Text = tuple[int, ...]
Law = dict[Text, float]


class EnumeratingSource:
    """Follows a script of branches, and after its end the first possible one of every decision."""

    def __init__(self, script: list[int]) -> None:
        self.probability = 1.0
        self._script = script
        self._taken: list[int] = []
        self._branches: list[list[int]] = []  # of each decision, those with a positive probability

    def accept(self, probability: float) -> bool:
        probability = min(max(probability, 0.0), 1.0) if not math.isnan(probability) else probability
        return self._decide([1.0 - probability, probability]) == 1

    def draw(self, weights: Tensor) -> int:
        return self._decide((weights / weights.sum()).tolist())

    def gumbel(self, position: int, vocabulary: int) -> Tensor:
        """Returns noise of no special law: only rules that do not need any can be enumerated."""
        return torch.arange(vocabulary, dtype=torch.float32).roll(position)

    def next_script(self) -> list[int] | None:
        """Returns the script that leads to the next combination of branches, or None after the last."""
        for index in reversed(range(len(self._taken))):
            later = [branch for branch in self._branches[index] if branch > self._taken[index]]
            if later:
                return [*self._taken[:index], later[0]]
        return None

    def _decide(self, probabilities: list[float]) -> int:
        if not all(probability >= 0.0 for probability in probabilities):
            raise ArithmeticError(f"no probabilities: {probabilities}")
        branches = [branch for branch, probability in enumerate(probabilities) if probability > 0.0]
        position = len(self._taken)
        branch = self._script[position] if position < len(self._script) else branches[0]
        self._taken.append(branch)
        self._branches.append(branches)
        self.probability *= probabilities[branch]
        return branch


def runs(program: Callable[[EnumeratingSource], T]) -> Iterator[tuple[float, T]]:
    """Runs `program` once for every combination of its random decisions; yields (probability, result)."""
    script: list[int] | None = []
    while script is not None:
        source = EnumeratingSource(script)
        result = program(source)
        yield source.probability, result
        script = source.next_script()


@dataclass(eq=False)
class World:
    """A toy target p and a toy drafter q: a random distribution for every context, fixed by the seed.

    Some tokens are impossible for p, some for q, and in some contexts the two are equal (up to the rounding of
    log and softmax, which is where a residual can be empty although a token was rejected).

    Attributes:
        vocabulary: number of tokens.
        seed: everything follows from it.
        greedy: whether p is one-hot, as it is at temperature 0.
        agreement: the share of contexts in which q is p.
    """

    vocabulary: int
    seed: int
    greedy: bool = False
    agreement: float = 0.2
    _known: dict[tuple[str, Text], Tensor] = field(default_factory=dict)

    def p(self, context: Text) -> Tensor:
        """Returns the target's distribution, [vocabulary] float64."""
        weights = self._weights("p", context)
        return one_hot(int(weights.argmax()), self.vocabulary) if self.greedy else weights

    def q(self, context: Text) -> Tensor:
        """Returns the drafter's distribution, [vocabulary] float64."""
        same = random.Random(f"{self.seed} same {context}").random() < self.agreement
        return self._weights("p" if same else "q", context)

    def extend(self, law: Law, length: int) -> Law:
        """Returns the law of the first `length` tokens when the target goes on where `law` ends."""
        extended: Law = {}
        pending = list(law.items())
        while pending:
            text, probability = pending.pop()
            if len(text) >= length:
                extended[text[:length]] = extended.get(text[:length], 0.0) + probability
                continue
            continuation = enumerate(self.p(text).tolist())
            pending += [((*text, token), probability * weight) for token, weight in continuation if weight > 0.0]
        return extended

    def _weights(self, name: str, context: Text) -> Tensor:
        known = self._known.get((name, context))
        if known is None:
            generator = random.Random(f"{self.seed} {name} {context}")
            weights = [generator.expovariate(1.0) ** 1.5 * (generator.random() < 0.85) for _ in range(self.vocabulary)]
            weights[generator.randrange(self.vocabulary)] += 0.1  # at least one token is possible
            known = torch.tensor(weights, dtype=torch.float64)
            known = self._known[name, context] = known / known.sum()
        return known


class Shape(NamedTuple):
    """The tree to be drafted.

    Attributes:
        parents: the parent of each node.
        idle: nodes that are no candidates.
        conditional: whether a node with an odd token is left without its children.
    """

    parents: tuple[int, ...]
    idle: frozenset[int] = frozenset()
    conditional: bool = False


class Scheme(NamedTuple):
    """How a drafter comes to a token.

    Attributes:
        pick: of (source, q, elder siblings, node) returns the token and the law it was drawn from, or None when q
            has no token left.
        tells: whether the drafter hands that law to the rule.
    """

    pick: Callable[[RandomSource, Tensor, list[int], int], tuple[int, Tensor] | None]
    tells: bool = True


class Draft(NamedTuple):
    """A proposal of one row, with one padding node at its end, and the target's logits."""

    proposal: Proposal
    logits: Tensor


def one_hot(token: int, vocabulary: int) -> Tensor:
    """Returns a point mass, [vocabulary] float64."""
    point = torch.zeros(vocabulary, dtype=torch.float64)
    point[token] = 1.0
    return point


def without_replacement(source: RandomSource, q: Tensor, elders: list[int], node: int) -> tuple[int, Tensor] | None:
    left = q.clone()
    left[elders] = 0.0
    return (source.draw(left), left / left.sum()) if left.sum() > 0 else None


def with_replacement(source: RandomSource, q: Tensor, elders: list[int], node: int) -> tuple[int, Tensor]:
    return source.draw(q), q


def most_likely(source: RandomSource, q: Tensor, elders: list[int], node: int) -> tuple[int, Tensor]:
    left = q.clone()
    left[elders] = -1.0
    token = int(left.argmax())
    return token, one_hot(token, len(q))


def mixed(source: RandomSource, q: Tensor, elders: list[int], node: int) -> tuple[int, Tensor] | None:
    """Draws every other node; chooses the rest, even where that repeats an elder sibling."""
    return without_replacement(source, q, elders, node) if node % 2 else most_likely(source, q, [], node)


SCHEMES = {
    "without replacement": Scheme(without_replacement),
    "with replacement": Scheme(with_replacement),
    "chosen": Scheme(most_likely, tells=False),
    "drawn, law withheld": Scheme(without_replacement, tells=False),
    "mixed": Scheme(mixed),
}
SHAPES = {
    "empty": Shape(()),
    "chain": Shape((ROOT, 0, 1)),
    "wide": Shape((ROOT, ROOT, ROOT)),
    "ragged": Shape((ROOT, ROOT, 0, 0)),
    "breadth first": Shape((ROOT, ROOT, 0, 1, 2), conditional=True),
    "depth first": Shape((ROOT, 0, 1, 0, ROOT), conditional=True),
    "idle nodes": Shape((ROOT, ROOT, 0, 1, 1), idle=frozenset({0, 3})),
}
LOSSLESS: dict[str, Rule] = {"rejection": Rejection(), "traversal": Traversal()}


def draft(source: RandomSource, world: World, shape: Shape, scheme: Scheme, prefix: Text = ()) -> Draft:
    """Drafts one tree after `prefix`. The padding node and its rows of logits and law are poison."""
    kept: dict[int, int] = {}
    tokens: list[int] = []
    parents: list[int] = []
    laws: list[Tensor] = []
    contexts = {ROOT: prefix}
    for node, shape_parent in enumerate(shape.parents):
        parent = ROOT if shape_parent == ROOT else kept.get(shape_parent, node)
        if parent not in contexts or (shape.conditional and parent != ROOT and tokens[parent] % 2):
            continue
        elders = [token for token, other in zip(tokens, parents, strict=True) if other == parent]
        picked = scheme.pick(source, world.q(contexts[parent]), elders, node)
        if picked is None:
            continue
        kept[node] = len(tokens)
        contexts[len(tokens)] = (*contexts[parent], picked[0])
        tokens.append(picked[0])
        parents.append(parent)
        laws.append(picked[1])
    size, poison = len(tokens), torch.full((world.vocabulary,), torch.nan, dtype=torch.float64)
    candidate = torch.tensor([[*(node not in shape.idle for node in kept), True]])
    tree = TokenTree(torch.tensor([[*tokens, 0]]), torch.tensor([[*parents, size - 1]]), (size,), candidate)
    # Logits may carry any constant.
    logits = [world.p(contexts[node]).log() + 0.5 * node for node in range(ROOT, size)]
    law = torch.stack([*laws, poison])[None] if scheme.tells else None
    return Draft(Proposal(tree, law), torch.stack([*logits, poison])[None])


def committed_law(
    rule: Rule, world: World, shape: Shape, scheme: Scheme, spoil: Callable[[Proposal], Proposal] | None = None
) -> Law:
    """Returns the law of the tokens that one round commits.

    Args:
        rule: what judges.
        world: target and drafter.
        shape: what is drafted.
        scheme: how it is drafted.
        spoil: turns each proposal into what a mistaken drafter would hand in.
    """
    law: Law = {}
    for drafted, (proposal, logits) in runs(lambda source: draft(source, world, shape, scheme)):
        handed_in = spoil(proposal) if spoil else proposal
        for judged, verdict in runs(lambda source: rule.verify(handed_in, logits, [source], [0])):  # noqa: B023
            _check_path(proposal.tree, verdict.paths[0], verdict.tokens[0])
            text = tuple(verdict.tokens[0])
            law[text] = law.get(text, 0.0) + drafted * judged
    return law


def total_variation(
    rule: Rule, world: World, shape: Shape, scheme: Scheme, spoil: Callable[[Proposal], Proposal] | None = None
) -> float:
    """Returns how far the committed text, continued by the target, is from the target's, in total variation."""
    horizon = len(shape.parents) + 1
    law = world.extend(committed_law(rule, world, shape, scheme, spoil), horizon)
    target = world.extend({(): 1.0}, horizon)
    return sum(abs(law.get(text, 0.0) - target.get(text, 0.0)) for text in law.keys() | target.keys()) / 2


def decode(rule: Rule, world: World, shape: Shape, scheme: Scheme, seed: int, length: int) -> Text:
    """Returns the first `length` tokens of a text decoded round by round, with ordinary random sources."""
    text: Text = ()
    source, drafting = SeededSource(seed, 0), SeededSource(seed, 1)
    while len(text) < length:
        proposal, logits = draft(drafting, world, shape, scheme, text)
        text += tuple(rule.verify(proposal, logits, [source], [len(text)]).tokens[0])
    return text[:length]


def expected_tau(rule: Rule, world: World, shape: Shape, scheme: Scheme) -> float:
    """Returns the mean number of tokens that a round commits, the last one included."""
    return sum(len(text) * probability for text, probability in committed_law(rule, world, shape, scheme).items())


def worlds(shape: Shape) -> list[World]:
    """Returns the toy models on which a shape is enumerated, fewer where the tree has more branches."""
    nodes = len(shape.parents)
    few = [World(3, seed=1)] if nodes < 5 else []
    fewer = [World(4, seed=2), World(3, seed=3, agreement=1.0)] if nodes < 4 else []
    return [World(3, seed=0), *few, *fewer]


def worst_total_variation() -> dict[tuple[str, str], float]:
    """Returns for every (rule, law) the greatest total variation over all shapes and their worlds."""
    return {
        (rule, scheme): max(
            total_variation(LOSSLESS[rule], world, shape, SCHEMES[scheme])
            for shape in SHAPES.values()
            for world in worlds(shape)
        )
        for rule in LOSSLESS
        for scheme in SCHEMES
    }


def _check_path(tree: TokenTree, path: list[int], tokens: list[int]) -> None:
    """Raises unless the path goes down the tree and the tokens are those of the path and one more."""
    above = ROOT
    for node, token in zip(path, tokens, strict=False):
        inside = node < tree.sizes[0] and (tree.candidate is None or bool(tree.candidate[0, node]))
        if not inside or int(tree.parents[0, node]) != above or int(tree.tokens[0, node]) != token:
            raise AssertionError(f"path {path} with tokens {tokens} is not in the tree")
        above = node
    if len(tokens) != len(path) + 1:
        raise AssertionError(f"{len(tokens)} tokens for a path of {len(path)}")
