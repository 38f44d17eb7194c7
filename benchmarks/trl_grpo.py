"""TRL's GRPOTrainer on the task of a recipe, for end_to_end.py, which starts it in TRL's own environment. Prints a line of JSON an event.

`python benchmarks/trl_grpo.py SPEC.json`; needs nothing of asyncrl: prompts and answers come with the specification.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

PR_SET_PDEATHSIG = 1


def say(event: str, **values: Any) -> None:
    """One event; who reads them holds the watch."""
    print(json.dumps({"event": event, **values}), flush=True)


def schedule_factor(step: int, schedule: dict[str, Any]) -> float:
    """Share of the learning rate in step 0, 1, …: linear warm-up, then linear descent to `final_frac`, as the recipe's `kind: linear`."""
    warm, total = schedule["warm_up_steps"], schedule["total_steps"]
    done = min(1.0, max(0.0, (step - warm) / max(1, total - warm)))
    return (min(1.0, (step + 1) / warm) if warm else 1.0) * (1 - (1 - schedule["final_frac"]) * done)


class Judge:
    """The reward: exactly the answer, or exactly the answer after the last `answer_after`. Keeps what each step was given."""

    __name__ = "is_correct"

    def __init__(self, answer_after: str | None) -> None:
        self._answer_after = answer_after
        self._rewards: list[float] = []
        self._lengths: list[int] = []
        self._began_s = self._generated_s = 0.0

    def begin(self) -> None:
        """A step begins, with its generation."""
        self._began_s = time.monotonic()

    def __call__(self, completions: list[str], completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
        self._generated_s = time.monotonic()
        found = [text.rpartition(self._answer_after)[2] if self._answer_after else text for text in completions]
        self._rewards = [float(text == right) for text, right in zip(found, answer, strict=True)]
        self._lengths = [len(tokens) for tokens in completion_ids]
        return self._rewards

    def step(self) -> dict[str, Any]:
        """Of the step that ends: mean reward, every length in tokens with the end of sequence, seconds of it and of its generation."""
        return {"reward": sum(self._rewards) / len(self._rewards), "lengths": self._lengths,
                "generate_s": self._generated_s - self._began_s, "step_s": time.monotonic() - self._began_s}


def grpo_config(spec: dict[str, Any], output: str) -> Any:
    """TRL's settings nearest to the recipe's; what costs time and changes nothing that is learned is off."""
    from trl import GRPOConfig

    rollouts = spec["groups_per_step"] * spec["group_size"]
    continuous = {"use_transformers_continuous_batching": True, "transformers_continuous_batching_config": spec["continuous_batching"]}
    return GRPOConfig(
        output_dir=output, seed=spec["seed"], use_cpu=True, bf16=False, gradient_checkpointing=False, torch_compile=False,
        per_device_train_batch_size=rollouts // spec["accumulation_steps"], gradient_accumulation_steps=spec["accumulation_steps"],
        num_generations=spec["group_size"], max_steps=spec["steps"], max_completion_length=spec["max_new_tokens"], shuffle_dataset=False,
        temperature=spec["temperature"], learning_rate=spec["learning_rate"], max_grad_norm=spec["max_grad_norm"], beta=0.0,
        epsilon=spec["clip_low"], epsilon_high=spec["clip_high"], loss_type="dapo", scale_rewards="group", num_iterations=1,
        save_strategy="no", logging_strategy="no", report_to="none", disable_tqdm=True, dataloader_num_workers=0,
        dataloader_pin_memory=False, **(continuous if spec["continuous_batching"] is not None else {}))


def train(spec: dict[str, Any]) -> None:
    """Train `steps` steps and save the model under `folder`."""
    import torch

    torch.set_num_threads(spec["threads"])
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    judge = Judge(spec["answer_after"])

    class Watch(TrainerCallback):
        """Says when each step is over."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            judge.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            say("step", step=state.global_step, **judge.step())

    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(spec["model"], padding_side="left")
    optimizer = torch.optim.AdamW(model.parameters(), lr=spec["learning_rate"], betas=tuple(spec["betas"]), eps=spec["eps"],
                                  weight_decay=0.0)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: schedule_factor(step, spec["schedule"]))
    with tempfile.TemporaryDirectory() as output:
        trainer = GRPOTrainer(model, reward_funcs=judge, args=grpo_config(spec, output), train_dataset=Dataset.from_list(spec["prompts"]),
                              processing_class=tokenizer, callbacks=[Watch()], optimizers=(optimizer, scheduler))
        say("begin", versions={name: version(name) for name in ("trl", "transformers", "torch", "accelerate", "datasets")})
        trainer.train()
    say("end")
    model.save_pretrained(spec["folder"])
    tokenizer.save_pretrained(spec["folder"])


def main() -> None:
    """Train what the file named on the command line specifies; end with the process that asked."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        raise SystemExit("the process that asked is gone")
    train(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
