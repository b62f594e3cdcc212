"""Training Medusa's heads together with their model: Medusa-2 (Cai et al., arXiv:2401.10774, section 2.2.2).

The heads are trained first, on the model as it is; then both learn, the heads four times as fast. What is trained is a
copy, in full or through LoRA adapters. Its weights are float32 meanwhile, since most updates at so low a rate would be
lost in bfloat16. What comes out is a model of its own, to be used as the target, whose files hold the heads too.
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from draftwood.core.anatomy import find_decoder
from draftwood.core.checks import real_number, switch, whole_number
from draftwood.core.drafter import FeatureName
from draftwood.core.errors import InvalidRequest
from draftwood.core.target import Target
from draftwood.drafters.medusa.formats import head_weights
from draftwood.drafters.medusa.network import MedusaHeads

from .data import Batch, Sequences, apart
from .features import check_data
from .fingerprint import fingerprint
from .loop import Figures, Objective, Schedule, train
from .medusa import MedusaRecipe, check_labels, make_heads, train_medusa
from .medusa_losses import Evaluation, head_losses
from .output import SETTINGS, new_output, publish

HEADS_FILE = "model-medusa-heads.safetensors"


@dataclass(frozen=True)
class JointRecipe:
    """What joint training adds; the defaults are the paper's.

    Attributes:
        head_weight: how much the heads' loss counts beside the model's own.
        head_rate: the heads' learning rate, as a multiple of the model's.
        lora: rank of the adapters through which the model is trained (arXiv:2106.09685); in full when None.
        self_distil: the model stays close to what it was (KL from its former distribution) instead of learning the
            text.
    """

    head_weight: float = 0.2
    head_rate: float = 4.0
    lora: int | None = None
    self_distil: bool = False

    def __post_init__(self) -> None:
        real_number("head_weight", self.head_weight, 0.0, 1e6)
        real_number("head_rate", self.head_rate, 0.0, 1e6)
        switch("self_distil", self.self_distil)
        if self.lora is not None:
            whole_number("lora", self.lora)


def train_medusa_joint(
    target: Target,
    data: Sequences,
    output: str | Path,
    schedule: Schedule,
    recipe: MedusaRecipe | None = None,
    joint: JointRecipe | None = None,
    *,
    first: Schedule | None = None,
    init: str | Path | None = None,
    held: Sequences | None = None,
    cache: str | Path | None = None,
    tensorboard: bool = False,
    on_step: Callable[[dict[str, Any]], None] | None = None,
    on_features: Callable[[int, int], None] | None = None,
) -> tuple[PreTrainedModel, MedusaHeads]:
    """Trains a copy of a model and heads for it, and saves both as one model (arXiv:2401.10774, section 2.2.2).

    While it trains, the first stage is in `<output>.heads`, checkpoint and log of the second in `<output>.training`;
    a run that was stopped goes on from there. At the end `output` appears whole.

    Args:
        target: its model stays as it is.
        data: what is learnt, and measured on.
        output: directory to make, which must not exist yet.
        schedule: of the second stage; its learning rate is the model's.
        recipe: of the heads, which have LM heads of their own.
        joint: of the second stage.
        first: schedule of the first stage, the heads alone.
        init: heads to start from, in place of the first stage.
        held: what both are measured on, in place of a part of `data`, which runs before this one may have learnt.
        cache: directory for the target's features, which the first stage alone can keep: later the model changes.
        tensorboard: also write the logs for tensorboard.
        on_step: called with each line of either stage's log.
        on_features: called while features are cached, with sequences done and their number.

    Returns:
        The model and the heads as they are saved, in evaluation mode.

    Raises:
        InvalidRequest: a setting that cannot work, data that does not fit, an `output` that exists, or one begun with
            other settings.
        InvalidCheckpoint: `init`, or a checkpoint of the stopped run, cannot be read.
        ImportError: adapters are asked for, and peft is not installed.
    """
    recipe, joint = recipe or MedusaRecipe(), joint or JointRecipe()
    output, working = new_output(output)
    if recipe.shared or recipe.distil:
        raise InvalidRequest("joint training has LM heads of its own that learn the text; leave out shared and distil")
    if (first is None) == (init is None):
        raise InvalidRequest("give either a schedule of the first stage, or heads to start from (init)")
    if cache is not None and first is None:
        raise InvalidRequest("cache is for the first stage; leave it out where heads are given (init)")
    for part in (data, *([] if held is None else [held])):
        check_data(part, target)
    student: PreTrainedModel = copy.deepcopy(target.model).requires_grad_(True)
    trained: nn.Module = student
    if joint.lora is None:
        _cast(student, torch.promote_types(target.dtype, torch.float32))
    else:  # adapters are float32 by themselves
        trained = _adapted(student, joint.lora, schedule.seed)
    stage = output.with_name(output.name + ".heads")
    if first is not None:
        options = {
            "held": held,
            "cache": cache,
            "tensorboard": tensorboard,
            "on_step": on_step,
            "on_features": on_features,
        }
        _first_stage(target, data, stage, first, recipe, options)
    learnt, held = apart(data, recipe.held_out, schedule.seed, held)
    heads = make_heads(target, learnt, recipe, init or stage)
    if heads.config.shared:
        raise InvalidRequest(f"the heads at {str(init)!r} share the target's LM head; joint training needs own ones")
    for part, name in ((learnt, "training"), (held, "held-out")):
        check_labels(part, heads, name)
    about = {"heads": fingerprint(heads), "model": fingerprint(target.model), **asdict(recipe), **asdict(joint)}
    teacher = target.model if joint.self_distil else None
    objective = _Joint(student, trained, heads, teacher, target.dtype, recipe.decay, joint)
    evaluation = Evaluation(heads, objective.features, None, held, schedule.batch_size, recipe.nodes)
    told: dict[str, Any] = {"on_step": on_step, "tensorboard": tensorboard}
    train(objective, learnt, schedule, directory=working, about=about, evaluate=evaluation, **told)
    measured = evaluation.figures or evaluation()
    if joint.lora is not None:
        student = trained.merge_and_unload()  # type: ignore[operator]
    _cast(student.requires_grad_(False), target.dtype)
    heads.requires_grad_(False).eval().to(student.dtype)
    accuracies = evaluation.accuracies if any(evaluation.accuracies[0]) else None

    def write(directory: Path) -> None:
        _save(student, heads, directory, accuracies)
        if target.tokenizer is not None:
            target.tokenizer.save_pretrained(directory)

    publish(output, working, write, {**about, "schedule": asdict(schedule), "evaluation": measured})
    if first is not None and PartialState().is_main_process:
        shutil.rmtree(stage)
    return student, heads


class _Joint(Objective):
    """L_LM + head_weight x the heads' losses (arXiv:2401.10774, equation 2)."""

    def __init__(
        self,
        student: PreTrainedModel,
        trained: nn.Module,
        heads: MedusaHeads,
        teacher: PreTrainedModel | None,
        dtype: torch.dtype,
        decay: float,
        joint: JointRecipe,
    ) -> None:
        super().__init__()
        self.model, self.heads = trained, heads
        self._others = (find_decoder(student), teacher)  # in a tuple, so that they are registered nowhere
        self._dtype, self._decay, self._joint = dtype, decay, joint

    def rate(self, name: str) -> float:
        return self._joint.head_rate if name.startswith("heads.") else 1.0

    def forward(self, batch: Batch, step: int, generator: torch.Generator) -> tuple[Tensor, Figures]:
        logits, hidden = self._run(batch)
        heads_loss, figures = head_losses(self.heads, hidden, batch, None, decay=self._decay)
        wanted = batch.learnt[:, 1:]
        guesses = logits[:, :-1][wanted].float()
        teacher = self._others[1]
        if teacher is None:
            own = nn.functional.cross_entropy(guesses, batch.tokens[:, 1:][wanted])
        else:
            with torch.no_grad():
                before = teacher(input_ids=batch.tokens, use_cache=False).logits[:, :-1][wanted].float()
            own = nn.functional.kl_div(
                guesses.log_softmax(-1), before.log_softmax(-1), reduction="batchmean", log_target=True
            )
        return own + self._joint.head_weight * heads_loss, {"model": own.detach(), **figures}

    def features(self, batch: Batch) -> dict[FeatureName, Tensor]:
        """Returns what the model, as it now is, gives the heads."""
        return {"last": self._run(batch)[1]}

    def _run(self, batch: Batch) -> tuple[Tensor, Tensor]:
        states: list[Tensor] = []
        hook = self._others[0].register_forward_hook(lambda _module, _arguments, output: states.append(output[0]))
        try:
            with torch.autocast(batch.tokens.device.type, torch.bfloat16, enabled=self._dtype == torch.bfloat16):
                logits: Tensor = self.model(input_ids=batch.tokens, use_cache=False).logits
        finally:
            hook.remove()
        return logits, states[0].to(self._dtype)


