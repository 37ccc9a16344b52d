"""Lets the same kernel tests run anywhere: on the GPU where there is one, else under Triton's interpreter.

Import this module before any kernel: Triton decides at decoration time whether a kernel is interpreted.
"""

from __future__ import annotations

import os

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

    from triton.runtime import interpreter

    _patch_lang_tensor = interpreter._patch_lang_tensor

    def _patch_with_index(tensor, scope) -> None:  # type: ignore[no-untyped-def]
        """NumPy 2.4 no longer turns an array of one element into an integer; Triton 3.6 still asks it to."""
        _patch_lang_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_with_index
