"""The offline engine: ``LLM(model).generate(prompts)``.

Job: the public Python interface: prompts in, ``RequestOutput`` objects out, all at once or step by step.
Owns: the engine core, the tokenizer, and the open requests' outputs. Does not know: scheduling, caches, models.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from weft.config import EngineConfig, resolve
from weft.config.parallelism import refuse_replicas
from weft.engine.chat_messages import Messages, conversations_of, render_chat
from weft.engine.chat_prompts import ChatPrompts
from weft.engine.input_processor import InputProcessor
from weft.engine.llm_rollouts import RolloutMethods
from weft.engine.not_supported import NOT_SUPPORTED, refuse_method
from weft.engine.output_processor import OutputStream
from weft.engine.progress_bar import ProgressBar
from weft.engine.prompts import Prompt, as_list, check_call, per_prompt, refuse_lora
from weft.errors import EngineDeadError, RequestError, UnavailableError
from weft.executor.external import become_rank
from weft.executor.rank_process import begin_start
from weft.multimodal.processor import load_processor
from weft.outputs import RequestOutput
from weft.processes.collector import collector_off
from weft.processes.interrupts import interrupts_held
from weft.processes.preload import import_torch, import_torch_for_gpu
from weft.request import Request
from weft.runner.startup import StartupTimes
from weft.sampling_params import SamplingParams
from weft.stats import EngineStats
from weft.text.chat_template import TemplateOptions
from weft.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class LLM(RolloutMethods):
    """An engine in this process.

    Args:
        model: a folder or hub id. The bundled model if None.
        **settings: fields of ``EngineConfig``, by name (``weft config`` explains them).

    Attributes:
        tokenizer: None with ``skip_tokenizer_init``.
        startup: seconds of each stage of the start. ``kernels`` includes ``weights``, which load while kernels compile.

    Raises:
        ConfigError: an unknown or invalid setting.
        UnsupportedModelError: the checkpoint's architecture or an option of its config is not supported.
        WeightsError: tensors are missing, left over, of the wrong shape, or unreadable.
        CapacityError: weights or caches do not fit into memory.

    Example:
        >>> with LLM() as llm:
        ...     outputs = llm.chat([{"role": "user", "content": "What is 12 + 30?"}])
        ...     print(outputs[0].outputs[0].text)
    """

    @collector_off()
    def __init__(self, model: str | None = None, **settings: Any) -> None:
        refuse_replicas(settings)
        become_rank(settings)
        times = StartupTimes()
        ranks = begin_start(settings)
        try:
            with times.stage("libraries"):
                import_torch_for_gpu(settings)
            with times.stage("config"):
                self.config: EngineConfig = resolve(model=model, **settings)
            with times.stage("tokenizer"):
                self.tokenizer = None if self.config.skip_tokenizer_init else Tokenizer.load(self.config.tokenizer_path)
                media = load_processor(self.config)
            with times.stage("libraries"):
                import_torch()
                import weft.runner.model_runner  # noqa: F401 (what every executor runs)
                from weft.engine.core import EngineCore
            self._core = EngineCore(self.config, ranks)
        except BaseException:
            for rank in ranks:
                rank.kill()
            raise
        self.startup: dict[str, float] = times.seconds | self._core.startup
        self._inputs = InputProcessor(self.config, self.tokenizer, self.max_model_len, media=media)
        self._chats = ChatPrompts(self.tokenizer) if self.tokenizer is not None else None
        self._streams: dict[str, OutputStream] = {}
        self._by_request: dict[str, OutputStream] = {}
        self._changed: dict[str, OutputStream] = {}
        self._ids = itertools.count()
        self._is_shut_down = False

    @property
    def max_model_len(self) -> int:
        """Context length in tokens, after clamping to what the cache can hold."""
        return self._core.plan.max_model_len

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        priority: int | Sequence[int] = 0,
        *,
        lora_request: None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or many. An interrupt (Ctrl-C) waits until a step is over, and leaves nothing behind. A
        second one does not wait.

        Args:
            prompts: a text, a list of token ids, a dict with ``prompt`` or ``prompt_token_ids``, or a list of those. A
                dict may have ``multi_modal_data``: ``{"image": [...], "video": [...]}``, see docs/images.md.
            sampling_params: one for all, or one per prompt; None: ``SamplingParams()``.
            use_tqdm: show a progress bar with prefill and decode tokens per second.
            priority: priority under the ``priority`` policy, smaller first; one for all or one per prompt.
            lora_request: None, which scripts for vLLM may state.

        Returns:
            One output per prompt, in the order given.

        Raises:
            RequestError: a prompt or parameter is not valid. No prompt was started then.
            EngineDeadError: after ``shutdown``.
        """
        self._check_alive()
        refuse_lora(lora_request)
        batch = as_list(prompts)
        given = SamplingParams() if sampling_params is None else sampling_params
        params = per_prompt("sampling_params", given, SamplingParams, len(batch))
        priorities = per_prompt("priority", priority, int, len(batch))
        if self._streams:
            raise RequestError(
                "generate() cannot run while requests of add_request() are open; finish or abort them first"
            )
        ids: list[str] = []
        with interrupts_held(second_too=False) as deliver_interrupts:
            try:
                for prompt, p, rank in zip(batch, params, priorities, strict=True):
                    ids.append(self.add_request(prompt, p, priority=rank))
                    deliver_interrupts()
                return self._run(ids, use_tqdm, deliver_interrupts)
            except BaseException:
                for request_id in ids:
                    self._abort(request_id)
                self._drain()
                raise

    def _drain(self) -> None:
        """Process the results of a step whose requests have ended meanwhile, which frees their pages and slots."""
        while self._core.has_work:
            self._core.step()

    def _run(self, ids: list[str], use_tqdm: bool, deliver_interrupts: Callable[[], None]) -> list[RequestOutput]:
        done: dict[str, RequestOutput] = {}
        with ProgressBar(total=len(ids), enabled=use_tqdm) as progress:
            while not self.is_finished():
                changed = self._advance()
                progress.step(changed)
                for stream in changed:
                    if stream.finished:
                        done[stream.request_id] = stream.output()
                        self._drop(stream.request_id)
                deliver_interrupts()
        self._drain()
        return [done[request_id] for request_id in ids]

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        *,
        chat_template: str | None = None,
        chat_template_content_format: str = "auto",
        lora_request: None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, rendered by a chat template.

        Args:
            messages: a list of ``{"role": …, "content": …}``, or a list of such lists; content is a text or a list of
                parts like ``{"type": "text", "text": …}`` and ``{"type": "image", "image": …}``.
            tools: function descriptions (JSON schema) for the template.
            chat_template_kwargs: further arguments of the template, for example ``enable_thinking``.
            add_generation_prompt, continue_final_message: as in ``transformers``' ``apply_chat_template``.
            chat_template: the text of a template; None: the checkpoint's own.
            chat_template_content_format, lora_request: "auto" and None, which scripts for vLLM may state.

        Raises:
            RequestError: no tokenizer or chat template, or messages that the template refuses.
        """
        if chat_template_content_format != "auto":
            raise RequestError(
                f"chat_template_content_format={chat_template_content_format!r} is not supported: content is a text, "
                "or a list of parts if there are images; use auto",
                "chat_template_content_format",
            )
        options = tools, chat_template_kwargs, add_generation_prompt, continue_final_message
        prompts = [self.render_chat(m, *options, chat_template=chat_template) for m in conversations_of(messages)]
        return self.generate(prompts, sampling_params, use_tqdm, lora_request=lora_request)

    def render_chat(
        self,
        messages: Messages,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        *,
        chat_template: str | None = None,
    ) -> dict[str, Any]:
        """The prompt of a conversation: ``{"prompt": text, "prompt_token_ids": ids}``.

        For hybrid models also ``checkpoint_positions``: turn boundaries, at which recurrent states are stored because
        later prompts of the conversation diverge there. With images also ``multi_modal_data``.
        """
        return render_chat(
            self._chats,
            messages,
            TemplateOptions(tools, chat_template_kwargs, add_generation_prompt, continue_final_message),
            turn_boundaries=self.config.keeps_states,
            text_only=self._inputs.text_only,
            chat_template=chat_template,
        )

    def get_tokenizer(self) -> Any:
        """The tokenizer as ``transformers`` loads it, with its own methods. Raises RequestError if there is none."""
        if self.tokenizer is None:
            raise RequestError("there is no tokenizer: skip_tokenizer_init=True")
        return self.tokenizer.hf

    def get_default_sampling_params(self) -> SamplingParams:
        """The meaning of ``sampling_params=None``: the checkpoint's defaults, resolved for each request."""
        return SamplingParams()

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
    ) -> str:
        """Queue a request for ``step``. Returns its id.

        Raises:
            RequestError: the prompt, a parameter or the id is not valid. Other requests are not affected.
            EngineDeadError: after ``shutdown``.
        """
        self._check_alive()
        params = check_call(sampling_params, request_id, priority)
        request_id = self._check_id(request_id)
        prepared = self._inputs.prepare_prompt(prompt, params)
        requests = self._inputs.make_requests(
            request_id, prepared, params, self._inputs.sampling.resolve(params), priority
        )
        stream = OutputStream(request_id, prepared, requests, params, self.tokenizer)
        self._streams[request_id] = stream
        for request in requests:
            self._by_request[request.request_id] = stream
            self._core.add(request)
        return request_id

    def _check_alive(self) -> None:
        self._check_not_dead()
        if self._core.unavailable:
            raise UnavailableError(self._core.unavailable)

    def _check_not_dead(self) -> None:
        if self._is_shut_down:
            raise EngineDeadError("this engine was shut down; make a new LLM")
        if self._core.failure is not None:
            raise EngineDeadError(f"this engine is dead, make a new LLM: {self._core.failure}")

    def _check_id(self, request_id: str | None) -> str:
        if request_id is None:
            while (name := f"request-{next(self._ids)}") in self._streams:
                pass
            return name
        if request_id in self._streams:
            raise RequestError(f"request id {request_id!r} is already in use; choose another", "request_id")
        return request_id

    def step(self) -> list[RequestOutput]:
        """Run one step of the engine.

        Returns:
            A snapshot of every request that got a token or ended, in the form of its ``output_kind``. A ``finished``
            request appears once.
        """
        outputs = [output for stream in self._advance() if (output := stream.emit()) is not None]
        for output in outputs:
            if output.finished:
                self._drop(output.request_id)
        self._drain_if_finished()
        return outputs

    def _advance(self) -> list[OutputStream]:
        """Run one step of the core. Returns the open outputs that have changed, with their new tokens."""
        self._take(self._core.step())
        changed, self._changed = self._changed, {}
        return list(changed.values())

    def _take(self, changed: Iterable[Request]) -> None:
        for request in changed:
            if (stream := self._by_request.get(request.request_id)) is None:
                continue  # aborted after its step had failed
            stop = stream.take(request)
            if stop is not None and not self._core.finish(request.request_id, "stop", stop):
                request.finish_reason, request.stop_reason = "stop", stop  # its last token completed the stop string
            self._changed[stream.request_id] = stream

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now. Returns its output so far, or None if it is unknown or has ended already."""
        output = self._abort(request_id)
        self._drain_if_finished()
        return output

    def _abort(self, request_id: str) -> RequestOutput | None:
        if (stream := self._streams.get(request_id)) is None:
            return None
        for request in stream.requests:
            if request.finish_reason is None:
                self._core.finish(request.request_id, "abort")
                stream.take(request)
        self._drop(request_id)
        return stream.output()

    def is_finished(self) -> bool:
        return not self._streams

    def _drain_if_finished(self) -> None:
        """Process the results of a step launched beyond the end of the last open request, which holds pages and a
        slot."""
        if self.is_finished():
            self._drain()

    def _drop(self, request_id: str) -> None:
        self._changed.pop(request_id, None)
        for request in self._streams.pop(request_id).requests:
            del self._by_request[request.request_id]

    def reset_prefix_cache(self) -> bool:
        """Drop every cached prefix. Returns False, and changes nothing, while requests run."""
        self._drain_if_finished()
        return self._core.reset_prefix_cache()

    def stats(self) -> EngineStats:
        """Gauges and counters: requests, pages and slots, cache hits and evictions, preemptions, drafts."""
        return self._core.stats()

    def shutdown(self) -> None:
        """Abort open requests, free weights and caches, and write the torch profile if ``profile_dir`` was given."""
        if not self._is_shut_down:
            self._is_shut_down = True
            for request_id in list(self._streams):
                self._abort(request_id)
            self._core.shutdown()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            refuse_method(self, NOT_SUPPORTED, name)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
