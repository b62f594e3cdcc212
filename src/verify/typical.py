"""Typical acceptance: takes whatever the target finds plausible. Faster, and not lossless.

It knows neither the law of the draft nor the noise of the other rules: whether a token is accepted is no matter of
chance. Only the token that ends a round is drawn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..core.checks import real_number
from ..core.proposal import Proposal, Verdict
from ..core.rule import DraftStyle, RandomSource
from .matching import longest_path
from .rejection import probabilities


class Typical:
    """Medusa's typical acceptance (Cai et al., arXiv:2401.10774). The text does not have the target's law.

    A token x is accepted where p(x) > min(epsilon, delta exp(-H(p))), H the entropy of p in nats: a bar that sinks
    where the target is undecided. At temperature 0 it is greedy, and lossless.

    Args:
        epsilon: the highest the bar gets, in [0, 1].
        delta: scale of the part of the bar that sinks with the entropy, 0 or more.

    Raises:
        InvalidRequest: a number that is none or out of its range.
    """

    lossless = False
    drafts: DraftStyle = "chosen"
    samples = True

    def __init__(self, *, epsilon: float = 0.09, delta: float = 0.3) -> None:
        self.epsilon = real_number("epsilon", epsilon, 0.0, 1.0)
        self.delta = real_number("delta", delta, 0.0, math.inf)

    def verify(
        self, proposal: Proposal, logits: Tensor, sources: Sequence[RandomSource], positions: Sequence[int]
    ) -> Verdict:
        """Accepts the longest path above the bar, the likeliest of equally long ones; then draws from p."""
        tree = proposal.tree
        p = torch.softmax(logits, -1, dtype=torch.promote_types(logits.dtype, torch.float32))
        entropy = -(p + 1e-5).log_().mul_(p).sum(-1)
        bar = (self.delta * torch.exp(-entropy)).clamp(max=self.epsilon)  # [batch, 1 + nodes]
        rows = torch.arange(tree.batch, device=logits.device)[:, None]
        p_node = p[rows, tree.parents + 1, tree.tokens]  # [batch, nodes]
        passed = p_node > bar.gather(1, tree.parents + 1)
        on_path = longest_path(tree, passed, _path_log_likelihood(tree.ancestors, passed, p_node))
        paths, tokens = [], []
        for index, row in enumerate(torch.cat([on_path, tree.tokens], 1).tolist()):
            path = [node for node in range(tree.width) if row[node]]
            end = path[-1] if path else -1
            bonus = sources[index].draw(probabilities(logits[index, 1 + end]))
            paths.append(path)
            tokens.append([*(row[tree.width + node] for node in path), bonus])
        return Verdict(paths, tokens)


def _path_log_likelihood(ancestors: Tensor, passed: Tensor, p_node: Tensor) -> Tensor:
    """Returns log p of the path that ends in each node, [batch, nodes]; right wherever the whole path passed."""
    log_p = torch.where(passed, p_node, 1.0).log()
    return (ancestors.to(log_p.dtype) @ log_p[:, :, None])[:, :, 0]
