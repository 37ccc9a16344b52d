"""The multi-token-prediction head in plain torch around transformers' decoder layer, and checkpoints that contain it.

transformers skips the ``mtp.*`` tensors. This module computes the head of vLLM and SGLang: the normalised embedding of
the next token is concatenated with the normalised hidden state. Then follow ``fc``, one attention layer, the norm, and
the model's output head.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.tiny import make_checkpoint, make_model

QWEN4_EXP = ("Qwen4ExpForCausalLM", "Qwen4ExpForConditionalGeneration")


class ReferenceHead(nn.Module):
    """Random, with the layer of the model's last attention layer as a start."""

    def __init__(self, model: Any, seed: int = 5) -> None:
        super().__init__()
        text = getattr(model.model, "language_model", model.model)
        size = text.norm.weight.shape[0]
        attention = next(layer for layer in reversed(text.layers) if _is_full_attention(layer))
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (copy.deepcopy(text.norm) for _ in range(3))
        self.layers = nn.ModuleList([copy.deepcopy(attention)])
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            self.fc.weight.normal_(std=(2 * size) ** -0.5, generator=generator)
            for parameter in self.parameters():
                parameter.add_(torch.empty_like(parameter).uniform_(-0.05, 0.05, generator=generator))
        self._model, self._text = (model,), (text,)

    @torch.no_grad()
    def forward(self, next_ids: list[int], hidden: Tensor) -> Tensor:
        """``[n]`` tokens and ``[n, hidden]`` states of the tokens before them -> ``[n, hidden]``."""
        return self.run(self._text[0].embed_tokens(torch.tensor(next_ids)), hidden, torch.arange(len(next_ids))[None])

    @torch.no_grad()
    def run(self, embedded: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        """``[n, hidden]`` embedded tokens and states, and rotary positions ``[..., 1, n]`` -> ``[n, hidden]``."""
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)], -1))[None]
        mask = torch.full((1, 1, x.shape[1], x.shape[1]), -math.inf, dtype=x.dtype).triu(1)
        rotary = self._text[0].rotary_emb(x, positions)
        return self.norm(self.layers[0](x, position_embeddings=rotary, attention_mask=mask))[0]

    @torch.no_grad()
    def hidden_states(self, tokens: list[int]) -> Tensor:
        """The model's, of a text."""
        return self.states(lambda: self._text[0](torch.tensor([tokens])))

    def states(self, run: Callable[[], Any]) -> Tensor:
        """``[n, hidden]`` of a pass of the model: after the final norm."""
        states: Tensor = run().last_hidden_state[0]
        return states

    def output(self, hidden: Tensor) -> Tensor:
        """Return the output head's input, from a token's state ``[hidden]``."""
        return hidden

    @torch.no_grad()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """Greedy drafts for what follows ``tokens``, of which the model has computed all but the last."""
        hidden, following = self.hidden_states(tokens[:-1]), list(tokens[1:])
        found: list[int] = []
        for _ in range(count):
            left = self(following, hidden)[-1]
            found.append(int(self._model[0].lm_head(self.output(left)).argmax()))
            following, hidden = [*following, found[-1]], torch.cat([hidden, left[None]])
        return found

    def published(self) -> dict[str, Tensor]:
        """The tensors under their published names, one matrix per expert."""
        tensors: dict[str, Tensor] = {}
        for name, tensor in self.state_dict().items():
            prefix, _, last = f"mtp.{name}".rpartition(".")
            if not prefix.endswith("experts"):
                tensors[f"mtp.{name}"] = tensor
                continue
            parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
            for i, matrix in enumerate(tensor):
                for part, rows in zip(parts, matrix.chunk(len(parts)), strict=True):
                    tensors[f"{prefix}.{i}.{part}.weight"] = rows.contiguous()
        return tensors

    def published_as_a_layer(self) -> dict[str, Tensor]:
        """The tensors under DeepSeek-V3's names, as one more layer, with its copies of the embedding and the head."""
        parts = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm",
                 "norm": "shared_head.norm"}  # fmt: skip
        inside = "language_model." if hasattr(self._model[0].model, "language_model") else ""
        layer, tensors = f"model.{inside}layers.{len(self._text[0].layers)}", {}
        for name, tensor in self.published().items():
            own = name.removeprefix("mtp.").removesuffix(".weight")
            rest = f"{parts[own]}.weight" if own in parts else name.removeprefix("mtp.layers.0.")
            tensors[f"{layer}.{rest}"] = tensor
        embedding = self._text[0].embed_tokens.weight
        copies = {"word_embeddings.weight": embedding, "shared_head.head.weight": embedding}
        return tensors | {f"{layer}.{name}": tensor.detach().clone() for name, tensor in copies.items()}


