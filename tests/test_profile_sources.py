from __future__ import annotations

from pathlib import Path

import pytest
from profile_cases import BERT, BERT_YAML, IMAGE, load

from trtforge.errors import InputError
from trtforge.profile import DimFact, DimReport, Profile, ProfileSet, ShapeRange
from trtforge.profile_sources import load_profiles, static_profiles
from trtforge.profile_text import missing_ranges
from trtforge.tensor import TensorSpec


def refusal(tmp_path: Path, text: str, specs: tuple[TensorSpec, ...]) -> InputError:
    with pytest.raises(InputError) as caught:
        load(tmp_path, text, specs)
    return caught.value


def test_dims_are_shared_by_inputs(tmp_path: Path) -> None:
    profiles = load(tmp_path, BERT_YAML, BERT)
    span = ShapeRange((1, 1), (8, 128), (32, 512))
    assert profiles == ProfileSet((Profile("default", {"input_ids": span, "attention_mask": span}),), "file")


def test_inputs_may_be_left_out_where_the_model_names_the_dims(tmp_path: Path) -> None:
    text = "dims: {batch: {min: 1, opt: 8, max: 32}, seq: 128}"
    assert load(tmp_path, text, BERT).first.inputs["input_ids"] == ShapeRange((1, 128), (8, 128), (32, 128))


@pytest.mark.parametrize("opt", [1, 4])
def test_opt_may_be_min_or_max(tmp_path: Path, opt: int) -> None:
    text = f"dims: {{batch: {{min: 1, opt: {opt}, max: 4}}, seq: 8}}"
    whole = load(tmp_path, text, BERT).first.inputs["input_ids"]
    assert whole == ShapeRange((1, 8), (opt, 8), (4, 8))
    override = (
        f"dims: {{batch: {{min: 1, opt: 2, max: 4}}, seq: 8}}\nprofiles: [{{name: a, dims: {{batch: {{opt: {opt}}}}}}}]"
    )
    assert load(tmp_path, override, BERT).first.inputs["input_ids"] == whole


def test_integers_fix_a_dim(tmp_path: Path) -> None:
    text = "dims: {b: {min: 1, opt: 2, max: 4}}\ninputs: {x: [b, 3, 224, 224]}"
    assert load(tmp_path, text, IMAGE).first.inputs["x"] == ShapeRange(
        (1, 3, 224, 224), (2, 3, 224, 224), (4, 3, 224, 224)
    )


def test_several_profiles_override_dims_whole_or_in_part(tmp_path: Path) -> None:
    text = (
        BERT_YAML + "profiles: [{name: prefill, dims: {seq: {min: 16}}}, {name: decode, dims: {seq: 1}}, {name: as_is}]"
    )
    profiles = load(tmp_path, text, BERT)
    spans = {profile.name: profile.inputs["input_ids"] for profile in profiles.profiles}
    assert spans == {
        "prefill": ShapeRange((1, 16), (8, 128), (32, 512)),
        "decode": ShapeRange((1, 1), (8, 1), (32, 1)),
        "as_is": ShapeRange((1, 1), (8, 128), (32, 512)),
    }
    assert profiles.first.name == "prefill"


def test_values_of_shape_tensors_are_kept_and_overridden(tmp_path: Path) -> None:
    specs = (TensorSpec("x", "float32", (1, "t")), TensorSpec("sr", "int64", (1,)), TensorSpec("s", "int64", ()))
    text = """
dims: {t: {min: 1, opt: 2, max: 3}}
values: {sr: {min: [8000], opt: [16000], max: [16000]}, s: {min: [-1], opt: [0], max: [1]}}
profiles: [{name: a}, {name: b, values: {sr: {min: [8000], opt: [8000], max: [8000]}}}]
"""
    first, second = load(tmp_path, text, specs).profiles
    assert first.values == {"sr": ShapeRange((8000,), (16000,), (16000,)), "s": ShapeRange((-1,), (0,), (1,))}
    assert second.values["sr"] == ShapeRange((8000,), (8000,), (8000,))
    assert first.inputs["s"] == ShapeRange((), (), ())


