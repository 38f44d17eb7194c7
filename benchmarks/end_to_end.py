"""Wall-clock to 0.70 mean reward: asyncrl with K = 2, with K = 0, with vLLM, and TRL. `python benchmarks/end_to_end.py --choose`

All start from one warmed-up model and take turns on the same cores. TRL has an environment of its own, made once:

    python3 -m venv .venv-trl
    .venv-trl/bin/pip install -c benchmarks/trl_constraints.txt torch
    .venv-trl/bin/pip install -c benchmarks/trl_constraints.txt trl

`--choose` first gives every contender the same freedom: the fastest of its variants over a few steps, then the learning rate that reaches
the threshold soonest in a whole run, on a seed that is not measured. Without it the choices in the result file are used again.
Writes results/end_to_end.json, a section for each task. `--tasks long_tail` measures that one and leaves the other section as it is.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from machine import ROOT, commit, machine

from asyncrl.config import RunConfig, load_config
from asyncrl.functions import load_function
from asyncrl.observe.jsonl import iterate_jsonl
from asyncrl.observe.plain import HEADER
from asyncrl.observe.summary import mean_of, total_of
from asyncrl.process import die_with_parent, last_lines
from asyncrl.training import prepare_model

RESULT = ROOT / "benchmarks" / "results" / "end_to_end.json"
RECIPES = {"quickstart": "recipes/arithmetic/quickstart.yaml", "long_tail": "recipes/arithmetic/long_tail.yaml"}
THRESHOLD, WINDOW_STEPS = 0.70, 10
"""Reached when the mean training reward of the last ten steps is that."""
RATES = (6e-4, 1e-3, 2e-3)
CHOICE_SEED, TRIAL_STEPS, UNTIMED_STEPS = 97, 10, 2
HELD_OUT_PROMPTS, EVALUATION_ROWS = 1024, 256
TIMEOUT_S = 3600

CONTINUOUS = {"page_size": 32, "num_blocks": 2048, "max_batch_tokens": 512, "max_requests_per_batch": 64, "allow_block_sharing": False,
              "use_async_batching": False}
"""For TRL's continuous batching. Left to itself it takes half the memory for its cache at every step, seven seconds of it."""

Variant = Mapping[str, Any]
TRIED: dict[str, tuple[Variant, ...]] = {
    "async": ({"engine.threads": 1, "trainer.threads": 1},),
    "sync": tuple({"buffer.max_staleness": 0, "engine.threads": threads, "trainer.threads": threads} for threads in (1, 2)),
    "vllm": ({"engine": "{kind: vllm, threads: 1}", "trainer.threads": 1},),
    "trl": tuple({"threads": threads, "continuous_batching": continuous, "accumulation_steps": accumulation} for threads in (1, 2)
                 for continuous, accumulation in ((None, 1), (None, 8), (CONTINUOUS, 1))),
}
"""What each contender may be without learning anything else; the first is the plainest, the fastest is taken."""
ALSO_LEARNED: dict[str, tuple[Variant, ...]] = {"sync": ({"buffer.zero_variance": "keep"}, {"buffer.zero_variance": "drop"})}
"""Tried with every learning rate: to wait for another group, or to train one that teaches nothing."""
SAME = ("the model folder, the prompts in the same order, the reward, rollouts a step, AdamW with the same betas, eps, gradient norm and "
        "schedule, clip 0.2 / 0.28, token mean over the step, advantages over the group, temperature 1 over the whole vocabulary, "
        "the token budget, float32, no KL, one update a step")
DIFFERENT = (
    "TRL trains groups of equal rewards with advantage 0 and counts their tokens in the mean; so does sync with zero_variance keep; "
    "async replaces them by other groups. The training reward counts them everywhere",
    "TRL divides by the standard deviation + 1e-4, asyncrl by the standard deviation alone",
    "asyncrl weighs tokens by min(proximal / rollout, 2) and pays a pass for the proximal logprobs; TRL is on-policy and does neither",
    "asyncrl writes metrics, a checkpoint every 20 steps and checks parity every 50, inside the time; TRL's logging and saving are off",
    "asyncrl judges rewards in two worker processes, TRL in the training process",
    "TRL's own asynchronous trainer needs a vLLM server with NCCL, which a CPU has not: not measured",
)


