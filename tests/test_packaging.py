"""What is installed: recipes come with the library, inside it, and nothing else comes."""

from __future__ import annotations

import configparser
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from asyncrl.recipe_files import recipe_names

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy: setuptools writes beside its sources."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("asyncrl", "recipes"):
        shutil.copytree(ROOT / name, folder / "source" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.cfg", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source")
    subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-build-isolation",
                    "--wheel-dir", str(folder), str(folder / "source")], check=True, timeout=120, capture_output=True)
    (built,) = folder.glob("*.whl")
    return built


def test_every_package_is_named_in_setup_cfg() -> None:
    settings = configparser.ConfigParser()
    settings.read(ROOT / "setup.cfg")
    packages = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "asyncrl").rglob("__init__.py")}
    assert set(settings["options"]["packages"].split()) == packages | {"asyncrl.recipes"}


def test_a_wheel_holds_every_recipe_and_no_package_but_ours(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names} == {"asyncrl", f"{'-'.join(wheel.name.split('-')[:2])}.dist-info"}
    inside = {name.removeprefix("asyncrl/recipes/") for name in names if name.startswith("asyncrl/recipes/")}
    files = [path for path in (ROOT / "recipes").rglob("*") if path.suffix in (".py", ".yaml", ".json")]
    assert inside == {str(path.relative_to(ROOT / "recipes")) for path in files}


def test_an_installed_recipe_is_found_by_name_from_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path / "installed")
    (tmp_path / "empty").mkdir()

    def asyncrl(*arguments: str) -> str:
        done = subprocess.run([sys.executable, "-m", "asyncrl.cli", *arguments], cwd=tmp_path / "empty", capture_output=True, text=True,
                              timeout=60, check=False, env=os.environ | {"PYTHONPATH": str(tmp_path / "installed")})
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    assert f"function: {tmp_path / 'installed' / 'asyncrl' / 'recipes' / 'arithmetic' / 'task.py'}:sums" in asyncrl(
        "train", "arithmetic/quickstart", "--dry-run")
    *recipes, _, place = asyncrl("recipes").splitlines()
    assert [line.split()[0] for line in recipes] == recipe_names()
    assert place == f"in {tmp_path / 'installed' / 'asyncrl' / 'recipes'}"
    assert list((tmp_path / "empty").iterdir()) == []
