"""Tiny heads for a tiny target: untrained ones of every kind, one that learnt a little, and their plain arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from transformers import DynamicCache

from draftwood.core.target import Target
from draftwood.drafters.eagle.config import layer_config
from draftwood.drafters.eagle.network import Eagle3Head, EagleHead, Head, unroll_mask
from tests.conftest import VOCABULARY, llama_config, tiny_model

PROMPTS = [[5, 6, 7, 8], [9], [10, 11, 12, 13, 14, 15, 16], [17, 18]]
REDUCED = [token for token in range(VOCABULARY) if token % 3 != 1]


def sure_target() -> Target:
    """Three blocks, as sure of itself as real models are."""
    model = tiny_model(llama_config(layers=3, heads=4))
    model.get_output_embeddings().weight.data.mul_(4.0)
    return Target(model)


def make_head(kind: str, target: Target, seed: int = 0) -> Head:
    """Returns an untrained head in float64, not attached; all but its scale is as in a real one."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        config, wide = (
            layer_config(target),
            layer_config(target, rope_parameters={"rope_type": "default", "rope_theta": 77.0}),
        )
        three: dict[str, Any] = {"layers": (2, 1, 3)}
        head: Head = {
            "eagle": lambda: EagleHead(wide),
            "eagle, no bias, reduced": lambda: EagleHead(config, fc_bias=False, draft_tokens=REDUCED),
            "eagle3": lambda: Eagle3Head(wide, **three),
            "eagle3, reduced": lambda: Eagle3Head(
                config, **three, draft_tokens=REDUCED[::-1], norm_before_residual=True
            ),
            "eagle3.1": lambda: Eagle3Head(config, **three, draft_tokens=REDUCED, fc_norm=True, norm_output=True),
            "eagle3, narrow": lambda: Eagle3Head(
                layer_config(target, hidden_size=16, num_attention_heads=2),
                layers=(0, 3),
                target_hidden_size=target.config.hidden_size,
                norm_before_fc=True,
                own_embedding=True,
            ),
        }[kind]()
    for name, parameter in head.named_parameters():
        if "norm" in name:  # as trained ones: not all ones
            generator = torch.Generator().manual_seed(len(name))
            parameter.data = 0.5 + torch.rand(parameter.shape, generator=generator)
        elif parameter.dim() > 1:
            parameter.data.mul_(3.0)
    return head.double()


KINDS = ["eagle", "eagle, no bias, reduced", "eagle3", "eagle3, reduced", "eagle3.1", "eagle3, narrow"]


def greedy_texts(target: Target, length: int, prompts: Sequence[Sequence[int]] = PROMPTS) -> Tensor:
    """Returns what the target makes of the prompts, [prompts, length]."""
    model: Any = target.model
    options: dict[str, Any] = {"do_sample": False, "eos_token_id": [], "pad_token_id": 0}
    return torch.cat(
        [model.generate(torch.tensor([p]), max_new_tokens=length - len(p), **options) for p in map(list, prompts)]
    )


