"""Adapters in the trainer: what is trained, saved, published and exported of a policy that has them."""

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from asyncrl.channel import Request
from asyncrl.errors import CheckpointError, ConfigError
from asyncrl.paths import RunPaths
from asyncrl.train import checkpoint_store
from asyncrl.train.batch import pack
from asyncrl.train.checkpoint_store import SavedFile
from asyncrl.train.lora import Merged, adapters_off, base_digest
from asyncrl.train.model import Policy, load_policy
from asyncrl.train.rank import RankTrainer
from asyncrl.train.trainer import Trainer
from asyncrl.weights.config import WeightsConfig
from asyncrl.weights.publisher import Publisher
from asyncrl.weights.torch_pieces import checkpoint_tensors
from tests.tiny_model import make_tiny_model
from tests.train.test_policy import packed_logprobs
from tests.train.test_recovery import Fate, with_mortal_rank
from tests.train.train_data import inline_rank, random_batch, sequence, step_on, weights

LORA = {"kind": "lora", "rank": 4}
TOKENS = torch.arange(2, 14)[None]


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_the_digest_of_a_model_is_that_of_whatever_files_hold_its_weights(suffix: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no weight files"):
        base_digest(tmp_path)
    file, digests = tmp_path / f"model.{suffix}", set()
    for content in (b"one", b"other"):
        file.write_bytes(content)
        digests.add(base_digest(tmp_path))
    assert len(digests) == 2


def lora_rank(model: Path, folder: Path, *, lora: dict[str, Any] = LORA, **settings: object) -> RankTrainer:
    return inline_rank(model, folder, lora=lora, **settings)


def trained_rank(model: Path, folder: Path, **settings: Any) -> RankTrainer:
    rank = lora_rank(model, folder, **settings)
    for number in range(3):
        step_on(rank, random_batch(number))
    return rank


def with_trainer(model: Path, folder: Path, use: Callable[[Trainer], Awaitable[None]], *, lora: object = LORA, **settings: Any) -> None:
    async def main() -> None:
        paths = RunPaths(root=folder / "run", shared=folder / "shared")
        paths.make()
        trainer = Trainer(model, correction="token_tis", lora=lora, **{"learning_rate": 1e-2, "processes": 0, **settings})
        await trainer.start(paths, weights=WeightsConfig(dtype="float32"))
        try:
            await use(trainer)
        finally:
            await trainer.close()

    asyncio.run(main())


def logprobs_of(policy: Policy) -> torch.Tensor:
    with torch.no_grad():
        return packed_logprobs(policy, pack(random_batch(11)))


@torch.no_grad()
def logits(lm: torch.nn.Module) -> torch.Tensor:
    return lm(TOKENS, use_cache=False).logits


def logits_of(rank: RankTrainer) -> torch.Tensor:
    rank._lm.set_attn_implementation("eager")
    return logits(rank._lm)


def of_adapters(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if ".lora_" in name}


@pytest.mark.parametrize("rslora", [False, True])
def test_adapters_alone_are_trained(tiny: Path, tmp_path: Path, rslora: bool) -> None:
    rank = lora_rank(tiny, tmp_path, lora=LORA | {"rslora": rslora})
    before = weights(rank)
    step_on(rank, random_batch(0))
    after = weights(rank)
    moved = {name for name, tensor in after.items() if not torch.equal(tensor, before[name])}
    # B begins at 0, so that the first gradient of A is 0
    assert moved == {name for name in after if ".lora_B." in name}
    assert len(moved) == 2 * 7
    step_on(rank, random_batch(1))
    assert all(not torch.equal(tensor, before[name]) for name, tensor in of_adapters(weights(rank)).items())
    assert {name.partition("/")[2] for name in rank._trainee.optimizer.moments()} == set(of_adapters(after))


def test_the_policy_is_the_model_until_a_step(tiny: Path, tmp_path: Path) -> None:
    rank, plain = lora_rank(tiny, tmp_path), load_policy(tiny)
    torch.testing.assert_close(logprobs_of(rank._trainee.policy), logprobs_of(plain), rtol=0, atol=0)


def test_without_adapters_the_policy_is_the_model_bit_for_bit(tiny: Path, tmp_path: Path) -> None:
    rank, plain = trained_rank(tiny, tmp_path), load_policy(tiny)
    policy = rank._trainee.policy
    on = logprobs_of(policy)
    with adapters_off(policy):
        off = logprobs_of(policy)
    assert torch.equal(off, logprobs_of(plain))
    assert not torch.allclose(on, off, atol=1e-3)
    assert torch.equal(logprobs_of(policy), on)
    before = weights(rank)
    step_on(rank, random_batch(4))
    assert all(not torch.equal(tensor, before[name]) for name, tensor in of_adapters(weights(rank)).items())


def test_a_policy_without_adapters_stays_itself_with_them_off(tiny: Path) -> None:
    policy = load_policy(tiny)
    before = logprobs_of(policy)
    with adapters_off(policy):
        assert torch.equal(logprobs_of(policy), before)


@pytest.mark.parametrize("lora", [LORA, {"kind": "lora", "rank": 3, "alpha": 5.0, "rslora": True, "targets": ["q_proj", r"mlp\..*"]}])
def test_merged_weights_give_the_same_logits(tiny: Path, tmp_path: Path, lora: dict[str, Any]) -> None:
    rank = trained_rank(tiny, tmp_path, lora=lora)
    rank.export(Request("export", body={"folder": str(tmp_path / "merged")}))
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    ours = logits_of(rank)
    torch.testing.assert_close(logits(merged), ours, rtol=0, atol=1e-5)
    assert set(Merged(rank._lm).tensors) == set(load_file(tmp_path / "merged" / "model.safetensors"))
    assert not torch.allclose(logits(AutoModelForCausalLM.from_pretrained(tiny)), ours, atol=1e-2)


def test_peft_reads_exported_adapters(tiny: Path, tmp_path: Path) -> None:
    rank = trained_rank(tiny, tmp_path, lora=LORA | {"rslora": True, "alpha": 6.0})
    rank.export_adapters(Request("export_adapters", body={"folder": str(tmp_path / "adapter")}))
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny), tmp_path / "adapter")
    torch.testing.assert_close(logits(theirs), logits_of(rank), rtol=0, atol=1e-5)
    assert (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size < (tiny / "model.safetensors").stat().st_size


def test_an_export_has_adapters_beside_it_where_they_are_asked_for(tiny: Path, tmp_path: Path) -> None:
    async def use(trainer: Trainer) -> None:
        await trainer.export(tmp_path / "model")

    for asked in (False, True):
        with_trainer(tiny, tmp_path, use, lora=LORA | {"export_adapters": asked})
        assert (tmp_path / "model" / "adapter").exists() == asked
    AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny), tmp_path / "model" / "adapter")