@dataclass(frozen=True, slots=True)
class Observed:
    """What one run showed from outside, by one watch for all: lines as they were printed."""

    start_up_s: float
    """From the start of the process to the first step: imports, model, engine."""
    seconds: tuple[float, ...]
    """The end of each step, from the start of the first."""
    rewards: tuple[float, ...]
    """Mean over all rollouts of a step, those filtered for equal rewards included."""
    rollouts: int
    tokens: int
    """Sampled, the end of sequence included."""
    model: Path
    details: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Task:
    """A recipe with its model made."""

    name: str
    config: RunConfig
    model: Path
    steps: int
    trl_python: Path


def seconds_to(threshold: float, *, rewards: Sequence[float], seconds: Sequence[float], window: int) -> dict[str, float] | None:
    """The first step at whose end the mean reward of the last `window` steps is at least the threshold; None when there is none."""
    for end in range(window, len(rewards) + 1):
        if statistics.fmean(rewards[end - window:end]) >= threshold:
            return {"step": end, "seconds": round(seconds[end - 1], 2)}
    return None


def step_s(seconds: Sequence[float]) -> float:
    """Median seconds of a step after the first ones, which warm caches and, in an asynchronous run, fill the buffer."""
    ends = seconds[UNTIMED_STEPS - 1:]
    return statistics.median(after - before for before, after in itertools.pairwise(ends))


def length_percentiles(lengths: Sequence[int]) -> dict[str, float]:
    """p50, p90, p99 and the mean, in tokens."""
    return {f"p{share}": float(np.percentile(lengths, share)) for share in (50, 90, 99)} | {"mean": round(statistics.fmean(lengths), 2)}


def watched(command: Sequence[str], *, log: Path, environment: Mapping[str, str], timeout_s: float = TIMEOUT_S) -> list[tuple[float, str]]:
    """Every line a command printed with the seconds since its start. It ends with this process, or at the time-out; failing is the end."""
    inherited = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "PYTHONPATH", "VIRTUAL_ENV")}
    began_s = time.monotonic()
    with log.open("wb") as errors, subprocess.Popen(
            command, cwd=ROOT, env={**inherited, "PYTHONUNBUFFERED": "1", **environment}, stdout=subprocess.PIPE, stderr=errors, text=True,
            preexec_fn=partial(die_with_parent, os.getpid())) as process:
        clock = threading.Timer(timeout_s, process.kill)
        clock.daemon = True
        clock.start()
        try:
            assert process.stdout is not None
            lines = [(time.monotonic() - began_s, line.rstrip("\n")) for line in process.stdout]
        finally:
            clock.cancel()
            if sys.exc_info()[0] is not None:
                process.kill()
    if process.returncode:
        printed = "\n".join(line for _, line in lines[-5:])
        raise SystemExit(f"{' '.join(map(str, command))} ended with {process.returncode}:\n{printed}\n{last_lines(log)}")
    return lines


def run_asyncrl(task: Task, settings: Variant, *, seed: int, steps: int, folder: Path) -> Observed:
    """One run of the recipe, without its evaluations."""
    everything = {"run.name": "run", "run.folder": folder, "run.seed": seed, "run.steps": steps, "prompts.arguments.seed": seed,
                  "model": f"{{kind: folder, path: {task.model}}}", "warm_up": "{kind: none}", "eval": "{kind: none}", **settings}
    overrides = [f"{key}={value}" for key, value in everything.items()]
    lines = watched([sys.executable, "-m", "asyncrl.cli", "train", RECIPES[task.name], *overrides], log=folder / "errors.log",
                    environment={})
    rows = [row for row in iterate_jsonl(folder / "run" / "metrics.jsonl") if "step" in row]
    seconds = tuple(row["wall_s"] for row in rows)
    begin_s = next(at_s for at_s, line in lines if line == HEADER) - seconds[0]
    summary = json.loads((folder / "run" / "summary.json").read_text(encoding="utf-8"))
    names = ("engine_wait_frac", "trainer_wait_frac", "staleness_max", "weight_sync_s_mean", "length_bias", "tokens_dropped")
    return Observed(
        start_up_s=begin_s, seconds=seconds, rewards=tuple(row["reward/total/mean"] for row in rows),
        rollouts=int(total_of(rows, "reward/rollouts/sum")), tokens=int(total_of(rows, "rollout/tokens/sum")),
        model=folder / "run" / "model",
        details={**{name: summary[name] for name in names}, "staleness_mean": mean_of(rows, "staleness/token/mean")})


