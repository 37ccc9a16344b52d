"""The multi-token-prediction head of the bundled model: what it computes, and its tensors' names.

Owns the head as it is trained and as its drafts are counted. Knows nothing of data or optimisers.

At position t the head reads the trunk's hidden state of t (after the final norm) and the embedding of token t + 1, and
predicts token t + 2. `mtp.fc` joins both inputs. One attention layer, `mtp.norm` and the trunk's own output matrix
follow. The second draft reads the output of the first draft in place of the trunk's state, and so on. All drafts from t
attend to what the head computed from the trunk's states up to t, and to each other.
"""

import copy
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from safetensors import safe_open
from torch import Tensor, nn
from transformers import Qwen3NextForCausalLM
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNorm

from demo.data import IGNORE
from demo.model import CHUNK, Trainable, Weights, experts, head_loss, joined, linear, norm, projections, sorted_weights

STEPS = 3  # drafts that the head is trained for
LATER = 0.8  # the loss of each draft, as a share of the one before


class Head(nn.Module):
    """The head's parameters, under the names that follow `mtp.` in published checkpoints.

    It starts as the trunk's last layer.
    """

    def __init__(self, trunk: Qwen3NextForCausalLM):
        super().__init__()
        size, eps = trunk.config.hidden_size, trunk.config.rms_norm_eps
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden = Qwen3NextRMSNorm(size, eps), Qwen3NextRMSNorm(size, eps)
        self.layers = nn.ModuleList([copy.deepcopy(trunk.model.layers[-1])])
        self.norm = copy.deepcopy(trunk.model.norm)
        with torch.no_grad():
            self.fc.weight.copy_(torch.cat([torch.eye(size), torch.eye(size)], 1))


def head_layer(x: Tensor, w: dict[str, Weights], config: SimpleNamespace, rope: tuple[Tensor, Tensor], mask: Tensor,
               keys: list[Tensor], values: list[Tensor]):  # fmt: skip
    """The head's decoder layer for one draft at every position; `keys` and `values` are those of the drafts before.

    Returns its output, the balancing loss, and its own keys and values.
    """
    y = norm(x, w["norms"]["input_layernorm.weight"], config.rms_norm_eps)
    q, k, v, gate = projections(y, w["mixer"], config, rope)
    out = F.scaled_dot_product_attention(q, torch.cat([*keys, k], 2), torch.cat([*values, v], 2), attn_mask=mask)
    x = x + joined(out, gate, w["mixer"])
    y, balance = experts(norm(x, w["norms"]["post_attention_layernorm.weight"], config.rms_norm_eps), w["mlp"], config)
    return x + y, balance, k, v


def attends(draft: int, length: int, device: torch.device) -> Tensor:
    """Return the mask of keys of drafts 0 to `draft`: draft 0 up to the position, later drafts at the position only."""
    own = torch.eye(length, dtype=torch.bool, device=device)
    causal = torch.ones_like(own).tril()
    return torch.cat([causal, *[own] * draft], 1)


