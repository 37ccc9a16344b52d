"""Abilities of the served model: what ``/v1/models`` tells beyond OpenAI's fields, for the page and other clients."""

from typing import Any

from weft.sampling_params import SamplingParams
from weft.server.output_parser import THINK
from weft.server.service import Service


def abilities(service: Service) -> dict[str, Any]:
    """The ``weft`` field of a model.

    ``tools``, ``reasoning`` and ``thinking_switch`` say what the chat template knows and the server parses. They do not
    say how well the model does it. ``defaults`` holds the parameters of a request that names none; ``max_tokens`` is
    None where the context is the limit.
    """
    engine, settings = service.engine, service.settings
    template = (engine.tokenizer.template.text or "") if engine.tokenizer is not None else ""
    answer_start = template.rpartition("add_generation_prompt")[2]
    reads_reasoning = settings.reasoning_parser != "none"
    row = engine.inputs.sampling.resolve(SamplingParams())
    defaults = {name: getattr(row, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    return {
        "images": engine.inputs.media is not None,
        "tools": settings.tool_call_parser != "none" and "tools" in template,
        "reasoning": reads_reasoning and THINK in answer_start,
        "thinking_switch": reads_reasoning and "enable_thinking" in template,
        "structured_outputs": engine.tokenizer is not None,
        "defaults": defaults | {"max_tokens": service.config.generation.max_new_tokens},
    }
