from __future__ import annotations

import json

import pytest

from trtforge.errors import InputError
from trtforge.quantization.table import CalibrationTable, TensorRange, load_table

MODEL = "a" * 64


def make_table(**changes):
    values = {
        "method": "minmax",
        "samples": 8,
        "model_sha256": MODEL,
        "data_sha256": "b" * 64,
        "recipe_sha256": "c" * 64,
        "tensors": {
            "y": TensorRange(amax=0.1, min=-0.1, max=0.05, rms=0.01),
            "x": TensorRange(amax=3.5, min=-1.0, max=3.5, rms=1.0),
        },
    }
    return CalibrationTable(**(values | changes))


def write(tmp_path, value):
    path = tmp_path / "calibration.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_written_table_reads_back_equal(tmp_path):
    assert load_table(write(tmp_path, make_table().to_json())) == make_table()


def test_equal_tables_have_equal_text_whatever_the_order_of_their_tensors():
    table = make_table()
    turned = make_table(tensors=dict(reversed(table.tensors.items())))
    assert table.to_json() == turned.to_json()


def test_text_states_schema_version_and_axis():
    value = json.loads(make_table().to_json())
    assert value["schema_version"] == 1
    seen = {"min": -1.0, "max": 3.5, "rms": 1.0, "non_finite": 0}
    assert value["tensors"]["x"] == {"amax": 3.5, "axis": None, **seen, "equalization": None}


def test_table_of_another_model_is_refused():
    with pytest.raises(InputError) as error:
        make_table().check_model("d" * 64)
    assert error.value.what == "the calibration table was made from another model"
    assert "aaaaaaaaaaaa" in error.value.why
    assert "dddddddddddd" in error.value.why


def test_table_of_this_model_is_accepted():
    make_table().check_model(MODEL)


def test_amax_is_given_for_the_asked_tensors_only():
    assert make_table().amax_of(["x"]) == {"x": 3.5}


def test_missing_tensors_are_named():
    with pytest.raises(InputError) as error:
        make_table().amax_of(["x", "gone", "lost"])
    assert error.value.what == "the calibration table lacks 2 of the 3 tensors to quantize"
    assert error.value.why == "missing: gone, lost"


def test_missing_file_is_refused(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        load_table(tmp_path / "none.json")


def test_text_that_is_not_json_is_refused(tmp_path):
    with pytest.raises(InputError, match="is not valid JSON"):
        load_table(write(tmp_path, "{"))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"surprise": 1}, "unknown key 'surprise'"),
        ({"schema_version": 2}, "schema_version: Input should be 1"),
        ({"samples": 0}, "samples: Input should be greater than or equal to 1"),
        ({"model_sha256": "abc"}, "model_sha256: String should match pattern"),
        (
            {"tensors": {"x": {"amax": -1.0, "min": 0.0, "max": 0.0, "rms": 0.0}}},
            "tensors.x.amax: Input should be greater",
        ),
        ({"tensors": {"x": {"amax": 1.0, "axis": 0, "min": 0.0, "max": 0.0, "rms": 0.0}}}, "tensors.x.axis"),
    ],
)
def test_wrong_content_is_named(tmp_path, change, problem):
    with pytest.raises(InputError) as error:
        load_table(write(tmp_path, json.loads(make_table().to_json()) | change))
    assert problem in error.value.why


def test_amax_that_overflows_to_infinity_is_refused(tmp_path):
    text = make_table().to_json().replace("3.5", "1e999", 1)
    with pytest.raises(InputError, match="problem"):
        load_table(write(tmp_path, text))
