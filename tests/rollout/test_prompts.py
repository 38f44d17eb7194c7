"""Prompts: each has an id and tokens of its own; text becomes tokens exactly once."""

from __future__ import annotations

import dataclasses
import itertools
import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.processors import TemplateProcessing

from asyncrl.errors import ConfigError
from asyncrl.rollout.prompt_rows import complete_prompt, read_jsonl
from asyncrl.rollout.prompts import PromptSource
from asyncrl.rollout.seeds import derive_seed
from asyncrl.tokenizer import Tokenizer
from asyncrl.types import Prompt
from tests.rollout.rollout_fakes import write_tokenizer

BOS, ZERO = 1, 3


@pytest.fixture
def tokenizer(tmp_path) -> Tokenizer:
    return Tokenizer(write_tokenizer(tmp_path / "plain"))


@pytest.fixture
def bos_tokenizer(tmp_path) -> Tokenizer:
    return Tokenizer(write_tokenizer(tmp_path / "bos", adds_bos=True))


def ids(source: PromptSource, tokenizer: Tokenizer, count: int | None = None) -> list[str]:
    return [prompt.prompt_id for prompt in itertools.islice(source.stream(tokenizer), count)]


def test_prompts_get_tokens_text_and_an_id_by_source_and_ordinal(tokenizer):
    source = PromptSource([Prompt(text="01", source="sums"), Prompt(tokens=(5, 4)), Prompt(text="2", prompt_id="mine")], epochs=1)
    first, second, third = source.stream(tokenizer)
    assert (first.prompt_id, first.tokens, first.text) == ("sums/0", (3, 4), "01")
    assert (second.prompt_id, second.tokens, second.text) == ("train/1", (5, 4), "21")
    assert third.prompt_id == "mine"
    assert source.cursor == 3


def test_a_list_starts_again_and_ids_go_on(tokenizer):
    data = [Prompt(text="0"), Prompt(text="1")]
    assert ids(PromptSource(data), tokenizer, 5) == [f"train/{n}" for n in range(5)]
    assert len(ids(PromptSource(data, epochs=2), tokenizer)) == 4


def test_an_iterator_ends_the_data(tokenizer):
    assert ids(PromptSource(iter([Prompt(text="0"), Prompt(text="1")])), tokenizer) == ["train/0", "train/1"]


def test_the_cursor_counts_what_was_handed_out(tokenizer):
    source = PromptSource(Prompt(text="0") for _ in itertools.count())
    assert ids(source, tokenizer, 3)[-1] == "train/2"
    assert source.cursor == 3


@pytest.mark.parametrize("epochs", [0, -1])
def test_epochs_below_one_are_refused(epochs):
    with pytest.raises(ConfigError, match=r"prompts\.epochs"):
        PromptSource([Prompt(text="0")], epochs=epochs)


@pytest.mark.parametrize("data", [[], ["12+34="], [{"prompt": "1"}], [Prompt()], [None], 5, None, [Prompt(tokens=(5, -100))],
                                  [Prompt(tokens=(1.5,))]])
def test_data_without_usable_prompts_is_refused(data, tokenizer):
    with pytest.raises(ConfigError, match="prompts"):
        ids(PromptSource(data), tokenizer)


def test_jsonl_rows_hold_a_prompt_and_columns(tmp_path, tokenizer):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "1+1=", "answer": "2"}\n\n{"prompt": "2+2=", "answer": "4"}\n', encoding="utf-8")
    first, second = PromptSource(path, epochs=1).stream(tokenizer)
    assert (first.text, first.columns, second.columns) == ("1+1=", {"answer": "2"}, {"answer": "4"})
    assert read_jsonl(path, source="eval")[0].source == "eval"


def test_a_line_separator_inside_a_text_does_not_end_a_row(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"prompt": "a\u2028b\x85c"}, ensure_ascii=False) + "\n", encoding="utf-8")
    assert read_jsonl(path)[0].text == "a\u2028b\x85c"


