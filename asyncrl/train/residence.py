"""Where the state of a rank lies: on its device, or in the memory of the host while engines have the device.

On a CPU the two are one: the state is copied and the originals are freed, which is the same way and the same count of bytes, and gains
nothing but what was free already.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from asyncrl.process import release_free_memory
from asyncrl.train.parallel import local
from asyncrl.train.trainee import Trainee


class Residence:
    """Moves weights, buffers, gradients and moments of a rank, in place: the objects stay, what is tied stays tied.

    Args:
        modules: with their parameters, sharded or not.
        moments: what their optimizers hold now. Those that are kept in the memory of the host on purpose never move.
        device: where training happens.
    """

    def __init__(self, modules: Iterable[nn.Module], moments: Callable[[], Iterable[Tensor]], *, device: torch.device) -> None:
        self._modules = {id(module): module for module in modules}
        self._moments, self._device = moments, device
        self._staying: set[int] = set()
        self.offloaded = False
        """Whether the state is in the memory of the host."""

    @classmethod
    def of(cls, trainee: Trainee) -> Residence:
        """That of the policy, and of a reference and a critic if there are any."""
        modules: list[nn.Module] = [trainee.policy]
        optimizers = [trainee.optimizer]
        if trainee.reference is not None:
            modules.append(trainee.reference.policy)
        if trainee.critic is not None:
            modules.append(trainee.critic.model)
            optimizers.append(trainee.critic.optimizer)
        return cls(modules, lambda: [moment for one in optimizers for moment in one.moments().values()], device=trainee.ranks.device)

    def offload(self) -> int:
        """Move everything to the memory of the host; bytes moved, 0 when it is there."""
        if self.offloaded:
            return 0
        self._staying = {id(moment) for moment in self._moments() if local(moment).device != self._device}
        moved = self._move(torch.device("cpu"))
        self.offloaded = True
        return moved

    def onload(self) -> int:
        """Move everything back to the device; bytes moved, 0 when it is there."""
        if not self.offloaded:
            return 0
        moved = self._move(self._device)
        self.offloaded = False
        return moved

    @contextmanager
    def at_home(self) -> Iterator[None]:
        """Everything is on the device inside, and afterwards where it was."""
        was_offloaded = self.offloaded
        self.onload()
        try:
            yield
        finally:
            if was_offloaded:
                self.offload()

    @torch.no_grad()
    def _move(self, target: torch.device) -> int:
        moved = sum(held.nbytes for held in self._held())
        for module in self._modules.values():
            module._apply(lambda tensor: _moved(tensor, target))
        for moment in self._moments():
            if id(moment) in self._staying:
                continue
            if isinstance(moment, DTensor):
                moment._local_tensor = moment._local_tensor.to(target, copy=True)
            else:
                moment.data = moment.data.to(target, copy=True)
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        release_free_memory()
        return moved

    def _held(self) -> Iterator[Tensor]:
        """This rank's share of each tensor, once."""
        for module in self._modules.values():
            for parameter in module.parameters():
                yield local(parameter)
                if parameter.grad is not None:
                    yield local(parameter.grad)
            yield from module.buffers()
        yield from (local(moment) for moment in self._moments() if id(moment) not in self._staying)


def _moved(tensor: Tensor, target: torch.device) -> Tensor:
    """A copy on `target`, also where it is there already."""
    if not isinstance(tensor, DTensor):
        return tensor.to(target, copy=True)
    return DTensor(tensor._local_tensor.to(target, copy=True), tensor._spec, requires_grad=tensor.requires_grad)
