"""``python -m tests.server.fake_server [flags of weft serve]``: the server over the fake engine."""

from __future__ import annotations

import argparse
import sys

from weft.cli.serve import add_parser, serve_engine_settings, server_settings
from weft.server.main import serve

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    add_parser(parser.add_subparsers())
    args = parser.parse_args(["serve", *sys.argv[1:]])
    sys.exit(serve(server_settings(args), serve_engine_settings(args), engine_module="tests.server.fake_engine"))
