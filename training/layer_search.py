"""Which layers a target can spare: the sub-layers to skip, or the layer to exit after.

Draft & Verify (arXiv:2309.08168) finds the skipped set by Bayesian optimisation of tokens per second on a few prompts.
So does this module, by that objective or by one without a clock; a search can be stopped and goes on where it was.
Nothing is trained: the target's weights stay as they are.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from draftwood.core.cache import SlotCache
from draftwood.core.checks import whole_number
from draftwood.core.drafter import Drafter
from draftwood.core.errors import InvalidRequest, UnsupportedModel
from draftwood.core.request import Prompt
from draftwood.core.target import Target
from draftwood.core.tree import TokenTree
from draftwood.core.views import layer_view, weights_read
from draftwood.decoder import Decoder
from draftwood.drafters import early_exit, layer_skip
from draftwood.drafters.early_exit import EarlyExit
from draftwood.drafters.layer_choice import save_choice
from draftwood.drafters.layer_skip import LayerSkip

from .fingerprint import fingerprint
from .search_log import finished_trials, open_study, state

if TYPE_CHECKING:
    import optuna

Objective = Literal["proxy", "speed"]
Options = dict[str, Any]

START_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
"""How much of the sub-layers the first trials skip, the least missed ones first."""


@dataclass(frozen=True)
class Found:
    """The best candidate of a search.

    Attributes:
        options: for the drafter: `{"attention": [...], "mlp": [...]}` or `{"exit_layer": E}`.
        value: tokens per second, or the expected speedup over plain decoding.
        trials: how many candidates had been tried.
    """

    options: Options
    value: float
    trials: int


class Progress(NamedTuple):
    """What is reported after each trial.

    Attributes:
        finished: trials done, those of earlier calls included.
        trials: trials asked for.
        value: of this trial; None for a set that leaves nothing out or nothing to run, or that this model cannot spare.
        best: the best candidate so far.
    """

    finished: int
    trials: int
    value: float | None
    best: Found | None


def search_layer_skip(
    target: Target,
    prompts: Sequence[Prompt],
    *,
    trials: int = 200,
    objective: Objective = "proxy",
    output: str | Path | None = None,
    seed: int = 0,
    max_new_tokens: int = 64,
    gamma: int = 8,
    on_trial: Callable[[Progress], None] | None = None,
) -> Found:
    """Searches the attention and MLP sub-layers whose skipping drafts best (Draft & Verify, arXiv:2309.08168).

    The first trials skip more and more of the sub-layers that the proxy misses least one by one; from there
    the tree-structured Parzen estimator goes on over the 2 L switches.

    Args:
        target: the model that is to draft for itself.
        prompts: a handful, like those it will see.
        trials: candidates to try, those of an interrupted search included.
        objective: `"speed"`, measured tokens per second of greedy decoding one prompt at a time; or `"proxy"`, the
            expected speedup of a chain over plain decoding, without a clock, the same everywhere (see `Proxy`).
        output: the JSON file for the drafter, rewritten with every better candidate; the log of the trials lies beside
            it as `<output>.trials`, and a search finds it and goes on. None keeps nothing.
        seed: of the search.
        max_new_tokens: length of the texts that candidates are tried on.
        gamma: most tokens in a draft.
        on_trial: called after each trial.

    Raises:
        InvalidRequest: a value that cannot work, an `output` begun with other settings, or nothing worth skipping.
        ImportError: optuna is not installed (`pip install 'draftwood[search]'`).
    """
    names = [(kind, layer) for kind in ("attention", "mlp") for layer in range(target.layers)]

    def suggest(trial: optuna.Trial) -> Options:
        options: Options = {"attention": [], "mlp": []}
        for kind, layer in names:
            if trial.suggest_categorical(f"{kind} {layer}", [False, True]):
                options[kind].append(layer)
        return options

    def starts(proxy: Proxy) -> list[Options]:
        missed: dict[tuple[str, int], int] = {}
        for name in names:
            try:
                missed[name] = -sum(proxy.accepted(_skipping(target, [name])))
            except UnsupportedModel:
                continue  # not by itself: others read it, or it has no name of its own
        order = sorted(missed, key=lambda name: missed[name])
        sets = [set(order[: max(round(share * len(order)), 1)]) for share in START_SHARES]
        return [{f"{kind} {layer}": (kind, layer) in chosen for kind, layer in names} for chosen in sets]

    space = _Space(
        layer_skip.NAME,
        suggest,
        starts,
        lambda options: _skipping(target, [(kind, layer) for kind in options for layer in options[kind]]),
        lambda options: LayerSkip(skip=options, gamma=gamma),
    )
    return _Search(target, space, objective, output, seed, max_new_tokens, gamma).run(prompts, trials, on_trial)


def search_early_exit(
    target: Target,
    prompts: Sequence[Prompt],
    *,
    trials: int | None = None,
    objective: Objective = "proxy",
    output: str | Path | None = None,
    seed: int = 0,
    max_new_tokens: int = 64,
    gamma: int = 8,
    on_trial: Callable[[Progress], None] | None = None,
) -> Found:
    """Searches the layer after which to exit (LayerSkip, arXiv:2404.16710).

    Args:
        target: the model that is to draft for itself.
        prompts: a handful, like those it will see.
        trials: exits to try; all L - 1 when None.
        objective: as in `search_layer_skip`.
        output: as in `search_layer_skip`.
        seed: of the search.
        max_new_tokens: length of the texts that exits are tried on.
        gamma: most tokens in a draft.
        on_trial: called after each trial.

    Raises:
        InvalidRequest: as `search_layer_skip`.
        ImportError: as `search_layer_skip`.
    """
    exits = range(1, target.layers)
    if not exits:
        raise InvalidRequest("a target of one block has no exit inside")
    trials = len(exits) if trials is None else min(whole_number("trials", trials), len(exits))
    spread = [exits[round(index * (len(exits) - 1) / max(trials - 1, 1))] for index in range(trials)]
    # Those beyond `trials` wait for a search that goes on with more.
    order = [*spread, *(layer for layer in exits if layer not in spread)]
    space = _Space(
        early_exit.NAME,
        lambda trial: {"exit_layer": trial.suggest_int("exit_layer", 1, target.layers - 1)},
        lambda _: [{"exit_layer": layer} for layer in order],
        lambda options: layer_view(target, 0, options["exit_layer"]),
        lambda options: EarlyExit(exit_layer=options["exit_layer"], gamma=gamma),
    )
    return _Search(target, space, objective, output, seed, max_new_tokens, gamma).run(prompts, trials, on_trial)


class Proxy:
    """The expected speedup of drafting with a view, from counts alone.

    The target continues every prompt greedily, and the continuation is cut into windows of `gamma` tokens. Up to its
    first wrong token a greedy draft chain that starts at a window *is* the window, so that one forward of the view over
    all windows, on the target's own keys and values, gives the exact number of tokens that each chain would have had
    accepted. A draft step costs c, the weights that the view reads over those the target reads; the value is
    max over g <= gamma of (mean of min(accepted, g) + 1) / (g c + 1).

    Args:
        target: the target.
        prompts: token ids.
        max_new_tokens: length of the continuations.
        gamma: most tokens in a chain.

    Raises:
        InvalidRequest: every continuation is shorter than a window.
    """

    def __init__(
        self, target: Target, prompts: Sequence[Sequence[int]], *, max_new_tokens: int = 64, gamma: int = 8
    ) -> None:
        self.target, self.gamma = target, gamma
        self._texts: list[tuple[list[int], list[int], SlotCache]] = []  # text, starts of its windows, its cache
        written = Decoder(target).generate([list(prompt) for prompt in prompts], max_new_tokens=max_new_tokens)
        for prompt, result in zip(prompts, written, strict=True):
            text = [*prompt, *result.tokens]
            # A window begins with a committed token, which the chain is drafted behind.
            starts = list(range(len(prompt), len(text) - gamma, gamma))
            if starts:
                cache = target.new_cache(1, capacity=len(text))
                with torch.inference_mode():
                    target.score(cache, [text[:-1]], TokenTree.empty(1))
                self._texts.append((text, starts, cache))
        if not self._texts:
            raise InvalidRequest(
                f"the target ends every prompt's text within {gamma} tokens; give other prompts, or a smaller gamma"
            )

    def accepted(self, view: Target) -> list[int]:
        """Returns how many tokens of a greedy chain by `view` would have been accepted, window by window."""
        counts: list[int] = []
        for text, starts, cache in self._texts:
            rows = copy.deepcopy(cache)
            rows.select([0] * len(starts))
            rows.lengths = list(starts)
            windows = torch.tensor([text[start : start + self.gamma + 1] for start in starts])
            with torch.inference_mode():
                chain = TokenTree.chain(windows[:, 1:-1])
                logits = view.score(rows, windows[:, :1].tolist(), chain).logits  # [windows, gamma, vocabulary]
            right = logits.argmax(-1).cpu() == windows[:, 1:]
            counts += right.long().cumprod(1).sum(1).tolist()
        return counts

    def __call__(self, view: Target) -> float:
        """Returns the expected speedup."""
        accepted = self.accepted(view)
        cost = weights_read(view) / weights_read(self.target)
        committed = [sum(min(count, g) for count in accepted) / len(accepted) + 1 for g in range(1, self.gamma + 1)]
        return max(tokens / (g * cost + 1) for g, tokens in enumerate(committed, start=1))


@dataclass(frozen=True)
class _Space:
    """What is searched: candidates, where to begin, and what a candidate makes of the target."""

    drafter: str
    suggest: Callable[[optuna.Trial], Options]
    starts: Callable[[Proxy], list[Options]]
    view: Callable[[Options], Target]
    build: Callable[[Options], Drafter]


@dataclass(frozen=True)
class _Search:
    """One search; the fields are the arguments of the public functions."""

    target: Target
    space: _Space
    objective: Objective
    output: str | Path | None
    seed: int
    max_new_tokens: int
    gamma: int

    def run(self, prompts: Sequence[Prompt], trials: int, on_trial: Callable[[Progress], None] | None) -> Found:
        if self.objective not in ("proxy", "speed"):
            raise InvalidRequest(f"objective must be 'proxy' or 'speed', got {self.objective!r}")
        for name, number in (("trials", trials), ("max_new_tokens", self.max_new_tokens), ("gamma", self.gamma)):
            whole_number(name, number)
        if not prompts:
            raise InvalidRequest("a search needs prompts to try candidates on, got none")
        texts = [Decoder(self.target).encode(prompt) for prompt in prompts]
        setup = self._setup(texts)
        study = open_study(self.output, setup, self.seed)
        proxy = Proxy(self.target, texts, max_new_tokens=self.max_new_tokens, gamma=self.gamma)
        self._enqueue_starts(study, proxy)

        best = _best(study)
        while (finished := finished_trials(study)) < trials:
            trial = study.ask()
            options = self.space.suggest(trial)
            value = self._value(options, proxy, texts)
            trial.set_user_attr("options", options)
            study.tell(trial, values=value, state=state("COMPLETE" if value is not None else "PRUNED"))
            before, best = best, _best(study)  # of all processes that search into this log
            if best is not None and (before is None or best.value > before.value):
                self._save(best, setup)
            if on_trial is not None:
                on_trial(Progress(finished + 1, trials, value, best))
        if best is None:
            raise InvalidRequest(f"none of {trials} trials skipped anything and left something to run; try more")
        self._save(best, setup)
        return best

    def _enqueue_starts(self, study: optuna.Study, proxy: Proxy) -> None:
        """Has the candidates to begin with tried first; once more those at which a search was killed."""
        starts = study.user_attrs.get("starts")
        if starts is None:
            starts = self.space.starts(proxy)
            study.set_user_attr("starts", starts)
        trials = study.get_trials(deepcopy=False)
        settled: list[Any] = [trial.params for trial in trials if trial.state.is_finished()]
        settled += [trial.system_attrs.get("fixed_params") for trial in trials if trial.state == state("WAITING")]
        for start in starts:
            if start not in settled:
                study.enqueue_trial(start)

    def _value(self, options: Options, proxy: Proxy, prompts: list[list[int]]) -> float | None:
        """Returns the value of a candidate; None if it leaves nothing out, nothing to run, or what others read."""
        try:
            drafter, view = self.space.build(options), self.space.view(options)
        except (InvalidRequest, UnsupportedModel):
            return None
        if self.objective == "proxy":
            return proxy(view)
        decoder = Decoder(self.target, drafter)
        results = decoder.generate(prompts, max_new_tokens=self.max_new_tokens, batch_size=1)
        seconds: float = results[0].stats.seconds.total
        return sum(len(result.tokens) for result in results) / seconds

    def _setup(self, texts: list[list[int]]) -> dict[str, Any]:
        """What must not change between the parts of a search."""
        return {
            "drafter": self.space.drafter,
            "objective": self.objective,
            "max_new_tokens": self.max_new_tokens,
            "gamma": self.gamma,
            "model": fingerprint(self.target.model),
            "prompts": hashlib.sha256(json.dumps(texts).encode()).hexdigest()[:16],
        }

    def _save(self, found: Found, setup: Mapping[str, Any]) -> None:
        if self.output is not None:
            about = {**setup, "value": found.value, "trials": found.trials, "seed": self.seed}
            save_choice(Path(self.output).expanduser(), self.target, self.space.drafter, found.options, about)


def _skipping(target: Target, names: Sequence[tuple[str, int]]) -> Target:
    skipped = {kind: [layer for of, layer in names if of == kind] for kind in ("attention", "mlp")}
    return layer_view(target, skip_attention=skipped["attention"], skip_mlp=skipped["mlp"])


def _best(study: optuna.Study) -> Found | None:
    valued = [trial for trial in study.get_trials(deepcopy=False) if trial.state.is_finished() and trial.values]
    if not valued:
        return None
    best = max(valued, key=lambda trial: trial.values[0])  # the first of equals
    return Found(best.user_attrs["options"], best.values[0], finished_trials(study))
