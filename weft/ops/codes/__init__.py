"""Coded weights: integers of 4 or 8 bits, FP4 (e2m1) or FP8 (e4m3), whose groups share scales; inputs are not rounded.

A weight is ``(number(code) - zero) * scale * row_scale``. Integer codes are unsigned; without zeros the code in the
middle, 8 or 128, stands for zero. FP4 codes have a sign, two bits of exponent and one of mantissa; FP8 codes have four
and three, and 0x7f and 0xff are NaN. Sources: GPTQ (arXiv 2210.17323), AWQ (2306.00978), the OCP Microscaling formats
(2310.10537).

All formats of checkpoints have one arrangement in memory. The inner dimension is cut into chunks. A chunk has
``16 / bits`` spans of 32 weights each, or of 16 where a group has 16. An int32 word holds two neighbours of every span:
bits ``bits * s`` and ``16 + bits * s`` are those of span ``s``. So a mask and a shift take the codes of one span out of
all words, two of them in each word, and a span never crosses a group.
"""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from weft.errors import ConfigError

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Values of the FP4 codes 0 to 7; codes 8 to 15 are their negatives."""


class Packing(NamedTuple):
    """The arrangement of codes for a group size.

    Attributes:
        bits: of a code, 4 or 8.
        span: neighbouring weights that have the same place in their words, 32 or 16.
    """

    bits: int
    span: int

    @classmethod
    def of(cls, bits: int, group: int) -> Self:
        return cls(bits, 16 if group == 16 else 32)

    @property
    def chunk(self) -> int:
        return self.span * (16 // self.bits)

    def num_chunks(self, columns: int) -> int:
        return -(-columns // self.chunk)

    def words_shape(self, rows: int, columns: int) -> tuple[int, int, int]:
        """``[chunks, rows, words]`` of a matrix ``[rows, columns]``."""
        return self.num_chunks(columns), rows, self.span // 2


class CodedMatrix(NamedTuple):
    """A matrix ``[N, K]`` of codes, or one for each expert (with a first dimension ``E`` everywhere).

    Attributes:
        words: int32 ``[C, N, span / 2]``, arranged as the module says; codes beyond K are arbitrary, but not NaN.
        scales: ``[G, N]``, of any float dtype; as uint8 the exponents of e8m0, or the bytes of e4m3.
        zeros: uint8 ``[G, N]``, or None.
        row_scale: float32 ``[N]``, or None.
        bits: of a code.
        is_float: codes are FP4, or with 8 bits FP8. Uint8 scales are e4m3 in groups of 16, and e8m0 in larger ones.
        group: weights of a row that share a scale; 0: all of them.
        columns: K.
    """

    words: Tensor
    scales: Tensor
    zeros: Tensor | None
    row_scale: Tensor | None
    bits: int
    is_float: bool
    group: int
    columns: int

    @property
    def packing(self) -> Packing:
        return Packing.of(self.bits, self.group)

    def expert(self, index: int) -> Self:
        zeros, row_scale = (None if t is None else t[index] for t in (self.zeros, self.row_scale))
        return self._replace(words=self.words[index], scales=self.scales[index], zeros=zeros, row_scale=row_scale)


def pack_words(codes: Tensor, packing: Packing) -> Tensor:
    """``[N, K]`` uint8 codes -> the words of ``CodedMatrix``. Columns beyond K have code 0."""
    rows, columns = codes.shape
    chunks, shifts = packing.num_chunks(columns), 16 // packing.bits
    padded = torch.nn.functional.pad(codes, (0, chunks * packing.chunk - columns))
    spans = padded.view(rows, chunks, shifts, packing.span)
    halves = spans[:, :, 0].to(torch.int32)
    for s in range(1, shifts):
        halves |= spans[:, :, s].to(torch.int32) << (packing.bits * s)
    return halves.to(torch.int16).view(torch.int32).transpose(0, 1)


def unpack_words(words: Tensor, packing: Packing, columns: int) -> Tensor:
    """Words -> ``[N, K]`` int16 codes; the inverse of ``pack_words``."""
    halves = words.transpose(0, 1).contiguous().view(torch.int16).to(torch.int32)
    mask, shifts = (1 << packing.bits) - 1, range(0, 16, packing.bits)
    spans = torch.stack([halves >> shift & mask for shift in shifts], dim=2)
    return spans.flatten(1)[:, :columns].to(torch.int16)


def decoded_scales(matrix: CodedMatrix) -> Tensor:
    """Scales in float32, as ``CodedMatrix`` says. An exponent of 255 is NaN beside FP8 codes, and infinite beside
    others."""
    scales = matrix.scales
    if scales.dtype != torch.uint8:
        return scales.float()
    if matrix.group == 16:
        return scales.view(torch.float8_e4m3fn).float()
    powers = torch.ldexp(torch.ones_like(scales, dtype=torch.float32), scales.int() - 127)
    return torch.where(scales == 255, torch.nan, powers) if matrix.bits == 8 else powers


def dequantize_codes(matrix: CodedMatrix) -> Tensor:
    """The weights ``[N, K]`` in float32."""
    codes = unpack_words(matrix.words, matrix.packing, matrix.columns)
    group = matrix.group or matrix.columns
    scales, zeros = (
        None if t is None else t.t().repeat_interleave(group, 1)[:, : matrix.columns]
        for t in (decoded_scales(matrix), matrix.zeros)
    )
    if matrix.is_float and matrix.bits == 8:
        numbers = codes.to(torch.uint8).view(torch.float8_e4m3fn).float()
    elif matrix.is_float:
        table = torch.tensor((*E2M1, *(-value for value in E2M1)), device=codes.device)
        numbers = table[codes.long()]
    else:
        numbers = (codes - ((1 << matrix.bits - 1) if zeros is None else zeros)).float()
    assert scales is not None
    weights = numbers * scales
    return weights if matrix.row_scale is None else weights * matrix.row_scale[:, None]


def quantize_groups(weight: Tensor, group: int, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round ``[N, K]`` to symmetric 4-bit codes, to nearest: ``(codes [N, K] uint8, scales [G, N])``.

    The weight with the largest magnitude of a group gets the code 0, which stands for -8. So a scale has the sign that
    this weight has not, and all 16 codes are used.
    """
    rows, columns = weight.shape
    wide = weight.float().view(rows, columns // group, group)
    extreme = wide.gather(2, wide.abs().argmax(2, keepdim=True))
    scales = (extreme / -8.0).to(scale_dtype)
    divisor = torch.where(scales == 0, 1.0, scales.float())
    codes = (wide / divisor).round().clamp_(-8, 7) + 8
    return codes.to(torch.uint8).view(rows, columns), scales.squeeze(2).t()


def fitting_group(columns: int, where: str) -> int:
    """The largest group of 128, 64 or 32 that divides a row.

    Raises:
        ConfigError: none does.
    """
    for group in (128, 64, 32):
        if columns % group == 0:
            return group
    raise ConfigError(
        f"{where}: rows of {columns} weights do not divide into groups of 128, 64 or 32, which --quantization int4 "
        "needs; use --quantization fp8, or a tensor_parallel_size that leaves a multiple of 32"
    )
