"""``weft bench scaling``: one model on one GPU, split over several, and in several replicas."""

import argparse
import dataclasses
from typing import Any

from weft.bench import report
from weft.bench.throughput import ThroughputWorkload
from weft.cli.flags import add_engine_flags, engine_settings
from weft.cli.parser import add_verb, check_lowest, check_range
from weft.errors import ConfigError


def add_parser(kinds: Any) -> None:
    parser = add_verb(kinds, "scaling", run, "decode and throughput on several GPUs, and by replicas")
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--sizes", nargs="+", default=["1x1", "2x1", "1x2"], metavar="NxM",
        help="GPUs of a replica x replicas (default: 1x1 2x1 1x2)",
    )  # fmt: skip
    group.add_argument(
        "--batch-sizes", type=int, nargs="+", default=[1, 8, 32, 128], metavar="N", help="decoded together"
    )
    group.add_argument("--prompt-len", type=int, default=1024, metavar="N", help="tokens per prompt of a batch")
    group.add_argument("--output-len", type=int, default=128, metavar="N", help="new tokens of a batch, 2 or more")
    group.add_argument("--num-prompts", type=int, default=256, metavar="N", help="of the queue (default: 256)")
    group.add_argument(
        "--queue-len", type=int, nargs=2, default=(100, 1024), metavar=("MIN", "MAX"),
        help="tokens of the queue's prompts and outputs (default: 100 1024)",
    )  # fmt: skip
    group.add_argument("--warmups", type=int, default=1, metavar="N", help="runs of the queue that do not count")
    group.add_argument("--repeats", type=int, default=3, metavar="N", help="of each batch (default: 3)")
    group.add_argument("--json", metavar="FILE", help="write the figures there")
    add_engine_flags(parser)


def run(args: argparse.Namespace) -> int:
    _check(args)
    try:
        from weft.bench import scaling
    except ImportError as error:
        raise ConfigError(f"replicas need {error.name}; install it with: pip install 'weft[server]'") from error
    queue = ThroughputWorkload(args.num_prompts, tuple(args.queue_len), tuple(args.queue_len), warmups=args.warmups)
    workload = scaling.ScalingWorkload(
        tuple(map(_size, args.sizes)), queue, tuple(args.batch_sizes), args.prompt_len, args.output_len, args.repeats
    )
    json_path = report.open_json(args.json)
    settings = {"skip_tokenizer_init": True, "enable_prefix_caching": False} | engine_settings(args)
    found = scaling.measure(settings, workload)
    config = found["config"]
    head = {"benchmark": "scaling"} | report.provenance(config.device) | {"workload": dataclasses.asdict(workload)}
    report.write_json(json_path, head | {"config": report.settings(config), "results": found["results"]})
    columns = ("GPUs per replica", "replicas", "tokens/s", "gain", *(f"ms per step, {n}" for n in args.batch_sizes))
    names = ("tensor_parallel_size", "data_parallel_size", "output_tokens_per_s", "throughput_gain")
    rows = [
        [str(row[name]) for name in names] + [str(ms) for ms in row["decode_ms"].values()] for row in found["results"]
    ]
    report.table(f"Scaling on {report.device_name(config.device)}", columns, rows)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Check a flag's numbers. Raises ConfigError, naming the flag."""
    check_lowest(args, prompt_len=1, output_len=2, num_prompts=1, warmups=0, repeats=1, batch_sizes=1)
    check_range(args, "queue_len")
    given = engine_settings(args)
    for name in ("tensor_parallel_size", "data_parallel_size"):
        if name in given:
            raise ConfigError(f"--{name.replace('_', '-')} is what this benchmark varies; use --sizes")
    largest, room, fewest = max(args.batch_sizes), given.get("max_num_seqs"), min(n for _, n in map(_size, args.sizes))
    if room is not None and largest > fewest * room:
        raise ConfigError(
            f"--batch-sizes {largest}: max_num_seqs={room} run at a time in a replica, and one of --sizes has "
            f"{fewest}; give less"
        )


def _size(text: str) -> tuple[int, int]:
    """Format a size; ``2x1`` is two GPUs and one replica."""
    gpus, _, replicas = text.partition("x")
    if not (gpus.isdecimal() and replicas.isdecimal() and int(gpus) and int(replicas)):
        raise ConfigError(f"--sizes {text}: give GPUs of a replica x replicas, like 2x1")
    return int(gpus), int(replicas)
