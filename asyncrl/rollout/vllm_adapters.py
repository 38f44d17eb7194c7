"""The adapters that vLLM serves: those of one version at a time, under a name that no other version has."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl.errors import WeightSyncError


class ServedAdapters:
    """Loads the adapters that the worker wrote for a version, and names them in requests.

    vLLM finds keys and values again by the adapters' name, so an old name would find old ones; and a request keeps the adapters it began
    with. Those of the version before go when the next ones come: by then no request is left that may run with them.

    Args:
        engine: vLLM's AsyncLLM.
        make: its LoRARequest.
        folder: where the worker writes; goes with the run.
    """

    def __init__(self, engine: Any, *, make: Callable[..., Any], folder: Path) -> None:
        self._engine, self._make, self._folder = engine, make, folder
        self._numbers = itertools.count(1)
        self.request: Any = None
        """What a request that begins now is to carry."""

    def folder_of(self, label: str) -> str:
        """Where the worker is to write the adapters of a version."""
        return str(self._folder / label)

    async def change(self, label: str) -> None:
        """Serve the adapters that lie in the version's folder, and no other. Raises WeightSyncError; then none are served."""
        before, self.request = self.request, None
        if before is not None:
            await self._engine.remove_lora(before.lora_int_id)
        request = self._make(lora_name=label, lora_int_id=next(self._numbers), lora_path=self.folder_of(label))
        try:
            added = await self._engine.add_lora(request)
        except Exception as error:  # whatever vLLM raises of its own over a request between processes
            raise WeightSyncError(f"vLLM did not take the adapters of version {label}: {error}") from error
        if not added:
            raise WeightSyncError(f"vLLM did not take the adapters of version {label}")
        self.request = request
        if before is not None:
            shutil.rmtree(before.lora_path, ignore_errors=True)
