"""Which tokens of a conversation are learnt, under the chat templates that are about."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from draftwood.core.errors import InvalidRequest
from draftwood.training.chat import encode_chat
from tests.study.tiny import tiny_tokenizer

SPECIAL = ["<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>", "<|head|>", "<|eot|>", "<s>", "</s>"]

CHATML = (
    "{% for message in messages %}DEFAULT{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DEFAULT = (
    "{% if loop.first and message['role'] != 'system' %}{{ '<|im_start|>system\nBe good.<|im_end|>\n' }}{% endif %}"
)
INST = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ '<s>[INST] ' + message['content'] "
    "+ ' [/INST]' }}{% else %}{{ ' ' + message['content'] + ' </s>' }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ '<s>' }}{% for message in messages %}{% if message['role'] == 'system' %}{{ raise_exception('no system') }}"
    "{% endif %}{{ '<start_of_turn>' + ('model' if message['role'] == 'assistant' else message['role']) + '\n' "
    "+ message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
STRIPPED = (
    "{% for message in messages %}{{ '<|head|>' + message['role'] + '<|head|>\n\n' + message['content'] | trim "
    "+ '<|eot|>' }}{% endfor %}{% if add_generation_prompt %}{{ '<|head|>assistant<|head|>\n\n' }}{% endif %}"
)
REASONING = (  # earlier answers lose what is before </think>
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + (message['content'] if loop.last "
    "else message['content'].split('</think>')[-1]) + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

CHAT = [
    {"role": "user", "content": "hi there"},
    {"role": "assistant", "content": "  yes, user.\n"},
    {"role": "user", "content": "yes, user."},
    {"role": "assistant", "content": "no"},
]


def characters() -> PreTrainedTokenizerBase:
    tokenizer = tiny_tokenizer(chat=False)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL})
    return tokenizer


def merged() -> PreTrainedTokenizerBase:
    """A byte-level BPE whose tokens span words, blanks and line ends."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(
        ["yes, user.\n", "user\nhi there", "assistant\n\n", " no ", "[INST] hi [/INST]"], trainer
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.add_special_tokens({"additional_special_tokens": SPECIAL})
    return fast


def learnt_runs(tokenizer: PreTrainedTokenizerBase, piece: tuple[list[int], list[bool]]) -> list[str]:
    runs: list[list[int]] = []
    before = False
    for token, flag in zip(*piece, strict=True):
        if flag and not before:
            runs.append([])
        if flag:
            runs[-1].append(token)
        before = flag
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.parametrize("make", [characters, merged])
@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (CHATML.replace("DEFAULT", ""), ["  yes, user.\n<|im_end|>", "no<|im_end|>"]),
        (CHATML.replace("DEFAULT", DEFAULT), ["  yes, user.\n<|im_end|>", "no<|im_end|>"]),
        (INST, ["   yes, user.\n </s>", " no </s>"]),
        (GEMMA, ["yes, user.<end_of_turn>", "no<end_of_turn>"]),
        (STRIPPED, ["yes, user.<|eot|>", "no<|eot|>"]),
    ],
    ids=["chatml", "chatml with a system prompt", "inst", "gemma", "stripped"],
)
def test_exactly_the_assistants_tokens(make: Any, template: str, expected: list[str]):
    tokenizer = make()
    tokenizer.chat_template = template
    (piece,) = encode_chat(CHAT, tokenizer)
    assert tokenizer.decode(piece[0]) == tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert learnt_runs(tokenizer, piece) == expected
    # What is learnt follows on the very tokens that a decoder is given as the prompt.
    prompt = tokenizer.apply_chat_template(CHAT[:3], add_generation_prompt=True, return_dict=False)
    assert piece[0][: len(prompt)] == prompt
    assert piece[1][len(prompt)] and not piece[1][len(prompt) - 1]


@pytest.mark.parametrize("make", [characters, merged])
def test_a_template_that_rewrites_earlier_answers_gives_one_piece_each(make: Any):
    tokenizer = make()
    tokenizer.chat_template = REASONING
    chat = [dict(message) for message in CHAT]
    chat[1]["content"], chat[3]["content"] = "hm</think>yes", "oh</think>no"
    first, second = encode_chat(chat, tokenizer)
    assert tokenizer.decode(first[0]) == tokenizer.apply_chat_template(chat[:2], tokenize=False)
    assert tokenizer.decode(second[0]) == tokenizer.apply_chat_template(chat, tokenize=False)
    assert learnt_runs(tokenizer, first) == ["hm</think>yes<|im_end|>"]
    assert learnt_runs(tokenizer, second) == ["oh</think>no<|im_end|>"]


def test_an_unfinished_answer_has_no_end():
    tokenizer = characters()
    tokenizer.chat_template = GEMMA
    chat = [*CHAT[:3], {"role": "assistant", "content": "yes, us "}]
    (piece,) = encode_chat(chat, tokenizer, unfinished=True)
    assert learnt_runs(tokenizer, piece) == ["yes, user.<end_of_turn>", "yes, us"]
    assert tokenizer.decode(piece[0]).endswith("<start_of_turn>model\nyes, us")


def test_a_token_across_the_boundary_is_not_the_assistants():
    tokenizer = merged()
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (piece,) = encode_chat(
        [{"role": "user", "content": "ye"}, {"role": "assistant", "content": "s, user.\nno"}], tokenizer
    )
    assert tokenizer.decode(piece[0]) == "yes, user.\nno"
    assert tokenizer.decode([piece[0][0]]) != "ye"  # a merge hides the boundary
    assert not piece[1][0] and learnt_runs(tokenizer, piece)[0].endswith("no")


def test_an_opening_by_the_assistant_and_other_roles():
    tokenizer = characters()
    tokenizer.chat_template = CHATML.replace("DEFAULT", "")
    system = {"role": "system", "content": "Be."}
    (piece,) = encode_chat([system, *CHAT[:2]], tokenizer)
    assert learnt_runs(tokenizer, piece) == ["  yes, user.\n<|im_end|>"]
    (piece,) = encode_chat([{"role": "assistant", "content": "hi"}, *CHAT], tokenizer)
    assert learnt_runs(tokenizer, piece)[-2:] == ["  yes, user.\n<|im_end|>", "no<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "chat", "message"),
    [
        (CHATML, CHAT[:1], "no assistant turn, and so nothing to learn"),
        (None, CHAT, "no chat template"),
        (GEMMA, [{"role": "system", "content": "Be."}, *CHAT], "does not take this conversation: no system"),
        ("{{ messages | length }}", CHAT, "does not write message 2 behind the prompt"),
        ("{% for x in messages %}{{ x.nothing.content }}{% endfor %}", CHAT, "does not take this conversation"),
    ],
)
def test_refusals(template: str | None, chat: list[dict[str, str]], message: str):
    tokenizer = characters()
    tokenizer.chat_template = template
    with pytest.raises(InvalidRequest, match=message):
        encode_chat(chat, tokenizer)
