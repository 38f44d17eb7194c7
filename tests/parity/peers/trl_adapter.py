"""TRL's GRPOTrainer, its loss and what it makes of a generation, with logprobs given instead of a forward. Runs in TRL's environment.

Arrays are padded [N, L]; TRL's advantages are one a sequence, [N]. The trainer is built once, on a model of a few hundred parameters.
"""

from __future__ import annotations

import functools
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

sys.path.insert(0, str(Path(__file__).parent))

from adapter import Settings, Tensors, serve, with_gradient

OF_ARGUMENTS = ("delta", "sapo_temperature_pos", "sapo_temperature_neg", "vespo_k_pos", "vespo_k_neg", "vespo_lambda_pos",
                "vespo_lambda_neg", "use_bias_correction_kl")
"""Settings that the loss reads from the arguments; it reads the others from the trainer."""


@functools.cache
def trainer() -> GRPOTrainer:
    """Nothing of it is trained: its methods are called with tensors."""
    model = LlamaForCausalLM(LlamaConfig(vocab_size=4, hidden_size=4, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1,
                                         pad_token_id=0, eos_token_id=1, bos_token_id=None))
    words = Tokenizer(WordLevel({"<pad>": 0, "<eos>": 1, "a": 2, "b": 3}, unk_token="<pad>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    config = GRPOConfig(output_dir=tempfile.mkdtemp(), use_cpu=True, bf16=False, gradient_checkpointing=False, report_to="none",
                        num_generations=2, per_device_train_batch_size=2, max_completion_length=4)
    built = GRPOTrainer(model, reward_funcs=lambda completions, **_: [0.0] * len(completions), args=config,
                        train_dataset=Dataset.from_list([{"prompt": "a"}]), processing_class=tokenizer)
    built.current_gradient_accumulation_steps = 1
    built.args.steps_per_generation = 1
    built.use_vllm = True
    return built


def loss(tensors: Tensors, settings: Settings) -> dict[str, torch.Tensor]:
    """`_compute_loss` with its gradient. `importance_sampling_ratio` [N, L] or [N, 1] multiplies the token losses where it is given."""
    settled = trainer()
    for name, value in settings.items():
        setattr(settled.args if name in OF_ARGUMENTS else settled, name, value)
    settled.vllm_importance_sampling_correction = "importance_sampling_ratio" in tensors
    mask = tensors["loss_mask"].long()
    inputs = {"prompt_ids": torch.zeros_like(mask[:, :1]), "prompt_mask": torch.ones_like(mask[:, :1]), "completion_ids": mask,
              "completion_mask": mask, "advantages": tensors["advantages"], "old_per_token_logps": tensors["proximal_logprobs"],
              "num_items_in_batch": mask.sum()}
    for ours, theirs in {"rollout_logprobs": "sampling_per_token_logps", "ref_logprobs": "ref_per_token_logps",
                         "importance_sampling_ratio": "importance_sampling_ratio"}.items():
        if ours in tensors:
            inputs[theirs] = tensors[ours]

    def value(logprobs: torch.Tensor) -> torch.Tensor:
        settled._get_per_token_logps_and_entropies = lambda *_, **__: (logprobs, torch.zeros_like(logprobs).detach(), None)
        return settled._compute_loss(settled.model, inputs)

    found = with_gradient(tensors["logprobs"], value)
    settled._metrics["train"].clear()
    return found


def generation(tensors: Tensors, settings: Settings) -> dict[str, torch.Tensor]:
    """`importance_sampling_ratio` and `advantages` that it would hand to its loss, for logprobs and rewards as given."""
    settled = trainer()
    for name, value in settings.items():
        setattr(settled, name, value)
    settled.vllm_importance_sampling_correction = True
    lengths = tensors["lengths"].tolist()

    def rows(name: str) -> list[list[Any]]:
        return [row[:length].tolist() for row, length in zip(tensors[name], lengths, strict=True)]

    completions = [[2] * length for length in lengths]
    generated = ([[2]] * len(lengths), completions, rows("loss_mask"), completions, rows("rollout_logprobs"), {}, None, None)
    replaced: dict[str, Any] = {
        "_generate": lambda *_: generated,
        "_calculate_rewards": lambda *_: tensors["rewards"][:, None],
        "_get_per_token_logps_and_entropies": lambda *_, **__: (tensors["proximal_logprobs"], None, None)}
    for name, method in replaced.items():
        setattr(settled, name, method)
    found = settled._generate_and_score_completions([{"prompt": "a"}] * len(lengths))
    settled._metrics["train"].clear()
    return {name: found[name] for name in ("importance_sampling_ratio", "advantages")}


def grpo_tis(tensors: Tensors, settings: Settings) -> dict[str, torch.Tensor]:
    """Loss over tokens, with weights made as TRL makes them and truncated at `cap`; for the benchmark."""
    gap = torch.nan_to_num((tensors["proximal_logprobs"] - tensors["rollout_logprobs"]) * tensors["loss_mask"], nan=0.0)
    return loss({**tensors, "importance_sampling_ratio": gap.exp().clamp(max=settings["cap"])},
                {"loss_type": "dapo", "epsilon_low": settings["clip_low"], "epsilon_high": settings["clip_high"]})


if __name__ == "__main__":
    serve({"loss": loss, "generation": generation, "grpo_tis": grpo_tis})
