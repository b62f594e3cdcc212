"""Self-written data: chats of the model's own, resumable, without repeats; and answers to given prompts."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftwood import Decoder, Target
from draftwood.core.errors import InvalidRequest
from draftwood.training.data import read_documents
from draftwood.training.synthesis import Writing, Written, synthesise
from tests.conftest import llama_config, tiny_model

TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def chat_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    marks = ["<end>", "<user>", "<assistant>", "<system>", "?"]
    words = [*marks, *(f"w{index}" for index in range(96 - len(marks)))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>", unk_token="?")
    fast.add_special_tokens({"additional_special_tokens": marks[:4]})
    fast.chat_template = template
    return fast


@pytest.fixture(scope="module")
def decoder() -> Decoder:
    model = tiny_model(llama_config(layers=1, heads=2))
    model.generation_config.eos_token_id = 0
    with torch.no_grad():
        model.get_output_embeddings().weight[1:5] *= 0.0  # the marks are unlikely, as in a trained model
    return Decoder(Target(model, chat_tokenizer()), rule="coupled")


def lines(path):
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


SMALL = Writing(samples=48, user_tokens=60, answer_tokens=12, batch_size=4)


def test_it_writes_chats_that_training_reads(decoder, tmp_path):
    path = tmp_path / "own.jsonl"
    seen = []
    written = synthesise(decoder, path, SMALL, on_chunk=seen.append)
    chats = lines(path)
    assert written == seen[-1] and written.tried == 48 and len(seen) == 3
    assert written.kept == len(chats) > 0 and written.kept + written.dropped + written.repeated == 48
    assert all([message["role"] for message in chat["messages"]] == ["user", "assistant"] for chat in chats)
    # Those that the limit cut say so.
    lengths = [len(decoder.encode(chat["messages"][1]["content"])) for chat in chats]
    assert any("unfinished" in chat for chat in chats)
    assert all(length < 12 for chat, length in zip(chats, lengths, strict=True) if "unfinished" not in chat)
    documents = read_documents(path, decoder.target.tokenizer)
    assert len(documents) == len(chats) and any(any(document.learnt) for document in documents)


def test_answers_are_the_targets_own(decoder, tmp_path):
    """A greedy answer is what plain decoding says to that chat."""
    path = tmp_path / "own.jsonl"
    synthesise(decoder, path, Writing(samples=16, user_tokens=60, answer_tokens=12, batch_size=4, temperatures=(0.0,)))
    for chat in lines(path)[:4]:
        answer = decoder.generate(chat["messages"][:1], max_new_tokens=12)
        assert answer.text == chat["messages"][1]["content"]


def test_a_run_that_is_stopped_gives_the_same_file(decoder, tmp_path):
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    synthesise(decoder, whole, SMALL)

    def stop(_: Written) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        synthesise(decoder, parts, SMALL, on_chunk=stop)
    with open(parts, "ab") as file:
        file.write(b'{"messages": [{"ro')  # as if killed while writing
    written = synthesise(decoder, parts, SMALL)
    assert parts.read_bytes() == whole.read_bytes() and written.tried == 48
    assert synthesise(decoder, parts, SMALL) == written  # there is nothing left to do


def test_a_run_that_is_killed_before_its_first_note_goes_on(decoder, tmp_path, monkeypatch):
    whole, parts = tmp_path / "whole.jsonl", tmp_path / "parts.jsonl"
    few = replace(SMALL, samples=8, batch_size=2)
    synthesise(decoder, whole, few)

    def killed(_: int) -> None:
        if parts.exists():
            raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr("draftwood.training.synthesis.os.fsync", killed)
        synthesise(decoder, parts, few)
    assert parts.exists()
    synthesise(decoder, parts, few)
    assert parts.read_bytes() == whole.read_bytes()


def test_neighbours_in_a_batch_do_not_matter(decoder, tmp_path):
    files = [tmp_path / f"{size}.jsonl" for size in (1, 4)]
    for file, size in zip(files, (1, 4), strict=True):
        synthesise(decoder, file, replace(SMALL, samples=12, batch_size=size, top_p=0.9))
    assert files[0].read_bytes() == files[1].read_bytes() != b""
    synthesise(decoder, tmp_path / "all.jsonl", replace(SMALL, samples=12, top_p=1.0))
    assert (tmp_path / "all.jsonl").read_bytes() != files[0].read_bytes()


def test_another_seed_writes_other_texts(decoder, tmp_path):
    one, many = tmp_path / "one.jsonl", tmp_path / "many.jsonl"
    synthesise(decoder, one, Writing(samples=8, user_tokens=60, answer_tokens=12, batch_size=2))
    synthesise(decoder, many, Writing(samples=8, user_tokens=60, answer_tokens=12, batch_size=2, seed=1))
    assert one.read_bytes() != many.read_bytes()


def test_prompts_that_differ_in_their_history_alone_are_all_answered(decoder, tmp_path):
    ask = {"role": "user", "content": "w1"}
    prompts = [[ask], [{"role": "system", "content": "w5"}, ask], [ask, {"role": "assistant", "content": "w6"}, ask]]
    few = Writing(samples=3, answer_tokens=20, batch_size=1, temperatures=(1.0,))
    written = synthesise(decoder, tmp_path / "answers.jsonl", few, prompts=prompts)
    assert written.repeated == 0


def test_what_a_user_has_said_before_is_left_out(decoder, tmp_path):
    path = tmp_path / "answers.jsonl"
    prompts = [[{"role": "user", "content": words}] for words in ("w1", "w2", " W1 ", "w3", "w2")]
    few = Writing(samples=2, answer_tokens=20, batch_size=1, temperatures=(1.0,))
    synthesise(decoder, path, few, prompts=prompts)
    written = synthesise(decoder, path, replace(few, samples=5), prompts=prompts)  # what an earlier run wrote counts
    said = [chat["messages"][0]["content"] for chat in lines(path)]
    assert said == ["w1", "w2", "w3"] and (written.kept, written.repeated, written.dropped) == (3, 2, 0)


def test_user_turns_that_do_not_end_are_dropped(decoder, tmp_path):
    path = tmp_path / "own.jsonl"
    written = synthesise(decoder, path, Writing(samples=64, user_tokens=12, answer_tokens=4, batch_size=16))
    lengths = [len(decoder.encode(chat["messages"][0]["content"])) for chat in lines(path)]
    assert written.dropped > 0 and lengths and max(lengths) < 12


def test_texts_end_with_the_context(tmp_path):
    config = llama_config(layers=1, heads=2)
    config.max_position_embeddings = 24
    short = Decoder(Target(tiny_model(config), chat_tokenizer()), rule="coupled")
    prompts = [[{"role": "user", "content": f"w1 w2 w{index}"}] for index in range(8)]
    written = synthesise(
        short, tmp_path / "a.jsonl", Writing(samples=8, answer_tokens=100, batch_size=4), prompts=prompts
    )
    cut = [chat for chat in lines(tmp_path / "a.jsonl") if "unfinished" in chat]
    assert written.tried == 8 and cut  # 24 tokens less those of the prompt, and no more
    assert all(len(short.encode(chat["messages"][1]["content"])) <= 24 - 6 for chat in cut)


def test_several_turns(decoder, tmp_path):
    path = tmp_path / "own.jsonl"
    synthesise(decoder, path, Writing(samples=24, turns=2, user_tokens=80, answer_tokens=80, batch_size=8))
    roles = [[message["role"] for message in chat["messages"]] for chat in lines(path)]
    assert ["user", "assistant"] * 2 in roles
    cut = [chat for chat in lines(path) if len(chat["messages"]) == 2]
    assert all(chat["unfinished"] for chat in cut)


def test_given_prompts_are_answered_in_order(decoder, tmp_path):
    path = tmp_path / "answers.jsonl"
    prompts = [[{"role": "user", "content": f"w{index}"}] for index in range(6)]
    written = synthesise(decoder, path, Writing(samples=5, answer_tokens=8, batch_size=2), prompts=prompts)
    said = [chat["messages"][0]["content"] for chat in lines(path)]
    assert written.tried == 5 and written.kept == len(said)
    assert said == sorted(said) and set(said) <= {f"w{index}" for index in range(5)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"samples": 0}, "samples must be"),
        ({"turns": 0}, "turns must be"),
        ({"temperatures": (-1.0,)}, "temperature must be >= 0, got -1.0"),
        ({"temperatures": ()}, "at least one temperature"),
        ({"top_p": 0.0}, r"top_p must be in \(0, 1\], got 0.0"),
    ],
)
def test_settings_that_cannot_work(options, message):
    with pytest.raises(InvalidRequest, match=message):
        Writing(**{"samples": 1, **options})


def test_files_that_cannot_be_gone_on_with(decoder, tmp_path):
    stranger = tmp_path / "mine.jsonl"
    stranger.write_text("precious\n")
    with pytest.raises(InvalidRequest, match="exists and was not written here"):
        synthesise(decoder, stranger, SMALL)
    assert stranger.read_text() == "precious\n"
    path = tmp_path / "own.jsonl"
    few = Writing(samples=4, user_tokens=60, answer_tokens=4, batch_size=4)
    synthesise(decoder, path, few)
    with pytest.raises(InvalidRequest, match=r"begun with other settings: \{'seed': 0\}"):
        synthesise(decoder, path, Writing(samples=4, user_tokens=60, answer_tokens=4, batch_size=4, seed=1))
    (tmp_path / "own.jsonl.progress").write_text("{")
    with pytest.raises(InvalidRequest, match="cannot be gone on with"):
        synthesise(decoder, path, few)


def test_it_needs_a_chat_template(decoder, tmp_path):
    bare = Decoder(Target(decoder.target.model, chat_tokenizer(None)))
    with pytest.raises(InvalidRequest, match="no chat template"):
        synthesise(bare, tmp_path / "own.jsonl", SMALL)
    for prompt in ([], [{"role": "system", "content": "w1"}]):
        with pytest.raises(InvalidRequest, match=r"prompts\[0\] must end with a user turn"):
            synthesise(decoder, tmp_path / "own.jsonl", SMALL, prompts=[prompt])
    with pytest.raises(InvalidRequest, match="prompts is empty"):
        synthesise(decoder, tmp_path / "own.jsonl", SMALL, prompts=[])
