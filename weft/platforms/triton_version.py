"""The installed version of Triton, and the kernels that run under it."""

from importlib import metadata

KNOWN: tuple[str, ...] = ("3.6.", "3.7.", "3.8.", "3.9.")
"""Prefixes of the versions whose internals Weft uses: the C launcher, the parts of a kernel's key, compilation in other
processes, the names of kernels on disk, and Gluon."""

GLUON_TESTED: tuple[str, ...] = ("3.6.", "3.7.")
"""Prefixes of the versions under which the tests of Gluon kernels passed on a GPU."""


def triton_version() -> str | None:
    """The version of Triton; None if Triton is not installed."""
    try:
        return metadata.version("triton")
    except metadata.PackageNotFoundError:
        return None


def is_known(version: str) -> bool:
    return version.startswith(KNOWN)


def is_gluon_tested(version: str) -> bool:
    return version.startswith(GLUON_TESTED)


def kernel_choice(version: str | None) -> str:
    """Describe in words which kernels run and how they are launched."""
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
