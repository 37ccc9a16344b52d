"""Which implementation of an operation runs: plain torch, or a Triton kernel.

Job: name the backends, resolve a user's wish to one of them, and say clearly when an operation has no kernel.
Owns: the choice. Does not know: any operation. There is no silent fallback: an operation called with a backend that it
does not implement raises.
"""

from __future__ import annotations

from enum import StrEnum

from weft.errors import ConfigError


class Backend(StrEnum):
    """An implementation family. ``TORCH`` runs on every device and is the reference for the others."""

    TORCH = "torch"
    TRITON = "triton"


def resolve_backend(requested: str, device_type: str) -> Backend:
    """The backend for a device.

    Args:
        requested: ``"auto"``, ``"torch"`` or ``"triton"``.
        device_type: ``"cpu"`` or ``"cuda"``.

    Raises:
        ConfigError: an unknown name, or kernels that do not exist for this device.
    """
    if requested == "auto":
        return Backend.TORCH if device_type == "cpu" else Backend.TRITON
    if requested not in tuple(Backend):
        raise ConfigError(f"unknown backend {requested!r}; allowed: 'auto', 'torch', 'triton'")
    if requested == Backend.TRITON and device_type == "cpu":
        raise ConfigError("backend 'triton' has no kernels for device 'cpu'; use 'torch' or 'auto'")
    return Backend(requested)


def missing_kernel(op: str, backend: Backend) -> ConfigError:
    """The error for an operation that has no implementation under ``backend`` (to be raised by the caller)."""
    return ConfigError(f"{op} has no {backend.value} kernel; run it with backend='torch'")
