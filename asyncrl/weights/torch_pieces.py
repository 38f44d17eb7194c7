"""Torch tensors as pieces of a checkpoint: names, coordinates, dtypes and raw bits, for FSDP2 shards and plain models alike."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from asyncrl.adapters import checkpoint_name
from asyncrl.errors import WeightSyncError
from asyncrl.weights.codec import Bits
from asyncrl.weights.manifest import Piece
from asyncrl.weights.piece_bits import Span
from asyncrl.weights.targets import MemoryTarget, check_memory

PublishedDtype = Literal["bfloat16", "float32"]

DTYPE_NAMES: Mapping[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL"}
"""safetensors names."""

_WORDS = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32, 8: torch.uint64}


def checkpoint_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by checkpoint name: what `save_pretrained` would keep, tied weights once, and what transformers
    holds of several tensors of a file, such as all experts of a layer, as it holds it; detached.

    Of several names for one tensor it is the one transformers ties the others to, else the first; what has adapters beside it keeps the
    name it has in the model's own files. Raises WeightSyncError for state that is no tensor.
    """
    return {name: tensor.detach() for name, tensor in _checkpoint_state(model).items()}


def memory_targets(tensors: Mapping[str, Tensor]) -> dict[str, MemoryTarget]:
    """Tensors as what a `Receiver` writes to. Raises WeightSyncError unless they are contiguous, on the CPU, and share no memory."""
    targets = {name: _target(name, tensor) for name, tensor in tensors.items()}
    check_memory(targets)
    return targets


def frozen_names(model: nn.Module) -> frozenset[str]:
    """Checkpoint names of parameters that are not trained: they stay as they were when the model was loaded."""
    return frozenset(name for name, tensor in _checkpoint_state(model).items()
                     if isinstance(tensor, nn.Parameter) and not tensor.requires_grad)


def local_pieces(model: nn.Module, *, rank: int, dtype: PublishedDtype) -> tuple[Piece, ...]:
    """What this rank publishes of `model`, in the order of `local_bits`. Raises WeightSyncError for a layout without flat runs."""
    return tuple(piece for piece, _ in _local(model, rank=rank, dtype=dtype))


def local_bits(model: nn.Module, *, rank: int, dtype: PublishedDtype, but: Collection[str] = ()) -> TensorBits:
    """What this rank publishes, but for tensors `but`: parameters rounded to nearest even to `dtype`, buffers as they are."""
    return TensorBits(_local(model, rank=rank, dtype=dtype, but=but))


class TensorBits:
    """Tensors as `PieceBits`: read and rounded in the slices that are asked for, so that none is copied whole. For hosts and devices."""

    finite = True

    def __init__(self, shards: Iterable[tuple[Piece, Tensor]]) -> None:
        found = tuple(shards)
        self.pieces = tuple(piece for piece, _ in found)
        self._shards = [shard.detach().view(-1) if shard.is_contiguous() else shard.detach() for _, shard in found]
        self._words = [bits_of(shard) if shard.device.type == "cpu" and shard.is_contiguous() else None for shard in self._shards]

    def sources(self, spans: Sequence[Span]) -> Sequence[Bits] | None:
        """See `PieceBits.sources`: contiguous memory of the host, of one dtype, which is the published one, or float32 for BF16."""
        held, published = self._shards[spans[0].piece].dtype, self.pieces[spans[0].piece].dtype
        if DTYPE_NAMES[held] != published and (held, published) != (torch.float32, "BF16"):
            return None
        if any(self._shards[span.piece].dtype != held for span in spans):
            return None
        words = [here[span.low:span.high] for span in spans if (here := self._words[span.piece]) is not None]
        return words if len(words) == len(spans) else None

    def stage(self, spans: Sequence[Span], out: Bits) -> None:
        """See `PieceBits.stage`."""
        self.stage_tensor(spans, torch.from_numpy(out))

    def stage_tensor(self, spans: Sequence[Span], out: Tensor) -> None:
        """As `stage`, into a tensor of the published dtype's width, on any device; in one call, however many spans there are."""
        rounded = out.view(_published_dtype(self.pieces[spans[0].piece].dtype))
        torch._foreach_copy_(list(rounded.split([span.high - span.low for span in spans])), [self._read(span) for span in spans])

    def _read(self, span: Span) -> Tensor:
        shard = self._shards[span.piece]
        if shard.is_contiguous():
            return shard[span.low:span.high]
        return shard[torch.unravel_index(torch.arange(span.low, span.high, device=shard.device), shard.shape)]


