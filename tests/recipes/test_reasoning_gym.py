"""Any dataset of reasoning-gym is a recipe: its questions reach the policy, its entries the scorer, and its mistakes the user, early."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from asyncrl.config import load_config
from asyncrl.errors import ConfigError
from asyncrl.functions import load_function
from asyncrl.preflight import check_environment
from asyncrl.rollout.prompt_rows import complete_prompt
from asyncrl.rollout.reward import RewardPool
from asyncrl.tokenizer import Tokenizer
from asyncrl.types import Prompt

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes" / "reasoning_gym"
LIMIT_S = 240
SMALL = {"settings": {"max_terms": 2, "max_digits": 1}}


@pytest.fixture(scope="module")
def task() -> dict[str, Any]:
    """The functions of the recipe, as a configuration loads them."""
    pytest.importorskip("reasoning_gym", reason="needs reasoning-gym")
    names = ("questions", "held_out", "score", "worked", "held_out_worked")
    return {name: load_function(f"{RECIPE / 'task.py'}:{name}", field="test") for name in names}


def scored(tmp_path: Path, task: dict[str, Any], pairs: list[tuple[Prompt, str]]) -> list[float]:
    """What the scorer gives in forked workers."""

    async def main() -> list[float]:
        pool = RewardPool({"score": task["score"]}, workers=2)
        pool.start(tmp_path)
        try:
            return [rewards["score"] for rewards in await asyncio.gather(*(pool.score(prompt, text, []) for prompt, text in pairs))]
        finally:
            await pool.close()

    return asyncio.run(asyncio.wait_for(main(), LIMIT_S))


def test_questions_are_the_datasets_own_and_come_again_at_each_pass(task):
    import reasoning_gym

    made = task["questions"]("chain_sum", size=5, seed=3, **SMALL)
    entries = list(reasoning_gym.create_dataset("chain_sum", size=5, seed=3, max_terms=2, max_digits=1))
    assert [prompt.text for prompt in made] == [entry["question"] for entry in entries]
    assert list(made) == list(made)
    assert {prompt.source for prompt in made} == {"chain_sum"}


def test_a_template_takes_fields_of_the_entry(task):
    prompt = next(iter(task["questions"]("chain_sum", size=1, template="{{{expression}}} of {question}", **SMALL)))
    expression = ast.literal_eval(prompt.columns["entry"])["metadata"]["expression"]
    assert prompt.text == f"{{{expression}}} of State the final answer to the following arithmetic problem: {expression} ="


def test_a_chat_has_the_question_as_its_users_message(task):
    prompt = next(iter(task["questions"]("chain_sum", size=1, chat=True, system="Answer in tags.", **SMALL)))
    assert [message["role"] for message in prompt.messages] == ["system", "user"]
    assert prompt.messages[1]["content"].startswith("State the final answer")
    assert prompt.text == ""
    (only,) = next(iter(task["questions"]("chain_sum", size=1, chat=True, **SMALL))).messages
    assert only["role"] == "user"


def test_the_whole_completion_is_the_answer_unless_a_tag_is_named(task):
    whole = next(iter(task["questions"]("chain_sum", size=1, **SMALL)))
    tagged = next(iter(task["questions"]("chain_sum", size=1, answer_tag="answer", **SMALL)))
    right = whole.columns["answer"]
    assert [task["score"](whole, text) for text in (right, f" {right}\n", "", "none")] == [1.0, 1.0, 0.0, 0.0]
    assert 0.0 < task["score"](whole, f"It is {right}.") < 1.0
    texts = (f"<answer>x</answer> so <answer>\n{right} </answer>", right, f"<answer>{right}</answer> or <answer>no</answer>",
             "<answer></answer>")
    assert [task["score"](tagged, text) for text in texts] == [1.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize("dataset", ["countdown", "graph_color", "knights_knaves", "rush_hour", "word_ladder"])
def test_the_entry_reaches_the_scorer_in_a_worker_as_it_was_made(task, dataset, tmp_path):
    """Tuples, whole numbers as keys, NumPy's text, lists in lists: what the worker scores is what the controller would."""
    import reasoning_gym

    made = task["questions"](dataset, size=3, seed=1)
    original = reasoning_gym.create_dataset(dataset, size=3, seed=1)
    pairs, expected = [], []
    for prompt, entry in zip(made, original, strict=True):
        assert ast.literal_eval(prompt.columns["entry"]) == entry
        for text in (str(entry["answer"]), "", "7 + 1"):
            pairs.append((prompt, text))
            expected.append(original.score_answer(text.strip(), entry))
    assert scored(tmp_path, task, pairs) == pytest.approx(expected)


