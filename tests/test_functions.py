"""References to functions: found beside the recipe or in a module, refused with the reason otherwise."""

from __future__ import annotations

import pytest

from asyncrl.errors import ConfigError
from asyncrl.functions import check_arguments, load_function, resolve_reference, source_file


@pytest.fixture
def task(tmp_path):
    path = tmp_path / "task.py"
    path.write_text("LIMIT = 3\n\n\ndef double(x):\n    return 2 * x\n\n\ndef _hidden():\n    pass\n", encoding="utf-8")
    return path


def test_a_file_is_looked_for_beside_the_recipe_and_made_absolute(task, tmp_path):
    reference = resolve_reference("task.py:double", base=tmp_path, field="env.reward")
    assert reference == f"{task}:double"
    assert resolve_reference(reference, base=tmp_path / "elsewhere", field="env.reward") == reference
    assert load_function(reference, field="env.reward")(21) == 42


def test_a_module_is_left_as_it_is_and_imported(tmp_path):
    assert resolve_reference("os.path:join", base=tmp_path, field="f") == "os.path:join"
    assert load_function("os.path:join", field="f")("a", "b") == "a/b"


@pytest.mark.parametrize("reference", [
    "lambda x: x", "lambda x:y", "double", "task.py", "task.py:", ":double", "task.py:a.b", "task.py:double()", "",
    ".task:double", "a b:c"])
def test_what_cannot_be_a_reference_is_refused_with_the_form(reference, tmp_path, task):
    with pytest.raises(ConfigError, match=r"env\.reward.*module-level function"):
        resolve_reference(reference, base=tmp_path, field="env.reward")


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"Looked for .*none\.py"):
        resolve_reference("none.py:f", base=tmp_path, field="env.reward")


def test_a_missing_function_shows_what_there_is(task):
    with pytest.raises(ConfigError, match=r"It defines \['double'\]"):
        load_function(f"{task}:triple", field="env.reward")


def test_what_is_not_callable_is_refused(task):
    with pytest.raises(ConfigError, match=r"env\.reward"):
        load_function(f"{task}:LIMIT", field="env.reward")


def test_a_missing_module_is_refused():
    with pytest.raises(ConfigError, match="No module named 'no_such_module'"):
        load_function("no_such_module:f", field="env.reward")


@pytest.mark.parametrize(("source", "text"), [("def f(:\n", "SyntaxError"), ("import no_such_module\n", "ModuleNotFoundError")])
def test_a_file_that_cannot_be_imported_is_refused_and_may_be_mended(tmp_path, source, text):
    path = tmp_path / "broken.py"
    path.write_text(source, encoding="utf-8")
    with pytest.raises(ConfigError, match=text):
        load_function(f"{path}:f", field="env.reward")
    path.write_text("def f():\n    return 'mended'\n", encoding="utf-8")
    assert load_function(f"{path}:f", field="env.reward")() == "mended"


def test_an_error_of_the_users_module_keeps_its_own_class(tmp_path):
    path = tmp_path / "raises.py"
    path.write_text("1 / 0\n", encoding="utf-8")
    with pytest.raises(ZeroDivisionError):
        load_function(f"{path}:f", field="env.reward")


def test_a_file_is_executed_once(task):
    assert load_function(f"{task}:double", field="a") is load_function(f"{task}:double", field="b")


def test_the_source_of_a_reference_is_found_without_importing_it(task, tmp_path):
    assert source_file(f"{task}:double") == task
    assert source_file("asyncrl.functions:load_function").name == "functions.py"
    assert source_file("no_such_module:f") is None
    assert source_file("no_such_package.module:f") is None
    assert source_file(f"{tmp_path}/none.py:f") is None
    assert source_file("") is None


@pytest.mark.parametrize("arguments", [{"sed": 1}, {}, {"folder": "x", "layers": 2}])
def test_arguments_that_a_function_does_not_take_are_refused_with_its_signature(arguments):
    def make(folder, *, layers):
        raise AssertionError("not called")

    check_arguments(make, "folder", field="model", arguments={"layers": 2})
    with pytest.raises(ConfigError, match=r"model\.arguments.*make\(folder, \*, layers\)"):
        check_arguments(make, "folder", field="model", arguments=arguments)