def run_trl(task: Task, settings: Variant, *, seed: int, steps: int, folder: Path) -> Observed:
    """One run of TRL on the recipe's task."""
    config, trainer = task.config, task.config.trainer
    prompts = itertools.islice(load_function(config.prompts.function, field="prompts")(seed=seed), steps * config.buffer.groups_per_step)
    spec = {
        "model": str(task.model), "folder": str(folder / "model"), "seed": seed, "steps": steps,
        "groups_per_step": config.buffer.groups_per_step, "group_size": config.buffer.group_size,
        "max_new_tokens": config.sampling.max_new_tokens, "temperature": config.sampling.temperature,
        "learning_rate": trainer.learning_rate, "betas": trainer.betas, "eps": trainer.eps, "max_grad_norm": trainer.max_grad_norm,
        "schedule": trainer.schedule.model_dump(), "clip_low": config.loss.clip_low, "clip_high": config.loss.clip_high,
        "answer_after": "=" if task.name == "long_tail" else None,
        "prompts": [{"prompt": prompt.text, "answer": prompt.columns["answer"]} for prompt in prompts],
        **{key.removeprefix("trainer."): value for key, value in settings.items()}}
    (folder / "spec.json").write_text(json.dumps(spec), encoding="utf-8")
    lines = watched([str(task.trl_python), "benchmarks/trl_grpo.py", str(folder / "spec.json")], log=folder / "errors.log",
                    environment={"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": str(spec["threads"])})
    events = [(at_s, json.loads(line)) for at_s, line in lines if line.startswith('{"event"')]
    begin_s, begin = next((at_s, event) for at_s, event in events if event["event"] == "begin")
    done = [(at_s - begin_s, event) for at_s, event in events if event["event"] == "step"]
    lengths = [event["lengths"] for _, event in done]
    padded = sum(len(step) * max(step) for step in lengths)
    tokens = sum(map(sum, lengths))
    generate_s, all_s = sum(event["generate_s"] for _, event in done), sum(event["step_s"] for _, event in done)
    return Observed(
        start_up_s=begin_s, seconds=tuple(at_s for at_s, _ in done), rewards=tuple(event["reward"] for _, event in done),
        rollouts=sum(map(len, lengths)), tokens=tokens, model=folder / "model",
        details={"versions": begin["versions"], "generate_frac": generate_s / all_s, "padding_frac": 1 - tokens / padded})


def run(task: Task, name: str, settings: Variant, *, seed: int, steps: int) -> dict[str, Any]:
    """One run of a contender, from its process to what its model can do."""
    with tempfile.TemporaryDirectory() as folder:
        contender: Callable[..., Observed] = run_trl if name == "trl" else run_asyncrl
        seen = contender(task, settings, seed=seed, steps=steps, folder=Path(folder))
        held_out = evaluate(seen.model, task.config)
    train_s = seen.seconds[-1]
    row = {"contender": name, "seed": seed, "settings": dict(settings), "steps": len(seen.seconds),
           "reached": seconds_to(THRESHOLD, rewards=seen.rewards, seconds=seen.seconds, window=WINDOW_STEPS),
           "start_up_s": round(seen.start_up_s, 2), "train_s": round(train_s, 2), "step_s_median": round(step_s(seen.seconds), 4),
           "rollouts_per_s": round(seen.rollouts / train_s, 1), "tokens_per_s": round(seen.tokens / train_s),
           "reward_last": round(statistics.fmean(seen.rewards[-WINDOW_STEPS:]), 4), "held_out": held_out,
           "details": {key: round(value, 4) if isinstance(value, float) else value for key, value in seen.details.items()},
           "rewards": [round(reward, 4) for reward in seen.rewards], "seconds": [round(at_s, 2) for at_s in seen.seconds]}
    print(line(row), flush=True)
    return row