TEMPLATE = """{{ bos_token }}{% for message in messages %}
{{ message.role[0] | replace("u", "1") | replace("s", "2") }}={{ message.content }}+{% endfor %}
{% if think is defined %}{{ think }}{% endif %}
{% if add_generation_prompt %}={% endif %}"""
USER, SYSTEM, ASSISTANT = {"role": "user", "content": "34"}, {"role": "system", "content": "0"}, {"role": "assistant", "content": "7"}


def chat_tokenizer(folder: Path, *, template: str = TEMPLATE, adds_bos: bool = True) -> Tokenizer:
    write_tokenizer(folder, adds_bos=adds_bos)
    (folder / "chat_template.jinja").write_text(template)
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    return Tokenizer(folder)


def test_jsonl_rows_may_hold_messages_which_become_text_by_the_models_template(tmp_path):
    path = tmp_path / "data.jsonl"
    rows = [{"prompt": [SYSTEM, USER], "answer": "7"}, {"prompt": "1+", "answer": "2"}]
    path.write_text("\n".join(map(json.dumps, rows)))
    chat, text = PromptSource(path, epochs=1).stream(chat_tokenizer(tmp_path / "chat"))
    assert (chat.text, chat.messages, chat.columns) == ("<s>2=0+1=34+=", (SYSTEM, USER), {"answer": "7"})
    assert (text.text, text.messages, text.columns) == ("1+", (), {"answer": "2"})
    assert chat.tokens == (BOS, 5, 14, 3, 13, 4, 14, 6, 7, 13, 14)


@pytest.mark.parametrize("adds_bos", [True, False])
def test_a_conversation_gets_exactly_one_beginning_of_sequence_whoever_adds_it(tmp_path, adds_bos):
    tokenizer = chat_tokenizer(tmp_path, adds_bos=adds_bos)
    assert complete_prompt(Prompt(messages=(USER,)), prompt_id="p", tokenizer=tokenizer).tokens.count(BOS) == 1


def test_a_template_that_leaves_the_beginning_of_sequence_to_the_tokenizer_gets_one(tmp_path):
    tokenizer = chat_tokenizer(tmp_path, template="{{ messages[0].content }}=")
    assert complete_prompt(Prompt(messages=(USER,)), prompt_id="p", tokenizer=tokenizer).tokens == (BOS, 6, 7, 14)


def test_a_row_hands_variables_to_the_template(tmp_path):
    prompt = Prompt(messages=(USER,), columns={"chat_template_kwargs": {"think": "9"}})
    tokenizer = chat_tokenizer(tmp_path)
    assert complete_prompt(prompt, prompt_id="p", tokenizer=tokenizer).text == "<s>1=34+9="
    with pytest.raises(ConfigError, match="chat_template_kwargs"):
        complete_prompt(dataclasses.replace(prompt, columns={"chat_template_kwargs": "think"}), prompt_id="p", tokenizer=tokenizer)


def test_messages_need_a_template_and_say_so(tokenizer):
    with pytest.raises(ConfigError, match=r"Put chat_template\.jinja into it"):
        complete_prompt(Prompt(messages=(USER,)), prompt_id="p", tokenizer=tokenizer)


def test_messages_with_tokens_are_not_rendered_again(tokenizer):
    done = complete_prompt(Prompt(messages=(USER,), tokens=(5, 4)), prompt_id="p", tokenizer=tokenizer)
    assert (done.tokens, done.text, done.messages) == ((5, 4), "21", (USER,))


@pytest.mark.parametrize("messages", [[5], ["34"], [{"content": "3"}], [{"role": 1, "content": "3"}], [{"role": "user", "content": None}],
                                      [USER, ASSISTANT], [USER, {"role": "user", "content": 3}]])
