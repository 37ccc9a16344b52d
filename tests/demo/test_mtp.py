"""The multi-token-prediction head: its drafts against positions computed alone, its training, its published files."""

import argparse
import json
import math

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from demo import data, geometry, mtp, train, train_mtp
from demo.model import Trainable
from tests.demo.test_model import small_model
from tests.demo.test_train import Inline


def small_head(trunk) -> mtp.Head:
    head = mtp.Head(trunk)
    with torch.no_grad():
        for p in head.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return head


def alone(trunk, head: mtp.Head, ids: list[int], drafts: int) -> list[int]:
    """Greedy drafts after `ids` by the library's own layer, which is run over all positions anew for each draft."""
    hidden = trunk.model(torch.tensor([ids])).last_hidden_state[0, :-1]
    tokens, found, attention = list(ids[1:]), [], head.layers[0]
    for _ in range(drafts):
        embedded = trunk.model.embed_tokens(torch.tensor(tokens))
        x = head.fc(torch.cat([head.pre_fc_norm_embedding(embedded), head.pre_fc_norm_hidden(hidden)], -1))[None]
        places = torch.arange(x.shape[1])[None]
        mask = torch.full((1, 1, x.shape[1], x.shape[1]), -math.inf).triu(1)
        x = attention(x, position_embeddings=trunk.model.rotary_emb(x, places), attention_mask=mask)
        left = head.norm(x)[0, -1]
        found.append(int(trunk.lm_head(left).argmax()))
        tokens, hidden = [*tokens, found[-1]], torch.cat([hidden, left[None]])
    return found


def test_drafts_are_those_of_the_library_layer_run_position_by_position():
    trunk = small_model()
    head = small_head(trunk)
    ids = torch.randint(1, 64, (1, 128))
    matrix = trunk.lm_head.weight
    with torch.no_grad():
        ours = mtp.TrainableHead(Trainable(trunk, torch.float32), head)
        for at in (0, 1, 40, 99):
            drafts = alone(trunk, head, ids[0, : at + 2].tolist(), mtp.STEPS)
            follows = ids.clone()  # later drafts read the tokens before them: make these the drafted ones
            follows[0, at + 2 : at + 2 + mtp.STEPS] = torch.tensor(drafts)
            states = [head.norm(x)[0, at] for x, _ in ours.drafts(follows)]
            assert [int(F.linear(state, matrix).argmax()) for state in states] == drafts
            assert ours.right(follows)[:, 0, at].all()


def test_loss_is_of_the_token_after_the_next():
    trunk = small_model()
    ours = mtp.TrainableHead(Trainable(trunk, torch.float32), small_head(trunk))
    ids = torch.randint(1, 64, (2, 128))
    labels = ids.masked_fill(torch.rand(ids.shape) < 0.5, data.IGNORE)
    expected, shares = 0.0, [mtp.LATER**k for k in range(mtp.STEPS)]
    for k, (x, _) in enumerate(ours.drafts(ids)):
        logits = trunk.lm_head(ours.head.norm(x))[:, : -k - 2]
        expected += shares[k] / sum(shares) * F.cross_entropy(logits.flatten(0, 1), labels[:, k + 2 :].flatten())
    torch.testing.assert_close(ours.loss(ids, labels)[0], expected)


@pytest.fixture
def tiny(monkeypatch, tmp_path) -> argparse.Namespace:
    """A trunk of random weights in its folder, and the settings of a head's training on the CPU."""
    small = {"hidden_size": 32, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    small |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "head_dim": 16, "moe_intermediate_size": 16}
    small |= {"intermediate_size": 32, "shared_expert_intermediate_size": 32, "initializer_range": 0.1}
    monkeypatch.setattr(geometry, "CONFIG", {**geometry.CONFIG, **small})
    monkeypatch.setattr(data, "SHORT", data.Bucket(2, 128, 4))
    monkeypatch.setattr(data, "LONG", data.Bucket(1, 192, 4))
    geometry.save(geometry.new_model(), tmp_path / "trunk")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "trunk" / name).write_bytes((data.MODEL_DIR / name).read_bytes())
    settings = {"out": tmp_path / "run", "model": tmp_path / "trunk", "device": "cpu", "steps": 12, "seed": 3}
    settings |= {"rate": 1e-2, "decay": 0.1, "balance": 0.01, "minutes": 1, "check_every": 1, "workers": 1}
    settings |= {"with_trunk": False, "finish": False}
    return argparse.Namespace(**settings, eager=True, no_graph=True)


