"""The bundled model folder and the training-time forward pass."""

import json

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from transformers import AutoTokenizer, Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from demo import geometry
from demo.model import Trainable, gated_delta_rule
from weft.assets import MODEL_DIR, extract_answer

FILES = "config.json generation_config.json model.safetensors README.md"
FILES += " tokenizer.json tokenizer_config.json chat_template.jinja"
USER = [{"role": "user", "content": "What is 2 + 3?"}]


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL_DIR)


def small_model() -> Qwen3NextForCausalLM:
    torch.manual_seed(0)
    small = {"num_hidden_layers": 4, "layer_types": geometry.CONFIG["layer_types"][:4], "hidden_size": 32}
    small |= {"head_dim": 16, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_value_heads": 8}
    small |= {"vocab_size": 64, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 32}
    small |= {"pad_token_id": 0, "eos_token_id": 1}
    settings = {k: v for k, v in {**geometry.CONFIG, **small}.items() if k not in ("architectures", "torch_dtype")}
    model = Qwen3NextForCausalLM(Qwen3NextConfig(**settings)).float()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model


def test_fast_delta_rule_is_transformers():
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 192, 3, 32) for _ in range(3))
    k[:, 64:100] = k[:, 64:65]  # repeated keys are what a careless inverse fails on
    decay, beta = -torch.rand(2, 192, 3) * 0.05, torch.rand(2, 192, 3)
    theirs, _ = torch_chunk_gated_delta_rule(q, k, v, g=decay, beta=beta, use_qk_l2norm_in_kernel=True)
    torch.testing.assert_close(gated_delta_rule(q, k, v, decay, beta), theirs, rtol=1e-4, atol=1e-5)


def test_training_loss_and_gradients_are_transformers():
    model = small_model()
    ids = torch.randint(1, 64, (2, 128))  # not the padding token: the library gives its embedding no gradient
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.5, -100)
    loss, _ = Trainable(model, torch.float32).loss(ids, labels)
    loss.backward()
    ours = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    theirs = F.cross_entropy(model(ids).logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    theirs.backward()
    torch.testing.assert_close(loss, theirs, rtol=1e-5, atol=1e-6)
    for name, p in model.named_parameters():
        torch.testing.assert_close(ours[name], p.grad, rtol=2e-3, atol=1e-5, msg=name)


def test_balance_is_the_library_loss_of_a_layer():
    model = small_model()
    ids = torch.randint(0, 64, (1, 64))
    _, balance = Trainable(model, torch.float32).loss(ids, ids)
    out = model(ids, output_router_logits=True)
    each = [routed(logits, model.config.num_experts_per_tok) for logits in out.router_logits]
    torch.testing.assert_close(balance, torch.stack(each).mean(), rtol=1e-4, atol=1e-5)


def routed(logits: torch.Tensor, top: int) -> torch.Tensor:
    from transformers.models.qwen3_next.modeling_qwen3_next import load_balancing_loss_func

    return load_balancing_loss_func((logits,), logits.shape[-1], top)


def test_folder_is_complete_and_small():
    for name in FILES.split():
        assert (MODEL_DIR / name).is_file(), name
    assert sum(path.stat().st_size for path in MODEL_DIR.iterdir()) <= 16 * 2**20


def test_weights_are_published_names_in_bfloat16():
    with safe_open(MODEL_DIR / "model.safetensors", "pt") as file:
        names = set(file.keys())
        assert all(file.get_slice(name).get_dtype() == "BF16" for name in names)
    assert "model.layers.0.mlp.experts.7.gate_proj.weight" in names
    assert "lm_head.weight" not in names  # tied to the embedding
    assert json.loads((MODEL_DIR / "config.json").read_text()) == geometry.CONFIG


def test_special_tokens(tokenizer):
    assert tokenizer.convert_tokens_to_ids(["<|endoftext|>", "<|im_end|>"]) == [geometry.ENDOFTEXT, geometry.IM_END]
    assert tokenizer.eos_token == "<|im_end|>" and tokenizer.pad_token == "<|endoftext|>"
    assert len(tokenizer) == geometry.CONFIG["vocab_size"]


@pytest.mark.parametrize("text", ["a\u0301 é 日本語 🙂\t\r\n  x", " <think>\n\n</think> ", "1\u00a02\u2009\x7f"])
def test_any_text_round_trips(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_digits_stand_alone(tokenizer):
    assert tokenizer.tokenize("a 1234+56") == ["a", "Ġ", "1", "2", "3", "4", "+", "5", "6"]


def test_template_understands_thinking(tokenizer):
    def render(messages=USER, **options):
        return tokenizer.apply_chat_template(messages, tokenize=False, **options)

    plain = "<|im_start|>user\nWhat is 2 + 3?<|im_end|>\n"
    assert render() == plain
    assert render(add_generation_prompt=True) == plain + "<|im_start|>assistant\n"
    assert render(add_generation_prompt=True, enable_thinking=True) == plain + "<|im_start|>assistant\n"
    closed = plain + "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert render(add_generation_prompt=True, enable_thinking=False) == closed
    answered = [*USER, {"role": "assistant", "content": "<think>\nhm\n</think>\n\n5"}]
    assert "hm" in render(answered)
    assert "hm" not in render([*answered, *USER])


def test_template_renders_tools(tokenizer):
    tool = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]}
    messages = [*USER, call, {"role": "tool", "content": "5"}]
    text = tokenizer.apply_chat_template(messages, tools=[tool], tokenize=False)
    assert "<tools>\n" + json.dumps(tool) + "\n</tools>" in text
    assert '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>' in text
    assert "<|im_start|>user\n<tool_response>\n5\n</tool_response><|im_end|>\n" in text


@pytest.mark.parametrize(
    ("text", "answer"),
    [("2 + 3 = 5\nAnswer: 5", "5"), ("Answer: 1\nAnswer: 07", "7"), ("Answer: five", None), ("It is 5.", None)],
)
def test_answer_rule(text, answer):
    assert extract_answer(text) == answer
