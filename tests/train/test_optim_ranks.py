"""The optimizer on two FSDP2 ranks: moments that lie elsewhere, parameters that lie still, what one rank makes of the checkpoint."""


from pathlib import Path

import pytest
import torch

from asyncrl.channel import Request
from asyncrl.train import checkpoint_store
from asyncrl.train.trainer import Trainer
from tests.train.test_checkpoint import restore
from tests.train.test_ranks import whole_tensors, with_ranks
from tests.train.train_data import inline_rank, random_batch, step_on

SETTINGS = {"frozen": [r"layers\.0\."], "learning_rate_groups": [{"match": "embed|lm_head", "factor": 0.5}], "weight_decay": 0.1,
            "learning_rate_scale": {"kind": "ess", "reference_updates": 1}}


@pytest.mark.slow
def test_offloaded_on_two_ranks_gives_the_bits_of_not_offloaded_and_one_rank_goes_on_from_it(tiny: Path, tmp_path: Path) -> None:
    shown: list[dict[str, float]] = []

    def use(name: str) -> object:
        async def train(trainer: Trainer) -> None:
            for version in range(2):
                result = await trainer.step(random_batch(version, version=version))
            shown.append(result.metrics.result())
            await trainer.save(tmp_path / name)
            await trainer.export(tmp_path / f"exported-{name}", dtype="bfloat16", max_shard_bytes=6_000)

        return train

    for offload in (False, True):
        with_ranks(tiny, tmp_path / str(offload), use(f"offload-{offload}"), processes=2, offload_optimizer=offload, **SETTINGS)
    kept, offloaded = (whole_tensors(tmp_path / f"offload-{offload}") for offload in (False, True))
    assert kept.keys() == offloaded.keys()
    assert all(torch.equal(kept[name], offloaded[name]) for name in kept)
    assert not any("layers.0." in name and name.startswith("exp_avg") for name in kept)
    assert kept["learning_rate_scale/measured"][1] == 1

    alone = inline_rank(tiny, tmp_path / "store", offload_optimizer=True, **SETTINGS)
    metrics = [step_on(alone, random_batch(version, version=version)).metrics.result() for version in range(2)]
    assert shown[0]["train/learning_rate_scale/last"] == pytest.approx(metrics[1]["train/learning_rate_scale/last"], rel=1e-3)
    assert restore(alone, tmp_path / "offload-True").updates == 2
    assert all(torch.equal(offloaded[name], tensor.detach().view(-1)) for name, tensor in alone._tensors().items())
    assert checkpoint_store.verified(tmp_path / "offload-True").version == 2
    alone.export(Request("export", body={"folder": str(tmp_path / "alone"), "form": {"dtype": "bfloat16", "max_shard_bytes": 6_000}}))
    files = {file.name: file.read_bytes() for file in (tmp_path / "alone").iterdir()}
    assert {file.name: file.read_bytes() for file in (tmp_path / "exported-offload-True").iterdir()} == files
    assert len(files) > 5
