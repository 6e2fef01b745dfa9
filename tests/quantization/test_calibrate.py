from __future__ import annotations

import numpy as np
from quant_cases import normal

from trtforge.quantization.calibrate import observe, table_from_observers
from trtforge.recipe import QuantRecipe

SHA = {"model_sha256": "a" * 64, "data_sha256": "b" * 64}


def test_batches_of_different_shapes_are_observed_together():
    batches = [{"x": normal(2, 5), "y": normal(2)}, {"x": normal(3, 9, seed=1), "y": normal(3, seed=1)}]
    observers = observe(iter(batches), ["x", "y"])
    assert observers["x"].count == 37
    assert observers["y"].amax == max(np.abs(batch["y"]).max() for batch in batches)


def test_only_the_named_tensors_are_observed():
    assert list(observe([{"x": normal(2), "ids": np.arange(3)}], ["x"])) == ["x"]


def test_batches_are_consumed_one_at_a_time():
    alive = []

    def batches():
        for index in range(3):
            alive.append(index)
            yield {"x": normal(4)}

    assert observe(batches(), ["x"])["x"].count == 12
    assert alive == [0, 1, 2]


def test_table_holds_the_chosen_amax_and_what_was_seen():
    values = np.append(np.clip(normal(9_999), -4, 4), np.float32(-100.0))
    observers = observe([{"x": values}], ["x"])
    recipe = QuantRecipe(method="percentile", percentile=99.9)
    table = table_from_observers(observers, recipe, samples=9, **SHA)
    assert table.tensors["x"].amax < 5.0
    assert (table.tensors["x"].min, table.tensors["x"].max) == (-100.0, values.max())
    assert (table.method, table.percentile, table.samples) == ("percentile", 99.9, 9)
    assert table.recipe_sha256 == recipe.fingerprint()


def test_minmax_table_names_no_percentile():
    recipe = QuantRecipe(method="minmax")
    assert table_from_observers(observe([{"x": normal(3)}], ["x"]), recipe, samples=1, **SHA).percentile is None


def test_non_finite_values_are_recorded():
    observers = observe([{"x": np.array([1.0, -np.inf], np.float32)}], ["x"])
    assert table_from_observers(observers, QuantRecipe(), samples=1, **SHA).tensors["x"].non_finite == 1
