"""The search: its proxy against real drafting, its result against every candidate, and going on after a stop."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftwood.core.errors import InvalidRequest
from draftwood.core.target import Target
from draftwood.core.views import layer_view, weights_read
from draftwood.decoder import Decoder
from draftwood.drafters.early_exit import EarlyExit
from draftwood.drafters.layer_skip import LayerSkip
from draftwood.training import layer_search
from draftwood.training.layer_search import Found, Progress, Proxy, search_early_exit, search_layer_skip
from draftwood.training.search_log import _LogLock
from tests.architectures import build
from tests.drafters.view_checks import PROMPTS, agreeing_model

SHORT: dict[str, Any] = {"max_new_tokens": 20, "gamma": 4}


def endless(layers: int) -> Target:
    """A target without an end-of-text token, whose blocks from the third on contribute little."""
    model = agreeing_model(0.2, layers)
    model.generation_config.eos_token_id = None
    return Target(model)


@pytest.fixture(scope="module")
def target() -> Target:
    return endless(layers=4)


@pytest.fixture(scope="module")
def proxy(target) -> Proxy:
    return Proxy(target, PROMPTS, **SHORT)


@pytest.mark.parametrize(
    "skip", [{"attention": [2]}, {"mlp": [3], "attention": [1]}, {"attention": [2, 3], "mlp": [2]}]
)
def test_the_proxy_counts_what_real_drafts_get_accepted(target, proxy, skip):
    view = layer_view(target, skip_attention=skip.get("attention", ()), skip_mlp=skip.get("mlp", ()))
    decoder = Decoder(target, LayerSkip(skip=skip, gamma=4, threshold=0.0))
    expected = []
    for prompt in PROMPTS:
        text = prompt + Decoder(target).generate(prompt, max_new_tokens=20).tokens
        for start in range(len(prompt), len(text) - 4, 4):
            _, round_, *_ = decoder.stream(text[:start], max_new_tokens=10)  # the prompt's own round comes first
            expected.append(round_.drafted)
    assert proxy.accepted(view) == expected
    assert proxy.accepted(view) == expected  # the texts' keys and values are as they were
    assert len(set(expected)) > 1


def test_the_value_is_the_best_chains_speedup(target, proxy, monkeypatch):
    monkeypatch.setattr(proxy, "accepted", lambda view: [4, 2, 0, 1])
    monkeypatch.setattr(layer_search, "weights_read", lambda scorer: 10 if scorer is target else 2)
    speedups = [(0.75 + 1) / 1.2, (1.25 + 1) / 1.4, (1.5 + 1) / 1.6, (1.75 + 1) / 1.8]
    assert proxy(layer_view(target, 0, 1)) == pytest.approx(max(speedups))


def test_weights_are_counted(target):
    model = target.model
    every = sum(parameter.numel() for parameter in model.parameters())
    looked_up = model.get_input_embeddings().weight.numel() + model.model.norm.weight.numel()
    assert weights_read(target) == every - looked_up
    attention = sum(parameter.numel() for parameter in model.model.layers[1].self_attn.parameters())
    assert weights_read(target) - weights_read(layer_view(target, skip_attention=[1])) == attention
    block = sum(parameter.numel() for parameter in model.model.layers[0].parameters())
    assert weights_read(target) - weights_read(layer_view(target, 0, 3)) == block


def test_the_search_finds_about_the_best_of_all_sets():
    target = endless(layers=3)
    layers, proxy = range(3), Proxy(target, PROMPTS[:2], **SHORT)
    values = {}
    for bits in itertools.product([False, True], repeat=6):
        skip = {"attention": [one for one in layers if bits[one]], "mlp": [one for one in layers if bits[3 + one]]}
        if any(bits) and not all(bits):
            view = layer_view(target, skip_attention=skip["attention"], skip_mlp=skip["mlp"])
            values[json.dumps(skip)] = proxy(view)
    found = search_layer_skip(target, PROMPTS[:2], trials=20, **SHORT)
    assert found.value == values[json.dumps(found.options)]
    ranked = sorted(values.values(), reverse=True)
    assert found.value >= ranked[2]
    assert found.trials == 20


def test_every_exit_is_tried_once(target, proxy):
    seen: list[Progress] = []
    found = search_early_exit(target, PROMPTS, **SHORT, on_trial=seen.append)
    values = [proxy(layer_view(target, 0, layer)) for layer in (1, 2, 3)]
    assert [progress.value for progress in seen] == values
    assert [(progress.finished, progress.trials) for progress in seen] == [(1, 3), (2, 3), (3, 3)]
    assert found == Found({"exit_layer": 1 + values.index(max(values))}, max(values), 3)
    assert search_early_exit(target, PROMPTS, trials=1, **SHORT).options == {"exit_layer": 1}


def test_a_search_is_a_function_of_its_seed(target):
    first, again, other = (
        [progress.value for progress in trace]
        for trace in (trial_trace(target, seed=1), trial_trace(target, seed=1), trial_trace(target, seed=2))
    )
    assert first == again
    assert first != other
    assert first[:6] == other[:6]  # where it begins has no seed


def trial_trace(target: Target, **options: Any) -> list[Progress]:
    seen: list[Progress] = []
    search_layer_skip(target, PROMPTS, trials=options.pop("trials", 12), **SHORT, **options, on_trial=seen.append)
    return seen


def test_a_stopped_search_goes_on(target, tmp_path: Path):
    output = tmp_path / "new" / "skip.json"
    seen: list[Progress] = []

    def stop(progress: Progress) -> None:
        seen.append(progress)
        if progress.finished == 8:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        search_layer_skip(target, PROMPTS, trials=20, **SHORT, output=output, on_trial=stop)
    best = max(progress.value for progress in seen if progress.value is not None)
    content = json.loads(output.read_text())
    assert content["search"]["value"] == best
    Decoder(target, LayerSkip(skip=output))

    rest = trial_trace(target, trials=20, output=output)
    assert [progress.finished for progress in rest] == list(range(9, 21))
    assert rest[0].best is not None and rest[0].best.value >= best
    # New candidates, not those of the first part drawn again.
    assert {progress.value for progress in rest} - {progress.value for progress in seen}
    content = json.loads(output.read_text())
    assert content["search"]["trials"] == 20
    assert content["search"]["value"] == max(one.value for one in [*seen, *rest] if one.value is not None)
    assert trial_trace(target, trials=20, output=output) == []

    with pytest.raises(
        InvalidRequest, match=r"skip.json.trials was begun with \{'gamma': 4\}, this search .*'gamma': 3"
    ):
        search_layer_skip(target, PROMPTS, trials=20, output=output, max_new_tokens=20, gamma=3)
    with pytest.raises(InvalidRequest, match=r"was begun with \{.drafter.: .layer-skip.\}"):
        search_early_exit(target, PROMPTS, output=output, **SHORT)


def test_a_killed_search_tries_again_what_it_was_at(target, proxy, monkeypatch, tmp_path: Path):
    """Nothing runs in a process that is killed: its trial stays open in the log, and a line may be torn."""
    output, log = tmp_path / "exit.json", tmp_path / "exit.json.trials"
    seen: list[float | None] = []
    value = Proxy.__call__

    def killed(self: Proxy, view: Target) -> float:
        if view.layers == 2:
            raise SystemExit
        return value(self, view)

    monkeypatch.setattr(Proxy, "__call__", killed)
    with pytest.raises(SystemExit):
        search_early_exit(target, PROMPTS, **SHORT, output=output, on_trial=lambda one: seen.append(one.value))
    monkeypatch.undo()
    log.write_bytes(log.read_bytes() + b'{"op_code":6,"wor')

    search_early_exit(target, PROMPTS, **SHORT, output=output, on_trial=lambda one: seen.append(one.value))
    assert sorted(seen) == sorted(proxy(layer_view(target, 0, layer)) for layer in (1, 2, 3))
    assert search_early_exit(target, PROMPTS, **SHORT, output=output).trials == 3  # the log can be read once more


def hold(log: Path, held: Any) -> None:
    lock = _LogLock(log)
    lock.acquire()
    held.set()
    time.sleep(60)


def test_the_lock_on_a_log_goes_with_the_process_that_holds_it(tmp_path: Path):
    fcntl, log = pytest.importorskip("fcntl"), tmp_path / "log"
    log.touch()
    forking = multiprocessing.get_context("fork")
    held = forking.Event()
    process = forking.Process(target=hold, args=(log, held))
    process.start()
    assert held.wait(30)
    with log.open() as file, pytest.raises(BlockingIOError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    process.kill()
    process.join()
    for _ in range(2):
        lock = _LogLock(log)
        assert lock.acquire()
        lock.release()


def test_a_search_that_goes_on_with_more_trials_tries_the_other_exits(target, proxy, tmp_path: Path):
    seen: list[float | None] = []
    for trials in (1, 2, None):
        found = search_early_exit(
            target, PROMPTS, trials=trials, **SHORT, output=tmp_path / "x", on_trial=lambda one: seen.append(one.value)
        )
    assert sorted(seen) == sorted(proxy(layer_view(target, 0, layer)) for layer in (1, 2, 3))
    assert found.value == max(seen)


def test_two_searches_may_share_a_log(target, tmp_path: Path):
    """Together they make the trials asked for, and the file holds the best of both."""
    options: dict[str, Any] = {"trials": 9, "output": tmp_path / "skip.json"}
    seen: list[Progress] = []

    def beside(progress: Progress) -> None:
        seen.append(progress)
        if progress.finished == 2:
            seen.extend(trial_trace(target, **options))

    found = search_layer_skip(target, PROMPTS, **options, **SHORT, on_trial=beside)
    assert [progress.finished for progress in seen] == list(range(1, 10))
    best = max(progress.value for progress in seen if progress.value is not None)
    assert found.value == json.loads(options["output"].read_text())["search"]["value"] == best


def test_the_log_of_another_model_of_the_same_shape_is_refused(target, tmp_path: Path):
    options: dict[str, Any] = {"output": tmp_path / "exit.json", "trials": 1, **SHORT}
    search_early_exit(target, PROMPTS, **options)
    other = agreeing_model(contribution=0.4)
    other.generation_config.eos_token_id = None
    with pytest.raises(InvalidRequest, match=r"exit.json.trials was begun with \{'model': '\w+'\}"):
        search_early_exit(Target(other), PROMPTS, **options)


@pytest.mark.parametrize("content", ["{}\n", "[]\n", "not JSON\nnor this\n"])
def test_what_is_no_log_is_refused(target, tmp_path: Path, content: str):
    (tmp_path / "skip.json.trials").write_text(content)
    with pytest.raises(InvalidRequest, match=r"skip.json.trials is no log of a search \(.*delete it"):
        search_layer_skip(target, PROMPTS, output=tmp_path / "skip.json", **SHORT)


def test_the_exit_that_was_found_is_loaded(target, tmp_path: Path):
    found = search_early_exit(target, PROMPTS, output=tmp_path / "exit.json", **SHORT)
    drafter = Decoder(target, EarlyExit(exit_layer=tmp_path / "exit.json")).drafter
    assert drafter.view.layers == found.options["exit_layer"]


def test_speed_is_tokens_per_second_of_the_drafter_itself(target, monkeypatch):
    built: list[Any] = []

    class Timed(Decoder):
        def generate(self, prompts: Any, **settings: Any) -> Any:
            results = super().generate(prompts, **settings)
            if isinstance(self.drafter, EarlyExit):
                assert settings["batch_size"] == 1
                built.append(self.drafter)
                return [
                    SimpleNamespace(tokens=one.tokens, stats=SimpleNamespace(seconds=SimpleNamespace(total=16.0)))
                    for one in results
                ]
            return results

    monkeypatch.setattr(layer_search, "Decoder", Timed)
    found = search_early_exit(target, PROMPTS, objective="speed", **SHORT)
    assert found.value == 4 * 20 / 16.0
    assert [drafter.view.layers for drafter in built] == [1, 2, 3]
    assert all(drafter.shape.depth == 4 for drafter in built)


def test_sub_layers_that_cannot_be_skipped_by_themselves_are_left_to_run():
    """OPT's MLPs are no modules: only a whole block is skipped with its MLP."""
    model = build("opt")
    model.generation_config.eos_token_id = None
    target, seen = Target(model), []
    found = search_layer_skip(target, PROMPTS[:2], trials=8, **SHORT, on_trial=seen.append)
    assert set(found.options["mlp"]) <= set(found.options["attention"])
    assert [progress.value is not None for progress in seen[:6]] == [True] * 6