def test_messages_nobody_can_answer_are_refused_in_files_and_in_code(tmp_path, messages):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"prompt": messages}))
    with pytest.raises(ConfigError, match=r"prompts\.path line 1"):
        read_jsonl(path)
    with pytest.raises(ConfigError, match=r"prompts\.messages"):
        complete_prompt(Prompt(messages=messages), prompt_id="p", tokenizer=chat_tokenizer(tmp_path / "chat"))


@pytest.mark.parametrize("line", ["{", "[1]", '{"question": "1"}', '{"prompt": 5}', '{"prompt": []}', '{"prompt": [{"role": "user"}]}',
                                  '{"prompt": "1", "x": ' + "[" * 100_000 + "]" * 100_000 + "}", f'{{"prompt": "1", "x": {"9" * 5000}}}',
                                  '{"prompt": "1", "x": 99999999999999999999}',
                                  '{"prompt": "' + "1" * (17 << 20) + '"}'], ids=lambda line: line[:40])
def test_a_bad_row_is_named_by_its_number(tmp_path, line):
    path = tmp_path / "data.jsonl"
    path.write_text('{"prompt": "1"}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"prompts\.path line 2"):
        read_jsonl(path)


def test_a_mark_of_the_encoding_and_line_ends_of_any_system_are_no_part_of_a_row(tmp_path):
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "1"}\r\n\r\n{"prompt": "2"}')
    assert [prompt.text for prompt in read_jsonl(path)] == ["1", "2"]


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="existing JSONL file"):
        PromptSource(tmp_path / "none.jsonl")


def test_a_raw_text_gets_exactly_one_beginning_of_sequence(bos_tokenizer):
    assert bos_tokenizer.encode("01") == (BOS, ZERO, ZERO + 1)


def test_a_template_that_renders_the_beginning_of_sequence_gets_no_second_one(bos_tokenizer):
    assert bos_tokenizer.encode("<s>01") == (BOS, ZERO, ZERO + 1)


def test_what_a_tokenizer_puts_at_the_end_is_left_out_of_a_prompt(tmp_path):
    folder = write_tokenizer(tmp_path)
    fast = FastTokenizer.from_file(str(folder / "tokenizer.json"))
    fast.post_processor = TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", BOS), ("</s>", 2)])
    fast.save(str(folder / "tokenizer.json"))
    tokenizer = Tokenizer(folder)
    assert tokenizer.encode("01") == tokenizer.encode("<s>01") == (BOS, ZERO, ZERO + 1)
    assert tokenizer.encode("01</s>") == (BOS, ZERO, ZERO + 1, 2)


def test_a_tokenizer_without_one_adds_none(tokenizer):
    assert tokenizer.encode("01") == (ZERO, ZERO + 1)
    assert tokenizer.encode("") == ()


def test_decoding_leaves_special_tokens_out(bos_tokenizer):
    assert bos_tokenizer.decode([BOS, ZERO, ZERO + 1, 2]) == "01"


def test_a_folder_without_tokenizer_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)


def test_a_prompt_keeps_the_tokens_it_came_with(bos_tokenizer):
    prompt = complete_prompt(Prompt(tokens=(BOS, ZERO)), prompt_id="eval/0", tokenizer=bos_tokenizer)
    assert (prompt.tokens, prompt.text, prompt.prompt_id) == ((BOS, ZERO), "0", "eval/0")


def test_seeds_depend_on_their_parts_alone():
    assert derive_seed(0, 1, 2) == derive_seed("0", 1, 2) == 3138473850163287390
    assert len({derive_seed(0, 1, 2), derive_seed(0, 12), derive_seed(0, 2, 1), derive_seed(1, 1, 2)}) == 4
    assert all(0 <= derive_seed(0, n) < 2**63 for n in range(1000))


def test_half_of_a_surrogate_pair_is_refused_with_its_place(tmp_path, tokenizer):
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({"prompt": "12\ud83d"}) + "\n")
    with pytest.raises(ConfigError, match="character 2 of this text"):
        next(PromptSource(path).stream(tokenizer))
