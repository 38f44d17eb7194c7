"""The command line: `asyncrl COMMAND …`, a row of `COMMANDS` each.

A command takes its parsed options and gives an exit code. What it raises becomes one line and an exit code in `main`.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
import itertools
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from asyncrl.ablate.command import ablate, read_plan
from asyncrl.ablate.command import describe as describe_ablation
from asyncrl.config import load_config
from asyncrl.config_schema import recipe_schema
from asyncrl.correction_cli import command as correction_command
from asyncrl.doctor.report import diagnose, table
from asyncrl.dry_run import describe
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.interrupts import Interrupted, run_interruptibly
from asyncrl.observe.console import open_console
from asyncrl.observe.figures import encodable
from asyncrl.observe.watch import Watch, find_run
from asyncrl.observe.waterfall import text_of_waterfall, write_waterfall
from asyncrl.plan import command as plan_command
from asyncrl.plan.options import add_arguments as plan_arguments
from asyncrl.preflight import check_environment
from asyncrl.recipe_files import recipe_file, recipe_names, recipe_summary, recipes_folder
from asyncrl.supervised import load_sft, supervise
from asyncrl.training import train

EXIT_OK = 0
"""What was asked for was done."""
EXIT_FAILED = 1
"""The run started and ended with an error."""
EXIT_USAGE = 2
"""A setting or a file that cannot work; nothing was started."""
EXIT_INTERRUPTED = 130
"""Ended by Ctrl-C: after the step, with a checkpoint; by a second one, at once."""
EXIT_TERMINATED = 143
"""Ended by SIGTERM, in the same way."""

_RESUMES = ("newest", "auto")

_WATCH_INTERVAL_S = 0.5
_OUTPUT_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EPIPE})
"""The machine's, not a bug's: a full disk, a console that was closed. Their traceback says nothing."""


@dataclass(frozen=True, slots=True)
class Command:
    """A subcommand."""

    name: str
    help: str
    run: Callable[[argparse.Namespace], int]
    """Takes the parsed options, gives the exit code."""
    arguments: Callable[[argparse.ArgumentParser], None]
    """Adds what the command takes to its parser."""
    takes_settings: bool = False
    """Whether `section.key=value` may stand anywhere among the arguments; they are in `options.settings`, in order."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit code."""
    options = _parsed(arguments)
    try:
        return options.command.run(options)
    except ConfigError as error:
        return _told(str(error), EXIT_USAGE)
    except AsyncRLError as error:
        return _told(f"{type(error).__name__}: {error}", EXIT_FAILED)
    except TimeoutError as error:
        return _told(f"TimeoutError: {error}", EXIT_FAILED)
    except OSError as error:
        if error.errno not in _OUTPUT_ERRORS:
            raise
        return _told(f"what the run writes has no place: {error}", EXIT_FAILED)
    except Interrupted as end:
        return _told(f"{end}; --resume auto goes on from the newest checkpoint, or begins anew without one", 128 + end.signum)
    except KeyboardInterrupt:
        return _told("interrupted", EXIT_INTERRUPTED)


def _train(options: argparse.Namespace) -> int:
    config = load_config(options.recipe, options.settings, echo=_note)
    check_environment(config, resume=options.resume)
    if options.dry_run:
        print(describe(config))
    else:
        console = open_console(quiet=options.quiet)
        try:
            run_interruptibly(train(config, console=console, resume=options.resume))
        finally:
            console.close()
            if console.lost:
                _note(f"the console did not show everything, {console.lost} times: {console.error}")
    return EXIT_OK


def _train_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="a recipe by name, such as arithmetic/quickstart, or the path of a YAML file")
    _resume_argument(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the resolved configuration and what follows from it, start nothing")
    parser.add_argument("--quiet", action="store_true", help="show warnings, errors and the last line alone")


def _resume_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--resume", nargs="?", const="newest", choices=_RESUMES,
                        help="go on from the run's newest whole checkpoint; auto: begin anew when there is none")


def _sft(options: argparse.Namespace) -> int:
    config = load_sft(options.recipe, options.settings, echo=_note)
    run_interruptibly(supervise(config, tell=functools.partial(print, flush=True), resume=options.resume))
    return EXIT_OK


def _sft_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", help="sft/arithmetic, or the path of a YAML file; docs/sft.md")
    _resume_argument(parser)


def _recipes(options: argparse.Namespace) -> int:
    names = recipe_names()
    for name in names:
        print(f"{name:{max(map(len, names))}}  {recipe_summary(recipe_file(name))}")
    print(f"\nin {recipes_folder()}")
    return EXIT_OK


def _schema(options: argparse.Namespace) -> int:
    print(recipe_schema(), end="")
    return EXIT_OK


def _no_arguments(parser: argparse.ArgumentParser) -> None:
    """A command that takes none."""


def _doctor(options: argparse.Namespace) -> int:
    if (options.settings and options.recipe is None) or "=" in (options.recipe or ""):
        options.parser.error("settings change a recipe; name it first")
    _note("looking; torch and transformers are imported, which takes some seconds")
    findings = diagnose(options.recipe, options.settings)
    print(table(findings))
    return EXIT_USAGE if any(finding.status == "fail" for finding in findings) else EXIT_OK


def _doctor_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", nargs="?", help="path or name of a recipe to check here: its files, model, data, functions and sizes")


