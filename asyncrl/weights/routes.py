"""Where each checkpoint element lands in a runtime model, found by watching the model's own loader. Nothing real is written.

The loader is given tensors without data (device meta). Every operation it starts is seen before it runs: a copy from a checkpoint tensor
into the model's memory becomes a box of that tensor's route and is not carried out; a fill is not carried out either; any other write to
memory that existed before is refused. What a loader computes from a checkpoint tensor (a cast, a clone, a sum) is followed, and a copy of
it into the model is refused by name: such a value cannot be patched element by element.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from asyncrl.errors import WeightSyncError
from asyncrl.weights.routed_target import Box, RoutedTarget, box_between, overlapping
from asyncrl.weights.torch_pieces import dtype_name

_aten = torch.ops.aten
_FILLS = frozenset({_aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default})

Load = Callable[[Iterable[tuple[str, Tensor]]], object]
"""A model's own loader: takes checkpoint names and tensors."""


def record_routes(model: nn.Module, *, load: Load, tensors: Mapping[str, Tensor]) -> dict[str, RoutedTarget]:
    """The route of every checkpoint tensor that `load` puts into `model`; one it skips (a tied head's second copy) has none.

    Args:
        model: its parameters and buffers are the memory to write to; not changed.
        tensors: by checkpoint name; whole, on device meta, with the dtypes the loader is used to.

    Raises WeightSyncError, naming tensor and reason, when the loader copies a tensor through other memory, places it only in part or in
    two places, puts two in one place, replaces the model's memory, or fails.
    """
    memory = _memory(model)
    watch = _Watch(tensors, {_key(tensor): (name, tensor.dtype) for name, tensor in memory.items()})
    try:
        with torch.no_grad(), watch:
            load(watch.feed())
    except Exception as error:  # whatever a loader raises; a refusal of ours may lie below it
        if watch.refusal is None:
            raise WeightSyncError(f"{watch.current}: the model's own loader failed: {type(error).__name__}: {error}") from error
    if watch.refusal is not None:
        raise watch.refusal
    after = _memory(model)
    replaced = [name for name, tensor in memory.items() if name not in after or _key(after[name]) != _key(tensor)]
    if replaced or len(after) != len(memory):
        raise WeightSyncError(f"{', '.join(replaced[:1]) or 'the model'}: its loader replaces memory instead of writing it")
    targets = {name: _target(name, tensor, watch.dtypes[name], watch.boxes[name]) for name, tensor in tensors.items() if watch.boxes[name]}
    _check_disjoint(targets)
    return targets


