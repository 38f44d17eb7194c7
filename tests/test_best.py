"""The best weights: kept for the first of the highest, whole at every moment, known again after a resume."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from asyncrl.best import BestWeights
from asyncrl.rollout.evaluation import Evaluation, SetResult

ALL = ("model.safetensors", "config.json", "evaluation.json")


def evaluation(version: int, reward: float | None, *, other: float = 0.0, passed: float = 0.0) -> Evaluation:
    def result(value: float | None) -> SetResult:
        metrics = {} if value is None else {"reward/mean": value, "pass_at_4/mean": passed}
        return SetResult(metrics, num_rollouts=4, num_errors=0, versions=frozenset({version}))

    return Evaluation({"sums": result(reward), "other": result(other)}, version=version)


def exporting(version: int) -> Callable[[Path], Awaitable[None]]:
    """Writes the weights of a version, as two files that name it."""
    async def export(place: Path) -> None:
        os.mkdir(place)
        for name in ALL[:2]:
            with open(place / name, "w", encoding="utf-8") as file:  # noqa: ASYNC230
                file.write(str(version))

    return export


def best_of(folder: Path, *, metric: str = "reward") -> BestWeights:
    return BestWeights(folder, set_name="sums", metric=metric)


def offer(best: BestWeights, version: int, reward: float | None, **others: float) -> bool:
    return asyncio.run(best.offer(evaluation(version, reward, **others), step=version, export=exporting(version)))


def version_in(folder: Path) -> int:
    """The version whose weights `best/` holds, all files of it."""
    assert sorted(path.name for path in (folder / "best").iterdir()) == sorted(ALL)
    weights = {(folder / "best" / name).read_text(encoding="utf-8") for name in ALL[:2]}
    assert weights == {str(record_in(folder)["version"])}
    return int(weights.pop())


def record_in(folder: Path) -> dict[str, object]:
    return json.loads((folder / "best" / "evaluation.json").read_text(encoding="utf-8"))


def test_the_highest_is_kept_and_of_equals_the_first(tmp_path: Path) -> None:
    best = best_of(tmp_path)
    assert [offer(best, version, reward) for version, reward in enumerate((0.2, 0.1, 0.5, 0.5, 0.4))] == [True, False, True, False, False]
    assert version_in(tmp_path) == 2
    assert (best.step, best.reward) == (2, 0.5)
    assert record_in(tmp_path) == {"step": 2, "version": 2, "set": "sums", "metric": "reward", "value": 0.5,
                                   "metrics": evaluation(2, 0.5).metrics}
    assert sorted(path.name for path in tmp_path.iterdir()) == [".best-1", "best"]


def test_another_metric_may_decide_and_the_reward_is_told_beside_it(tmp_path: Path) -> None:
    best = best_of(tmp_path, metric="pass_at_4")
    assert offer(best, 1, 0.9, passed=0.5)
    assert offer(best, 2, 0.8, passed=0.6)
    assert (best.step, best.reward) == (2, 0.8)


def test_a_set_in_which_everything_failed_is_never_the_best(tmp_path: Path) -> None:
    best = best_of(tmp_path)
    assert not offer(best, 0, None)
    assert not (tmp_path / "best").exists()
    assert (best.step, best.reward) == (None, None)


def test_a_failed_export_leaves_the_old_best(tmp_path: Path) -> None:
    best = best_of(tmp_path)
    offer(best, 0, 0.1)

    async def half(place: Path) -> None:
        os.mkdir(place)
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space"):
        asyncio.run(best.offer(evaluation(1, 0.9), step=1, export=half))
    assert (version_in(tmp_path), best.reward) == (0, 0.1)
    assert offer(best, 2, 0.5)
    assert version_in(tmp_path) == 2


def killed_at(event_number: int, folder: Path) -> bool:
    """Offer version 1 in a child that is ended right before its n-th change of the folder; whether it got that far."""
    pid = os.fork()
    if pid == 0:
        events = itertools.count()

        def hook(event: str, arguments: tuple[object, ...]) -> None:
            touched = any(isinstance(path, str | os.PathLike) and str(path).startswith(str(folder)) for path in arguments)
            if event.startswith(("open", "os.")) and touched and next(events) == event_number:
                os._exit(9)

        best = best_of(folder)
        best.resume(0)
        sys.addaudithook(hook)
        offer(best, 1, 0.9)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 9


def test_a_kill_at_any_moment_leaves_the_old_best_or_the_new_one_whole(tmp_path: Path) -> None:
    seen = []
    for number in itertools.count():
        folder = tmp_path / str(number)
        folder.mkdir()
        offer(best_of(folder), 0, 0.1)
        killed = killed_at(number, folder)
        seen.append(version_in(folder))
        again = best_of(folder)
        again.resume(1)
        assert again.reward == {0: 0.1, 1: 0.9}[seen[-1]]
        assert offer(again, 2, 1.0)
        assert version_in(folder) == 2
        assert sorted(path.name for path in folder.glob("*best*")) in ([".best-0", "best"], [".best-1", "best"])
        if not killed:
            break
    assert seen == sorted(seen)
    assert len(seen) > 12
    assert (seen[0], seen[-1]) == (0, 1)


@pytest.mark.parametrize(("resumed", "step", "kept"), [(7, 5, False), (5, 5, False), (4, None, True)])
def test_the_best_survives_a_resume_unless_it_is_of_a_version_still_to_come(tmp_path: Path, resumed: int, step: int | None,
                                                                          kept: bool) -> None:
    offer(best_of(tmp_path), 5, 0.8)
    again = best_of(tmp_path)
    again.resume(resumed)
    assert again.step == step
    assert offer(again, resumed, 0.5) is kept


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"version": "x"}', '{"version": 0, "metrics": {}}',
                                     '{"version": 0, "step": 0, "metrics": {"eval/sums/reward/mean": null}}'])
def test_a_record_that_says_nothing_is_passed_over(tmp_path: Path, content: str) -> None:
    (tmp_path / "best").mkdir()
    (tmp_path / "best" / "evaluation.json").write_text(content, encoding="utf-8")
    best = best_of(tmp_path)
    best.resume(3)
    assert offer(best, 3, 0.1)
    assert version_in(tmp_path) == 3


def test_a_record_of_another_metric_counts_by_what_it_measured_of_this_one(tmp_path: Path) -> None:
    offer(best_of(tmp_path), 1, 0.3, passed=0.9)
    again = best_of(tmp_path, metric="pass_at_4")
    again.resume(1)
    assert not offer(again, 2, 1.0, passed=0.8)


def test_the_folder_may_be_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    best = best_of(Path("run"))
    Path("run").mkdir()
    for version in range(3):
        assert offer(best, version, float(version))
        assert version_in(Path("run")) == version


def test_a_copy_without_links_goes_on(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    offer(best_of(tmp_path / "run"), 1, 0.3)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    best = best_of(tmp_path / "copy")
    best.resume(1)
    for version, reward in ((2, 0.4), (3, 0.5)):
        assert offer(best, version, reward)
        assert version_in(tmp_path / "copy") == version
