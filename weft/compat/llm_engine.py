"""vLLM's engine classes for step by step and for asyncio use, over ``LLM`` and ``AsyncLLM``."""

from collections.abc import Iterable
from typing import Any, Self

from weft.engine.async_llm import AsyncLLM as AsyncLLMEngine
from weft.engine.llm import LLM
from weft.engine.prompts import Prompt, refuse_lora
from weft.outputs import RequestOutput
from weft.sampling_params import SamplingParams

__all__ = ["AsyncLLMEngine", "LLMEngine"]


class LLMEngine:
    """``LLM`` with the method names and the order of arguments of vLLM's ``LLMEngine``. Other attributes are those of
    ``LLM``."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> Self:
        """Start an engine with the settings of ``EngineArgs``."""
        return cls(LLM(**engine_args.settings()))

    def add_request(
        self, request_id: str, prompt: Prompt, params: SamplingParams, *, lora_request: None = None, priority: int = 0
    ) -> str:
        refuse_lora(lora_request)
        return self._llm.add_request(prompt, params, request_id, priority)

    def step(self) -> list[RequestOutput]:
        return self._llm.step()

    def has_unfinished_requests(self) -> bool:
        return not self._llm.is_finished()

    def abort_request(self, request_id: str | Iterable[str]) -> None:
        """End one request or several now."""
        for name in [request_id] if isinstance(request_id, str) else list(request_id):
            self._llm.abort(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llm, name)
