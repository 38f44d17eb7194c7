"""Configuration of sampling and of the embedded engines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from asyncrl.errors import ConfigError
from asyncrl.rollout.engine import Capabilities, Interruption
from asyncrl.settings import TAGGED, Section, Seed, Workers
from asyncrl.types import Sampling

_LOWEST_VLLM_TEMPERATURE = 0.01
"""vLLM raises a lower one to this, and says so in its log alone."""


class SamplingConfig(Section):
    """How completions are sampled; the fields of `asyncrl.types.Sampling`."""

    temperature: float = Field(default=1.0, gt=0.0)
    """Logits are divided by it, in the engine and in the trainer alike."""
    max_new_tokens: int = Field(default=256, ge=1)
    """Most tokens of one completion; with the prompt no more than the engine's context."""
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    """Only the likeliest tokens, as many as hold this probability together. Below 1 the engine must record what it left, as inline and
    transformers do: the trainer renormalises over it, else every importance ratio would be off by its mass."""
    top_k: int | None = Field(default=None, ge=1)
    """Only so many of the likeliest tokens; needs the same of the engine."""
    min_p: float = Field(default=0.0, ge=0.0, le=1.0)
    """Only tokens with at least this share of the likeliest one's probability; needs the same of the engine."""
    min_new_tokens: int = Field(default=0, ge=0)
    """0 alone: it forbids the end of sequence for a while, in a way that is not recorded."""
    repetition_penalty: float = Field(default=1.0, gt=0.0)
    """1 alone: it reshapes the distribution by what was written before."""
    presence_penalty: float = 0.0
    """0 alone, for the same reason."""
    frequency_penalty: float = 0.0
    """0 alone, for the same reason."""
    stop: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Texts that end a completion where they appear; needs an engine that has them, which vLLM is."""

    def build(self) -> Sampling:
        """The same values as the data the engines take."""
        return Sampling(**self.model_dump())


class InlineEngineConfig(Section):
    """Batched generation in the calling process, on the CPU, bit-reproducible."""

    kind: Literal["inline"] = "inline"
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights, activations and the key-value cache. Logprobs are computed in float32 either way."""
    threads: Workers = 1
    """CPU threads of each forward."""
    max_batch_requests: int = Field(default=512, ge=1)
    """Most requests of one wave; later ones wait for the next."""
    context_tokens: int | None = Field(default=None, ge=2)
    """Prompt plus completion; the model's own limit when left out."""
    logit_noise: float = Field(default=0.0, ge=0.0, le=100.0)
    """For experiments: standard deviation of Gaussian noise on every logit of every token, from the request's own random stream. Tokens and
    logprobs are of the noisy distribution: a mismatch with the trainer of known size, in evaluations too. `run.probe` must allow it."""

    @property
    def most_context_tokens(self) -> int | None:
        """What these settings alone allow; None where the model decides."""
        return self.context_tokens

    def capabilities(self, *, context_tokens: int) -> Capabilities:
        """What this engine can do with a model of this context."""
        return Capabilities(
            interruptions=frozenset(Interruption), in_place_recompute=True, per_request_seed=True, per_request_temperature=True,
            stop_strings=False, bit_reproducible=True, context_tokens=context_tokens, truncates=True, kept_sets=True,
            routed_experts=True, lora="shared", sleep=True)


