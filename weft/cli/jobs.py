"""The jobs of ``weft generate``: prompts from arguments, from stdin, or from a file of JSON lines.

Job: one ``Job`` per prompt or line. A line that cannot be parsed becomes a job with an error, and affects no other.
Owns: the format of input and output lines. Does not know: the engine.

An input line is an object with one of ``prompt`` (text), ``prompt_token_ids`` (integers) or ``messages`` (a chat, with
``tools`` and ``chat_template_kwargs`` if needed). ``id`` (returned in the output), ``priority`` and all sampling
parameters are optional; they have precedence over flags:

    {"id": "a", "prompt": "12 + 30 =", "max_tokens": 20, "temperature": 0}
    {"messages": [{"role": "user", "content": "What is 12 + 30?"}]}
"""

import dataclasses
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from weft.cli.flags import SAMPLING_NAMES, sampling_params
from weft.errors import RequestError
from weft.outputs import RequestOutput
from weft.sampling_params import SamplingParams

_SOURCES = ("prompt", "prompt_token_ids", "messages")
_CHAT_KEYS = ("tools", "chat_template_kwargs")


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt or chat to complete, or the reason why it cannot be completed.

    Attributes:
        number: line of the input file, or number of the prompt argument, from 1.
        id: the ``id`` of the line, returned in the output.
        prompt: text or token ids; None for a chat.
        messages, tools, chat_template_kwargs: a chat; None for a plain prompt.
    """

    number: int
    id: Any = None
    prompt: str | list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    params: SamplingParams = field(default_factory=SamplingParams)
    priority: int = 0
    error: RequestError | None = None


def jobs_from_texts(texts: Iterable[str], settings: dict[str, Any], *, chat: bool) -> list[Job]:
    """Make a job per text. Under ``chat`` each text is a user message.

    Raises:
        RequestError: invalid sampling parameters.
    """
    params = sampling_params(settings)
    return [_text_job(Job(number=number, params=params), text, chat) for number, text in enumerate(texts, start=1)]


def jobs_from_lines(lines: Iterable[str], settings: dict[str, Any], *, chat: bool) -> Iterator[Job]:
    """Make a job per JSON line that is not blank.

    Raises:
        RequestError: the flags' own sampling parameters are invalid.
    """
    sampling_params(settings)
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        job_id = None
        try:
            entry = _parse(line)
            job_id = entry.get("id")
            yield _line_job(number, entry, settings, chat)
        except RequestError as error:
            yield Job(number=number, id=job_id, error=error)


def _text_job(job: Job, text: str, chat: bool) -> Job:
    if chat:
        return dataclasses.replace(job, messages=[{"role": "user", "content": text}])
    return dataclasses.replace(job, prompt=text)


def _parse(line: str) -> dict[str, Any]:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"not JSON: {error}") from error
    if not isinstance(entry, dict):
        raise RequestError(f'a {type(entry).__name__}, not an object like {{"prompt": "…"}}')
    return entry


def _line_job(number: int, entry: dict[str, Any], settings: dict[str, Any], chat: bool) -> Job:
    allowed = {"id", "priority", *_SOURCES, *_CHAT_KEYS, *SAMPLING_NAMES}
    unknown = sorted(set(entry) - allowed)
    if unknown:
        raise RequestError(f"unknown keys {', '.join(unknown)}; allowed: {', '.join(sorted(allowed))}", unknown[0])
    sources = [name for name in _SOURCES if name in entry]
    if len(sources) != 1:
        raise RequestError(f"needs exactly one of {', '.join(_SOURCES)}; has {' and '.join(sources) or 'none'}")
    own = {name: entry[name] for name in SAMPLING_NAMES if name in entry}
    job = Job(number=number, id=entry.get("id"), params=sampling_params(settings | own), priority=_priority(entry))
    if sources == ["messages"]:
        return dataclasses.replace(
            job, messages=_messages(entry["messages"]), **{k: entry[k] for k in _CHAT_KEYS if k in entry}
        )
    extra = [key for key in _CHAT_KEYS if key in entry]
    if extra:
        raise RequestError(f"{' and '.join(extra)} belong to messages, but the line has {sources[0]}", extra[0])
    if sources == ["prompt"] and isinstance(entry["prompt"], str):
        return _text_job(job, entry["prompt"], chat)
    if sources == ["prompt"]:
        raise RequestError(f"prompt is a {type(entry['prompt']).__name__}; give a text, or prompt_token_ids", "prompt")
    return dataclasses.replace(job, prompt=entry["prompt_token_ids"])


def _messages(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value or not all(isinstance(m, dict) and "role" in m for m in value):
        raise RequestError(
            'messages must be a non-empty list of objects like {"role": "user", "content": "…"}', "messages"
        )
    return value


def _priority(entry: dict[str, Any]) -> int:
    value = entry.get("priority", 0)
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"priority={value!r} is not an integer", "priority")
    return value


def output_line(job: Job, result: RequestOutput | RequestError) -> dict[str, Any]:
    head: dict[str, Any] = {"line": job.number} | ({"id": job.id} if job.id is not None else {})
    if isinstance(result, RequestError):
        return head | {"error": {"message": str(result), "param": result.param}}
    usage = {
        "prompt_tokens": len(result.prompt_token_ids),
        "cached_tokens": result.num_cached_tokens,
        "completion_tokens": sum(len(c.token_ids) for c in result.outputs),
    }
    plain = dataclasses.asdict(result)
    outputs = [{k: v for k, v in c.items() if v is not None} for c in plain["outputs"]]
    prompt_logprobs = {"prompt_logprobs": plain["prompt_logprobs"]} if result.prompt_logprobs is not None else {}
    return head | {"prompt": result.prompt, "outputs": outputs, "usage": usage} | prompt_logprobs
