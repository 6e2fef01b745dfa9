from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trtforge.errors import InputError
from trtforge.inputs import BatchRange, BuildInputs, find_calibration, gather_inputs
from trtforge.limits import Limits
from trtforge.profile import ShapeRange
from trtforge.profile_choice import find_profile, resolve_profiles
from trtforge.quantization.table import CalibrationTable
from trtforge.spec import BuildSpec, FloatType, Precision
from trtforge.tensor import TensorSpec

Specs = tuple[TensorSpec, ...]
INT8 = Precision("int8", "fp16")
FP16 = Precision(None, "fp16")
MODEL_SHA = "a" * 64
PROFILE = "dims: {batch: {min: 1, opt: 4, max: 16}}\n"


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the model's folder in it."""
    (tmp_path / "cwd" / "models").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "cwd")
    return tmp_path / "cwd"


def samples(count: int, first: int = 0) -> np.ndarray:
    return np.arange(first * 4, (first + count) * 4, dtype=np.float32).reshape(count, 4)


def write(path: Path, content: str | np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    if isinstance(content, str):
        path.write_text(content)
    else:
        np.savez(path, x=content)
    return path


def table_text(model_sha256: str = MODEL_SHA) -> str:
    return CalibrationTable(
        method="minmax", samples=1, model_sha256=model_sha256, data_sha256="b" * 64, recipe_sha256="c" * 64, tensors={}
    ).to_json()


def gather(specs: Specs, precision: Precision = INT8, **options: Any) -> tuple[BuildInputs, list[str]]:
    warnings: list[str] = []
    spec = BuildSpec(source=Path("models/mlp.onnx"), precision=precision, **options)
    return gather_inputs(spec, specs, MODEL_SHA, warnings.append), warnings


def indices(dataset: Any, batch: int = 4) -> list[int]:
    return [int(row[0]) // 4 for part in dataset.batches(batch) for row in part.feeds["x"]]


# Where things are found


def test_files_beside_the_model_come_before_those_in_the_working_directory(project: Path) -> None:
    model = Path("models/mlp.onnx")
    assert (find_calibration(model), find_profile(model)) == (None, None)
    write(project / "calibration" / "mlp.npz", samples(1))
    write(project / "profiles" / "mlp.yaml", PROFILE)
    assert find_calibration(model) == Path("calibration/mlp.npz")
    assert find_profile(model) == Path("profiles/mlp.yaml")
    write(project / "models" / "calibration" / "mlp.json", table_text())
    write(project / "models" / "profiles" / "mlp.yaml", PROFILE)
    assert find_calibration(model) == Path("models/calibration/mlp.json")
    assert find_profile(model) == Path("models/profiles/mlp.yaml")


def test_files_of_other_models_are_not_taken(project: Path) -> None:
    write(project / "calibration" / "other.npz", samples(1))
    assert find_calibration(Path("models/mlp.onnx")) is None


@pytest.mark.parametrize("folder", [".", "models"])
def test_data_and_table_together_are_refused(project: Path, folder: str) -> None:
    write(project / folder / "calibration" / "mlp.npz", samples(1))
    write(project / folder / "calibration" / "mlp.json", table_text())
    with pytest.raises(InputError, match=r"both .*mlp\.npz and .*mlp\.json exist") as caught:
        find_calibration(Path("models/mlp.onnx"))
    assert "--calib" in caught.value.fix


def test_calib_option_settles_which_of_both_is_meant(project: Path, x_spec: Specs) -> None:
    write(project / "calibration" / "mlp.npz", samples(20))
    write(project / "calibration" / "mlp.json", table_text())
    inputs, _ = gather(x_spec, calib="calibration/mlp.npz")
    assert inputs.table is None
    assert inputs.calibration is not None


def test_int8_without_data_says_exactly_what_to_give(x_spec: Specs) -> None:
    with pytest.raises(InputError, match="--int8 needs calibration data, and there is none") as caught:
        gather(x_spec)
    assert (
        "calibration/mlp.npz and calibration/mlp.json beside the model and in the working directory" in caught.value.why
    )
    assert "scales are never made up" in caught.value.why
    assert "x float32 [batch, 4]" in caught.value.fix
    assert "--calib" in caught.value.fix


def test_data_that_was_named_but_is_not_there_is_refused(x_spec: Specs) -> None:
    with pytest.raises(InputError, match=r"data nothing\.npz cannot be used"):
        gather(x_spec, calib="nothing.npz")
    with pytest.raises(InputError, match=r"calibration table nothing\.json does not exist"):
        gather(x_spec, calib="nothing.json")
    with pytest.raises(InputError, match=r"profile nothing\.yaml does not exist"):
        gather(x_spec, FP16, profile="nothing.yaml")


# What is held out


@pytest.mark.parametrize(("count", "held_out"), [(100, 20), (45, 9), (44, 8), (40, 8), (10, 8), (9, 8)])
def test_the_last_fifth_but_at_least_8_are_held_out(project: Path, x_spec: Specs, count: int, held_out: int) -> None:
    write(project / "calibration" / "mlp.npz", samples(count))
    write(project / "profiles" / "mlp.yaml", PROFILE)
    inputs, warnings = gather(x_spec)
    assert indices(inputs.calibration) == list(range(count - held_out))
    assert indices(inputs.evaluation) == list(range(count - held_out, count))
    assert warnings == []


@pytest.mark.parametrize("count", [1, 8])
def test_too_few_samples_are_shared_with_a_warning(project: Path, x_spec: Specs, count: int) -> None:
    write(project / "calibration" / "mlp.npz", samples(count))
    inputs, warnings = gather(x_spec)
    assert indices(inputs.calibration) == indices(inputs.evaluation) == list(range(count))
    assert warnings == [f"only {count} samples: too few to hold any out, so calibration and verification share them"]


@pytest.mark.parametrize("base", ["fp16", "fp32"])
def test_without_int8_nothing_is_calibrated_so_few_samples_need_no_warning(
    project: Path, x_spec: Specs, base: FloatType
) -> None:
    write(project / "calibration" / "mlp.npz", samples(5))
    inputs, warnings = gather(x_spec, Precision(None, base))
    # What overflows float16 is looked for on the samples that do not judge, where there are any.
    assert inputs.calibration is (inputs.evaluation if base == "fp16" else None)
    assert indices(inputs.evaluation) == [0, 1, 2, 3, 4]
    assert warnings == []


def test_without_verification_calibration_sees_everything(project: Path, x_spec: Specs) -> None:
    write(project / "calibration" / "mlp.npz", samples(20))
    inputs, _ = gather(x_spec, verify="off")
    assert indices(inputs.calibration) == list(range(20))
    assert inputs.evaluation is None


def test_a_build_that_needs_no_data_does_not_read_it(project: Path, x_spec: Specs) -> None:
    write(project / "calibration" / "mlp.npz", "not a zip file")
    write(project / "profiles" / "mlp.yaml", PROFILE)
    inputs, _ = gather(x_spec, FP16, verify="off")
    assert (inputs.calibration, inputs.evaluation, inputs.calib_sha256) == (None, None, None)


def test_enough_is_held_out_for_the_smallest_batch(project: Path, x_spec: Specs) -> None:
    write(project / "calibration" / "mlp.npz", samples(100))
    write(project / "profiles" / "mlp.yaml", "dims: {batch: 32}")
    inputs, _ = gather(x_spec)
    assert indices(inputs.evaluation, 32) == list(range(68, 100))
    assert indices(inputs.calibration, 32) == list(range(64))


def test_eval_data_is_used_whole_and_calibration_keeps_all(project: Path, x_spec: Specs) -> None:
    write(project / "calibration" / "mlp.npz", samples(20))
    write(project / "eval.npz", samples(10, first=20))
    inputs, warnings = gather(x_spec, eval="eval.npz")
    assert indices(inputs.calibration) == list(range(20))
    assert indices(inputs.evaluation) == list(range(20, 30))
    assert warnings == []


def test_samples_in_both_data_sets_are_warned_about(project: Path, x_spec: Specs) -> None:
    write(project / "calibration" / "mlp.npz", samples(20))
    write(project / "eval.npz", samples(10, first=17))
    _, warnings = gather(x_spec, eval="eval.npz")
    assert warnings == ["3 samples are in both the calibration and the evaluation data; accuracy may look too good"]


def test_eval_data_alone_verifies_a_build_that_needs_no_calibration(project: Path, x_spec: Specs) -> None:
    write(project / "eval.npz", samples(10))
    inputs, _ = gather(x_spec, FP16, eval="eval.npz")
    assert indices(inputs.evaluation) == list(range(10))
    assert inputs.profiles.source == "data"


def test_the_datas_fingerprint_is_of_all_of_it(project: Path, x_spec: Specs) -> None:
    write(project / "calibration" / "mlp.npz", samples(20))
    inputs, _ = gather(x_spec)
    again, _ = gather(x_spec, verify="off")
    assert inputs.calib_sha256 == again.calib_sha256
    assert inputs.calibration is not None
    assert inputs.calibration.sha256 != inputs.calib_sha256


# Tables


def test_a_table_takes_the_place_of_calibration_and_eval_verifies_it(project: Path, x_spec: Specs) -> None:
    write(project / "calibration" / "mlp.json", table_text())
    write(project / "eval.npz", samples(10))
    inputs, _ = gather(x_spec, eval="eval.npz")
    assert inputs.table is not None
    assert inputs.calibration is None
    assert indices(inputs.evaluation) == list(range(10))
    assert inputs.calib_sha256 is not None


def test_a_table_of_another_model_is_refused_where_it_would_be_used(project: Path, x_spec: Specs) -> None:
    write(project / "calibration" / "mlp.json", table_text("d" * 64))
    write(project / "profiles" / "mlp.yaml", PROFILE)
    with pytest.raises(InputError, match="was made from another model"):
        gather(x_spec)
    with pytest.raises(InputError, match="was made from another model"):
        gather(x_spec, FP16, calib="calibration/mlp.json")
    inputs, _ = gather(x_spec, FP16)
    assert inputs.table is None


# Profiles


def test_ranges_come_from_the_file_then_from_the_data(project: Path, x_spec: Specs) -> None:
    write(project / "calibration" / "mlp.npz", samples(20))
    inputs, _ = gather(x_spec)
    assert inputs.profiles.source == "data"
    assert inputs.profiles.first.inputs["x"] == ShapeRange((1, 4), (8, 4), (8, 4))
    assert inputs.batch == BatchRange(1, 8, 8)
    write(project / "profiles" / "mlp.yaml", PROFILE)
    inputs, _ = gather(x_spec)
    assert inputs.profiles.source == "file"
    assert inputs.batch == BatchRange(1, 4, 16)


def test_a_static_model_needs_neither() -> None:
    inputs, _ = gather((TensorSpec("x", "float32", (2, 4)),), FP16)
    assert inputs.profiles.source == "static"
    assert inputs.batch == BatchRange(2, 2, 2)


def test_an_open_dim_that_nothing_gives_is_refused_with_the_yaml(x_spec: Specs) -> None:
    with pytest.raises(InputError, match="dynamic dimensions without a range") as caught:
        gather(x_spec, FP16)
    assert "batch: {min: 1, opt: ?, max: ?}" in caught.value.fix


def test_a_shipped_profile_is_found_by_name() -> None:
    specs = tuple(
        TensorSpec(name, "int64", ("batch", "seq")) for name in ("input_ids", "attention_mask", "token_type_ids")
    )
    profiles = resolve_profiles("minilm", Path("m.onnx"), specs, None, Limits())
    assert profiles.first.inputs["input_ids"].max == (32, 512)


def test_data_outside_the_profile_is_refused(project: Path) -> None:
    specs = (TensorSpec("x", "float32", ("batch", "width")),)
    write(project / "calibration" / "mlp.npz", samples(20))
    write(project / "profiles" / "mlp.yaml", PROFILE + "inputs: {x: [batch, 3]}")
    with pytest.raises(InputError, match=r"data calibration/mlp\.npz lies outside the optimisation profile") as caught:
        gather(specs)
    assert caught.value.why == "input 'x' has shape [4, 4]; profile 'default' spans [1, 3] to [16, 3]"


def test_data_may_lie_inside_any_of_the_profiles(project: Path) -> None:
    specs = (TensorSpec("x", "float32", ("batch", "width")),)
    write(project / "calibration" / "mlp.npz", samples(20))
    text = "dims: {batch: {min: 1, opt: 4, max: 16}, width: 3}\nprofiles: [{name: a}, {name: b, dims: {width: 4}}]"
    write(project / "profiles" / "mlp.yaml", text)
    inputs, _ = gather(specs)
    assert len(inputs.profiles.profiles) == 2


def test_fewer_samples_than_the_smallest_batch_are_refused(project: Path, x_spec: Specs) -> None:
    write(project / "calibration" / "mlp.npz", samples(5))
    write(project / "profiles" / "mlp.yaml", "dims: {batch: 8}")
    with pytest.raises(InputError, match="has too few samples") as caught:
        gather(x_spec)
    assert caught.value.why == "it has 5; the smallest batch of the profile is 8"


def test_single_samples_in_a_folder_fill_a_static_batch(project: Path) -> None:
    for index in range(20):
        write(project / "data" / f"{index:02}.npz", samples(1, first=index))
    inputs, _ = gather((TensorSpec("x", "float32", (8, 4)),), calib="data")
    assert indices(inputs.calibration, 8) == list(range(8))
    assert indices(inputs.evaluation, 8) == list(range(12, 20))


def test_batch_sizes_are_clamped_to_the_range() -> None:
    batch = BatchRange(2, 4, 8)
    assert [batch.clamp(size) for size in (1, 2, 5, 8, 9)] == [2, 2, 5, 8, 8]


def test_a_broken_recipe_is_refused(project: Path, x_spec: Specs) -> None:
    write(project / "r.yaml", "method: magic")
    with pytest.raises(InputError, match=r"recipe r\.yaml has 1 problem"):
        gather(x_spec, recipe="r.yaml")
