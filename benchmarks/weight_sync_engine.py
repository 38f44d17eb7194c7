"""One vLLM in this process and a trainer's model beside it: every way of syncing them in turn. Prints what it measured as JSON.

Run by `benchmarks.weight_sync`, as a process of its own, with one argument: what to measure, as JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn
from transformers import PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from asyncrl.weights.receiver import Receiver, joined
from asyncrl.weights.store import StoreTransport
from asyncrl.weights.torch_pieces import checkpoint_tensors
from benchmarks.weight_sync_encode import copier
from benchmarks.weight_sync_gather import Ranks
from benchmarks.weight_sync_models import CONFIGS, QUICK, State, float32_model, initial_state, load
from benchmarks.weight_sync_sides import (
    Delta,
    Gathered,
    IndexedDelta,
    Way,
    WholeFile,
    by_loading,
    by_reloading,
    routed,
    through_routes,
    through_vllm,
    timed,
)

STEPS = ("publish_s", "fetch_s", "pause_s")


class Engine:
    """vLLM with its one worker in this process."""

    def __init__(self, folder: Path) -> None:
        from vllm import LLM

        self._llm = LLM(str(folder), dtype="bfloat16", enforce_eager=True, max_model_len=128, skip_tokenizer_init=True, seed=0,
                        disable_log_stats=True)

    @property
    def worker(self) -> Any:
        """What holds the model."""
        found = self._llm.collective_rpc(lambda worker: worker)
        return found[0]

    def places(self) -> list[int]:
        """Where its parameters lie."""
        return [parameter.data_ptr() for parameter in self.worker.model_runner.get_model().parameters()]

    def in_pause(self, way: Way) -> float:
        """Seconds in which it cannot sample: between two engine steps the update, then its prefix cache is emptied."""
        def update() -> None:
            self._llm.collective_rpc(lambda worker: way.apply())
            self._llm.reset_prefix_cache()

        return timed(update)


def ways_of(trained: nn.Module, engine: Engine, *, root: Path, ranks: Ranks, threads: int) -> dict[str, Way]:
    """Ours first: what the others write afterwards is what memory holds already, which costs them the same."""
    worker, store = engine.worker, StoreTransport(root / "store")
    model: nn.Module = worker.model_runner.get_model()
    targets = routed(model, folder=root / "base")
    shapes = {name: tuple(tensor.shape) for name, tensor in checkpoint_tensors(trained).items()}
    return {"delta": Delta(trained, Receiver(targets, source=store), store=store, threads=threads),
            "int32": IndexedDelta(trained, file=root / "int32.safetensors", write=through_routes(targets)),
            "vllm_sparse": IndexedDelta(trained, file=root / "sparse.safetensors", write=through_vllm(model, shapes)),
            "load": WholeFile(trained, file=root / "load" / "model.safetensors", read=by_loading(model)),
            "reload": WholeFile(trained, file=root / "reload" / "model.safetensors", read=by_reloading(worker)),
            "gather": Gathered(ranks, file=root / "gather" / "model.safetensors", read=by_reloading(worker))}


def once(way: Way, engine: Engine) -> dict[str, float]:
    """One sync, step by step."""
    sent: list[int] = []
    way.prepare()
    publish_s = timed(lambda: sent.append(way.publish()))
    return {"publish_s": publish_s, "fetch_s": timed(way.fetch), "pause_s": engine.in_pause(way), "sent_bytes": sent[0]}


def measured(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Of one model, by density."""
    torch.set_num_threads(spec["threads"])
    root, config = Path(spec["root"]), (CONFIGS | QUICK)[spec["model"]]()
    state = initial_state(config)
    trained = float32_model(config, state)
    for folder in ("base", "load", "reload", "gather"):
        make_folder(state, config, root / folder)
    engine = Engine(root / "base")
    torch.set_num_threads(spec["threads"])  # vLLM has a number of its own
    places, copy_once, here, rows = engine.places(), copier(state), state, []
    source, target = (root / folder / "model.safetensors" for folder in ("load", "gather"))
    with Ranks(spec["model"], folder=root, source=source, target=target) as ranks:
        ways = ways_of(trained, engine, root=root, ranks=ranks, threads=spec["threads"])
        for density in spec["densities"]:
            row, here = at_density(density, trained=trained, here=here, ways=ways, engine=engine, copy_once=copy_once,
                                   rounds=spec["rounds"])
            rows.append(row)
    delta: Any = ways["delta"]
    if engine.places() != places or joined([delta.receiver.audit()]) != delta.manifest.state_hash:
        raise SystemExit("the engine does not hold what was published")
    return {"elements": state.elements, "published_bytes": state.nbytes, "torch_threads": torch.get_num_threads(), "densities": rows}


def at_density(density: float, *, trained: nn.Module, here: State, ways: Mapping[str, Way], engine: Engine, copy_once: Any,
               rounds: int) -> tuple[dict[str, Any], State]:
    """Medians over rounds, each of which goes to the other of two states; and the state that is reached."""
    there = here.changed(density)
    turns: dict[str, list[dict[str, float]]] = {name: [] for name in ways}
    copies = []
    for number in range(rounds + 1):
        here, there = there, here
        load(trained, here)
        turn = {name: once(way, engine) for name, way in ways.items()}
        copied = copy_once()
        if number:  # the first warms up
            copies.append(copied)
            for name, found in turn.items():
                turns[name].append(found)
    row = {"density": here.density_to(there), "asked": density, "copy_s": min(copies),
           "ways": {name: summary(found) for name, found in turns.items()}}
    return row | {"ratios": ratios(row["ways"])}, here


def summary(turns: list[dict[str, float]]) -> dict[str, Any]:
    """The least of each step and their sum, and all rounds."""
    least = {step: min(turn[step] for turn in turns) for step in STEPS}
    total_s = sum(least.values())
    return {"total_s": total_s, **least, "pause_share": least["pause_s"] / total_s, "sent_bytes": turns[-1]["sent_bytes"],
            "median_s": statistics.median(sum(turn[step] for step in STEPS) for turn in turns), "rounds": turns}


def ratios(ways: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Times that ours is faster: the whole sync, what an engine has to do of it, and what it does in the pause."""
    parts = {"whole": STEPS, "engine": STEPS[1:], "pause": STEPS[2:]}
    return {f"{name}_{part}": sum(way[step] for step in steps) / sum(ways["delta"][step] for step in steps)
            for name, way in ways.items() if name != "delta" for part, steps in parts.items()}


def make_folder(state: State, config: PretrainedConfig, folder: Path) -> None:
    """What the engine loads."""
    config.architectures, config.dtype = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]], torch.bfloat16
    config.save_pretrained(folder)
    shapes = {piece.name: piece.shape for piece in state.pieces}
    save_file({name: tensor.view(shapes[name]) for name, tensor in state.tensors().items()}, folder / "model.safetensors", {"format": "pt"})


if __name__ == "__main__":
    print("\n" + json.dumps(measured(json.loads(sys.argv[1]))))
