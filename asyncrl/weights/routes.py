"""Where each checkpoint element lands in a runtime model, found by watching the model's own loader. Nothing real is written.

The loader is given tensors without data (device meta). Every operation it starts is seen before it runs: a copy from a checkpoint tensor
into the model's memory becomes a box of that tensor's route and is not carried out; a fill is not carried out either. What a loader
computes from a checkpoint tensor (a cast, a clone, an exponential) is followed: where it is copied into the model, the tensor cannot be
patched element by element and must be given to the loader whole. Any other write to memory that existed before is refused.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from asyncrl.errors import WeightSyncError
from asyncrl.weights.routed_target import Box, Layout, RoutedTarget, box_between, overlapping
from asyncrl.weights.torch_pieces import dtype_name

_aten = torch.ops.aten
_FILLS = frozenset({_aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default})

Load = Callable[[Iterable[tuple[str, Tensor]]], object]
"""A model's own loader: takes checkpoint names and tensors."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """What a loader does with the tensors of a checkpoint; one that it skips (a tied head's second copy) is in neither."""

    routed: Mapping[str, RoutedTarget]
    whole: Mapping[str, str]
    """Why a tensor has no route and must be loaded whole, by name."""


def record_routes(model: nn.Module, *, load: Load, tensors: Mapping[str, Tensor], shard: bool = False) -> Recorded:
    """Where `load` puts each of the checkpoint's tensors.

    Args:
        model: its parameters and buffers are the memory to write to; not changed.
        tensors: by checkpoint name; whole, on device meta, with the dtypes the loader is used to.
        shard: this model is one of several that hold the checkpoint together, and may place a tensor in part.

    Raises WeightSyncError, naming tensor and reason, when the loader puts two tensors in one place, computes with the model's memory,
    replaces it, writes elsewhere, looks at values, or fails.
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
    _check_disjoint(watch.claims)
    placed = [name for name in tensors if name in watch.boxes or name in watch.whole]
    whole = {name: reason for name in placed
             if (reason := watch.whole.get(name) or _gaps(tensors[name], watch.boxes[name], shard=shard))}
    routed = {name: RoutedTarget(name=name, shape=tuple(tensors[name].shape), dtype=watch.dtypes[name], boxes=tuple(watch.boxes[name]))
              for name in placed if name not in whole}
    return Recorded(routed, whole)


@dataclass(frozen=True, slots=True)
class _Origin:
    """What a value was computed from."""

    names: tuple[str, ...]
    operation: str

    @property
    def text(self) -> str:
        return " and ".join(self.names)


@dataclass(frozen=True, slots=True)
class _Claim:
    """A block of runtime memory that a tensor is put into."""

    storage: int
    sizes: tuple[int, ...]
    layout: Layout
    name: str


