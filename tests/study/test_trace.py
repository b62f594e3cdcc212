"""Recordings: complete, consistent with themselves and with the run that they are of."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import StoppingCriteria

from draftwood.core.errors import InvalidRequest
from draftwood.core.target import Target
from draftwood.core.tree import TokenTree
from draftwood.decoder import Decoder
from draftwood.drafters.draft_model import DraftModel
from draftwood.drafters.oracle import Oracle
from draftwood.study.trace import FORMAT, VERSION, load_trace, pieces, record, save_trace
from tests.study.tiny import SPECIAL, tiny_tokenizer

PROMPTS = ["abc abc abc", "x", "one two one two"]
FREE = {"eos_token_id": []}


@pytest.fixture(scope="module")
def target(tiny_llama):
    return Target(tiny_llama, tiny_tokenizer())


@pytest.fixture(scope="module")
def draft(tinier_llama):
    return lambda **options: DraftModel(model=Target(tinier_llama), **options)


def replay(trace):
    """Rebuilds the texts from the verdicts alone, checking each against its tree."""
    texts = {row["row"]: [] for row in trace["rows"]}
    for one in trace["rounds"]:
        for entry in one["rows"]:
            tree, path = entry["tree"], entry["path"]
            assert [tree["parents"][node] for node in path] == [-1, *path][: len(path)]
            assert all(tree["candidate"][node] for node in path)
            assert [tree["tokens"][node] for node in path] == entry["committed"][: len(path)]
            assert len(path) <= len(entry["committed"]) <= len(path) + 1
            texts[entry["row"]] += entry["committed"]
    return texts


KINDS = {
    "greedy": ({}, {"rule": "greedy"}),
    "rejection": ({"temperature": 1.0, "top_k": 9}, {"rule": "rejection"}),
    "traversal": ({"temperature": 0.8}, {"rule": "traversal"}),
    "coupled": ({"temperature": 1.0}, {"rule": "coupled"}),
    "penalty": ({"temperature": 0.9, "repetition_penalty": 1.3}, {}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch_size", [1, 2])
def test_the_text_is_that_of_an_unrecorded_run_and_can_be_rebuilt(target, draft, kind, batch_size):
    settings, rule = KINDS[kind]
    settings = {**settings, **FREE, "max_new_tokens": 17, "seed": 3, "batch_size": batch_size}
    decoder = Decoder(target, draft(tree=(2, 2, 1)), **rule)
    alone = decoder.generate(PROMPTS, **settings)
    recorded = record(decoder, PROMPTS, **settings)
    assert [one.tokens for one in recorded.texts] == [one.tokens for one in alone]
    assert [one.text for one in recorded.texts] == [one.text for one in alone]
    assert [one.stats.accepted_by_depth for one in recorded.texts] == [one.stats.accepted_by_depth for one in alone]
    trace = json.loads(json.dumps(recorded.trace, allow_nan=False))
    assert trace == recorded.trace
    rows = {row["row"]: row for row in trace["rows"]}
    assert replay(trace) == {key: row["tokens"] for key, row in rows.items()} and len(rows) == 3
    for key, row in rows.items():
        assert row["tokens"] == alone[key].tokens and row["stop_reason"] == "length"
        assert row["prompt"] == decoder.encode(PROMPTS[key])
        shown = "".join(piece for piece in row["pieces"] if piece not in SPECIAL)  # a page shows them, a text does not
        assert shown == row["text"] == alone[key].text


def test_clocks_add_up(target, draft):
    done = record(Decoder(target, draft()), PROMPTS, max_new_tokens=12, batch_size=2, **FREE).trace
    for run in (done, done["plain"]):
        at = 0.0
        for one in run["rounds"]:
            assert one["at"] == pytest.approx(at, abs=1e-6) and one["end"] > one["at"]
            assert sum(one["seconds"].values()) <= one["end"] - one["at"] + 1e-5
            at = one["end"]
        assert at == pytest.approx(run["seconds"]["total"], abs=1e-5)
        for phase in ("prefill", "draft", "verify", "accept", "commit"):
            total = sum(one["seconds"][phase] for one in run["rounds"])
            assert total == pytest.approx(run["seconds"][phase], abs=1e-5)
    assert any(one["seconds"]["prefill"] > 0 for one in done["rounds"])


def test_plain_decoding_is_recorded_beside_it(target, draft):
    done = record(Decoder(target, draft()), PROMPTS[0], max_new_tokens=9, **FREE).trace
    plain = Decoder(target).generate(PROMPTS[0], max_new_tokens=9, **FREE)
    assert done["plain"]["rows"][0]["tokens"] == plain.tokens == done["rows"][0]["tokens"]
    assert [len(one["rows"][0]["committed"]) for one in done["plain"]["rounds"]] == [1] * 9
    assert record(Decoder(target), PROMPTS[0], max_new_tokens=2, plain=False).trace["plain"] is None
    hot = {"temperature": 1.0, "seed": 7, "max_new_tokens": 9, **FREE}
    coupled = record(Decoder(target, draft(), rule="coupled"), PROMPTS[0], **hot).trace
    assert coupled["plain"]["rows"][0]["tokens"] == coupled["rows"][0]["tokens"]


def test_p_and_q_are_those_that_were_judged(target, draft):
    settings = {"temperature": 1.0, "seed": 5, "max_new_tokens": 14, **FREE}
    decoder = Decoder(target, draft(gamma=3), rule="rejection")
    trace = record(decoder, PROMPTS[0], **settings).trace
    text, tried = list(trace["rows"][0]["prompt"]), 0

    def law(model, tokens):
        cache = model.new_cache(1)
        with torch.inference_mode():
            return model.score(cache, [tokens], TokenTree.empty(1)).logits[0, 0].float().softmax(-1)

    for one in trace["rounds"]:
        entry = one["rows"][0]
        tree = entry["tree"]
        for node, token in enumerate(tree["tokens"]):
            history = text + tree["tokens"][:node]  # a chain
            assert tree["p"][node] == pytest.approx(float(law(target, history)[token]), abs=1e-5)
            assert tree["q"][node] == pytest.approx(float(law(decoder.drafter._model, history)[token]), abs=1e-5)
            tried += 1
        node = entry["decided"]["node"]
        assert node == (entry["path"][-1] if entry["path"] else -1)
        best = law(target, text + tree["tokens"][: node + 1]).topk(5)
        assert [token for token, _, _ in entry["decided"]["p"]] == best.indices.tolist()
        assert (entry["decided"]["q"] is None) == (node + 1 == len(tree["tokens"]))
        text += entry["committed"]
    assert tried > 10


def test_chosen_nodes_have_no_q(target):
    text = Decoder(target).generate(PROMPTS[0], max_new_tokens=12, **FREE).tokens
    trace = record(Decoder(target, Oracle(continuation=text, alpha=0.5)), PROMPTS[0], max_new_tokens=12, **FREE).trace
    assert {entry["tree"]["q"] is None for one in trace["rounds"] for entry in one["rows"]} == {True}
    assert {entry["decided"]["q"] is None for one in trace["rounds"] for entry in one["rows"]} == {True}
    assert all(None not in entry["tree"]["p"] for one in trace["rounds"] for entry in one["rows"])


def test_long_runs_are_bounded(target):
    done = record(Decoder(target, "prompt-lookup"), PROMPTS[0], max_new_tokens=20, rounds=3, **FREE)
    rounds = done.trace["rounds"]
    assert ["tree" in one["rows"][0] for one in rounds] == [index < 3 for index in range(len(rounds))]
    assert len(rounds) > 4
    assert [token for one in rounds for token in one["rows"][0]["committed"]] == done.texts[0].tokens


class Third(StoppingCriteria):
    def __call__(self, input_ids, scores, **_):
        return torch.tensor([input_ids.shape[1] >= 3 + 3])


def test_settings_and_environment_are_written_down(target):
    criteria = [Third()]
    done = record(
        Decoder(target, "prompt-lookup"), [5, 6, 7], stopping_criteria=criteria, about={"drafter": "x"}, **FREE
    )
    settings = done.trace["settings"]
    assert settings["drafter"] == "x" and settings["eos_token_id"] == [] and "Third" in str(settings)
    assert done.trace["environment"]["versions"]["torch"] == torch.__version__
    assert done.trace["rule"] == {"name": "Greedy", "lossless": True, "greedy": True}
    lossy = record(Decoder(target, rule="typical"), [5, 6, 7], temperature=1.0, max_new_tokens=3, **FREE).trace
    assert lossy["rule"] == {"name": "Typical", "lossless": False, "greedy": False}
    assert done.trace["rows"][0]["stop_reason"] == "criteria" and len(done.texts[0].tokens) == 3


def test_a_target_without_tokenizer_is_recorded_by_ids(tiny_llama):
    done = record(Decoder(Target(tiny_llama), "prompt-lookup"), [5, 6, 7], max_new_tokens=4, **FREE)
    row = done.trace["rows"][0]
    assert row["pieces"] == [None] * 4 and row["prompt_text"] is None and len(row["tokens"]) == 4


def test_pieces_keep_their_spaces():
    class Dropping:
        """Drops the space at the beginning of a text, as SentencePiece's decoder does."""

        def decode(self, ids):
            return "".join(["?", " a", " b", "c"][token] for token in ids).lstrip(" ")

    class Owner:
        tokenizer = Dropping()

    piece = pieces(Owner(), 3)
    assert [piece(token) for token in (1, 2, 3)] == [" a", " b", "c"]


