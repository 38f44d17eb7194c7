"""The log of the reward workers keeps the newest output in a bounded size. Descriptors 1 and 2 are its own in a forked process."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from asyncrl.rollout.bounded_log import BoundedLog


def in_a_fork(work: Callable[[], None]) -> None:
    """Runs `work` in a process whose descriptors it may change; fails when it fails."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(pid, 0)
    assert status == 0


def filled(path: Path, lines: int, *, max_bytes: int) -> Callable[[], None]:
    def work() -> None:
        log = BoundedLog(path, max_bytes=max_bytes)
        log.attach()
        log.open_pipe()
        for number in range(lines):
            os.write(log.writer, f"{number:05d}\n".encode())
            assert log.pump()
        assert not log.pump()
        os.write(log.writer, b"last\n")
        log.drain()
    return work


def test_a_full_log_keeps_its_newest_lines_in_two_files(tmp_path: Path) -> None:
    in_a_fork(filled(tmp_path / "log", 1000, max_bytes=600))
    older, newer = (tmp_path / "log.1").read_text(), (tmp_path / "log").read_text()
    assert (older + newer).endswith("00998\n00999\nlast\n")
    assert len(older) == 600
    assert len(newer) <= 600


def test_a_log_that_has_room_is_one_file_and_goes_on_where_it_ended(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("before\n")
    in_a_fork(filled(tmp_path / "log", 2, max_bytes=600))
    assert (tmp_path / "log").read_text() == "before\n00000\n00001\nlast\n"
    assert not (tmp_path / "log.1").exists()


def test_a_disk_without_room_loses_the_output_and_not_the_process(tmp_path: Path) -> None:
    (tmp_path / "log").symlink_to("/dev/full")
    in_a_fork(filled(tmp_path / "log", 3, max_bytes=600))