def test_workers_inherit_the_dataset_and_do_not_make_it_again(task, tmp_path, monkeypatch):
    import reasoning_gym

    (prompt,) = task["questions"]("chain_sum", size=1, seed=11, **SMALL)

    def no_more(*given: object, **named: object) -> None:
        raise AssertionError("made again")

    monkeypatch.setattr(reasoning_gym, "create_dataset", no_more)
    assert scored(tmp_path, task, [(prompt, prompt.columns["answer"])] * 4) == [1.0] * 4


def test_held_out_questions_have_seeds_that_no_training_reaches(task):
    settings = {"settings": {"min_digits": 4, "max_digits": 6}}
    held_out = task["held_out"]("chain_sum", size=200, **settings)
    asked = {prompt.text for prompt in task["questions"]("chain_sum", size=2000, **settings)}
    assert not asked & {prompt.text for prompt in held_out}
    assert {prompt.source for prompt in held_out} == {"chain_sum/held_out"}


def test_worked_questions_are_right_but_for_the_noise(task):
    common = {"size": 50, "template": "{expression} =", **SMALL}
    right = task["worked"]("chain_sum", seed=1, **common)
    noisy = task["worked"]("chain_sum", seed=1, noise=1.0, **common)
    pairs = [next(right) for _ in range(100)]
    assert all(eval(text.removesuffix("=")) == int(answer) for text, answer in pairs)
    assert sum(next(noisy)[1] == answer for _, answer in pairs) < 50
    held_out = task["held_out_worked"]("chain_sum", seed=1, noise=1.0, **common)
    assert len(held_out) == 256
    with pytest.raises(ConfigError, match="questions as text"):
        next(task["worked"]("chain_sum", chat=True))
    assert all(eval(text.removesuffix("=")) == int(answer) for text, answer in held_out)


@pytest.mark.parametrize(("arguments", "field", "said"), [
    ({"dataset": "chain_sums"}, "dataset", "chain_sum"), ({"dataset": "composite"}, "", "at least one dataset"),
    ({"dataset": "chain_sum", "settings": {"max_term": 2}}, r"settings\.max_term", "max_terms"),
    ({"dataset": "chain_sum", "settings": {"size": 2}}, r"settings\.size", "beside settings"),
    ({"dataset": "chain_sum", "settings": {"max_terms": 1}}, "", "max_terms must be >= min_terms"),
    ({"dataset": "chain_sum", "size": 0}, "", "size must be positive"),
    ({"dataset": "chain_sum", "template": "{expresion}"}, "template", "expression"),
    ({"dataset": "chain_sum", "template": "{"}, "template", "brace"),
    ({"dataset": "chain_sum", "system": "Think."}, "system", "chat: true")])
def test_what_a_dataset_does_not_know_is_refused_with_the_nearest(task, arguments, field, said):
    with pytest.raises(ConfigError, match=rf"^prompts\.arguments\.?{field}.*{said}"):
        task["questions"](**arguments)