def test_training_changes_the_head_alone_and_publishes_both(tiny, monkeypatch):
    monkeypatch.setattr(train, "WARMUP", 2)
    monkeypatch.setattr(
        train, "batches", lambda seed, at, total, *_: (data.batch(seed, i, total) for i in range(at, total))
    )
    train.train(tiny, train_mtp.HeadTrainer)
    log = [json.loads(line) for line in (tiny.out / "log.jsonl").read_text().splitlines()]
    assert log[-1]["done"] and len(log[-1]["right_drafts"]) == mtp.STEPS
    folder = tiny.out / "model"
    trunk = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)  # which ignores the head
    with safe_open(folder / "model.safetensors", "pt") as new, safe_open(tiny.model / "model.safetensors", "pt") as old:
        assert all(torch.equal(new.get_tensor(name), old.get_tensor(name)) for name in old.keys())  # noqa: SIM118
        added = {name for name in new.keys() if name not in old.keys()}  # noqa: SIM118
    assert added == {f"mtp.{name}" for name in published_names(trunk)}
    head, fresh = mtp.load_head(trunk, folder), mtp.Head(trunk)
    assert not torch.equal(head.fc.weight, fresh.fc.weight)
    trainer = train.prepare(tiny, train_mtp.HeadTrainer)
    assert trainer.step == tiny.steps
    for name, p in trainer.model.named_parameters():
        torch.testing.assert_close(dict(head.named_parameters())[name], p.to(torch.bfloat16).float(), msg=name)


def test_a_run_with_the_trunk_trains_both_and_ends_in_time(tiny, monkeypatch):
    monkeypatch.setattr(train, "ProcessPoolExecutor", Inline)
    tiny.with_trunk, tiny.finish, tiny.minutes = True, True, 0.02
    tiny.steps = 100_000
    train.train(tiny, train_mtp.HeadTrainer)
    log = [json.loads(line) for line in (tiny.out / "log.jsonl").read_text().splitlines()]
    assert 0 < log[-1]["step"] < tiny.steps and log[-1]["seconds"] < 30
    assert not (tiny.out / "checkpoint.pt").exists()
    with (
        safe_open(tiny.out / "model" / "model.safetensors", "pt") as new,
        safe_open(tiny.model / "model.safetensors", "pt") as old,
    ):
        for name in ("mtp.fc.weight", "mtp.layers.0.mlp.gate.weight"):
            assert name in new.keys()  # noqa: SIM118
        names = ["model.embed_tokens.weight", "model.layers.0.linear_attn.A_log"]
        assert not any(torch.equal(new.get_tensor(name), old.get_tensor(name)) for name in names)


def test_the_loss_of_the_head_leaves_the_trunk_alone():
    trunk = small_model()
    both = mtp.TrainableHead(Trainable(trunk, torch.float32), small_head(trunk), with_trunk=True)
    ids = torch.randint(1, 64, (2, 128))
    alone, _ = Trainable(trunk, torch.float32).loss(ids, ids)
    alone.backward()
    expected = {name: p.grad.clone() for name, p in trunk.named_parameters()}
    trunk.zero_grad()
    loss, _ = both.loss(ids, ids)
    loss.backward()
    for name, p in trunk.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=1e-5, atol=1e-7, msg=name)
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in both.head.parameters())


def published_names(trunk) -> set[str]:
    """Return the names of the tensors of a head of this geometry in a published checkpoint."""
    layer = {
        name.split(".", 3)[3] for name in geometry.published(trunk.state_dict()) if name.startswith("model.layers.1.")
    }
    return {f"layers.0.{name}" for name in layer} | {
        "fc.weight", "norm.weight", "pre_fc_norm_embedding.weight", "pre_fc_norm_hidden.weight"
    }  # fmt: skip


def test_the_walk_counts_steps_and_accepted_drafts():
    # positions:                       0  1  2  3  4  5  6  7
    runs = [(1, 8, [3, 2, 0, 1, 0, 3, 3, 3])]
    assert mtp._walk(runs, 1) == {"steps": 3, "tokens_per_step": round(5 / 3, 4), "per_position": [1.0]}
    # from 1 two right: on to 4, none right: on to 5, where one token is left to accept
    assert mtp._walk(runs, 2) == {"steps": 3, "tokens_per_step": round(5 / 3, 4), "per_position": [0.6667, 0.3333]}
