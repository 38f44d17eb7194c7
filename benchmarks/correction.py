"""Speed and memory of correction plus decoupled PPO, forward and backward from given logprobs, beside verl, TRL and AReaL on the same data.

    make peers                                # their environments, once
    python benchmarks/correction.py           # all of it, writes results/correction.json
    python benchmarks/correction.py --only ours

64 sequences, lengths drawn lognormal with a mean of 2k and at most 8k tokens. Ours and AReaL's are packed, [T]; verl and TRL take the same
tokens padded to 8k. Every contender runs in a process of its own and is asked in turn, several rounds. Times are medians over all rounds,
and theirs include making the weights, as ours do. Memory is the resident peak during one run over what the process held before it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import ROOT, commit, machine
from numpy.typing import NDArray

sys.path.insert(0, str(ROOT))

from asyncrl.correction import Correction, CorrectionBatch, LossInputs, PolicyLoss, correct, weigh
from asyncrl.correction.aggregate import aggregate, count
from asyncrl.correction.diagnostics import diagnose_update
from asyncrl.correction.losses import decoupled_ppo
from tests.parity.peers.adapter import Settings, Tensors, serve, timed, with_gradient
from tests.parity.peers.client import PEERS, Answer, Arrays, Peer, is_installed, packed, padded

RESULT = ROOT / "benchmarks" / "results" / "correction.json"
SEQUENCES, MEAN_TOKENS, MAX_TOKENS, SPREAD = 64, 2000, 8192, 0.8
"""`SPREAD` is the standard deviation of the logarithm: a few long rollouts among many short ones."""
SEED, VERSION = 2, 4
ROUNDS, REPEATS = 3, 15
CAP, CLIP_LOW, CLIP_HIGH = 2.0, 0.2, 0.28
CORRECTION = Correction(truncate_high=CAP)
SAME = 2e-5
"""Of the largest gradient: float32 after a few operations."""
TARGETS = {"verl_time": 1 / 10, "trl_time": 1 / 5, "areal_time": 1.0, "verl_memory": 1 / 4, "trl_memory": 1 / 4, "core_over_reading": 12.0,
           "diagnostics_over_core": 5.0}
"""The most that ours may be: as a share of theirs, or of reading the inputs once."""

@dataclass(frozen=True, slots=True)
class Contender:
    """Somebody's way to the same loss."""

    peer: str
    """Whose process; `asyncrl` is this file itself."""
    computation: str
    is_packed: bool


CONTENDERS = {"asyncrl": Contender("asyncrl", "core", True), "areal": Contender("areal", "decoupled_tis", True),
              "areal_padded": Contender("areal", "decoupled_tis", False), "trl": Contender("trl", "grpo_tis", False),
              "verl": Contender("verl", "vanilla_tis", False)}
SETTINGS = {"cap": CAP, "clip_low": CLIP_LOW, "clip_high": CLIP_HIGH, "aggregation": "token-mean"}


def draw(seed: int = SEED) -> tuple[Arrays, NDArray[np.int64]]:
    """Packed float32 logprobs of the engine, of the step's first weights and of the current ones, advantages, versions; and the lengths."""
    rng = np.random.default_rng(seed)
    lengths = rng.lognormal(np.log(MEAN_TOKENS) - SPREAD**2 / 2, SPREAD, SEQUENCES).astype(np.int64).clip(1, MAX_TOKENS)
    tokens = int(lengths.sum())
    rollout = -rng.exponential(0.5, tokens)
    proximal = np.minimum(rollout + rng.normal(0.0, 0.1, tokens), 0.0)
    current = np.minimum(proximal + rng.normal(0.0, 0.1, tokens), 0.0)
    floats = {"rollout_logprobs": rollout, "proximal_logprobs": proximal, "logprobs": current,
              "advantages": rng.normal(size=SEQUENCES).repeat(lengths)}
    versions = rng.integers(0, VERSION + 1, SEQUENCES).repeat(lengths)
    arrays = {name: values.astype(np.float32) for name, values in floats.items()}
    return {**arrays, "loss_mask": np.ones(tokens, dtype=np.bool_), "policy_versions": versions.astype(np.int32)}, lengths


def with_offsets(arrays: Arrays, lengths: NDArray[np.int64]) -> Arrays:
    """The packed arrays and where each sequence begins."""
    return {**arrays, "cu_seqlens": np.concatenate([[0], lengths.cumsum()])}


