"""The test suite on a machine that has other work: ``python -m tests.busy [--runs N] [pytest arguments]``.

Job: keep every core busy with processes of its own while pytest runs, N times in a row; stop at the first run that is
not green. Not part of CI: it takes several times as long as the suite alone.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def busy_cores() -> Iterator[None]:
    """A process per core that computes for as long as the body runs."""
    burn = "import os\nwhile os.getppid() == {}: sum(range(100_000))"
    burners = [subprocess.Popen([sys.executable, "-c", burn.format(os.getpid())]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


def main() -> int:
    parser = argparse.ArgumentParser(prog="tests.busy", description=__doc__)
    parser.add_argument("--runs", type=int, default=3, metavar="N")
    args, pytest_arguments = parser.parse_known_args()
    with busy_cores():
        for number in range(1, args.runs + 1):
            print(f"run {number} of {args.runs}, beside {os.cpu_count()} busy processes", flush=True)
            status = subprocess.run([sys.executable, "-m", "pytest", *pytest_arguments]).returncode
            if status:
                return status
    return 0


if __name__ == "__main__":
    sys.exit(main())
