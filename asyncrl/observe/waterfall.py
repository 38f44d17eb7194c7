"""Where each engine-second and each trainer-second of a run went, from the rows of metrics.jsonl."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from asyncrl.observe.jsonl import iterate_jsonl

ENGINE_CAUSES = ("decode", "prefill", "reprefill", "tail", "idle", "paused", "down", "evaluation")
TRAINER_CAUSES = ("forward", "backward", "optimizer", "data", "sync", "checkpoint", "evaluation", "other")
MEANING = {
    "decode": "tokens are written", "prefill": "prompts are read", "reprefill": "what was written before is read again",
    "tail": "less than half full, on what is left", "idle": "no prompt to work on", "paused": "stands still for weights, or asleep",
    "down": "failed, and not back yet", "evaluation": "held-out sets, probes, exports", "forward": "forward passes",
    "backward": "backward passes", "optimizer": "the update", "data": "waits for a batch", "sync": "publishes weights, takes turns",
    "checkpoint": "copies its state", "other": "the rest: packing, loading, correction, what lies between the steps"}
_BAR = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Waterfall:
    """Shares of time by cause, as fractions; each side sums to 1 within rounding."""

    steps: int
    seconds: float
    """From the start of the first step to the end of the last, evaluations included."""
    engine_s: float
    """Seconds of all engines together."""
    trainer_s: float
    engine: Mapping[str, float]
    trainer: Mapping[str, float]
    mfu: float | None
    """Of the trainer, over all its seconds: FLOP of its tokens over what its device could have done. None where its peak is not known."""
    mfu_computing: float | None
    """The same over forward, backward and optimizer alone."""
    peak_flop_s: float | None

    @property
    def step_s(self) -> float:
        """Of a step, evaluations apart."""
        return self.seconds * (1.0 - self.trainer["evaluation"]) / self.steps

    def to_json(self) -> dict[str, Any]:
        """What waterfall.json holds."""
        return {**asdict(self), "step_s": self.step_s}


def waterfall_of(rows: Iterable[Mapping[str, Any]]) -> Waterfall | None:
    """The account of the steps in these rows; None where no row has one."""
    steps, totals, peak = 0, dict[str, float](), None
    for row in rows:
        if row.get("trainer/whole_s/sum") is None or "trainer_step" not in row:
            continue
        steps += 1
        peak = row.get("train/peak_flop_s/last", peak)
        for name in _NAMES:
            totals[name] = totals.get(name, 0.0) + (row.get(name) or 0.0)
    if not steps:
        return None
    engine_s, trainer_s, flop = totals["engine/whole_s/sum"], totals["trainer/whole_s/sum"], totals["train/flop/sum"]
    computing_s = sum(totals[f"trainer/{phase}_s/sum"] for phase in ("forward", "backward", "optimizer"))
    return Waterfall(
        steps=steps, seconds=trainer_s, engine_s=engine_s, trainer_s=trainer_s,
        engine={cause: _share(totals[f"engine/{cause}_s/sum"], engine_s) for cause in ENGINE_CAUSES},
        trainer={cause: _share(totals[f"trainer/{cause}_s/sum"], trainer_s) for cause in TRAINER_CAUSES},
        mfu=_mfu(flop, peak, trainer_s), mfu_computing=_mfu(flop, peak, computing_s), peak_flop_s=peak)


def read_waterfall(folder: Path) -> Waterfall | None:
    """Of a run's folder, while it goes on or afterwards."""
    return waterfall_of(iterate_jsonl(folder / "metrics.jsonl"))


def write_waterfall(folder: Path, *, title: str) -> Waterfall | None:
    """Write waterfall.json and waterfall.png into a run's folder; nothing for a run without a step."""
    from asyncrl.observe.plots import plot_waterfall

    found = read_waterfall(folder)
    if found is not None:
        (folder / "waterfall.json").write_text(json.dumps(found.to_json(), indent=2) + "\n", encoding="utf-8")
        plot_waterfall(folder / "waterfall.png", sides={"engines": found.engine, "trainer": found.trainer}, title=title)
    return found


def text_of_waterfall(waterfall: Waterfall) -> str:
    """A table for people: each cause, its share, a bar, what it means."""
    lines = [f"{waterfall.steps} steps in {waterfall.seconds:.1f} s, {waterfall.step_s:.3f} s a step; "
             f"{waterfall.engine_s:.1f} engine-seconds"]
    for title, shares in (("engines", waterfall.engine), ("trainer", waterfall.trainer)):
        lines.append(f"\n{title:12}{'share':>8}")
        lines += [f"  {cause:10}{share:>8.1%}  {'█' * round(share * _BAR):{_BAR}}  {MEANING[cause]}" for cause, share in shares.items()]
        lines.append(f"  {'sum':10}{sum(shares.values()):>8.1%}")
    if waterfall.mfu is not None and waterfall.mfu_computing is not None and waterfall.peak_flop_s is not None:
        lines.append(f"\nMFU of the trainer {waterfall.mfu:.1%}, while it computes {waterfall.mfu_computing:.1%}, "
                     f"of {waterfall.peak_flop_s / 1e9:,.0f} GFLOP/s")
    return "\n".join(lines)


_NAMES = ("engine/whole_s/sum", "trainer/whole_s/sum", "train/flop/sum", *(f"engine/{cause}_s/sum" for cause in ENGINE_CAUSES),
          *(f"trainer/{cause}_s/sum" for cause in TRAINER_CAUSES))


def _share(seconds: float, whole_s: float) -> float:
    return seconds / whole_s if whole_s else 0.0


def _mfu(flop: float, peak_flop_s: float | None, seconds: float) -> float | None:
    if not peak_flop_s or not seconds or not math.isfinite(flop):
        return None
    return flop / (peak_flop_s * seconds)
