"""The table of Triton's releases, and which release loads an engine."""

from __future__ import annotations

import re

import pytest

from trtforge.errors import InputError
from trtforge.serving.triton_releases import load_releases, release_for_engine

KNOWN = load_releases()


def test_every_row_of_the_table_is_sound_and_has_a_source() -> None:
    releases = [entry.release for entry in KNOWN]
    assert releases == sorted(set(releases))
    for entry in KNOWN:
        assert re.fullmatch(r"\d\d\.\d\d", entry.release)
        assert re.fullmatch(r"\d+(\.\d+){2,3}", entry.tensorrt)
        assert entry.source.startswith("https://")


@pytest.mark.parametrize("entry", KNOWN, ids=lambda entry: entry.release)
def test_a_known_version_finds_its_release_with_and_without_its_name(entry: object) -> None:
    assert release_for_engine(entry.tensorrt, None) == entry.release  # type: ignore[attr-defined]
    assert release_for_engine(entry.tensorrt, entry.release) == entry.release  # type: ignore[attr-defined]


def test_another_version_is_refused_with_the_release_to_take() -> None:
    with pytest.raises(
        InputError, match=re.escape("Triton 24.12 cannot load the engine: it has TensorRT 10.7.0.23")
    ) as caught:
        release_for_engine("10.3.0.26", "24.12")
    assert "--triton-version 24.08" in caught.value.fix


def test_an_unknown_engine_version_lists_what_is_known() -> None:
    with pytest.raises(
        InputError, match=re.escape("no release of Triton is known that has TensorRT 11.4.1.5")
    ) as caught:
        release_for_engine("11.4.1.5", None)
    assert all(entry.release in caught.value.why for entry in KNOWN)
    assert "--triton-version YY.MM=11.4.1.5" in caught.value.fix


def test_an_unknown_release_needs_its_version_stated() -> None:
    with pytest.raises(InputError, match=re.escape("the TensorRT version of Triton 30.01 is not known")):
        release_for_engine("11.4.1.5", "30.01")
    assert release_for_engine("11.4.1.5", "30.01=11.4.1.5") == "30.01"
    with pytest.raises(InputError, match=re.escape("Triton 30.01 cannot load the engine: it has TensorRT 11.5.0.2")):
        release_for_engine("11.4.1.5", "30.01=11.5.0.2")


@pytest.mark.parametrize("wanted", ["25", "25.8", "latest", "25.08=", "25.08=x", "25.08=10", "٢٥.٠٨"])
def test_what_is_no_release_is_refused(wanted: str) -> None:
    with pytest.raises(InputError, match="--triton-version"):
        release_for_engine("10.3.0.26", wanted)


def test_versions_are_compared_as_far_as_both_state_them() -> None:
    assert release_for_engine("10.7.0", None) == "24.12"
    with pytest.raises(InputError, match="no release"):
        release_for_engine("10.7", None)


def test_a_version_compatible_engine_loads_in_later_versions_of_its_major_one() -> None:
    assert release_for_engine("10.3.0.26", "24.12", is_version_compatible=True) == "24.12"
    with pytest.raises(InputError, match="cannot load the engine"):
        release_for_engine("10.7.0.23", "24.08", is_version_compatible=True)
    with pytest.raises(InputError, match="cannot load the engine"):
        release_for_engine("9.3.0.1", "24.12", is_version_compatible=True)
