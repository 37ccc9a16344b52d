"""``weft models`` says what the tests say."""

from __future__ import annotations

import pytest

from tests.executor.test_tensor_parallel import MODELS
from tests.speculation.test_heads import HEADS
from tests.tiny import ARCHITECTURES, MAMBA_ARCHITECTURES
from tests.wrapped import WRAPPED_TEXTS
from weft.cli import main
from weft.config.families import FAMILIES
from weft.config.quantization_formats import FORMATS
from weft.config.verified import VERIFIED, Ranks, nearest
from weft.config.wrappers import WRAPPERS
from weft.models.weight_names import WEIGHT_TABLES


def test_the_table_is_that_of_the_tests() -> None:
    assert set(WRAPPERS) == set(WRAPPED_TEXTS)
    assert set(VERIFIED) == set(FAMILIES) == set(WEIGHT_TABLES) == {*ARCHITECTURES, *MAMBA_ARCHITECTURES}
    assert {arch for arch, verified in VERIFIED.items() if verified.ranks is Ranks.ENGINE} == set(MODELS)


def test_listing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    table, formats = capsys.readouterr().out.split("\n\n")
    lines = table.splitlines()
    assert [line.strip().partition(": ")[0] for line in formats.splitlines()[1:]] == list(FORMATS)
    assert [line.split()[0] for line in lines[1:]] == sorted((*VERIFIED, *WRAPPERS))
    assert any(line.split() == "MiniCPMOcrForConditionalGeneration yes text alone, as Qwen3_5ForCausalLM or "
               "Qwen3_5MoeForCausalLM one layer".split() for line in lines)  # fmt: skip
    for name, head in (("Inkling2", ""), ("Inkling", " a layer for each draft")):
        row = f"{name}ForConditionalGeneration yes images, text as {name}ForCausalLM{head}"
        assert any(line.split() == row.split() for line in lines)
    assert any(line.split() == "Glm5NextForConditionalGeneration yes yes by layer one layer".split() for line in lines)
    assert main(["models", "LlamaForCausalLM", "MiniMaxText01ForCausalLM"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[:2] for line in out.splitlines()[1:3]] == [
        ["LlamaForCausalLM", "yes"], ["MiniMaxForCausalLM", "yes"],
    ]  # fmt: skip


def test_heads_for_drafts(capsys: pytest.CaptureFixture[str]) -> None:
    """The column names the families whose heads the tests of drafts run, and wrappers of them."""
    assert main(["models"]) == 0
    lines = capsys.readouterr().out.partition("\n\n")[0].splitlines()
    place = lines[0].index("drafts by its own head")
    found = {line.split()[0]: line[place:] for line in lines[1:] if line[place:]}
    chained = {f"InklingFor{task}": "a layer for each draft" for task in ("CausalLM", "ConditionalGeneration")}
    wrapped = {name for name, texts in WRAPPED_TEXTS.items() if {*texts} & {*HEADS}}
    alike = {"Qwen4ExpForConditionalGeneration", *wrapped}
    assert found == dict.fromkeys([*HEADS, *alike], "one layer") | chained


def test_an_unknown_one_is_refused_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "Qwen2VLForConditionalGeneration"]) == 2
    assert "the nearest that is: Qwen3VLForConditionalGeneration; `weft models` lists all" in capsys.readouterr().err
    assert nearest("MixtralForCausalLM") == "MistralForCausalLM"
    assert nearest("Olmo3ForCausalLM").startswith("Olmo")
