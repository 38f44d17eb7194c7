"""Tensors without a route: a copy of each takes the changes, in the checkpoint's coordinates, and is given whole to the model's own loader.

What a loader casts, clones or computes with on the way into the model cannot be written element by element. Its copy, the shadow, is what
weight sync verifies, writes and hashes; loading it makes the model hold what a fresh load of the same version would. That a loader's
result depends on the tensor alone is proved before the first version: another value is loaded, then the true one, and no bit may differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from asyncrl.errors import WeightSyncError
from asyncrl.weights.base_proof import saved_values
from asyncrl.weights.codec import Bits, Changes
from asyncrl.weights.manifest import TensorEntry
from asyncrl.weights.routes import Load
from asyncrl.weights.targets import MemoryTarget
from asyncrl.weights.torch_pieces import DTYPE_NAMES

_SHOWN = 3
"""Names in an error message."""


class Shadow:
    """A whole tensor in host memory, as published. See `Target`.

    BF16 is kept as F32, so that either may be published.
    """

    def __init__(self, name: str, saved: Tensor) -> None:
        self.name, self.shape, self.changed = name, tuple(saved.shape), False
        self._published = DTYPE_NAMES[saved.dtype]
        held: Tensor = saved.detach().to(torch.float32 if saved.dtype == torch.bfloat16 else saved.dtype).reshape(-1).clone()
        self.dtype = DTYPE_NAMES[held.dtype]
        self._held = held
        words = held.view(torch.uint8).numpy()
        self._memory = MemoryTarget(name, self.shape, self.dtype, words.view(f"<u{held.element_size()}"))

    @property
    def tensor(self) -> Tensor:
        """The value in the dtype it was last published in."""
        if self._published == self.dtype:
            return self._held.clone().reshape(self.shape)
        return self._held.view(torch.bfloat16)[1::2].clone().reshape(self.shape)

    def accepts(self, dtype: str) -> bool:
        """See `Target.accepts`."""
        return self._memory.accepts(dtype)

    def here(self, entry: TensorEntry, changes: Changes) -> Iterable[tuple[TensorEntry, Changes]]:
        """See `Target.here`."""
        return self._memory.here(entry, changes)

    def read(self, entry: TensorEntry, changes: Changes) -> Bits:
        """See `Target.read`."""
        return self._memory.read(entry, changes)

    def write(self, entry: TensorEntry, changes: Changes) -> None:
        """See `Target.write`. The model does not hold it before `DenseReload.reload`."""
        self._published = entry.dtype
        self.changed |= changes.indices is None or len(changes.indices) > 0
        self._memory.write(entry, changes)


class DenseReload:
    """Keeps a model equal to the shadows of its tensors that have no route.

    Args:
        model: what `load` writes to.
        load: the model's own loader.
        shadows: by name, with the values that the model holds.
    """

    def __init__(self, model: nn.Module, *, load: Load, shadows: Mapping[str, Shadow]) -> None:
        self._model, self._load, self.shadows = model, load, shadows

    @classmethod
    def of_folder(cls, model: nn.Module, *, load: Load, names: Iterable[str], folder: Path) -> DenseReload:
        """With the folder's values as shadows."""
        found = {name: Shadow(name, value) for name, value, _ in saved_values(folder, frozenset(names))}
        return cls(model, load=load, shadows=found)

    def prove(self) -> None:
        """Load other values, then those of the shadows. Raises WeightSyncError when the model is not, bit for bit, what it was before."""
        if not self.shadows:
            return
        before = _checksums(self._model)
        self._give({name: _other(shadow.tensor) for name, shadow in self.shadows.items()})
        self._give({name: shadow.tensor for name, shadow in self.shadows.items()})
        after = _checksums(self._model)
        differ = [name for name in before.keys() | after.keys() if before.get(name) != after.get(name)]
        if differ:
            raise WeightSyncError(f"loading {', '.join(list(self.shadows)[:_SHOWN])} again leaves {', '.join(sorted(differ)[:_SHOWN])} "
                                  "other than it was: the loader's result depends on more than the tensor, so no update can be proved")

    def reload(self) -> None:
        """Give the loader what was written since the last time. Raises what the loader raises."""
        changed = {name: shadow for name, shadow in self.shadows.items() if shadow.changed}
        self._give({name: shadow.tensor for name, shadow in changed.items()})
        for shadow in changed.values():
            shadow.changed = False

    def _give(self, tensors: Mapping[str, Tensor]) -> None:
        if tensors:
            with torch.no_grad():
                self._load(tensors.items())


def _other(value: Tensor) -> Tensor:
    """A value that differs from `value` in every element."""
    return torch.where(value == 1, torch.zeros_like(value), torch.ones_like(value))


def _checksums(model: nn.Module) -> dict[str, str]:
    state = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: xxhash.xxh3_128_hexdigest(np.ascontiguousarray(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()))
            for name, tensor in state}
