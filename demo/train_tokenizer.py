"""Train the bundled tokenizer: byte-level BPE, digits one by one, Qwen's special tokens and chat template.

Owns tokenizer.json, tokenizer_config.json and chat_template.jinja of the model folder.
Knows nothing of the model. Run: python -m demo.train_tokenizer
"""

import json
import shutil
import sys
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from demo import about, problems, templates
from demo.data import MODEL_DIR

VOCABULARY = 2048
CORPUS = 60_000  # problems
# Qwen's split: words with the blank before them, digits one by one, runs of punctuation.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]
CONFIG = {
    "add_bos_token": False,
    "add_prefix_space": False,
    "bos_token": None,
    "clean_up_tokenization_spaces": False,
    "eos_token": "<|im_end|>",
    "errors": "replace",
    "model_max_length": 4096,
    "pad_token": "<|endoftext|>",
    "split_special_tokens": False,
    "tokenizer_class": "PreTrainedTokenizerFast",
    "unk_token": None,
}


def corpus(seed: int = 0):
    """Questions and answers to learn merges from, and the words of every text that is not drawn often."""
    rng = Random(f"{seed}/tokenizer")
    for _ in range(CORPUS):
        template = rng.choice([problems.chain(rng), *rng.sample([*templates.ONE_STEP, *templates.MANY_STEPS], 3)])
        problem = problems.story(rng) if rng.random() < 0.6 else problems.draw(template, rng)
        yield problem.question
        yield problem.reply
    for _ in range(CORPUS // 8):
        yield from about.draw(rng)
    readme = Path(__file__).parent / "prose.txt"
    yield from readme.read_text().split("\n") * 40


def train(seed: int = 0) -> Tokenizer:
    """A tokenizer of exactly VOCABULARY tokens; the added ones come last, as Qwen's do."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIAL) - len(MARKS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus(seed), trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in MARKS])
    return tokenizer


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """The three files AutoTokenizer needs."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    added = {
        str(tokenizer.token_to_id(t)): {
            "content": t, "lstrip": False, "normalized": False, "rstrip": False,
            "single_word": False, "special": t in SPECIAL,
        }
        for t in [*SPECIAL, *MARKS]
    }  # fmt: skip
    config = {"added_tokens_decoder": added, **CONFIG}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    shutil.copy(Path(__file__).parent / "chat_template.jinja", folder / "chat_template.jinja")


if __name__ == "__main__":
    trained = train()
    print(f"{trained.get_vocab_size()} tokens")
    save(trained, Path(sys.argv[1]) if len(sys.argv) > 1 else MODEL_DIR)
