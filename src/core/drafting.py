"""How a drafter turns its logits into candidates: in the style that the rule of the call accepts most of.

Every drafter that has a distribution q uses `candidates`; none of them knows the rule.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .sampling import process
from .state import DecodeState, Row


class Candidates(NamedTuple):
    """Sibling tokens for each of `contexts` draft contexts, eldest first.

    Attributes:
        tokens: [contexts, count] int64.
        log_probs: [contexts, count] float32, in falling order: how likely the siblings are, for whoever decides
            where a tree grows on. Drawn siblings get the log of the greatest values of q, not of their own, since
            a decision that knows what was drawn would bias its law. Where the coupled rule has fixed the noise,
            the likelihood is softmax(log q + noise).
        law: [contexts, count, columns] float32, or None when the tokens were chosen.
        columns: [columns] int64, the target's id of each column of the law; None when they are all its tokens. The
            same in all levels of a round.
    """

    tokens: Tensor
    log_probs: Tensor
    law: Tensor | None
    columns: Tensor | None = None


def candidates(
    state: DecodeState,
    logits: Tensor,
    rows: Sequence[int],
    count: int,
    paths: Sequence[Sequence[int]] | None = None,
    depth: int = 1,
    *,
    draft_tokens: Tensor | None = None,
) -> Candidates:
    """Picks `count` distinct sibling tokens in each context.

    With a rule that likes drawn candidates they are drawn without replacement by Gumbel top-k (Kool et al.,
    arXiv:1903.06059), and row j of the law is q without the j elder siblings, renormalised. With the coupled
    rule the noise is the rule's own, so that the first candidate is the target's own pick wherever q is near p
    (Daliri et al., arXiv:2408.07978). Otherwise they are the most likely ones.

    Args:
        state: the call.
        logits: [contexts, vocabulary] or [contexts, draft vocabulary], raw draft logits.
        rows: for each context the index of its row.
        count: siblings a context.
        paths: for each context the drafted tokens that lead to it, for processors with a history; None when
            they are all empty.
        depth: depth of the siblings in the tree, the same for all contexts; 1 for children of the root.
        draft_tokens: [draft vocabulary] int64, the target's id of each column of `logits`; None when they are all.
    """
    vocabulary = state.target.vocabulary_size
    scattered: Tensor | None = None  # the draft vocabulary of logits that were spread
    if draft_tokens is not None and not all(row.pipeline.blind for row in state.rows):
        # These processors go by the target's ids.
        logits, scattered, draft_tokens = spread(logits, draft_tokens, vocabulary), draft_tokens, None
    rowset = [state.rows[row] for row in rows]
    logits = process(rowset, logits[:, None], None if paths is None else [[list(path)] for path in paths])
    log_q = torch.log_softmax(logits[:, 0].float(), -1)  # [contexts, columns]
    ids = None if draft_tokens is None else draft_tokens.to(log_q.device)
    if state.style == "chosen":
        top = log_q.topk(count, -1)
        return Candidates(top.indices if ids is None else ids[top.indices], top.values, None, ids)
    if state.style == "coupled":
        noise = torch.stack([row.source.gumbel(len(row.tokens) + depth - 1, vocabulary) for row in rowset])
        noise = noise.to(log_q.device) if ids is None else noise.to(log_q.device)[:, ids]
    else:
        noise = torch.stack([_row_noise(row, log_q.shape[-1], scattered) for row in rowset]).to(log_q.device)
    greedy = torch.tensor([row.pipeline.greedy for row in rowset], device=log_q.device)[:, None]
    noisy = log_q + noise.masked_fill(greedy, 0.0)  # a row at temperature 0 chooses
    top = noisy.topk(count, -1)
    tokens = top.indices if ids is None else ids[top.indices]
    if state.style == "coupled":
        return Candidates(tokens, top.values - noisy.logsumexp(-1, keepdim=True), None, ids)
    law = _sibling_law(log_q.exp(), top.indices, greedy[:, :, None])
    return Candidates(tokens, log_q.topk(count, -1).values, law, ids)


def law_of_nodes(laws: Sequence[Tensor], index: Tensor, columns: Tensor | None, vocabulary: int) -> Tensor:
    """Returns the law of every node of a proposal, [batch, nodes, vocabulary].

    Args:
        laws: of the candidates made, level by level, [contexts, count, columns] each.
        index: [batch, nodes] int64, for each node which candidate of all it is.
        columns: of the candidates.
        vocabulary: how many tokens the target has.
    """
    law = torch.cat([part.flatten(0, 1) for part in laws])
    law = law[index.to(law.device)]
    return law if columns is None else spread(law, columns, vocabulary, 0.0)


def spread(logits: Tensor, draft_tokens: Tensor, vocabulary: int, rest: float = -math.inf) -> Tensor:
    """Returns logits [..., draft vocabulary] as [..., vocabulary]; tokens that cannot be drafted get -inf.

    A softmax renormalises q over the tokens that can be drafted, which keeps verification lossless: q may be any law.

    Args:
        logits: [..., draft vocabulary].
        draft_tokens: [draft vocabulary] int64, the target's id of each.
        vocabulary: how many tokens the target has.
        rest: what tokens get that cannot be drafted.
    """
    everywhere = logits.new_full((*logits.shape[:-1], vocabulary), rest)
    return everywhere.index_copy_(-1, draft_tokens.to(logits.device), logits)


def _sibling_law(q: Tensor, tokens: Tensor, chosen: Tensor) -> Tensor:
    """Returns the law of each of the siblings given its elders, [contexts, count, vocabulary].

    Where q has fewer tokens than siblings the surplus ones were not drawn from it: they become point masses, as do
    those of contexts that were `chosen`, [contexts, 1, 1] bool.
    """
    contexts, count = tokens.shape
    law = q[:, None].repeat(1, count, 1)
    for younger in range(1, count):
        law[:, younger:].scatter_(-1, tokens[:, None, younger - 1 : younger].expand(contexts, count - younger, 1), 0.0)
    law /= law.sum(-1, keepdim=True).clamp(min=torch.finfo(law.dtype).tiny)
    surplus = law.gather(-1, tokens[:, :, None]) <= 0.0
    one_hot = torch.zeros_like(law).scatter_(-1, tokens[:, :, None], 1.0)
    return torch.where(surplus | chosen, one_hot, law)


def _row_noise(row: Row, columns: int, scattered: Tensor | None) -> Tensor:
    """Returns the noise of a row, [columns]: what it would draw alone, also where a neighbour had its logits spread."""
    if scattered is None or not row.pipeline.blind:
        return _gumbel(row.generator, columns)
    return spread(_gumbel(row.generator, len(scattered)), scattered, columns, 0.0)


def _gumbel(generator: torch.Generator, vocabulary: int) -> Tensor:
    uniform = torch.rand(vocabulary, generator=generator).clamp_(min=torch.finfo(torch.float32).tiny)
    return uniform.log_().neg_().log_().neg_()
