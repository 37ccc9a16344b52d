"""The files that ship with Weft: the bundled model and the frozen evaluation set.

Owns: their paths, and the rule by which an answer is read from a reply. Does not know: how the model is run. It imports
no torch, so a command line can ask for paths cheaply.
"""

import re
from pathlib import Path

MODEL_DIR = Path(__file__).parent / "weft-mini"
EVAL_PATH = Path(__file__).parent / "eval_problems.jsonl"

_ANSWER = re.compile(r"^Answer: (-?\d+)\s*$", re.MULTILINE)


def extract_answer(text: str) -> str | None:
    """Read the answer in a reply: the number on its last line of the form `Answer: 42`; None without such a line."""
    found = _ANSWER.findall(text)
    return str(int(found[-1])) if found else None
