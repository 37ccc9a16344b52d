"""The assembly that makes numbers of codes, executed instruction by instruction; Triton's interpreter knows none."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from weft.ops.codes import E2M1, product

WORD = 0xFFFFFFFF
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16}


def halves(word: Tensor, dtype: torch.dtype) -> Tensor:
    """Two numbers of each word, ``[..., 2]`` in float64."""
    both = torch.stack([word & 0xFFFF, word >> 16], dim=-1)
    return torch.where(both >= 0x8000, both - 0x10000, both).to(torch.int16).view(dtype).double()


def word_of(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    both = numbers.to(dtype).view(torch.int16).long() & 0xFFFF
    return both[..., 0] | both[..., 1] << 16


def fused(kind: str) -> Callable[..., Tensor]:
    dtype = DTYPES[kind]
    return lambda a, b, c: word_of(halves(a, dtype) * halves(b, dtype) + halves(c, dtype), dtype)


def permuted(a: Tensor, b: Tensor, selector: Tensor) -> Tensor:
    """Bytes of ``b:a`` by the selector's nibbles; bit 3 of a nibble spreads the byte's sign."""
    pool, result = a | b << 32, torch.zeros_like(a)
    for place in range(4):
        nibble = int(selector.flatten()[0]) >> 4 * place & 15
        octet = pool >> 8 * (nibble & 7) & 0xFF
        result |= (octet >> 7) * 0xFF << 8 * place if nibble & 8 else octet << 8 * place
    return result


OPERATIONS: dict[str, Callable[..., Tensor]] = {
    "mov.b32": lambda a: a,
    "shl.b32": lambda a, b: a << b & WORD,
    "and.b32": lambda a, b: a & b,
    "add.u32": lambda a, b: a + b & WORD,
    "prmt.b32": permuted,
    "lop3.b32": lambda a, b, c, table: a & b | c,
    **{f"fma.rn.{kind}x2": fused(kind) for kind in DTYPES},
}


def execute(text: str, codes: Tensor, offset: int, dtype: torch.dtype) -> Tensor:
    """The two numbers that the instructions make of each word, ``[..., 2]`` in float64."""
    values = {"$2": codes, "$3": torch.full_like(codes, offset)}
    for line in re.findall(r"^ *(\S+) (.*);$", text, re.MULTILINE):
        name, (target, *operands) = line[0], [operand.strip() for operand in line[1].split(",")]
        if name == ".reg":
            continue
        if target.startswith("{"):  # the halves of a word
            return halves(values[operands[-1]], dtype)
        if name == "lop3.b32":
            assert operands[-1] == "0xEA", "a & b | c"
        numbers = [values[o] if o in values else torch.full_like(codes, int(o, 0)) for o in operands]
        values[target] = OPERATIONS[name](*numbers)
    raise AssertionError("the instructions return nothing")


def every_pair(bits: int) -> tuple[Tensor, Tensor]:
    """Words with all pairs of codes between other bits that are set, and the codes ``[n, 2]``."""
    low, high = (codes.flatten() for codes in torch.meshgrid(*[torch.arange(2**bits)] * 2, indexing="ij"))
    others = (0xFFFF << bits & 0xFFFF) * 0x10001
    return low | high << 16 | others, torch.stack([low, high], dim=-1)


@pytest.mark.parametrize("kind", DTYPES)
def test_floats(kind: str) -> None:
    """Every FP4 and FP8 code, subnormal numbers and NaN among them, is exact beside every other one."""
    words, codes = every_pair(4)
    table = torch.tensor((*E2M1, *(-number for number in E2M1)), dtype=torch.float64)
    text = {"bf16": product._BF16_FP4, "f16": product._F16_FP4}[kind].value
    assert torch.equal(execute(text, words, 0, DTYPES[kind]), table[codes])
    words, codes = every_pair(8)
    want = codes.to(torch.uint8).view(torch.float8_e4m3fn).double()
    text = {"bf16": product._BF16_FP8, "f16": product._F16_FP8}[kind].value
    got = execute(text, words, 0, DTYPES[kind])
    assert torch.equal(got.isnan(), want.isnan()) and torch.equal(got.nan_to_num(), want.nan_to_num())


@pytest.mark.parametrize("zero", [0, 3, 8, 15])
def test_integers(zero: int) -> None:
    for text, bits, kind, constant in (
        (product._BF16_INT4, 4, "bf16", 0xC300), (product._F16_INT4, 4, "f16", 0xE400),
        (product._F16_INT8, 8, "f16", 0xE400),
    ):  # fmt: skip
        words, codes = every_pair(bits)
        got = execute(text.value, words, (constant | zero) * 0x10001, DTYPES[kind])
        assert torch.equal(got, (codes - zero).double())
