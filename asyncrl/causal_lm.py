"""A causal LM in memory, every weight of it from the folder's files: for engines, trainer and warm-up alike."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging

from asyncrl.errors import ConfigError
from asyncrl.model_folder import reading


def load_causal_lm(folder: Path, *, dtype: torch.dtype, attention: str | None = None) -> PreTrainedModel:
    """The model of a Hugging Face folder on the CPU, in evaluation mode, every parameter cast to `dtype`.

    Raises ConfigError for files that are damaged, do not fit config.json, or lack a weight, and for weights that are not finite.
    """
    with reading(folder), _without_progress_bars():
        model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention, output_loading_info=True,
                                                           ignore_mismatched_sizes=True)
    # transformers fills these at random and warns in a log.
    if missing := sorted(info["missing_keys"]):
        raise _refused(folder, f"{len(missing)} of the model's weights are not in its files, such as {missing[0]}.")
    if misfits := sorted(info["mismatched_keys"]):
        name, found, wanted = misfits[0]
        raise _refused(folder, f"{len(misfits)} weights do not fit config.json, such as {name}: "
                               f"{tuple(found)} in the file, {tuple(wanted)} wanted.")
    broken = [name for name, parameter in model.named_parameters() if not torch.isfinite(parameter).all()]
    if broken:
        raise _refused(folder, f"{len(broken)} weights hold NaN or infinity, such as {broken[0]}.")
    return model.eval()


@contextlib.contextmanager
def _without_progress_bars() -> Iterator[None]:
    """transformers draws them on the caller's terminal, amid the run's own lines."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _refused(folder: Path, remedy: str) -> ConfigError:
    return ConfigError("model", value=str(folder), allowed="a folder with every weight of the model, all finite", remedy=remedy)
