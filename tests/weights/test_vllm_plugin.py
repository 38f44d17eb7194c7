from __future__ import annotations

import dataclasses
import importlib
import os
import subprocess
import sys
from importlib.metadata import entry_points
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from asyncrl.errors import WeightSyncError, WrongBase, rebuild_error
from asyncrl.weights.dense_reload import DenseReload
from asyncrl.weights.rank_sync import RankSync
from asyncrl.weights.receiver import Receiver
from asyncrl.weights.torch_pieces import memory_targets
from asyncrl.weights.vllm_plugin import EXTENSION, VARIABLE, WorkerExtension, _refuse_unpatchable

NOTHING = DenseReload(nn.Identity(), load=lambda tensors: None, shadows={})


def test_the_plugin_is_announced_to_vllm():
    (plugin,) = entry_points(group="vllm.general_plugins", name="asyncrl")
    assert plugin.value == "asyncrl.weights.vllm_plugin:register"
    module, name = EXTENSION.rsplit(".", 1)
    assert getattr(importlib.import_module(module), name) is WorkerExtension


def test_the_plugin_is_inert_without_its_variable():
    code = "import sys; from asyncrl.weights.vllm_plugin import register; register(); print({'torch', 'vllm', 'numpy'} & set(sys.modules))"
    without = {name: value for name, value in os.environ.items() if name != VARIABLE}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=without, timeout=60, check=True)
    assert done.stdout.strip() == "set()"


class UnquantizedFusedMoEMethod:
    """Named as vLLM names it: what `_refuse_unpatchable` looks at."""


class Fp8LinearMethod:
    """A method of a quantised layer."""


def config(*, ranks=1, tensor_parallel=1, quantised=None):
    return SimpleNamespace(parallel_config=SimpleNamespace(world_size_across_dp=ranks, tensor_parallel_size=tensor_parallel),
                           quant_config=quantised)


def with_method(method):
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].quant_method = method
    return model


def packed():
    model, weight = nn.Sequential(nn.Linear(2, 2)), torch.zeros(2, 2)
    model[0].cpu_linear = lambda x: x @ weight
    return model


@pytest.mark.parametrize(("model", "settings", "reason"), [
    (nn.Linear(2, 2), {"ranks": 4, "tensor_parallel": 2}, "has 4 ranks, 2 of them tensor parallel"),
    (nn.Linear(2, 2), {"quantised": SimpleNamespace(get_name=lambda: "fp8")}, r"is quantised \(fp8\)"),
    (with_method(Fp8LinearMethod()), {}, "0 keeps its weights as Fp8LinearMethod does"),
    (with_method(UnquantizedFusedMoEMethod()), {}, "0 holds experts"),
    (packed(), {}, "0 computes with a packed copy"),
    (nn.Linear(2, 2, device="meta"), {}, "weight is on meta, the engine on cpu"),
])
def test_an_engine_whose_weights_cannot_be_patched_is_refused(model, settings, reason):
    with pytest.raises(WeightSyncError, match=reason):
        _refuse_unpatchable(model, config=config(**settings), device=torch.device("cpu"))


def test_a_plain_engine_is_not_refused():
    model = with_method(None)
    model[0].cpu_linear = lambda x, weight, bias: nn.functional.linear(x, weight, bias)
    _refuse_unpatchable(model, config=config(), device=torch.device("cpu"))
    _refuse_unpatchable(model, config=config(ranks=2, tensor_parallel=2), device=torch.device("cpu"))


def test_an_error_comes_back_as_its_class(rig):
    worker = WorkerExtension()
    worker.asyncrl_sync = RankSync(Receiver(memory_targets(rig.targets()), source=rig.store), reload=NOTHING)
    rig.publish(0, base=None)
    delta = rig.publish(1, base=0)
    lost = dataclasses.replace(delta, base=7, version=9)
    answer = worker.asyncrl_apply(lost.to_json())
    assert type(rebuild_error(answer["error"], where="engine")) is WrongBase
    assert worker.asyncrl_apply(rig.anchor().to_json()) == {"state_hash": delta.state_hash}
    assert worker.asyncrl_state()["version"] == 1


def test_a_version_is_fetched_beside_and_applied_when_it_is_there(rig):
    worker = WorkerExtension()
    worker.asyncrl_sync = RankSync(Receiver(memory_targets(rig.targets()), source=rig.store), reload=NOTHING)
    manifest = rig.publish(0, base=None)
    assert worker.asyncrl_fetch(manifest.to_json()) == {"begun": None}
    worker.asyncrl_sync._fetching._thread and worker.asyncrl_sync._fetching._thread.join(20)
    assert worker.asyncrl_fetched(manifest.to_json()) == {"shares": {"": manifest.state_hash}}
    assert worker.asyncrl_state()["version"] is None
    answer = worker.asyncrl_apply(manifest.to_json(), "", manifest.state_hash ^ 1)
    assert "would lead to state" in answer["error"]["message"]
    assert worker.asyncrl_apply(manifest.to_json(), "", manifest.state_hash) == {"state_hash": manifest.state_hash}
    assert worker.asyncrl_poison("another rank failed") == {"poisoned": None}
    state = worker.asyncrl_state()
    assert (state["version"], state["poisoned"]) == (None, "another rank failed")


def test_a_worker_that_was_not_prepared_says_so(rig):
    worker = WorkerExtension()
    text = rig.publish(0, base=None).to_json()
    for answer in (worker.asyncrl_fetch(text), worker.asyncrl_fetched(text), worker.asyncrl_apply(text), worker.asyncrl_poison("why")):
        assert answer["error"]["message"] == "the engine was not prepared for weight sync"
    assert worker.asyncrl_bind("", {}, [])["error"]["message"] == "what lies where was not recorded"
    assert worker.asyncrl_state()["version"] is None
