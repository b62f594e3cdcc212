"""What a checkpoint's layer ids mean is measured."""

from __future__ import annotations

import json

import pytest
import torch

from draftwood.core.errors import InvalidRequest
from draftwood.core.target import Target
from draftwood.drafters.eagle.config import layer_config
from draftwood.drafters.eagle.formats import save_head
from draftwood.drafters.eagle.network import Eagle3Head, EagleHead
from draftwood.drafters.eagle.probe import probe_layer_ids
from tests.conftest import llama_config, tiny_model
from tests.drafters.eagle.heads import greedy_texts, train


@pytest.mark.parametrize("meaning", ["before", "after"])
def test_the_probe_tells_what_layer_ids_mean(tmp_path, meaning):
    target = Target(tiny_model(llama_config(layers=5, heads=4)))
    texts = greedy_texts(target, 24)
    layers = (1, 2, 4)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = Eagle3Head(layer_config(target), layers=layers).double().attach(target)
    train(head, target, texts, 30)
    save_head(head, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["eagle_aux_hidden_state_is"]
    config["eagle_aux_hidden_state_layer_ids"] = [layer - (meaning == "after") for layer in layers]
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = probe_layer_ids(tmp_path, target, texts.tolist())
    assert found.best == meaning
    assert found.positions == 4 * 23
    # On so few tokens much is learnt from the tokens alone, whatever the features are.
    assert found.agreement[meaning] > min(found.agreement.values()) + 0.03
    with pytest.raises(InvalidRequest, match="three tokens or more"):
        probe_layer_ids(tmp_path, target, [[1, 2]])
    save_head(EagleHead(layer_config(target)), tmp_path)
    with pytest.raises(InvalidRequest, match="is an EAGLE-1 head"):
        probe_layer_ids(tmp_path, target, texts.tolist())
