"""The order in which kernels are compiled: the slowest first, so that no start ends with a slow kernel.

Job: the compile seconds of kernels that take half a second or more. Does not know: how a kernel is compiled, or the
arguments that distinguish kernels of one name.
"""

_SECONDS = {
    "_prefill_hopper_kernel": 3.4,
    "_scan_hopper_kernel": 2.3,
    "_prepare_hopper_kernel": 2.2,
    "_choose_kernel": 2.2,
    "_prefill_kernel": 1.7,
    "_gdn_decode_kernel": 1.7,
    "_decode_kernel": 1.5,
    "_down_kernel": 1.4,
    "_gated_hopper_kernel": 1.3,
    "_skinny_linear_kernel": 1.3,
    "_conv_kernel": 1.0,
    "_prepare_kernel": 1.0,
    "_fp8_experts_hopper_kernel": 0.8,
    "_decode_states_kernel": 0.7,
    "_latent_attention_kernel": 0.7,
    "_scan_kernel": 0.7,
    "_up_kernel": 0.7,
    "_gdn_verify_kernel": 0.6,
    "_selective_scan_gluon_kernel": 0.6,
    "_qk_norm_rope_kernel": 0.5,
    "_verify_states_kernel": 0.5,
    "_window_prefill_kernel": 0.5,
}
"""Processor seconds of the slowest of each name, for an H200."""


def compile_seconds(name: str) -> float:
    """Return about how many seconds the kernel takes at most; 0 if it takes less than half a second or is unknown."""
    return _SECONDS.get(name, 0.0)
