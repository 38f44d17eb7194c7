"""Trainer state in and out of PyTorch's distributed checkpoint format, as safetensors. Each rank writes what it holds, and waits for none.

Every file says which part of each tensor it has (`DCP_SHARDING_INFO` in its header), so any number of ranks loads what any other
number saved, bit for bit, and so does `torch.distributed.checkpoint.load` with a `HuggingFaceStorageReader` elsewhere.
"""

from __future__ import annotations

import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.tensor import DTensor

from asyncrl.errors import CheckpointError, NonFiniteError
from asyncrl.train.checkpoint_store import SavedFile, rank_file
from asyncrl.train.parallel import local

FILE_BYTES = 256 << 20
"""A file is put together in memory before it is written: this bounds the copy, and the time a step beside it may be held up."""


@torch.no_grad()
def stage(tensors: Mapping[str, Tensor], *, rank: int) -> dict[str, Tensor]:
    """A copy of this rank's share of every tensor, in CPU memory; what all ranks hold alike is the lowest rank's.

    Raises NonFiniteError for a NaN or an infinity.
    """
    copies: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        share = local(tensor).detach()
        if share.is_floating_point() and not bool(torch.isfinite(share).all()):
            raise NonFiniteError(f"{name} holds a value that is not finite; it is not saved")
        if share.numel() and (rank == 0 or isinstance(tensor, DTensor)):
            copies[name] = tensor.detach().to("cpu", copy=True)
    return copies


def write(staged: Mapping[str, Tensor], folder: Path, *, rank: int) -> list[SavedFile]:
    """Write and sync this rank's files of a checkpoint; none when the rank holds nothing.

    Plans alone, without collectives: it may run in a thread beside the next step. Raises CheckpointError, leaving no file.
    """
    if not staged:
        return []
    apart = folder / f".rank-{rank}"
    try:
        _save_alone(dict(staged), apart)
        written = sorted(apart.glob("*.safetensors"))
        return [SavedFile.of(file.rename(folder / rank_file(rank, number))) for number, file in enumerate(written)]
    except (OSError, SafetensorError, CheckpointException) as error:
        raise CheckpointError(f"rank {rank}'s files in {folder} cannot be written: {error}") from error
    finally:
        shutil.rmtree(apart, ignore_errors=True)


def load(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Fill this rank's share of every tensor, in place, from the files of a checkpoint.

    Raises CheckpointError, on every rank alike and before anything is written, unless the files hold each element of each tensor
    once and nothing else.
    """
    reader = HuggingFaceStorageReader(str(folder))
    _require_whole(tensors, reader, folder)
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    dcp.load(dict(tensors), storage_reader=reader, no_dist=True)


def _save_alone(staged: dict[str, Tensor], folder: Path) -> None:
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    writer = HuggingFaceStorageWriter(str(folder), fqn_to_index_mapping=_file_numbers(staged), save_distributed=True)
    # Without collectives alone, DCP still ends in a barrier, which in a thread would meet those of the step.
    dcp.save(staged, storage_writer=writer, no_dist=True, use_collectives=False)


def _file_numbers(staged: Mapping[str, Tensor]) -> dict[str, int]:
    """Which file, from 1, each tensor goes to: a new one begins where the last would grow over FILE_BYTES."""
    numbers: dict[str, int] = {}
    number, size = 1, 0
    for name, tensor in staged.items():
        if size and size + local(tensor).nbytes > FILE_BYTES:
            number, size = number + 1, 0
        numbers[name], size = number, size + local(tensor).nbytes
    return numbers


def _require_whole(tensors: Mapping[str, Tensor], reader: HuggingFaceStorageReader, folder: Path) -> None:
    stored = reader.read_metadata().state_dict_metadata
    for name, found in stored.items():
        if name not in tensors:
            raise CheckpointError(f"{folder} holds {name}, which this model does not have{_remedy(name)}")
        if found.size != tensors[name].shape:
            raise CheckpointError(f"{folder} holds {name} of shape {list(found.size)}, this model has {list(tensors[name].shape)}")
    held = {name: sum(chunk.sizes.numel() for chunk in found.chunks) for name, found in stored.items()}
    wrong = [name for name, tensor in tensors.items() if held.get(name, 0) != tensor.numel()]
    if wrong:
        raise CheckpointError(f"{folder} lacks elements of {wrong[0]}, or has some twice ({len(wrong)} tensors are not whole)"
                              f"{_remedy(wrong[0])}")


def _remedy(name: str) -> str:
    """State of the optimizer depends on settings."""
    if not name.startswith(("exp_avg", "learning_rate_scale/")):
        return ""
    if name.startswith("critic/"):
        return ": set advantages, which have a critic with gae alone, as they were when it was saved"
    return ": set trainer.frozen, which takes parameters their moments, and trainer.learning_rate_scale as they were when it was saved"
