"""Training a target to be exited early: the recipe of LayerSkip (arXiv:2404.16710).

Blocks are dropped at random, the later the more often, so that the model leans less on them; and the one final norm and
LM head learn to read what earlier blocks put out. What comes out are ordinary weights of the same model, which the
drafter `early-exit` drafts best with. Its own texts change too: this is fine-tuning, on the data that is given.

Any model whose list of blocks `core.anatomy` finds can be trained: dropping and exits are hooks, set on a copy for the
time of one forward. Dropped blocks are computed and then ignored, so that dropping saves no time here.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftwood.core.anatomy import find_blocks, find_decoder
from draftwood.core.errors import InvalidRequest, UnsupportedModel

from .data import Batch, Sequences, apart, check_vocabulary
from .fingerprint import fingerprint
from .loop import Figures, Objective, Schedule, train
from .loop import held_out as measure
from .output import new_output, publish

Curriculum = Literal["rotational", "gradual"]


@dataclass(frozen=True)
class Recipe:
    """What LayerSkip adds to training (arXiv:2404.16710, sections 4.1 and 4.2).

    The defaults are about those with which the paper goes on training Llama 2 7B.

    Attributes:
        exit_layers: after how many blocks the model may be exited, 2 to L - 1 each; all of them when None.
        p_max: how often the last block is dropped.
        e_scale: how much early exits count beside the last layer.
        curriculum: `"rotational"` learns every `rotation`-th exit in a step, in turn; `"gradual"` begins with the last
            exit and adds the one before it every steps / (2 x exits) steps.
        rotation: R; with fewer exits than that, one exit a step.
    """

    exit_layers: tuple[int, ...] | None = None
    p_max: float = 0.1
    e_scale: float = 0.2
    curriculum: Curriculum = "rotational"
    rotation: int = 8

    def __post_init__(self) -> None:
        if not 0 <= self.p_max < 1:
            raise InvalidRequest(f"p_max must be in [0, 1), got {self.p_max}")
        if not 0 <= self.e_scale < math.inf:
            raise InvalidRequest(f"e_scale must be >= 0, got {self.e_scale}")
        if self.curriculum not in ("rotational", "gradual"):
            raise InvalidRequest(f"curriculum must be 'rotational' or 'gradual', got {self.curriculum!r}")
        if self.rotation < 1:
            raise InvalidRequest(f"rotation must be >= 1, got {self.rotation}")

    def exits(self, layers: int) -> tuple[int, ...]:
        """Returns the exits in a model of `layers` blocks, in order.

        Raises:
            InvalidRequest: an exit is none of the model's, or there is none.
        """
        if layers < 3:
            raise InvalidRequest(f"early exits need a model of at least 3 blocks, this one has {layers}")
        exits = tuple(sorted(set(self.exit_layers if self.exit_layers is not None else range(2, layers))))
        outside = [layer for layer in exits if not 2 <= layer < layers]
        if outside or not exits:
            raise InvalidRequest(
                f"exit_layers must be from 2 to {layers - 1} in this model (the recipe gives an exit after one block "
                f"no weight), got {outside or 'none'}"
            )
        return exits

    def enabled(self, layers: int, step: int, steps: int) -> tuple[int, ...]:
        """Returns the exits that are learnt in a step, the first being 0; the last layer always is."""
        exits = self.exits(layers)
        if self.curriculum == "gradual":
            count = 1 + step * 2 * len(exits) // steps
            return exits[-min(count, len(exits)) :]
        rotation = min(self.rotation, len(exits))
        return tuple(layer for index, layer in enumerate(exits) if (index + step) % rotation == 0)

    def weights(self, layers: int, enabled: Sequence[int]) -> list[float]:
        """Returns the weights of the enabled exits' losses and, at the end, of the last layer's; they add up to 1."""
        scales = exit_scales(layers, self.e_scale)
        chosen = [scales[layer - 1] for layer in (*enabled, layers)]
        return [scale / sum(chosen) for scale in chosen]


def dropout_rates(layers: int, p_max: float) -> list[float]:
    """Returns how often each block is dropped: p_l = p_max (e^(l ln 2 / (L - 1)) - 1), from 0 to p_max."""
    return [p_max * math.expm1(layer * math.log(2) / (layers - 1)) for layer in range(layers)]


def exit_scales(layers: int, e_scale: float) -> list[float]:
    """Returns the scale of the loss behind each block: e(l) = e_scale (0 + 1 + ... + l), and for the last one
    L - 1 + e_scale (0 + 1 + ... + L - 2).
    """  # noqa: D205 - one sentence
    inner = [e_scale * layer * (layer + 1) / 2 for layer in range(layers - 1)]
    return [*inner, layers - 1 + inner[-1]]


def train_layer_skip(
    model: PreTrainedModel,
    data: Sequences,
    output: str | Path,
    schedule: Schedule,
    recipe: Recipe | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    held_out: int | float = 0,
    held: Sequences | None = None,
    tensorboard: bool = False,
    on_step: Callable[[dict[str, Any]], None] | None = None,
) -> PreTrainedModel:
    """Trains a copy of a model for early exits, and saves it (LayerSkip, arXiv:2404.16710).

    While it trains, checkpoint and log are in `<output>.training`; a run that was stopped goes on from there. At the
    end `output` appears whole: model, tokenizer, `training.json` and `log.jsonl`.

    Args:
        model: stays as it is. Parameters and optimizer have its type, float32 or bfloat16; it may be in either mode,
            since its own dropout, which would draw from the global generator, is off.
        data: what it learns from.
        output: directory to make, which must not exist yet.
        schedule: how long and how fast.
        recipe: what LayerSkip adds.
        tokenizer: saved beside the model.
        held_out: share of the sequences to measure all exits on, or how many; 0 measures nothing.
        held: what to measure them on, in place of a part of `data`.
        tensorboard: also write the log for tensorboard.
        on_step: called with each line of the log.

    Returns:
        The trained copy, in evaluation mode.

    Raises:
        InvalidRequest: a setting that cannot work, an `output` that exists, or one begun with other settings.
        InvalidCheckpoint: the checkpoint of the stopped run cannot be read.
        UnsupportedModel: the model's blocks cannot be found.
    """
    recipe = recipe or Recipe()
    output, working = new_output(output)
    if model.dtype == torch.float16:
        raise InvalidRequest("float16 weights lose small updates to underflow; load the model as bfloat16 or float32")
    embeddings: Any = model.get_input_embeddings()
    check_vocabulary(data, embeddings.weight.shape[0])

    student: PreTrainedModel = copy.deepcopy(model).requires_grad_(True)
    student.train(False)
    blocks = _blocks(student)
    about = {**asdict(recipe), "exit_layers": recipe.exits(len(blocks)), "model": fingerprint(student)}
    objective = _EarlyExits(student, blocks, recipe, schedule.steps)
    evaluate = None
    if held is not None or held_out:
        data, held = apart(data, held_out, schedule.seed, held)
        check_vocabulary(held, embeddings.weight.shape[0])
        every = replace(recipe, p_max=0.0, curriculum="rotational", rotation=1)  # nothing dropped, all exits
        evaluate = measure(_EarlyExits(student, blocks, every, schedule.steps), held, schedule.batch_size)
    told: dict[str, Any] = {"on_step": on_step, "tensorboard": tensorboard}
    train(objective, data, schedule, directory=working, about=about, evaluate=evaluate, **told)
    student.requires_grad_(False)

    def write(directory: Path) -> None:
        student.save_pretrained(directory)
        if tokenizer is not None:
            tokenizer.save_pretrained(directory)

    publish(output, working, write, about | {"schedule": asdict(schedule), "data": data.digest()})
    return student


class _EarlyExits(Objective):
    """The losses of the exits that the curriculum has enabled, with blocks dropped at random."""

    def __init__(self, model: PreTrainedModel, blocks: nn.ModuleList, recipe: Recipe, steps: int) -> None:
        super().__init__()
        self.model = model
        self._blocks = (blocks,)  # in a tuple, so that they are registered in the model alone
        self._recipe, self._steps = recipe, steps

    def forward(self, batch: Batch, step: int, generator: torch.Generator) -> tuple[Tensor, Figures]:
        (blocks,) = self._blocks
        enabled = self._recipe.enabled(len(blocks), step, self._steps)
        kept = _draw(dropout_rates(len(blocks), self._recipe.p_max), batch.tokens.shape[0], generator)
        weights = self._recipe.weights(len(blocks), enabled)
        return _loss(self.model, blocks, batch.tokens, batch.learnt, enabled, weights, kept)


def _blocks(model: PreTrainedModel) -> nn.ModuleList:
    config = model.config.get_text_config(decoder=True)
    return find_blocks(find_decoder(model), getattr(config, "num_hidden_layers", 0))


def _draw(rates: Sequence[float], rows: int, generator: torch.Generator) -> Tensor:
    """Draws which blocks each sequence keeps, [layers, rows] bool."""
    return torch.rand(len(rates), rows, generator=generator) >= torch.tensor(rates)[:, None]


def _loss(
    model: PreTrainedModel,
    blocks: nn.ModuleList,
    tokens: Tensor,
    learnt: Tensor,
    enabled: Sequence[int],
    weights: Sequence[float],
    kept: Tensor,
) -> tuple[Tensor, Figures]:
    """The weighted mean of the exits' cross-entropies, and each of them; arguments as of the functions above."""
    with _exits(blocks, enabled, kept.to(tokens.device)):
        logits: Tensor = model(input_ids=tokens, use_cache=False).logits
    rows, length = tokens.shape
    if logits.shape[0] != (len(enabled) + 1) * rows:
        raise UnsupportedModel(f"{type(model).__name__} does not lead what its last block puts out to its LM head")
    wanted = learnt[:, 1:]
    total, figures = torch.zeros((), device=logits.device), Figures()
    names = [*(f"exit {layer}" for layer in enabled), "last"]
    for name, weight, part in zip(names, weights, logits.view(-1, rows, length, logits.shape[-1]), strict=True):
        # A mask on the logits, and not an ignored label, so that the rest is not raised to float32.
        entropy = nn.functional.cross_entropy(part[:, :-1][wanted].float(), tokens[:, 1:][wanted])
        total = total + weight * entropy
        figures[name] = entropy.detach()
    return total, figures


@contextmanager
def _exits(blocks: nn.ModuleList, enabled: Sequence[int], kept: Tensor) -> Iterator[None]:
    """Hooks that drop blocks row by row and lead every enabled exit, stacked on the batch, to the norm and the head.

    One forward then gives the logits of all exits, those of the last layer at the end, whatever the family does between
    its last block and its logits.
    """
    states: list[Tensor] = []

    def after(layer: int) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]:
        def hook(_: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any], output: Any) -> Any:
            before = arguments[0] if arguments else options["hidden_states"]
            hidden = output if isinstance(output, Tensor) else output[0]
            # Where, and not a product, so that a kept row is bit for bit what it was.
            hidden = torch.where(kept[layer].view(-1, *[1] * (hidden.dim() - 1)), hidden, before)
            if layer + 1 in enabled:
                states.append(hidden)
            if layer + 1 == len(blocks):
                hidden = torch.cat([*states, hidden])
            return hidden if isinstance(output, Tensor) else (hidden, *output[1:])

        return hook

    handles = [block.register_forward_hook(after(layer), with_kwargs=True) for layer, block in enumerate(blocks)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