@pytest.mark.parametrize(
    ("text", "what", "why"),
    [
        (BERT_YAML + "dims2: {}", "has 1 problem", "unknown key 'dims2'"),
        ("dims: {seq: {min: 1, opt: 2, max: 3, step: 1}}", "has 1 problem", "unknown key 'dims.seq.range.step'"),
        (
            "dims: {seq: {min: 9, opt: 8, max: 16}}",
            "has 1 problem",
            "needs min <= opt <= max, got min 9, opt 8, max 16",
        ),
        ("dims: {seq: {min: 1, opt: 17, max: 16}}", "has 1 problem", "got min 1, opt 17, max 16"),
        ("dims: {seq: {min: 1, opt: 2}}", "has 1 problem", "missing key 'dims.seq.range.max'"),
        ("dims: {seq: -1}", "has 1 problem", "dims.seq.size: Input should be greater than or equal to 0"),
        ("dims: {seq: 3000000000}", "has 1 problem", "less than or equal to 2147483647"),
        ("dims: {seq: true}", "has 1 problem", "dims.seq.size: Input should be a valid integer"),
        ("dims: {seq: 1.5}", "has 1 problem", "dims.seq.range"),
        ("dims: {seq: many}", "has 1 problem", "dims.seq: needs a size or {min: .., opt: .., max: ..}"),
        ("dims: {seq: {min: 1, opt: ?, max: ?}}", "still has a ? to fill in, in line 1", "opt: ?"),
        ("inputs: {input_ids: [batch, 1.5]}", "has 1 problem", "inputs.input_ids.1: needs a size or the name of a dim"),
        (BERT_YAML + "profiles: [{name: ''}]", "has 1 problem", "profiles.0.name"),
        (BERT_YAML + "profiles: [{dims: {seq: 1}}]", "has 1 problem", "missing key 'profiles.0.name'"),
        (BERT_YAML + "profiles: [{name: a}, {name: a}]", "repeats a profile name", "each profile needs its own"),
        (BERT_YAML + "profiles: [{name: a, dims: {heads: 1}}]", "unknown dim 'heads'", "'dims:' defines batch, seq"),
        (
            BERT_YAML + "profiles: [{name: a, dims: {seq: {min: 600}}}]",
            "has min 600, opt 128, max 512",
            "after the override",
        ),
        (
            BERT_YAML + "profiles: [{name: a, dims: {seq: {mim: 1}}}]",
            "has 1 problem",
            "unknown key 'profiles.0.dims.seq",
        ),
        ("dims: {seq: 1, seq: 2}", "is not valid YAML", "duplicate key 'seq'"),
        ("dims: &a {seq: 1}\ninputs: *a", "is not valid YAML", "aliases"),
        ("dims: " + "[" * 50, "is not valid YAML", "nested deeper than 32"),
        ("", "does not hold a mapping", "expected the keys dims, inputs, values, profiles"),
        ("inputs: {tokens: [1, 1]}", "unknown input 'tokens'", "attention_mask, input_ids"),
        ("values: {tokens: {min: [1], opt: [1], max: [1]}}", "unknown input 'tokens'", "attention_mask, input_ids"),
        ("inputs: {input_ids: [batch, seq]}", "unknown dim 'batch'", "'dims:' defines none"),
        (
            "dims: {batch: 1, seq: 1, heads: 2}",
            "gives a range for dim 'heads', which no input has",
            "dims of the inputs: batch, seq",
        ),
        ("inputs: {input_ids: [1]}", "gives input 'input_ids' 1 dims", "input_ids int64 [batch, seq]"),
        (
            "values: {input_ids: {min: [1, 2], opt: [1], max: [1]}}",
            "has 1 problem",
            "min, opt and max need the same number of values",
        ),
        ("values: {input_ids: {min: [2], opt: [1], max: [1]}}", "has 1 problem", "needs min <= opt <= max"),
        (
            BERT_YAML + "profiles: [{name: a, values: {t: {min: [1], opt: [1], max: [1]}}}]",
            "unknown input 't'",
            "attention_mask, input_ids",
        ),
    ],
)
def test_profiles_that_do_not_fit_are_refused(tmp_path: Path, text: str, what: str, why: str) -> None:
    error = refusal(tmp_path, text, BERT)
    assert what in error.what
    assert why in error.why
    assert error.fix


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"profile .* does not exist"):
        load_profiles(tmp_path / "nothing.yaml", BERT)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("inputs: {x: [1, 4, 8, 8]}", "gives axis 1 of input 'x' the size 4"),
        ("dims: {c: {min: 1, opt: 3, max: 3}}\ninputs: {x: [1, c, 8, 8]}", "gives axis 1 of input 'x' the range 1..3"),
        ("dims: {c: 4}\ninputs: {x: [1, c, 8, 8]}", "gives axis 1 of input 'x' the range 4..4"),
    ],
)
def test_sizes_that_contradict_the_model_are_refused(tmp_path: Path, text: str, what: str) -> None:
    error = refusal(tmp_path, text, IMAGE)
    assert what in error.what
    assert error.why == "the model fixes it to 3"
    assert error.fix == "write 3 there"


