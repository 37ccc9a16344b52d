"""Inkling's multi-token-prediction head in plain torch around transformers' decoder layer, and checkpoints with it.

Positions follow published implementations. At position p, layer i reads the output of layer i - 1 for p and the
embedding of token p + 1 + i. The tensors are skipped by transformers.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.tiny import make_checkpoint, make_model

HEAD = {"num_mtp_layers": 3, "mtp_local_layer_ids": [0, 2]}
"""Two layers with windows, and one that attends to all tokens between them."""


class ChainLayer(nn.Module):
    """Modules by their published names."""

    def __init__(self, config: Any, index: int, layer_class: type, norm_class: type) -> None:
        super().__init__()
        size = config.hidden_size
        self.hidden_norm, self.embed_norm = (norm_class(size, config.rms_norm_eps) for _ in range(2))
        self.input_proj = nn.Linear(2 * size, size, bias=False)
        self.transformer_block = layer_class(config, index)
        self._window = config.sliding_window_size if config.layer_types[index] == "hybrid_sliding" else None

    @torch.no_grad()
    def forward(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """``[n, hidden_size]`` twice -> ``[n, hidden_size]``."""
        x = self.input_proj(torch.cat([self.hidden_norm(hidden), self.embed_norm(embedded)], -1))[None]
        mask = torch.full((x.shape[1], x.shape[1]), -math.inf, dtype=x.dtype)
        visible = torch.ones_like(mask, dtype=torch.bool).tril()
        if self._window is not None:
            visible &= ~visible.tril(-self._window)
        block: Tensor = self.transformer_block(x, attention_mask=mask.masked_fill(visible, 0.0)[None, None])
        return block[0]


class ChainReference(nn.Module):
    """The head of a model with random weights, and the model."""

    def __init__(self, model: Any, seed: int = 5) -> None:
        super().__init__()
        text = getattr(model.model, "language_model", model.model)
        config = model.config.get_mtp_config()
        config._attn_implementation = "eager"
        kinds = type(text.layers[0]), type(text.norm)
        self.layers = nn.ModuleList(ChainLayer(config, i, *kinds) for i in range(config.num_mtp_layers))
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=parameter.shape[-1] ** -0.5, generator=generator)
                else:
                    parameter.copy_(torch.empty_like(parameter).uniform_(0.7, 1.3, generator=generator))
        self.model, self._text = model, (text,)

    @torch.no_grad()
    def outputs(self, tokens: list[int], count: int) -> list[Tensor]:
        """The output of each layer after ``count`` tokens of the model: ``[count - i, hidden_size]`` of layer i."""
        hidden = self._text[0](torch.tensor([tokens[:count]])).last_hidden_state[0]
        embedded = self._text[0].embed_tokens(torch.tensor(tokens[: count + 1]))
        found = []
        for index, layer in enumerate(self.layers):
            hidden = layer(embedded[1 + index :], hidden[: count - index])
            found.append(hidden)
        return found

    @torch.no_grad()
    def logits(self, hidden: Tensor) -> Tensor:
        """``[n, hidden_size] -> [n, vocab_size]``, without a norm."""
        logits: Tensor = self.model.lm_head(hidden / self.model.config.get_text_config().logits_mup_width_multiplier)
        return logits[:, : self.model.config.get_text_config().unpadded_vocab_size]

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """Greedy drafts for what follows ``tokens``, of which the model has computed all but the last."""
        hidden, following = self._text[0](torch.tensor([tokens[:-1]])).last_hidden_state[0], list(tokens[1:])
        for index in range(count):
            embedded = self._text[0].embed_tokens(torch.tensor(following[index:]))
            hidden = self.layers[index](embedded, hidden)
            following.append(int(self.logits(hidden[-1:]).argmax()))
        return following[len(tokens) - 1 :]

    def published(self, *, original: bool) -> dict[str, Tensor]:
        """The tensors under transformers' names, or under those of published files."""
        tensors = {f"model.mtp.{name}": x.float() for name, x in self.layers.state_dict(prefix="layers.").items()}
        return _original(tensors) if original else tensors


_ORIGINAL = {
    ".self_attn.": ".attn.", ".q_proj.": ".wq_du.", ".k_proj.": ".wk_dv.", ".v_proj.": ".wv_dv.", ".r_proj.": ".wr_du.",
    ".o_proj.": ".wo_ud.", "_sconv.conv1d.": "_sconv.", ".input_layernorm.": ".attn_norm.",
    ".post_attention_layernorm.": ".mlp_norm.", ".mlp.down_proj.": ".mlp.w2_md.",
}  # fmt: skip


def _original(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        for ours, theirs in _ORIGINAL.items():
            name = name.replace(ours, theirs)
        if ".up_proj." in name:
            continue
        if ".gate_proj." in name:  # rows of both in turn
            up = tensors[name.replace(".gate_proj.", ".up_proj.")]
            name, tensor = name.replace(".gate_proj.", ".w13_dn."), torch.stack([tensor, up], dim=1).flatten(0, 1)
        found[name] = tensor
    return found


def make_chain_checkpoint(arch: str, path: Path, *, repeats: bool = False, **overrides: Any) -> tuple[Path, Any]:
    """A tiny random Inkling with a head, and the reference of both in float64.

    Args:
        repeats: layers add little, so that a token mostly follows from the one before, and the head is mostly right.
    """
    with_tokenizer = overrides.pop("with_tokenizer", False)
    folder = make_checkpoint(arch, path, with_tokenizer=with_tokenizer, **HEAD | overrides)
    if with_tokenizer:
        overrides |= {"vocab_size": json.loads((folder / "config.json").read_text())["vocab_size"]}
    head = ChainReference(make_model(arch, **HEAD | overrides))
    file = folder / "model.safetensors"
    tensors = load_file(file) | head.published(original=arch.endswith("ForConditionalGeneration"))
    if repeats:
        layers = {f"model.mtp.{name}": x for name, x in head.named_parameters() if name.startswith("layers.")}
        own = dict(head.model.named_parameters()) | layers
        assert own.keys() <= tensors.keys(), "a text model alone"
        for each in (tensors, own):
            _repeat(each)
    save_file({name: x.contiguous() for name, x in tensors.items()}, file, metadata={"format": "pt"})
    return folder, head.double()


@torch.no_grad()
def _repeat(tensors: Mapping[str, Tensor]) -> None:
    norm = next(x for name, x in tensors.items() if name.endswith("model.norm.weight"))
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
            tensor.mul_(0.3 if ".mtp." in name else 0.05)  # the head's drafts follow from its states too
        if name.endswith("input_proj.weight"):  # the embedding alone
            tensor.copy_(torch.eye(len(tensor), 2 * len(tensor)).roll(len(tensor), 1))
        if ".mtp." in name and name.endswith(".embed_norm.weight"):
            tensor.copy_(norm)
