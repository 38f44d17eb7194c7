"""The output layer with its loss, forward and backward: ours in chunks against `F.cross_entropy` on whole logits.

`python -m benchmarks.trainer_head WAY PREDICTIONS FILE` is one contestant; it leaves its gradients in FILE.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncrl.train.logprobs import CHUNK_LOGITS, Head, Predictions, token_objective
from benchmarks.contestants import contest, ratio
from benchmarks.turns import Turns

VOCABULARY, HIDDEN, SEED = 49_152, 576, 0
"""Of SmolLM2-135M."""
LOW_MEMORY = CHUNK_LOGITS // 2
CHUNKS = {"asyncrl": CHUNK_LOGITS, "asyncrl_low_memory": LOW_MEMORY}
SAME = 1e-5
"""Of the largest gradient."""
TARGETS = {"time": 1.0, "memory": 1 / 6, "time_low_memory": 1.0, "memory_low_memory": 1 / 12}


class Problem:
    """Hidden states, the layer, and what is to be predicted."""

    def __init__(self, predictions: int, *, vocabulary: int = VOCABULARY, device: str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        generator = torch.Generator().manual_seed(SEED)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator).to(device, dtype)

        self.hidden = normal(predictions, HIDDEN).requires_grad_()
        self.weight = normal(vocabulary, HIDDEN).mul_(HIDDEN**-0.5).requires_grad_()
        self.targets = torch.randint(0, vocabulary, (predictions,), generator=generator).to(device)
        self._one = torch.ones(predictions, device=device)

    def run(self, way: str) -> None:
        """Gradients of the mean loss, anew."""
        self.hidden.grad = self.weight.grad = None
        if way == "cross_entropy":
            torch.nn.functional.cross_entropy(self.hidden @ self.weight.t(), self.targets).backward()
            return
        count = len(self.targets)
        total, *_ = token_objective(self.hidden, head=Head(self.weight, None, CHUNKS[way]),
                                    predictions=Predictions(self.targets, self._one),
                                    objective=lambda logprobs, entropy, rows: -logprobs.sum() / count)
        total.backward()


def measured(folder: Path, *, predictions: int, threads: int, rounds: int) -> dict[str, Any]:
    """Seconds and memory of each way, ratios, and how far the gradients are apart."""
    ways = (*CHUNKS, "cross_entropy")
    files = {way: folder / f"{way}.npz" for way in ways}
    found = contest({way: [sys.executable, "-m", "benchmarks.trainer_head", way, str(predictions), str(files[way])] for way in ways},
                    threads=threads, rounds=rounds, logs=folder)
    plain = found["cross_entropy"]
    ratios = {"time": ratio(found["asyncrl"], plain), "memory": found["asyncrl"]["peak_mib"] / plain["peak_mib"],
              "time_low_memory": ratio(found["asyncrl_low_memory"], plain),
              "memory_low_memory": found["asyncrl_low_memory"]["peak_mib"] / plain["peak_mib"]}
    gap = max(gradient_gap(files[way], files["cross_entropy"]) for way in CHUNKS)
    if gap > SAME:
        raise SystemExit(f"the gradients differ by {gap:.1e} of the largest")
    return {"predictions": predictions, "vocabulary": VOCABULARY, "hidden": HIDDEN, "chunk_logits": CHUNKS, "ways": found,
            "ratios": {name: round(value, 4) for name, value in ratios.items()}, "gradient_gap": gap}


def gradient_gap(file: Path, other: Path) -> float:
    """The largest difference, in shares of the largest value."""
    with np.load(file) as mine, np.load(other) as theirs:
        return max(float(np.abs(mine[name] - theirs[name]).max() / np.abs(theirs[name]).max()) for name in ("hidden", "weight"))


def on_gpu(*, predictions: int, repeats: int) -> dict[str, Any]:
    """The same on a CUDA device in bfloat16: milliseconds by events, mebibytes that the allocator held at most."""
    problem = Problem(predictions, device="cuda", dtype=torch.bfloat16)
    return {way: cuda_measured(lambda way=way: problem.run(way), repeats=repeats) for way in (*CHUNKS, "cross_entropy")}


def cuda_measured(run: Callable[[], None], *, repeats: int) -> dict[str, float]:
    """Median milliseconds of a run, and its peak over what was held before."""
    run()
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    milliseconds = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        milliseconds.append(begin.elapsed_time(end))
    return {"median_ms": sorted(milliseconds)[repeats // 2], "peak_mib": (torch.cuda.max_memory_allocated() - base) / 2**20}


def main(way: str, predictions: str, file: str) -> None:
    """One contestant. What its memory is counted over holds the inputs."""
    turns = Turns()
    problem = Problem(int(predictions))
    turns.start()
    turns.ready()
    turns.begin()
    problem.run(way)
    turns.end()
    assert problem.hidden.grad is not None
    assert problem.weight.grad is not None
    np.savez(file, hidden=problem.hidden.grad.numpy(), weight=problem.weight.grad.numpy())
    for _ in turns:
        problem.run(way)


if __name__ == "__main__":
    main(*sys.argv[1:])
