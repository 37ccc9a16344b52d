"""Train the multi-token-prediction head of a trained model on one GPU and publish both.

Owns the differences from `train`: the trained module, its place in the data, and the check.
Run: python -m demo.train_mtp --model /tmp/weft-mini/model --out /tmp/weft-mini-mtp
"""

from pathlib import Path

import torch

from demo import data, evaluate, geometry, train
from demo.model import Trainable
from demo.mtp import Head, TrainableHead, has_head, load_head


class HeadTrainer(train.Trainer):
    """The head's weights and steps; the trunk comes from a published folder."""

    def build(self, dtype: torch.dtype, compiled: bool) -> tuple[torch.nn.Module, TrainableHead]:
        self.first_batch = train.LATE * self.args.steps
        self.trunk = evaluate.load(self.args.model, torch.float32, str(self.device))[0]
        with_trunk = self.args.with_trunk
        head = load_head(self.trunk, self.args.model) if has_head(self.args.model) else Head(self.trunk)
        self.head = head.to(self.device)
        self.trunk.requires_grad_(with_trunk)
        trained = torch.nn.ModuleDict({"trunk": self.trunk, "head": self.head}) if with_trunk else self.head
        return trained, TrainableHead(Trainable(self.trunk, dtype, compiled), self.head, compiled, with_trunk)

    def publish(self, folder: Path) -> None:
        geometry.save(self.trunk, folder, self.head)

    def check(self) -> dict:
        """The share of right drafts, each for itself, over the replies of a batch that training never has."""
        total = self.first_batch + self.args.steps
        ids, labels = (torch.from_numpy(x).to(self.device) for x in data.batch(self.args.seed + 1, total - 2, total))
        found = TrainableHead(Trainable(self.trunk, self.trainable.trunk.dtype), self.head).right(ids)
        shares = []
        for k, right in enumerate(found):
            learned = (labels.roll(-k - 2, 1) >= 0)[:, : -k - 2]
            shares.append(round(float(right[:, : -k - 2][learned].float().mean()), 4))
        return {"right_drafts": shares}


if __name__ == "__main__":
    flags = train.parser(__doc__.splitlines()[0], steps=2000, rate=1e-3)
    flags.add_argument("--model", type=Path, required=True, help="the published folder of the trunk")
    flags.add_argument("--with-trunk", action="store_true", help="train the trunk further beside the head")
    train.train(flags.parse_args(), HeadTrainer)
