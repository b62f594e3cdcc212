"""A target that two real processes share writes in both of them what one process writes."""

from __future__ import annotations

import json

from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from draftwood.core.target import Target
from tests import forked
from tests.conftest import VOCABULARY, llama_config, tiny_model
from tests.core import two_processes


def test_two_processes_that_share_a_target_write_what_one_does(tmp_path):
    model = tiny_model(llama_config(layers=2, heads=4)).float()
    model.save_pretrained(tmp_path / "model")
    words = Tokenizer(models.WordLevel({f"w{word}": word for word in range(VOCABULARY)}, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "model")
    both = forked.start(two_processes.launch, str(tmp_path), output=tmp_path / "told")
    both.join(300)
    assert both.exitcode == 0, (tmp_path / "told.err").read_text()
    notes = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert notes[0] == notes[1] and notes[0]["sharded"]
    assert notes[0]["heads"] == [1, 1]  # of two heads of keys and values in each layer
    assert notes[0]["texts"] == two_processes.texts(Target(model))
    packed, auto, clock = notes[0]["refusals"]
    assert "packed=True" in packed and "auto drafts by the clock" in auto and "max_time=1.0" in clock
