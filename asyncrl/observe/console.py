"""One line a step, readable in a terminal of 120 columns and in a log file."""

from __future__ import annotations

from collections.abc import Mapping

HEADER = ("  step  reward  stale mean/max  depth    ess   kept    gap     rollout    train    waits: trainer engine   sync   density  s/step")


def step_line(index: int, metrics: Mapping[str, float], *, max_staleness: int) -> str:
    """The line of one step; what was not measured shows as a dash."""
    def show(name: str, form: str) -> str:
        width = len(format(0.0, form))
        return format(metrics[name], form) if name in metrics else "-".rjust(width)

    staleness = f"{show('staleness/token/mean', '5.2f')} {show('staleness/token/max', '3.0f')} of {max_staleness}"
    correction = f"{show('correction/ess/mean', '5.3f')}  {show('correction/kept_frac/mean', '5.3f')} {show('probe/gap/mean', '7.0e')}"
    speed = f"{show('rollout/tokens_per_s/last', '6.0f')}/s {show('train/tokens_per_s/last', '6.0f')}/s"
    waits = f"{show('trainer/wait_frac/last', '4.0%')}   {show('engine/wait_frac/last', '4.0%')}"
    sync = f"{show('weights/sync_s/mean', '5.3f')} s  {show('weights/density/mean', '6.1%')}"
    return (f"{index:>6}  {show('reward/total/mean', '6.3f')}  {staleness}  {show('buffer/depth/last', '5.0f')}  {correction}   {speed}"
            f"          {waits}  {sync}  {show('train/period_s/last', '6.2f')}")