def bits_of(tensor: Tensor) -> Bits:
    """Flat raw bits of a tensor, sharing its memory when it is contiguous and on the CPU."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(_WORDS[flat.element_size()]).cpu().numpy()


def dtype_name(name: str, dtype: torch.dtype) -> str:
    """The safetensors name of a dtype. Raises WeightSyncError, naming the tensor, when it has none here."""
    if dtype not in DTYPE_NAMES:
        raise WeightSyncError(f"{name} has dtype {dtype}, which cannot be published")
    return DTYPE_NAMES[dtype]


def _checkpoint_state(model: nn.Module) -> dict[str, Tensor]:
    tied = set(getattr(model, "all_tied_weights_keys", None) or ())
    state = model.state_dict(keep_vars=True)
    first_names: dict[int, str] = {}
    for name in sorted(state, key=lambda name: name in tied):
        if not isinstance(state[name], Tensor):
            raise WeightSyncError(f"{name} is a {type(state[name]).__name__}, not a tensor: it cannot be published")
        first_names.setdefault(id(state[name]), name)
    return {checkpoint_name(name): tensor for name, tensor in state.items() if first_names[id(tensor)] == name}


def _local(model: nn.Module, *, rank: int, dtype: PublishedDtype, but: Collection[str] = ()) -> Iterator[tuple[Piece, Tensor]]:
    for name, tensor in _checkpoint_state(model).items():
        if name in but:
            continue
        if tensor.is_meta:
            raise WeightSyncError(f"{name} is on the meta device: it has no values to publish")
        cast = isinstance(tensor, nn.Parameter) and tensor.is_floating_point()
        published = dtype_name(name, getattr(torch, dtype) if cast else tensor.dtype)
        start, shard = _shard(name, tensor.detach(), rank=rank)
        if shard.numel():
            yield Piece(name=name, dtype=published, shape=tuple(tensor.shape), start=start, length=shard.numel()), shard


def _shard(name: str, tensor: Tensor, *, rank: int) -> tuple[int, Tensor]:
    """Flat index of the first element this rank publishes, and those elements; replicas are published by the lowest rank alone."""
    if not isinstance(tensor, DTensor):
        return 0, tensor if rank == 0 else tensor.reshape(-1)[:0]
    mesh, placements = tensor.device_mesh, tensor.placements
    if any(type(p) not in (Shard, Replicate) or (isinstance(p, Shard) and p.dim != 0) for p in placements):
        raise WeightSyncError(f"{name} is laid out as {placements}: only shards of the first dimension and replicas can be published")
    local = tensor.to_local()
    coordinate = mesh.get_coordinate()
    replica = coordinate is None or any(isinstance(p, Replicate) and place > 0 for p, place in zip(placements, coordinate, strict=True))
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    if tuple(shape) != tuple(local.shape):
        raise WeightSyncError(f"{name} holds a shard of shape {tuple(local.shape)} where its layout says {tuple(shape)}")
    row = tensor.numel() // tensor.shape[0] if tensor.ndim and tensor.shape[0] else 1
    return (offset[0] * row if offset else 0), (local.reshape(-1)[:0] if replica else local)


def _target(name: str, tensor: Tensor) -> MemoryTarget:
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise WeightSyncError(f"{name}: a receiver writes contiguous CPU memory, this is {tensor.device} with strides {tensor.stride()}")
    return MemoryTarget(name=name, shape=tuple(tensor.shape), dtype=dtype_name(name, tensor.dtype), memory=bits_of(tensor))


def _published_dtype(name: str) -> torch.dtype:
    return next(dtype for dtype, known in DTYPE_NAMES.items() if known == name)
