"""`asyncrl correction list`, `explain PRESET` and `try PRESET RUN_OR_NPZ`. torch is imported by the last alone."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from asyncrl.correction.presets import preset
from asyncrl.correction_cli.catalogue import preset_page, preset_table
from asyncrl.correction_cli.tables import aligned
from asyncrl.errors import ConfigError
from asyncrl.observe.figures import MISSING, count, number, percent
from asyncrl.observe.watch import find_run
from asyncrl.paths import recorded_batches

if TYPE_CHECKING:
    from asyncrl.correction.batch import CorrectionBatch
    from asyncrl.correction_cli.trial import Share, Trial

_PICTURES = (".png", ".svg", ".pdf")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The three actions; `options.act` gives the text of the chosen one."""
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    everything = actions.add_parser("list", help="all presets: weight, what is kept, loss, origin")
    everything.set_defaults(act=lambda options: preset_table())
    explain = actions.add_parser("explain", help="one preset: formula, loss, paper, origin, departures, evidence")
    explain.add_argument("preset", metavar="PRESET")
    explain.set_defaults(act=lambda options: preset_page(preset(options.preset)))
    attempt = actions.add_parser("try", help="what a preset would truncate, mask and reject of recorded batches, without training")
    attempt.add_argument("preset", metavar="PRESET")
    attempt.add_argument("data", metavar="RUN_OR_NPZ", help="a run with recorded batches, or an .npz with the arrays of a CorrectionBatch")
    attempt.add_argument("--plot", metavar="FILE", help=f"draw it: {', '.join(_PICTURES)}")
    attempt.add_argument("--json", action="store_true", help="the numbers as JSON")
    attempt.set_defaults(act=_try)


def _try(options: argparse.Namespace) -> str:
    known, files, picture = preset(options.preset), _files(options.data), _picture(options.plot)
    from asyncrl.correction_cli.trial import attempt

    trial = attempt([_batch(file) for file in files], known)
    if not trial.whole.tokens:
        raise ConfigError("RUN_OR_NPZ", value=options.data, allowed="batches with loss tokens", remedy="loss_mask is False everywhere.")
    if picture is not None:
        _draw(picture, trial, title=f"{known.name} on {options.data}")
    if options.json:
        return json.dumps(_tree(trial, preset_name=known.name, files=files), indent=2, allow_nan=False)
    return _text(trial, name=known.name)


def _files(data: str) -> list[Path]:
    """The file, or what a run has recorded, oldest first."""
    if os.path.isfile(data):
        return [Path(data)]
    if Path(data).suffix == ".npz":
        raise ConfigError("RUN_OR_NPZ", value=data, allowed="an .npz file that is there, or a run", remedy="Check the path.")
    folder = find_run(data)
    files = recorded_batches(folder)
    if not files:
        raise ConfigError("RUN_OR_NPZ", value=data, allowed="a run that recorded batches",
                          remedy=f"Nothing lies in {folder / 'corrections'}: train with trainer.record_batches_every_steps=10, say.")
    return files


def _batch(file: Path) -> CorrectionBatch:
    """A recorded batch that figures can be made of."""
    from asyncrl.correction_cli.trial import has_finite_sums
    from asyncrl.train.recorded import load_recorded

    batch = load_recorded(file)
    if not has_finite_sums(batch):
        raise ConfigError("NPZ", value=str(file), allowed="logprobs whose log ratios add up to a finite number in their dtype",
                          remedy="No model gives logprobs of this size: look at how rollout_logprobs and proximal_logprobs were written.")
    return batch


def _picture(place: str | None) -> Path | None:
    """Where to draw, tried before anything is computed. Only opening tells: a folder may refuse files that its mode allows."""
    if place is None:
        return None
    if os.path.splitext(place)[1] not in _PICTURES:
        raise _no_picture(place, f"Choose a name such as trial{_PICTURES[0]}")
    if os.path.exists(place) and not os.path.isfile(place):
        raise _no_picture(place, "Something else than a file is there")
    target = os.path.realpath(place)
    there = os.path.exists(target)
    try:
        with open(target, "ab"):
            pass
        if not there:
            os.unlink(target)
    except OSError as error:
        raise _no_picture(place, error.strerror or str(error)) from error
    return Path(place)


def _draw(path: Path, trial: Trial, *, title: str) -> None:
    from asyncrl.correction_cli.picture import plot_trial

    try:
        plot_trial(path, trial, title=title)
    except OSError as error:
        raise _no_picture(str(path), error.strerror or str(error)) from error


def _no_picture(place: str, why: str) -> ConfigError:
    return ConfigError("--plot", value=place, allowed=f"a file that ends in {', '.join(_PICTURES)} and can be written",
                       remedy=f"{why}. Choose another place.")


def _text(trial: Trial, *, name: str) -> str:
    from asyncrl.correction_cli.picture import age_label, length_label

    whole = trial.whole
    head = (f"{name} on {trial.batches} recorded {'batch' if trial.batches == 1 else 'batches'}: {count(whole.tokens)} loss tokens of "
            f"{trial.sequences} sequences, of which {trial.dropped_sequences} would not be trained at all")
    columns = ("", "tokens", "kept", "truncated", "masked", "rejected", "mean weight", "ess", "mean |ℓ|")
    rows = [_row("all", whole), *(_row(f"staleness {age_label(age)}", share) for age, share in trial.by_staleness.items()),
            *(_row(f"length {length_label(bucket)}", share) for bucket, share in trial.by_length.items())]
    rules = [f"rule {rule} drops {percent(dropped / whole.tokens)}" for rule, dropped in trial.by_rule.items()]
    return "\n".join([head, "", aligned([columns, *rows], right=True), *([""] if rules else []), *rules])


def _row(label: str, share: Share) -> tuple[str, ...]:
    return (label, count(share.tokens), percent(share.kept / share.tokens), percent(share.truncated / share.tokens),
            percent(share.masked / share.tokens), percent(share.rejected / share.tokens), number(share.weight_sum / share.tokens),
            MISSING if share.ess_frac is None else percent(share.ess_frac), number(share.gap_sum / share.tokens))


def _tree(trial: Trial, *, preset_name: str, files: list[Path]) -> dict[str, Any]:
    from asyncrl.correction_cli.picture import age_label, length_label

    return {"preset": preset_name, "files": [str(file) for file in files], "sequences": trial.sequences,
            "dropped_sequences": trial.dropped_sequences, "all": _numbers(trial.whole),
            "by_staleness": {age_label(age): _numbers(share) for age, share in trial.by_staleness.items()},
            "by_length": {length_label(bucket): _numbers(share) for bucket, share in trial.by_length.items()},
            "dropped_by_rule": trial.by_rule}


def _numbers(share: Share) -> Mapping[str, float | None]:
    return {"tokens": share.tokens, "kept": share.kept, "truncated": share.truncated, "masked": share.masked, "rejected": share.rejected,
            "weight_mean": share.weight_sum / share.tokens, "ess_frac": share.ess_frac, "log_ratio_abs_mean": share.gap_sum / share.tokens}
