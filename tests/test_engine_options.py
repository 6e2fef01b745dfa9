from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import pytest

from trtforge.engine_options import DEFAULT_OPTIONS, EngineOptions, hash_plugins, size_from_text
from trtforge.errors import InputError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1048576", 2**20),
        ("2GiB", 2**31),
        ("512 MiB", 2**29),
        ("1.5GB", 1_500_000_000),
        (" 64KB ", 64_000),
        ("1KiB", 1024),
    ],
)
def test_sizes_have_binary_and_decimal_units(text: str, size: int) -> None:
    assert size_from_text(text) == size


@pytest.mark.parametrize(
    "text", ["", "0", "-1", "2 gib", "GiB", "1e9", "nan", "2TiB", "2GiBs", "0.0001KiB", "9" * 18 + "GiB"]
)
def test_what_is_no_size_is_refused_with_its_value(text: str) -> None:
    with pytest.raises(InputError) as caught:
        size_from_text(text)
    assert caught.value.what == f"--workspace {text} cannot be used"
    assert "2GiB" in caught.value.fix


@pytest.mark.parametrize("level", [-1, 6])
def test_a_level_that_no_builder_knows_is_refused(level: int) -> None:
    with pytest.raises(InputError) as caught:
        EngineOptions(optimization_level=level)
    assert caught.value.what == f"--optimization-level {level} cannot be used"
    assert caught.value.fix == "give a number from 0 to 5"


def test_an_unknown_hardware_compatibility_lists_the_known_ones() -> None:
    with pytest.raises(InputError) as caught:
        EngineOptions(hardware_compatible="hopper")  # type: ignore[arg-type]
    assert caught.value.what == "--hardware-compatible 'hopper' is unknown"
    assert caught.value.why == "it takes none, ampere_plus, same_compute_capability"


def test_a_workspace_of_nothing_is_refused() -> None:
    with pytest.raises(InputError, match=r"^--workspace 0 cannot be used"):
        EngineOptions(workspace=0)


def test_given_options_are_spelled_as_on_the_command_line() -> None:
    assert DEFAULT_OPTIONS.given() == {}
    options = EngineOptions(plugins=(Path("a.so"),), optimization_level=0, strip_weights=True)
    assert options.given() == {
        "plugins": "--plugin",
        "strip_weights": "--strip-weights",
        "optimization_level": "--optimization-level",
    }


@pytest.mark.parametrize(
    "change",
    [
        {"refit": True},
        {"strip_weights": True},
        {"version_compatible": True},
        {"hardware_compatible": "ampere_plus"},
        {"optimization_level": 0},
        {"workspace": 1},
    ],
)
def test_what_changes_the_engine_changes_the_identity(change: dict[str, Any]) -> None:
    assert dataclasses.replace(DEFAULT_OPTIONS, **change).identity() != DEFAULT_OPTIONS.identity()


def test_a_timing_cache_is_no_part_of_the_identity_and_plugins_count_by_content(tmp_path: Path) -> None:
    assert EngineOptions(timing_cache=tmp_path / "cache").identity() == DEFAULT_OPTIONS.identity()
    library = tmp_path / "lib.so"
    library.write_bytes(b"one")
    options = EngineOptions(plugins=(library,))
    first = options.identity()
    assert hash_plugins(options.plugins) == {"lib.so": hashlib.sha256(b"one").hexdigest()}
    library.write_bytes(b"two")
    assert options.identity() != first


def test_a_plugin_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "missing.so"):
        with pytest.raises(InputError) as caught:
            hash_plugins((path,))
        assert caught.value.what == f"--plugin {path} cannot be loaded"
        assert caught.value.why == "there is no such file"
    library = tmp_path / "lib.so"
    library.write_bytes(b"")
    with pytest.raises(InputError, match=r"^--plugin names two libraries lib.so"):
        hash_plugins((library, library))
