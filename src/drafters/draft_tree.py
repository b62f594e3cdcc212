"""Growing a draft tree level by level: a chain, fixed branching, or a dynamic tree with a budget of nodes.

What is grown asks a network for logits after the newest level and hands the logits to `candidates`. The module knows
neither the network (a draft model, a view of the target, EAGLE's head) nor the rule that will judge the tree.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor

from ..core.checks import real_number, whole_number
from ..core.drafting import Candidates, candidates, law_of_nodes
from ..core.errors import InvalidRequest
from ..core.proposal import Proposal
from ..core.state import DecodeState
from ..core.tree import ROOT, TokenTree

Tree = Literal["chain", "dynamic"] | Sequence[int]
DEFAULT_GAMMA, DEFAULT_NODES, DEFAULT_WIDTH = 5, 12, 4


class Read(Protocol):
    """A network that reads nodes behind the text it has read already, and keeps them until the next proposal."""

    def __call__(self, tree: TokenTree, opened: int) -> Tensor:
        """Reads the nodes of `tree` from column `opened` on; those before it were read in earlier calls.

        Returns:
            [batch, nodes - opened, vocabulary or draft vocabulary], the raw draft logits after each.
        """


@dataclass(frozen=True)
class TreeShape:
    """What a tree may become.

    Attributes:
        branching: children of each context, level by level; its length is the depth.
        nodes: most nodes of a row; the best ones stay. None keeps all.
        width: most contexts of a row that are continued at each level, the best ones; None continues all.
        paths: the only nodes, each by the ranks of its path (0 is the eldest sibling); None for all.
        cutoff: no node whose cumulative probability is below this; 0 leaves none out.

    Raises:
        InvalidRequest: a number that is not whole or below 1, a cutoff outside [0, 1), or no level.
    """

    branching: tuple[int, ...]
    nodes: int | None = None
    width: int | None = None
    paths: frozenset[tuple[int, ...]] | None = None
    cutoff: float = 0.0

    def __post_init__(self) -> None:
        if not self.branching:
            raise InvalidRequest("a tree needs at least one level, got no branching factors")
        named = [("branching", factor) for factor in self.branching]
        for name, value in (*named, ("nodes", self.nodes), ("width", self.width)):
            if value is not None:
                whole_number(name, value)
        real_number("cutoff", self.cutoff, 0.0, 1.0, ends="[)")

    @property
    def least(self) -> float:
        """The lowest score of a node: the log of `cutoff`."""
        return math.log(self.cutoff) if self.cutoff else -math.inf

    @property
    def depth(self) -> int:
        """Number of levels."""
        return len(self.branching)

    @classmethod
    def chain(cls, gamma: int) -> TreeShape:
        """Returns a chain of `gamma` nodes."""
        return cls((1,) * gamma)

    @classmethod
    def dynamic(cls, depth: int, nodes: int, width: int) -> TreeShape:
        """Returns EAGLE-2's tree (arXiv:2406.16858): the best nodes of `width` children of `width` contexts a level."""
        return cls((width,) * depth, nodes, width)

    @classmethod
    def of_paths(cls, paths: Iterable[Sequence[int]]) -> TreeShape:
        """Returns the tree of these nodes, each a path of ranks; the paths that lead to a node must be among them."""
        nodes = frozenset(map(tuple, paths))
        levels = range(1, 1 + max(map(len, nodes)))
        return cls(tuple(1 + max(path[-1] for path in nodes if len(path) == level) for level in levels), paths=nodes)


def parse_shape(tree: Tree, gamma: int | None, nodes: int | None, width: int | None) -> TreeShape:
    """Returns the shape that a drafter's options ask for.

    Args:
        tree: `"chain"`; children of each context level by level, such as `(3, 2, 1)`; or `"dynamic"`.
        gamma: depth, 5 when None; with a branching `tree` it can only repeat the number of levels.
        nodes: most nodes of a dynamic tree, 12 when None.
        width: contexts that a dynamic tree continues at each level, and children it tries in each; 4 when None.

    Raises:
        InvalidRequest: a value that cannot work, or that another one makes pointless.
    """
    gamma, nodes, width = (
        value if value is None else whole_number(name, value)
        for name, value in (("gamma", gamma), ("nodes", nodes), ("width", width))
    )
    if tree != "dynamic" and (nodes is not None or width is not None):
        raise InvalidRequest(f"nodes and width shape a tree='dynamic'; tree={tree!r} does not use them")
    depth = DEFAULT_GAMMA if gamma is None else gamma
    if tree == "chain":
        return TreeShape.chain(depth)
    if tree == "dynamic":
        return TreeShape.dynamic(depth, nodes or DEFAULT_NODES, width or DEFAULT_WIDTH)
    if isinstance(tree, str) or not isinstance(tree, Sequence):
        raise InvalidRequest(f"tree must be 'chain', 'dynamic' or children level by level as (3, 2, 1), got {tree!r}")
    if gamma is not None and gamma != len(tree):
        raise InvalidRequest(f"gamma {gamma} and the {len(tree)} levels of tree={tuple(tree)} contradict each other")
    return TreeShape(tuple(whole_number("each level of tree", factor) for factor in tree))


