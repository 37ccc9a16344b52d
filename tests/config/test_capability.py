"""FP8 is refused, by name, on GPUs that have no e4m3."""

from __future__ import annotations

import pytest

from weft.config import resolve
from weft.errors import ConfigError


@pytest.fixture(params=[(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
def capability(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    found: tuple[int, int] = request.param
    monkeypatch.setattr("weft.config.resolution.cuda_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: found)
    return found


@pytest.mark.parametrize(
    ("setting", "remedy"), [("quantization", "quantization='int4'"), ("kv_cache_dtype", "kv_cache_dtype='auto'")]
)
def test_fp8(capability: tuple[int, int], setting: str, remedy: str) -> None:
    settings = {"skip_tokenizer_init": True, setting: "fp8"}
    if capability >= (8, 9) and (setting, capability[0]) != ("kv_cache_dtype", 10):
        assert getattr(resolve(device="cuda", **settings), setting) == "fp8"
    else:
        with pytest.raises(ConfigError, match=remedy) as refusal:
            resolve(device="cuda", **settings)
        assert f"compute capability {capability[0]}.{capability[1]}" in str(refusal.value)
    assert getattr(resolve(device="cpu", **settings), setting) == "fp8"


def test_other_forms(capability: tuple[int, int]) -> None:
    assert resolve(device="cuda", skip_tokenizer_init=True, quantization="int4").quantization == "int4"
