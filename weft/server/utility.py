"""Endpoints around generation: models, tokenization, the state of the server and of the replicas behind it."""

from collections.abc import Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from weft import __version__
from weft.engine import wire
from weft.engine.snapshot import why_not_drain, why_not_start
from weft.errors import RequestError
from weft.server.abilities import abilities
from weft.server.api_call import Context, check_model, respond_to_large, served_names
from weft.server.chat import chat_prompt, check_special_tokens, need_tokenizer, options_of
from weft.server.client import Client
from weft.server.errors import ApiError
from weft.server.protocol import DetokenizeRequest, TokenizeRequest
from weft.server.service import State
from weft.text.chat_template import TemplateOptions
from weft.text.tokenizer import Tokenizer


def models(context: Context) -> dict[str, Any]:
    return {"object": "list", "data": [model(context, name) for name in served_names(context)]}


def model(context: Context, name: str) -> dict[str, Any]:
    _ = context.service.engine
    return {
        "id": check_model(context, name),
        "object": "model",
        "created": context.service.created,
        "owned_by": "weft",
        "root": context.service.config.model,
        "parent": None,
        "max_model_len": context.service.capacity.max_model_len,
        "weft": abilities(context.service),
    }


async def tokenize(context: Context, body: bytes, client: Client) -> dict[str, Any] | Response:
    if (response := await respond_to_large(context, "/tokenize", body, client)) is not None:
        return response
    request = context.bodies.read(body, TokenizeRequest)
    check_model(context, request.model)
    ids = await _token_ids(context, request, client)
    token_text = need_tokenizer(context.service.engine).token_text if request.return_token_strs else None
    max_model_len = context.service.capacity.max_model_len
    return await context.service.render.run(tokenized, ids, max_model_len, token_text, size=len(ids))


def tokenized(ids: list[int], max_model_len: int, token_text: Callable[[int], str] | None) -> dict[str, Any]:
    """The response to a request to tokenize. ``token_text``: gives the texts of tokens, if they are wanted."""
    texts = list(map(token_text, ids)) if token_text is not None else None
    return {"count": len(ids), "max_model_len": max_model_len, "tokens": ids, "token_strs": texts}


async def _token_ids(context: Context, request: TokenizeRequest, client: Client) -> list[int]:
    service, engine = context.service, context.service.engine
    tokenizer = need_tokenizer(engine)
    check_tokenize(request, tokenizer)
    if request.prompt is not None:
        special = request.add_special_tokens is not False
        prompt = request.prompt
        return await service.render.run(lambda: tokenizer.encode(prompt, add_special_tokens=special), size=len(prompt))
    assert request.messages is not None
    chat = await chat_prompt(
        service,
        engine,
        request.messages,
        tokenize_options(request),
        caller=client.queue,
    )
    return chat.token_ids


def tokenize_options(request: TokenizeRequest) -> TemplateOptions:
    return options_of(
        request.tools, request.chat_template_kwargs, request.add_generation_prompt, request.continue_final_message
    )


def check_tokenize(request: TokenizeRequest, tokenizer: Tokenizer) -> None:
    """Raise RequestError unless there is either a prompt or a conversation."""
    if (request.prompt is None) == (request.messages is None):
        raise RequestError("give either prompt or messages", "prompt")
    if request.messages is not None:
        check_special_tokens(tokenizer, request.add_special_tokens)


async def detokenize(context: Context, body: bytes, client: Client) -> dict[str, Any] | Response:
    if (response := await respond_to_large(context, "/detokenize", body, client)) is not None:
        return response
    request = context.bodies.read(body, DetokenizeRequest)
    check_model(context, request.model)
    tokenizer, limit = need_tokenizer(context.service.engine), context.service.config.model_config.vocab_size
    text = await context.service.render.run(detokenized, tokenizer, limit, request.tokens, size=len(request.tokens))
    return {"prompt": text}


def detokenized(tokenizer: Tokenizer, limit: int, tokens: list[int]) -> str:
    """The text of token ids. Raises RequestError for ids that are not below ``limit``."""
    wrong = next((token for token in tokens if not 0 <= token < limit), None)
    if wrong is not None:
        raise RequestError(f"tokens holds {wrong}; the vocabulary has {limit} ids, 0 to {limit - 1}", "tokens")
    return tokenizer.decode(tokens, skip_special_tokens=False)


def tokenizer_info(context: Context) -> dict[str, Any]:
    tokenizer = need_tokenizer(context.service.engine)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    return {
        "tokenizer_class": type(tokenizer.hf).__name__,
        "vocab_size": tokenizer.vocab_size,
        "bos_token": None if bos is None else tokenizer.token_text(bos),
        "eos_token": None if eos is None else tokenizer.token_text(eos),
        "chat_template": tokenizer.template.text,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "special_token_ids": sorted(tokenizer.special_token_ids),
        "has_chat_template": tokenizer.template.exists,
        "max_model_len": context.service.capacity.max_model_len,
    }


def health(context: Context) -> tuple[int, dict[str, Any]]:
    """``/health``: 200 while the engine lives and moves, also while the server drains or starts another engine."""
    reason = context.service.unhealthy_reason
    if context.service.is_restarting:
        return 200, {"status": "restarting"}
    return (200, {"status": "ok"}) if reason is None else (503, {"status": reason})


def ready(context: Context) -> tuple[int, dict[str, Any]]:
    """``/ready``: 200 while new requests are taken."""
    service = context.service
    is_ready = service.state is State.READY and service.unhealthy_reason is None
    status = "ready" if is_ready else service.unhealthy_reason or service.state.value
    return (200 if is_ready else 503), {"status": status}


def load(context: Context) -> dict[str, Any]:
    """``/load``: completions accepted and not ended, and what the engine says."""
    service = context.service
    engine = service.engine
    return {
        "server_load": service.admission.num_open,
        "num_running": engine.stats.num_running,
        "num_waiting": engine.stats.num_waiting,
        "limit": service.admission.limit,
    }


def version(context: Context) -> dict[str, Any]:
    return {"version": __version__}


CHANGE_PATH = "/replicas/{replica:int}/{change:str}"

_WHY_NOT = {"drain": why_not_drain, "start": why_not_start}


def replicas(context: Context) -> dict[str, Any]:
    """``/replicas``; none if there is one engine."""
    return {"replicas": msgspec.to_builtins(context.service.engine_client.replicas or [])}


def change_replica(context: Context, request: Request) -> dict[str, Any]:
    """``POST /replicas/N/drain``, ``POST /replicas/N/start``: begun when this returns, by ``engine/replicas.py``.

    Raises:
        ApiError: 403, the admin key was not presented; 404, there is no such thing; 409, not in the replica's state.
    """
    if not request.scope["weft.client"].is_admin:
        raise ApiError(403, "this needs the admin key: start the server with --admin-key, and present that key")
    client, index, name = context.service.engine_client, request.path_params["replica"], request.path_params["change"]
    members = client.replicas
    if members is None:
        raise ApiError(404, "there is one engine; replicas come with --data-parallel-size")
    if name not in _WHY_NOT or index >= len(members):
        raise ApiError(404, f"{request.url.path} does not exist; there are {len(members)} replicas, from 0 on")
    refusal = _WHY_NOT[name](members, index)
    if refusal is not None:
        raise ApiError(409, refusal)
    client.send(wire.DrainReplica(index) if name == "drain" else wire.StartReplica(index))
    return {"replica": index, "begun": name}
