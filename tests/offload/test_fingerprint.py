"""Fingerprints: which engines may read each other's files."""

from pathlib import Path

import pytest
import torch

from tests.tiny import make_checkpoint
from weft.cache.spec import CacheSpec
from weft.config import resolve
from weft.offload.fingerprint import fingerprint_of


def test_bits_have_an_origin_where_they_must_not_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(make_checkpoint("Qwen3ForCausalLM", tmp_path))

    def fingerprint(deterministic: bool) -> str:
        config = resolve(model=folder, skip_tokenizer_init=True, device="cpu", deterministic=deterministic)
        return fingerprint_of(config, CacheSpec.of(config))

    plain, exact = fingerprint(False), fingerprint(True)
    assert plain != exact, "another engine computes other bits"
    monkeypatch.setattr(torch, "__version__", "0.0")
    assert fingerprint(False) == plain and fingerprint(True) != exact