@dataclass(frozen=True, eq=False)
class Grown:
    """A tree and where the network has it.

    Attributes:
        proposal: what goes to the target.
        columns: for each row and node of the proposal its open column in the network's cache, -1 if it was not read.
    """

    proposal: Proposal
    columns: list[list[int]]
    _read: list[dict[tuple[int, int], int]]

    def spelled(self, row: int, tokens: Sequence[int]) -> list[int]:
        """Returns the open columns that spell `tokens` from the root on, as far as the network has read them."""
        path: list[int] = []
        column = ROOT
        for token in tokens:
            column = self._read[row].get((column, token), ROOT)
            if column == ROOT:
                break
            path.append(column)
        return path


def grow(
    state: DecodeState,
    shape: TreeShape,
    depths: Sequence[int],
    logits: Tensor,
    read: Read,
    *,
    confidence: float | Sequence[float] = 0.0,
    draft_tokens: Tensor | None = None,
    leaves: Callable[[TokenTree, int], object] | None = None,
) -> Grown:
    """Grows one tree a row; the network reads once for each level but the last.

    A node's score is that of its parent plus the log of q's j-th greatest value for the j-th sibling: EAGLE-2's
    cumulative confidence, which for drawn siblings is fixed *before* the draw.

    Args:
        state: the call.
        shape: of the trees.
        depths: deepest node of each row, on top of the shape's depth; 0 drafts nothing.
        logits: [batch, vocabulary or draft vocabulary], the raw draft logits after each row's newest committed token.
        read: the network.
        confidence: of all rows or of each. Where the most likely continuation of a context has a probability below
            this, its children are proposed (they are paid for) but not continued.
        draft_tokens: [draft vocabulary] int64, the target's id of each column of logits; None when they are all.
        leaves: called as `read` for the nodes that no call of `read` has covered; it needs to return nothing.
    """
    # Adding a sibling drawn from its law leaves the law of the committed text as it is, wherever it is added. So any
    # policy that places a node before drawing it is lossless; dropping a node for the token it drew would not be.
    # Scores are known before the draw and fall along paths: the best ones are what best-first growth would draw.
    rows = [_RowTree() for _ in depths]
    opened = _Columns(len(depths))
    laws: list[Tensor] = []
    law_columns: Tensor | None = None
    floors = [confidence] * len(depths) if isinstance(confidence, (int, float)) else confidence
    logits, frontier = logits[:, None], [[ROOT]] * len(depths)
    for level, count in enumerate(shape.branching, start=1):
        frontier = [nodes if level <= depth else [] for nodes, depth in zip(frontier, depths, strict=True)]
        if level > 1 and any(frontier):
            logits = read(*opened.append(rows, frontier))
        contexts = [(row, place) for row, nodes in enumerate(frontier) for place in range(len(nodes))]
        if not contexts:
            break
        owners, places = map(list, zip(*contexts, strict=True))
        nodes = [frontier[row][place] for row, place in contexts]
        paths = [rows[row].path(node) for row, node in zip(owners, nodes, strict=True)]
        count = min(count, logits.shape[-1])  # no context has more continuations than there are tokens
        made = candidates(state, logits[owners, places], owners, count, paths, level, draft_tokens=draft_tokens)
        _add_level(rows, owners, nodes, made, floors, sum(law[..., 0].numel() for law in laws), shape)
        if made.law is not None:
            laws.append(made.law)
            law_columns = made.columns
        frontier = [tree.newest(shape) for tree in rows]
    kept = [sorted(tree.best(shape.nodes)) for tree in rows]
    if leaves is not None:
        unread = [[node for node in nodes if tree.columns[node] < 0] for tree, nodes in zip(rows, kept, strict=True)]
        if any(unread):
            leaves(*opened.append(rows, unread))
    columns = [[tree.columns[node] for node in nodes] for tree, nodes in zip(rows, kept, strict=True)]
    tree, index = _propose(rows, kept)
    if not laws or not tree.width:
        return Grown(Proposal(tree), columns, opened.known)
    law = law_of_nodes(laws, index, law_columns, state.target.vocabulary_size)
    return Grown(Proposal(tree, law), columns, opened.known)


