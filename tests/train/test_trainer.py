import asyncio
import os
import resource
import subprocess
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import torch

from asyncrl.errors import CheckpointError, ConfigError, RunAborted, StalenessError, WeightSyncError
from asyncrl.paths import RunPaths
from asyncrl.train.trainer import Trainer
from asyncrl.types import Status
from asyncrl.weights import publisher
from asyncrl.weights.config import WeightsConfig
from asyncrl.weights.manifest import Manifest
from asyncrl.weights.store import StoreTransport
from tests.train.train_data import batch_of, random_batch, rollout, sequence


def paths_in(folder: Path) -> RunPaths:
    paths = RunPaths(root=folder / "run", shared=folder / "shared")
    paths.make()
    return paths


def inline(model: Path, folder: Path, use: Callable[[Trainer], Awaitable[None]], *, weights: WeightsConfig | None = None,
           **settings: object) -> None:
    async def main() -> None:
        trainer = Trainer(model, correction="token_tis", **{"learning_rate": 1e-3, "processes": 0, **settings})
        await trainer.start(paths_in(folder), weights=weights)
        try:
            await use(trainer)
        finally:
            await trainer.close()

    asyncio.run(main())


def test_importing_the_trainer_needs_no_torch() -> None:
    code = "import sys, asyncrl.train.trainer; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, cwd=Path(__file__).parents[2]).returncode == 0


def test_steps_and_publications_follow_one_another(tiny: Path, tmp_path: Path) -> None:
    async def use(trainer: Trainer) -> None:
        anchor = await trainer.publish()
        assert (anchor.version, anchor.base, anchor.run_epoch) == (0, None, 0)
        assert await trainer.publish() is anchor
        for version in range(2):
            result = await trainer.step(random_batch(version, version=version))
            assert result.version == trainer.version == version + 1
            assert not result.skipped
            delta = await trainer.publish()
            assert (delta.version, delta.base) == (version + 1, version)
            assert delta.state_hash != anchor.state_hash

    inline(tiny, tmp_path, use)


def test_tokens_of_a_step_are_trained_or_masked(tiny: Path, tmp_path: Path) -> None:
    rollouts = [rollout(0, 0, sequence([2, 3], [4, 5]), reward=1.0), rollout(0, 1, sequence([2, 3], [6]), reward=0.0),
                rollout(0, 2, sequence([2, 3], [7, 7, 7]), status=Status.REWARD_ERROR)]

    async def use(trainer: Trainer) -> None:
        result = await trainer.step(batch_of(*rollouts))
        assert (result.trained_tokens, result.masked_tokens) == (3, 3)
        skipped = await trainer.step(batch_of(*rollouts[2:], version=1))
        assert skipped.skipped
        assert (skipped.version, skipped.trained_tokens, skipped.masked_tokens) == (2, 0, 3)
        assert skipped.metrics.result()["train/skipped_steps/sum"] == 1

    inline(tiny, tmp_path, use)


def test_a_batch_for_another_version_is_refused(tiny: Path, tmp_path: Path) -> None:
    async def use(trainer: Trainer) -> None:
        with pytest.raises(StalenessError, match="trained from version 1, the trainer is at 0"):
            await trainer.step(random_batch(0, version=1))

    inline(tiny, tmp_path, use)


def test_too_many_steps_in_a_row_without_a_finite_gradient_end_the_run(tiny: Path, tmp_path: Path) -> None:
    async def use(trainer: Trainer) -> None:
        norm = trainer._ranks._rank._lm.model.norm.weight
        good = norm[0].item()
        for version, value in enumerate((torch.nan, good, torch.nan)):
            with torch.no_grad():
                norm[0] = value
            result = await trainer.step(random_batch(version, version=version))
            assert result.skipped == (value is torch.nan)
            assert result.metrics.result()["train/nonfinite_steps/sum"] == float(value is torch.nan)
        with pytest.raises(RunAborted, match="max_nonfinite_steps = 2"):
            await trainer.step(random_batch(3, version=3))

    inline(tiny, tmp_path, use, max_nonfinite_steps=2)


def test_score_gives_logprobs_under_the_current_weights_at_the_given_temperature(tiny: Path, tmp_path: Path) -> None:
    sequences = [sequence([2, 3], [4, 5, 6]), sequence([7], [8])]

    async def use(trainer: Trainer) -> None:
        scored = await trainer.score(sequences, temperature=0.5)
        lm = trainer._ranks._rank._lm
        lm.set_attn_implementation("sdpa")
        for given, logprobs in zip(sequences, scored, strict=True):
            tokens = torch.from_numpy(given.tokens).long()
            expected = torch.log_softmax(lm(tokens[None]).logits[0, :-1] / 0.5, -1).gather(1, tokens[1:, None])[:, 0]
            assert logprobs[0] == 0.0
            torch.testing.assert_close(torch.from_numpy(logprobs[1:].copy()), expected.detach(), rtol=0, atol=1e-5)
        assert await trainer.score([]) == []

    inline(tiny, tmp_path, use)


