"""The wheel as it is shipped: pure Python, with recipes, profiles and the report's style inside."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from trtforge.plugins.sources import find_sources

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from this tree."""
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", "--quiet", "--disable-pip-version-check"]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *options, "-w", folder, ROOT], check=True)
    (path,) = folder.glob("*.whl")
    return path


def test_wheel_is_pure_and_carries_its_data(wheel: Path) -> None:
    assert wheel.name.endswith("-py3-none-any.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {"trtforge/py.typed", "trtforge/report/style.css", "trtforge/shipped/recipes/minilm.yaml"} <= names
    assert "trtforge/shipped/profiles/minilm.yaml" in names
    assert not any(name.startswith(("tests/", "examples/")) for name in names)
    assert "trtforge/shipped/plugin/plugins/csrc/tensorrt/exports.cpp" in names
    assert not any("/emulation/" in name for name in names)


def test_an_installed_wheel_finds_its_recipes_and_profiles_by_name(wheel: Path, tmp_path: Path) -> None:
    options = ["--no-deps", "--quiet", "--disable-pip-version-check", "--target", tmp_path / "site"]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, wheel], check=True)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import trtforge.recipe as r; "
        "assert r.__file__.startswith(sys.argv[1]), r.__file__; "
        "print(r.load_recipe('minilm').method, sorted(r.shipped_files('profiles')))"
    )
    found = subprocess.run(
        [sys.executable, "-P", "-c", code, tmp_path / "site"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert found.stdout == "minmax ['minilm']\n"


def test_an_installed_wheel_builds_the_plugin_from_the_same_sources(wheel: Path, tmp_path: Path) -> None:
    options = ["--no-deps", "--quiet", "--disable-pip-version-check", "--target", tmp_path / "site"]
    subprocess.run([sys.executable, "-m", "pip", "install", *options, wheel], check=True)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from trtforge.plugins.sources import find_sources; "
        "tree = find_sources(); assert str(tree.root).startswith(sys.argv[1]), tree.root; print(tree.sha256)"
    )
    found = subprocess.run(
        [sys.executable, "-P", "-c", code, tmp_path / "site"], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == find_sources().sha256
