"""The shape of the bundled model, and the folder it is published in.

Owns config.json, generation_config.json and the layout of model.safetensors (bfloat16, one tensor per expert,
as the published Qwen3-Next checkpoints have it). Knows nothing of training.
Run `python -m demo.geometry` for a folder with random weights, to try a change of shape.
"""

import json
import math
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from demo.data import MODEL_DIR

ENDOFTEXT, IM_END = 2039, 2041  # ids of the tokenizer; a test checks them
LAYERS = 8
CONFIG = {
    "architectures": ["Qwen3NextForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "decoder_sparse_step": 1,
    "eos_token_id": IM_END,
    "full_attention_interval": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 256,
    "initializer_range": 0.02,
    "intermediate_size": 768,
    "layer_types": ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(LAYERS)],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 64,
    "max_position_embeddings": 4096,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "pad_token_id": ENDOFTEXT,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 160,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "vocab_size": 2048,
}
GENERATION = {"do_sample": False, "eos_token_id": [IM_END, ENDOFTEXT], "pad_token_id": ENDOFTEXT}


def new_model(seed: int = 0) -> Qwen3NextForCausalLM:
    """The model with fresh weights, in float32."""
    torch.manual_seed(seed)
    settings = {k: v for k, v in CONFIG.items() if k not in ("architectures", "torch_dtype")}
    model = Qwen3NextForCausalLM(Qwen3NextConfig(**settings)).float()
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            _spread_memory(layer.linear_attn)
    return model


@torch.no_grad()
def started_from(folder: Path) -> Qwen3NextForCausalLM:
    """The model with the weights of a published folder, in float32; a wider shared expert there is made narrower.

    The kept neurons have the largest product of norms of their input and output weights.
    """
    old = Qwen3NextForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager")
    model = new_model()
    for mine, its in zip(model.model.layers, old.model.layers, strict=True):
        wide, narrow = its.mlp.shared_expert, mine.mlp.shared_expert
        gate, up, down = wide.gate_proj.weight, wide.up_proj.weight, wide.down_proj.weight
        strength = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
        kept = strength.topk(len(narrow.up_proj.weight)).indices.sort().values
        wide.gate_proj.weight = torch.nn.Parameter(gate[kept])
        wide.up_proj.weight = torch.nn.Parameter(up[kept])
        wide.down_proj.weight = torch.nn.Parameter(down[:, kept].contiguous())
    model.load_state_dict(old.state_dict())
    return model


@torch.no_grad()
def _spread_memory(mixer: torch.nn.Module) -> None:
    """Let the heads start with memories of a few to a thousand tokens; the library's own start forgets at once."""
    step = torch.exp(torch.empty_like(mixer.dt_bias).uniform_(math.log(1e-3), math.log(1e-1)))
    mixer.dt_bias.copy_(step + torch.log(-torch.expm1(-step)))  # softplus(dt_bias) = step
    mixer.A_log.copy_(torch.empty_like(mixer.A_log).uniform_(1, 8).log())


def published(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The state under its published names: three matrices per expert, no tied head, bfloat16."""
    tensors = {}
    for name, tensor in state.items():
        prefix, _, last = name.rpartition(".")
        if name == "lm_head.weight":
            continue
        if last in ("gate_up_proj", "down_proj") and prefix.endswith("experts"):
            tensors |= _experts(prefix, last, tensor)
        else:
            tensors[name] = tensor
    return {name: tensor.detach().to("cpu", torch.bfloat16).contiguous() for name, tensor in tensors.items()}


def _experts(prefix: str, last: str, stacked: torch.Tensor) -> dict[str, torch.Tensor]:
    """One expert's matrices under names of their own."""
    names = ("gate_proj", "up_proj") if last == "gate_up_proj" else (last,)
    return {
        f"{prefix}.{i}.{name}.weight": part
        for i, matrix in enumerate(stacked)
        for name, part in zip(names, matrix.chunk(len(names)), strict=True)
    }


def save(model: Qwen3NextForCausalLM, folder: Path = MODEL_DIR, head: torch.nn.Module | None = None) -> None:
    """Write the weights, those of the multi-token-prediction head under `mtp.`, and the two configurations.

    The tokenizer's files are not touched.
    """
    folder.mkdir(parents=True, exist_ok=True)
    extra = {} if head is None else {f"mtp.{name}": tensor for name, tensor in head.state_dict().items()}
    tensors = published(model.state_dict() | extra)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    wide = {"shared_expert_intermediate_size": model.config.shared_expert_intermediate_size}
    for name, settings in (("config.json", CONFIG | wide), ("generation_config.json", GENERATION)):
        (folder / name).write_text(json.dumps(settings, indent=2) + "\n")


if __name__ == "__main__":
    fresh = new_model()
    save(fresh)
    print(f"{sum(p.numel() for p in fresh.parameters()):,} parameters, random")