def test_a_dim_that_equals_the_models_size_may_be_named(tmp_path: Path) -> None:
    text = "dims: {c: 3}\ninputs: {x: [1, c, 8, 8]}"
    assert load(tmp_path, text, IMAGE).first.inputs["x"] == ShapeRange((1, 3, 8, 8), (1, 3, 8, 8), (1, 3, 8, 8))


def test_values_for_a_float_input_are_refused(tmp_path: Path) -> None:
    text = "inputs: {x: [1, 3, 8, 8]}\nvalues: {x: {min: [1], opt: [1], max: [1]}}"
    assert "this one is float32" in refusal(tmp_path, text, IMAGE).why


@pytest.mark.parametrize(("dtype", "number"), [("int32", 2**31), ("int32", -(2**31) - 1), ("int64", 2**63)])
def test_values_beyond_the_type_of_the_input_are_refused(tmp_path: Path, dtype: str, number: int) -> None:
    span = f"{{min: [{min(number, 1)}], opt: [1], max: [{max(number, 1)}]}}"
    error = refusal(tmp_path, f"values: {{size: {span}}}", (TensorSpec("size", dtype, (1,)),))
    assert f"gives 'size' the value {number}" in error.what
    assert error.why.startswith(f"it is {dtype}, which ends at -")


def test_a_wrong_number_of_values_is_refused(tmp_path: Path) -> None:
    specs = (TensorSpec("size", "int64", (2,)),)
    error = refusal(tmp_path, "values: {size: {min: [1], opt: [1], max: [1]}}", specs)
    assert "gives 1 values for 'size'" in error.what
    assert error.why == "the model has size int64 [2]"


def test_values_in_several_numbers_are_refused(tmp_path: Path) -> None:
    text = """
dims: {n: {min: 1, opt: 2, max: 3}}
profiles:
  - {name: one, values: {s: {min: [1], opt: [1], max: [1]}}}
  - {name: none}
  - {name: two, values: {s: {min: [1, 1], opt: [1, 1], max: [1, 1]}}}
"""
    error = refusal(tmp_path, text, (TensorSpec("s", "int64", ("n",)),))
    assert "gives 's' 1 values in profile 'one' and 2 in profile 'two'" in error.what
    assert error.why == "an input whose values decide shapes or a branch has one size in all profiles"


def test_an_open_dim_without_range_prints_the_yaml_to_fill_in(tmp_path: Path) -> None:
    error = refusal(tmp_path, "dims: {batch: 1}", BERT)
    assert "dynamic dimensions without a range" in error.what
    assert error.fix.endswith(
        "\n\ndims:\n  batch: {min: 1, opt: ?, max: ?}\n  seq: {min: 1, opt: ?, max: ?}\n"
        "inputs:\n  input_ids: [batch, seq]\n"
    )


