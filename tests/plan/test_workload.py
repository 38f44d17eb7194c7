import pytest

from asyncrl.errors import ConfigError
from asyncrl.plan.lengths import MeanMax
from asyncrl.plan.workload import Algorithm, Placement, Workload


def test_tokens_of_a_step() -> None:
    plain = Workload(prompts=3, group_size=4, prompt_tokens=10, lengths=MeanMax(100, 200))
    assert (plain.rollouts, plain.response_tokens, plain.all_tokens) == (12, 1200, 12 * 110)
    turns = Workload(prompts=3, group_size=4, prompt_tokens=10, lengths=MeanMax(100, 200), turns=5, environment_tokens=30)
    assert (turns.response_tokens, turns.all_tokens) == (1200, 12 * (10 + 150 + 100))


def test_forwards_are_counted() -> None:
    assert [Algorithm().forwards, Algorithm(reference=False).forwards, Algorithm(reward_model=True).forwards] == [2, 1, 3]


@pytest.mark.parametrize(("make", "message"), [
    (lambda: Placement(gpus=0), "gpus = 0.*at least 1"), (lambda: Placement(gpus=6, tensor_parallel=4), "tensor_parallel"),
    (lambda: Placement(gpus=8, gpu_memory_utilization=85), "0.5, not as 50"), (lambda: Algorithm(epochs=0), "epochs"),
    (lambda: Workload(prompts=0, group_size=1, prompt_tokens=1, lengths=MeanMax(1, 1)), "prompts"),
    (lambda: Workload(prompts=1, group_size=1, prompt_tokens=float("nan"), lengths=MeanMax(1, 1)), "prompt_tokens")])
def test_what_cannot_be_is_refused(make, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
