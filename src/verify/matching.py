"""Rules that pick the target's token at every node first, then follow the draft as far as it matches.

No law of the drafter is read: the committed text is the same whatever was drafted, and the draft decides only
how many tokens a round commits. This module does not know whether the picks are the likeliest tokens or samples
anywhere but in the two classes; walking the tree is the same for both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.proposal import Proposal, Verdict
from ..core.rule import DraftStyle, RandomSource
from ..core.tree import TokenTree


class Greedy:
    """Commits the target's most likely tokens (blockwise parallel decoding, Stern et al., arXiv:1811.03115)."""

    lossless = True
    drafts: DraftStyle = "chosen"
    samples = False

    def verify(
        self, proposal: Proposal, logits: Tensor, sources: Sequence[RandomSource], positions: Sequence[int]
    ) -> Verdict:
        """Accepts the longest path of argmax tokens. One device-to-host copy a round."""
        # As argmax, the first of equals, but faster in bfloat16 on a CPU.
        return _follow(proposal.tree, logits.max(-1).indices)


class Coupled:
    """Samples by Gumbel-max, with noise fixed by seed, row and position (Daliri et al., arXiv:2408.07978).

    The token at absolute position t is argmax(log p + g_t) at whichever node it is judged. It has law p, and the
    text is a function of seed and target alone: the same with every drafter and with none.
    """

    lossless = True
    drafts: DraftStyle = "coupled"
    samples = True

    def verify(
        self, proposal: Proposal, logits: Tensor, sources: Sequence[RandomSource], positions: Sequence[int]
    ) -> Verdict:
        """Accepts the longest path of picked tokens. One device-to-host copy a round."""
        tree, vocabulary = proposal.tree, logits.shape[-1]
        depths = torch.cat([tree.depths.new_zeros(tree.batch, 1), tree.depths], 1)  # [batch, 1 + nodes]
        noise = torch.stack(
            [
                torch.stack([source.gumbel(position + depth, vocabulary) for depth in range(tree.height + 1)])
                for source, position in zip(sources, positions, strict=True)
            ]
        ).to(logits.device)  # [batch, 1 + height, vocabulary]
        rows = torch.arange(tree.batch, device=logits.device)[:, None]
        # A constant added to log p moves no argmax, so that the logits need no softmax.
        return _follow(tree, (logits + noise[rows, depths]).argmax(-1))


def longest_path(tree: TokenTree, passed: Tensor, preference: Tensor | None = None) -> Tensor:
    """Finds in each row the longest path from the root on which every node has passed.

    Args:
        tree: the candidates.
        passed: [batch, nodes] bool: whether a node may follow its parent. Padding and nodes that are no
            candidates never pass, whatever it says.
        preference: [batch, nodes] float; of equally long paths the one with the greatest value at its end wins,
            and the one whose end comes first when None.

    Returns:
        [batch, nodes] bool: the nodes of the path; none when no child of the root has passed.
    """
    if not tree.width:
        return passed
    passed = passed & tree.valid
    if tree.candidate is not None:
        passed = passed & tree.candidate
    reached = ~(tree.ancestors & ~passed[:, None, :]).any(-1)
    length = torch.where(reached, tree.depths, 0)
    longest = length == length.max(-1, keepdim=True).values
    order = longest.int() if preference is None else torch.where(longest, preference, -torch.inf)
    ends = order.argmax(-1)
    return tree.ancestors[torch.arange(tree.batch, device=ends.device), ends] & reached


def _follow(tree: TokenTree, picks: Tensor) -> Verdict:
    """Follows the picked tokens down the tree as far as they were drafted.

    Args:
        tree: the candidates.
        picks: [batch, 1 + nodes] int64: the target's token after the last committed token and after each node.
    """
    awaited = picks.gather(1, tree.parents + 1)  # [batch, nodes]: what a node must be for the walk to enter it
    on_path = longest_path(tree, tree.tokens == awaited)
    paths, tokens = [], []
    for row in torch.cat([on_path, picks], 1).tolist():
        path = [node for node in range(tree.width) if row[node]]
        paths.append(path)
        tokens.append([row[tree.width + 1 + node] for node in [-1, *path]])
    return Verdict(paths, tokens)
