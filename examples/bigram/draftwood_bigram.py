"""A whole drafter plugin: one class, one hook. After `pip install .` the name "bigram" works everywhere."""

from collections import Counter, defaultdict
from itertools import pairwise

import draftwood


class Bigram(draftwood.Drafter):
    """Drafts by the most frequent follower of each token in the row so far.

    Args:
        gamma: tokens drafted a round.
    """

    def __init__(self, *, gamma: int = 4) -> None:
        if gamma < 1:
            raise draftwood.InvalidRequest(f"gamma must be >= 1, got {gamma}")
        self.gamma = gamma

    def propose(self, state):
        chains = []
        for index, row in enumerate(state.rows):
            followers = defaultdict(Counter)
            for token, follower in pairwise(row.tokens):
                followers[token][follower] += 1
            chain, token = [], row.tokens[-1]
            while len(chain) < min(self.gamma, state.room(index)) and token in followers:
                token = followers[token].most_common(1)[0][0]
                chain.append(token)
            chains.append([chain])
        return draftwood.Proposal(draftwood.TokenTree.from_paths(chains))


@draftwood.hookimpl
def register_drafters(registry):
    registry.add("bigram", Bigram)
