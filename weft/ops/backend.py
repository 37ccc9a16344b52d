"""Which implementation of every operation runs: plain torch, or Triton kernels."""

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
