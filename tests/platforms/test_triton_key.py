"""The key is computed once per state of Triton's files."""

from __future__ import annotations

import os
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace

import pytest

from weft.platforms.triton_key import fingerprint, remember_triton_key

triton = pytest.importorskip("triton")


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A note of every time that Triton computes its key, of a Triton of two small files."""
    from triton.runtime import cache

    notes: list[str] = []

    def triton_key() -> str:
        notes.append("computed")
        return f"key {len(notes)}"

    monkeypatch.setattr(cache, "triton_key", triton_key)
    return notes


def start(monkeypatch: pytest.MonkeyPatch, folder: Path, kernels: Path) -> str:
    """Return the key that a new process would use."""
    from triton.runtime import cache

    with monkeypatch.context() as patched:
        patched.setattr(cache, "triton_key", cache.triton_key)
        patched.setattr(triton, "__file__", str(folder / "__init__.py"))
        patched.setattr(triton, "knobs", SimpleNamespace(cache=SimpleNamespace(dir=str(kernels))))
        remember_triton_key()
        return cache.triton_key()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("_C/libtriton.so", "compiler/compiler.py", "backends/nvidia/compiler.py", "runtime/jit.py"):
        file = tmp_path / "triton" / name
        file.parent.mkdir(parents=True)
        file.write_text("1")
    return tmp_path / "triton"


def test_a_second_start_reads_what_the_first_computed(
    computed: list[str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = tmp_path / "kernels"
    assert [start(monkeypatch, folder, kernels) for _ in range(3)] == ["key 1"] * 3 and len(computed) == 1
    assert start(monkeypatch, folder, tmp_path / "others") == "key 2"


@pytest.mark.parametrize("name", ["_C/libtriton.so", "compiler/compiler.py", "backends/nvidia/compiler.py"])
@pytest.mark.parametrize("how", ["longer", "newer", "gone"])
def test_another_triton_has_another_key(
    computed: list[str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, how: str
) -> None:
    start(monkeypatch, folder, tmp_path)
    file, state = folder / name, (folder / name).stat()
    if how == "longer":
        file.write_text("12")
        os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    elif how == "newer":
        os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns + 1000))
    else:
        file.unlink()
    assert start(monkeypatch, folder, tmp_path) == "key 2"


def test_without_a_place_to_write_every_start_computes(
    computed: list[str], folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    kernels = tmp_path / "file" / "kernels"
    assert [start(monkeypatch, folder, kernels) for _ in range(2)] == ["key 1", "key 2"]


def test_all_that_triton_hashes_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fingerprint looks at every file from which the installed Triton computes its key."""
    from triton.runtime import cache

    spec = spec_from_file_location("triton.runtime.cache_again", cache.__file__)  # an engine may have replaced the key
    assert spec is not None and spec.loader is not None
    again = module_from_spec(spec)
    spec.loader.exec_module(again)
    read: set[str] = set()
    real_open = open

    def noting_open(file: str, *args: str) -> object:
        read.add(str(file))
        return real_open("/dev/null", "rb")

    monkeypatch.setattr(again, "open", noting_open, raising=False)
    again.triton_key()
    seen: set[Path] = set()
    real_stat = Path.stat
    monkeypatch.setattr(Path, "stat", lambda path, **how: (seen.add(path), real_stat(path, **how))[1])
    fingerprint(Path(triton.__file__).parent)
    assert len(read) > 20 and {Path(name) for name in read} <= seen