class _Watch(TorchDispatchMode):
    """Sees every tensor operation of a loader; carries out none that writes to memory it did not make itself."""

    def __init__(self, tensors: Mapping[str, Tensor], model: Mapping[int, tuple[str, torch.dtype]]) -> None:
        super().__init__()
        self.boxes: defaultdict[str, list[Box]] = defaultdict(list)
        self.whole: dict[str, str] = {}
        self.claims: list[_Claim] = []
        self.dtypes: dict[str, str] = {}
        self.current = "nothing"
        self.refusal: WeightSyncError | None = None
        self._tensors = tensors
        self._model = model
        self._sources = {_key(tensor): name for name, tensor in tensors.items()}
        self._derived: dict[int, _Origin] = {}
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
        origin = self._origin(given, func)
        if not written:
            return self._run(func, args, kwargs, given=given, origin=origin)
        for destination in written:
            if _key(destination) in self._model:
                self._write(func, args, destination, origin=origin)
            elif _key(destination) not in self._made and destination.device.type != "meta":
                self._refuse(f"{origin.text if origin else self.current}: its loader writes, with {func}, memory that is no parameter or "
                             "buffer of the model")
            elif origin is None:
                return func(*args, **kwargs)
            else:
                self._derived[_key(destination)] = _Origin(origin.names, str(func))
        return written[0]

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], *, given: list[Tensor], origin: _Origin | None) -> Any:
        try:
            result = func(*args, **kwargs)
        except Exception as error:
            if origin is not None:
                self._refuse(f"{origin.text}: its loader computes with it ({func}): {error}")
            raise
        known = {_key(tensor) for tensor in given}
        for made in tree_iter(result):
            if isinstance(made, Tensor) and _key(made) not in known:
                self._made[_key(made)] = made  # kept, so that no later storage gets the same key
                if origin is not None:
                    self._derived[_key(made)] = origin
        return result

    def _write(self, func: Any, args: tuple[Any, ...], destination: Tensor, *, origin: _Origin | None) -> None:
        runtime, dtype = self._model[_key(destination)]
        if func in _FILLS and origin is None:
            return
        if origin is None or func is not _aten.copy_.default:
            self._refuse(f"{origin.text if origin else runtime}: the loader changes {runtime} with {func}, "
                         "which copies no checkpoint tensor")
        source, name = args[1], self._sources.get(_key(args[1]))
        if destination.device.type == "meta":
            self._refuse(f"{origin.text}: {runtime} has no memory: it is offloaded, or was packed and removed")
        elif len(origin.names) > 1:
            self._refuse(f"{origin.text}: its loader puts what it computes from all of them into {runtime}")
        elif name is None or _key(source) in self._derived:
            reason = f"its loader passes it through other memory ({origin.operation}) on the way to {runtime}"
            self._load_whole(origin.text, destination, reason)
        elif source.dtype != self._tensors[name].dtype or destination.dtype != dtype:
            self._refuse(f"{name}: its loader takes the bits of {runtime} for another dtype")
        elif self.dtypes.setdefault(name, dtype_name(runtime, dtype)) != dtype_name(runtime, dtype):
            self._refuse(f"{name}: its loader splits it over dtypes {self.dtypes[name]} and {dtype_name(runtime, dtype)}")
        elif destination.numel():
            try:
                box = box_between(source, destination)
            except WeightSyncError as error:
                self._load_whole(name, destination, f"{error} ({runtime})")
            else:
                self.boxes[name].append(box)
                self.claims.append(_Claim(_key(destination), box.sizes, box.runtime, name))

    def _load_whole(self, name: str, destination: Tensor, reason: str) -> None:
        self.whole.setdefault(name, reason)
        if destination.numel():
            box = box_between(torch.empty(destination.shape, device="meta"), destination)
            self.claims.append(_Claim(_key(destination), box.sizes, box.runtime, name))

    def _origin(self, tensors: list[Tensor], func: Any) -> _Origin | None:
        """The checkpoint tensors that values stem from, and the operation that first took them out of their own memory."""
        found = [self._derived.get(key) or _Origin((self._sources[key],), str(func)) for key in map(_key, tensors)
                 if key in self._derived or key in self._sources]
        return _Origin(tuple(dict.fromkeys(name for origin in found for name in origin.names)), found[0].operation) if found else None

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


def _gaps(tensor: Tensor, boxes: list[Box], *, shard: bool) -> str:
    """Why boxes are no route of a tensor; empty when they are."""
    if overlapping([(box.sizes, box.checkpoint) for box in boxes]) is not None:
        return "its loader puts some of its elements in two places"
    placed = sum(box.elements for box in boxes)
    return "" if shard or placed == tensor.numel() else f"its loader places {placed} of its {tensor.numel()} elements"


def _check_disjoint(claims: list[_Claim]) -> None:
    """Raise WeightSyncError when two tensors are put in one place. One that is loaded whole may be put there twice."""
    by_storage: defaultdict[int, list[_Claim]] = defaultdict(list)
    for claim in dict.fromkeys(claims):
        by_storage[claim.storage].append(claim)
    for found in by_storage.values():
        shared = overlapping([(claim.sizes, claim.layout) for claim in found])
        if shared is not None:
            raise WeightSyncError(f"{found[shared].name}: its loader writes where another tensor, or part of this one, was put")