def test_an_oracle_replays_a_recording(target, tmp_path):
    path = save_trace(record(Decoder(target), PROMPTS, max_new_tokens=16, **FREE).trace, tmp_path / "run.json")
    done = Decoder(target, Oracle(continuation=path, gamma=4)).generate(PROMPTS[1:], max_new_tokens=16, **FREE)
    assert [one.stats.rounds for one in done] == [3, 3]


def test_files_are_read_back_and_others_refused(target, tmp_path):
    trace = record(Decoder(target), PROMPTS[1], max_new_tokens=3, **FREE).trace
    path = save_trace(trace, tmp_path / "run.json")
    assert load_trace(path) == trace
    with pytest.raises(InvalidRequest, match="no recording at '/nowhere/run"):
        load_trace("/nowhere/run.json")
    with pytest.raises(InvalidRequest, match="cannot write the recording"):
        save_trace(trace, tmp_path)
    for held, message in (
        ("{", "is no recording"),
        ("[1]", "is no recording"),
        ('{"format": "other"}', "is no recording"),
        (json.dumps({"format": FORMAT, "version": VERSION + 1}), f"of version {VERSION + 1}; this release reads"),
        (json.dumps({"format": FORMAT, "version": VERSION, "rows": []}), "lacks 'settings'"),
    ):
        path.write_text(held)
        with pytest.raises(InvalidRequest, match=message):
            load_trace(path)
