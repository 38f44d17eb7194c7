"""Real processes at both ends of a chain, killed at any moment: what is held is right, or the version is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent
VERSIONS = 50


@contextmanager
def process(kind: str, root: Path, *arguments: str):
    """One end; killed on the way out."""
    command = [sys.executable, "-m", "tests.weights.chain_processes", str(os.getpid()), kind, str(root), *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=HERE.parents[1]) as child:
        try:
            yield child
        finally:
            child.kill()


class Follower:
    """A receiver that is started anew whenever it was killed."""

    def __init__(self, root: Path) -> None:
        self._root, self._running, self.child = root, None, None

    def __enter__(self) -> Follower:
        self._running = process("receive", self._root)
        self.child = self._running.__enter__()
        assert self.child.stdout.readline() == "up\n"
        return self

    def __exit__(self, *error: object) -> None:
        self._running.__exit__(None, None, None)

    def tell(self, manifest: str) -> None:
        self.child.stdin.write(manifest)
        self.child.stdin.flush()

    def answer(self) -> str:
        line = self.child.stdout.readline()
        assert line, "the receiver ended by itself"
        return line.split(" ")[0].strip()


@pytest.mark.slow
def test_fifty_versions_over_which_both_ends_are_killed_leave_right_bits_or_a_refusal(tmp_path):
    rng = np.random.default_rng(0)
    published, answers, kills = 0, [], 0
    follower = Follower(tmp_path).__enter__()
    try:
        for epoch in range(VERSIONS):
            with process("publish", tmp_path, str(epoch)) as publisher:
                manifests = []
                for _ in range(int(rng.integers(4, 20))):
                    manifests.append(publisher.stdout.readline())
                    assert manifests[-1], "the publisher ended by itself"
                    published += 1
                    mishap = rng.choice(["none", "none", "drop", "twice", "old", "kill"])
                    if mishap == "drop":
                        continue
                    if mishap == "old":
                        follower.tell(manifests[int(rng.integers(len(manifests)))])
                        answers.append(follower.answer())
                    follower.tell(manifests[-1])
                    if mishap == "kill":
                        follower.__exit__()
                        follower.__enter__()
                        kills += 1
                        continue
                    answers.append(follower.answer())
                    if mishap == "twice":
                        follower.tell(manifests[-1])
                        assert follower.answer() == answers[-1]
            follower.tell(manifests[-1])  # the publisher is dead, in the middle of the next version
            assert follower.answer() == "right"
            if published >= VERSIONS:
                break
    finally:
        follower.__exit__()
    assert published >= VERSIONS
    assert kills >= 5
    assert set(answers) == {"right", "refused"}
    assert answers.count("right") > VERSIONS // 2