class TransformersEngineConfig(Section):
    """Hugging Face continuous batching in a child process, on the CPU."""

    kind: Literal["transformers"] = "transformers"
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights, activations and the key-value cache. Logprobs are computed in float32 either way."""
    threads: Workers = 1
    """CPU threads of the engine."""
    max_batch_tokens: int = Field(default=128, ge=16)
    """Tokens of one forward; longer prompts are read in pieces of this size. On a CPU every token of a forward attends, under a mask,
    to the cache of all running requests: with 70-token prompts 128 was 1.6 times as fast as 512, with short ones as fast."""
    max_running_requests: int = Field(default=32, ge=1)
    """Requests sampled at once; later ones wait their turn in arrival order. For the same reason more is not faster: with 70-token
    prompts 16 wrote nearly twice as many tokens a second as 64."""
    kv_cache_tokens: int = Field(default=65_536, ge=256)
    """Tokens the key-value cache holds. When it is full, some requests give theirs up and are computed again later."""
    context_tokens: int | None = Field(default=None, ge=2)
    """Prompt plus completion; the model's own limit, or `kv_cache_tokens` if less, when left out."""
    seed: Seed | None = None
    """Of the engine's one random stream; which request draws what from it depends on timing. None: `run.seed`, 0 outside a recipe."""

    @model_validator(mode="after")
    def _the_cache_holds_the_context(self) -> TransformersEngineConfig:
        if self.context_tokens is not None and self.context_tokens > self.kv_cache_tokens:
            raise ConfigError("engine.context_tokens, engine.kv_cache_tokens", value=(self.context_tokens, self.kv_cache_tokens),
                              allowed="a context that the cache can hold", remedy="Raise kv_cache_tokens or lower context_tokens.")
        return self

    @property
    def most_context_tokens(self) -> int | None:
        """What these settings alone allow; None where the model decides."""
        return self.context_tokens or self.kv_cache_tokens

    def capabilities(self, *, context_tokens: int) -> Capabilities:
        """What this engine can do with a model of this context."""
        return Capabilities(
            interruptions=frozenset(Interruption), in_place_recompute=False, per_request_seed=False, per_request_temperature=True,
            stop_strings=False, bit_reproducible=False, context_tokens=context_tokens, truncates=True, kept_sets=True,
            routed_experts=True, lora="shared", sleep=True, own_process=True)


class VLLMEngineConfig(Section):
    """vLLM in a child process, on the CPU."""

    kind: Literal["vllm"] = "vllm"
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights, activations and the key-value cache. Logprobs are computed in float32 either way."""
    threads: Workers = 1
    """CPU threads of the forward; the loop that feeds it takes part of another core."""
    tensor_parallel_size: Workers = 1
    """Ranks that share each layer, each a process with `threads` threads, a part of the weights and a cache of `kv_cache_bytes`. The
    model's attention heads must be a multiple. For models that one device cannot hold: ranks wait for each other twice a layer."""
    max_batch_tokens: int = Field(default=2048, ge=16)
    """Tokens of one forward; longer prompts are read in pieces of this size."""
    max_running_requests: int = Field(default=256, ge=1)
    """Requests sampled at once; later ones wait their turn in arrival order."""
    kv_cache_bytes: int = Field(default=2**30, ge=2**20)
    """Size of the key-value cache. When it is full, some requests give theirs up and are computed again later."""
    context_tokens: int | None = Field(default=None, ge=2)
    """Prompt plus completion; the model's own limit when left out."""
    seed: Seed | None = None
    """Of the engine's one random stream; which request draws what from it depends on timing. None: `run.seed`, 0 outside a recipe."""

    @model_validator(mode="after")
    def _a_forward_has_room_for_every_running_request(self) -> VLLMEngineConfig:
        if self.max_batch_tokens < self.max_running_requests:
            raise ConfigError("engine.max_batch_tokens, engine.max_running_requests",
                              value=(self.max_batch_tokens, self.max_running_requests),
                              allowed="a token of a forward for each running request",
                              remedy="Raise max_batch_tokens or lower max_running_requests.")
        return self

    @property
    def most_context_tokens(self) -> int | None:
        """What these settings alone allow; None where the model decides."""
        return self.context_tokens

    def capabilities(self, *, context_tokens: int) -> Capabilities:
        """What this engine can do with a model of this context."""
        return Capabilities(
            interruptions=frozenset(Interruption), in_place_recompute=True, per_request_seed=False, per_request_temperature=True,
            stop_strings=True, bit_reproducible=False, context_tokens=context_tokens, lowest_temperature=_LOWEST_VLLM_TEMPERATURE,
            truncates=True, lora="per_request", own_process=True)


EngineConfig = Annotated[InlineEngineConfig | TransformersEngineConfig | VLLMEngineConfig, TAGGED]
