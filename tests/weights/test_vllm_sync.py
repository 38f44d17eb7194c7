"""Weight sync in a real vLLM: everything published reaches its fused, padded, tied memory, or is refused."""

from __future__ import annotations

import importlib.util
import json
import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.weights.vllm_plugin import VARIABLE
from tests.tiny_model import make_tiny_model

pytestmark = [pytest.mark.vllm, pytest.mark.slow,
              pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed")]

HERE = Path(__file__).parent
TIMEOUT_S = 240
OURS = {VARIABLE: "1", "VLLM_PLUGINS": "asyncrl"}


def environment(**more: str) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"} | more


def sync(folder: Path, architecture: str, tie: str, dtype: str, **variables: str) -> dict:
    """What the engine's script saw."""
    done = subprocess.run([sys.executable, HERE / "vllm_sync.py", folder, architecture, tie, dtype], capture_output=True, text=True,
                          timeout=TIMEOUT_S, env=environment(VLLM_ENABLE_V1_MULTIPROCESSING="0", **variables))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1]) | {"tie": tie, "architecture": architecture}


@pytest.fixture(scope="module", params=[("qwen3", "tied", "bfloat16"), ("qwen3", "untied", "float32"), ("llama", "tied", "float32"),
                                        ("llama", "untied", "bfloat16")], ids="-".join)
def seen(request, tmp_path_factory):
    return sync(tmp_path_factory.mktemp("vllm"), *request.param, **OURS)


def test_the_base_is_proved_and_recording_writes_nothing(seen):
    per_layer = 11 if seen["architecture"] == "qwen3" else 9
    assert seen["prepared"]["tensors"] == 2 + 2 * per_layer + (seen["tie"] == "untied")
    assert seen["prepared"]["skipped"] == []
    assert not seen["recording_changed"]
    assert seen["tied"] is (seen["tie"] == "tied")
    assert (seen["first"]["version"], seen["first"]["state_hash"], seen["first"]["poisoned"]) == (None, None, "")


def test_an_anchor_and_deltas_give_what_a_fresh_load_holds_and_says(seen):
    assert [answer["state_hash"] for answer in seen["applied"]] == seen["published"][:-1]
    assert [answer["audit"] for answer in seen["applied"]] == seen["published"][:-1]
    assert seen["last"]["state_hash"] == seen["last"]["audit"] == seen["last"]["published"]
    assert seen["checksums"] == seen["fresh_checksums"]
    assert seen["greedy"] == seen["fresh_greedy"] != seen["before"]


def test_a_wrong_base_is_refused_and_changes_nothing(seen):
    assert [seen[step]["kind"] for step in ("no_anchor", "wrong_base")] == ["WrongBase", "WrongBase"]
    assert seen["anything_changed"]
    assert not seen["wrong_base_changed"]


def test_a_write_that_fails_half_way_poisons_until_an_anchor(seen):
    assert seen["torn"]["kind"] == "MemoryError"
    assert seen["torn_changed"]
    assert (seen["poisoned"]["version"], seen["poisoned"]["state_hash"]) == (None, None)
    assert seen["poisoned"]["poisoned"] == "writing version 4 did not finish"
    assert seen["refused"]["kind"] == "WrongBase"
    assert "an anchor is needed" in seen["refused"]["message"]
    assert "state_hash" in seen["healed"]
    assert (seen["state"]["version"], seen["state"]["poisoned"]) == (6, "")
    assert seen["state"]["peak_memory_bytes"] > 100e6


def test_a_folder_with_other_values_is_refused_by_the_base_proof(seen):
    assert seen["other_folder"]["kind"] == "WeightSyncError"
    assert "values in the runtime model are not those of model.safetensors" in seen["other_folder"]["message"]
    assert seen["own_folder"] == seen["prepared"]


def test_an_engine_that_was_not_prepared_says_so(seen):
    assert seen["unprepared"] == {"kind": "WeightSyncError", "message": "the engine was not prepared for weight sync"}


def test_vllm_finds_no_reason_to_pack_a_weight(seen):
    assert seen["packs_small_weights"] is False


def test_without_the_variable_vllm_is_left_alone_and_its_packed_weights_are_refused(tmp_path):
    seen = sync(tmp_path, "qwen3", "tied", "bfloat16")
    assert seen["packs_small_weights"] is True
    assert seen["prepared"]["kind"] == "WeightSyncError"
    assert "computes with a packed copy of its weight: ASYNCRL_VLLM was not set" in seen["prepared"]["message"]


def test_processes_of_an_engine_end_when_theirs_is_killed(tmp_path):
    folder = make_tiny_model(tmp_path / "base", hidden=128)
    log = tmp_path / "log"
    with log.open("w") as errors, subprocess.Popen([sys.executable, HERE / "vllm_processes.py", folder], stdout=subprocess.PIPE, text=True,
                                                   stderr=errors, env=environment(**OURS)) as engine:
        try:
            line = next((line for line in engine.stdout if line.startswith('{"answer"')), None)
            assert line, log.read_text()[-4000:]
            up = json.loads(line)
            assert up["answer"]["tensors"] == 24
            assert any("EngineCore" in command for command in up["processes"].values())
            ends = [os.pidfd_open(int(pid)) for pid in up["processes"]]
        finally:
            engine.kill()
    left = set(ends)
    while left:
        ended, _, _ = select.select(left, [], [], 20)
        assert ended, [command for end, command in zip(ends, up["processes"].values(), strict=True) if end in left]
        left -= set(ended)
    for end in ends:
        os.close(end)
