"""`fake_train.py RECIPE`: writes the rows a run of that configuration might, at once. `prompts.arguments.behaviour` makes it fail or stay.

The reward of step s is 100 · rate + seed + s / 10, and 1 more with the arm `corrected`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

import yaml

config = yaml.safe_load(Path(sys.argv[1]).read_text(encoding="utf-8"))
folder = Path(config["run"]["folder"]) / config["run"]["name"]
(folder / "model").mkdir(parents=True)
(folder / "model" / "weights").write_text("large", encoding="utf-8")
(folder / "pid").write_text(str(os.getpid()), encoding="utf-8")
behaviour, seed = config["prompts"]["arguments"].get("behaviour"), config["run"]["seed"]
if behaviour == f"fail {seed}":
    sys.exit("asyncrl: RunAborted: the reward was too good")
if behaviour == f"die {seed}":
    os.kill(os.getpid(), signal.SIGKILL)
if behaviour == f"die in real time {seed}":
    os.kill(os.getpid(), signal.SIGRTMIN + 6)
if behaviour == f"vanish {seed}":
    shutil.rmtree(folder.parent.parent)
    sys.exit()
if behaviour == f"stay {seed}":
    print("still here", flush=True)
    if fifo := config["prompts"]["arguments"].get("fifo"):
        Path(fifo).write_text(str(os.getpid()), encoding="utf-8")
    signal.pause()
base = 100 * config["trainer"]["learning_rate"] + seed + (config["correction"].get("truncate_high") == 3.0)
rows = [{"trainer_step": step, "step": step, "reward/total/mean": base + step / 10} for step in range(1, config["run"]["steps"] + 1)]
rows += [{"eval_version": step, "eval/step/last": step, "eval/held_out/reward/mean": base + 10 + step}
         for step in (0, config["run"]["steps"])]
if behaviour == f"scribble {seed}":
    rows[0]["trainer_step"] = "first"
(folder / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
