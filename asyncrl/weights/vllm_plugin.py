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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.errors import WeightSyncError, describe_error
from asyncrl.process import die_with_parent, peak_memory_bytes

if TYPE_CHECKING:
    from torch import Tensor, nn

    from asyncrl.lora_config import LoRA
    from asyncrl.weights.receiver import Receiver
    from asyncrl.weights.targets import MemoryTarget

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
    asyncrl_adapters: tuple[LoRA, Mapping[str, Tensor]] | None = None
    """Which adapters, and what they hold as received; the engine loads them from a folder, under another name for every version."""

    def asyncrl_prepare(self, folder: str, transport: Mapping[str, Any], lora: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Find where each tensor of the model folder lies and prove that it holds the folder's value. Writes nothing.

        Gives `tensors` and `elements` that can be written, and the names the model's loader skips (`skipped`). Fails on engines whose
        weights cannot be patched in place: several ranks, quantised, offloaded, packed, or with mixtures of experts on a CPU. With `lora`,
        the fields of a `LoRA`, versions hold adapters beside the model.
        """
        return _answer(lambda: self._asyncrl_prepare(Path(folder), transport, lora))

    def asyncrl_apply(self, manifest_json: str, adapters: str = "") -> dict[str, Any]:
        """Bring the model to a published version; gives its `state_hash`. Fails as `Receiver.apply` does.

        The version's adapters, where there are some, are written to the folder `adapters`.
        """
        return _answer(lambda: self._asyncrl_apply(manifest_json, adapters))

    def asyncrl_state(self) -> dict[str, Any]:
        """`version` and `state_hash` (None before the first version and while poisoned), `poisoned` and `peak_memory_bytes`."""
        receiver = self.asyncrl_receiver
        return {"version": receiver and receiver.version, "state_hash": receiver and receiver.state_hash,
                "poisoned": receiver.poisoned if receiver else "", "peak_memory_bytes": peak_memory_bytes()}

    def _asyncrl_prepare(self, folder: Path, transport: Mapping[str, Any], lora: Mapping[str, Any] | None) -> dict[str, Any]:
        from asyncrl.weights.base_proof import prove_base, saved_tensors
        from asyncrl.weights.ends import TransportSpec, source_of
        from asyncrl.weights.receiver import Receiver
        from asyncrl.weights.routes import record_routes

        _die_with_starter()  # a forked worker inherits that plugins were loaded, and never loads them itself
        model = self.model_runner.get_model()
        _refuse_unpatchable(model, config=self.vllm_config, device=self.device)
        tensors = saved_tensors(folder)
        with _without_lora_layers(model):
            targets = record_routes(model, load=model.load_weights, tensors=tensors)
        elements = prove_base(targets, folder=folder)
        room = self._asyncrl_room(folder, lora) if lora else {}
        self.asyncrl_receiver = Receiver({**targets, **room}, source=source_of(TransportSpec.from_wire(transport)))
        return {"tensors": len(targets), "elements": elements, "skipped": [name for name in tensors if name not in targets]}

    def _asyncrl_room(self, folder: Path, settings: Mapping[str, Any]) -> dict[str, MemoryTarget]:
        """Memory that receives adapters, in the dtype of the engine."""
        import torch

        from asyncrl.adapters import adapter_shapes
        from asyncrl.lora_config import LoRA
        from asyncrl.weights.torch_pieces import memory_targets

        lora = LoRA.model_validate(settings)
        held = {name: torch.zeros(shape, dtype=self.vllm_config.model_config.dtype) for name, shape in adapter_shapes(folder, lora).items()}
        self.asyncrl_adapters = lora, held
        return memory_targets(held)

    def _asyncrl_apply(self, manifest_json: str, adapters: str) -> dict[str, Any]:
        from asyncrl.weights.manifest import Manifest

        if self.asyncrl_receiver is None:
            raise WeightSyncError("the engine was not prepared for weight sync")
        state_hash = self.asyncrl_receiver.apply(Manifest.from_json(manifest_json))
        if self.asyncrl_adapters is not None:
            from asyncrl.adapters import save_adapters

            lora, held = self.asyncrl_adapters
            save_adapters(held, Path(adapters), config=lora, base=self.vllm_config.model_config.model)
        return {"state_hash": state_hash}


@contextmanager
def _without_lora_layers(model: nn.Module) -> Iterator[None]:
    """Inside, layers are those that vLLM put its LoRA layers round: its loader looks for parameters by the names those have alone."""
    wrapped = [(name, module) for name, module in model.named_modules() if type(module).__name__.endswith("WithLoRA")]
    try:
        for name, module in wrapped:
            _put(model, name, module.base_layer)
        yield
    finally:
        for name, module in wrapped:
            _put(model, name, module)


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


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
