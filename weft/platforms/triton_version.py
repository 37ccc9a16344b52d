"""Which Triton is installed, and what runs under one whose internals Weft does not know."""

from __future__ import annotations

from importlib import metadata

KNOWN: tuple[str, ...] = ("3.6.", "3.7.", "3.8.", "3.9.")
"""Beginnings of the versions whose internals Weft uses: the C launcher, what goes into a kernel's key, how kernels are
compiled in other processes, what names a kernel on disk, and the names in Gluon."""

GLUON_TESTED: tuple[str, ...] = ("3.6.", "3.7.")
"""Beginnings of those with which the tests of kernels in Gluon have passed on a GPU."""


def triton_version() -> str | None:
    """None: it is not installed."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return None


def is_known(version: str) -> bool:
    return version.startswith(KNOWN)


def is_gluon_tested(version: str) -> bool:
    return version.startswith(GLUON_TESTED)


def kernel_choice(version: str | None) -> str:
    """Which kernels run and how they are launched, in words."""
    if version is None:
        return "Triton is not installed"
    if is_gluon_tested(version):
        return f"Triton {version}: all kernels, launched by Weft itself"
    others = "give way to others in Triton or of the matrix library"
    if is_known(version):
        tested = " and ".join(f"{beginning}x" for beginning in GLUON_TESTED)
        return (
            f"Triton {version}: launched by Weft itself; kernels in Gluon, tested on a GPU with Triton {tested} alone, "
            f"{others}; slower, with the same results"
        )
    return (
        f"Triton {version} is not {' or '.join(f'{beginning}x' for beginning in KNOWN)}: kernels in Gluon {others}, "
        "launches go through Triton, and kernels compile in threads; slower, with the same results"
    )
