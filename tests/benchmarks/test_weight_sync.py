"""What the benchmark of weight sync is made of, that it runs, and that the page says what it found."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import weight_sync, weight_sync_page
from benchmarks.weight_sync_engine import ratios, summary
from benchmarks.weight_sync_models import CONFIGS, float32_model, initial_state, load, quick


@pytest.mark.parametrize(("name", "millions"), [("0.6M", 0.6), ("135M", 134.5), ("0.5B", 494.0)])
def test_the_models_have_the_size_they_are_said_to_have(name: str, millions: float) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS[name]())
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.01)


@pytest.mark.parametrize("density", [0.0005, 0.1, 1.0])
def test_a_neighbour_differs_in_about_that_share_of_values_by_one_step_of_the_grid(density: float) -> None:
    state = initial_state(quick())
    neighbour = state.changed(density)
    assert state.density_to(neighbour) == pytest.approx(density, rel=0.1)
    steps = np.concatenate([(neighbour.bits[name] - bits).view(np.int16) for name, bits in state.bits.items()])
    assert not any(((bits & 0x7F80) == 0x7F80).any() for bits in neighbour.bits.values())
    assert set(np.unique(steps).tolist()) == {-1, 0, 1} - ({0} if density == 1 else set())


def test_a_trainers_model_publishes_the_state_it_was_given() -> None:
    from asyncrl.weights.torch_pieces import bits_of, checkpoint_tensors

    state = initial_state(quick())
    model = float32_model(quick(), state)
    neighbour = state.changed(0.1)
    load(model, neighbour)
    assert all(np.array_equal(bits_of(tensor.bfloat16()), neighbour.bits[name]) for name, tensor in checkpoint_tensors(model).items())


def test_a_way_is_summed_up_by_the_least_of_each_step() -> None:
    slow = {"publish_s": 9.0, "fetch_s": 1.0, "pause_s": 8.0, "sent_bytes": 5}
    quickest = {"publish_s": 2.0, "fetch_s": 3.0, "pause_s": 1.0, "sent_bytes": 5}
    own = summary([slow, quickest])
    assert (own["total_s"], own["pause_share"], own["median_s"]) == (4.0, 0.25, 12.0)
    other = summary([{"publish_s": 4.0, "fetch_s": 0.0, "pause_s": 8.0, "sent_bytes": 9}])
    assert ratios({"delta": own, "reload": other}) == {"reload_whole": 3.0, "reload_engine": 4.0, "reload_pause": 8.0}


@pytest.mark.slow
def test_the_quick_profile_runs_and_writes_what_the_page_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight_sync.main(["--quick", "--threads", "1", "--out", str(tmp_path)])
    found = json.loads((tmp_path / "encode-quick.json").read_text(encoding="utf-8"))
    by_density = {row["asked"]: row for row in found["densities"]}
    assert by_density[1.0]["modes"] == ["dense"]
    assert 4.0 < by_density[0.01]["bytes_per_change_large"] < 4.2
    assert max(row["share_of_dense"] for row in found["densities"]) <= 1
    monkeypatch.setattr(weight_sync_page, "MODELS", ("quick",))
    assert "| quick | 1" in weight_sync_page.tables(tmp_path)


@pytest.mark.vllm
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")
def test_every_way_brings_a_version_into_a_real_engine(tmp_path: Path) -> None:
    """It ends with an audit of the engine's memory against what was published."""
    found = weight_sync.run("benchmarks.weight_sync_engine", {"model": "quick", "root": str(tmp_path), "threads": 1, "rounds": 1,
                                                              "densities": [0.01]})
    [row] = found["densities"]
    assert set(row["ways"]) == {"delta", "int32", "vllm_sparse", "load", "reload", "gather"}
    assert row["ways"]["delta"]["sent_bytes"] < row["ways"]["int32"]["sent_bytes"] < row["ways"]["reload"]["sent_bytes"]


def test_quick_results_are_not_kept() -> None:
    with pytest.raises(SystemExit, match="--out"):
        weight_sync.main(["--quick"])


def test_the_page_says_what_was_measured() -> None:
    text = weight_sync_page.PAGE.read_text(encoding="utf-8")
    made = text.split(weight_sync_page.BEGIN)[1].split(weight_sync_page.END)[0]
    assert made.strip() == weight_sync_page.tables(weight_sync.RESULTS)
