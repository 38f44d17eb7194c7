"""What the `prompts` section of a configuration leads to: the prompts in order, while some of them turn out solved and some hopeless."""

from __future__ import annotations

from itertools import islice

from asyncrl import task
from asyncrl.config import RunConfig
from asyncrl.errors import RunAborted
from asyncrl.tokenizer import Tokenizer
from asyncrl.types import Rollout, Status
from tests.config_observers import Scene

REWARDS = {"0": (1.0, 1.0), "1": (0.0, 0.0), "2": (1.0, 0.0), "3": (0.6, 0.6)}
"""Of two rollouts, by the first character of the prompt."""


def asked(config: RunConfig, scene: Scene) -> object:
    """The first prompts, each rolled out twice, and what was counted; or why there is none."""
    source, order = task.build_prompts(config), []
    try:
        for prompt in islice(source.stream(Tokenizer(scene.model)), 40):
            order.append((prompt.text, prompt.source, prompt.row))
            for index, reward in enumerate(REWARDS[prompt.text[0]]):
                source.observe(prompt, Rollout(prompt_id=prompt.prompt_id, group_id=0, index=index, sequences=(), status=Status.STOP,
                                               rewards={"reward": reward}))
    except RunAborted as error:
        return [str(error)]
    return order, source.metrics().result()
