"""How a model is split over ranks, and who starts the ranks."""

import os
from collections.abc import Mapping, Set
from typing import Any

from weft.config.model import ModelConfig
from weft.config.sharding import divide
from weft.errors import ConfigError

TORCHRUN = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that torchrun sets for the processes that it starts."""


def is_launched() -> bool:
    """Whether torchrun started this process."""
    return all(variable in os.environ for variable in TORCHRUN)


def is_on_ray(settings: Mapping[str, Any]) -> bool:
    """Whether engines run in actors of a Ray cluster.

    Raises:
        ConfigError: two settings contradict each other.
    """
    replicas, ranks = settings.get("data_parallel_backend"), settings.get("distributed_executor_backend")
    if (replicas, ranks) in (("mp", "ray"), ("ray", "external_launcher")):
        raise ConfigError(
            f"data_parallel_backend={replicas!r} and distributed_executor_backend={ranks!r} do not go together; "
            "leave one out"
        )
    return "ray" in (replicas, ranks)


def refuse_replicas(settings: Mapping[str, Any]) -> None:
    """Raise ConfigError for settings of replicas, on behalf of a caller that runs one engine in this process."""
    if is_on_ray(settings):
        name = next(n for n in ("distributed_executor_backend", "data_parallel_backend") if settings.get(n) == "ray")
        raise ConfigError(
            f"{name}='ray': Ray finds machines for the engines of `weft serve`; here rank 0 runs in this process and "
            "the others beside it: use mp, in an actor of your own if Ray is to choose the machine"
        )
    if (settings.get("data_parallel_size") or 1) != 1:
        raise ConfigError(
            f"data_parallel_size={settings['data_parallel_size']}: replicas stand behind `weft serve`, which routes "
            "requests; leave it out here"
        )


def check_shares(model: ModelConfig, size: int, *, expert_parallel: bool) -> None:
    """Check that ``size`` ranks can share every number of the model that is split.

    Raises:
        ConfigError: a number does not divide; the message names it.
    """
    for modules in model.mixers.values():
        for mixer in modules.values():
            mixer.check_shares(size)
    moe = model.moe
    if moe is None or len(moe.sparse_layers) < model.num_hidden_layers:
        divide(model.intermediate_size, size, "intermediate_size")
    if moe is None:
        return
    if expert_parallel:
        divide(moe.num_experts, size, "num_experts")
    else:
        divide(moe.intermediate_size, size, "moe_intermediate_size")
    if moe.shared_expert_intermediate_size is not None:
        divide(moe.shared_expert_intermediate_size, size, "shared_expert_intermediate_size")


def choose_parallelism(values: dict[str, Any], reasons: dict[str, str], model: ModelConfig, given: Set[str]) -> None:
    """Check ``tensor_parallel_size`` and ``enable_expert_parallel``, and choose ``distributed_executor_backend``.
    ``given``: the user's settings."""
    size, experts = values["tensor_parallel_size"], values["enable_expert_parallel"]
    if experts and (size == 1 or model.moe is None):
        why = "tensor_parallel_size=1" if size == 1 else f"{model.architecture}, which has no experts"
        raise ConfigError(f"enable_expert_parallel=True has no effect with {why}; leave it out")
    check_shares(model, size, expert_parallel=experts)
    if size > 1 and model.moe is not None and "enable_expert_parallel" not in given:
        reasons["enable_expert_parallel"] = "by width, which decodes faster; whole experts are faster for long prompts"
    if size > 1:
        _check_devices(values["device"], size)
        if model.vocab_size % size:
            share = -(-model.vocab_size // size)
            reasons["tensor_parallel_size"] = (
                f"given; the vocabulary of {model.vocab_size} is padded to {share * size}, {share} tokens a rank"
            )
    _choose_backend(values, reasons, size)


def _check_devices(device: str, size: int) -> None:
    if device != "cuda":
        return
    import torch  # torch is loaded already, since it found the GPU

    if torch.cuda.device_count() < size:
        raise ConfigError(
            f"tensor_parallel_size={size} needs {size} GPUs, torch sees {torch.cuda.device_count()}; lower it"
        )


def _choose_backend(values: dict[str, Any], reasons: dict[str, str], size: int) -> None:
    name = "distributed_executor_backend"
    on_ray = is_on_ray(values)
    if values["data_parallel_backend"] is None:
        values["data_parallel_backend"] = "ray" if on_ray else "mp"
        reasons["data_parallel_backend"] = "as the ranks" if on_ray else "processes of this machine"
    given, launched = values[name], is_launched() and not on_ray
    if given == "ray":
        values[name] = "mp" if size > 1 else "uni"
        reasons[name] = "ray: on the machine that it finds, all ranks in its bundle"
        return
    if given is None:
        values[name], reasons[name] = _default_backend(size, launched)
        return
    if given == "uni" and size > 1:
        raise ConfigError(f"{name}='uni' runs one rank, but tensor_parallel_size={size}; use mp")
    if given != "uni" and size == 1:
        raise ConfigError(f"{name}={given!r} has no effect with tensor_parallel_size=1; leave it out")
    if given == "external_launcher" and not launched:
        raise ConfigError(
            f"{name}='external_launcher': torchrun has not started this process (of its variables, "
            f"{', '.join(v for v in TORCHRUN if v not in os.environ)} are not set); start with "
            f"`torchrun --nproc-per-node {size} …`, or use mp"
        )


def _default_backend(size: int, launched: bool) -> tuple[str, str]:
    if size == 1:
        return "uni", "one rank: in the engine's process"
    if launched:
        return "external_launcher", "torchrun has started this process"
    return "mp", "one process per rank, on this machine"
