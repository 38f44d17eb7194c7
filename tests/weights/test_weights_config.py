import subprocess
import sys

import pytest
from pydantic import ValidationError

from asyncrl.weights.config import WeightsConfig


def test_defaults_publish_bf16_every_step_through_the_store():
    config = WeightsConfig()
    assert (config.publish_every_steps, config.interruption, config.dtype, config.anchor_every_versions) == (1, "keep", "bfloat16", None)
    assert config.transport.kind == "store"


@pytest.mark.parametrize("wrong", [
    {"publish_every_steps": 0}, {"anchor_every_versions": 0}, {"interruption": "abort"}, {"dtype": "float16"}, {"publish_every": 1},
    {"transport": {"kind": "rdma"}}, {"transport": {"kind": "nccl", "root": "x"}}, {"transport": {"kind": "store", "path": "x"}}])
def test_values_out_of_range_and_unknown_keys_are_refused(wrong):
    with pytest.raises(ValidationError):
        WeightsConfig(**wrong)


def test_a_config_cannot_be_changed():
    with pytest.raises(ValidationError):
        WeightsConfig().dtype = "float32"


def test_config_codec_store_and_publisher_need_no_torch():
    modules = ("config", "codec", "manifest", "state_hash", "store", "publisher", "targets")
    code = f"import sys; [__import__('asyncrl.weights.' + name) for name in {modules}]; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
