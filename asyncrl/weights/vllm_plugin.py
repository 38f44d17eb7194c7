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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.errors import WeightSyncError, describe_error
from asyncrl.process import die_with_parent, peak_memory_bytes

if TYPE_CHECKING:
    from torch import Tensor, nn

    from asyncrl.weights.manifest import Manifest
    from asyncrl.weights.rank_sync import Adapters, RankSync, RecordedModel

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
    """Methods of a vLLM worker; `EngineRanks` calls them on every rank. Each returns a dict of plain values; a failure is
    `{"error": describe_error(…)}`, never raised."""

    model_runner: Any
    vllm_config: Any
    device: Any
    rank: int
    asyncrl_recorded: RecordedModel | None = None
    asyncrl_sync: RankSync | None = None
    asyncrl_adapters: Adapters | None = None
    """What versions hold beside the model; the engine loads them from a folder, under another name for every version."""

    def asyncrl_record(self, folder: str) -> dict[str, Any]:
        """Find where each tensor of the model folder lies. Writes nothing.

        Gives what is `placed` here, element by element; `whole`, the tensors that have no route and why; all `names` of the folder. Fails
        on engines whose weights cannot be patched in place: quantised, offloaded, packed, with mixtures of experts on a CPU, or with
        ranks that are not tensor parallel.
        """
        return _answer(lambda: self._asyncrl_record(Path(folder)))

    def asyncrl_bind(self, folder: str, transport: Mapping[str, Any], plan: list[Any],
                     lora: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Prove that what is held is the folder's, and be ready for versions of the transport (`TransportSpec.to_wire`).

        `plan` is a `TensorPlan`. With `lora`, the fields of a `LoRA`, versions hold adapters beside the model. Gives how many
        `elements` were compared.
        """
        return _answer(lambda: self._asyncrl_bind(Path(folder), transport, plan, lora))

    def asyncrl_fetch(self, manifest_json: str) -> dict[str, Any]:
        """Begin to fetch a version in a thread; returns at once."""
        return _answer(lambda: {"begun": self._asyncrl_ready().fetch(_manifest(manifest_json))})

    def asyncrl_fetched(self, manifest_json: str) -> dict[str, Any]:
        """`shares` of the state hash that the version would give, by class; None while it is being fetched. Fails as `RankSync.fetched`."""
        return _answer(lambda: {"shares": self._asyncrl_ready().fetched(_manifest(manifest_json))})

    def asyncrl_apply(self, manifest_json: str, adapters: str = "", predicted: int | None = None) -> dict[str, Any]:
        """Bring this rank to a published version; gives its `state_hash`. Fails as `RankSync.apply` does.

        The version's adapters, where there are some, are written to the folder `adapters`, by the first rank.
        """
        return _answer(lambda: self._asyncrl_apply(_manifest(manifest_json), Path(adapters), predicted))

    def asyncrl_poison(self, why: str) -> dict[str, Any]:
        """Hold no version until an anchor: another rank failed to write this one's."""
        return _answer(lambda: {"poisoned": self._asyncrl_ready().receiver.poison(why)})

    def asyncrl_state(self) -> dict[str, Any]:
        """`version` and `state_hash` (None before the first version and while poisoned), `poisoned` and `peak_memory_bytes`."""
        receiver = self.asyncrl_sync and self.asyncrl_sync.receiver
        return {"version": receiver and receiver.version, "state_hash": receiver and receiver.state_hash,
                "poisoned": receiver.poisoned if receiver else "", "peak_memory_bytes": peak_memory_bytes()}

    def _asyncrl_record(self, folder: Path) -> dict[str, Any]:
        from asyncrl.weights.rank_sync import RecordedModel

        _die_with_starter()  # a forked worker inherits that plugins were loaded, and never loads them itself
        model = self.model_runner.get_model()
        _refuse_unpatchable(model, config=self.vllm_config, device=self.device)

        def load(tensors: Iterable[tuple[str, Tensor]]) -> None:
            with _without_lora_layers(model):
                model.load_weights(tensors)

        ranks = self.vllm_config.parallel_config.tensor_parallel_size
        self.asyncrl_recorded = recorded = RecordedModel(model, load=load, folder=folder, ranks=ranks)
        return {"placed": {name: placement.to_plain() for name, placement in recorded.placements.items()}, "whole": dict(recorded.whole),
                "names": recorded.names}

    def _asyncrl_bind(self, folder: Path, transport: Mapping[str, Any], plan: list[Any], lora: Mapping[str, Any] | None) -> dict[str, Any]:
        from asyncrl.lora_config import LoRA
        from asyncrl.weights.ends import TransportSpec, source_of
        from asyncrl.weights.rank_classes import TensorPlan
        from asyncrl.weights.rank_sync import Adapters

        if self.asyncrl_recorded is None:
            raise WeightSyncError("what lies where was not recorded")
        if lora is not None:
            self.asyncrl_adapters = Adapters(LoRA.model_validate(lora), folder=folder, dtype=self.vllm_config.model_config.dtype)
        source = source_of(TransportSpec.from_wire(transport), worker=self.rank, device=str(self.device),
                           workers=self.vllm_config.parallel_config.tensor_parallel_size)
        self.asyncrl_sync = self.asyncrl_recorded.bind(TensorPlan.from_plain(plan), rank=self.rank, adapters=self.asyncrl_adapters,
                                                       source=source)
        return {"elements": self.asyncrl_sync.elements}

    def _asyncrl_apply(self, manifest: Manifest, adapters: Path, predicted: int | None) -> dict[str, Any]:
        state_hash = self._asyncrl_ready().apply(manifest, predicted=predicted)
        if self.asyncrl_adapters is not None and self.rank == 0:
            self.asyncrl_adapters.save(adapters, base=self.vllm_config.model_config.model)
        return {"state_hash": state_hash}

    def _asyncrl_ready(self) -> RankSync:
        if self.asyncrl_sync is None:
            raise WeightSyncError("the engine was not prepared for weight sync")
        return self.asyncrl_sync


def _manifest(text: str) -> Manifest:
    from asyncrl.weights.manifest import Manifest
    return Manifest.from_json(text)


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
    ranks, parallel = config.parallel_config.world_size_across_dp, config.parallel_config.tensor_parallel_size
    if ranks != parallel:
        raise WeightSyncError(f"the engine has {ranks} ranks, {parallel} of them tensor parallel; weight sync knows no other kind")
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
