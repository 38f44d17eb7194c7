"""Shared memory is freed by whoever comes next, and only what nobody can use any more."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.paths import RunPaths, claim, is_claimed, make_shared_folder


def made_by_another() -> Path:
    code = "from asyncrl.paths import make_shared_folder; print(make_shared_folder())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True,
                          cwd=Path(__file__).parents[1])
    return Path(done.stdout.strip())


def test_a_folder_of_a_process_that_is_gone_is_removed_and_a_living_ones_is_kept() -> None:
    left, own = made_by_another(), make_shared_folder()
    try:
        assert str(os.getpid()) in own.name
        second = make_shared_folder()
        shutil.rmtree(second)
        assert not left.exists()
        assert own.exists()
    finally:
        shutil.rmtree(own)


def test_a_folder_of_another_process_namespace_is_kept() -> None:
    left = made_by_another()
    elsewhere = left.with_name(left.name.replace(str(os.stat("/proc/self/ns/pid").st_ino), "1"))
    left.rename(elsewhere)
    try:
        shutil.rmtree(make_shared_folder())
        assert elsewhere.exists()
    finally:
        shutil.rmtree(elsewhere)


def test_a_folder_belongs_to_one_run_at_a_time(tmp_path):
    with claim(tmp_path / "runs" / "mine"):
        with pytest.raises(ConfigError, match=r"run\.name = 'mine'.*choose another name"):
            claim(tmp_path / "runs" / "mine")
        claim(tmp_path / "runs" / "yours").close()
    claim(tmp_path / "runs" / "mine").close()


def test_a_place_where_no_folder_can_be_is_refused_by_name(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"run\.folder.*file"):
        claim(tmp_path / "file" / "run")


def test_what_lies_in_the_way_of_a_run_s_folders_is_named(tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "logs").write_text("")
    with pytest.raises(ConfigError, match=r"run\.folder = '.*/mine/logs' is not allowed.*Remove what is in the way"):
        RunPaths(root=tmp_path / "mine", shared=tmp_path / "shared").make()


def test_whether_a_folder_is_claimed_can_be_asked_without_being_in_the_way(tmp_path):
    folder = tmp_path / "runs" / "mine"
    assert not is_claimed(folder)
    with claim(folder):
        assert is_claimed(folder)
        assert not is_claimed(tmp_path / "runs" / "yours")
    assert not is_claimed(folder)
    assert [path.name for path in folder.parent.iterdir()] == [".mine.lock"]
