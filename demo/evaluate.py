"""The reference evaluation: the 200 problems with nothing but transformers' generate, greedy.

Owns the figures of the bundled model that `weft eval` is compared with: accuracy, and how far bfloat16 is from
float32. Knows nothing of training, nor of Weft's engine.
Run: python -m demo.evaluate --device cuda --json eval.json
"""

import argparse
import json
import re
import time
from collections import defaultdict
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo import mtp, tools
from demo.model import Trainable
from weft.assets import EVAL_PATH, MODEL_DIR, extract_answer

NEW_TOKENS = 320


def read_problems(path: Path = EVAL_PATH) -> list[dict]:
    """The evaluation set, one record per line."""
    return [json.loads(line) for line in path.read_text().splitlines()]


@torch.inference_mode()
def replies(model, tokenizer, problems: list[dict], batch: int = 128) -> list[str]:
    """Greedy replies. Prompts are padded on the left; the mask keeps padding out of attention and of GDN's state."""
    texts = [_prompt(tokenizer, problem) for problem in problems]
    order = sorted(range(len(texts)), key=lambda i: len(texts[i]))
    found: dict[int, str] = {}
    for at in range(0, len(order), batch):
        part = order[at : at + batch]
        inputs = tokenizer([texts[i] for i in part], return_tensors="pt", padding=True, padding_side="left")
        inputs = {k: inputs[k].to(model.device) for k in ("input_ids", "attention_mask")}
        out = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False)
        new = out[:, inputs["input_ids"].shape[1] :]
        found.update(zip(part, tokenizer.batch_decode(new, skip_special_tokens=True), strict=True))
    return [found[i] for i in range(len(texts))]


def _prompt(tokenizer, problem: dict) -> str:
    options = {"tokenize": False, "add_generation_prompt": True}
    return tokenizer.apply_chat_template(problem["messages"], tools=problem.get("tools"), **options)


def score_tools(rows: list[dict], texts: list[str]) -> dict:
    """Shares of exact calls and of exact objects; and the misses."""
    calls, objects, wrong = [], [], []
    for row, text in zip(rows, texts, strict=True):
        kind, right = (calls, called(text) == row["calls"]) if row["tools"] else (objects, parsed(text) == row["json"])
        kind.append(right)
        if not right:
            wrong.append({"question": row["messages"][0]["content"], "reply": text})
    return {"calls": _mean(calls), "objects": _mean(objects), "wrong": wrong}


def called(text: str) -> list[dict]:
    """The calls in a reply; what is no call there makes them none."""
    found = re.findall(r"<tool_call>\n(.*?)\n</tool_call>", text)
    is_whole = "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in found) == text.strip()
    return [parsed(call) for call in found] if is_whole else []


def parsed(text: str):
    """A JSON text's value; None if it is none."""
    try:
        return json.loads(text)
    except ValueError:
        return None


def score(problems: list[dict], texts: list[str]) -> dict:
    """Accuracy over all, by template, and of the templates never seen in training; and what went wrong."""
    right = [extract_answer(text) == p["answer"] for p, text in zip(problems, texts, strict=True)]
    templates, kinds, wrong = defaultdict(list), defaultdict(list), []
    for problem, text, ok in zip(problems, texts, right, strict=True):
        templates[family(problem["template"])].append(ok)
        kinds[problem["unseen_template"]].append(ok)
        if not ok:
            question = problem["messages"][-1]["content"]
            wrong.append({"id": problem["id"], "question": question, "answer": problem["answer"], "reply": text})
    return {
        "accuracy": _mean(right),
        "seen_templates": _mean(kinds[False]),
        "unseen_templates": _mean(kinds[True]),
        "problems": len(problems),
        "by_template": {name: _mean(oks) for name, oks in sorted(templates.items())},
        "wrong": wrong,
    }


def family(template: str) -> str:
    """The name under which a template is reported: every chain is one of a kind, so they are taken together."""
    return "chain" if template.startswith("chain") else template


@torch.inference_mode()
def agreement(model, half, tokenizer, problems: list[dict], texts: list[str]) -> dict:
    """How the model in bfloat16 (`half`) departs from `model` over its replies: same best token, and divergence."""
    same, divergence, tokens = 0, 0.0, 0
    for problem, text in zip(problems, texts, strict=True):
        prompt = tokenizer.apply_chat_template(problem["messages"], tokenize=False, add_generation_prompt=True)
        start = len(tokenizer(prompt)["input_ids"])
        ids = tokenizer(prompt + text + "<|im_end|>", return_tensors="pt")["input_ids"].to(model.device)
        full, low = (m(ids).logits[0, start - 1 : -1].float().log_softmax(-1) for m in (model, half))
        same += int((full.argmax(-1) == low.argmax(-1)).sum())
        divergence += float((full.exp() * (full - low)).sum())
        tokens += len(full)
    return {"tokens": tokens, "same_best_token": same / tokens, "mean_divergence": divergence / tokens}


def load(folder: Path, dtype: torch.dtype, device: str):
    """The model (its bfloat16 weights, computed with in `dtype`) and its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager").to(device).eval()
    return model, AutoTokenizer.from_pretrained(folder)


def _mean(values: list[bool]) -> float | None:
    return round(sum(values) / len(values), 4) if values else None


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL_DIR)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--limit", type=int, default=None, help="the first N problems and tool chats only")
    parser.add_argument("--agreement", action="store_true", help="also compare bfloat16 with float32")
    parser.add_argument("--json", type=Path, help="write all figures, by template too")
    return parser.parse_args()


def main() -> None:
    """Evaluate, print a summary and every miss."""
    args = arguments()
    model, tokenizer = load(args.model, getattr(torch, args.dtype), args.device)
    problems, started = read_problems()[: args.limit], time.time()
    texts = replies(model, tokenizer, problems)
    figures = {"dtype": args.dtype, "seconds": round(time.time() - started, 1), **score(problems, texts)}
    rows = tools.records(invented=False)[: args.limit]
    answers = replies(model, tokenizer, rows)
    figures["tools"] = score_tools(rows, answers)
    invented = tools.records()[: args.limit]
    figures["tools_under_invented_names"] = score_tools(invented, replies(model, tokenizer, invented))
    if mtp.has_head(args.model):
        head = mtp.TrainableHead(Trainable(model, torch.float32), mtp.load_head(model, args.model))
        figures["mtp"] = {
            "problems": mtp.acceptance(head, tokenizer, [_prompt(tokenizer, p) for p in problems], texts),
            "tools": mtp.acceptance(head, tokenizer, [_prompt(tokenizer, row) for row in rows], answers),
        }
    if args.agreement:
        half, _ = load(args.model, torch.bfloat16, args.device)
        figures["bfloat16_against_float32"] = agreement(model, half, tokenizer, problems, texts)
    print(json.dumps({k: v for k, v in figures.items() if k not in ("by_template", "wrong")}, indent=1))
    for miss in figures["wrong"]:
        print(f"{miss['id']}: {miss['question']}\n  expected {miss['answer']}, said {miss['reply']!r}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