@dataclass(eq=False)
class _RowTree:
    """The nodes of one row in the order they were made: parents before children, elder siblings first."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    columns: list[int] = field(default_factory=list)
    laws: list[int] = field(default_factory=list)
    ranks: list[tuple[int, ...]] = field(default_factory=list)
    sure: list[bool] = field(default_factory=list)  # whether the node may be continued
    level: int = 0  # the first node of the newest level

    def add(self, parent: int, token: int, score: float, law: int, ranks: tuple[int, ...], sure: bool) -> None:
        self.tokens.append(token)
        self.parents.append(parent)
        self.scores.append(score)
        self.columns.append(-1)
        self.laws.append(law)
        self.ranks.append(ranks)
        self.sure.append(sure)

    def score(self, node: int) -> float:
        return 0.0 if node == ROOT else self.scores[node]

    def path(self, node: int) -> list[int]:
        path = []
        while node != ROOT:
            path.append(self.tokens[node])
            node = self.parents[node]
        return path[::-1]

    def best(self, count: int | None) -> list[int]:
        """The best `count` nodes. Of equal ones the older come first, so that a child never outlives its parent."""
        order = range(len(self.tokens))
        return list(order) if count is None else sorted(order, key=lambda node: -self.scores[node])[:count]

    def newest(self, shape: TreeShape) -> list[int]:
        """The nodes of the newest level that are worth continuing: no later node can push them out by being better."""
        level = [node for node in self.best(shape.nodes) if node >= self.level and self.sure[node]]
        if shape.paths is not None:
            continued = {path[:-1] for path in shape.paths}
            level = [node for node in level if self.ranks[node] in continued]
        if shape.width is not None:
            level = sorted(level, key=lambda node: -self.scores[node])[: shape.width]
        self.level = len(self.tokens)
        return level


class _Columns:
    """What the network has read, in the order of its open columns. Every level is as wide as its widest row.

    Attributes:
        known: for each row, (column of the parent, token) -> column.
    """

    def __init__(self, batch: int) -> None:
        self._tokens: list[list[int]] = [[] for _ in range(batch)]
        self._parents: list[list[int]] = [[] for _ in range(batch)]
        self.known: list[dict[tuple[int, int], int]] = [{} for _ in range(batch)]

    def append(self, rows: Sequence[_RowTree], level: Sequence[Sequence[int]]) -> tuple[TokenTree, int]:
        """Gives the nodes of `level` columns; returns the tree of all columns and how many are there already."""
        opened = len(self._tokens[0])
        total = opened + max(map(len, level))
        for row, (tree, nodes) in enumerate(zip(rows, level, strict=True)):
            for column, node in enumerate(nodes, start=opened):
                parent = tree.parents[node]
                above = ROOT if parent == ROOT else tree.columns[parent]
                tree.columns[node] = self.known[row][above, tree.tokens[node]] = column
                self._tokens[row].append(tree.tokens[node])
                self._parents[row].append(above)
            padding = total - len(self._tokens[row])
            self._tokens[row] += [0] * padding
            self._parents[row] += [ROOT] * padding
        sizes = (total,) * len(rows)
        return TokenTree(torch.tensor(self._tokens), torch.tensor(self._parents), sizes), opened


def _add_level(
    rows: Sequence[_RowTree],
    owners: Sequence[int],
    parents: Sequence[int],
    made: Candidates,
    floors: Sequence[float],
    laws: int,
    shape: TreeShape,
) -> None:
    """Adds the siblings made in each context; not those that q gives no probability, or that the shape leaves out."""
    paths, least = shape.paths, shape.least
    for row, parent, tokens, gains in zip(owners, parents, made.tokens.tolist(), made.log_probs.tolist(), strict=True):
        tree, above = rows[row], rows[row].score(parent)
        elders = () if parent == ROOT else tree.ranks[parent]
        for rank, (token, gain) in enumerate(zip(tokens, gains, strict=True)):
            ranks = (*elders, rank)
            score = above + gain
            if gain > -math.inf and score >= least and (paths is None or ranks in paths):
                tree.add(parent, token, score, laws + rank, ranks, math.exp(gains[0]) >= floors[row])
        laws += len(tokens)


def _propose(rows: Sequence[_RowTree], kept: Sequence[Sequence[int]]) -> tuple[TokenTree, Tensor]:
    """Returns the tree of the nodes kept, in the order they were made, and [batch, nodes] which candidate each is."""
    tokens, parents = [], []
    for tree, nodes in zip(rows, kept, strict=True):
        place = {node: index for index, node in enumerate(nodes)} | {ROOT: ROOT}
        tokens.append([tree.tokens[node] for node in nodes])
        parents.append([place[tree.parents[node]] for node in nodes])
    proposed = TokenTree.from_lists(tokens, parents)
    padded = [[*(tree.laws[node] for node in nodes)] for tree, nodes in zip(rows, kept, strict=True)]
    padded = [own + [0] * (proposed.width - len(own)) for own in padded]
    return proposed, torch.tensor(padded, dtype=torch.int64)
