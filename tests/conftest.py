"""Fixtures for every test: tiny random models, and the packaged demo model. No test reaches the network."""

import os

# Read by huggingface_hub when it is first imported.
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from transformers import AutoModelForCausalLM as Auto
from transformers import (
    GPT2Config,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from draftwood.core.loading import load_model

VOCABULARY = 96


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # one of several processes: a thread each
        torch.set_num_threads(1)


def tiny_model(config: PretrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Returns a random float64 model: equality to 1e-9 may be asked for, and greedy ties do not occur."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Auto.from_config(config, dtype=torch.float64)
    for parameter in model.parameters():
        if parameter.dim() > 1:  # the usual spread of 0.02 leaves nearly flat distributions
            parameter.data.mul_(5.0)
    return model.eval()


def llama_config(layers: int, heads: int) -> LlamaConfig:
    """Returns heads of width 8; two of them share keys and values."""
    return LlamaConfig(
        vocab_size=VOCABULARY,
        num_hidden_layers=layers,
        hidden_size=8 * heads,
        intermediate_size=12 * heads,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


@pytest.fixture(scope="session")
def tiny_llama() -> PreTrainedModel:
    """Three layers of width 32."""
    return tiny_model(llama_config(layers=3, heads=4))


@pytest.fixture(scope="session")
def tinier_llama() -> PreTrainedModel:
    """One layer of width 16 and the vocabulary of `tiny_llama`: its draft model."""
    return tiny_model(llama_config(layers=1, heads=2), seed=1)


@pytest.fixture(scope="session")
def tiny_gpt2() -> PreTrainedModel:
    """Learned absolute positions, no rotary embedding."""
    return tiny_model(GPT2Config(vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, eos_token_id=2))


@pytest.fixture(scope="session")
def smollm2() -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """SmolLM2-135M-Instruct and its tokenizer, in its own bfloat16. Never skipped: it installs with the tests."""
    return load_model("smollm2", dtype="bfloat16")