class _Watch(TorchDispatchMode):
    """Sees every tensor operation of a loader; carries out none that writes to memory it did not make itself."""

    def __init__(self, tensors: Mapping[str, Tensor], model: Mapping[int, tuple[str, torch.dtype]]) -> None:
        super().__init__()
        self.boxes: defaultdict[str, list[Box]] = defaultdict(list)
        self.dtypes: dict[str, str] = {}
        self.current = "nothing"
        self.refusal: WeightSyncError | None = None
        self._tensors = tensors
        self._model = model
        self._sources = {_key(tensor): name for name, tensor in tensors.items()}
        self._derived: dict[int, tuple[str, str]] = {}
        self._made: dict[int, Tensor] = {}

    def feed(self) -> Iterator[tuple[str, Tensor]]:
        """The checkpoint tensors, one after another."""
        for name, tensor in self._tensors.items():
            self.current = name
            yield name, tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        given = [value for value in tree_iter((args, kwargs)) if isinstance(value, Tensor)]
        written = _written(func, args, kwargs)
        origin = next((found for tensor in given if (found := self._origin(tensor, func)) is not None), None)
        if not written:
            return self._run(func, args, kwargs, given=given, origin=origin)
        for destination in written:
            if _key(destination) in self._model:
                self._write(func, args, destination, origin=origin)
            elif _key(destination) not in self._made and destination.device.type != "meta":
                self._refuse(f"{origin[0] if origin else self.current}: its loader writes, with {func}, memory that is no parameter or "
                             "buffer of the model")
            elif origin is None:
                return func(*args, **kwargs)
            else:
                self._derived[_key(destination)] = (origin[0], str(func))
        return written[0]

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, given: list[Tensor],
             origin: tuple[str, str] | None) -> Any:
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            if origin is not None:
                self._refuse(f"{origin[0]}: its loader computes with it ({func}): {error}")
            raise
        known = {_key(tensor) for tensor in given}
        for made in tree_iter(result):
            if isinstance(made, Tensor) and _key(made) not in known:
                self._made[_key(made)] = made  # kept, so that no later storage gets the same key
                if origin is not None:
                    self._derived[_key(made)] = origin
        return result

    def _write(self, func: Any, args: tuple[Any, ...], destination: Tensor, *, origin: tuple[str, str] | None) -> None:
        runtime, dtype = self._model[_key(destination)]
        if func in _FILLS and origin is None:
            return
        if origin is None or func is not _aten.copy_.default:
            self._refuse(f"{origin[0] if origin else runtime}: the loader changes {runtime} with {func}, which copies no checkpoint tensor")
        source, name = args[1], self._sources.get(_key(args[1]))
        if name is None or _key(source) in self._derived:
            self._refuse(f"{origin[0]}: its loader passes it through other memory ({origin[1]}) on the way to {runtime}")
        elif source.dtype != self._tensors[name].dtype or destination.dtype != dtype:
            self._refuse(f"{name}: its loader takes the bits of {runtime} for another dtype")
        elif destination.device.type == "meta":
            self._refuse(f"{name}: {runtime} has no memory: it is offloaded, or was packed and removed")
        elif self.dtypes.setdefault(name, dtype_name(runtime, dtype)) != dtype_name(runtime, dtype):
            self._refuse(f"{name}: its loader splits it over dtypes {self.dtypes[name]} and {dtype_name(runtime, dtype)}")
        elif destination.numel():
            try:
                self.boxes[name].append(box_between(source, destination))
            except WeightSyncError as error:
                self._refuse(f"{name}: {error} ({runtime})")

    def _origin(self, tensor: Tensor, func: Any) -> tuple[str, str] | None:
        """The checkpoint tensor a value stems from, and the operation that took it out of its own memory."""
        key = _key(tensor)
        return self._derived.get(key) or ((self._sources[key], str(func)) if key in self._sources else None)

    def _refuse(self, reason: str) -> None:
        self.refusal = self.refusal or WeightSyncError(reason)
        raise self.refusal


def _memory(model: nn.Module) -> dict[str, Tensor]:
    state = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    return {name: tensor.detach() for name, tensor in state}


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    written = [args[place] if place < len(args) else kwargs.get(argument.name) for place, argument in enumerate(func._schema.arguments)
               if argument.alias_info is not None and argument.alias_info.is_write]
    return [value for value in tree_iter(written) if isinstance(value, Tensor)]


def _target(name: str, tensor: Tensor, dtype: str, boxes: list[Box]) -> RoutedTarget:
    if overlapping([(box.sizes, box.checkpoint) for box in boxes]) is not None:
        raise WeightSyncError(f"{name}: its loader puts some of its elements in two places")
    placed = sum(box.elements for box in boxes)
    if placed != tensor.numel():
        raise WeightSyncError(f"{name}: its loader places {placed} of its {tensor.numel()} elements")
    return RoutedTarget(name=name, shape=tuple(tensor.shape), dtype=dtype, boxes=tuple(boxes))


def _check_disjoint(targets: Mapping[str, RoutedTarget]) -> None:
    claims: defaultdict[int, list[tuple[str, Box]]] = defaultdict(list)
    for name, target in targets.items():
        for box in target.boxes:
            claims[_key(box.memory)].append((name, box))
    for boxes in claims.values():
        shared = overlapping([(box.sizes, box.runtime) for _, box in boxes])
        if shared is not None:
            raise WeightSyncError(f"{boxes[shared][0]}: its loader writes where another tensor, or part of this one, was put")
