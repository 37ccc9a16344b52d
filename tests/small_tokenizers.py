"""Two small tokenizers: byte-level BPE as Qwen and Llama 3 have it, and one with byte fallback as Llama 2 has it."""

from __future__ import annotations

from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as RawTokenizer
from transformers import PreTrainedTokenizerFast

from weft.text.tokenizer import Tokenizer

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CORPUS = ["the cat sat on the mat, 123 times", "naïve café 你好世界 👍🏽 ünïcödé", "tool_call stop the end"] * 5


def byte_level() -> RawTokenizer:
    """Byte-level BPE, as Qwen and Llama 3 have it."""
    raw = RawTokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=330, initial_alphabet=alphabet, show_progress=False))
    raw.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIALS])
    raw.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    return raw


def sentencepiece_like() -> RawTokenizer:
    """Word-start markers and byte fallback, as Llama 2 has them."""
    words = ["▁", "▁the", "▁cat", "s", "a", "t", "▁a", "é"]
    vocab = {token: i for i, token in enumerate(["<unk>", *(f"<0x{b:02X}>" for b in range(256)), *words])}
    raw = RawTokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    raw.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    return raw


BYTE_LEVEL = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=byte_level(), eos_token="<|im_end|>"))
SENTENCEPIECE = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=sentencepiece_like()))