def test_restoring_begins_a_new_epoch_with_an_anchor(tiny: Path, tmp_path: Path) -> None:
    async def use(trainer: Trainer) -> None:
        await trainer.publish()
        await trainer.step(random_batch(0))
        published = await trainer.publish()
        await trainer.save(tmp_path / "saved")
        await trainer.step(random_batch(1, version=1))
        await trainer.publish()
        await trainer.restore(tmp_path / "saved")
        assert trainer.version == 1
        again = await trainer.publish()
        assert (again.version, again.base, again.run_epoch) == (1, None, 1)
        assert again.state_hash == published.state_hash
        with pytest.raises(CheckpointError, match="no whole checkpoint"):
            await trainer.restore(tmp_path / "nowhere")

    inline(tiny, tmp_path, use)


def test_a_full_disk_costs_the_checkpoint_alone(tiny: Path, tmp_path: Path) -> None:
    async def use(trainer: Trainer) -> None:
        await trainer.step(random_batch(0))
        await trainer.save(tmp_path / "saved")
        await trainer.step(random_batch(1, version=1))
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        try:
            with pytest.raises(CheckpointError, match="cannot be written"):
                await trainer.save(tmp_path / "saved")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert sorted(os.listdir(tmp_path)) == ["run", "saved", "shared"]
        assert (await trainer.step(random_batch(2, version=2))).version == 3
        await trainer.restore(tmp_path / "saved")
        assert trainer.version == 1

    inline(tiny, tmp_path, use)


def test_checkpoints_come_at_their_interval_and_the_oldest_go(tiny: Path, tmp_path: Path) -> None:
    async def use(trainer: Trainer) -> None:
        for version in range(7):
            await trainer.step(random_batch(version, version=version))
            if trainer.checkpoint_due:
                await trainer.checkpoint()
        await trainer.settle()
        assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == ["step-00000004", "step-00000006"]
        assert not list((tmp_path / "shared" / "batches").iterdir())
        await trainer.restore(tmp_path / "run" / "checkpoints")
        assert trainer.version == 6

    inline(tiny, tmp_path, use, checkpoint_every_steps=2)


def test_an_anchor_follows_a_publication_that_could_not_be_undone(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "LOG_FRACTION", 0.0)
    commit = StoreTransport.commit

    def failing(store: StoreTransport, manifest: Manifest) -> None:
        if manifest.version == 1:
            raise WeightSyncError("No space left on device")
        commit(store, manifest)

    async def use(trainer: Trainer) -> None:
        await trainer.publish()
        await trainer.step(random_batch(0))
        with pytest.raises(WeightSyncError, match="No space"):
            await trainer.publish()
        await trainer.step(random_batch(1, version=1))
        healed = await trainer.publish()
        assert (healed.version, healed.base) == (2, None)
        await trainer.step(random_batch(2, version=2))
        assert (await trainer.publish()).base == 2

    monkeypatch.setattr(StoreTransport, "commit", failing)
    inline(tiny, tmp_path, use)


def test_anchors_recur_when_asked_for(tiny: Path, tmp_path: Path) -> None:
    async def use(trainer: Trainer) -> None:
        bases = []
        for version in range(4):
            bases.append((await trainer.publish()).base)
            await trainer.step(random_batch(version, version=version))
        assert bases == [None, 0, None, 2]

    inline(tiny, tmp_path, use, weights=WeightsConfig(anchor_every_versions=2))


@pytest.mark.parametrize(("settings", "message"), [
    ({"learnig_rate": 1e-3}, "Did you mean 'learning_rate'"),
    ({"learning_rate": 0.0}, "trainer.learning_rate"),
    ({"learning_rate": 1e-3, "loss": "ppo", "correction": "token_tis"}, "loss.kind, correction.kind"),
    ({"learning_rate": 1e-3, "loss": {"kind": "decoupled_ppo", "aggregation": "dr_grpo"}}, "loss.max_tokens"),
    ({"learning_rate": 1e-3, "processes": 0, "dtype": "bfloat16"}, "trainer.dtype, trainer.processes"),
    ({"learning_rate": 1e-3, "advantages": "gea"}, "Did you mean 'gae'"),
])
def test_settings_that_cannot_work_are_refused_before_anything_starts(settings: dict, message: str, tiny: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        Trainer(tiny, **settings)


def test_a_model_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="model = "):
        Trainer(tmp_path / "nothing", learning_rate=1e-3)
