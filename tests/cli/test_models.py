"""``weft models`` says what the tests say."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.executor.test_tensor_parallel import MODELS
from tests.tiny import ARCHITECTURES, MAMBA_ARCHITECTURES, make_checkpoint
from weft.cli import main
from weft.config import resolve
from weft.config.families import FAMILIES
from weft.config.verified import NOT_ON_A_GPU, VERIFIED, Ranks, nearest
from weft.errors import ConfigError


def test_the_table_is_that_of_the_tests() -> None:
    assert set(VERIFIED) == set(FAMILIES) == {*ARCHITECTURES, *MAMBA_ARCHITECTURES}
    assert {arch for arch, verified in VERIFIED.items() if verified.ranks is Ranks.ENGINE} == set(MODELS)


@pytest.mark.parametrize("arch", [arch for arch, verified in VERIFIED.items() if verified.ranks is Ranks.REFUSED])
def test_what_runs_on_one_rank_only_is_refused(arch: str, tmp_path: Path) -> None:
    folder = make_checkpoint(arch, tmp_path)
    with pytest.raises(ConfigError, match="tensor_parallel_size=2 is not supported for this architecture"):
        resolve(model=str(folder), device="cpu", tensor_parallel_size=2)


def test_listing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == sorted(VERIFIED)
    assert lines[-1] == NOT_ON_A_GPU
    assert main(["models", "LlamaForCausalLM"]) == 0
    assert "LlamaForCausalLM  yes           yes" in capsys.readouterr().out


def test_an_unknown_one_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "Qwen2VLForConditionalGeneration"]) == 1
    assert "the nearest that is: Qwen2ForCausalLM" in capsys.readouterr().err
    assert nearest("MixtralForCausalLM") == "MistralForCausalLM"
    assert nearest("Olmo3ForCausalLM").startswith("Olmo")
