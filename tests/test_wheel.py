"""Check that the wheel holds exactly the files of the package, and works where nothing else of Weft is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from weft import __version__

ROOT = Path(__file__).parent.parent
WITHOUT_CACHES = shutil.ignore_patterns("__pycache__")
QUIET = ("--quiet", "--disable-pip-version-check", "--no-index", "--no-deps", "--no-cache-dir")


def pip(*arguments: str) -> None:
    """Run pip without a network."""
    done = subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of a copy of the project in which Python has compiled a module beside the bundled model."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copytree(ROOT / "weft", folder / "weft", ignore=WITHOUT_CACHES)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for package in ("assets", "server/page", "config"):
        (folder / "weft" / package / "__pycache__").mkdir()
        (folder / "weft" / package / "__pycache__" / "__init__.cpython-311.pyc").write_bytes(b"stray")
    pip("wheel", *QUIET, "--no-build-isolation", "--wheel-dir", str(folder / "dist"), str(folder))
    (made,) = (folder / "dist").glob("*.whl")
    return made


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with Weft alone."""
    folder = tmp_path_factory.mktemp("installed")
    pip("install", *QUIET, "--no-compile", "--target", str(folder), str(wheel))
    return folder


def test_the_wheel_holds_the_files_of_the_package_and_no_others(wheel: Path) -> None:
    """Compiled modules are not part of it."""
    with zipfile.ZipFile(wheel) as content:
        names = {name for name in content.namelist() if ".dist-info/" not in name}
    found = {str(path.relative_to(ROOT)) for path in (ROOT / "weft").rglob("*") if path.is_file()}
    assert names == {name for name in found if "__pycache__" not in name}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [(["--version"], __version__), (["models"], "Qwen3NextForCausalLM"), (["config"], "weft-mini")],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_the_command_line_of_an_installed_wheel(
    arguments: list[str], expected: str, installed: Path, tmp_path: Path
) -> None:
    """Run from a folder that is not the project's; other packages come from this environment."""
    environment = os.environ | {"PYTHONPATH": str(installed), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "weft", *arguments]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and expected in done.stdout, done.stdout + done.stderr


def test_the_installed_package_is_the_one_that_is_imported(installed: Path, tmp_path: Path) -> None:
    code = "import weft; from weft.assets import MODEL_DIR as m; print(weft.__file__, (m / 'config.json').is_file())"
    environment = os.environ | {"PYTHONPATH": str(installed), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [str(installed / "weft" / "__init__.py"), "True"]
