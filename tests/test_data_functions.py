"""Data that a function of the user's yields."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from data_cases import Specs, refusal

from trtforge.data import open_dataset
from trtforge.errors import InputError

MODULE = """
import numpy as np
calls = []
def good():
    for index in range(3):
        yield {"x": np.full((2, 4), index, np.float32), "labels": [index, index]}
def plain_list():
    return [{"x": np.zeros((2, 4), np.float32)}]
def raising():
    yield {"x": np.zeros((2, 4), np.float32)}
    raise RuntimeError("no disk")
def raising_at_once():
    raise RuntimeError("no network")
def exiting():
    yield {"x": np.zeros((2, 4), np.float32)}
    raise SystemExit(0)
def exiting_at_once():
    raise SystemExit(0)
def numbers():
    yield 3
def nothing():
    return []
def none():
    return None
def ragged():
    yield {"x": [[1.0], [1.0, 2.0]]}
def objects():
    yield {"x": np.array([[None] * 4])}
def nan():
    yield {"x": np.full((1, 4), np.nan, np.float32)}
def odd_key():
    yield {"x": np.zeros((2, 4), np.float32), 1: np.zeros(2)}
def once():
    if not calls:
        calls.append(1)
        yield {"x": np.zeros((2, 4), np.float32)}
def random():
    calls.append(1)
    yield {"x": np.full((2, 4), len(calls), np.float32)}
"""
MODULE_NUMBERS = itertools.count()


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module in the working directory, under a name of its own, so that no test meets another's cache."""
    name = f"user_module_{next(MODULE_NUMBERS)}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    return name


def test_a_function_of_a_module_in_the_working_directory_gives_data(user_module: str, x_spec: Specs) -> None:
    dataset = open_dataset(f"{user_module}:good", x_spec)
    assert (len(dataset), dataset.has_labels) == (6, True)
    assert [batch.feeds["x"][:, 0].tolist() for batch in dataset.batches(4)] == [[0, 0, 1, 1], [2, 2]]
    assert [batch.feeds["x"][:, 0].tolist() for batch in dataset.view(3, 6).batches(4)] == [[1, 2, 2]]
    assert len(open_dataset(f"{user_module}:plain_list", x_spec)) == 2


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("raising", "it failed with RuntimeError: no disk"),
        ("raising_at_once", "it failed with RuntimeError: no network"),
        ("exiting", "it failed with SystemExit: 0"),
        ("exiting_at_once", "it failed with SystemExit: 0"),
        ("numbers", "it yielded a int"),
        ("nothing", "it yielded nothing"),
        ("none", "it failed with TypeError"),
        ("ragged", "it holds what is no array"),
        ("objects", "input 'x' holds Python objects"),
        ("nan", "input 'x' holds NaN"),
        ("odd_key", "unknown array 1"),
    ],
)
def test_a_function_that_gives_no_data_is_refused(user_module: str, x_spec: Specs, function: str, why: str) -> None:
    assert why in refusal(f"{user_module}:{function}", x_spec).why


@pytest.mark.parametrize(
    ("function", "why"),
    [
        ("once", "it gave 0 samples where it had 2 when it was first read"),
        ("random", "it yields other data when it is read again"),
    ],
)
def test_a_function_that_cannot_be_repeated_is_refused_when_read_again(
    user_module: str, x_spec: Specs, function: str, why: str
) -> None:
    dataset = open_dataset(f"{user_module}:{function}", x_spec)
    with pytest.raises(InputError) as caught:
        list(dataset.batches(2))
    assert why in caught.value.why