def true_features(head: Head, target: Target, texts: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the features of every token, joined, and the target's logits, straight from the model."""
    with torch.no_grad():
        output = target.model(texts, output_hidden_states=True)
    states = output.hidden_states  # the last one is normed; the last block's own output is captured by hand
    entries = dict(enumerate(states[:-1]))
    with torch.no_grad():
        last = target.blocks[-1]
        rotary = target.model.model.rotary_emb(states[-2], torch.arange(texts.shape[1])[None])
        entries[len(states) - 1] = last(states[-2], position_embeddings=rotary, attention_mask=None)
    entries["last"] = states[-1]
    return torch.cat([entries[name] for name in head.feature_names], -1), output.logits


def unrolled(head: Head, texts: Tensor, features: Tensor, steps: int) -> list[Tensor]:
    """Logits of every step of EAGLE-3's training-time test, [batch, columns, draft vocabulary] each.

    Column t of step s says what follows token t + 1 + s; where that is past the end the token is a stand-in.
    """
    ids = F.pad(texts[:, 1:], (0, steps))
    columns = texts.shape[1] - 1
    hidden, cache, results = head.fuse(features[:, :-1]), DynamicCache(), []
    for step in range(steps):
        positions = torch.arange(columns)[None] + step
        hidden = head(ids[:, step : step + columns], hidden, positions, unroll_mask(columns, step), cache)
        results.append(head.logits(hidden))
    return results


def train(head: Head, target: Target, texts: Tensor, rounds: int, steps: int = 2) -> list[float]:
    """Teaches an attached head what the target says at these texts; returns the losses."""
    features, logits = true_features(head, target, texts)
    tokens = head.draft_tokens
    labels = (logits if tokens is None else logits[..., tokens]).argmax(-1)
    optimizer = torch.optim.Adam(head.parameters(), lr=1e-2)
    losses = []
    for _ in range(rounds):
        loss = torch.zeros((), dtype=torch.float64)
        for step, drafted in enumerate(unrolled(head, texts, features, steps)):
            wanted = labels[:, 1 + step :]
            loss = loss + F.cross_entropy(drafted[:, : wanted.shape[1]].flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def trained_head(kind: str, target: Target) -> Head:
    """Returns a head that knows the beginnings of what the target makes of `PROMPTS`, and little else."""
    head = make_head(kind, target).attach(target)
    for name, parameter in head.named_parameters():
        if "norm" not in name:
            parameter.data.div_(3.0)
    train(head, target, greedy_texts(target, 16), 25)
    return head.eval()


class Reference:
    """Draft logits behind a text and drafted paths, column by column from the weights alone.

    Every feature is the target's, read from scratch; only the columns of a path are read beside the head's outputs.
    """

    def __init__(self, head: Head, target: Target, text: Sequence[int]) -> None:
        self._head, self._target = head, target
        self._w = {name: value.detach() for name, value in head.state_dict().items()}
        features = true_features(head, target, torch.tensor([list(text)]))[0][0, :-1]
        keys: list[Tensor] = []
        values: list[Tensor] = []
        hidden = torch.zeros(0)
        for position, token in enumerate(text[1:]):
            fused = _fused(head, self._w, features[position])
            hidden = _column(head, target, self._w, token, fused, position, keys, values)
        self._known: dict[tuple[int, ...], tuple[Tensor, list[Tensor], list[Tensor]]] = {(): (hidden, keys, values)}

    def logits(self, path: Sequence[int] = ()) -> Tensor:
        """Returns the logits after the text and `path`, [vocabulary]."""
        return _scored(self._head, self._target, self._w, self._state(tuple(path))[0])

    def _state(self, path: tuple[int, ...]) -> tuple[Tensor, list[Tensor], list[Tensor]]:
        if path not in self._known:
            hidden, keys, values = self._state(path[:-1])
            keys, values = [*keys], [*values]
            hidden = _column(self._head, self._target, self._w, path[-1], hidden, len(keys), keys, values)
            self._known[path] = hidden, keys, values
        return self._known[path]


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean() + eps).sqrt() * weight


def _fused(head: Head, w: dict[str, Tensor], feature: Tensor) -> Tensor:
    if isinstance(head, EagleHead):
        return feature
    eps = head.config.rms_norm_eps
    if "input_norm.weight" in w:
        feature = _norm(feature, w["input_norm.weight"], eps)
    if "fc_norm.0.weight" in w:
        parts = feature.split(head.target_width)
        feature = torch.cat([_norm(part, w[f"fc_norm.{i}.weight"], eps) for i, part in enumerate(parts)])
    return w["fc.weight"] @ feature


def _column(
    head: Head,
    target: Target,
    w: dict[str, Tensor],
    token: int,
    hidden: Tensor,
    position: int,
    keys: list[Tensor],
    values: list[Tensor],
) -> Tensor:
    eps = head.config.rms_norm_eps
    table = w.get("embed_tokens.weight", target.model.get_input_embeddings().weight.detach())
    embedded = table[token]
    if isinstance(head, EagleHead):
        layer = "layers.0."
        residual = x = w["fc.weight"] @ torch.cat([embedded, hidden]) + w.get("fc.bias", torch.zeros(()))
    else:
        layer = "midlayer."
        normed = _norm(hidden, w[layer + "hidden_norm.weight"], eps)
        residual = normed if head.norm_before_residual else hidden
        x = torch.cat([_norm(embedded, w[layer + "input_layernorm.weight"], eps), normed])
    residual = residual + _attention(head, w, layer + "self_attn.", x, position, keys, values)
    x = _norm(residual, w[layer + "post_attention_layernorm.weight"], eps)
    gate, up, down = (w[f"{layer}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    output = residual + down @ (F.silu(gate @ x) * (up @ x))
    return _norm(output, w["norm.weight"], eps) if getattr(head, "norm_output", False) else output


def _attention(
    head: Head, w: dict[str, Tensor], name: str, x: Tensor, position: int, keys: list[Tensor], values: list[Tensor]
) -> Tensor:
    config = head.config
    width, groups = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    q, k, v = ((w[f"{name}{part}_proj.weight"] @ x).view(-1, width) for part in "qkv")
    angles = position * config.rope_parameters["rope_theta"] ** (-torch.arange(0, width, 2).double() / width)

    def turned(vectors: Tensor) -> Tensor:
        first, second = vectors.chunk(2, -1)
        return torch.cat(
            [first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()], -1
        )

    keys.append(turned(k))
    values.append(v)
    heads = []
    for index, query in enumerate(turned(q)):
        scores = torch.stack([key[index // groups] @ query for key in keys]) / width**0.5
        heads.append(scores.softmax(0) @ torch.stack([value[index // groups] for value in values]))
    return w[name + "o_proj.weight"] @ torch.cat(heads)


def _scored(head: Head, target: Target, w: dict[str, Tensor], hidden: Tensor) -> Tensor:
    tokens = torch.arange(VOCABULARY) if head.draft_tokens is None else head.draft_tokens
    if isinstance(head, EagleHead):
        logits = (target.model.get_output_embeddings().weight.detach() @ hidden)[tokens]
    else:
        normed = hidden if head.norm_output else _norm(hidden, w["norm.weight"], head.config.rms_norm_eps)
        logits = w["lm_head.weight"] @ normed
    everywhere = torch.full((VOCABULARY,), -torch.inf, dtype=torch.float64)
    everywhere[tokens] = logits
    return everywhere


def finite_close(got: Tensor, expected: Tensor) -> None:
    """Llama's norms round to float32; everything else is float64."""
    assert torch.equal(got.isinf(), expected.isinf())
    torch.testing.assert_close(
        got.double().nan_to_num(neginf=0.0), expected.nan_to_num(neginf=0.0), rtol=1e-4, atol=1e-4
    )
