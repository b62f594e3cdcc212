"""Medusa (Cai et al., arXiv:2401.10774): heads on the target's last hidden state draft a tree in one step.

Head i guesses the token i + 2 positions behind the state that it reads, whatever stands between: every node of a level
has the same guesses behind it. The state is that of the last token that the target has read, so that head 0
guesses what follows the newest committed token. Nothing of the target runs while drafting but its LM head, if shared.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ...core.checks import whole_number
from ...core.drafter import Drafter, DraftSession, Observation
from ...core.drafting import Candidates, candidates, law_of_nodes
from ...core.errors import InvalidRequest
from ...core.proposal import Proposal
from ...core.state import DecodeState
from ...core.target import Target
from ...core.tree import ROOT, TokenTree
from ...core.views import head_of
from .formats import load_heads
from .network import MedusaHeads
from .trees import Accuracies, StaticTree, greedy_tree, published_tree

DEFAULT_NODES = 12
DEFAULT_TREE = "mc_sim_7b_63"


class Medusa(Drafter):
    """Drafts with trained heads.

    Args:
        checkpoint: the heads: a directory, a hub id, or heads that are in memory.
        tree: which guesses are tried behind which: the name of a published tree such as `"vicuna_7b_stage2"`; or
            paths of ranks in order of preference, such as `[(0,), (1,), (0, 0)]`. None chooses the best tree for the
            accuracies that are stored beside the heads, or takes the best nodes of `mc_sim_7b_63` if there are none.
        nodes: most nodes of the tree: 12 when None, or all of a tree that was named or listed.
        draw: where the rule likes drawn candidates, draw siblings from the heads' distributions; False has the heads'
            best guesses everywhere, which are the same behind every node.

    Raises:
        InvalidRequest: an option that cannot work.
    """

    features = frozenset({"last"})

    def __init__(
        self,
        *,
        checkpoint: str | Path | MedusaHeads,
        tree: str | Sequence[Sequence[int]] | None = None,
        nodes: int | None = None,
        draw: bool = True,
    ) -> None:
        if not isinstance(checkpoint, (str, Path, MedusaHeads)):
            raise InvalidRequest(f"checkpoint must be a directory, a hub id or heads, got {type(checkpoint).__name__}")
        if not isinstance(draw, bool):
            raise InvalidRequest(f"draw must be True or False, got {draw!r}")
        self.draw = draw
        self._checkpoint = checkpoint
        self._nodes = None if nodes is None else whole_number("nodes", nodes)
        self._asked = tree if tree is None else _asked_tree(tree, self._nodes)

    def bind(self, target: Target) -> None:
        """Loads the heads, in the target's type and to its device, and settles the tree.

        Raises:
            ModelNotFound: there are no heads.
            InvalidCheckpoint: they are broken, or made for another hidden size or vocabulary.
            InvalidRequest: the tree has more levels than there are heads, or looks at more guesses than tokens.
            UnsupportedModel: the heads share the target's LM head, and it cannot be run by itself.
        """
        heads, accuracies = self._load(target)
        self.heads = heads.to(target.device, target.dtype)
        self.head = head_of(target, heads.draft_tokens) if heads.config.shared else None
        self.tree = self._settle(heads, accuracies)
        if self.tree.depth > heads.config.heads:
            raise InvalidRequest(f"the tree has {self.tree.depth} levels; there are {heads.config.heads} heads")
        if max(self.tree.widths) > heads.draft_vocabulary:
            raise InvalidRequest(
                f"the tree looks at {max(self.tree.widths)} guesses of a head; it knows {heads.draft_vocabulary} tokens"
            )

    def session(self, state: DecodeState) -> DraftSession:
        """Returns the session that keeps the hidden states."""
        return _Session(self.heads, self.head, self.tree, self.draw)

    def _load(self, target: Target) -> tuple[MedusaHeads, Accuracies | None]:
        width, vocabulary = target.config.hidden_size, target.vocabulary_size
        if not isinstance(self._checkpoint, MedusaHeads):
            return load_heads(self._checkpoint, width=width, vocabulary=vocabulary)
        config = self._checkpoint.config
        if (config.width, config.vocabulary) != (width, vocabulary):
            raise InvalidRequest(
                f"the heads are for hidden size {config.width} and vocabulary {config.vocabulary}; the target has "
                f"{width} and {vocabulary}"
            )
        return copy.deepcopy(self._checkpoint), None  # which `to` would change

    def _settle(self, heads: MedusaHeads, accuracies: Accuracies | None) -> StaticTree:
        nodes = self._nodes or DEFAULT_NODES
        if self._asked is not None:
            return self._asked
        if accuracies is not None:
            return greedy_tree(accuracies, nodes, heads.config.heads)
        return published_tree(DEFAULT_TREE, nodes, heads.config.heads)


def _asked_tree(tree: str | Sequence[Sequence[int]], nodes: int | None) -> StaticTree:
    if isinstance(tree, str):
        return published_tree(tree, nodes)
    paths = isinstance(tree, Sequence) and all(
        isinstance(path, Sequence) and not isinstance(path, str) for path in tree
    )
    if not paths:
        raise InvalidRequest(f"tree must be the name of a published tree or paths such as [(0,), (0, 0)], got {tree!r}")
    return StaticTree.from_paths(tree, nodes)


class _Session(DraftSession):
    """Keeps, for each row, the hidden state of the last token that the target has read."""

    def __init__(
        self, heads: MedusaHeads, head: Callable[[Tensor], Tensor] | None, tree: StaticTree, draw: bool
    ) -> None:
        self._heads, self._head, self._draw = heads, head, draw
        self._cuts = [tree.cut(depth) for depth in range(tree.depth + 1)]
        self._hidden: list[Tensor] = []

    def admit(self, state: DecodeState, rows: Sequence[int]) -> None:
        """Makes room; the states come with the forward that reads the prompts."""
        self._hidden += [torch.empty(0)] * len(rows)

    def observe(self, state: DecodeState, seen: Observation) -> None:
        """Notes the state of the last token that entered the cache: the one before the newest committed token."""
        for row, kept in zip(seen.rows, seen.kept("last"), strict=True):
            self._hidden[row] = kept[-1].clone()  # not a view that would keep a whole prompt's states alive

    def retain(self, rows: Sequence[int]) -> None:
        """Drops the rows that left."""
        self._hidden = [self._hidden[row] for row in rows]

    def propose(self, state: DecodeState) -> Proposal:
        """Drafts a tree for every row that has room."""
        shapes = [self._cuts[min(state.room(row), len(self._cuts) - 1)] for row in range(len(state.rows))]
        deepest = max(shape.depth for shape in shapes)
        if not deepest:
            return Proposal.empty(len(shapes))
        state = state if self._draw else replace(state, style="chosen")
        logits = self._heads.logits(torch.stack(self._hidden), self._head, deepest)  # [levels, rows, draft vocabulary]
        if state.style == "chosen" and all(row.pipeline.idle for row in state.rows):
            return _Drafts(shapes, shared=True).of_best(logits, self._heads.draft_tokens)
        history = any(row.pipeline.needs_history for row in state.rows)
        drafts = _Drafts(shapes, shared=state.style != "drawn" and not history)
        for level, raw in enumerate(logits, start=1):
            drafts.add_level(state, level, raw, history, self._heads.draft_tokens)
        return drafts.proposal()


class _Drafts:
    """The guesses of a round, level by level, and where each node of each row's tree finds its own.

    Guesses that are the same whatever stands before them (`shared`) are made once a row and level. Drawn siblings have
    a draw of their own in every context: a rule that goes from the leaves to the root meets several contexts of a
    level, and a token that one of them has rejected would no longer be drawn from q in the next.
    """

    def __init__(self, shapes: Sequence[StaticTree], *, shared: bool) -> None:
        self._shapes, self._shared = shapes, shared
        self._starts: list[dict[tuple[int, int], int]] = [{} for _ in shapes]  # (level, context) -> its first guess
        self._made = 0
        self._waiting: list[tuple[Tensor, Tensor]] = []  # not on the host yet
        self._tokens: list[int] = []
        self._possible: list[int] = []
        self._laws: list[Tensor] = []
        self._columns: Tensor | None = None  # of the laws
        self._vocabulary = 0

    def of_best(self, logits: Tensor, draft_tokens: Tensor | None) -> Proposal:
        """Returns the trees of the most likely tokens of raw logits [levels, rows, draft vocabulary]."""
        count = max(max(shape.widths, default=0) for shape in self._shapes)
        values, tokens = logits.topk(count, -1)
        if draft_tokens is not None:
            tokens = draft_tokens[tokens]
        for level in range(len(logits)):
            for row, starts in enumerate(self._starts):
                starts[level + 1, ROOT] = (level * len(self._starts) + row) * count
        self._waiting.append((tokens, values))
        return self.proposal()

    def add_level(
        self, state: DecodeState, level: int, logits: Tensor, history: bool, draft_tokens: Tensor | None
    ) -> None:
        """Makes the guesses of a level.

        Args:
            state: the call.
            level: 1 for those of head 0.
            logits: [rows, draft vocabulary], raw.
            history: whether a processor asks which tokens stand before a guess.
            draft_tokens: [draft vocabulary] int64, the target's id of each column; None when they are all.
        """
        growing = [(row, shape) for row, shape in enumerate(self._shapes) if shape.depth >= level]
        contexts = [
            (row, above) for row, shape in growing for above in ((ROOT,) if self._shared else shape.contexts[level - 1])
        ]
        count = max(shape.widths[level - 1] for _, shape in growing)
        owners = [row for row, _ in contexts]
        paths = [self._path(row, above) for row, above in contexts] if history else None
        made: Candidates = candidates(state, logits[owners], owners, count, paths, level, draft_tokens=draft_tokens)
        for row, above in contexts:
            self._starts[row][level, above] = self._made
            self._made += count
        self._waiting.append((made.tokens, made.log_probs))
        if made.law is not None:
            self._laws.append(made.law)
            self._columns, self._vocabulary = made.columns, state.target.vocabulary_size

    def proposal(self) -> Proposal:
        """Returns the trees, without the guesses that have no probability and all behind them."""
        self._fetch()
        tokens: list[list[int]] = []
        parents: list[list[int]] = []
        guesses: list[list[int]] = []
        for row, shape in enumerate(self._shapes):
            own: list[int] = []
            above: list[int] = []
            place = {ROOT: ROOT}
            for node, parent in enumerate(shape.parents):
                guess = self._guess(row, node)
                if parent in place and self._possible[guess]:
                    place[node] = len(own)
                    own.append(guess)
                    above.append(place[parent])
            tokens.append([self._tokens[guess] for guess in own])
            parents.append(above)
            guesses.append(own)
        tree = TokenTree.from_lists(tokens, parents)
        if not self._laws or not tree.width:
            return Proposal(tree)
        index = torch.tensor([[*own, *([0] * (tree.width - len(own)))] for own in guesses])
        return Proposal(tree, law_of_nodes(self._laws, index, self._columns, self._vocabulary))

    def _guess(self, row: int, node: int) -> int:
        shape = self._shapes[row]
        level = len(shape.paths[node])
        return self._starts[row][level, ROOT if self._shared else shape.parents[node]] + shape.ranks[node]

    def _path(self, row: int, node: int) -> list[int]:
        """The tokens from the root to a node."""
        self._fetch()
        path: list[int] = []
        while node != ROOT:
            path.append(self._tokens[self._guess(row, node)])
            node = self._shapes[row].parents[node]
        return path[::-1]

    def _fetch(self) -> None:
        """Copies what was made to the host, at once."""
        if self._waiting:
            tokens = torch.cat([made.flatten() for made, _ in self._waiting])
            possible = torch.cat([(values > -torch.inf).flatten() for _, values in self._waiting])
            both: list[list[int]] = torch.stack([tokens, possible.long()]).tolist()
            self._tokens += both[0]
            self._possible += both[1]
            self._waiting.clear()
