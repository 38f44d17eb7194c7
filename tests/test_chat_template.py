"""A conversation becomes the text that Hugging Face makes of it, character for character."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from asyncrl.chat_template import ChatTemplate
from asyncrl.errors import ConfigError
from tests.rollout.rollout_fakes import write_tokenizer

CHATML = """{%- if messages[0].role != "system" %}
{{- "<|im_start|>system\\nBe helpful.<|im_end|>\\n" }}
{%- endif %}
{%- for message in messages %}
{{- "<|im_start|>" + message["role"] + "\\n" + message["content"] + "<|im_end|>" + "\\n" }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- "<|im_start|>assistant\\n" }}
    {%- if enable_thinking is defined and enable_thinking is false %}
{{- "<think>\\n\\n</think>\\n\\n" }}
    {%- endif %}
{%- endif %}
"""
HEADERS = """{% set offset = 0 %}{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
<|start_header_id|>system<|end_header_id|>

{{ system }}{{ eos_token }}
{% for message in messages %}
    {% if not (message['role'] in ('user', 'assistant', 'tool')) %}
        {{ raise_exception('only users and assistants talk here') }}
    {% endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + eos_token }}
{% endfor %}
{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
EVERYTHING = """{{ bos_token }}Today is {{ strftime_now("%d %B %Y") }}.
{# a comment #}
{% macro shout(text) %}{{ text | upper }}!{% endmacro %}
{% set ns = namespace(count=0) %}
{% for message in messages %}
    {% if message.role == "tool" %}{% continue %}{% endif %}
    {% if message.role == "stop" %}{% break %}{% endif %}
    {% set ns.count = ns.count + 1 %}
{{ loop.index }}/{{ loop.length }} {{ shout(message.role) }} {{ message | tojson }} {{ message | tojson(indent=2, sort_keys=true) }}
    {% if message.content is string %}
{{ message.content.split("\\n")[-1] | trim }}{% generation %} <{{ message.content }}>{% endgeneration %}

    {% else %}
{% for part in message.content if part.type == "text" %}{{ part.text }}{% endfor %}
    {% endif %}
{% endfor %}
{{ ns.count }} {{ unheard_of }}{{ tools is none }}{{ documents is none }}{{ unk_token }}{{ pad_token }}
{%- if add_generation_prompt %}
A:{{ " " }}
{%- endif %}"""
TEMPLATES = {"chatml": CHATML, "headers": HEADERS, "everything": EVERYTHING}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "question": [{"role": "user", "content": "What is <b>1 & 2</b>?"}],
    "system": [{"role": "system", "content": " Count, 'carefully'.\n"}, {"role": "user", "content": "één\n 🙂 \u2028?"}],
    "turns": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2 "}, {"role": "tool", "content": "3", "name": "add"},
              {"role": "user", "content": ""}],
}
PARTS = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is it?"}]}]


def folder_with(folder: Path, template: str | None, **settings: Any) -> Path:
    """A tokenizer folder whose settings are `settings`, and whose template lies in a file of its own."""
    write_tokenizer(folder)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"} | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


def theirs(folder: Path, messages: list[dict[str, Any]], **variables: Any) -> str:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **variables)


@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_conversation_is_rendered_as_hugging_face_renders_it(tmp_path, template, messages):
    folder = folder_with(tmp_path, template)
    text = ChatTemplate(folder).render(messages)
    assert text == theirs(folder, messages)
    assert messages[0]["content"].strip() in text


def test_content_in_parts_is_rendered_as_hugging_face_renders_it(tmp_path):
    folder = folder_with(tmp_path, EVERYTHING)
    text = ChatTemplate(folder).render(PARTS)
    assert text == theirs(folder, PARTS)
    assert "What is it?" in text


def test_variables_reach_the_template(tmp_path):
    folder = folder_with(tmp_path, CHATML)
    text = ChatTemplate(folder).render(CONVERSATIONS["question"], {"enable_thinking": False})
    assert text == theirs(folder, CONVERSATIONS["question"], enable_thinking=False)
    assert text.endswith("</think>\n\n")


def test_json_is_not_escaped_for_html(tmp_path):
    folder = folder_with(tmp_path, "{{ messages | tojson }}")
    assert ChatTemplate(folder).render([{"role": "user", "content": "<é & '>"}]) == '[{"role": "user", "content": "<é & \'>"}]'


@pytest.mark.parametrize("settings", [
    {"chat_template": "here {{ messages[0].content }}"},
    {"chat_template": [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "here {{ messages[0].content }}"}]}])
def test_a_template_may_stand_in_the_settings_of_the_tokenizer(tmp_path, settings):
    folder = folder_with(tmp_path, None, **settings)
    assert ChatTemplate(folder).render([{"role": "user", "content": "1"}]) == "here 1" == theirs(folder, [{"role": "user", "content": "1"}])


def test_a_file_of_its_own_comes_before_the_settings(tmp_path):
    folder = folder_with(tmp_path, "file", chat_template="settings")
    assert ChatTemplate(folder).render(CONVERSATIONS["question"]) == "file" == theirs(folder, CONVERSATIONS["question"])


def test_special_tokens_may_be_written_with_their_flags_or_in_the_older_file(tmp_path):
    flags = {"content": "<s>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "__type": "AddedToken"}
    folder = folder_with(tmp_path, "{{ bos_token }}{{ eos_token }}", bos_token=flags)
    assert ChatTemplate(folder).render(CONVERSATIONS["question"]) == "<s></s>" == theirs(folder, CONVERSATIONS["question"])
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": flags, "eos_token": "</s>"}))
    assert ChatTemplate(folder).render(CONVERSATIONS["question"]) == "<s></s>"


def test_a_folder_without_a_template_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(ConfigError, match=r"chat template.*instruction-tuned model, or give prompts as text"):
        ChatTemplate(folder_with(tmp_path, None))


@pytest.mark.parametrize("template", ["{% for %}", "{{ messages", "{% elephant %}"])
def test_a_template_that_is_no_jinja_is_refused(tmp_path, template):
    with pytest.raises(ConfigError, match="Reading failed: TemplateSyntaxError"):
        ChatTemplate(folder_with(tmp_path, template))


@pytest.mark.parametrize(("template", "words"), [
    (HEADERS, "only users and assistants talk here"), ("{{ messages[0].content + 1 }}", "TypeError"), ("{{ nobody.content }}", "nobody"),
    ("{{ messages.append(1) }}", "not callable|unsafe|SecurityError"), ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"), ("{{ 'x' * 10 ** 18 }}", "MemoryError")])
def test_a_template_that_refuses_or_misbehaves_is_told_in_its_own_words(tmp_path, template, words):
    with pytest.raises(ConfigError, match=words):
        ChatTemplate(folder_with(tmp_path, template)).render([{"role": "judge", "content": "1"}])

