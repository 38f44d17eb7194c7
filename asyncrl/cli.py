"""The command line: `asyncrl train RECIPE.yaml section.key=value …`."""

from __future__ import annotations

import argparse
import asyncio
import errno
import signal
import sys
from collections.abc import Sequence

from asyncrl.config import RunConfig, dump_config, load_config
from asyncrl.errors import AsyncRLError, ConfigError
from asyncrl.training import check_environment, processes_of, train

EXIT_USAGE = 2
"""A setting or a file that cannot work; nothing was started."""
EXIT_FAILED = 1
"""The run started and ended with an error."""
EXIT_INTERRUPTED = 130
"""Ended by Ctrl-C."""
EXIT_TERMINATED = 143
"""Ended by SIGTERM."""

_OUTPUT_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EPIPE})
"""The machine's, not a bug's: a full disk, a console that was closed. Their traceback says nothing."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = _parser()
    options, later = parser.parse_known_args(arguments)
    if wrong := [argument for argument in later if argument.startswith("-") or "=" not in argument]:
        parser.error(f"unrecognized {' '.join(wrong)}; settings are given as section.key=value, such as trainer.learning_rate=1e-4")
    try:
        config = load_config(options.recipe, [*options.overrides, *later])
        check_environment(config)
        if options.dry_run:
            print(describe(config))
            return 0
        asyncio.run(_train_until_told(config))
    except ConfigError as error:
        print(f"asyncrl: {error}", file=sys.stderr)
        return EXIT_USAGE
    except AsyncRLError as error:
        print(f"asyncrl: {type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_FAILED
    except OSError as error:
        if error.errno not in _OUTPUT_ERRORS:
            raise
        print(f"asyncrl: what the run writes has no place: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("asyncrl: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except asyncio.CancelledError:
        print("asyncrl: terminated", file=sys.stderr)
        return EXIT_TERMINATED
    return 0


async def _train_until_told(config: RunConfig) -> None:
    """Train; SIGTERM ends the run as Ctrl-C does: every process is closed, shared memory is freed."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    await train(config, echo=print)


def describe(config: RunConfig) -> str:
    """The resolved configuration, and the processes the run would start."""
    lines = [dump_config(config).rstrip(), "", "# processes"]
    return "\n".join(lines + [f"#   {line}" for line in processes_of(config)])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="asyncrl", description="Asynchronous off-policy RL post-training of language models.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("train", help="train a model as a recipe says")
    command.add_argument("recipe", help="path of a recipe, such as recipes/arithmetic/quickstart.yaml")
    command.add_argument("overrides", nargs="*", metavar="section.key=value", help="settings that replace the recipe's")
    command.add_argument("--dry-run", action="store_true", help="print the resolved configuration and the processes, start nothing")
    return parser


if __name__ == "__main__":
    sys.exit(main())
