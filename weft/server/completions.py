"""``/v1/completions``.

Job: prompts in, texts out, whole or streamed. Owns: the response's shape. Does not know: how text comes about.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from weft.engine.async_engine import AsyncEngine
from weft.engine.input_processor import InputProcessor
from weft.engine.output_processor import CompletionDelta
from weft.engine.prompts import PreparedPrompt
from weft.engine.response_stream import PromptDelta
from weft.errors import RequestError
from weft.outputs import CompletionOutput, RequestOutput
from weft.sampling_params import SamplingParams
from weft.server.api_call import ApiCall, Context, check_model, read_request, submit_call
from weft.server.chat import need_tokenizer
from weft.server.client import Client
from weft.server.logprobs import completion_logprobs, prompt_logprobs
from weft.server.protocol import CompletionRequest
from weft.server.response_builder import OpenAIResponseBuilder
from weft.server.sampling import completion_params, names_ids
from weft.server.sse import JsonResponse, StreamResponse
from weft.server.structured import constraint_of
from weft.text.tokenizer import Tokenizer


async def completions(context: Context, body: bytes, client: Client) -> JsonResponse | StreamResponse:
    """Handle one request. Raises RequestError or ApiError."""
    request, read = await read_request(context, "/v1/completions", body, CompletionRequest, client)
    model = check_model(context, request.model)
    params = completion_params(request, context.settings)
    given = prompt_list(request.prompt, context.settings.max_prompts) if read is None else []

    async def prepare(engine: AsyncEngine) -> Sequence[PreparedPrompt]:
        salt = client.cache_salt(request.cache_salt)
        if read is not None:
            made = [PreparedPrompt(chat.text or None, chat.token_ids, chat.turn_boundaries) for chat in read]
            prompts = [engine.inputs.fitted(prompt, None) for prompt in made]
        else:
            run, inputs = context.service.render.run, engine.inputs
            prompts = await run(prepare_prompts, inputs, engine.tokenizer, request, params, given, size=len(body))
        if request.max_tokens:  # the default of 16 is lowered to the room there is
            engine.inputs.check_room(prompts, params)
        return [replace(prompt, cache_salt=salt) for prompt in prompts]

    call = await submit_call(
        context,
        client,
        request,
        "cmpl",
        params,
        len(given if read is None else read),
        prepare,
        model=model,
        constraint=constraint_of(request, context.settings.max_schema_bytes),
        operation="text_completion",
    )
    return CompletionResponseBuilder(call, request, params.n).response(request.stream)


def prompt_list(prompt: str | list[str | int | list[int]], limit: int) -> list[str | list[int]]:
    """The prompts; a text or a list of token ids is one."""
    if isinstance(prompt, str):
        return [prompt]
    is_id = [isinstance(item, int) for item in prompt]
    if prompt and all(is_id):
        return [prompt]  # type: ignore[list-item]
    if not prompt or any(is_id):
        raise RequestError("prompt must be a text, token ids, or a non-empty list of one of those", "prompt")
    prompts: list[str | list[int]] = prompt  # type: ignore[assignment]
    if len(prompts) > limit:
        raise RequestError(f"prompt holds {len(prompts)} prompts; this server takes {limit} per call", "prompt")
    return prompts


def prepare_prompts(
    inputs: InputProcessor,
    tokenizer: Tokenizer | None,
    request: CompletionRequest,
    params: SamplingParams,
    given: list[str | list[int]],
) -> list[PreparedPrompt]:
    """Tokenize and check the prompts of a call. Raises RequestError."""
    shared = {"checkpoint_positions": request.checkpoint_positions}
    special = request.add_special_tokens is not False
    if request.echo and tokenizer is None:
        raise RequestError(
            "echo shows the prompt as text, which needs the tokenizer, but skip_tokenizer_init=True; return_token_ids "
            "shows its ids",
            "echo",
        )
    prompts: list[PreparedPrompt] = []
    for prompt in given:
        fields: dict[str, Any] = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
        if isinstance(prompt, str) and not special:
            fields["prompt_token_ids"] = inputs.encode(prompt, params, add_special_tokens=False)
        prompts.append(inputs.prepare_prompt(fields | shared, params))
    return prompts


class CompletionResponseBuilder(OpenAIResponseBuilder):
    def __init__(self, call: ApiCall, request: CompletionRequest, n: int) -> None:
        super().__init__(call, request, "text_completion", "text_completion")
        self._request = request
        self._n = n
        self._hides_output = request.max_tokens == 0
        self._names_ids = names_ids(request, call.context.settings)
        self._offsets: dict[int, int] = {}
        self._has_begun: set[int] = set()

    async def body(self) -> dict[str, Any]:
        outputs = await self.call.stream.results()
        return self.whole(
            [self._choice(i, output, completion) for i, output in enumerate(outputs) for completion in output.outputs]
        )

    def usage(self) -> dict[str, Any]:
        usage = self.call.usage()
        if self._hides_output:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage

    def _choice(self, index: int, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any]:
        self.call.check_error(completion)
        text = "" if self._hides_output else completion.text
        if self._request.echo:
            text = self._prompt_text(index) + text
        choice: dict[str, Any] = {
            "index": index * self._n + completion.index,
            "text": text,
            "logprobs": self._logprobs(output, completion),
        } | self._end(completion)
        shows_ids = self._request.return_token_ids
        choice["token_ids"] = self._shown_ids(completion.token_ids) if shows_ids else None
        choice["prompt_token_ids"] = output.prompt_token_ids if shows_ids else None
        top = self._request.prompt_logprobs
        choice["prompt_logprobs"] = prompt_logprobs(output, top) if top is not None else None
        return choice

    def _end(self, completion: CompletionOutput | CompletionDelta) -> dict[str, Any]:
        """The reason of the end: with ``max_tokens=0`` always the length, since the one computed token is hidden."""
        if self._hides_output:
            return {"finish_reason": "length", "stop_reason": None}
        return {"finish_reason": completion.finish_reason, "stop_reason": completion.stop_reason}

    def _shown_ids(self, token_ids: list[int]) -> list[int]:
        return [] if self._hides_output else token_ids

    def _prompt_text(self, index: int) -> str:
        """The prompt as text, decoded if it came as token ids."""
        prompt = self.call.prompts[index]
        if prompt.text is not None:
            return prompt.text
        return need_tokenizer(self.call.engine).decode(prompt.token_ids, skip_special_tokens=False)

    def _logprobs(self, output: RequestOutput, completion: CompletionOutput) -> dict[str, Any] | None:
        if self._request.logprobs is None:
            return None
        entries: list[Any] = list(completion.logprobs or [])
        if self._hides_output:
            entries = []
        if not self._request.echo:
            return completion_logprobs(entries, self._request.logprobs, as_ids=self._names_ids)[0]
        prompt = list(output.prompt_logprobs or [])
        result, _ = completion_logprobs(prompt + entries, self._request.logprobs, as_ids=self._names_ids)
        token = output.prompt_token_ids[0]  # it has no log probability, but it has a name
        first = need_tokenizer(self.call.engine).token_text(token)
        result["tokens"][0] = f"token_id:{token}" if self._names_ids else first
        result["text_offset"][1:] = [offset + len(first) for offset in result["text_offset"][1:]]
        return result

    def first_events(self) -> Iterator[bytes]:
        for i in range(len(self.call.prompts) if self._request.echo else 0):
            for k in range(self._n):
                yield self._chunk({"index": i * self._n + k, "text": self._prompt_text(i)})

    def content(self, deltas: list[PromptDelta]) -> bytes:
        choices = [choice for delta in deltas if (choice := self._delta_choice(delta)) is not None]
        return b"".join(map(self._chunk, choices))

    def _chunk(self, choice: dict[str, Any]) -> bytes:
        full = {"logprobs": None, "finish_reason": None, "stop_reason": None} | choice
        return self.chunks.event(full, {"usage": self.usage()} if self.usage_always else {})

    def _delta_choice(self, prompt_delta: PromptDelta) -> dict[str, Any] | None:
        """A chunk's choice, or None if there is nothing to send yet."""
        prompt_index, delta = prompt_delta
        self.call.check_error(delta)
        index = prompt_index * self._n + delta.index
        text = "" if self._hides_output else delta.text
        choice: dict[str, Any] = {"index": index, "text": text}
        if delta.finish_reason is not None:
            choice |= self._end(delta)
        if delta.logprobs is not None and self._request.logprobs is not None and delta.logprobs:
            shown, offset = completion_logprobs(
                delta.logprobs, self._request.logprobs, self._offsets.get(index, 0), as_ids=self._names_ids
            )
            self._offsets[index] = offset
            choice["logprobs"] = shown
        if self._request.return_token_ids:
            choice["token_ids"] = self._shown_ids(delta.token_ids)
            if index not in self._has_begun:
                choice["prompt_token_ids"] = self.call.prompts[prompt_index].token_ids
                self._has_begun.add(index)
        has_content = text or delta.finish_reason is not None or "logprobs" in choice or "token_ids" in choice
        return choice if has_content or self.usage_always else None
