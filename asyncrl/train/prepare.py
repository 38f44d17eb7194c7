"""Makes the model folder a run starts from, in a child: the model function, then the warm-up, cached by what they depend on."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl.errors import ConfigError, RunAborted
from asyncrl.functions import load_function, source_file
from asyncrl.train.prepare_config import CrossEntropyWarmUp, ModelConfig, ModelFolder, ModelFunction, NoWarmUp, WarmUpConfig
from asyncrl.train.sft import SFTTrainer

_MADE_BY = ("prepare.py", "sft.py", "sft_step.py", "examples.py", "optim.py")
"""Files beside this one that decide what a warm-up gives."""


def cache_key(model: ModelConfig, warm_up: WarmUpConfig) -> str:
    """Changes with every setting, the source the named functions are in, the files of a model folder, and the code that trains."""
    digest = hashlib.sha256(b"".join((Path(__file__).parent / name).read_bytes() for name in _MADE_BY))
    for section in (model, warm_up):
        digest.update(section.model_dump_json().encode())
        for name in ("function", "examples", "held_out"):
            source = source_file(getattr(section, name, ""))
            digest.update(source.read_bytes() if source else b"")
    if isinstance(model, ModelFolder):
        for path in sorted(Path(model.path).rglob("*")):
            stat = path.stat()
            digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}".encode())
    return digest.hexdigest()[:16]


def serve(channel: Any, spec: dict[str, Any]) -> None:
    """Child entry: spec holds `model`, `warm_up` and `folder`; streams what is under way as `told`, then what was done."""
    from pydantic import TypeAdapter

    from asyncrl.channel import serve_calls

    model = TypeAdapter(ModelConfig).validate_python(spec["model"])
    warm_up = TypeAdapter(WarmUpConfig).validate_python(spec["warm_up"])

    def answer(request: Any) -> dict[str, float]:
        def tell(text: str) -> None:
            print(text)  # into the log, where those look who watch from outside
            channel.reply(request.id, {"told": text}, last=False)

        return prepare(model, warm_up, folder=Path(spec["folder"]), tell=tell)

    channel.ready({})
    serve_calls(channel, {"prepare": answer})


def prepare(model: ModelConfig, warm_up: WarmUpConfig, *, folder: Path, tell: Callable[[str], None] = print) -> dict[str, float]:
    """Write the prepared model to `folder` (appears whole or not at all). Returns steps, accuracy and loss of the warm-up.

    `tell` gets a line at every check of the warm-up.

    Where another run has finished the same folder meanwhile, that one stays. Raises ConfigError for a missing model or examples that
    end, RunAborted when the accuracy is not reached.
    """
    building = building_folder(folder, pid=os.getpid())
    shutil.rmtree(building, ignore_errors=True)
    building.mkdir(parents=True)
    try:
        if isinstance(model, ModelFunction):
            load_function(model.function, field="model.function")(building, **model.arguments)
        elif Path(model.path).is_dir():
            shutil.copytree(model.path, building, dirs_exist_ok=True)
        else:
            raise ConfigError("model.path", value=model.path, allowed="an existing Hugging Face model folder",
                              remedy="Download the model first; a recipe's paths are looked for beside it, then in the working folder.")
        report = {} if isinstance(warm_up, NoWarmUp) else _warm_up(building, warm_up, tell=tell)
        folder.with_suffix(".json").write_text(json.dumps(report))
        _publish(building, folder)
    finally:
        shutil.rmtree(building, ignore_errors=True)
    return report


def building_folder(folder: Path, *, pid: int) -> Path:
    """Where process `pid` builds `folder`. Whoever kills it removes this one: a killed process cannot."""
    return folder.with_name(f"{folder.name}.{pid}")


def _publish(building: Path, folder: Path) -> None:
    try:
        os.replace(building, folder)
    except OSError:
        if not folder.is_dir():
            raise


def _warm_up(folder: Path, config: CrossEntropyWarmUp, *, tell: Callable[[str], None]) -> dict[str, float]:
    given = {"seed": config.seed, **config.arguments}
    examples = iter(load_function(config.examples, field="warm_up.examples")(**given))
    held_out = list(load_function(config.held_out, field="warm_up.held_out")(**given))
    try:
        trainer = SFTTrainer(folder, examples, held_out=held_out, batch_size=config.batch_size, max_steps=config.max_steps, processes=0,
                             threads=config.threads, learning_rate=config.learning_rate, betas=config.betas,
                             schedule={"kind": "constant", "warm_up_steps": config.ramp_steps})
        return asyncio.run(_until_accurate(trainer, config, folder=folder, tell=tell))
    except ConfigError as error:
        if error.field.split()[0] in ("examples", "held_out"):
            raise error.moved(error.field, f"warm_up.{error.field}") from error
        raise


async def _until_accurate(trainer: SFTTrainer, config: CrossEntropyWarmUp, *, folder: Path,
                          tell: Callable[[str], None]) -> dict[str, float]:
    accuracy = 0.0
    try:
        await trainer.start(folder)
        async for step in trainer.steps():
            if step.index % config.check_every_steps == 0 or step.index == config.max_steps:
                accuracy = (await trainer.evaluate()).accuracy
                tell(f"warm-up step {step.index}: accuracy {accuracy:.3f} of {config.until_accuracy:g}, loss {step.loss:.3f}")
                if accuracy >= config.until_accuracy:
                    await trainer.export(folder, dtype="float32")
                    return {"steps": step.index, "accuracy": accuracy, "loss": step.loss}
    finally:
        await trainer.close()
    raise RunAborted(f"warm_up.until_accuracy = {config.until_accuracy} was not reached in max_steps = {config.max_steps} "
                     f"(reached {accuracy:.3f}): raise max_steps, or ask for less")
