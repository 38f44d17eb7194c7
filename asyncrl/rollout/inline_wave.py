"""Batched sampling of a fixed set of requests with a key-value cache: one call, one token for each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache, PreTrainedModel

from asyncrl.rollout.engine import GenerationRequest
from asyncrl.rollout.mailbox import Mailbox
from asyncrl.types import Status

_ALL_TOKENS = 2**31
"""More than any vocabulary has."""


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
    generator: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.tokens = self.request.tokens.tolist()
        self.generator = np.random.default_rng(self.request.seed)

    @property
    def sampled_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self.tokens) - len(self.request.tokens)

    def take(self) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Tokens and logprobs sampled since the last call."""
        count = len(self.logprobs)
        tokens = np.asarray(self.tokens[len(self.tokens) - count:], dtype=np.int32)
        logprobs = np.asarray(self.logprobs, dtype=np.float32)
        self.logprobs = []
        return tokens, logprobs


class Wave:
    """Rows that are sampled together, one token each a step, until every one has ended."""

    def __init__(self, model: PreTrainedModel, rows: list[Row], *, eos_tokens: frozenset[int], threads: int,
                 logit_noise: float = 0.0) -> None:
        self.rows = list(rows)
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
        tokens, logprobs = sample(self._noisy(logits), temperatures=temperatures, draws=torch.from_numpy(draws).to(self._device),
                                  kept=self._kept_sets())
        ended: list[tuple[Row, Status]] = []
        for row, token, logprob in zip(self.rows, tokens.tolist(), logprobs.tolist(), strict=True):
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

    def _kept_sets(self) -> KeptSets | None:
        samplings = [row.request.sampling for row in self.rows]
        if not any(sampling.biased_fields() for sampling in samplings):
            return None
        return KeptSets(torch.tensor([sampling.top_p for sampling in samplings], device=self._device, dtype=torch.float64),
                        torch.tensor([sampling.top_k or _ALL_TOKENS for sampling in samplings], device=self._device),
                        torch.tensor([sampling.min_p for sampling in samplings], device=self._device, dtype=torch.float64))

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
        output = self._model(input_ids=tokens, attention_mask=self._mask, position_ids=positions,
                             past_key_values=self._cache, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1]

    def _keep(self, wanted: Callable[[Row], bool]) -> None:
        indices = [index for index, row in enumerate(self.rows) if wanted(row)]
        self.rows = [self.rows[index] for index in indices]
        if self._cache is not None and self.rows:
            select = torch.tensor(indices, device=self._device)
            self._cache.batch_select_indices(select)
            self._mask = self._mask[select]


@dataclass(frozen=True, slots=True)
class KeptSets:
    """Which tokens of each row may be sampled, in the order in which it is applied, that of vLLM."""

    top_p: torch.Tensor
    """[N] float64: the fewest likeliest tokens that hold this share of what the others leave; 1 keeps all."""
    top_k: torch.Tensor
    """[N] int64: so many likeliest tokens; the size of the vocabulary keeps all."""
    min_p: torch.Tensor
    """[N] float64: those at least this share as likely as the likeliest."""

    def renormalised(self, logprobs: torch.Tensor) -> torch.Tensor:
        """[N, V] logprobs over the kept tokens, −inf for the others; rows that keep all stay as they are."""
        ranked, order = logprobs.double().exp().sort(dim=-1, descending=True, stable=True)
        kept = ranked >= self.min_p[:, None] * ranked[:, :1]
        kept &= torch.arange(ranked.shape[-1], device=ranked.device) < self.top_k[:, None]
        ranked = torch.where(kept, ranked, 0.0)
        likelier = ranked.cumsum(-1) - ranked
        kept &= (likelier < self.top_p[:, None] * ranked.sum(-1, keepdim=True)) | (self.top_p[:, None] >= 1.0)
        among = torch.zeros_like(kept).scatter(-1, order, kept)
        partial = torch.log_softmax(torch.where(among, logprobs, -torch.inf), dim=-1)
        return torch.where(among.all(-1, keepdim=True), logprobs, partial)


def sample(logits: torch.Tensor, *, temperatures: torch.Tensor, draws: torch.Tensor,
           kept: KeptSets | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """A token and its logprob for each row, by inverting the cumulative distribution of softmax(logits / temperature).

    Args:
        logits: [N, V], any float dtype.
        temperatures: [N] float32, above 0.
        draws: [N] float64, uniform in [0, 1).
        kept: the tokens that may be sampled; None for all of them in every row.

    Returns:
        [N] int64 tokens and [N] float32 logprobs; the logprob of a row that holds NaN or +inf, or nothing finite, is NaN.
    """
    logprobs = torch.log_softmax(logits.float() / temperatures[:, None], dim=-1)
    if kept is not None:
        logprobs = kept.renormalised(logprobs)
    cumulative = logprobs.double().exp().cumsum(-1)
    total = cumulative[:, -1:]
    # strictly below the total, or rounding could reach past the last token that has a probability
    targets = torch.minimum(draws[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    tokens = torch.searchsorted(cumulative, targets, right=True).clamp(max=logits.shape[-1] - 1)
    picked = logprobs.gather(-1, tokens)
    return tokens[:, 0], torch.where(total.isfinite(), picked, torch.nan)[:, 0]