def test_adapters_are_exported_where_there_are_some(tiny: Path, tmp_path: Path) -> None:
    async def use(trainer: Trainer) -> None:
        with pytest.raises(ConfigError, match=r"lora\.kind"):
            await trainer.export_adapters(tmp_path / "adapter")

    with_trainer(tiny, tmp_path, use, lora="none")


def test_a_delta_holds_adapters_alone_and_costs_what_they_do(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", hidden=64, layers=4, vocab=512)

    async def use(trainer: Trainer) -> None:
        anchor = await trainer.publish()
        await trainer.step(random_batch(0))
        delta = await trainer.publish()
        assert {entry.name for entry in delta.tensors} == {entry.name for entry in anchor.tensors if ".lora_" in entry.name}
        assert {entry.name for entry in anchor.tensors if ".lora_" not in entry.name} == set(load_file(model / "model.safetensors"))
        assert delta.payload_bytes < anchor.payload_bytes / 10, (delta.payload_bytes, anchor.payload_bytes)
        publisher = trainer._ranks._rank._publisher
        assert publisher.snapshot_bytes < anchor.payload_bytes / 10

    with_trainer(model, tmp_path, use, lora={"kind": "lora", "rank": 1})


def test_the_frozen_model_is_read_for_anchors_alone(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    publish = Publisher.publish
    monkeypatch.setattr(Publisher, "publish", lambda publisher, bits, **version: read.append(len(bits.pieces)) or publish(
        publisher, bits, **version))

    async def use(trainer: Trainer) -> None:
        await trainer.publish()
        await trainer.step(random_batch(0))
        await trainer.publish()
        assert read == [len(checkpoint_tensors(trainer._ranks._rank._lm)), 2 * 2 * 7]

    with_trainer(tiny, tmp_path, use)


def test_a_checkpoint_holds_adapters_and_their_optimizer_alone(tiny: Path, tmp_path: Path) -> None:
    rank = trained_rank(tiny, tmp_path / "store")
    after = save(rank, tmp_path / "step-00000003")
    held = {name for file in after.glob("*.safetensors") for name in load_file(file)}
    assert {name.partition("/")[0] for name in held} == {"model", "exp_avg", "exp_avg_sq"}
    assert all(".lora_" in name for name in held)
    again = lora_rank(tiny, tmp_path / "store", lora=LORA | {"seed": 9})
    restore(again, after)
    assert all(torch.equal(tensor, weights(rank)[name]) for name, tensor in weights(again).items())
    step_on(again, random_batch(7))
    step_on(rank, random_batch(7))
    assert all(torch.equal(tensor, weights(rank)[name]) for name, tensor in weights(again).items())


def test_adapters_go_back_on_the_model_they_were_trained_on_alone(tiny: Path, tmp_path: Path) -> None:
    after = save(lora_rank(tiny, tmp_path / "store"), tmp_path / "step-00000000")
    other = make_tiny_model(tmp_path / "other", seed=5)
    with pytest.raises(CheckpointError, match="trained on other weights"):
        restore(lora_rank(other, tmp_path / "store"), after)
    moved = shutil.copytree(tiny, tmp_path / "moved")
    restore(lora_rank(moved, tmp_path / "store"), after)
    with pytest.raises(CheckpointError, match=r"holds .*lora_.* which this model does not have"):
        restore(inline_rank(tiny, tmp_path / "store"), after)
    whole = save(inline_rank(tiny, tmp_path / "store"), tmp_path / "step-00000001")
    with pytest.raises(CheckpointError, match="saved without lora"):
        restore(lora_rank(tiny, tmp_path / "store"), whole)


def save(rank: RankTrainer, folder: Path) -> Path:
    place = checkpoint_store.begin(folder)
    reply = rank.save(Request("save", body={"folder": str(place)}))
    files = [SavedFile(**file) for file in rank.saved(Request("saved", body={"wait": True}))["files"]]
    checkpoint_store.commit(folder, files=files, version=0, updates=reply["updates"], run_epoch=0, model=reply["model"])
    return folder


def restore(rank: RankTrainer, folder: Path) -> None:
    manifest = checkpoint_store.verified(folder)
    rank.restore(Request("restore", body={"folder": str(folder), "updates": manifest.updates, "model": manifest.model}))


async def _run(trainer: Trainer) -> tuple[Any, ...]:
    """Four steps, published and saved on the way."""
    manifests = [await trainer.publish()]
    for version in range(4):
        await trainer.step(random_batch(version, version=version))
        manifests.append(await trainer.publish())
        if version == 1:
            await trainer.checkpoint()
            await trainer.settle()
    logprobs = await trainer.score([sequence([3, 4], [5, 6, 7])])
    return [manifest.state_hash for manifest in manifests], [manifest.base for manifest in manifests], logprobs[0].tolist()


@pytest.mark.parametrize("death", [{3: "before"}, {8: "after"}, {10: "before"}, {12: "before"}])
def test_a_dead_rank_costs_no_bit(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, death: dict[int, str]) -> None:
    undisturbed = with_mortal_rank(tiny, tmp_path / "one", Fate(), _run, monkeypatch, lora=LORA)
    fate = Fate(death)
    assert with_mortal_rank(tiny, tmp_path / "two", fate, _run, monkeypatch, lora=LORA) == undisturbed
    assert fate.starts == 2


@pytest.mark.parametrize("layers", ["selective", "full"])
def test_activations_may_be_computed_again(tiny: Path, tmp_path: Path, layers: str) -> None:
    """A frozen embedding gives the first layer an input without a gradient, over which some checkpointing loses those of the adapters."""
    kept, computed = lora_rank(tiny, tmp_path), lora_rank(tiny, tmp_path, activation_checkpointing=layers)
    for rank in (kept, computed):
        for number in range(2):
            step_on(rank, random_batch(number))
    before = weights(lora_rank(tiny, tmp_path))
    for name, tensor in weights(computed).items():
        torch.testing.assert_close(tensor, weights(kept)[name], rtol=0, atol=1e-5)
        assert torch.equal(tensor, before[name]) == (".lora_" not in name)


@pytest.mark.parametrize(("targets", "match"), [
    (["lm_head"], "It matches lm_head"), ([".*"], "It matches model.embed_tokens"), (["embed_tokens"], "It matches model.embed_tokens"),
    (["c_attn"], "what matches a linear layer"), (["mlp"], "what matches a linear layer"), (["q{99999999999}"], "repetition number")])
def test_targets_that_cannot_have_adapters_are_refused(untied: Path, tmp_path: Path, targets: list[str], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        lora_rank(untied, tmp_path, lora=LORA | {"targets": targets})


@pytest.mark.parametrize(("targets", "layers"), [
    (["all_linear"], 2 * 7), (["q_proj", "v_proj"], 2 * 2), ([r"layers\.1\..*"], 7), ([r"model\.layers\.0\.mlp\.(gate|up)_proj"], 2),
    (["proj"], None)])
def test_targets_name_the_end_of_a_layers_name(tiny: Path, tmp_path: Path, targets: list[str], layers: int | None) -> None:
    if layers is None:
        with pytest.raises(ConfigError, match="what matches a linear layer"):
            lora_rank(tiny, tmp_path, lora=LORA | {"targets": targets})
    else:
        assert len(of_adapters(weights(lora_rank(tiny, tmp_path, lora=LORA | {"targets": targets})))) == 2 * layers


def test_the_first_policy_depends_on_the_seed_alone(tiny: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    one = weights(lora_rank(tiny, tmp_path))
    drawn = torch.rand(3)
    torch.manual_seed(1)
    two = weights(lora_rank(tiny, tmp_path))
    assert torch.equal(torch.rand(3), drawn)
    assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())
    other = weights(lora_rank(tiny, tmp_path, lora=LORA | {"seed": 1}))
    assert all(torch.equal(tensor, one[name]) == (".lora_A." not in name) for name, tensor in other.items())


def test_adapters_off_are_the_reference_and_cost_no_copy(tiny: Path, tmp_path: Path) -> None:
    pull = {"kind": "in_loss", "coefficient": 0.1}
    rank = lora_rank(tiny, tmp_path, reference=pull)
    assert rank._trainee.reference.policy is rank._trainee.policy
    first, second = (step_on(rank, random_batch(number)).metrics.result() for number in range(2))
    assert first["reference/kl_k3/mean"] == 0.0
    assert second["reference/kl_k3/mean"] > 0.0
    whole, merged = inline_rank(tiny, tmp_path, reference=pull), Merged(rank._lm)
    whole._lm.load_state_dict({name: merged.whole(name) for name in merged.tensors}, strict=False)
    theirs, ours = (step_on(each, random_batch(5)).metrics.result() for each in (whole, rank))
    assert ours["reference/kl_k3/mean"] == pytest.approx(theirs["reference/kl_k3/mean"], rel=1e-3)


def test_a_frozen_list_beside_adapters_is_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.frozen, lora\.kind"):
        lora_rank(tiny, tmp_path, frozen=["embed"])
