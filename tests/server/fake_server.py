"""``python -m tests.server.fake_server [flags of weft serve]``: the server over the fake engine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from weft.cli.serve import add_parser, serve_engine_settings, server_settings
from weft.server.main import serve


def run(flags: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers(), "serve a fake engine")
    args = parser.parse_args(["serve", *flags])
    sys.exit(serve(server_settings(args), serve_engine_settings(args), engine_module="tests.server.fake_engine"))


if __name__ == "__main__":
    run(sys.argv[1:])
