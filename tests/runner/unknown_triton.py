"""``tests.runner.compile_only`` under a Triton of an unknown version, whose internals Weft must not import:

python -m tests.runner.unknown_triton FOLDER [...]
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Mapping
from typing import Any

from weft.platforms import triton_version

PUBLIC = {"triton", "triton.knobs", "triton.language", "triton.language.extra.cuda", "triton.compiler"}
PUBLIC |= {"triton.runtime.driver"}

_import = builtins.__import__


def _import_public(name: str, globals: Mapping[str, Any] | None = None, *rest: Any, **named: Any) -> Any:
    importer = str((globals or {}).get("__name__"))
    if importer.startswith("weft.") and name.split(".")[0] == "triton" and name not in PUBLIC:
        raise ImportError(f"{importer} asks for {name}, which an unknown Triton may not have")
    return _import(name, globals, *rest, **named)


if __name__ == "__main__":
    triton_version.KNOWN = ()
    builtins.__import__ = _import_public
    from tests.runner import compile_only

    compile_only.main(*sys.argv[1:])
