"""Which Triton is installed, and what runs under one whose internals Weft does not know."""

from __future__ import annotations

from importlib import metadata

MEASURED: tuple[str, ...] = ("3.6.", "3.7.")
"""Beginnings of the versions that Weft has run with on a GPU."""

KNOWN: tuple[str, ...] = (*MEASURED, "3.8.", "3.9.")
"""Beginnings of the versions whose internals Weft uses: Gluon, the C launcher, what goes into a kernel's key, how
kernels are compiled in other processes, what names a kernel on disk."""


def triton_version() -> str | None:
    """None: it is not installed."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return None


def is_known(version: str) -> bool:
    return version.startswith(KNOWN)


def is_measured(version: str) -> bool:
    return version.startswith(MEASURED)


def kernel_choice(version: str | None) -> str:
    """Which kernels run and how they are launched, in words."""
    if version is None:
        return "Triton is not installed"
    if is_known(version):
        untried = "" if is_measured(version) else "; they compile with this version, but were not yet run with it"
        return f"Triton {version}: all kernels, launched by Weft itself{untried}"
    return (
        f"Triton {version} is not {' or '.join(f'{beginning}x' for beginning in KNOWN)}: kernels in Gluon give way to "
        "others in Triton or of the matrix library, launches go through Triton, and kernels compile in threads; "
        "slower, with the same results"
    )
