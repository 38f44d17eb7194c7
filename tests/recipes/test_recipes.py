"""What the README shows runs: the recipe, its overrides, the script, the benchmark's task."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from asyncrl.config import load_config

ROOT = Path(__file__).parents[2]
QUICKSTART = ROOT / "recipes" / "arithmetic" / "quickstart.yaml"
VLLM = QUICKSTART.with_name("vllm.yaml")
LORA = QUICKSTART.with_name("lora.yaml")
MIXTURE = QUICKSTART.with_name("mixture.yaml")
LIMIT_S = 240


def run(*command: str, cwd: Path = ROOT) -> str:
    done = subprocess.run([sys.executable, *command], cwd=cwd, capture_output=True, text=True, timeout=LIMIT_S, check=False,
                          env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The runs folder after a short quickstart from a hasty warm-up."""
    folder = tmp_path_factory.mktemp("runs")
    run("-m", "asyncrl.cli", "train", str(QUICKSTART), f"run.folder={folder}", "run.steps=6", "eval.every_steps=3",
        "eval.sets.held_out.limit=32", "warm_up.until_accuracy=0.06", "warm_up.threads=1", "run.rollouts_every_steps=2")
    return folder


@pytest.mark.slow
def test_the_quickstart_leaves_what_it_promises(finished: Path) -> None:
    folder = finished / "quickstart"
    summary = json.loads((folder / "summary.json").read_text())
    assert set(summary) == {
        "reward_first", "reward_last", "eval_before", "eval_after", "best_step", "best_reward", "steps", "wall_s", "rollout_tokens",
        "trained_tokens", "tokens_dropped",
        "staleness_max", "max_staleness", "depth_groups_mean", "length_bias", "rollout_tokens_per_s", "engine_wait_frac",
        "trainer_wait_frac", "weight_sync_s_mean", "weight_sync_density_mean", "ledger_closed"}
    assert summary["steps"] == 6
    assert summary["ledger_closed"] is True
    assert summary["staleness_max"] <= summary["max_staleness"] == 2
    assert summary["rollout_tokens"] == summary["trained_tokens"] + sum(summary["tokens_dropped"].values())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "step" in row] == [1, 2, 3, 4, 5, 6]
    assert len([row for row in rows if "eval/held_out/reward/mean" in row]) == 3
    assert (folder / "reward.png").read_bytes().startswith(b"\x89PNG")
    row = json.loads((folder / "rollouts.jsonl").read_text().splitlines()[0])
    assert len(row["tokens"]) == len(row["loss_mask"]) == len(row["rollout_logprobs"]) == len(row["policy_versions"])


def test_vllm_is_the_only_difference_of_its_recipe() -> None:
    plain, vllm = (yaml.safe_load(path.read_text()) for path in (QUICKSTART, VLLM))
    assert vllm.pop("engine") == plain.pop("engine") | {"kind": "vllm"}
    assert vllm["run"].pop("name") != plain["run"].pop("name")
    assert vllm == plain


def test_adapters_and_their_learning_rate_are_the_only_differences_of_their_recipe() -> None:
    plain, lora = (yaml.safe_load(path.read_text()) for path in (QUICKSTART, LORA))
    assert lora.pop("lora") == {"kind": "lora", "rank": 8}
    assert lora["run"].pop("name") != plain["run"].pop("name")
    assert lora["trainer"].pop("learning_rate") == pytest.approx(10 * plain["trainer"].pop("learning_rate"))
    assert lora == plain


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed")
def test_a_recipe_with_adapters_learns_and_leaves_a_model_and_the_adapters(finished: Path) -> None:
    """Engine and trainer agree after versions that hold adapters alone, and after them the reward is higher."""
    run("-m", "asyncrl.cli", "train", str(LORA), f"run.folder={finished}", "run.steps=24", "eval.every_steps=12",
        "eval.sets.held_out.limit=64", "warm_up.until_accuracy=0.06", "warm_up.threads=1", "run.probe.every_steps=8",
        "run.probe.max_mean_gap=1.0e-4", "lora.rank=4", "lora.export_adapters=true", "trainer.schedule.warm_up_steps=2")
    folder = finished / "lora"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["ledger_closed"] is True
    assert summary["reward_last"] > summary["reward_first"]
    assert (folder / "model" / "adapter" / "adapter_model.safetensors").is_file()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    sent = [row["weights/payload_bytes/mean"] for row in rows if "weights/payload_bytes/mean" in row]
    assert max(sent[1:]) < (folder / "model" / "model.safetensors").stat().st_size / 2


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None or importlib.util.find_spec("peft") is None,
                    reason="vLLM or peft is not installed")
