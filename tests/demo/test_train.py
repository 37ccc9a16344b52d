"""The training script: its schedule, the order of its data, and going on from a checkpoint."""

import argparse

import numpy as np
import pytest
import torch

from demo import data, geometry, train


@pytest.fixture
def tiny(monkeypatch, tmp_path) -> argparse.Namespace:
    """The real script with a small model and small batches on the CPU."""
    small = {"hidden_size": 32, "num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    small |= {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "head_dim": 16, "moe_intermediate_size": 16}
    monkeypatch.setattr(geometry, "CONFIG", {**geometry.CONFIG, **small})
    monkeypatch.setattr(data, "SHORT", data.Bucket(2, 128, 4))
    monkeypatch.setattr(data, "LONG", data.Bucket(1, 192, 4))
    settings = {"out": tmp_path, "device": "cpu", "steps": 40, "seed": 3, "rate": 1e-2, "decay": 0.1, "balance": 0.01}
    settings |= {"start": None, "finish": False}
    return argparse.Namespace(**settings, eager=True, no_graph=True)


def steps(trainer: train.Trainer, count: int) -> None:
    for _ in range(count):
        trainer.run_step(*data.batch(3, trainer.step, 40))


def test_learning_rate_rises_then_falls():
    rates = [train.learning_rate(step, 2000, 1.0) for step in range(2000)]
    assert rates[0] < 0.01 and rates[train.WARMUP] == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(train.FLOOR, abs=1e-3)
    assert max(rates) <= 1.0


def test_resumed_run_is_the_uninterrupted_run(tiny):
    whole = train.prepare(tiny)
    steps(whole, 6)
    first = train.prepare(tiny)
    steps(first, 3)
    first.save()
    second = train.prepare(tiny)
    assert second.step == 3
    steps(second, 3)
    for name, p in whole.model.named_parameters():
        torch.testing.assert_close(dict(second.model.named_parameters())[name], p, rtol=0, atol=0, msg=name)


def test_a_run_may_start_from_published_weights(tiny, tmp_path):
    first = train.prepare(tiny)
    steps(first, 2)
    geometry.save(first.model, tmp_path / "weights")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "weights" / name).write_bytes((data.MODEL_DIR / name).read_bytes())
    tiny.start = tmp_path / "weights"
    later = train.prepare(tiny)
    assert later.step == 0 and later.first_batch == train.LATE * tiny.steps
    for (name, p), q in zip(first.model.named_parameters(), later.model.parameters(), strict=True):
        torch.testing.assert_close(p.to(torch.bfloat16).float(), q, rtol=0, atol=0, msg=name)


def test_training_lowers_the_loss(tiny):
    trainer = train.prepare(tiny)
    ids, labels = (torch.from_numpy(x) for x in data.batch(3, 0, 40))
    before, _ = trainer.trainable.loss(ids, labels)
    steps(trainer, 20)
    after, _ = trainer.trainable.loss(ids, labels)
    assert after < before - 0.1


def test_batches_arrive_in_order(monkeypatch, tiny):
    monkeypatch.setattr(train, "AHEAD", 2)
    monkeypatch.setattr(train, "ProcessPoolExecutor", Inline)
    got = list(train.batches(3, 35, 40, 1))
    assert len(got) == 5
    for index, (ids, _) in enumerate(got, 35):
        assert np.array_equal(ids, data.batch(3, index, 40)[0])


class Inline:
    """A pool of no processes: what is submitted is done at once."""

    def __init__(self, workers, mp_context):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return None

    def submit(self, function, *args):
        self.value = function(*args)
        return Done(self.value)


class Done:
    def __init__(self, value):
        self.value = value

    def result(self):
        return self.value