def _watch(options: argparse.Namespace) -> int:
    folder = find_run(options.run_folder)
    console = open_console()
    watch = Watch(folder, console)
    try:
        ended_well = watch.once() if options.once else watch.follow(pause=functools.partial(time.sleep, _WATCH_INTERVAL_S))
    except KeyboardInterrupt:  # whoever watches may stop; the run does not notice
        return EXIT_OK
    finally:
        console.close()
    return EXIT_OK if ended_well else EXIT_FAILED


def _watch_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", metavar="RUN", help="the folder of a run, or its name below runs/")
    parser.add_argument("--once", action="store_true", help="show how things stand and return")


def _report(options: argparse.Namespace) -> int:
    folder = find_run(options.run_folder)
    found = write_waterfall(folder, title=folder.name)
    if found is None:
        raise ConfigError("RUN", value=str(folder), allowed="the folder of a run with at least one step in metrics.jsonl",
                          remedy="Name a run that has trained, or wait for its first step.")
    text = text_of_waterfall(found)
    print(encodable(text, getattr(sys.stdout, "encoding", None) or "utf-8"))
    return EXIT_OK


def _report_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_folder", metavar="RUN", help="the folder of a run, or its name below runs/")
    parser.add_argument("--waterfall", action="store_true", required=True,
                        help="where each engine-second and trainer-second went; also written as waterfall.json and waterfall.png")


def _ablate(options: argparse.Namespace) -> int:
    plan = read_plan(options.file, out=options.out, quick=options.quick, jobs=options.jobs)
    if options.dry_run:
        print(describe_ablation(plan))
        return EXIT_OK
    try:
        return EXIT_OK if ablate(plan, tell=functools.partial(print, flush=True)) else EXIT_FAILED
    except Interrupted as end:
        return _told(str(end), 128 + end.signum)


def _ablate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", help="an ablation by name, such as ablations/staleness, or the path of a YAML file; docs/ablations.md")
    parser.add_argument("--quick", action="store_true", help="the file's quick profile: fewer points, steps and seeds")
    parser.add_argument("--dry-run", action="store_true", help="check every run, print the grid, start nothing")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="so many runs at once")
    parser.add_argument("--out", metavar="FOLDER", help="where runs and results lie; runs/ablations/NAME")


def _correction(options: argparse.Namespace) -> int:
    print(encodable(options.act(options), getattr(sys.stdout, "encoding", None) or "utf-8"))  # no stream at all where it was closed
    return EXIT_OK


def _plan(options: argparse.Namespace) -> int:
    print(encodable(plan_command.run(options), getattr(sys.stdout, "encoding", None) or "utf-8"))
    return EXIT_OK


COMMANDS = (
    Command("train", "train a model as a recipe says", _train, _train_arguments, takes_settings=True),
    Command("sft", "train a model on examples, for RL to start from", _sft, _sft_arguments, takes_settings=True),
    Command("recipes", "list the recipes of the library, and what each one is", _recipes, _no_arguments),
    Command("schema", "print the JSON schema of a recipe, for editors", _schema, _no_arguments),
    Command("doctor", "check this machine, and a recipe on it; each finding with its remedy", _doctor, _doctor_arguments,
            takes_settings=True),
    Command("ablate", "train over a grid of settings and seeds, and compare; goes on where it was stopped", _ablate, _ablate_arguments),
    Command("correction", "list and explain corrections by name, try one on recorded batches", _correction,
            correction_command.add_arguments),
    Command("plan", "the account of a step before it is run: FLOP, bytes, seconds, memory, shapes", _plan, plan_arguments),
    Command("report", "say where the time of a run went", _report, _report_arguments),
    Command("watch", "show a run that goes on, or has ended", _watch, _watch_arguments),
)


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options of one command, its row of the table among them. Exits with EXIT_USAGE as argparse does."""
    parser = argparse.ArgumentParser(prog="asyncrl", description="Asynchronous off-policy RL post-training of language models.")
    rows = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        row = rows.add_parser(command.name, help=command.help, description=command.help)
        row.set_defaults(command=command, parser=row)
        command.arguments(row)
        if command.takes_settings:
            row.add_argument("settings", nargs="*", default=[], metavar="section.key=value", help="settings that replace the recipe's")
    options, later = parser.parse_known_args(_resume_apart(sys.argv[1:] if arguments is None else arguments))
    if not options.command.takes_settings and later:
        options.parser.error(f"unrecognized arguments: {' '.join(later)}")
    if wrong := [argument for argument in later if argument.startswith("-") or "=" not in argument]:
        options.parser.error(f"unrecognized {' '.join(wrong)}; settings are given as section.key=value, such as trainer.learning_rate=1e-4")
    if later:
        options.settings = [*options.settings, *later]
    return options


def _resume_apart(arguments: Sequence[str]) -> list[str]:
    """A bare `--resume` with its value: argparse would take the setting after it for one."""
    return ["--resume=newest" if argument == "--resume" and following not in _RESUMES else argument
            for argument, following in itertools.pairwise([*arguments, ""])]


def _told(line: str, code: int) -> int:
    _note(line)
    return code


def _note(line: str) -> None:
    with contextlib.suppress(OSError, ValueError):  # nobody reads any more: the exit code still speaks
        print(f"asyncrl: {line}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