def test_an_input_of_unknown_rank_takes_the_files_rank(tmp_path: Path) -> None:
    specs = (TensorSpec("x", "float32", None),)
    assert load(tmp_path, "inputs: {x: [2, 5]}", specs).first.inputs["x"] == ShapeRange((2, 5), (2, 5), (2, 5))
    assert "unknown rank" in refusal(tmp_path, "dims: {}", specs).why


def test_static_shapes_need_no_ranges() -> None:
    specs = (TensorSpec("x", "float32", (1, 3)), TensorSpec("s", "int64", ()))
    profiles = static_profiles(specs)
    assert profiles.source == "static"
    assert profiles.first.inputs == {"x": ShapeRange((1, 3), (1, 3), (1, 3)), "s": ShapeRange((), (), ())}


@pytest.mark.parametrize("specs", [BERT, IMAGE, (TensorSpec("x", "float32", None),)])
def test_open_shapes_are_no_static_profile(specs: tuple[TensorSpec, ...]) -> None:
    with pytest.raises(InputError, match="dynamic dimensions without a range") as caught:
        static_profiles(specs)
    assert str(caught.value) == str(missing_ranges(specs))
    assert "profiles/<model name>.yaml" in caught.value.fix


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("dims:\n  batch: ?\n", 2),
        ("dims: {batch: {min: 1, opt: ?, max: 3}}  # ?\n", 1),
        ("dims: {batch: 1}\nvalues:\n  s: {min: [1, ?], opt: [1, 1], max: [1, 1]}\n", 3),
    ],
)
def test_a_template_that_is_not_filled_in_is_told_so(tmp_path: Path, text: str, line: int) -> None:
    error = refusal(tmp_path, text, BERT)
    assert f"still has a ? to fill in, in line {line}" in error.what
    assert error.fix == "put a number in its place"


def test_a_question_mark_in_a_comment_is_none(tmp_path: Path) -> None:
    assert load(tmp_path, "# how long: ?\n" + BERT_YAML, BERT) == load(tmp_path, BERT_YAML, BERT)


def test_sizes_that_the_graph_fixes_are_filled_in() -> None:
    specs = (
        TensorSpec("x", "float32", ("n", "k")),
        TensorSpec("m", "int64", ("t",)),
        TensorSpec("w", "int64", ("u",)),
    )
    fixed = (
        DimFact("n", (("x", 0),), "fixed", 2, 2, suggestion=2),
        DimFact("k", (("x", 1),), "fixed", 5, 5, suggestion=5),
        DimFact("t", (("m", 0),), "derived", terms=(("n", 3),), offset=1),
        DimFact("u", (("w", 0),), "derived", terms=(("t", 2), ("k", 1))),
    )
    # In any order: what is derived may come before what it is derived from.
    assert static_profiles(specs, DimReport(fixed[::-1], {})) == static_profiles(specs, DimReport(fixed, {}))
    profiles = static_profiles(specs, DimReport(fixed, {}))
    assert profiles.source == "graph"
    assert profiles.first.inputs["x"] == ShapeRange((2, 5), (2, 5), (2, 5))
    assert profiles.first.inputs["m"] == ShapeRange((7,), (7,), (7,))
    assert profiles.first.inputs["w"] == ShapeRange((19,), (19,), (19,))


@pytest.mark.parametrize(
    "report",
    [
        DimReport((DimFact("n", (("x", 0),), "free", 5, 6, suggestion=5),), {}),
        DimReport((DimFact("n", (("x", 0),), "fixed", 5, 5, suggestion=5),), {"x": "node 'a' (Slice)"}),
        DimReport((DimFact("n", (("x", 0),), "fixed", 5, 5, suggestion=5),), {}, note="too large"),
    ],
    ids=["suggested only", "values count", "not examined"],
)
def test_what_is_not_certain_is_asked_for(report: DimReport) -> None:
    with pytest.raises(InputError, match="dynamic dimensions without a range"):
        static_profiles((TensorSpec("x", "int64", ("n",)),), report)
