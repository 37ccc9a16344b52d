"""Tokenizers of 320 tokens for tiny checkpoints: byte-level BPE with Qwen's chat format, and one like Llama 2's.

Job: ``save_tokenizer`` and ``save_sentencepiece_tokenizer``. Does not know: models.
"""

from __future__ import annotations

import json
from pathlib import Path

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
VISION_IDS = {"vision_start_token_id": 3, "vision_end_token_id": 4, "image_token_id": 5, "video_token_id": 6}
"""The same as keys of a ``config.json``."""
GLM_TOKENS = ("<|begin_of_image|>", "<|end_of_image|>", "<|image|>", "<|video|>", "<|begin_of_video|>",
              "<|end_of_video|>")  # fmt: skip
GLM_IDS = {
    "image_start_token_id": 3, "image_end_token_id": 4, "image_token_id": 5, "video_token_id": 6,
    "video_start_token_id": 7, "video_end_token_id": 8,
}  # fmt: skip
INKLING_TOKENS = ("<|content_image|>", "<|unused_200054|>", "<|content_audio_input|>", "<|unused_200053|>")
INKLING_IDS = {"image_token_id": 4}

VOCAB_SIZE = 320
EOS_ID = 2

_CORPUS = (
    "the quick brown fox jumps over the lazy dog and the cat",
    "user assistant system answer question number hello world",
    "one two three four five six seven eight nine ten",
)
CHAT_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}"
    "{%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}"
    "{%- endif %}"
)

VISION_TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message.role + '\\n' }}"
    "{%- if message.content is string %}{{- message.content }}{%- else %}{%- for part in message.content %}"
    "{%- if part.type == 'text' %}{{- part.text }}"
    "{%- else %}{{- '<|vision_start|><|' + part.type + '_pad|><|vision_end|>' }}{%- endif %}"
    "{%- endfor %}{%- endif %}{{- '<|im_end|>\\n' }}"
    "{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

GLM_TEMPLATE = VISION_TEMPLATE.replace(
    "'<|vision_start|><|' + part.type + '_pad|><|vision_end|>'",
    "'<|begin_of_' + part.type + '|><|' + part.type + '|><|end_of_' + part.type + '|>'",
)

INKLING_TEMPLATE = VISION_TEMPLATE.replace(
    "'<|vision_start|><|' + part.type + '_pad|><|vision_end|>'", "'<|content_image|><|unused_200054|>'"
)
_FORMATS = {
    "": ((), CHAT_TEMPLATE), "qwen": (VISION_TOKENS, VISION_TEMPLATE), "glm": (GLM_TOKENS, GLM_TEMPLATE),
    "inkling": (INKLING_TOKENS, INKLING_TEMPLATE),
}  # fmt: skip


def save_tokenizer(folder: Path, *, media: str = "") -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``; the special tokens have the ids 0, 1 and 2. Those of
    images and videos have the ids from 3 on, as the family ``media`` calls them."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokens, template = _FORMATS[media]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[*SPECIAL_TOKENS, *tokens],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


LLAMA_TEMPLATE = "{{ bos_token }}{% for m in messages %}[INST] {{ m.content }} [/INST]{% endfor %}"


def save_sentencepiece_tokenizer(folder: Path) -> None:
    """Word-start markers, byte fallback and a BOS before every text, as Llama 2 has them. Ids: ``<unk>`` 0, ``<s>`` 1,
    ``</s>`` 2, then the bytes, then words; the chat template writes its own BOS."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    special = ["<unk>", "<s>", "</s>"]
    words = ["▁", "▁hello", "▁world", "▁the", "▁cat", *"abcdehlortw[]/INST"]
    tokens = [*special, *(f"<0x{b:02X}>" for b in range(256)), *words]
    tokens += [f"filler{i}" for i in range(VOCAB_SIZE - len(tokens))]
    vocab = {token: i for i, token in enumerate(tokens)}
    assert len(vocab) == VOCAB_SIZE
    tokenizer = Tokenizer(models.Unigram([(t, -len(tokens[0])) for t in tokens], unk_id=0, byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "chat_template": LLAMA_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")


def drop_bos_from_template(folder: Path) -> None:
    """The chat template of a folder no longer writes a BOS."""
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    config["chat_template"] = config["chat_template"].replace("{{ bos_token }}", "")
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")