def test_measured_speed_is_positive(target):
    assert search_layer_skip(target, PROMPTS[:1], trials=1, objective="speed", **SHORT).value > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"objective": "tau"}, "objective must be 'proxy' or 'speed', got 'tau'"),
        ({"trials": 0}, "trials must be a whole number >= 1, got 0"),
        ({"trials": 2.5}, "trials must be a whole number >= 1, got 2.5"),
        ({"gamma": 0}, "gamma must be a whole number >= 1, got 0"),
        ({"max_new_tokens": 0}, "max_new_tokens must be a whole number >= 1, got 0"),
        ({"max_new_tokens": 4, "gamma": 4}, "ends every prompt's text within 4 tokens"),
    ],
)
def test_bad_settings(target, options: dict[str, Any], message: str):
    with pytest.raises(InvalidRequest, match=message):
        search_layer_skip(target, PROMPTS, **options)


def test_no_prompts(target):
    with pytest.raises(InvalidRequest, match="needs prompts"):
        search_early_exit(target, [])


def test_without_optuna(target, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(ImportError, match=r"pip install 'draftwood\[search\]'"):
        search_early_exit(target, PROMPTS, **SHORT)


def test_a_block_of_one_has_no_exit(tinier_llama):
    with pytest.raises(InvalidRequest, match="no exit inside"):
        search_early_exit(Target(tinier_llama), PROMPTS)


def test_no_gradient_and_no_change(target):
    before = {name: tensor.clone() for name, tensor in target.model.state_dict().items()}
    trial_trace(target, trials=3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in target.model.state_dict().items())
    assert all(parameter.grad is None for parameter in target.model.parameters())