def _cast(model: nn.Module, dtype: torch.dtype) -> None:
    """Changes the type of the weights alone: buffers, such as rotary frequencies, would lose their precision."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def _first_stage(
    target: Target,
    data: Sequences,
    stage: Path,
    schedule: Schedule,
    recipe: MedusaRecipe,
    options: dict[str, Any],
) -> None:
    """Trains the heads alone, unless an earlier run has; `options` are those of `train_medusa`."""
    if not stage.exists():
        train_medusa(target, data, stage, schedule, recipe, **options)
        return
    told = json.loads((stage / SETTINGS).read_text(encoding="utf-8"))
    same = told["data"] == data.digest() and told["model"] == fingerprint(target.model)
    if not same or told["schedule"] != asdict(schedule):
        raise InvalidRequest(f"{str(stage)!r} holds heads of another run; delete it, or give another output")


def _adapted(student: PreTrainedModel, rank: int, seed: int) -> nn.Module:
    """Puts adapters on all linear layers of the copy but the LM head; they alone require a gradient."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ImportError("LoRA needs peft; pip install 'draftwood[lora]', or train in full (lora=None)") from error
    settings = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear", task_type="CAUSAL_LM")
    devices = [student.device] if student.device.type == "cuda" else []
    with torch.random.fork_rng(devices):  # peft draws from the global generator
        torch.manual_seed(seed)
        adapted: nn.Module = get_peft_model(student, settings).train(False)
    return adapted