def test_a_recipe_with_adapters_runs_with_vllm(finished: Path) -> None:
    run("-m", "asyncrl.cli", "train", str(LORA), f"run.folder={finished}", "run.name=lora-vllm", "engine.kind=vllm",
        "weights.interruption=recompute", "run.steps=4", "eval.every_steps=2", "eval.sets.held_out.limit=32", "warm_up.until_accuracy=0.06",
        "warm_up.threads=1", "run.probe.every_steps=2", "run.probe.max_mean_gap=1.0e-4")
    summary = json.loads((finished / "lora-vllm" / "summary.json").read_text())
    assert summary["steps"] == 4
    assert summary["ledger_closed"] is True
    assert summary["staleness_max"] <= 2


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_the_recipe_runs_with_vllm_from_the_same_warm_model(finished: Path) -> None:
    run("-m", "asyncrl.cli", "train", str(VLLM), f"run.folder={finished}", "run.steps=6", "eval.every_steps=3",
        "eval.sets.held_out.limit=32", "warm_up.until_accuracy=0.06", "warm_up.threads=1", "run.probe.every_steps=2")
    folder = finished / "vllm"
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 6
    assert summary["ledger_closed"] is True
    assert summary["staleness_max"] <= 2
    assert summary["tokens_dropped"].keys() <= {"zero_variance", "end_of_run"}
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    gaps = [row["probe/gap/max"] for row in rows if "probe/gap/max" in row]
    assert len(gaps) >= 3
    assert max(gaps) < 1e-4
    assert len([path for path in (finished / ".cache").iterdir() if path.is_dir()]) == 1


@pytest.mark.slow
def test_the_trained_model_loads_and_differs_from_the_warm_one(finished: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (warm,) = [path for path in (finished / ".cache").iterdir() if path.is_dir()]
    before = AutoModelForCausalLM.from_pretrained(warm).state_dict()
    after = AutoModelForCausalLM.from_pretrained(finished / "quickstart" / "model").state_dict()
    assert before.keys() == after.keys()
    assert not all(torch.equal(before[name], after[name]) for name in before)
    assert AutoTokenizer.from_pretrained(finished / "quickstart" / "model").encode("12+34=") == [3, 4, 12, 5, 6, 13]


@pytest.mark.slow
def test_the_resolved_configuration_is_a_recipe_itself(finished: Path) -> None:
    resolved = load_config(finished / "quickstart" / "config.yaml")
    assert resolved.run.steps == 6
    assert resolved.warm_up.until_accuracy == 0.06


@pytest.mark.slow
def test_the_script_of_the_readme_runs(finished: Path) -> None:
    (warm,) = [path for path in (finished / ".cache").iterdir() if path.is_dir()]
    lines = run(str(ROOT / "recipes" / "minimal.py"), str(warm), "3", cwd=finished).splitlines()
    assert [line.split()[0] for line in lines] == ["1", "2", "3"]
    assert all(float(line.split()[2]) <= 2 for line in lines)


def test_a_dry_run_prints_the_configuration_and_the_processes_and_starts_nothing(tmp_path: Path) -> None:
    text = run("-m", "asyncrl.cli", "train", str(QUICKSTART), f"run.folder={tmp_path}", "--dry-run", "trainer.processes=2")
    assert "trainer: 2 child" in text
    assert yaml.safe_load(text)["buffer"]["max_staleness"] == 2
    assert list(tmp_path.iterdir()) == []


def test_held_out_sums_are_never_trained_on() -> None:
    sys.path.insert(0, str(ROOT / "recipes"))
    try:
        from arithmetic import task
    finally:
        sys.path.pop(0)
    asked = {prompt.text for prompt in itertools.islice(task.sums(seed=3), 5000)}
    asked |= {text for text, _ in itertools.islice(task.worked_sums(), 5000)}
    held_out = {prompt.text for prompt in task.held_out_sums()} | {text for text, _ in task.held_out_examples()}
    assert not asked & held_out
    prompt = next(task.sums(seed=3))
    left, right = map(int, prompt.text.rstrip("=").split("+"))
    assert task.is_correct(prompt, f"{left + right:03d}") == 1.0
    assert task.is_correct(prompt, f"{left + right + 1:03d}") == 0.0


@pytest.mark.slow
def test_the_mixture_asks_and_judges_both_sources(tmp_path: Path) -> None:
    run("-m", "asyncrl.cli", "train", str(MIXTURE), f"run.folder={tmp_path}", "run.steps=3", "eval.every_steps=3", "warm_up.max_steps=10",
        "warm_up.until_accuracy=0.0001", "buffer.zero_variance=keep", "buffer.groups_per_step=12", "buffer.group_size=4",
        "eval.sets.sums.limit=8", "eval.sets.differences.limit=8", "prompts.sources.differences.weight=0.5")
    rows = [json.loads(line) for line in (tmp_path / "mixture" / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "step" in row]
    shares = [(row["buffer/source.sums/groups"], row["buffer/source.differences/groups"]) for row in steps]
    assert all(sums + differences == 12 and abs(differences - 12 / 5) <= 2 for sums, differences in shares)
    assert {"reward/function.is_correct/mean", "reward/function.sign/mean", "reward/function.number/mean"} <= steps[0].keys()
    assert json.loads((tmp_path / "mixture" / "summary.json").read_text())["ledger_closed"] is True
