"""Sections and flips of adapters: three real steps of the trainer must differ, and what an export holds."""

from __future__ import annotations

import asyncio
from typing import Any

from asyncrl.config import RunConfig
from asyncrl.train.trainer import Trainer
from tests import config_observers as see
from tests.config_flips import Flip, flip
from tests.config_observers import Scene

LORA = {"kind": "lora", "rank": 4}


def exported(config: RunConfig, scene: Scene) -> object:
    """The files of an exported model."""
    async def main() -> list[str]:
        trainer = Trainer(scene.model, correction=config.correction, lora=config.lora, **(dict(config.trainer) | {"processes": 0}))
        await trainer.start(scene.paths, weights=config.weights)
        await trainer.export(scene.folder / "exported")
        return sorted(str(path.relative_to(scene.folder)) for path in (scene.folder / "exported").rglob("*"))

    return asyncio.run(main())


SECTIONS: dict[str, Any] = {"lora.lora": LORA}
FLIPS: dict[str, Flip] = {
    "lora.kind": flip(LORA, see.engine_spec), "lora.lora.export_adapters": flip(True, exported),
    **{f"lora.lora.{name}": flip(value, see.trained) for name, value in {
        "rank": 3, "alpha": 8.0, "rslora": True, "targets": ["q_proj"], "seed": 1}.items()}}
ACCEPTED: dict[str, set[str]] = {"zero": {"lora.lora.seed"}}
"""What the numbers of this section take of what `test_config_numbers` tries."""