class TrainableHead:
    """The head over its trunk; `loss` is what training lowers: of the head alone, or of both.

    The head's loss never reaches the trunk.
    """

    def __init__(self, trunk: Trainable, head: Head, compiled: bool = False, with_trunk: bool = False):
        self.trunk, self.head, self.with_trunk = trunk, head, with_trunk
        self._layer, self._loss = head_layer, head_loss
        if compiled:
            self._layer, self._loss = (torch.compile(f, fullgraph=True, dynamic=False) for f in (head_layer, head_loss))
        self._weights = sorted_weights(head.layers[0])

    def drafts(self, ids: Tensor, hidden: Tensor | None = None):
        """For each draft from every position: the layer's output [rows, length, hidden] and its balancing loss.

        `hidden` is what leaves the trunk's last layer, if it is known.

        Draft k at position t stands for token t + k + 2; the tokens between are the given ones.
        """
        trunk, config, head = self.trunk, self.trunk.config, self.head
        length = ids.shape[1]
        eps, body, device = config.rms_norm_eps, trunk.model.model, ids.device
        with torch.no_grad():
            hidden = norm(trunk.hidden(ids)[0] if hidden is None else hidden, body.norm.weight, eps)
        table = body.embed_tokens.weight.detach()
        cos, sin = trunk.rope(length + STEPS, device)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for k in range(STEPS):
            following = F.embedding(ids.long().roll(-k - 1, 1), table).to(hidden.dtype)
            both = [
                norm(following, head.pre_fc_norm_embedding.weight, eps),
                norm(hidden, head.pre_fc_norm_hidden.weight, eps),
            ]
            x, rope = linear(torch.cat(both, -1), head.fc.weight), (cos[k : k + length], sin[k : k + length])
            mask = attends(k, length, device)
            x, balance, key, value = self._layer(x, self._weights, config, rope, mask, keys, values)
            keys, values = [*keys, key], [*values, value]
            hidden = norm(x, head.norm.weight, eps)
            yield x, balance

    def loss(self, ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Cross entropy of the drafts, later ones weighing less, and the mean balancing loss."""
        matrix, total, balances, hidden = self.trunk.model.lm_head.weight.detach(), 0.0, [], None
        shares = [LATER**k for k in range(STEPS)]
        if self.with_trunk:
            hidden, balance = self.trunk.hidden(ids)
            total, balances = self.trunk.next_token_loss(hidden, labels), [balance]
            hidden = hidden.detach()
        for k, (x, balance) in enumerate(self.drafts(ids, hidden)):
            wanted = labels.roll(-k - 1, 1)
            wanted[:, -k - 1 :] = IGNORE
            each = self._loss(x, wanted, self.head.norm.weight, matrix, self.trunk.config.rms_norm_eps)
            total = total + each * shares[k] / sum(shares)
            balances.append(balance)
        return total, torch.stack(balances).mean()

    @torch.no_grad()
    def right(self, ids: Tensor) -> Tensor:
        """Is draft k at position t token t + k + 2? Bool [STEPS, rows, length]; False beyond the end."""
        found, matrix, eps = [], self.trunk.model.lm_head.weight, self.trunk.config.rms_norm_eps
        for k, (x, _) in enumerate(self.drafts(ids)):
            best = linear(norm(x, self.head.norm.weight, eps), matrix).argmax(-1)
            same = best == ids.long().roll(-k - 2, 1)
            same[:, -k - 2 :] = False
            found.append(same)
        return torch.stack(found)


def acceptance(head: TrainableHead, tokenizer, prompts: list[str], replies: list[str]) -> dict:
    """Greedy drafting along the trunk's own greedy replies: for each number of drafts, how many are accepted.

    A step verifies the drafts and yields the accepted ones and one token more; the first token of a reply comes from
    the prompt's own pass. `per_position` is the share of steps in which that draft and all before it were right.
    """
    runs = []
    for prompt, reply in zip(prompts, replies, strict=True):
        given, all_ids = (tokenizer(text)["input_ids"] for text in (prompt, prompt + reply + tokenizer.eos_token))
        padded = F.pad(torch.tensor([all_ids]), (0, -len(all_ids) % CHUNK)).to(head.head.fc.weight.device)
        leading = head.right(padded)[:, 0].cumprod(0).sum(0).tolist()
        runs.append((len(given) - 1, len(all_ids), leading))
    return {f"drafts_{k}": _walk(runs, k) for k in range(1, STEPS + 1)}


def _walk(runs: list[tuple[int, int, list[int]]], drafts: int) -> dict:
    """Steps through replies; a run: the prompt's last position, the end, right drafts in a row from each position."""
    steps, tokens, accepted = 0, 0, [0] * drafts
    for position, end, leading in runs:
        while position + 2 < end:  # token position + 1 is known; the one after it is what a step is for
            count = min(drafts, leading[position], end - position - 2)
            for k in range(count):
                accepted[k] += 1
            gained = min(count + 1, end - position - 2)
            steps, tokens, position = steps + 1, tokens + gained, position + count + 1
    return {
        "steps": steps,
        "tokens_per_step": round(tokens / steps, 4),
        "per_position": [round(count / steps, 4) for count in accepted],
    }


def load_head(trunk: Qwen3NextForCausalLM, folder: Path) -> Head:
    """The head in a published folder, in float32 beside its trunk."""
    head = Head(trunk)
    with safe_open(folder / "model.safetensors", "pt") as file:
        names = [name for name in file.keys() if name.startswith("mtp.")]  # noqa: SIM118 (no mapping)
        tensors = {name.removeprefix("mtp."): file.get_tensor(name).float() for name in names}
    prefix = "layers.0.mlp.experts."
    count = trunk.config.num_experts

    def stacked(last: str) -> Tensor:
        return torch.stack([tensors.pop(f"{prefix}{i}.{last}.weight") for i in range(count)])

    gate_up = torch.cat([stacked("gate_proj"), stacked("up_proj")], 1)
    head.load_state_dict(tensors | {prefix + "gate_up_proj": gate_up, prefix + "down_proj": stacked("down_proj")})
    return head.to(trunk.device)


def has_head(folder: Path) -> bool:
    """Does a published folder hold one?"""
    with safe_open(folder / "model.safetensors", "pt") as file:
        return "mtp.fc.weight" in file.keys()  # noqa: SIM118
