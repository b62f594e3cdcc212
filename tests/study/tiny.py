"""A tiny random model with a character tokenizer, saved to disk: what studies and the command line are tried on."""

from __future__ import annotations

import string
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.conftest import VOCABULARY, llama_config, tiny_model

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def tiny_tokenizer(chat: bool = True) -> PreTrainedTokenizerFast:
    characters = [*string.ascii_letters, *string.digits, *" \n.,:;?!()[]{}<>=+-*/'\"_#"][: VOCABULARY - len(SPECIAL)]
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    if chat:
        fast.chat_template = TEMPLATE
    return fast


def save_tiny(directory: Path, *, tokenizer: bool = True, chat: bool = True) -> Path:
    tiny_model(llama_config(layers=2, heads=4)).save_pretrained(directory)
    if tokenizer:
        tiny_tokenizer(chat).save_pretrained(directory)
    return directory


def save_with_texts(place: Path) -> Path:
    """Writes the model without a chat template, and `data.txt` to train on; returns the directory."""
    save_tiny(place, chat=False)
    (place / "data.txt").write_text("\n\n".join(["abc abd abc", "to be or not to be"] * 6))
    return place


def filled(tiny: Path, output: Path, arguments: list[str]) -> list[str]:
    """Returns a command line with MODEL, DATA and OUT replaced by their paths."""
    known = {"MODEL": str(tiny), "DATA": str(tiny / "data.txt"), "OUT": str(output)}
    return [known.get(one, one) for one in arguments]
