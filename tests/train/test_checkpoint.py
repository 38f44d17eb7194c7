import itertools
import os
import sys
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from asyncrl.channel import Request
from asyncrl.errors import CheckpointError, NonFiniteError
from asyncrl.train import checkpoint, checkpoint_store
from asyncrl.train.checkpoint_store import CheckpointManifest, SavedFile, checkpoint_folder
from asyncrl.train.rank import RankTrainer
from tests.tiny_model import make_tiny_model
from tests.train.train_data import inline_rank, random_batch, step_on


def save(rank: RankTrainer, folder: Path, *, version: int) -> None:
    reply = rank.save(Request("save", body={"folder": str(checkpoint_store.begin(folder))}))
    saved = rank.saved(Request("saved", body={"wait": True}))
    files = [SavedFile(**file) for file in saved["files"]]
    checkpoint_store.commit(folder, files=files, version=version, updates=reply["updates"], run_epoch=0)


def restore(rank: RankTrainer, folder: Path) -> CheckpointManifest:
    manifest = checkpoint_store.verified(folder)
    rank.restore(Request("restore", body={"folder": str(folder), "updates": manifest.updates}))
    return manifest


def test_a_restored_rank_goes_on_as_if_nothing_had_happened(tiny: Path, tmp_path: Path) -> None:
    settings = {"schedule": {"kind": "cosine", "total_steps": 6, "warm_up_steps": 2}}
    rank = inline_rank(tiny, tmp_path / "store", **settings)
    for version in range(3):
        step_on(rank, random_batch(version, version=version))
    save(rank, tmp_path / "checkpoint", version=3)
    resumed = inline_rank(tiny, tmp_path / "store", **settings)
    assert restore(resumed, tmp_path / "checkpoint").version == 3
    for version in range(3, 6):
        ours, theirs = (step_on(trainer, random_batch(version, version=version)).metrics.result() for trainer in (rank, resumed))
        assert ours["train/learning_rate/last"] == theirs["train/learning_rate/last"]
        assert ours["train/grad_norm/last"] == theirs["train/grad_norm/last"]
    assert all(torch.equal(tensor, resumed._tensors()[name]) for name, tensor in rank._tensors().items())
    assert rank._trainee.optimizer.updates == resumed._trainee.optimizer.updates == 6