def evaluate(folder: Path, config: RunConfig) -> dict[str, Any]:
    """What a model can do on held-out sums, by plain transformers, the same for all.

    `sampled`: accuracy at temperature 1, with the lengths it came in. `greedy`: share of worked examples, thinking given, whose every
    token is the likeliest; most likely of all would be never to stop thinking.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(0)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), AutoTokenizer.from_pretrained(folder)
    prompts = load_function(config.eval.sets["held_out"].prompts.function, field="eval")(count=HELD_OUT_PROMPTS)
    examples = load_function(config.warm_up.held_out, field="warm_up")(seed=0, **config.warm_up.arguments)
    reward = load_function(config.env.reward, field="env.reward")
    rewards, lengths = [], []
    with torch.no_grad():
        for start in range(0, len(prompts), EVALUATION_ROWS):
            asked = prompts[start:start + EVALUATION_ROWS]
            tokens = torch.tensor([tokenizer.encode(prompt.text) for prompt in asked])
            rows = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=config.sampling.max_new_tokens,
                                  do_sample=True, temperature=1.0, top_k=0, top_p=1.0)[:, tokens.shape[1]:].tolist()
            ends = [row.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in row else len(row) for row in rows]
            rewards += [reward(prompt, tokenizer.decode(row[:end])) for prompt, row, end in zip(asked, rows, ends, strict=True)]
            lengths += [min(end + 1, len(row)) for row, end in zip(rows, ends, strict=True)]
        greedy = statistics.fmean(is_likeliest(model, tokenizer, *example) for example in examples)
    return {"sampled": round(statistics.fmean(rewards), 4), "greedy": round(greedy, 4), "lengths": length_percentiles(lengths)}


def is_likeliest(model: Any, tokenizer: Any, prompt: str, completion: str) -> bool:
    """Whether each token of the completion, its end included, is the likeliest after those before it."""
    import torch

    asked, expected = tokenizer.encode(prompt), [*tokenizer.encode(completion), tokenizer.eos_token_id]
    logits = model(torch.tensor([asked + expected])).logits[0, len(asked) - 1:-1]
    return logits.argmax(-1).tolist() == expected


def choose(task: Task, name: str, *, rates: Sequence[float]) -> dict[str, Any]:
    """The fastest variant by seconds a step, then what it learns with by seconds to the threshold; everything tried is kept."""
    variants = TRIED[name]
    trials = [run(task, name, variant, seed=CHOICE_SEED, steps=TRIAL_STEPS) for variant in variants] if len(variants) > 1 else []
    fastest = min(trials, key=lambda row: row["step_s_median"])["settings"] if trials else variants[0]
    tried = [{**fastest, **also, "trainer.learning_rate": rate} for also in ALSO_LEARNED.get(name, ({},)) for rate in rates]
    runs = [run(task, name, settings, seed=CHOICE_SEED, steps=task.steps) for settings in tried]
    best = min(runs, key=lambda row: (row["reached"]["seconds"] if row["reached"] else float("inf"), -row["held_out"]["sampled"]))
    kept = ("settings", "reached", "reward_last", "held_out", "step_s_median")
    return {"settings": best["settings"], "learned": [{key: row[key] for key in kept} for row in runs],
            "variants": [{"settings": row["settings"], "step_s_median": row["step_s_median"]} for row in trials]}


def summarised(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of one contender over its seeds: medians, and the runs that never reached the threshold."""
    reached = [row["reached"] for row in rows if row["reached"]]

    def median(values: Iterable[float]) -> float | None:
        known = list(values)
        return round(statistics.median(known), 4) if known else None

    same = ("start_up_s", "train_s", "step_s_median", "rollouts_per_s", "tokens_per_s")
    return {"runs": len(rows), "not_reached": len(rows) - len(reached),
            "seconds_to_threshold": median(each["seconds"] for each in reached),
            "steps_to_threshold": median(each["step"] for each in reached),
            **{key: median(row[key] for row in rows) for key in same},
            **{f"held_out_{how}": median(row["held_out"][how] for row in rows) for how in ("sampled", "greedy")}}


