from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest

from trtforge.errors import InputError
from trtforge.spec import (
    BuildSpec,
    Precision,
    Quantization,
    precision_from_name,
    precision_from_options,
    verify_from_options,
)


@pytest.mark.parametrize(
    ("flags", "name", "budget"),
    [
        ({}, "fp32", 0.9999),
        ({"fp32": True}, "fp32", 0.9999),
        ({"fp16": True}, "fp16", 0.999),
        ({"bf16": True}, "bf16", 0.999),
        ({"int8": True}, "int8", 0.99),
        ({"int8": True, "fp16": True}, "int8", 0.99),
        ({"int8": True, "bf16": True}, "int8+bf16", 0.99),
        ({"int8": True, "fp32": True}, "int8+fp32", 0.99),
        ({"fp8": True}, "fp8", 0.99),
        ({"fp8": True, "bf16": True}, "fp8+bf16", 0.99),
        ({"int4": True}, "int4", 0.97),
        ({"int4": True, "fp32": True}, "int4+fp32", 0.97),
        ({"int8_weights": True}, "int8-weights", 0.99),
        ({"int8_weights": True, "bf16": True}, "int8-weights+bf16", 0.99),
    ],
)
def test_flags_give_precision_and_its_default_budget(flags: dict[str, bool], name: str, budget: float) -> None:
    precision = precision_from_options(**flags)
    assert (precision.name, precision.default_budget) == (name, budget)
    assert precision_from_name(name) == precision


@pytest.mark.parametrize(
    ("quantization", "calibrated", "weight_only"),
    [
        (None, False, False),
        ("int8", True, False),
        ("fp8", True, False),
        ("int4", False, True),
        ("int8-weights", False, True),
    ],
)
def test_what_a_quantization_needs(quantization: Quantization | None, calibrated: bool, weight_only: bool) -> None:
    precision = Precision(quantization, "fp16")
    assert (precision.is_calibrated, precision.is_weight_only) == (calibrated, weight_only)


def test_unknown_precision_lists_the_known_ones() -> None:
    with pytest.raises(InputError, match="precision 'int3' is unknown") as caught:
        precision_from_name("int3")
    assert "int8-weights+bf16" in caught.value.why


@pytest.mark.parametrize("pair", list(itertools.combinations(("int8", "fp8", "int4", "int8_weights"), 2)))
def test_two_quantizations_exclude_each_other(pair: tuple[str, str]) -> None:
    names = [name.replace("_", "-") for name in pair]
    with pytest.raises(InputError, match=f"--{names[0]} and --{names[1]} exclude each other") as caught:
        precision_from_options(**dict.fromkeys(pair, True))
    assert caught.value.fix == "give one of --int8, --fp8, --int4 and --int8-weights"


@pytest.mark.parametrize("pair", [("fp16", "bf16"), ("fp16", "fp32"), ("bf16", "fp32")])
@pytest.mark.parametrize("int8", [True, False])
def test_two_float_types_exclude_each_other(pair: tuple[str, str], int8: bool) -> None:
    flags = {name: name in pair for name in ("fp16", "bf16", "fp32")}
    with pytest.raises(InputError, match=f"--{pair[0]} and --{pair[1]} exclude each other") as caught:
        precision_from_options(int8=int8, **flags)
    assert "give one of" in caught.value.fix


def test_verify_options() -> None:
    assert verify_from_options(False, False) == "auto"
    assert verify_from_options(True, False) == "off"
    assert verify_from_options(False, True) == "required"
    with pytest.raises(InputError, match="--no-verify and --require-verify exclude each other"):
        verify_from_options(True, True)


@pytest.mark.parametrize("budget", [-0.1, 1.01, math.nan, math.inf])
def test_a_budget_that_is_no_cosine_is_refused(budget: float) -> None:
    with pytest.raises(InputError, match="it is a cosine"):
        BuildSpec(source=Path("m.onnx"), budget=budget)


def test_budget_zero_is_not_the_default() -> None:
    assert BuildSpec(source=Path("m.onnx"), budget=0.0).cosine_budget == 0.0
    assert BuildSpec(source=Path("m.onnx")).cosine_budget == 0.9999


def test_default_folder_is_build_stem_and_precision() -> None:
    spec = BuildSpec(source=Path("a/vit.onnx"), precision=Precision("int8", "bf16"))
    assert spec.target_directory == Path("build/vit-int8+bf16")
    assert BuildSpec(source=Path("a/vit.onnx"), output=Path("out")).target_directory == Path("out")


@pytest.mark.parametrize("name", ["calib", "eval", "profile", "recipe", "metric"])
def test_an_empty_option_is_refused_instead_of_taken_for_none(name: str) -> None:
    with pytest.raises(InputError, match=f"^--{name} is empty"):
        BuildSpec(source=Path("m.onnx"), **{name: ""})