class PlainReference(ReferenceHead):
    """The head of GLM-5.3: its layer has one residual stream, though the model has several."""

    def __init__(self, model: Any, seed: int = 5) -> None:
        super().__init__(model, seed)
        del self.layers[0].attn_hc, self.layers[0].ffn_hc

    @torch.no_grad()
    def run(self, embedded: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)], -1))[None]
        layer, visible = self.layers[0], torch.ones(x.shape[:2], dtype=torch.bool)
        x = x + layer.self_attn(layer.input_layernorm(x), attention_mask=visible)[0]
        return self.norm(x + layer.mlp(layer.post_attention_layernorm(x)))[0]


class StreamsReference(ReferenceHead):
    """The head of Qwen4-Exp, which reads and returns residual streams. One norm reads all streams, ``fc_hidden`` maps
    each stream, and the embedding is added to each. An attention layer follows. A mixer of the head's own runs before
    the model's output head."""

    def __init__(self, model: Any, seed: int = 5) -> None:
        nn.Module.__init__(self)
        text = getattr(model.model, "language_model", model.model)
        config, attention = text.config, next(layer for layer in reversed(text.layers) if _is_full_attention(layer))
        size, count, norm = config.hidden_size, config.hc_count, type(attention.self_attn.q_norm)
        self.pre_fc_norm_embedding = norm(size, eps=config.rms_norm_eps)
        self.pre_fc_norm_hidden = norm(size * count, eps=config.rms_norm_eps)
        self.fc_embedding, self.fc_hidden = (nn.Linear(size, size, bias=False) for _ in range(2))
        self.layers = nn.ModuleList([copy.deepcopy(attention)])
        self.layers[0].ple = None
        self.hyper_connection_mixer = copy.deepcopy(text.hyper_connection_mixer)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for linear in (self.fc_embedding, self.fc_hidden):
                linear.weight.normal_(std=size**-0.5, generator=generator)
            for parameter in self.parameters():
                parameter.add_(torch.empty_like(parameter).uniform_(-0.05, 0.05, generator=generator))
        self._model, self._text = (model,), (text,)

    @torch.no_grad()
    def run(self, embedded: Tensor, hidden: Tensor, positions: Tensor) -> Tensor:
        streams = self.fc_hidden(self.pre_fc_norm_hidden(hidden).unflatten(-1, (-1, embedded.shape[-1])))
        x = (streams + self.fc_embedding(self.pre_fc_norm_embedding(embedded))[:, None]).flatten(1)[None]
        mask = torch.full((1, 1, x.shape[1], x.shape[1]), -math.inf, dtype=x.dtype).triu(1)
        rotary = self._text[0].rotary_emb(x, positions.expand(3, 1, -1))
        return self.layers[0](x, position_embeddings=rotary, attention_mask=mask)[0]

    def published(self) -> dict[str, Tensor]:
        """With weights of mixers that nothing reads."""
        unread = torch.ones(3, self.pre_fc_norm_hidden.weight.shape[0])
        name = "hyper_connection_mixer.block_inject_weight.weight"
        return super().published() | {f"mtp.{name}": unread, f"model.{name}": unread.clone()}

    def states(self, run: Callable[[], Any]) -> Tensor:
        """The streams, before their mixer."""
        found: list[Tensor] = []
        mixer = self._text[0].hyper_connection_mixer
        hook = mixer.register_forward_pre_hook(lambda module, given: found.append(given[0]))
        run()
        hook.remove()
        return found[0][0]

    def output(self, hidden: Tensor) -> Tensor:
        return self.hyper_connection_mixer(hidden[None, None])[0, 0]


def _is_full_attention(layer: Any) -> bool:
    return hasattr(layer, "self_attn") and not type(layer.self_attn).__name__.endswith("DeltaAttention")


def make_mtp_checkpoint(arch: str, path: Path, **overrides: Any) -> tuple[Path, ReferenceHead]:
    """A tiny random checkpoint with a head, and the reference of both, which computes in float64."""
    folder = make_checkpoint(arch, path, **overrides)
    for name in ("with_tokenizer", "save_options"):
        overrides.pop(name, None)
    model = make_model(arch, **overrides)
    kinds = {"Glm5NextForConditionalGeneration": PlainReference} | dict.fromkeys(QWEN4_EXP, StreamsReference)
    head = kinds.get(arch, ReferenceHead)(model)
    file = folder / "model.safetensors"
    as_a_layer = arch in ("BailingHybridForCausalLM", "Glm5NextForConditionalGeneration")
    published = head.published_as_a_layer() if as_a_layer else head.published()
    save_file(load_file(file) | published, file, metadata={"format": "pt"})
    model.double()
    return folder, head.double()