def batch_of(tensors: Tensors) -> CorrectionBatch:
    """What the trainer would build; made once, not timed."""
    offsets = tensors["cu_seqlens"]
    return CorrectionBatch(
        **{name: tensors[name] for name in ("rollout_logprobs", "proximal_logprobs", "advantages", "loss_mask", "policy_versions")},
        turn_ids=torch.zeros_like(tensors["policy_versions"]), cu_seqlens=offsets, group_ids=torch.arange(len(offsets) - 1) // 8,
        version=VERSION)


def losses_of(logprobs: torch.Tensor, batch: CorrectionBatch) -> PolicyLoss:
    """Weights and token losses."""
    return decoupled_ppo(logprobs, inputs=LossInputs.of(batch, weigh(batch, CORRECTION)), clip_low=CLIP_LOW, clip_high=CLIP_HIGH)


def core(tensors: Tensors, settings: Settings) -> dict[str, torch.Tensor]:
    """Count, weigh, loss, aggregate, backward."""
    batch = batch_of(tensors)

    def loss(logprobs: torch.Tensor) -> torch.Tensor:
        result = losses_of(logprobs, batch)
        return aggregate(result.losses, loss_mask=batch.loss_mask, cu_seqlens=batch.cu_seqlens,
                         denominators=count(batch.loss_mask, cu_seqlens=batch.cu_seqlens))

    return with_gradient(tensors["logprobs"], loss)


def reading(arrays: Arrays) -> None:
    """Each of the five packed inputs once, with NumPy."""
    for name in ("rollout_logprobs", "proximal_logprobs", "logprobs", "advantages"):
        arrays[name].sum()
    np.count_nonzero(arrays["loss_mask"])


def alone(arrays: Arrays, *, device: str, rounds: int) -> dict[str, float]:
    """Milliseconds of ours in this process: reading the inputs, the core, and everything that is measured once a step.

    Medians; `_best` is the fastest run, to go by while the machine has other work.
    """
    tensors = {name: torch.from_numpy(values).to(device) for name, values in arrays.items()}
    batch = batch_of(tensors)
    result = losses_of(tensors["logprobs"], batch)

    def finished(run: Callable[[], object]) -> Callable[[], None]:
        def waited() -> None:
            run()
            if device != "cpu":
                torch.cuda.synchronize()

        return waited

    def diagnostics() -> None:
        correct(batch, CORRECTION)
        diagnose_update(result.log_ratio, clipped=result.clipped, loss_mask=batch.loss_mask)

    runs: dict[str, Callable[[], object]] = {
        "reading": lambda: reading(arrays), "core": finished(lambda: core(tensors, {})), "diagnostics": finished(diagnostics),
        "weighing": finished(lambda: weigh(batch, CORRECTION))}
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            seconds[name] += timed(run, REPEATS)
    return summarised(seconds)


def summarised(seconds: Mapping[str, list[float]]) -> dict[str, float]:
    """Milliseconds, and the two ratios that are held against targets. `correct` weighs too, which is the core's, not the diagnostics'."""
    of = {"": statistics.median, "_best": min}
    found = {}
    for suffix, choose in of.items():
        ms = {name: choose(values) * 1e3 for name, values in seconds.items()}
        ms["diagnostics"] -= ms.pop("weighing")
        found |= {f"{name}_ms{suffix}": value for name, value in ms.items()}
        found |= {f"core_over_reading{suffix}": ms["core"] / ms["reading"],
                  f"diagnostics_over_core{suffix}": ms["diagnostics"] / ms["core"]}
    return {name: round(value, 3) for name, value in found.items()}


def start(name: str) -> Peer:
    """The process of a contender."""
    return Peer(Path(sys.executable), Path(__file__).resolve()) if name == "asyncrl" else Peer.of(name)


