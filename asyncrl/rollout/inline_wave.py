"""Batched sampling of a fixed set of requests with a key-value cache: one call, one token for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, PreTrainedModel

from asyncrl.expert_routing import Routing, recorded
from asyncrl.records import TokenRecords
from asyncrl.rollout.engine import GenerationRequest
from asyncrl.rollout.mailbox import Mailbox
from asyncrl.rollout.pending_records import PendingRecords
from asyncrl.rollout.truncation import Truncation, ids_of, limits_of, renormalised
from asyncrl.types import Status


@dataclass(slots=True, eq=False)
class Row:
    """One request under way."""

    request: GenerationRequest
    budget_tokens: int
    mailbox: Mailbox
    tokens: list[int] = field(default_factory=list)
    """Prompt and everything sampled."""
    logprobs: list[float] = field(default_factory=list)
    """Of the sampled tokens that have not been delivered, the last of `tokens`."""
    kv_fresh: bool = True
    records: PendingRecords = field(init=False)
    generator: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = self.request.tokens.tolist()
        self.records = PendingRecords(self.request.wanted, prompt_tokens=len(self.tokens))
        self.generator = np.random.default_rng(self.request.seed)

    @property
    def sampled_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self.tokens) - len(self.request.tokens)

    def take(self) -> tuple[NDArray[np.int32], NDArray[np.float32], TokenRecords]:
        """Tokens sampled since the last call, their logprobs, and what was recorded."""
        count = len(self.logprobs)
        tokens = np.asarray(self.tokens[len(self.tokens) - count:], dtype=np.int32)
        logprobs = np.asarray(self.logprobs, dtype=np.float32)
        self.logprobs = []
        return tokens, logprobs, self.records.take(count)


class Wave:
    """Rows that are sampled together, one token each a step, until every one has ended."""

    def __init__(self, model: PreTrainedModel, rows: list[Row], *, eos_tokens: frozenset[int], threads: int,
                 logit_noise: float = 0.0, routing: Routing | None = None) -> None:
        self.rows = list(rows)
        self._routing = routing if any(row.records.wanted.routed_experts for row in rows) else None
        self._logit_noise = logit_noise
        self._threads = threads
        self._model = model
        self._eos_tokens = eos_tokens
        self._device = model.device
        self._cache: DynamicCache | None = None
        self._mask = torch.empty(0)

    @property
    def cached_tokens(self) -> int:
        """Tokens whose keys and values are held, over all rows."""
        return 0 if self._cache is None else sum(len(row.tokens) - 1 for row in self.rows)

    def forget_cache(self) -> None:
        """Compute keys and values again at the next step."""
        self._cache = None
        for row in self.rows:
            row.kv_fresh = True

    def mark_stale(self) -> None:
        """Go on with keys and values that older weights computed."""
        for row in self.rows:
            row.kv_fresh = row.kv_fresh and self._cache is None

    @torch.inference_mode()
    def step(self) -> list[tuple[Row, Status]]:
        """Sample one token for each row; the rows that ended leave the wave. A broken row of logits ends its row without a token."""
        torch.set_num_threads(self._threads)  # a trainer in this process has a number of its own
        logits = self._prefill() if self._cache is None else self._decode()
        temperatures = torch.tensor([row.request.sampling.temperature for row in self.rows], device=self._device, dtype=torch.float32)
        draws = np.asarray([row.generator.random() for row in self.rows])
        truncation = Truncation.of([limits_of(row.request.sampling) for row in self.rows], self._device)
        tokens, logprobs, kept = sample(self._noisy(logits), temperatures=temperatures, draws=torch.from_numpy(draws).to(self._device),
                                        truncation=truncation)
        ended: list[tuple[Row, Status]] = []
        for index, (row, token, logprob) in enumerate(zip(self.rows, tokens.tolist(), logprobs.tolist(), strict=True)):
            if row.records.wanted.kept_sets and np.isfinite(logprob):
                row.records.sampled(np.empty(0, np.int32) if kept is None else ids_of(kept[index]))
            status = self._append(row, token, logprob)
            if status is not None:
                ended.append((row, status))
        if ended:
            gone = {id(row) for row, _ in ended}
            self._keep(lambda row: id(row) not in gone)
        return ended

    def drop(self, unwanted: Row) -> None:
        """Take one row out."""
        self._keep(lambda row: row is not unwanted)

    def _noisy(self, logits: torch.Tensor) -> torch.Tensor:
        """[N, V] logits with the noise that was asked for; without it nothing is drawn, and the bits are those of a plain engine."""
        if self._logit_noise == 0.0:
            return logits
        noise = np.stack([row.generator.standard_normal(logits.shape[-1], dtype=np.float32) for row in self.rows])
        return logits.float() + self._logit_noise * torch.from_numpy(noise).to(self._device)

    def _append(self, row: Row, token: int, logprob: float) -> Status | None:
        if not np.isfinite(logprob):
            return Status.NONFINITE_LOGPROB
        row.tokens.append(token)
        row.logprobs.append(logprob)
        if token in self._eos_tokens:
            return Status.STOP
        return Status.LENGTH if row.sampled_tokens >= row.budget_tokens else None

    def _prefill(self) -> torch.Tensor:
        length = max(len(row.tokens) for row in self.rows)
        tokens = np.zeros((len(self.rows), length), dtype=np.int64)
        mask = np.zeros_like(tokens)
        for index, row in enumerate(self.rows):
            tokens[index, length - len(row.tokens):] = row.tokens
            mask[index, length - len(row.tokens):] = 1
        self._mask = torch.from_numpy(mask).to(self._device)
        self._cache = DynamicCache(config=self._model.config)
        return self._forward(torch.from_numpy(tokens).to(self._device), positions=(self._mask.cumsum(-1) - 1).clamp(min=0))

    def _decode(self) -> torch.Tensor:
        last = torch.tensor([[row.tokens[-1]] for row in self.rows], device=self._device)
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(self.rows), 1)], dim=1)
        return self._forward(last, positions=self._mask.sum(-1, keepdim=True) - 1)

    def _forward(self, tokens: torch.Tensor, *, positions: torch.Tensor) -> torch.Tensor:
        with recorded(self._routing) as routed:
            output = self._model(input_ids=tokens, attention_mask=self._mask, position_ids=positions,
                                 past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        for experts in routed:
            each = experts.reshape(*tokens.shape, *experts.shape[1:])
            for row, passed in zip(self.rows, each, strict=True):
                known = passed[-len(row.tokens):]
                row.records.passed(known, start=len(row.tokens) - len(known))
        return output.logits[:, -1]

    def _keep(self, wanted: Callable[[Row], bool]) -> None:
        indices = [index for index, row in enumerate(self.rows) if wanted(row)]
        self.rows = [self.rows[index] for index in indices]
        if self._cache is not None and self.rows:
            select = torch.tensor(indices, device=self._device)
            self._cache.batch_select_indices(select)
            self._mask = self._mask[select]


def sample(logits: torch.Tensor, *, temperatures: torch.Tensor, draws: torch.Tensor,
           truncation: Truncation | None = None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """A token and its logprob for each row, by inverting the cumulative distribution of softmax(logits / temperature).

    Args:
        logits: [N, V], any float dtype.
        temperatures: [N] float32, above 0.
        draws: [N] float64, uniform in [0, 1).
        truncation: which tokens may be sampled; None for all of them in every row.

    Returns:
        [N] int64 tokens and [N] float32 logprobs; the logprob of a row that holds NaN or +inf, or nothing finite, is NaN. And
        [N, V] which tokens might have been sampled, None without truncation.
    """
    logprobs = torch.log_softmax(logits.float() / temperatures[:, None], dim=-1)
    kept = None if truncation is None else truncation.kept(logprobs)
    if kept is not None:
        logprobs = renormalised(logprobs, kept)
    cumulative = logprobs.double().exp().cumsum(-1)
    total = cumulative[:, -1:]
    # strictly below the total, or rounding could reach past the last token that has a probability
    targets = torch.minimum(draws[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, targets, right=True).clamp(max=logits.shape[-1] - 1)
    picked = logprobs.gather(-1, tokens)
    return tokens[:, 0], torch.where(total.isfinite(), picked, torch.nan)[:, 0], kept
