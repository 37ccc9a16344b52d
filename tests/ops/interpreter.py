"""Lets the same kernel tests run anywhere: on the GPU where there is one, else under Triton's interpreter.

Import this module before any kernel: Triton decides at decoration time whether a kernel is interpreted.
"""

from __future__ import annotations

import os

import numpy as np
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

if DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"

    from triton import language as tl
    from triton.runtime import interpreter
    from triton.runtime.interpreter import TensorHandle

    _patch_lang_tensor = interpreter._patch_lang_tensor

    def _patch_with_index(tensor, scope) -> None:  # type: ignore[no-untyped-def]
        """NumPy 2.4 no longer turns an array of one element into an integer; Triton 3.6 still asks it to."""
        _patch_lang_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_with_index

    _convert_float = interpreter._convert_float

    def _convert_to_e4m3(input, input_dtype, output_dtype, rounding_mode):  # type: ignore[no-untyped-def]
        """Triton 3.6 rounds the mantissa up without a carry into the exponent: 31.9 becomes 16 in e4m3."""
        if output_dtype.name != "fp8e4nv" or input_dtype.name != "fp32":
            return _convert_float(input, input_dtype, output_dtype, rounding_mode)
        wide = torch.from_numpy(np.ascontiguousarray(input).view(np.float32).copy())
        return wide.to(torch.float8_e4m3fn).view(torch.uint8).numpy().reshape(input.shape)

    interpreter._convert_float = _convert_to_e4m3

    def _dot_of_float64(self, a, b, d, input_precision, max_num_imprecise_acc):  # type: ignore[no-untyped-def]
        """On some processors a row of NumPy's product in float32 has other bits at another place in its block. A matrix
        unit has no such places. Sums in float64 round to the same float32 wherever a row lies. Triton multiplies the
        bits of bfloat16 as integers."""
        if a.dtype.name == b.dtype.name == "bf16":
            a, b = (TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32) for x in (a, b))
        wide = TensorHandle(d.data.astype(np.float64), tl.float64) if d.data.dtype == np.float32 else d
        product = _create_dot(self, a, b, wide, input_precision, max_num_imprecise_acc)
        return TensorHandle(product.data.astype(d.data.dtype, copy=False), d.dtype.scalar)

    _create_dot = interpreter.InterpreterBuilder.create_dot
    interpreter.InterpreterBuilder.create_dot = _dot_of_float64

    _patch_lang = interpreter._patch_lang

    def _patch_where_it_is_not(fn):  # type: ignore[no-untyped-def]
        """Triton 3.6 patches the language for a launch, and again at every call in a kernel: half of its time."""
        language = fn.__globals__.get("tl")
        if (language is not tl and language is not tl.core) or tl.core.is_builtin(language.load):
            languages = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
            if any(tl.core.is_builtin(language.load) for language in languages):
                return _patch_lang(fn)
        return interpreter._LangPatchScope()

    interpreter._patch_lang = _patch_where_it_is_not

    def _patch_attr(obj, name, member, builder, scope) -> None:  # type: ignore[no-untyped-def]
        """Calls of the language without the copies of their arguments and the check that Triton makes each time."""
        function = getattr(member, "__wrapped__", member)

        def call(*args, **kwargs):  # type: ignore[no-untyped-def]
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return function(*args, **kwargs)

        scope.set_attr(obj, name, call)

    interpreter._patch_attr = _patch_attr

    # Triton 3.6 looks at every sum for an overflow and says nothing of one: a quarter of its time.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)

    # Triton works out again for every value what its type says: a third of its time. Equal names are equal types.
    _np_dtypes: dict[str, np.dtype] = {}
    _get_np_dtype = interpreter._get_np_dtype

    def _known_np_dtype(dtype):  # type: ignore[no-untyped-def]
        found = _np_dtypes.get(dtype.name)
        if found is None:
            found = _np_dtypes[dtype.name] = _get_np_dtype(dtype)
        return found

    interpreter._get_np_dtype = _known_np_dtype

    _shapes: dict[str, tuple[object, object]] = {}
    _init_tensor = tl.core.tensor.__init__

    def _init_with_known_shape(self, handle, type) -> None:  # type: ignore[no-untyped-def]
        found = _shapes.get(type.name)
        if found is None:
            _init_tensor(self, handle, type)
            _shapes[type.name] = self.numel, self.shape
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = found

    tl.core.tensor.__init__ = _init_with_known_shape

    _blocks: dict[object, dict[str, object]] = {}
    _init_block = tl.core.block_type.__init__

    def _init_known_block(self, element_ty, shape) -> None:  # type: ignore[no-untyped-def]
        key = (element_ty.name, *[size.value if type(size) is tl.constexpr else size for size in shape])
        found = _blocks.get(key)
        if found is None:
            _init_block(self, element_ty, shape)
            _blocks[key] = dict(vars(self))
            return
        vars(self).update(found)
        self.element_ty = element_ty

    tl.core.block_type.__init__ = _init_known_block

    _operands = interpreter.TritonSemantic.binary_op_type_checking_impl

    def _operands_of_one_type(  # type: ignore[no-untyped-def]
        self, lhs, rhs, allow_lhs_ptr=False, allow_rhs_ptr=False, arithmetic_check=True, div_or_mod=False
    ):
        """Triton promotes and broadcasts operands of one type too. Nothing changes, but for quotients of 16 bits."""
        if (
            isinstance(lhs, tl.tensor)
            and isinstance(rhs, tl.tensor)
            and lhs.type.name == rhs.type.name
            and not lhs.dtype.is_ptr()
            and not (div_or_mod and lhs.dtype.primitive_bitwidth == 16)
        ):
            return lhs, rhs
        return _operands(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    interpreter.TritonSemantic.binary_op_type_checking_impl = _operands_of_one_type

    _broadcast = interpreter.TritonSemantic.broadcast_impl_value

    def _broadcast_to_another_type(self, lhs, rhs):  # type: ignore[no-untyped-def]
        return (lhs, rhs) if lhs.type.name == rhs.type.name else _broadcast(self, lhs, rhs)

    interpreter.TritonSemantic.broadcast_impl_value = _broadcast_to_another_type

    _unwrap = tl.core._unwrap_if_constexpr
    _wrapped = (tl.constexpr, list, tuple, tl.core.tuple)

    def _unwrap_what_is_wrapped(value):  # type: ignore[no-untyped-def]
        return _unwrap(value) if isinstance(value, _wrapped) else value

    tl.core._unwrap_if_constexpr = _unwrap_what_is_wrapped

    def _init_handle(self, data, dtype, attr=None) -> None:  # type: ignore[no-untyped-def]
        """Initialise like the data class, but skip its check of sizes for bytes. The check asks the type each time."""
        self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
        if data.itemsize > 1:
            self.__post_init__()

    TensorHandle.__init__ = _init_handle

    _integers = frozenset(tl.dtype.SINT_TYPES + tl.dtype.UINT_TYPES)
    tl.dtype.is_int = lambda self: self.name in _integers
    _equal = tl.dtype.__eq__
    tl.dtype.__eq__ = lambda self, other: self is other or _equal(self, other)
