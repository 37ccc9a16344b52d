"""The output processor: from tokens to text, deltas and ``RequestOutput``.

Job: detokenize tokens as they arrive, find stop strings, assemble ``RequestOutput`` objects. Owns: the text of every
open request. Does not know: scheduling, models, HTTP.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import msgspec

from weft.engine.prompts import PreparedPrompt
from weft.messages import TokenLogprobs
from weft.outputs import CompletionOutput, Logprob, LogprobsDict, RequestMetrics, RequestOutput
from weft.request import Request
from weft.sampling_params import RequestOutputKind, SamplingParams
from weft.text.detokenizer import Detokenizer, StopStrings, make_detokenizer
from weft.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class CompletionDelta(msgspec.Struct):
    """The new part of one completion since the last delta. ``logprobs`` is None if the user did not ask for them."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[LogprobsDict] | None
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(slots=True)
class Completion:
    """One completion in the making: the request, the text so far, and the number of tokens in the text."""

    request: Request
    index: int
    detokenizer: Detokenizer | None
    stops: StopStrings | None
    text: str = ""
    num_tokens_seen: int = 0
    cumulative_logprob: float = 0.0
    logprobs: list[LogprobsDict] = field(default_factory=list)
    is_flushed: bool = False
    num_chars_sent: int = 0
    num_tokens_sent: int = 0
    end_sent: bool = False

    @property
    def stop(self) -> str | None:
        return self.stops.matched if self.stops is not None else None

    @property
    def num_tokens(self) -> int:
        """Number of tokens received, without those after a stop string."""
        return len(self.request.output_token_ids) if self.stops is None else self.num_tokens_seen


