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
TIMEOUT_S = 280
OURS = {VARIABLE: "1", "VLLM_PLUGINS": "asyncrl"}


def environment(**more: str) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "HOME": os.environ.get("HOME", "/"), "PYTHONPATH": str(HERE.parents[1]), "OMP_NUM_THREADS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"} | more


def sync(folder: Path, architecture: str, tie: str, dtype: str, ranks: int = 1, unrouted: str = "routed", **variables: str) -> dict:
    """What the engine's script saw."""
    done = subprocess.run([sys.executable, HERE / "vllm_sync.py", folder, architecture, tie, dtype, str(ranks), unrouted],
                          capture_output=True, text=True, timeout=TIMEOUT_S,
                          env=environment(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_OMP_THREADS_BIND="nobind",
                                          VLLM_WORKER_MULTIPROC_METHOD="fork", VLLM_ALLOW_INSECURE_SERIALIZATION="1", **variables))
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    line = next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{"))  # ranks report their end after it
    return json.loads(line) | {"tie": tie, "architecture": architecture, "ranks": ranks, "unrouted": unrouted}


MATRIX = [
    ("qwen3", "tied", "bfloat16", 1, "routed"), ("qwen3", "untied", "float32", 1, "routed"),
    ("llama", "tied", "float32", 1, "unrouted"), ("llama", "untied", "bfloat16", 1, "routed"),
    ("qwen3", "tied", "bfloat16", 2, "routed"), ("llama", "untied", "float32", 2, "unrouted")]
"""Every value of every axis, and both ties and both dtypes with one rank and with two; what has no route, with either number of ranks."""


@pytest.fixture(scope="module", params=MATRIX, ids=lambda row: "-".join(map(str, row)))
def seen(request, tmp_path_factory):
    return sync(tmp_path_factory.mktemp("vllm"), *request.param, **OURS)


UNROUTED = ("model.layers.0.self_attn.o_proj.weight", "model.norm.weight")


def test_the_base_is_proved_and_recording_writes_nothing(seen):
    per_layer = 11 if seen["architecture"] == "qwen3" else 9
    whole = UNROUTED if seen["unrouted"] == "unrouted" else ()
    assert seen["prepared"]["tensors"] == 2 + 2 * per_layer + (seen["tie"] == "untied") - len(whole)
    assert seen["prepared"]["skipped"] == []
    assert sorted(seen["prepared"]["whole"]) == sorted(whole)
    assert all("passes it through other memory (aten.clone" in reason for reason in seen["prepared"]["whole"].values())
    assert not seen["recording_changed"]
    assert seen["tied"] is (seen["tie"] == "tied")
    assert [(state["version"], state["state_hash"], state["poisoned"]) for state in seen["first"]] == [(None, None, "")] * seen["ranks"]


def test_an_anchor_and_twenty_deltas_give_what_a_fresh_load_holds_and_says(seen):
    assert len(seen["applied"]) == 1 + 20 - 2  # an anchor, and deltas of which three were written as one
    assert [answer["state_hash"] for answer in seen["applied"]] == seen["published"]
    assert [answer["audit"] for answer in seen["applied"]] == seen["published"]
    assert seen["modes"] == ["bitmap", "blk16", "dense"]
    assert seen["last"]["state_hash"] == seen["last"]["audit"] == seen["last"]["published"]
    assert seen["checksums"] == seen["fresh_checksums"]
    assert len(seen["checksums"]) == seen["ranks"]
    assert seen["greedy"] == seen["fresh_greedy"] != seen["before"]


def test_a_wrong_base_is_refused_and_changes_nothing(seen):
    assert seen["wrong_base"]["kind"] == "WrongBase"
    assert not seen["wrong_base_changed"]


def test_tokens_come_while_every_rank_fetches(seen):
    assert seen["begun"] == [{"begun": None}] * seen["ranks"]
    assert seen["shares_beside"] == [None] * 2 * seen["ranks"]
    assert seen["tokens_beside"] == 8


def test_a_fetch_writes_nothing(seen):
    assert seen["fetched"] == {"state_hash": None}
    assert not seen["fetch_changed"]


def test_a_write_that_one_rank_does_not_finish_poisons_all_until_an_anchor(seen):
    assert "MemoryError: torn at" in seen["torn"]["message"]
    assert seen["torn_changed"]
    assert [(state["version"], state["state_hash"], state["poisoned"]) for state in seen["poisoned"]] == [
        (None, None, "writing version 21 did not finish")] * seen["ranks"]
    assert "state_hash" in seen["healed"]
    assert [(state["version"], state["poisoned"]) for state in seen["states"]] == [(22, "")] * seen["ranks"]
    assert all(state["peak_memory_bytes"] > 100e6 for state in seen["states"])


def test_a_folder_with_other_values_is_refused_by_the_base_proof(seen):
    assert seen["other_folder"]["kind"] == "WeightSyncError"
    assert "values in the runtime model are not those of model.safetensors" in seen["other_folder"]["message"]
    prepared = seen["prepared"]
    assert seen["own_folder"]["tensors"] == prepared["tensors"] + len(prepared["whole"])
    assert (seen["own_folder"]["elements"] == prepared["elements"]) is (seen["unrouted"] == "routed")


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
