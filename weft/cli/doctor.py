"""``weft doctor``: what the machine has, what is missing, and the remedies.

Job: check packages, device, memory and limits, one line each, and whether a given model fits. Owns: the checks. Nothing
but torch is imported, and only if it is installed.
"""

import argparse
import os
import platform
import re
import resource
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from weft.cli.config import capacity, gpu_bytes
from weft.cli.parser import add_verb
from weft.config.capability import has_fp8
from weft.config.quantization import ONLINE_FORMS
from weft.platforms.triton_version import is_gluon_tested, kernel_choice, triton_version
from weft.processes.preload import has_bytecode

Verdict = Literal["ok", "note", "missing"]

_MIN_FILES = 4096
_MIN_FREE_GIB = 1.0
_MIN_FREE_DISK_GIB = 5.0
_MIN_FREE_CACHE_GIB = 1.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. After ``missing`` Weft does not run; after ``note`` it runs slower or lacks a feature."""

    what: str
    verdict: Verdict
    found: str
    remedy: str = ""


def add_parser(verbs: Any, help: str) -> None:
    parser = add_verb(verbs, "doctor", run, help, arguments="[MODEL]")
    parser.add_argument("model", nargs="?", help="folder or hub id of a model: say whether it fits")
    parser.add_argument("--quantization", choices=tuple(ONLINE_FORMS), help="as it would be started")


def run(args: argparse.Namespace) -> int:
    findings = [*examine(), *([] if args.model is None else [model_fits(args.model, args.quantization)])]
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        remedy = f"; {finding.remedy}" if finding.remedy else ""
        print(f"{finding.verdict:<8}{finding.what:<{width}}  {finding.found}{remedy}")
    return 1 if any(finding.verdict == "missing" for finding in findings) else 0


def examine() -> Iterator[Finding]:
    """All findings, in the order in which a start would meet the problems."""
    yield _python()
    yield from _packages()
    yield _device()
    yield from _largest_models()
    yield _kernels()
    yield _compiler()
    yield _bytecode()
    yield _memory()
    yield _disk()
    yield _kernel_cache()
    yield _open_files()
    yield _bundled_model()


def _python() -> Finding:
    return Finding("Python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def _packages() -> Iterator[Finding]:
    """Check the packages in the distribution's metadata: required ones, and optional ones of extras."""
    import importlib.metadata  # slow, and --help does not need it

    try:
        requirements = importlib.metadata.requires("weft") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding("weft", "note", "not installed, so its requirements are not known", "pip install -e .")
        return
    for requirement in requirements:
        name = re.split(r"[^\w.-]", requirement, maxsplit=1)[0]
        extra = re.search(r"extra == ['\"](\w+)['\"]", requirement)
        if extra is None or extra.group(1) in ("server", "gpu"):
            yield _package(name, requirement, extra.group(1) if extra else None)


