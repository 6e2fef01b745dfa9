from __future__ import annotations

from pathlib import Path

import pytest

from trtforge.errors import InputError
from trtforge.recipe import Granularity, QuantRecipe, load_recipe, shipped_files, shipped_recipes


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    return path


def test_none_gives_the_defaults() -> None:
    assert load_recipe(None) == QuantRecipe(
        version=1,
        method="minmax",
        weights="per_channel",
        weight_range="minmax",
        smooth="auto",
        shift=True,
        bias_correction=True,
        rounding="learned",
        attention=False,
        mask="auto",
        exclude=(),
    )


def test_file_sets_what_it_names(tmp_path: Path) -> None:
    recipe = load_recipe(write(tmp_path, "method: percentile\npercentile: 99.9\nexclude: ['/head/*']\n"))
    assert recipe == QuantRecipe(method="percentile", percentile=99.9, exclude=("/head/*",))


def test_an_empty_file_gives_the_defaults(tmp_path: Path) -> None:
    assert load_recipe(write(tmp_path, "# nothing\n")) == QuantRecipe()


@pytest.mark.parametrize("text", ["[]", "false", "0", "''"])
def test_a_file_that_holds_no_mapping_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(InputError, match="does not hold a mapping"):
        load_recipe(write(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("metod: minmax", "unknown key 'metod'"),
        ("method: max", "method: Input should be 'minmax', 'percentile', 'entropy' or 'mse'"),
        ("percentile: 50", "percentile: Input should be greater than 50"),
        ("percentile: 101", "percentile: Input should be less than or equal to 100"),
        ("percentile: .nan", "percentile: "),
        ("version: 2", "version: Input should be 1"),
        ("weights: per_block", "weights: Input should be 'per_channel' or 'per_tensor'"),
        ("exclude: head", "exclude: Input should be a valid tuple"),
    ],
)
def test_invalid_content_is_named_by_its_place(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(InputError) as caught:
        load_recipe(write(tmp_path, text))
    assert problem in caught.value.why
    assert "version, method, percentile, weights, weight_range, smooth, shift" in caught.value.fix


def test_a_name_that_is_neither_file_nor_shipped_is_refused_with_the_names() -> None:
    with pytest.raises(InputError, match="recipe 'nothing' does not exist") as caught:
        load_recipe("nothing")
    assert "minilm" in caught.value.why


def test_shipped_recipes_and_profiles_are_found_by_name() -> None:
    assert load_recipe("minilm") == load_recipe(shipped_recipes()["minilm"])
    assert "minilm" in shipped_files("profiles")


def test_a_folder_does_not_hide_a_shipped_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "minilm").mkdir()
    assert load_recipe("minilm") == load_recipe(shipped_recipes()["minilm"])


def test_fingerprint_covers_every_field() -> None:
    changed = [
        QuantRecipe(),
        QuantRecipe(method="percentile"),
        QuantRecipe(percentile=99.0),
        QuantRecipe(weight_range="mse"),
        QuantRecipe(smooth="none"),
        QuantRecipe(smooth=0.5),
        QuantRecipe(shift=False),
        QuantRecipe(bias_correction=False),
        QuantRecipe(rounding="nearest"),
        QuantRecipe(attention=True),
        QuantRecipe(mask="none"),
        QuantRecipe(weights="per_tensor"),
        QuantRecipe(exclude=("a",)),
        QuantRecipe(exclude=("a", "b")),
        QuantRecipe(exclude=("b", "a")),
    ]
    assert len({recipe.fingerprint() for recipe in changed}) == len(changed)
    assert QuantRecipe().fingerprint() == load_recipe(None).fingerprint()


@pytest.mark.parametrize(
    ("axis", "rank", "reduced"),
    [(None, 2, (0, 1)), (1, 2, (0,)), (0, 4, (1, 2, 3)), (-1, 2, (0,)), (None, 0, ()), (1, 0, ())],
)
def test_granularity_keeps_its_axis_and_reduces_the_rest(axis: int | None, rank: int, reduced: tuple[int, ...]) -> None:
    assert Granularity(axis).reduced_axes(rank) == reduced
