"""Bugs to plant in MXFP8: codes and exponents as numbers, names of tensors, experts."""

from __future__ import annotations

from tests.mutation.mutant import mutant

PRODUCT, ARRANGEMENTS = "weft/ops/codes/product.py", "weft/quantization/arrangements.py"
KERNELS, LOADING = "tests/ops/linear/test_triton_coded.py", "tests/quantization/test_mxfp8.py"
CODES, EXPONENTS = (f"{KERNELS}::test_{name}_of_mxfp8" for name in ("every_code_and_exponent", "extreme_exponents"))
EXPERTS = "tests/ops/moe/test_triton_coded_moe.py"

MXFP8 = (
    mutant(
        "codes-without-sign", "a code's highest bit is its sign", PRODUCT, "((code & 128) << 8)", "((code & 128) << 7)",
        CODES,
    ),
    mutant(
        "nan-is-480", "the codes 0x7f and 0xff are NaN", PRODUCT,
        '        number = tl.where((code & 127) == 127, float("nan"), number)\n', "", CODES,
    ),
    mutant(
        "smallest-scale-is-zero", "an exponent of 0 is 2^-127", PRODUCT,
        "tl.maximum(stored.to(tl.int32) << 23, 0x400000)", "(stored.to(tl.int32) << 23)", EXPONENTS,
    ),
    mutant(
        "exponent-255-is-infinite", "an exponent of 255 is NaN", PRODUCT,
        'scale = tl.where(stored == 255, float("nan"), scale)', "scale = scale * 1.0", EXPONENTS,
    ),
    mutant(
        "scales-of-the-first-expert", "an expert has scales of its own", PRODUCT,
        "base + group * FIXED.width + rows, FIXED),)  # type: ignore[assignment]  # noqa: RUF005\n"
        "    for step in tl.static_range(4):",
        "group * FIXED.width + rows, FIXED),)  # type: ignore[assignment]  # noqa: RUF005\n"
        "    for step in tl.static_range(4):",
        EXPERTS,
    ),
    mutant(
        "inverse-by-name", "a scale of `fp8` files is multiplied, whatever its name says", ARRANGEMENTS,
        'scale = "weight_scale_inv" if self.scheme.source == "fp8" else "weight_scale"',
        'scale = "weight_scale"', LOADING,
    ),
    mutant(
        "saved-scales-are-refused", "scales may have the dtype of exponents", ARRANGEMENTS,
        '"e8m0": UINT8 + E8M0}', '"e8m0": UINT8}', f"{LOADING}::test_inkling2",
    ),
    mutant(
        "bytes-as-codes", "codes that are no e4m3 are refused", ARRANGEMENTS,
        'packed, float_codes = "weight", E4M3', 'packed, float_codes = "weight", ()',
        f"{LOADING}::test_tensors_of_another_dtype",
    ),
    mutant(
        "rounded-inputs-unsaid", "a start says that a file was made for inputs in 8 bits",
        "weft/config/quantization_formats.py",
        '_mxfp8("compressed-tensors", drops_activations=group.given("input_activations"))',
        '_mxfp8("compressed-tensors", drops_activations=False)', "tests/config/test_quantization.py::test_mxfp8",
    ),
    mutant(
        "dummies-of-16-bits", "random codes have the spread of e4m3", "weft/quantization/coded.py",
        '"mxfp8": 129.3}', '"mxfp8": 12.93}', f"{LOADING}::test_dummy_codes_are_numbers",
    ),
)  # fmt: skip
