"""A text in pieces is the text of all tokens, however the pieces are cut, and no piece decodes what is long past."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from draftwood.core.streaming import TextStream

WORDS = ["a", "b", "cat", "\u2581", "\u2581the", "\u2581mat", "\u2581\u2581", "é", "猫", "!"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
EMOJI = list("héé 猫👩‍💻!".encode())


def byte_level() -> Any:
    """A tokenizer whose tokens are bytes, as those of GPT-2's family come down to."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: place for place, letter in enumerate(alphabet)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer), [alphabet.index(letter) for letter in letters()]


def letters() -> list[str]:
    table = Tokenizer(models.BPE({}, []))
    table.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return list(table.pre_tokenizer.pre_tokenize_str(bytes(EMOJI).decode())[0][0])


def metaspace() -> Any:
    """One whose words begin with a space that a text drops at its start, and which spells the rest in bytes."""
    vocabulary = {word: place for place, word in enumerate([*WORDS, *BYTES])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>"), [len(WORDS) + byte for byte in EMOJI]


TOKENIZERS = {"bytes": byte_level(), "words and bytes": metaspace()}


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(deadline=None, max_examples=300)
@given(data=st.data())
def test_pieces_join_to_the_whole(name, data):
    tokenizer, emoji = TOKENIZERS[name]
    valid = st.sampled_from([emoji, emoji[1:3], emoji[6:9]]) if name == "bytes" else st.just(emoji)
    few = st.lists(st.integers(0, min(len(tokenizer), 30) - 1) | st.just(len(tokenizer) - 1), max_size=6)
    tokens = [token for part in data.draw(st.lists(valid | few, max_size=6)) for token in part]
    cuts = sorted(data.draw(st.sets(st.integers(0, len(tokens)), max_size=12)) | {len(tokens)})
    stream, text, start = TextStream(tokenizer), "", 0
    for cut in cuts:
        text += stream.push(tokens[start:cut], complete=cut == len(tokens))
        start = cut
    assert text == tokenizer.decode(tokens, skip_special_tokens=True)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_character_of_several_tokens_comes_whole(name):
    tokenizer, emoji = TOKENIZERS[name]
    stream = TextStream(tokenizer)
    pieces = [stream.push([token], complete=False) for token in emoji]
    assert "".join(pieces) == bytes(EMOJI).decode()
    assert all(len(piece) <= 1 and "\ufffd" not in piece for piece in pieces)


def test_a_long_text_is_not_decoded_again():
    tokenizer, _ = TOKENIZERS["words and bytes"]
    read = []

    class Counting:
        def decode(self, tokens: list[int], **named: Any) -> str:
            read.append(len(tokens))
            return str(tokenizer.decode(tokens, **named))

    stream = TextStream(Counting())
    for _ in range(200):
        stream.push([4, 5], complete=False)
    assert max(read) <= 8


def test_without_a_tokenizer_there_is_no_text():
    assert TextStream(None).push([1, 2], complete=True) == ""
