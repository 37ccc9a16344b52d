"""The engine for asyncio programs: ``AsyncLLM(model)``.

Job: start the engine in a process of its own, accept prompts, stream ``RequestOutput`` objects. Owns: that process.
Does not know: HTTP. ``weft serve`` has the same parts with a server around them.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from weft.config import EngineConfig
from weft.config.parallelism import refuse_replicas
from weft.engine import wire
from weft.engine.async_engine import AsyncEngine
from weft.engine.async_rollouts import AsyncRolloutMethods
from weft.engine.chat_messages import Messages, render_chat
from weft.engine.chat_prompts import ChatPrompts
from weft.engine.input_processor import InputProcessor
from weft.engine.not_supported import ASYNC_NOT_SUPPORTED, refuse_method
from weft.engine.output_processor import in_form
from weft.engine.prompts import Prompt, check_call, refuse_lora
from weft.errors import ConfigError, EngineDeadError, RequestError
from weft.multimodal.processor import load_processor
from weft.outputs import RequestOutput
from weft.sampling_params import SamplingParams
from weft.text.chat_template import TemplateOptions
from weft.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from weft.engine.launcher import EngineProcess


class AsyncLLM(AsyncRolloutMethods):
    """An engine in a process of its own, used from one event loop in the main thread.

    Args:
        model: a folder or hub id. The bundled model if None.
        **settings: fields of ``EngineConfig``, by name.

    Attributes:
        config: the resolved settings, after the start.
        tokenizer: None with ``skip_tokenizer_init``.

    Raises:
        ConfigError, EngineDeadError: see ``start``.

    Example:
        >>> async with AsyncLLM() as llm:
        ...     async for output in llm.generate("12 + 30:", SamplingParams(max_tokens=20)):
        ...         print(output.outputs[0].text)
    """

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        refuse_replicas(settings)
        self._settings = settings | ({} if model is None else {"model": model})
        self._process: EngineProcess | None = None
        self._engine: AsyncEngine | None = None
        self._starting: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[wire.Capacity] | None = None
        self._failure: wire.Failed | None = None
        self._has_ended = False
        self._chats: ChatPrompts | None = None
        self._ids = itertools.count(1)
        self.config: EngineConfig | None = None
        self.tokenizer: Tokenizer | None = None

    @classmethod
    def from_engine_args(cls, engine_args: Any) -> AsyncLLM:
        """Return an engine with the settings of ``weft.AsyncEngineArgs``."""
        return cls(**engine_args.settings())

    async def start(self) -> AsyncLLM:
        """Start the engine and wait until it is ready. Does nothing if the engine runs. Concurrent calls wait for the
        same start; cancelling one of them does not stop it.

        Raises:
            ConfigError: a setting is not valid, or pyzmq is missing.
            EngineDeadError: the engine's process could not start for another reason, for example because the checkpoint
                is not supported, cannot be read, or does not fit into memory. The message names the reason.
        """
        if self._engine is not None:
            return self
        if self._starting is None:
            self._process = self._launch()
            self._ready = asyncio.get_running_loop().create_future()
            self._starting = asyncio.create_task(self._finish_start(self._process, self._ready))
        await asyncio.shield(self._starting)
        return self

    async def _finish_start(self, process: EngineProcess, ready: asyncio.Future[wire.Capacity]) -> None:
        capacity = await ready
        assert self.config is not None
        try:
            if not self.config.skip_tokenizer_init:
                self.tokenizer = await asyncio.to_thread(Tokenizer.load, self.config.tokenizer_path)
                self._chats = ChatPrompts(self.tokenizer)
            media = await asyncio.to_thread(load_processor, self.config)
        except BaseException:
            await self.shutdown()
            raise
        if self._has_ended and self._failure is not None:
            raise EngineDeadError(self._failure.message)
        inputs = InputProcessor(self.config, self.tokenizer, capacity.max_model_len, media=media)
        self._engine = AsyncEngine(process, inputs, self.tokenizer)

    def _launch(self) -> EngineProcess:
        try:
            from weft.engine.launcher import EngineCommand, EngineProcess
        except ImportError as error:
            raise ConfigError(f"AsyncLLM needs {error.name}; install it with: pip install 'weft[server]'") from error
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError("AsyncLLM must be started in the main thread: the engine ends with the thread it is from")
        return EngineProcess(EngineCommand(self._settings), self._handle, self._on_exit)

    def _handle(self, message: wire.FromEngine) -> None:
        match message:
            case wire.Outputs():
                if self._engine is not None:
                    self._engine.receive(message)
            case wire.PrefixCacheReset():
                assert self._engine is not None
                self._engine.on_prefix_cache_reset(message)
            case wire.Controlled():
                assert self._engine is not None
                self._engine.on_controlled(message)
            case wire.Configured():
                self.config = message.config
            case wire.Ready():
                assert self._ready is not None
                self._ready.set_result(message.capacity)
            case wire.Failed():
                self._failure = message

    def _on_exit(self, status: int) -> None:
        """Fail the open requests after the engine process ended."""
        self._has_ended = True
        failure = self._failure = self._failure or wire.Failed(f"the engine process ended with status {status}")
        if self._engine is not None:
            self._engine.die(failure.message)
        elif self._ready is not None and not self._ready.done():
            error = ConfigError(failure.message) if failure.user_error else EngineDeadError(failure.message)
            self._ready.set_exception(error)

    def shutdown(self) -> asyncio.Future[None]:
        """End the engine. Open requests end with ``EngineDeadError``. The result can be awaited, but need not be."""
        return asyncio.ensure_future(self._end())

    async def _end(self) -> None:
        if self._process is not None:
            self._failure = self._failure or wire.Failed("this engine was shut down; make a new AsyncLLM")
            await self._process.stop()

    async def __aenter__(self) -> AsyncLLM:
        try:
            return await self.start()
        except BaseException:
            await self.shutdown()
            raise

    async def __aexit__(self, *exception: object) -> None:
        await self.shutdown()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        *,
        lora_request: None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Complete one prompt. Leaving the loop early aborts the request.

        Args:
            prompt: a text, token ids, or a dict; see ``LLM.generate``.
            sampling_params: None: ``SamplingParams()``. Logits processors cannot reach the engine's process.
            request_id: the name for ``abort``; None: a free name.
            priority: priority under the ``priority`` policy; smaller runs first.
            lora_request: None, which scripts for vLLM may state.

        Yields:
            A snapshot of the whole output whenever something is new, or what ``output_kind`` asks for. The last one is
            ``finished``.

        Raises:
            RequestError: the prompt or a parameter is not valid.
            EngineDeadError: the engine ended.
        """
        params = check_call(sampling_params, request_id, priority)
        refuse_lora(lora_request)
        await self.start()
        if params.logits_processors:
            raise RequestError("logits_processors need the engine in this process; use LLM", "logits_processors")
        engine = self._engine
        assert engine is not None
        prepared = await asyncio.to_thread(engine.inputs.prepare_prompt, prompt, params)
        own = (f"request-{i}" for i in self._ids)
        name = request_id or next(name for name in own if engine.stream(name) is None)
        async with engine.submit(name, [prepared], params, priority=priority) as stream:
            async for news in stream:
                output = in_form(params.output_kind, stream.snapshot()[0], [delta for _, delta in news])
                if output is not None:
                    yield output

    async def chat(
        self,
        messages: Messages,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        priority: int = 0,
        chat_template: str | None = None,
    ) -> AsyncIterator[RequestOutput]:
        """Answer one conversation. See ``LLM.chat`` for the arguments and ``generate`` for the results."""
        await self.start()
        assert self.config is not None and self._engine is not None
        prompt = await asyncio.to_thread(
            render_chat,
            self._chats,
            messages,
            TemplateOptions(tools, chat_template_kwargs, add_generation_prompt, continue_final_message),
            turn_boundaries=self.config.keeps_states,
            text_only=self._engine.inputs.text_only,
            chat_template=chat_template,
        )
        async for output in self.generate(prompt, sampling_params, request_id, priority):
            yield output

    async def abort(self, request_id: str) -> bool:
        """End a request now. Its stream ends with the tokens so far and finish reason ``"abort"``. Returns False for an
        unknown request."""
        stream = self._engine.stream(request_id) if self._engine is not None else None
        if stream is None:
            return False
        stream.abort()
        return True

    async def reset_prefix_cache(self) -> bool:
        """Drop every cached prefix. Returns False, and changes nothing, while requests run."""
        await self.start()
        assert self._engine is not None
        return await self._engine.reset_prefix_cache()

    async def _control(self, action: str, mode: str = "keep", **arguments: Any) -> wire.Controlled:
        await self.start()
        assert self._engine is not None
        return await self._engine.control(action, mode, **arguments)

    def get_tokenizer(self) -> Any:
        """The tokenizer as ``transformers`` loads it. Raises RequestError if there is none (yet)."""
        if self.tokenizer is None:
            raise RequestError("there is no tokenizer: the engine has not started, or skip_tokenizer_init=True")
        return self.tokenizer.hf

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            refuse_method(self, ASYNC_NOT_SUPPORTED, name)
