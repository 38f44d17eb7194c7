"""`asyncrl watch RUN`: the console of a run that another process has, or had. Reads what the run writes, touches nothing."""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from asyncrl import yaml_text
from asyncrl.errors import ConfigError
from asyncrl.observe.console import Console
from asyncrl.observe.follow import Follower
from asyncrl.observe.health import RunSettings
from asyncrl.observe.summary import last_line
from asyncrl.paths import is_claimed

_RUNS = Path("runs")
_LOG_BYTES = 2000


def find_run(name: str, *, runs: Path = _RUNS) -> Path:
    """The folder of a run: `name` itself, or below `runs`. Raises ConfigError when neither is a folder."""
    for folder in (Path(name), runs / name):
        if os.path.isdir(folder):
            return folder.resolve()
    known = sorted(str(path.parent.relative_to(runs)) for path in runs.glob("**/config.yaml"))
    near = difflib.get_close_matches(name, known)
    raise ConfigError("RUN", value=name, allowed=f"the folder of a run, or its name below {runs.absolute()}",
                      remedy=f"Did you mean {near[0]!r}?" if near else f"What is there: {', '.join(known[:8]) or 'no run'}.")


class Watch:
    """Tells a console what a run's folder says."""

    def __init__(self, folder: Path, console: Console) -> None:
        self._folder, self._console = folder, console
        self._metrics = Follower(folder / "metrics.jsonl")
        self._settings: RunSettings | None = None
        self._step = 0
        self._said = ""

    def follow(self, pause: Callable[[], None]) -> bool:
        """Show the run until it has ended, and whether it ended well. `pause` waits between two looks."""
        while self._look():
            self._console.tick()
            pause()
        return self._tell_the_end()

    def once(self) -> bool:
        """Show the run as it stands. False when it has ended, and not well."""
        if not self._look():
            return self._tell_the_end()
        self._console.end(f"running, after step {self._step}; see {self._folder}" if self._step else "running, no step yet")
        return True

    def _look(self) -> bool:
        """Take in what is new. Whether the run lives: asked first, so that of a dead one nothing comes after it."""
        is_alive = is_claimed(self._folder)
        news = self._metrics.look()
        if self._settings is None or news.was_rewritten:
            self._begin(resumed=news.was_rewritten, may_be_half_written=is_alive and not news.rows)
            if news.rows and self._settings is not None:
                self._console.catch_up(news.rows)
        else:
            for row in news.rows:
                self._console.row(row)
        if news.unreadable:
            self._console.note(f"{news.unreadable} lines of metrics.jsonl are no rows", is_warning=True)
        self._step = max([0 if news.was_rewritten else self._step, *(int(row["step"]) for row in news.rows if "step" in row)])
        if is_alive and not self._step:
            self._say(f"no step yet; {_last_log_line(self._folder) or 'the processes start'}")
        return is_alive

    def _begin(self, *, resumed: bool, may_be_half_written: bool) -> None:
        try:
            tree = yaml_text.read((self._folder / "config.yaml").read_text(encoding="utf-8"))
            self._settings = RunSettings.of(tree)
        except FileNotFoundError:
            return
        except (yaml_text.YAMLError, OSError, ValueError, TypeError, KeyError) as error:
            if may_be_half_written:
                return
            raise ConfigError("config.yaml", value=str(self._folder), allowed="the settings of a run of this version",
                              remedy=f"{type(error).__name__}: {error}.") from error
        if resumed:
            self._console.note("the run was taken up again from an earlier step, or begun anew")
        self._console.start(self._settings, where=f"in {self._folder}", with_table=False)

    def _tell_the_end(self) -> bool:
        """Of a run without a process: whether it ended well. Its summary is missing when it was killed."""
        if self._settings is None:
            raise ConfigError("RUN", value=str(self._folder), allowed="a folder with the config.yaml of a run", remedy="Check the name.")
        summary = self._summary()
        if summary is None:
            when = f"after step {self._step} of {self._settings.steps}" if self._step else "before its first step"
            self._console.end(f"the run died {when}, without a summary; last words: {_last_log_line(self._folder) or 'none'}; "
                              f"see {self._folder / 'logs'}; --resume goes on from its newest checkpoint")
            return False
        self._console.end(last_line(summary, place=str(self._folder)))
        return not summary.get("ended_early")

    def _summary(self) -> dict[str, Any] | None:
        """What the run left at its end. None when it left nothing, or went on after that and died."""
        try:
            summary = json.loads((self._folder / "summary.json").read_text(encoding="utf-8"))
            last_line(summary, place="")
            return summary if summary["steps"] >= self._step else None
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            return None

    def _say(self, text: str) -> None:
        if text != self._said:
            self._said = text
            self._console.note(text)


def _last_log_line(folder: Path) -> str:
    """The newest line of the log that was written last, with the name of the log."""
    logs = [path for path in (folder / "logs").glob("*.log") if path.stat().st_size]
    if not logs:
        return ""
    log = max(logs, key=lambda path: path.stat().st_mtime_ns)
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _LOG_BYTES))
        lines = file.read().decode("utf-8", "replace").strip().splitlines()
    return f"{log.name}: {lines[-1].strip()}" if lines else ""
