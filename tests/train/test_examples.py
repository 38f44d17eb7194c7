"""Rows of supervised training: which tokens they become, and which of them are learned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from asyncrl.errors import ConfigError
from asyncrl.train.examples import Example, ExampleReader, PackedExamples, jsonl_rows
from tests.tiny_model import CHARACTERS, EOS, make_tiny_model

TEMPLATE = """{% for message in messages %}{% if message.role == 'user' %}?{{ message.content }}={% else %}-{% generation %}\
{{ message.content }}<eos>{% endgeneration %}{{ '+' }}{% endif %}{% endfor %}{% if add_generation_prompt %}-{% endif %}"""
FORGETFUL = """{% for message in messages %}{% if message.role == 'user' or loop.last %}{{ message.content }}{% endif %}{% endfor %}"""
PLAIN = """{% for message in messages %}{{ message.content }}{{ '=' if message.role == 'user' else '' }}{% endfor %}"""
CHAT = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}, {"role": "user", "content": "7-2"},
        {"role": "assistant", "content": "5"}]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for name, template in {"chat": TEMPLATE, "forgetful": FORGETFUL, "plain": PLAIN}.items():
        folders[name] = make_tiny_model(tmp_path_factory.mktemp("models") / name)
        (folders[name] / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folders


def ids(text: str) -> list[int]:
    return [CHARACTERS.index(character) + 2 for character in text]


def read(folder: Path, row: Any) -> Example:
    (example,) = ExampleReader(folder).read([row], field="examples")
    return example


def learned(example: Example) -> list[int]:
    return example.tokens[example.loss_mask].tolist()


@pytest.mark.parametrize("row", [("1+1=", "2"), {"prompt": "1+1=", "completion": "2", "source": "a column more"},
                                 {"prompt": ids("1+1="), "completion": [*ids("2"), EOS]},
                                 {"tokens": [*ids("1+1=2"), EOS], "loss_mask": [False] * 4 + [True] * 2},
                                 Example(np.array([*ids("1+1=2"), EOS], np.int32), np.arange(6) >= 4)])
def test_a_completion_is_learned_with_its_end_and_the_prompt_is_not(row: Any, tiny: Path) -> None:
    example = read(tiny, row)
    assert example.tokens.tolist() == [*ids("1+1=2"), EOS]
    assert learned(example) == [*ids("2"), EOS]
    assert (example.tokens.dtype, example.loss_mask.dtype) == (np.int32, np.bool_)


def test_of_a_conversation_only_what_the_assistant_says_is_learned_as_transformers_marks_it(models: dict[str, Path]) -> None:
    example = read(models["chat"], {"messages": CHAT})
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(models["chat"] / "tokenizer.json"), chat_template=TEMPLATE, eos_token="<eos>")
    theirs = tokenizer.apply_chat_template(CHAT, return_dict=True, return_assistant_tokens_mask=True)
    assert example.tokens.tolist() == theirs["input_ids"]
    assert example.loss_mask.astype(int).tolist() == theirs["assistant_masks"]
    assert learned(example) == [*ids("2"), EOS, *ids("5"), EOS]


@pytest.mark.parametrize("completion", ["5", CHAT[3:]])
def test_answers_in_the_prompt_are_not_learned(completion: Any, models: dict[str, Path]) -> None:
    example = read(models["chat"], {"prompt": CHAT[:3], "completion": completion})
    assert learned(example) == [*ids("5"), EOS]
    assert example.tokens.tolist() == read(models["chat"], {"messages": CHAT}).tokens.tolist()


def test_a_last_answer_whose_template_does_not_end_it_is_ended(models: dict[str, Path]) -> None:
    example = read(models["plain"], {"messages": CHAT})
    assert example.tokens.tolist() == [*ids("1+1=27-2=5"), EOS]
    assert learned(example) == [*ids("2"), *ids("5"), EOS]


def test_a_template_that_rewrites_what_came_before_is_refused_and_one_answer_a_row_is_not(models: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"examples row 1 = .*rewrites what came before.*one row an answer"):
        read(models["forgetful"], {"messages": CHAT})
    assert learned(read(models["forgetful"], {"prompt": CHAT[:3], "completion": "5"})) == [*ids("5"), EOS]


@pytest.mark.parametrize(("row", "match"), [
    ("1+1=2", "prompt and completion, messages, or tokens"), ({"question": "1"}, "prompt and completion, messages, or tokens"),
    ({"messages": CHAT[:1]}, "messages with an answer of the assistant"), ({"messages": []}, "messages with an answer"),
    ({"prompt": "1", "completion": [3]}, "text, messages, or a list of token ids"), ({"prompt": [2], "completion": []}, "token ids"),
    ({"prompt": [2], "completion": [0.5]}, "token ids"), ({"prompt": [2], "completion": [16]}, "below the model's vocab_size 16"),
    ({"prompt": [2], "completion": [2**40]}, "below the model's vocab_size 16"), ({"prompt": [-3], "completion": [2]}, "token ids from 0"),
    ({"tokens": [2, 3], "loss_mask": [True, True]}, "not the first"), ({"tokens": [2, 3], "loss_mask": [False]}, "as many places"),
    ({"tokens": [2, 3], "loss_mask": [False, False]}, "at least one of them learned"),
    ({"prompt": [2] * 256, "completion": [3]}, "at most 256"), ({"prompt": "1+\ud83d", "completion": "2"}, "half of a surrogate pair"),
    ({"prompt": [[2], [3, 4]], "completion": [2]}, "token ids"), ({"prompt": CHAT[:3], "completion": 5}, "text, messages, or a list"),
    *(({"tokens": [2, 3], "loss_mask": mask}, "a loss_mask of booleans, or of 0 and 1")
      for mask in (None, True, {}, [], [[0], [0, 1]], [0, -100], [0, 2], ["false", "true"], [0.0, 1.0], [False, None])),
    ({"messages": [CHAT[0], {"role": "assistant", "content": "\udc00"}]}, "half of a surrogate pair")])
def test_a_row_that_cannot_be_trained_on_is_refused_by_its_number(row: Any, match: str, models: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=match) as refused:
        list(ExampleReader(models["chat"]).read([("1+1=", "2"), row], field="examples"))
    assert refused.value.field == "examples row 2"


def test_messages_without_a_template_are_the_models_fault(tiny: Path) -> None:
    with pytest.raises(ConfigError, match="a folder with a chat template") as refused:
        read(tiny, {"messages": CHAT})
    assert refused.value.field == "model"


def test_a_file_is_refused_by_its_line(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "1", "completion": "2"}) + "\n{broken\n", encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        jsonl_rows(file, field="examples")
    assert refused.value.field == "examples line 2"
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="UTF-8"):
        jsonl_rows(file, field="examples")


def test_packed_examples_lie_end_to_end(tiny: Path) -> None:
    packed = PackedExamples.of(list(ExampleReader(tiny).read([("1+1=", "2"), ("7", "8")], field="examples")))
    assert packed.cu_seqlens.tolist() == [0, 6, 9]
    assert packed.tokens.tolist() == [*ids("1+1=2"), EOS, *ids("78"), EOS]
    assert packed.num_loss_tokens == 4