def test_a_rank_writes_several_files_when_one_would_grow_too_large(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = inline_rank(tiny, tmp_path / "store")
    step_on(rank, random_batch(0))
    largest = max(tensor.nbytes for tensor in rank._tensors().values())
    monkeypatch.setattr(checkpoint, "FILE_BYTES", largest)
    save(rank, tmp_path / "checkpoint", version=1)
    files = [file for file in (tmp_path / "checkpoint").glob("*.safetensors")]
    assert len(files) > 3
    assert max(sum(tensor.nbytes for tensor in load_file(file).values()) for file in files) <= largest
    resumed = inline_rank(tiny, tmp_path / "store")
    restore(resumed, tmp_path / "checkpoint")
    assert all(torch.equal(tensor, resumed._tensors()[name]) for name, tensor in rank._tensors().items())


def test_a_write_meets_no_other_rank(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs beside a step: a collective of its own would take the place of one of the step's, and both would wait for ever."""
    def meets(*given: object, **named: object) -> None:
        raise AssertionError("a collective")

    for name in ("barrier", "all_reduce", "all_gather_object", "gather_object", "scatter_object_list", "broadcast_object_list"):
        monkeypatch.setattr(dist, name, meets)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        staged = checkpoint.stage({"sharded": distribute_tensor(torch.ones(3, 2), mesh, [Shard(0)]), "whole": torch.ones(2)}, rank=0)
        (file,) = checkpoint.write(staged, tmp_path, rank=0)
    finally:
        dist.destroy_process_group()
    assert load_file(tmp_path / file.name).keys() == {"sharded", "whole"}


def test_pytorch_reads_what_was_written(tiny: Path, tmp_path: Path) -> None:
    rank = inline_rank(tiny, tmp_path / "store")
    step_on(rank, random_batch(0))
    save(rank, tmp_path / "checkpoint", version=1)
    read = {name: torch.zeros_like(tensor) for name, tensor in rank._tensors().items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(read, storage_reader=HuggingFaceStorageReader(str(tmp_path / "checkpoint")), no_dist=True)
    assert all(torch.equal(tensor, read[name]) for name, tensor in rank._tensors().items())


@pytest.mark.parametrize("damage", ["truncate", "delete", "flip", "no manifest", "torn manifest"])
def test_a_checkpoint_that_is_not_whole_is_passed_over_with_a_warning(damage: str, tiny: Path, tmp_path: Path) -> None:
    rank = inline_rank(tiny, tmp_path / "store")
    older, newer = (checkpoint_folder(tmp_path, version) for version in (20, 100))
    save(rank, older, version=20)
    save(rank, newer, version=100)
    assert checkpoint_store.newest(tmp_path) == newer
    file, manifest = newer / "rank-00000-000.safetensors", newer / checkpoint_store.MANIFEST
    content = file.read_bytes()
    {"truncate": lambda: file.write_bytes(content[:-1]), "delete": file.unlink,
     "flip": lambda: file.write_bytes(content[:-1] + bytes([content[-1] ^ 1])), "no manifest": manifest.unlink,
     "torn manifest": lambda: manifest.write_text(manifest.read_text()[:40])}[damage]()
    with pytest.warns(UserWarning, match="passed over"):
        assert checkpoint_store.newest(tmp_path) == older


def test_a_history_that_was_taken_up_again_is_newer_than_the_one_given_up(tmp_path: Path) -> None:
    for version, run_epoch in ((9, 0), (5, 1)):
        commit_empty(tmp_path, version, run_epoch=run_epoch)
    assert checkpoint_store.newest(tmp_path) == checkpoint_folder(tmp_path, 5)


def test_without_any_whole_checkpoint_there_is_none(tmp_path: Path) -> None:
    assert checkpoint_store.newest(tmp_path) is None


def test_weights_that_are_not_finite_are_neither_saved_nor_exported(tiny: Path, tmp_path: Path) -> None:
    rank = inline_rank(tiny, tmp_path / "store")
    with torch.no_grad():
        rank._lm.model.norm.weight[0] = float("nan")
    with pytest.raises(NonFiniteError, match=r"model.norm.weight"):
        save(rank, tmp_path / "checkpoint", version=0)
    with pytest.raises(CheckpointError):
        checkpoint_store.verified(tmp_path / "checkpoint")
    with pytest.raises(NonFiniteError, match=r"model.norm.weight"):
        rank.export(Request("export", body={"folder": str(tmp_path / "export")}))
    assert not (tmp_path / "export").exists()
    with pytest.raises(NonFiniteError, match=r"model.norm.weight"):
        rank.publish(Request("publish", body={"version": 0, "base": None}))


def test_a_checkpoint_of_another_model_is_refused(tiny: Path, untied: Path, tmp_path: Path) -> None:
    save(inline_rank(untied, tmp_path / "store"), tmp_path / "untied", version=0)
    save(inline_rank(tiny, tmp_path / "store"), tmp_path / "tied", version=0)
    with pytest.raises(CheckpointError, match=r"lm_head.weight, which this model does not have"):
        restore(inline_rank(tiny, tmp_path / "store"), tmp_path / "untied")
    with pytest.raises(CheckpointError, match=r"lacks elements of model/lm_head.weight"):
        restore(inline_rank(untied, tmp_path / "store"), tmp_path / "tied")


def test_a_checkpoint_that_does_not_fit_changes_nothing(tiny: Path, untied: Path, tmp_path: Path) -> None:
    """A larger model's tensors begin like a smaller one's: names alone prove nothing."""
    larger = make_tiny_model(tmp_path / "larger", hidden=64)
    save(inline_rank(larger, tmp_path / "store"), tmp_path / "saved larger", version=0)
    save(inline_rank(tiny, tmp_path / "store"), tmp_path / "saved tied", version=0)
    for model, saved, message in ((tiny, "saved larger", "this model has"), (untied, "saved tied", "lacks elements")):
        rank = inline_rank(model, tmp_path / "store")
        step_on(rank, random_batch(0))
        before = {name: tensor.clone() for name, tensor in rank._tensors().items()}
        with pytest.raises(CheckpointError, match=message):
            restore(rank, tmp_path / saved)
        assert all(torch.equal(before[name], tensor) for name, tensor in rank._tensors().items())


def test_a_checkpoint_is_replaced_only_by_a_whole_one(tiny: Path, tmp_path: Path) -> None:
    rank = inline_rank(tiny, tmp_path / "store")
    save(rank, tmp_path / "saved", version=1)
    checkpoint_store.begin(tmp_path / "saved")
    assert checkpoint_store.verified(tmp_path / "saved").version == 1
    save(rank, tmp_path / "saved", version=2)
    assert checkpoint_store.verified(tmp_path / "saved").version == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved", "store"]


def replace_until(event_number: int, root: Path) -> bool:
    """Replace step 4 by another checkpoint of it, in a child that is ended right before its n-th change; whether it got that far."""
    pid = os.fork()
    if pid == 0:
        events = itertools.count()

        def hook(event: str, arguments: tuple[object, ...]) -> None:
            touched = any(isinstance(path, str | os.PathLike) and str(path).startswith(str(root)) for path in arguments)
            if event.startswith(("open", "os.", "shutil.")) and touched and next(events) == event_number:
                os._exit(9)

        sys.addaudithook(hook)
        commit_empty(root, 4, run_epoch=1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


def commit_empty(root: Path, version: int, *, run_epoch: int) -> None:
    folder = checkpoint_folder(root, version)
    checkpoint_store.begin(folder)
    checkpoint_store.commit(folder, files=[], version=version, updates=version, run_epoch=run_epoch)


def test_a_kill_while_a_checkpoint_is_replaced_leaves_the_old_one_or_the_new_one(tmp_path: Path) -> None:
    epochs = []
    for number in itertools.count():
        root = tmp_path / str(number)
        commit_empty(root, 4, run_epoch=0)
        killed = replace_until(number, root)
        checkpoint_store.tidy(root)
        assert [path.name for path in root.iterdir()] == ["step-00000004"], "nothing else is left"
        epochs.append(checkpoint_store.verified(checkpoint_folder(root, 4)).run_epoch)
        if not killed:
            break
    assert epochs == sorted(epochs)
    assert len(epochs) > 6
    assert (epochs[0], epochs[-1]) == (0, 1)


def test_a_checkpoint_half_deleted_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for version in (2, 4):
        commit_empty(tmp_path, version, run_epoch=0)
    monkeypatch.setattr("shutil.rmtree", lambda *_, **__: None)
    checkpoint_store.remove(checkpoint_folder(tmp_path, 2))
    monkeypatch.undo()
    assert checkpoint_store.newest(tmp_path) == checkpoint_folder(tmp_path, 4)
    checkpoint_store.tidy(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000004"]


def test_what_is_no_checkpoint_is_not_replaced_by_one(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "notes.txt").write_text("months of work")
    for folder in (tmp_path / "results", tmp_path / "results" / "notes.txt"):
        with pytest.raises(CheckpointError, match=r"notes\.txt"):
            checkpoint_store.begin(folder)
    assert (tmp_path / "results" / "notes.txt").read_text() == "months of work"
