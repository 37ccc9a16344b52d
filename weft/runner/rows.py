"""The row table: per-request state on the device (page table, last token, sampling parameters).

Token ids that a request brought along are on the host. Tokens sampled since then are on the device (``last_token``) and
become inputs of the next step without a copy to the host. The row after the last is the padding row: padding sequences
of a batch use it, so they read and write no request's memory.
"""

import numpy as np
import torch
from torch import Tensor

from weft.messages import NewRequest, RowSampling, ScheduledRequest
from weft.runner.mrope import mrope_positions


class RowTable:
    """``num_rows`` rows and the padding row; every array below is indexed by row.

    Args:
        spatial_merge_size: side of the squares of patches that become one token of an image; 0: tokens of images have
            positions like those of texts.

    Attributes:
        rotates_images: tokens of images have rotary positions of their own.
        page_table: ``[num_rows + 1, max_pages]`` int32 on the host.
        last_token: ``[num_rows + 1]`` int64 on the device, the token sampled last.
        sampling: row -> all sampling parameters of its request.
        temperature, top_p, min_p, top_k, seed: host arrays of the sampling parameters that every row has.
        num_known_tokens, num_prompt_tokens: tokens that the request brought along, and how many of them are its prompt.
        rope_positions: row -> ``[3, num_prompt_tokens]`` positions of its prompt, for prompts with images.
        rope_delta: difference between a later token's position and its place in the sequence; 0 without images.
        prompt_logprobs: row -> number of alternatives at every token of its prompt, for rows that want any.
    """

    def __init__(self, num_rows: int, max_pages: int, device: torch.device, spatial_merge_size: int = 1) -> None:
        self._merge, self.rotates_images = spatial_merge_size, spatial_merge_size > 0
        self.padding_row = num_rows
        self.max_pages = max_pages
        self.page_table = np.zeros((num_rows + 1, max_pages), dtype=np.int32)
        self.device_page_table = torch.zeros((num_rows + 1, max_pages), dtype=torch.int32, device=device)
        self.last_token = torch.zeros(num_rows + 1, dtype=torch.int64, device=device)
        self.temperature = np.zeros(num_rows + 1, dtype=np.float32)
        self.top_p = np.ones(num_rows + 1, dtype=np.float32)
        self.min_p = np.zeros(num_rows + 1, dtype=np.float32)
        self.top_k = np.zeros(num_rows + 1, dtype=np.int64)
        self.seed = np.zeros(num_rows + 1, dtype=np.int64)
        self.num_known_tokens = np.zeros(num_rows + 1, dtype=np.int64)
        self.num_prompt_tokens = np.zeros(num_rows + 1, dtype=np.int64)
        self.rope_positions: dict[int, np.ndarray] = {}
        self.rope_delta = np.zeros(num_rows + 1, dtype=np.int64)
        self.prompt_logprobs: dict[int, int] = {}
        self._num_pages = [0] * num_rows
        self._token_ids: list[np.ndarray] = [np.zeros(0, dtype=np.int32)] * num_rows
        self.sampling: dict[int, RowSampling] = {}

    def add(self, new: NewRequest) -> None:
        """Store a new request's parameters in its row, in place of what the row held."""
        row, params = new.row, new.sampling
        self._num_pages[row] = 0
        self._token_ids[row] = np.asarray(new.token_ids).view(np.int32)  # no copy: no id has the 32nd bit
        self.num_known_tokens[row], self.num_prompt_tokens[row] = len(new.token_ids), new.num_prompt_tokens
        self.sampling[row] = params
        self.free(row)
        if new.media_runs:
            runs = new.media_runs if self.rotates_images else ()
            positions, delta = mrope_positions(new.num_prompt_tokens, runs, self._merge)
            self.rope_positions[row], self.rope_delta[row] = positions, delta
        if params.prompt_logprobs is not None:
            self.prompt_logprobs[row] = params.prompt_logprobs
        self.temperature[row] = params.temperature
        self.top_p[row], self.min_p[row], self.top_k[row] = params.top_p, params.min_p, params.top_k
        self.seed[row] = params.seed - 2**64 if params.seed >= 2**63 else params.seed

    def free(self, row: int) -> None:
        """Drop what only rows of some requests hold."""
        self.rope_positions.pop(row, None)
        self.rope_delta[row] = 0
        self.prompt_logprobs.pop(row, None)

    def append_pages(self, request: ScheduledRequest) -> tuple[int, np.ndarray]:
        """Append the request's new pages to the host's page table. Returns the index of the first in the flat table,
        and what stands there."""
        row, held = request.row, self._num_pages[request.row]
        self._num_pages[row] = end = held + len(request.new_pages)
        self.page_table[row, held:end] = request.new_pages
        return row * self.max_pages + held, self.page_table[row, held:end]

    def known_tokens(self, row: int, start: int, stop: int) -> np.ndarray:
        """Tokens ``start`` to ``stop`` as far as the host knows them (shorter if the last ones were sampled since)."""
        return self._token_ids[row][start:stop]

    def set_last_tokens(self, rows: Tensor, token_ids: Tensor) -> None:
        """Remember the sampled ``token_ids [N]`` of ``rows [N]`` for the next step."""
        self.last_token.index_copy_(0, rows, token_ids)