def _save(model: PreTrainedModel, heads: MedusaHeads, directory: Path, accuracies: list[list[float]] | None) -> None:
    """Writes the model in its own layout, and the heads among its weights, as published Medusa-2 models have them."""
    layers = heads.config.layers
    model.config.update({"medusa_num_heads": heads.config.heads, "medusa_num_layers": layers, "accuracies": accuracies})
    model.save_pretrained(directory)
    state = head_weights(heads, "medusa_head.{head}.{layer}.linear.{part}", f"medusa_head.{{head}}.{layers}.weight")
    _add_weights(directory, {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()})


def _add_weights(directory: Path, state: dict[str, Tensor]) -> None:
    """Adds weights to those of a saved model: to its file, or as one file more where there are several."""
    index, single = directory / "model.safetensors.index.json", directory / "model.safetensors"
    if not index.is_file():
        save_file(load_file(single) | state, single, metadata={"format": "pt"})
        return
    save_file(state, directory / HEADS_FILE, metadata={"format": "pt"})
    listed = json.loads(index.read_text(encoding="utf-8"))
    listed["weight_map"] |= dict.fromkeys(state, HEADS_FILE)
    size = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    listed["metadata"]["total_size"] = listed["metadata"].get("total_size", 0) + size
    index.write_text(json.dumps(listed, indent=2) + "\n", encoding="utf-8")