def test_an_entry_that_is_no_plain_value_is_refused(task, monkeypatch):
    import reasoning_gym

    class Odd:
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> dict[str, Any]:
            return {"question": "?", "answer": "!", "metadata": {"board": object()}}

    monkeypatch.setattr(reasoning_gym, "create_dataset", lambda name, **settings: Odd())
    with pytest.raises(ConfigError, match="plain values"):
        task["questions"]("chain_sum", seed=77)


@pytest.mark.parametrize("recipe", ["chain_sum.yaml", "chain_sum_smollm2.yaml"])
def test_the_recipes_name_functions_and_arguments_that_exist(task, recipe, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "models" / "smollm2-135m-instruct"
    folder.mkdir(parents=True)
    load_function(f"{RECIPE / 'tiny.py'}:tiny_qwen3", field="test")(folder, layers=1, hidden=16, heads=2, intermediate=16)
    (folder / "chat_template.jinja").write_text("{{ messages[0]['content'] }}")
    config = load_config(RECIPE / recipe)
    check_environment(config)
    assert len(task["questions"](**config.prompts.arguments)) == 5000
    held_out = config.eval.sets["held_out"]
    assert len(task["held_out"](**held_out.prompts.arguments)) >= (held_out.limit or 1)
    assert config.env.reward.endswith("task.py:score")


def test_the_tiny_model_can_write_every_question_and_answer(task, tmp_path):
    load_function(f"{RECIPE / 'tiny.py'}:tiny_qwen3", field="test")(tmp_path, layers=1, hidden=16, heads=2, intermediate=16)
    tokenizer = Tokenizer(tmp_path)
    arguments = yaml.safe_load((RECIPE / "chain_sum.yaml").read_text())["prompts"]["arguments"]
    for prompt in task["questions"](**arguments | {"size": 50}):
        done = complete_prompt(prompt, prompt_id="p", tokenizer=tokenizer)
        assert tokenizer.decode(done.tokens) == prompt.text
        assert len(tokenizer.encode_rest(prompt.columns["answer"])) == len(prompt.columns["answer"]) < 4


@pytest.mark.slow
def test_the_recipe_trains_two_steps_from_a_random_model(task, tmp_path):
    command = ["-m", "asyncrl.cli", "train", str(RECIPE / "chain_sum.yaml"), f"run.folder={tmp_path}", "run.steps=2",
               "eval.sets.held_out.limit=16",
               "warm_up={kind: none}", "buffer.zero_variance=keep", "buffer.groups_per_step=4", "buffer.group_size=4",
               "run.rollouts_every_steps=1",
               "model.arguments={layers: 1, hidden: 32, heads: 2, intermediate: 32}"]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False,
                          env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    summary = json.loads((tmp_path / "chain-sum" / "summary.json").read_text())
    assert (summary["steps"], summary["ledger_closed"]) == (2, True)
    rows = [json.loads(line) for line in (tmp_path / "chain-sum" / "rollouts.jsonl").read_text().splitlines()]
    assert {row["error"] for row in rows} == {""}
    assert all(0.0 <= row["rewards"]["score"] <= 1.0 for row in rows)


def test_a_misspelt_dataset_ends_the_command_before_anything_starts(task, tmp_path):
    tree = yaml.safe_load((RECIPE / "chain_sum_smollm2.yaml").read_text())
    arguments = json.dumps(tree["prompts"]["arguments"] | {"dataset": "chain_summ"})
    load_function(f"{RECIPE / 'tiny.py'}:tiny_qwen3", field="test")(tmp_path / "tiny", layers=1, hidden=16, heads=2, intermediate=16)
    command = ["-m", "asyncrl.cli", "train", str(RECIPE / "chain_sum_smollm2.yaml"), f"run.folder={tmp_path / 'runs'}",
               f"model.path={tmp_path / 'tiny'}", f"prompts.arguments={arguments}"]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 2
    assert "'chain_summ' is not allowed: a dataset of reasoning-gym. The nearest are ['chain_sum'" in done.stderr
    assert not list((tmp_path / "runs").rglob("*.log"))
