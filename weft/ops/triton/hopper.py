"""Parts of kernels in Gluon for Hopper that several families share.

Job: the kernel class, whether a device runs such kernels, the layout of a box that the copy engine fetches, and
registers of a group of four warps. Does not know: what a tile holds.
"""

import functools

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction

from weft.ops.triton.launch import Kernel
from weft.ops.triton.sizes import is_hopper
from weft.platforms.triton_version import is_gluon_tested

BOX = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))


class GluonKernel(Kernel, GluonJITFunction):
    """A kernel in Gluon that remembers its launches."""


@functools.cache
def runs_gluon(device: torch.device) -> bool:
    """Whether the device runs kernels in Gluon: it is a Hopper GPU, and the kernels were tested with this version of
    Triton."""
    return is_hopper(device) and is_gluon_tested(triton.__version__)


@gluon.jit
def hold(x):
    """``x``, not negative, through a branch never taken that the assembler cannot move later instructions across."""
    return gl.inline_asm_elementwise(
        """{
        .reg .pred never;
        .reg .b32 address;
        mov.b32 address, 0;
        setp.lt.f32 never, $1, 0f00000000;
        @never st.volatile.shared.f32 [address], $1;
        mov.b32 $0, $1;
        }""",
        "=r,r", [x], dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def pack(first, second):
    """Two float32 numbers as bfloat16 in one int32, the first one below."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [first, second], dtype=gl.int32, is_pure=True, pack=1
    )
