"""One optimizer step of GRPO on a batch that is already sampled, by several trainers. `python benchmarks/step_contestant.py TRAINER SPEC`

Runs in the environment of whoever it is: nothing of asyncrl is imported but for asyncrl. All train the same float32 model with AdamW and
clipped gradients on the same sequences and rewards. The specification has them as lists; ours is also given the batch file that its ranks
read.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.turns import Turns

LEARNING_RATE, BETAS, EPS, MAX_GRAD_NORM = 1e-6, (0.9, 0.95), 1e-8, 1.0
BIN_TOKENS = 2048
"""Of a packed row whose mask transformers makes: its cost grows with the square."""


def asyncrl(spec: dict[str, Any], turns: Turns) -> None:
    """A rank in this process: reads the batch, corrects, packs, trains."""
    from asyncrl.channel import Request
    from asyncrl.train.config import validated
    from asyncrl.train.rank import RankTrainer
    from asyncrl.train.rank_spec import RankSpec
    from asyncrl.weights.ends import TransportSpec

    turns.start()
    settings = {"learning_rate": LEARNING_RATE, "betas": BETAS, "eps": EPS, "max_grad_norm": MAX_GRAD_NORM, "processes": 0,
                "threads": spec["threads"], **spec["settings"]}
    config = validated({"trainer": settings, "advantages": "grpo", "correction": "token_tis", "loss": "decoupled_ppo"})
    with tempfile.TemporaryDirectory() as store:
        rank = RankTrainer(RankSpec(model=spec["model"], rank=0, world_size=1, rendezvous=None, transport=TransportSpec(Path(store)),
                                    published_dtype="float32", config=config))
        turns.ready()
        for _ in turns:
            reply = rank.step(Request("step", body={"path": spec["batch"]}))
            assert reply["trained_tokens"] == sum(map(len, spec["completions"]))


def sequences(spec: dict[str, Any], turns: Turns) -> None:
    """A loop over sequences with transformers' own forward: no padding."""
    rows = range(len(spec["completions"]))
    _plain(spec, turns, bins=[[row] for row in rows])


def packed(spec: dict[str, Any], turns: Turns) -> None:
    """Bins of sequences end to end, their positions starting anew: transformers finds them and makes a mask."""
    lengths = [len(spec["prompt"]) + len(completion) for completion in spec["completions"]]
    bins: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        home = next((other for other in bins if sum(lengths[n] for n in other) + lengths[row] <= BIN_TOKENS), None)
        if home is None:
            bins.append([row])
        else:
            home.append(row)
    _plain(spec, turns, bins=bins)


def _plain(spec: dict[str, Any], turns: Turns, *, bins: list[list[int]]) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    turns.start()
    torch.set_num_threads(spec["threads"])
    lm = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32)
    lm.train()
    optimizer = torch.optim.AdamW(lm.parameters(), lr=LEARNING_RATE, betas=BETAS, eps=EPS, weight_decay=0.0, fused=True)
    rows = [torch.tensor(spec["prompt"] + completion) for completion in spec["completions"]]
    advantages, total = _advantages(spec), sum(map(len, spec["completions"]))
    first = len(spec["prompt"])
    turns.ready()
    for _ in turns:
        for members in bins:
            tokens = torch.cat([rows[row] for row in members])[None]
            positions = torch.cat([torch.arange(len(rows[row])) for row in members])[None]
            logits = lm(input_ids=tokens, position_ids=positions, use_cache=False).logits[0]
            loss, start = torch.zeros(()), 0
            for row in members:
                scored = logits[start + first - 1:start + len(rows[row]) - 1]
                logprobs = scored.log_softmax(dim=-1).gather(1, rows[row][first:, None])[:, 0]
                loss = loss - advantages[row] * (logprobs - logprobs.detach()).exp().sum()
                start += len(rows[row])
            (loss / total).backward()
        torch.nn.utils.clip_grad_norm_(lm.parameters(), MAX_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _advantages(spec: dict[str, Any]) -> list[float]:
    import torch

    rewards = torch.tensor(spec["rewards"]).view(-1, spec["group_size"])
    return ((rewards - rewards.mean(dim=1, keepdim=True)) / rewards.std(dim=1, keepdim=True)).flatten().tolist()


def trl(spec: dict[str, Any], turns: Turns) -> None:
    """TRL's GRPOTrainer with its own defaults, the batch handed over where it would generate. A turn is one step of its loop.

    The batch is one device batch, accumulation being 1 by default, where the settings do not cut it.
    """
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    turns.start()
    torch.set_num_threads(spec["threads"])

    class Watch(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            turns.begin()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            turns.end()

    def given(prompts: list[Any], trainer: Any) -> dict[str, Any]:
        return {"prompt_ids": [spec["prompt"]] * len(prompts), "completion_ids": [list(row) for row in spec["completions"]],
                "logprobs": [list(row) for row in spec["logprobs"]]}

    def reward(completions: list[str], **_: Any) -> list[float]:
        return list(spec["rewards"])

    count = len(spec["completions"])
    at_once = spec["settings"].pop("per_device_train_batch_size", count)
    model = AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32)
    with tempfile.TemporaryDirectory() as output:
        config = GRPOConfig(
            output_dir=output, use_cpu=True, bf16=False, per_device_train_batch_size=at_once,
            gradient_accumulation_steps=count // at_once, num_generations=spec["group_size"], max_steps=10_000,
            max_completion_length=max(map(len, spec["completions"])), shuffle_dataset=False, learning_rate=LEARNING_RATE,
            adam_beta1=BETAS[0], adam_beta2=BETAS[1], adam_epsilon=EPS, max_grad_norm=MAX_GRAD_NORM, save_strategy="no",
            logging_strategy="no", report_to="none", disable_tqdm=True, dataloader_pin_memory=False, **spec["settings"])
        prompts = Dataset.from_list([{"prompt": "1+1="}] * (count // spec["group_size"]))
        trainer = GRPOTrainer(model, reward_funcs=reward, args=config, train_dataset=prompts, rollout_func=given, callbacks=[Watch()],
                              processing_class=AutoTokenizer.from_pretrained(spec["model"], padding_side="left"))
        turns.ready()
        trainer.train()


TRAINERS = {"asyncrl": asyncrl, "sequences": sequences, "packed": packed, "trl": trl}


def main(arguments: Iterable[str]) -> None:
    """Train as the trainer named, on what the file says."""
    trainer, spec = arguments
    TRAINERS[trainer](json.loads(Path(spec).read_text(encoding="utf-8")), Turns())


if __name__ == "__main__":
    main(sys.argv[1:])
