"""Weight sync of one rank of an engine: where its tensors lie, the versions it fetches beside generation, and what it writes in the pause.

    record   where the model's loader puts each tensor               → what this rank holds
    bind     the classes and tensors of all ranks; proofs            → a receiver
    fetch    in a thread; `fetched` asks for the state hash shares
    apply    write, then give tensors without a route to the loader
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from asyncrl.adapters import adapter_shapes, save_adapters
from asyncrl.errors import WeightSyncError
from asyncrl.lora_config import LoRA
from asyncrl.weights.background_fetch import BackgroundFetch
from asyncrl.weights.base_proof import prove_base, saved_tensors
from asyncrl.weights.dense_reload import DenseReload
from asyncrl.weights.manifest import Manifest
from asyncrl.weights.rank_classes import Placement, TensorPlan
from asyncrl.weights.receiver import Receiver, Shares
from asyncrl.weights.routed_target import RoutedTarget
from asyncrl.weights.routes import Load, record_routes
from asyncrl.weights.targets import Target
from asyncrl.weights.torch_pieces import memory_targets
from asyncrl.weights.transport import PartSource


class RecordedModel:
    """A model whose loader was watched.

    Args:
        load: the model's own loader.
        folder: what the model was loaded from.
        ranks: how many hold the checkpoint together.

    Raises WeightSyncError as `record_routes` does.
    """

    def __init__(self, model: nn.Module, *, load: Load, folder: Path, ranks: int) -> None:
        self._model, self._load, self._folder, self._ranks = model, load, folder, ranks
        tensors = saved_tensors(folder)
        self.names = list(tensors)
        self._recorded = record_routes(model, load=load, tensors=tensors, shard=ranks > 1)

    @property
    def placements(self) -> dict[str, Placement]:
        """What is held here, of tensors with a route."""
        return {name: Placement(target.dtype, target.shape, tuple((box.sizes, box.checkpoint) for box in target.boxes))
                for name, target in self._recorded.routed.items()}

    @property
    def whole(self) -> Mapping[str, str]:
        """Why tensors have no route here, by name."""
        return self._recorded.whole

    def bind(self, plan: TensorPlan, *, rank: int, source: PartSource, adapters: Adapters | None) -> RankSync:
        """Prove that the model holds the folder's values. Raises WeightSyncError when it does not, or when a tensor
        without a route cannot be loaded again."""
        routed = {name: self._recorded.routed.get(name) or RoutedTarget(name, shape, dtype, ())
                  for name, (dtype, shape) in plan.routed.items()}
        elements = prove_base(routed, folder=self._folder)
        reload = DenseReload.of_folder(self._model, load=self._load, names=plan.whole, folder=self._folder)
        reload.prove()
        targets: dict[str, Target] = {**routed, **reload.shadows}
        classes = dict(plan.classes[rank])
        everyone = ",".join(map(str, range(self._ranks))) if self._ranks > 1 else ""
        if adapters is not None:
            targets |= adapters.targets()
        classes |= dict.fromkeys(targets.keys() - plan.routed.keys(), everyone)
        return RankSync(Receiver(targets, source=source, classes=classes), reload=reload, elements=elements)


class Adapters:
    """Memory that receives LoRA adapters; every rank has all of them.

    Args:
        folder: of the model.
        dtype: of the engine.
    """

    def __init__(self, lora: LoRA, *, folder: Path, dtype: torch.dtype) -> None:
        self._lora = lora
        self._held = {name: torch.zeros(shape, dtype=dtype) for name, shape in adapter_shapes(folder, lora).items()}

    def targets(self) -> Mapping[str, Target]:
        """By name."""
        return memory_targets(self._held)

    def save(self, folder: Path, *, base: str) -> None:
        """Write what is held as a folder that an engine loads."""
        save_adapters(self._held, folder, config=self._lora, base=base)


class RankSync:
    """Fetches, and applies."""

    def __init__(self, receiver: Receiver, *, reload: DenseReload, elements: int = 0) -> None:
        self.receiver, self.elements = receiver, elements
        self._reload = reload
        self._fetching = BackgroundFetch(receiver.fetch)

    def fetch(self, manifest: Manifest) -> None:
        """Begin to fetch, beside whatever the engine does. See `BackgroundFetch.begin`."""
        self._fetching.begin(manifest)

    def fetched(self, manifest: Manifest) -> Shares | None:
        """What `Receiver.fetch` gave, and raises what it raised; None while the thread works."""
        shares = self._fetching.outcome(manifest)
        return None if self._fetching.busy else shares

    def apply(self, manifest: Manifest, *, predicted: int | None = None) -> int:
        """As `Receiver.apply`; the model then holds the tensors without a route too. A loader that fails poisons."""
        if self._fetching.busy:
            raise WeightSyncError(f"version {manifest.version} cannot be applied while a version is being fetched")
        self._fetching.forget()
        state_hash = self.receiver.apply(manifest, predicted=predicted)
        try:
            self._reload.reload()
        except Exception as error:  # whatever a loader raises
            why = f"the model's own loader failed on what has no route: {type(error).__name__}: {error}"
            self.receiver.poison(why)
            raise WeightSyncError(why) from error
        return state_hash