def _package(name: str, requirement: str, extra: str | None) -> Finding:
    import importlib.metadata

    wanted = re.search(r">=\s*([\d.]+)", requirement)
    what = name if extra is None else f"{name} ({extra})"
    install = f"pip install '{name}{'>=' + wanted.group(1) if wanted else ''}'"
    verdict: Verdict = "missing" if extra is None else "note"
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Finding(what, verdict, "not installed", install if extra is None else f"pip install 'weft[{extra}]'")
    if wanted and _numbers(found) < _numbers(wanted.group(1)):
        return Finding(what, verdict, f"{found}, older than {wanted.group(1)}", install)
    return Finding(what, "ok", found)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def _device() -> Finding:
    from weft.config.resolution import cuda_available

    try:
        if not cuda_available():
            hint = "for a GPU, install NVIDIA's driver and a torch with CUDA"
            return Finding("GPU", "note", "none that torch can use: the CPU computes", hint)
        import torch

        free, total = torch.cuda.mem_get_info()
        capability = ".".join(map(str, torch.cuda.get_device_capability()))
        found = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}, compute capability {capability}, "
        return Finding("GPU", "ok", found + f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free")
    except (ImportError, RuntimeError) as error:
        return Finding("GPU", "note", f"cannot be used: {error}".splitlines()[0], "the CPU computes; check the driver")


def _largest_models() -> Iterator[Finding]:
    """The weights for which a GPU has room, by their form; four fifths of the memory, since caches need some."""
    from weft.config.resolution import cuda_available

    if cuda_available():
        import torch

        yield Finding("weights", "ok", largest_models(gpu_bytes(), has_fp8(torch.cuda.get_device_capability())))


def largest_models(total: int, fp8: bool) -> str:
    """The number of weights that fit into four fifths of ``total`` bytes, by their form; ``fp8``: the GPU has it."""
    sizes = {"bfloat16": 2.0} | {
        form: quantization.main.bytes_per_weight for form, quantization in ONLINE_FORMS.items() if fp8 or form != "fp8"
    }
    fitting = (f"{0.8 * total / size / 1e9:.0f} billion in {form}" for form, size in sizes.items())
    return f"room for {', '.join(fitting)}, and a fifth of the memory for caches"


def model_fits(model: str, quantization: str | None) -> Finding:
    """Whether a model fits, and how many tokens its KV cache could have beside one recurrent state."""
    from weft.config.resolution import resolve

    config = resolve(model=model, quantization=quantization, skip_tokenizer_init=True)
    costs = capacity(config)
    what = f"{Path(model).name} {config.quantization or config.dtype}"
    if "error" in costs:
        return Finding(what, "note", costs["error"])
    room = costs.get("kv_tokens")
    if room is None and costs["kv_page_bytes"]:
        room = max(0, costs["free_bytes"] - costs["state_slot_bytes"]) // costs["kv_page_bytes"] * config.page_size
    tokens = "room for any number of tokens" if room is None else f"room for {room:,} tokens"
    return Finding(what, "ok", f"{costs['weight_bytes'] / 1e9:.1f} GB of weights, {tokens}")


def _kernels() -> Finding:
    """The meaning of the installed Triton for speed."""
    version = triton_version()
    tested = "torch 2.11, 2.12 and 2.13 bring a Triton with which all kernels are tested on a GPU"
    if version is None:
        return Finding("kernels", "note", kernel_choice(None), "a GPU needs the Triton that its torch requires")
    if not is_gluon_tested(version):
        return Finding("kernels", "note", kernel_choice(version), tested)
    return Finding("kernels", "ok", kernel_choice(version) + _without_hopper())


def _without_hopper() -> str:
    """Describe which kernels run instead of the kernels for Hopper, if the GPU has another architecture."""
    from weft.config.resolution import cuda_available

    if not cuda_available():
        return ""
    import torch

    major, minor = torch.cuda.get_device_capability()
    others = f"; those for Hopper give way to others on this GPU (capability {major}.{minor}), with the same results"
    refused = "" if has_fp8((major, minor)) else "; FP8 weights and caches are refused"
    return "" if major == 9 else others + refused


def _compiler() -> Finding:
    """Check for a C compiler, with which Triton builds kernel launchers."""
    name = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if name is None or shutil.which(name) is None:
        return Finding(
            "C compiler",
            "note",
            f"{name} is not there" if name else "none found",
            "install gcc: kernels on a GPU need it",
        )
    return Finding("C compiler", "ok", name)


def _bytecode() -> Finding:
    """Check for bytecode of modules. pip compiles modules when installing; uv does so only if asked to."""
    if has_bytecode() or not sys.dont_write_bytecode:
        return Finding("bytecode", "ok", "Python keeps compiled modules")
    found = "torch or Weft has no compiled modules, and PYTHONDONTWRITEBYTECODE forbids Python to keep them"
    folders = f"{sysconfig.get_path('purelib')} {Path(__file__).parents[1]}"
    remedy = f"python -m compileall -q -j 0 {folders}: every start is up to two seconds faster then"
    return Finding("bytecode", "note", found, remedy)


def _disk() -> Finding:
    """Check the folder of checkpoints from the hub."""
    place = _nearest_existing(Path(os.environ.get("HF_HOME") or Path.home()))
    free = shutil.disk_usage(place).free / 2**30
    found = f"{free:.1f} GiB free under {place}"
    if free < _MIN_FREE_DISK_GIB:
        return Finding("disk", "note", found, "make room, or set HF_HOME to a larger disk for checkpoints")
    return Finding("disk", "ok", found)


def _kernel_cache() -> Finding:
    """Check the folder of compiled kernels. A start needs to write there, unless every kernel is in it already."""
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    folder = Path(os.environ.get("TRITON_CACHE_DIR") or home / ".triton" / "cache")
    place = _nearest_existing(folder)
    remedy = "or set TRITON_CACHE_DIR to another folder: kernels on a GPU are compiled into it"
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        return Finding("kernel cache", "note", f"{folder} cannot be written to", f"give it to this user, {remedy}")
    free = shutil.disk_usage(place).free / 2**30
    if free < _MIN_FREE_CACHE_GIB:
        return Finding("kernel cache", "note", f"{free:.1f} GiB free in {folder}", f"make room, {remedy}")
    return Finding("kernel cache", "ok", f"{folder} can be written to")


def _nearest_existing(path: Path) -> Path:
    while not os.path.exists(path):  # also False for a path that this user may not see
        path = path.parent
    return path


def _memory() -> Finding:
    fields = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE))
    free = int(fields["MemAvailable"]) / 2**20
    found = f"{free:.1f} of {int(fields['MemTotal']) / 2**20:.1f} GiB free, {os.cpu_count()} processors"
    if free < _MIN_FREE_GIB:
        return Finding("memory", "note", found, "lower --cpu-cache-gib, or end other programs")
    return Finding("memory", "ok", found)


def _open_files() -> Finding:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit < _MIN_FILES:
        return Finding("open files", "note", f"at most {limit}", "ulimit -n 65536 before serving many connections")
    return Finding("open files", "ok", f"at most {limit:,}")


def _bundled_model() -> Finding:
    from weft.config.locate import BUNDLED_NAME, locate

    folder = locate(BUNDLED_NAME, weights=False)
    absent = [name for name in ("config.json", "model.safetensors", "tokenizer.json") if not (folder / name).is_file()]
    if absent:
        return Finding(
            BUNDLED_NAME, "note", f"{', '.join(absent)} not there", "install Weft again, with its data files"
        )
    return Finding(BUNDLED_NAME, "ok", "the bundled model is complete")
