"""Engines that speculate, beside ones that do not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.models.mtp_chain_reference import make_chain_checkpoint
from tests.models.mtp_reference import make_mtp_checkpoint
from tests.tiny import make_checkpoint
from weft import LLM, CompletionOutput, SamplingParams

MAX_DRAFTS = 4
CONFIG = {"method": "ngram", "num_speculative_tokens": MAX_DRAFTS, "prompt_lookup_min": 1, "prompt_lookup_max": 3}

Outputs = dict[tuple[tuple[int, ...], int], list[int]]


@dataclass
class Case:
    """Prompts with their parameters; each has a seed of its own."""

    prompts: Sequence[list[int]]
    params: Sequence[SamplingParams]

    def run(self, llm: LLM) -> list[CompletionOutput]:
        prompts: Any = [{"prompt_token_ids": prompt} for prompt in self.prompts]
        return [output.outputs[0] for output in llm.generate(prompts, list(self.params), use_tqdm=False)]

    def known(self, completions: Sequence[CompletionOutput]) -> Outputs:
        """Return the outputs that ``tests.drafters.FromOutputs`` reads."""
        pairs = zip(self.prompts, self.params, completions, strict=True)
        return {(tuple(prompt), params.seed or 0): list(done.token_ids) for prompt, params, done in pairs}


def make_repeating_checkpoint(arch: str, path: Path, *, head: bool = False, **overrides: Any) -> Path:
    """A tiny model whose layers add little: a token mostly follows from the one before it, and greedy texts soon go in
    circles. ``head``: with a head that does the same, and so is mostly right."""
    if head and arch.startswith("Inkling"):
        return make_chain_checkpoint(arch, path, with_tokenizer=True, repeats=True, **overrides)[0]
    make = make_mtp_checkpoint if head else make_checkpoint
    make(arch, path, with_tokenizer=True, **overrides)
    tensors = load_file(path / "model.safetensors")
    for name, tensor in tensors.items():
        if name.removesuffix(".weight").endswith(SMALL):
            tensor.mul_(0.05)
        if name.endswith("ple.norm_conv.weight"):  # a weight of -1 is a factor of zero
            tensor.fill_(-0.95)
    mixer = "hyper_connection_mixer."
    if head and any(mixer in name for name in tensors):
        tensors["mtp.fc_embedding.weight"] = torch.eye(len(tensors["mtp.fc_embedding.weight"]))
        tensors["mtp.fc_hidden.weight"].zero_()
        tensors["mtp.pre_fc_norm_embedding.weight"].zero_()
        own = {name: tensor for name, tensor in tensors.items() if mixer in name and not name.startswith("mtp.")}
        tensors |= {f"mtp.{mixer}{name.partition(mixer)[2]}": tensor.clone() for name, tensor in own.items()}
    elif head:
        joint, own, embedding = (
            next(name for name in tensors if name.endswith((f"mtp.{part}.weight", f".{deepseek}.weight")))
            for part, deepseek in (("fc", "eh_proj"), ("norm", "shared_head.norm"), ("pre_fc_norm_embedding", "enorm"))
        )
        size = len(tensors[own])
        tensors[joint] = torch.eye(size, 2 * size)  # the embedding alone
        (norm,) = (tensor for name, tensor in tensors.items() if name in FINAL_NORMS)
        tensors[own] = norm.clone()
        tensors[embedding].fill_(1.0 if embedding.endswith("enorm.weight") else 0.0)  # the others are centred at zero
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


SMALL = ("o_proj", "out_proj", "attention.dense", "down_proj", "ple.value_proj")
"""Projections of layers' outputs."""
FINAL_NORMS = ("model.norm.weight", "model.language_model.norm.weight")


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    folders: dict[str, Path] = {}

    def get(arch: str) -> Path:
        if arch not in folders:
            folders[arch] = make_checkpoint(arch, tmp_path_factory.mktemp(arch), with_tokenizer=True)
        return folders[arch]

    return get
