"""The smallest objective, and data for it: what the training loop is tried on."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from draftwood.training.data import Batch, Document, Sequences, pack
from draftwood.training.loop import Figures, Objective


def table_data() -> Sequences:
    """Sequences of length 4; the first token of a sequence is its number, and learnt tokens differ in number."""
    documents = [Document([i, 1, 2, 3], [True, i % 2 == 0, i % 3 == 0, True]) for i in range(8)]
    return pack(documents, 4)


class Table(Objective):
    """Logits of the next token from this one; `drawn` is whether noise is added."""

    def __init__(self, drawn: bool = True, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(8, 8, dtype=dtype))
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.drawn = drawn
        self.seen: list[Batch] = []
        self.noises: list[float] = []

    def forward(self, batch: Batch, step: int, generator: torch.Generator) -> tuple[Tensor, Figures]:
        self.seen.append(batch)
        tokens, wanted = batch.tokens, batch.learnt[:, 1:]
        self.noises.append(float(torch.rand((), generator=generator)))
        value = nn.functional.cross_entropy(self.table[tokens[:, :-1]][wanted], tokens[:, 1:][wanted])
        noise = self.noises[-1] * self.drawn
        return value + noise * self.table.square().sum(), {"noise": noise, "entropy": value.detach()}