class OutputStream:
    """All completions of one prompt.

    Args:
        request_id: the user's id.
        prompt: the prompt as the user gave it.
        requests: one per completion.
        params: the parameters as the user gave them.
        tokenizer: the tokenizer; None: token ids only.
    """

    def __init__(
        self,
        request_id: str,
        prompt: PreparedPrompt,
        requests: list[Request],
        params: SamplingParams,
        tokenizer: Tokenizer | None,
    ) -> None:
        self.request_id = request_id
        self._prompt = prompt
        self._params = params
        self._tokenizer = tokenizer
        self._completions = [self._completion(i, request) for i, request in enumerate(requests)]
        self._by_id = {c.request.request_id: c for c in self._completions}
        self._prompt_logprobs: list[LogprobsDict | None] = [None]

    def _completion(self, index: int, request: Request) -> Completion:
        params = self._params
        if self._tokenizer is None or not params.detokenize:
            return Completion(request, index, None, None)
        detokenizer = make_detokenizer(
            self._tokenizer,
            skip_special_tokens=params.skip_special_tokens,
            prompt_token_ids=self._prompt.token_ids,
        )
        strings, include = params.stop_strings, params.include_stop_str_in_output
        return Completion(request, index, detokenizer, StopStrings(strings, include=include) if strings else None)

    @property
    def requests(self) -> list[Request]:
        return [c.request for c in self._completions]

    @property
    def finished(self) -> bool:
        return all(c.request.finish_reason is not None for c in self._completions)

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens generated so far in all completions."""
        return sum(c.num_tokens for c in self._completions)

    @property
    def num_prefilled_tokens(self) -> int:
        """Number of prompt tokens computed for completions that have a token, without cached ones."""
        started = [c.request for c in self._completions if c.num_tokens]
        return sum(r.num_prompt_tokens - (r.num_cached_tokens or 0) for r in started)

    def take(self, request: Request) -> str | None:
        """Note that ``request``, one of this prompt's completions, has new tokens or has ended. The tokens become text
        when the output is read, or now if a stop string is possible.

        Returns:
            The stop string that ends the completion (the caller must end the request), or None.
        """
        completion = self._by_id[request.request_id]
        if completion.stops is not None:
            self._catch_up(completion)
        return completion.stop

    def catch_up(self) -> list[Request]:
        """Detokenize new tokens. Returns the requests whose tokens could not be decoded, so that their text ends."""
        failed = []
        for completion in self._completions:
            try:
                self._catch_up(completion)
            except Exception:
                logger.exception("%s: its tokens could not be turned into text", completion.request.request_id)
                completion.detokenizer = completion.stops = None
                failed.append(completion.request)
        return failed

    def _catch_up(self, completion: Completion) -> None:
        request = completion.request
        new = request.output_token_ids[completion.num_tokens_seen :]
        if completion.stops is None:
            if new:
                self._take_tokens(completion, new)
        else:
            for token_id in new:
                if completion.stop is None:
                    self._take_tokens(completion, [token_id])
            if completion.stop is not None:  # tokens after the stop string in the same step are no part of the output
                del (
                    request.output_token_ids[completion.num_tokens_seen :],
                    request.logprobs[completion.num_tokens_seen :],
                )
        if request.finish_reason is not None and not completion.is_flushed:
            completion.is_flushed = True
            if completion.stop is None:
                self._flush(completion)

    def _take_tokens(self, completion: Completion, token_ids: list[int]) -> None:
        request, start = completion.request, completion.num_tokens_seen
        completion.num_tokens_seen += len(token_ids)
        if self._params.logprobs is not None:
            for entry in request.logprobs[start : completion.num_tokens_seen]:
                completion.logprobs.append(self._logprobs(entry))
                completion.cumulative_logprob += entry.logprobs[0]
        if completion.detokenizer is None:
            return
        if request.finish_reason == "stop" and self._is_dropped(request, completion.num_tokens_seen - 1, token_ids[-1]):
            token_ids = token_ids[:-1]
        self._add_text(completion, completion.detokenizer.extend(token_ids))

    def _add_text(self, completion: Completion, delta: str) -> None:
        if completion.stops is not None:
            enough = completion.num_tokens_seen >= self._params.min_tokens
            delta = completion.stops.append(delta, may_stop=enough)
        completion.text += delta

    def _is_dropped(self, request: Request, position: int, token_id: int) -> bool:
        """Whether the token that ended the generation is left out of the text. Users can ask to keep it."""
        is_last = position == len(request.output_token_ids) - 1
        if not is_last or self._params.include_stop_str_in_output:
            return False
        is_eos = token_id in request.eos_token_ids
        return token_id in request.stop_token_ids or (is_eos and self._params.skip_special_tokens)

    def _flush(self, completion: Completion) -> None:
        """Emit the text held back after the request ended. Half a character may still complete a stop string."""
        if completion.detokenizer is not None:
            self._add_text(completion, completion.detokenizer.finish())
        if completion.stops is not None:
            completion.text += completion.stops.finish()

    def output(self) -> RequestOutput:
        for completion in self._completions:
            self._catch_up(completion)
        first = self._completions[0].request
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt.text,
            prompt_token_ids=self._prompt.token_ids,
            outputs=[self._completion_output(c) for c in self._completions],
            finished=self.finished,
            num_cached_tokens=first.num_cached_tokens or 0,
            cache_report=first.cache_report,
            prompt_logprobs=self._take_prompt_logprobs(first),
            metrics=self._metrics(),
            weight_version=max(c.request.weight_spans[-1][1] for c in self._completions),
        )

    def emit(self) -> RequestOutput | None:
        """The output in the form of ``output_kind``. None before the end, if only the whole output is wanted."""
        kind, output = self._params.output_kind, self.output()
        return in_form(kind, output, self.deltas() if kind is RequestOutputKind.DELTA else [])

    def deltas(self) -> list[CompletionDelta]:
        """The text found by ``catch_up`` since the last call, for completions that have a new token or have ended."""
        return [delta for delta in map(self._delta, self._completions) if delta is not None]

    def _delta(self, completion: Completion) -> CompletionDelta | None:
        request, start = completion.request, completion.num_tokens_sent
        has_ended = request.finish_reason is not None and not completion.end_sent
        if completion.num_tokens_seen == start and not has_ended:
            return None
        text = completion.text[completion.num_chars_sent :]
        completion.num_chars_sent, completion.num_tokens_sent = len(completion.text), completion.num_tokens_seen
        completion.end_sent = request.finish_reason is not None
        token_ids = request.output_token_ids[start : completion.num_tokens_seen]
        logprobs = completion.logprobs[start:] if self._params.logprobs is not None else None
        reason = request.finish_reason
        return CompletionDelta(completion.index, text, token_ids, logprobs, reason, request.stop_reason)

    def _completion_output(self, completion: Completion) -> CompletionOutput:
        request = completion.request
        wants_logprobs = self._params.logprobs is not None
        return CompletionOutput(
            index=completion.index,
            text=completion.text,
            token_ids=list(request.output_token_ids[: completion.num_tokens_seen]),
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            logprobs=list(completion.logprobs) if wants_logprobs else None,
            cumulative_logprob=completion.cumulative_logprob if wants_logprobs else None,
            weight_spans=request.weight_spans,
        )

    def _take_prompt_logprobs(self, request: Request) -> list[LogprobsDict | None] | None:
        """The prompt log probabilities known so far, each converted once. A preempted request starts its list again,
        with equal entries."""
        if self._params.prompt_logprobs is None:
            return None
        new = request.prompt_logprobs[len(self._prompt_logprobs) - 1 :]
        self._prompt_logprobs += (self._logprobs(entry) for entry in new)
        return list(self._prompt_logprobs)

    def _logprobs(self, entry: TokenLogprobs) -> LogprobsDict:
        """The log probabilities of one token. The chosen token is first, with its own rank; the ranks of the others are
        their order."""
        result: LogprobsDict = {entry.token_ids[0]: self._logprob(entry.token_ids[0], entry.logprobs[0], entry.rank)}
        for rank, (token, logprob) in enumerate(zip(entry.token_ids[1:], entry.logprobs[1:], strict=True), start=1):
            result.setdefault(token, self._logprob(token, logprob, rank))
        return result

    def _logprob(self, token_id: int, logprob: float, rank: int) -> Logprob:
        text = self._tokenizer.token_text(token_id) if self._tokenizer is not None else None
        return Logprob(logprob, rank, text)

    def _metrics(self) -> RequestMetrics:
        times = [c.request.times for c in self._completions]
        start = times[0].arrival
        first_tokens = [t.first_token for t in times if t.first_token is not None]
        return RequestMetrics(
            time_in_queue=_since(start, times[0].first_scheduled),
            time_to_first_token=_since(start, min(first_tokens, default=None)),
            e2e_latency=_since(start, max(t.finished or start for t in times)) if self.finished else None,
            num_preemptions=sum(c.request.num_preemptions for c in self._completions),
            num_draft_tokens=sum(c.request.num_draft_tokens for c in self._completions),
            num_accepted_tokens=sum(c.request.num_accepted_tokens for c in self._completions),
            no_drafts_because=self._completions[0].request.no_drafts_because,
        )


def in_form(kind: RequestOutputKind, output: RequestOutput, deltas: Sequence[CompletionDelta]) -> RequestOutput | None:
    """Return ``output`` as ``kind`` asks for. ``deltas``: what is new of its completions."""
    if kind is RequestOutputKind.DELTA:
        output.outputs = [
            replace(output.outputs[delta.index], text=delta.text, token_ids=delta.token_ids, logprobs=delta.logprobs)
            for delta in deltas
        ]
    return None if kind is RequestOutputKind.FINAL_ONLY and not output.finished else output


def _since(start: float, moment: float | None) -> float | None:
    return None if moment is None else moment - start
