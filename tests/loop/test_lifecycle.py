"""How a run is entered, left and misused: one clear error each, nothing left behind, no failure unheard."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError, EngineError
from asyncrl.loop import Run
from asyncrl.paths import RunPaths
from asyncrl.rollout.fake_engine import FakeEngine, Faults
from asyncrl.rollout.prompts import PromptSource
from asyncrl.types import Prompt
from tests.loop.test_run import LIMIT_S, fake, make_run
from tests.tiny_model import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


class Stubborn(FakeEngine):
    """Neither starts nor closes when told not to."""

    def __init__(self, *, fails_to: str) -> None:
        super().__init__(token_s=0.001)
        self.fails_to = fails_to

    async def start(self, paths: RunPaths) -> None:
        if self.fails_to == "start":
            raise EngineError("no start")

    async def close(self) -> None:
        await super().close()
        if self.fails_to == "close":
            raise EngineError("no close")


def use(run: Run, body: Callable[[Run], Awaitable[None]]) -> None:
    """Run `body` inside the run; whatever the end, its shared memory is freed and no task of it goes on."""
    async def main() -> None:
        try:
            async with run:
                await body(run)
        finally:
            assert not run.paths.shared.exists()
            assert asyncio.all_tasks() == {asyncio.current_task()}

    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            await main()

    asyncio.run(limited())


async def first_step(run: Run) -> None:
    async for _ in run.steps(1):
        pass


def broken_data() -> PromptSource:
    def prompts() -> Iterator[Prompt]:
        yield from (Prompt(text=f"{number}+1=") for number in range(8))
        raise ValueError("the ninth prompt")

    return PromptSource(prompts())


def test_a_run_that_is_not_entered_says_so(model: Path, tmp_path: Path) -> None:
    run = make_run(model, tmp_path, [fake()])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for work in (lambda: first_step(run), run.step, run.evaluate):
            with pytest.raises(RuntimeError, match="inside `async with run:`"):
                asyncio.run(work())


def test_a_run_is_entered_once(model: Path, tmp_path: Path) -> None:
    run = make_run(model, tmp_path, [fake()])
    use(run, first_step)
    with pytest.raises(RuntimeError, match="entered once"):
        use(run, first_step)


def test_steps_go_on_where_the_last_ones_ended_and_not_after_the_finish(model: Path, tmp_path: Path) -> None:
    async def body(run: Run) -> None:
        assert [report.index async for report in run.steps(2)] == [1, 2]
        assert [report.index async for report in run.steps(2)] == [3, 4]
        await run.finish()
        with pytest.raises(RuntimeError, match=r"before finish\(\)"):
            await run.step()

    use(make_run(model, tmp_path, [fake()]), body)


def test_a_loop_may_be_left_early(model: Path, tmp_path: Path) -> None:
    async def body(run: Run) -> None:
        async for _ in run.steps(10):
            break

    use(make_run(model, tmp_path, [fake()]), body)


def test_an_error_of_the_caller_ends_the_run_and_stays_itself(model: Path, tmp_path: Path) -> None:
    async def body(run: Run) -> None:
        async for _ in run.steps(10):
            raise ZeroDivisionError("the caller's")

    with pytest.raises(ZeroDivisionError, match="the caller's"):
        use(make_run(model, tmp_path, [fake()]), body)


def test_a_cancelled_step_leaves_no_one_waiting_for_its_batch(model: Path, tmp_path: Path) -> None:
    engine = fake()

    async def body(run: Run) -> None:
        await first_step(run)
        engine.faults = Faults(hang_after_tokens=0)
        while True:
            tasks = asyncio.all_tasks()
            try:
                async with asyncio.timeout(0.2):
                    await run.step()
            except TimeoutError:
                break
        assert {task.get_coro().__qualname__ for task in asyncio.all_tasks() - tasks} <= {"Run._roll_out_one", "_next", "FakeEngine._write"}

    use(make_run(model, tmp_path, [engine]), body)


def test_a_failure_between_the_last_step_and_the_end_is_raised_at_the_end(model: Path, tmp_path: Path) -> None:
    async def body(run: Run) -> None:
        await first_step(run)
        await next(task for task in asyncio.all_tasks() if task.get_name() == "feed")

    with pytest.raises(ValueError, match="the ninth prompt"):
        use(make_run(model, tmp_path, [fake()], prompts=broken_data()), body)


def test_a_failure_that_the_caller_has_handled_is_not_raised_again(model: Path, tmp_path: Path) -> None:
    async def body(run: Run) -> None:
        with pytest.raises(ValueError, match="the ninth prompt"):
            async for _ in run.steps(10):
                pass

    use(make_run(model, tmp_path, [fake()], prompts=broken_data()), body)


def test_one_part_that_does_not_start_is_the_cause_and_the_others_end(model: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no start"):
        use(make_run(model, tmp_path, [Stubborn(fails_to="start")]), first_step)


def test_a_part_that_does_not_close_is_told_and_the_others_are_closed(model: Path, tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no close"):
        use(make_run(model, tmp_path, [Stubborn(fails_to="close")]), first_step)


def test_what_closing_fails_with_is_noted_on_the_error_under_way(model: Path, tmp_path: Path) -> None:
    async def body(run: Run) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) as caught:
        use(make_run(model, tmp_path, [Stubborn(fails_to="close")]), body)
    assert caught.value.__notes__ == ["the run also failed with EngineError: no close"]


def test_a_run_left_without_error_is_closed_even_if_its_checkpoint_is_not_waited_for(model: Path, tmp_path: Path) -> None:
    """Ctrl-C while it waits for the last checkpoint."""
    closed: list[str] = []

    class Closing(FakeEngine):
        async def close(self) -> None:
            await super().close()
            closed.append(self.name)

    run = make_run(model, tmp_path, [Closing(token_s=0.001)])

    async def body(run: Run) -> None:
        await first_step(run)
        task = asyncio.current_task()
        assert task is not None

        async def settle() -> None:
            task.cancel()
            await asyncio.Event().wait()

        run.trainer.settle = settle  # type: ignore[method-assign]

    with pytest.raises(asyncio.CancelledError):
        use(run, body)
    assert closed == ["fake"]


def test_an_evaluation_of_nothing_is_refused(model: Path, tmp_path: Path) -> None:
    async def body(run: Run) -> None:
        with pytest.raises(ConfigError, match=r"RunOptions\.eval_sets"):
            await run.evaluate()

    use(make_run(model, tmp_path, [fake()]), body)


def test_a_metric_that_was_not_measured_names_its_neighbours(model: Path, tmp_path: Path) -> None:
    async def body(run: Run) -> None:
        report = await run.step()
        with pytest.raises(KeyError, match=r"not measured in step 1.*staleness/token/max"):
            report["staleness/tokens/max"]

    use(make_run(model, tmp_path, [fake()]), body)


def test_parts_that_do_not_fit_are_refused_by_the_constructor(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"Wrap what yields the prompts: PromptSource"):
        make_run(model, tmp_path, [fake()], prompts=[Prompt(text="1+1=")])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"engine\.name"):
        make_run(model, tmp_path, [fake(), fake()])