def compared(arrays: Arrays, lengths: NDArray[np.int64], *, threads: int) -> dict[str, Any]:
    """Milliseconds, megabytes and loss of each contender; their gradients must agree with ours."""
    inputs = {name: inputs_of(entry, arrays, lengths) for name, entry in CONTENDERS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    with ExitStack() as stack:
        processes = {peer: stack.enter_context(start(peer)) for peer in ("asyncrl", *PEERS)}

        def ask(name: str, **wanted: Any) -> Answer:
            entry = CONTENDERS[name]
            return processes[entry.peer].ask(entry.computation, inputs[name], settings=SETTINGS, threads=threads, **wanted)

        for _ in range(ROUNDS):
            for name in CONTENDERS:
                seconds[name] += ask(name, repeats=REPEATS).seconds
        answers = {name: ask(name, memory=True) for name in CONTENDERS}
    require_one_gradient(answers, lengths)
    return {name: {"ms": round(statistics.median(seconds[name]) * 1e3, 3), "ms_best": round(min(seconds[name]) * 1e3, 3),
                   "peak_mb": round((answer.peak_bytes or 0) / 1e6, 2), "loss": round(float(answer.arrays["loss"]), 6),
                   "packed": CONTENDERS[name].is_packed} for name, answer in answers.items()}


def inputs_of(contender: Contender, arrays: Arrays, lengths: NDArray[np.int64]) -> Arrays:
    """Packed or padded; TRL's advantages are one a sequence."""
    if contender.is_packed:
        return with_offsets(arrays, lengths)
    rows = padded(arrays, lengths=lengths)
    return {**rows, "advantages": rows["advantages"][:, 0]} if contender.peer == "trl" else rows


def require_one_gradient(answers: Mapping[str, Answer], lengths: NDArray[np.int64]) -> None:
    """Leave unless all computed the same: a time for something else says nothing."""
    ours = answers["asyncrl"].arrays["gradient"]
    for name, answer in answers.items():
        gradient = answer.arrays["gradient"]
        gap = np.abs((gradient if CONTENDERS[name].is_packed else packed(gradient, lengths=lengths)) - ours).max() / np.abs(ours).max()
        if gap > SAME:
            raise SystemExit(f"{name} computes another gradient: the largest difference is {gap:.1e} of ours")


def ratios(contenders: Mapping[str, Mapping[str, Any]]) -> dict[str, float]:
    """Ours over theirs."""
    mine = contenders["asyncrl"]
    times = {f"{name}_time": mine["ms"] / other["ms"] for name, other in contenders.items() if name != "asyncrl"}
    memory = {f"{name}_memory": mine["peak_mb"] / other["peak_mb"] for name, other in contenders.items() if name != "asyncrl"}
    return {name: round(value, 4) for name, value in {**times, **memory}.items()}


def main() -> None:
    """Measure, print, and write the file when everybody took part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("ours",), help="without the peers; nothing is written")
    parser.add_argument("--threads", type=int, default=os.cpu_count(), help="of torch, in every process (default: all cores)")
    options = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != str(options.threads):
        # torch's own setting leaves OpenMP's team as it is, and some operations ask that
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "OMP_NUM_THREADS": str(options.threads)})
    torch.set_num_threads(options.threads)
    arrays, lengths = draw()
    result: dict[str, Any] = {
        "benchmark": "correction", "machine": machine(), "commit": commit(), "threads": options.threads, "sequences": SEQUENCES,
        "tokens": int(lengths.sum()), "padded_tokens": SEQUENCES * MAX_TOKENS, "ours": {
            device: alone(with_offsets(arrays, lengths), device=device, rounds=ROUNDS)
            for device in ("cpu", *(["cuda"] if torch.cuda.is_available() else []))}}
    print(json.dumps(result["ours"], indent=1))
    if options.only:
        return
    missing = [peer for peer in PEERS if not is_installed(peer)]
    if missing:
        raise SystemExit(f"make peers: {', '.join(missing)} not installed")
    result["contenders"] = compared(arrays, lengths, threads=options.threads)
    result["ratios"] = ratios(result["contenders"]) | {name: result["ours"]["cpu"][name] for name in ("core_over_reading",
                                                                                                    "diagnostics_over_core")}
    result["targets"] = TARGETS
    result["met"] = {name: result["ratios"][name] <= most for name, most in TARGETS.items()}
    for name, row in result["contenders"].items():
        print(f"{name:14} {row['ms']:8.2f} ms {row['peak_mb']:8.2f} MB")
    for name, most in TARGETS.items():
        print(f"{name:22} {result['ratios'][name]:8.4f}, at most {most:g}{'' if result['met'][name] else ': NOT MET'}")
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].isdigit():
        serve({"core": core})
    else:
        main()
