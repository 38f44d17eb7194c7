"""Weight sync inside vLLM's processes: the plugin each of them loads, and the methods a worker gains.

The methods come as a worker extension, not as a registered weight transfer backend, because `update_weights` returns nothing and turns an
error into text, while the caller needs the state hash and the error's class. They are called through `collective_rpc`, which runs them
between two engine steps, so no forward pass sees half a version.

vLLM imports this module and calls `register` wherever it runs in this environment, also for others: without the variable `ASYNCRL_VLLM`
nothing happens, and neither torch nor vLLM is imported from here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.errors import WeightSyncError, describe_error
from asyncrl.process import die_with_parent, peak_memory_bytes

if TYPE_CHECKING:
    from torch import nn

    from asyncrl.weights.receiver import Receiver

VARIABLE = "ASYNCRL_VLLM"
"""Set, to anything, in the environment of every vLLM process that is ours."""
EXTENSION = "asyncrl.weights.vllm_plugin.WorkerExtension"
"""What vLLM takes as `worker_extension_cls`."""


def register() -> None:
    """What vLLM calls in each of its processes before it builds a model.

    With `ASYNCRL_VLLM` set, a process vLLM started is killed by the kernel when the thread that started it ends, so start engines from a
    main thread; and on a CPU layers keep their weights as they are instead of a packed copy that no update would reach.
    """
    if VARIABLE not in os.environ:
        return
    _die_with_starter()
    _keep_weights_unpacked()


class WorkerExtension:
    """Methods of a vLLM worker. Each returns a dict of plain values; a failure is `{"error": describe_error(…)}`, never raised."""

    model_runner: Any
    vllm_config: Any
    device: Any
    asyncrl_receiver: Receiver | None = None

    def asyncrl_prepare(self, folder: str, store: str) -> dict[str, Any]:
        """Find where each tensor of the model folder lies and prove that it holds the folder's value. Writes nothing.

        Gives `tensors` and `elements` that can be written, and the names the model's loader skips (`skipped`). Fails on engines whose
        weights cannot be patched in place: several ranks, quantised, offloaded, packed, or with mixtures of experts on a CPU.
        """
        return _answer(lambda: self._asyncrl_prepare(Path(folder), Path(store)))

    def asyncrl_apply(self, manifest_json: str) -> dict[str, Any]:
        """Bring the model to a published version; gives its `state_hash`. Fails as `Receiver.apply` does."""
        return _answer(lambda: self._asyncrl_apply(manifest_json))

    def asyncrl_state(self) -> dict[str, Any]:
        """`version` and `state_hash` (None before the first version and while poisoned), `poisoned` and `peak_memory_bytes`."""
        receiver = self.asyncrl_receiver
        return {"version": receiver and receiver.version, "state_hash": receiver and receiver.state_hash,
                "poisoned": receiver.poisoned if receiver else "", "peak_memory_bytes": peak_memory_bytes()}

    def _asyncrl_prepare(self, folder: Path, store: Path) -> dict[str, Any]:
        from asyncrl.weights.base_proof import prove_base, saved_tensors
        from asyncrl.weights.receiver import Receiver
        from asyncrl.weights.routes import record_routes
        from asyncrl.weights.store import StoreTransport

        _die_with_starter()  # a forked worker inherits that plugins were loaded, and never loads them itself
        model = self.model_runner.get_model()
        _refuse_unpatchable(model, config=self.vllm_config, device=self.device)
        tensors = saved_tensors(folder)
        targets = record_routes(model, load=model.load_weights, tensors=tensors)
        elements = prove_base(targets, folder=folder)
        self.asyncrl_receiver = Receiver(targets, store=StoreTransport(store))
        return {"tensors": len(targets), "elements": elements, "skipped": [name for name in tensors if name not in targets]}

    def _asyncrl_apply(self, manifest_json: str) -> dict[str, Any]:
        from asyncrl.weights.manifest import Manifest

        if self.asyncrl_receiver is None:
            raise WeightSyncError("the engine was not prepared for weight sync")
        return {"state_hash": self.asyncrl_receiver.apply(Manifest.from_json(manifest_json))}


def _answer(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return work()
    except Exception as error:  # vLLM would reduce it to text, and treat it as its own
        return {"error": describe_error(error)}


def _die_with_starter() -> None:
    processes = sys.modules.get("multiprocessing.process")  # loaded already in whatever it started
    starter = processes.parent_process() if processes else None
    if starter is not None:
        die_with_parent(starter.pid)


def _keep_weights_unpacked() -> None:
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm import _custom_ops
        from vllm.model_executor.layers import utils

        _custom_ops._supports_onednn = False
        utils.check_cpu_sgl_kernel = lambda n, k, dtype: False


def _refuse_unpatchable(model: nn.Module, *, config: Any, device: Any) -> None:
    """Raise WeightSyncError for an engine whose weights are elsewhere, or in another form, than its loader put them."""
    ranks = config.parallel_config.world_size_across_dp
    if ranks > 1:
        raise WeightSyncError(f"the engine has {ranks} ranks; weight sync writes to engines of one")
    if config.quant_config is not None:
        raise WeightSyncError(f"the engine is quantised ({config.quant_config.get_name()}): packed weights and scales cannot be patched")
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        kind = type(method).__name__
        if method is not None and not kind.startswith("Unquantized"):
            raise WeightSyncError(f"{name} keeps its weights as {kind} does, which cannot be patched")
        if device.type == "cpu" and "MoE" in kind:
            raise WeightSyncError(f"{name} holds experts, which vLLM packs into another layout on a CPU")
        # the plain kernel is a function of its arguments alone; every other one encloses a packed copy of the weight
        if getattr(getattr(module, "cpu_linear", None), "__closure__", None):
            raise WeightSyncError(f"{name} computes with a packed copy of its weight: {VARIABLE} was not set before the model was loaded")
    for name, parameter in model.named_parameters():
        if parameter.device.type != device.type or getattr(parameter, "_vllm_is_uva_offloaded", False):
            raise WeightSyncError(f"{name} is on {parameter.device}, the engine on {device}: offloaded weights cannot be patched")