def measure(task: Task, choices: Mapping[str, Any], *, seeds: Sequence[int]) -> dict[str, Any]:
    """Every contender on every seed, in turn, each seed beginning with another."""
    names, rows = list(choices), []
    for number, seed in enumerate(seeds):
        turn = number % len(names)
        rows += [run(task, name, choices[name]["settings"], seed=seed, steps=task.steps) for name in names[turn:] + names[:turn]]
    return {"threshold": THRESHOLD, "window_steps": WINDOW_STEPS, "steps": task.steps, "before": evaluate(task.model, task.config),
            "summary": {name: summarised([row for row in rows if row["contender"] == name]) for name in names},
            "choices": dict(choices), "runs": rows}


def line(row: Mapping[str, Any]) -> str:
    """A run as a line of the table."""
    reached, held_out = row["reached"], row["held_out"]
    when = f"{reached['seconds']:7.1f} s, step {reached['step']:3}" if reached else "never".rjust(19)
    return (f"{row['contender']:6} seed {row['seed']:2}  to {THRESHOLD}: {when}  start-up {row['start_up_s']:5.1f} s  "
            f"{row['step_s_median']:6.3f} s/step  {row['rollouts_per_s']:7.1f} rollouts/s  {row['tokens_per_s']:6} tok/s  "
            f"held-out {held_out['sampled']:.3f}, greedy {held_out['greedy']:.3f}  "
            f"p50/p99 {held_out['lengths']['p50']:.0f}/{held_out['lengths']['p99']:.0f}")


def prepared(name: str, options: argparse.Namespace) -> Task:
    """The recipe with its model, made now or by an earlier run."""
    config = load_config(ROOT / RECIPES[name], [f"run.folder={options.folder}"])
    model = asyncio.run(prepare_model(config, logs=options.folder / "logs", echo=print))
    return Task(name, config, model.resolve(), steps=options.steps or config.run.steps, trl_python=options.trl_python)


def main() -> None:
    """Choose if asked to, measure, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--contenders", nargs="+", choices=TRIED, default=list(TRIED))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--choose", action="store_true", help="try variants and learning rates first")
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES))
    parser.add_argument("--steps", type=int, help="instead of the recipe's, for a quick look")
    parser.add_argument("--folder", type=Path, default=ROOT / "runs" / "end_to_end", help="where the warmed-up models are kept")
    parser.add_argument("--trl-python", type=Path, default=ROOT / ".venv-trl" / "bin" / "python")
    parser.add_argument("--result", type=Path, default=RESULT)
    options = parser.parse_args()
    result = json.loads(options.result.read_text(encoding="utf-8")) if options.result.exists() else {}
    for name in options.tasks:
        task = prepared(name, options)
        known = result.get(name, {}).get("choices", {})
        choices = {each: choose(task, each, rates=options.rates) if options.choose or each not in known else known[each]
                   for each in options.contenders}
        at = {"commit": commit(), "machine": machine()}
        result = {**result, "benchmark": "end_to_end", "same": SAME, "different": DIFFERENT,
                  name: {**at, **measure(task, choices, seeds=options.seeds)}}
        options.result.parent.mkdir(exist_ok=True)
        options.result.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        for row in result[name]["runs"]:
            print(line(row))
        print(json.dumps(result[name]["summary"], indent=1))


if __name__ == "__main__":
    main()
