"""Runs a step: orders in, tokens out.

Job: own the model, its caches and the rows; build the batch, run the forward pass, sample.
Owns: every tensor of one rank. Does not know: requests, why something is scheduled, whose a page is.

One step, in the order that ``messages.py`` promises::

    forget finished rows -> fill new rows -> copy pages, fork states -> batch -> forward -> sample -> remember tokens
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.cache.spec import CacheSpec
from weft.config import EngineConfig
from weft.forward_context import ForwardContext, KVCache, StateCache, forward_context
from weft.layers.context import ModelContext
from weft.layers.sampler import Logprobs, Sampler, SamplerOutput, logprobs_of
from weft.layers.table import LayerTable
from weft.messages import ModelOutput, SchedulerOutput, TokenLogprobs
from weft.models.registry import create_model
from weft.ops.backend import resolve_backend
from weft.ops.kv_cache import copy_pages
from weft.parallel.tensor_parallel import SingleRank
from weft.runner.batch_builder import BatchBuilder, PreparedStep
from weft.runner.memory import CachePlan, allocate_caches, plan_caches
from weft.runner.rows import RowTable
from weft.runner.sampling_inputs import SamplingInputs
from weft.weights import load_weights


class ModelRunner:
    """One rank: weights, caches, rows.

    Raises:
        WeightsError, UnsupportedModelError, CapacityError: the model cannot be loaded, and why.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self.device = torch.device(config.device)
        self._layers = LayerTable()
        self.model = self._load_model()
        self._layer_modules = self._layers.by_name()
        self.plan = self._plan()
        self.caches = allocate_caches(
            self.spec, self.plan, self._layers.names("full_attention"), self._layers.names("linear_attention"), self.device
        )
        max_pages = self.spec.pages_for(self.plan.max_model_len)
        self._rows = RowTable(self.plan.max_num_seqs, max_pages, self.device)
        self._builder = BatchBuilder(
            self._rows,
            page_size=config.page_size,
            max_num_tokens=config.max_num_batched_tokens,
            max_num_seqs=self.plan.max_num_seqs,
            has_recurrent_layers=config.model_config.is_hybrid,
            device=self.device,
        )
        self._sampling = SamplingInputs(self._rows, config.model_config.vocab_size, self.device)
        self._sampler = Sampler(resolve_backend(config.backend, self.device.type))

    def _load_model(self) -> torch.nn.Module:
        config = self._config
        context = ModelContext(
            dtype=getattr(torch, config.dtype),
            device=self.device,
            tp=SingleRank(),
            backend=resolve_backend(config.backend, self.device.type),
            layers=self._layers,
            max_model_len=config.max_model_len,
        )
        model = create_model(config.model_config, context)
        load_weights(model, config.model_config, config.model_path, config.load_format, config.seed)
        return model.eval()

    def _plan(self) -> CachePlan:
        config = self._config
        self.spec = CacheSpec.from_model(
            config.model_config, page_size=config.page_size, dtype=config.dtype, state_dtype=config.mamba_ssm_dtype
        )
        return plan_caches(
            self.spec,
            budget_bytes=self._cache_budget(),
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            num_kv_pages=config.num_kv_pages,
            num_state_slots=config.num_state_slots,
        )

    def _cache_budget(self) -> int:
        """Bytes for caches: given on the CPU, a share of what is free after loading on a GPU."""
        if self.device.type == "cpu":
            return int(self._config.cpu_cache_gib * 2**30)
        free, total = torch.cuda.mem_get_info(self.device)
        return int(free - (1.0 - self._config.gpu_memory_utilization) * total)

    # -- a step --------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def run(self, orders: SchedulerOutput) -> ModelOutput:
        """Run one step."""
        self._update_rows(orders)
        self._move(orders)
        step = self._builder.build(orders)
        with forward_context(ForwardContext(step.batch, self.caches, self._layer_modules)):
            hidden_states = self.model(step.input_ids)
        prompt_logprobs = self._prompt_logprobs(orders, step, hidden_states)
        if not step.sampled:
            return ModelOutput(orders.step, [], [], prompt_logprobs=prompt_logprobs)
        logits = self.model.compute_logits(hidden_states.index_select(0, step.sample_indices))
        result = self._sampler(logits, self._sampling.build(step.sampled))
        self._rows.set_last_tokens(step.sample_rows, result.token_ids)
        self._sampling.record(step.sampled, result.token_ids)
        return self._output(orders.step, step, result, prompt_logprobs)

    def _update_rows(self, orders: SchedulerOutput) -> None:
        for row in orders.finished_rows:
            self._sampling.forget(row)
        for new in orders.new_requests:
            self._rows.fill(new)
            self._sampling.fill(new)
        for order in orders.requests:
            self._rows.append_pages(order)

    def _move(self, orders: SchedulerOutput) -> None:
        """Copy partial pages and fork states, before anything reads them."""
        if orders.page_copies:
            source, target = _columns(orders.page_copies, self.device)
            tensors = [t for c in self.caches.values() if isinstance(c, KVCache) for t in (c.k, c.v)]
            copy_pages(tensors, source, target)
        if orders.state_forks:
            source, target = _columns(orders.state_forks, self.device)
            for cache in self.caches.values():
                if isinstance(cache, StateCache):
                    cache.conv.index_copy_(0, target, cache.conv.index_select(0, source))
                    cache.recurrent.index_copy_(0, target, cache.recurrent.index_select(0, source))

    # -- results -------------------------------------------------------------------------------------------------

    def _output(
        self,
        number: int,
        step: PreparedStep,
        result: SamplerOutput,
        prompt_logprobs: dict[int, list[TokenLogprobs]],
    ) -> ModelOutput:
        rows = [order.row for order in step.sampled]
        failed = [row for row, is_nan in zip(rows, result.nan_rows.tolist(), strict=True) if is_nan]
        logprobs: dict[int, TokenLogprobs] = {}
        if result.logprobs is not None:
            entries = _entries(result.logprobs)
            for row, entry in zip(rows, entries, strict=True):
                wanted = self._rows.sampling(row).logprobs
                if wanted is not None:
                    logprobs[row] = _first(entry, wanted)
        return ModelOutput(number, rows, result.token_ids.tolist(), logprobs, prompt_logprobs, failed)

    def _prompt_logprobs(
        self, orders: SchedulerOutput, step: PreparedStep, hidden_states: Tensor
    ) -> dict[int, list[TokenLogprobs]]:
        """Log probabilities of the prompt tokens that follow the ones run in this step, for the rows that ask."""
        result: dict[int, list[TokenLogprobs]] = {}
        for order, start in zip(orders.requests, step.starts, strict=True):
            wanted = self._rows.sampling(order.row).prompt_logprobs
            stop = min(order.start + order.num_tokens + 1, self._rows.num_prompt_tokens(order.row))
            count = stop - order.start - 1
            if wanted is None or count <= 0:
                continue
            targets = self._rows.known_tokens(order.row, order.start + 1, stop)
            token_ids = torch.from_numpy(targets).long().to(self.device)
            logits = self.model.compute_logits(hidden_states[start : start + count])
            result[order.row] = _entries(logprobs_of(logits, token_ids, wanted))
        return result


def _entries(logprobs: Logprobs) -> list[TokenLogprobs]:
    columns = (logprobs.token_ids.tolist(), logprobs.logprobs.tolist(), logprobs.ranks.tolist())
    return [TokenLogprobs(ids, values, rank) for ids, values, rank in zip(*columns, strict=True)]


def _first(entry: TokenLogprobs, top_n: int) -> TokenLogprobs:
    """The entry with only ``top_n`` alternatives (the batch may have computed more for another row)."""
    return TokenLogprobs(entry.token_ids[: top_n + 1], entry.logprobs[: top_n + 1], entry.rank)


def _columns(pairs: list[tuple[int, int]], device: torch.device) -> tuple[Tensor, Tensor]:
    table = torch.tensor(pairs, dtype=torch.int64, device=device)
    return table[:, 0], table[:, 1]
