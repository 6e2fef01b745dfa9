"""The TensorRT adapter, called as TensorRT calls it: by a C++ program, and by TensorRT-RTX's own plugin registry."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from emulation_build import cuda_include
from plugin_library import build_for_tests, require_headers

from trtforge.ops.attention_ffn import DOMAIN, VERSION, all_variants, attributes_of
from trtforge.plugins.compile import BuiltLibrary
from trtforge.plugins.toolkit import Headers

PROBE = Path(__file__).parents[1] / "csrc" / "adapter" / "adapter_probe.cpp"
# nvinfer1::PluginFieldType
FLOAT32, INT32 = 1, 5


@pytest.fixture(scope="module")
def headers() -> Headers:
    return require_headers()


@pytest.fixture(scope="module")
def library(headers: Headers) -> BuiltLibrary:
    return build_for_tests(headers)


@pytest.fixture(scope="module")
def answers(headers: Headers, library: BuiltLibrary, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the C++ program got back from the library."""
    program = tmp_path_factory.mktemp("probe") / "adapter_probe"
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-isystem", headers.include_dir, "-isystem", cuda_include()]
    subprocess.run([shutil.which("g++") or "c++", *flags, PROBE, "-o", program, "-ldl"], check=True)
    done = subprocess.run([program, library.path.absolute()], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_every_op_type_has_a_creator_with_its_attributes(answers: dict[str, Any]) -> None:
    expected = {
        variant.op_type: {
            attribute.name: [INT32 if attribute.kind == "int" else FLOAT32, 1, 0]
            for attribute in attributes_of(variant)
        }
        for variant in all_variants()
    }
    assert {creator["name"]: creator["fields"] for creator in answers["creators"]} == expected
    assert {(creator["namespace"], creator["version"]) for creator in answers["creators"]} == {(DOMAIN, str(VERSION))}


def test_attributes_survive_serialising_and_cloning(answers: dict[str, Any]) -> None:
    plain, int8 = answers["round_trip_plain"], answers["round_trip_int8"]
    assert plain["name"] == "AttentionFFN_post_gelu"
    assert plain["fields"] == {
        "num_heads": [INT32, 1, 4],
        "softmax_scale": [FLOAT32, 1, 0.125],
        "epsilon": [FLOAT32, 1, pytest.approx(1e-12)],
    }
    assert int8["name"] == "AttentionFFN_pre_silu_causal_int8_lengths"
    assert {name: value for name, (_, _, value) in int8["fields"].items() if "input" in name} == {
        "qkv_input_scale": 0.5,
        "out_input_scale": 0.25,
        "up_input_scale": 0.0625,
        "down_input_scale": 2,
    }


def test_timings_are_kept_apart_by_variant_heads_and_source(answers: dict[str, Any], library: BuiltLibrary) -> None:
    plain, int8 = answers["round_trip_plain"]["timing_cache_id"], answers["round_trip_int8"]["timing_cache_id"]
    assert plain == f"AttentionFFN_post_gelu/1/heads=4/source={library.record.inputs_sha256}"
    assert plain != int8


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("missing", "'node': attribute epsilon is missing"),
        ("wrong type", "attribute num_heads is not one integer"),
        ("two values", "attribute num_heads is not one integer"),
        ("no heads", "attribute num_heads is 0; it has to be positive"),
        ("too many heads", "attribute num_heads is 1.09951e+12; it has to be positive, and at most 2.14748e+09"),
        ("infinite epsilon", "attribute epsilon is inf; it has to be finite and not negative"),
        ("negative epsilon", "attribute epsilon is -1; it has to be finite and not negative"),
        ("NaN scale", "attribute softmax_scale is nan; it has to be finite"),
    ],
)
def test_bad_attributes_give_no_plugin_and_say_why(answers: dict[str, Any], case: str, text: str) -> None:
    assert answers["refusals"]["nothing wrong"] == "created"
    assert text in answers["refusals"][case]


@pytest.mark.parametrize("variant", ["plain", "int8"])
def test_shapes_are_checked_and_y_is_like_x(answers: dict[str, Any], variant: str) -> None:
    shapes = answers[f"shapes_{variant}"]
    small, large = shapes["workspace"]
    assert 0 < small < large
    assert shapes["right"] == "taken"
    assert "attention_bias has shape [2, 5, 5]; its rank has to be 4" in shapes["mask of rank 3"]
    assert "a dim of attention_bias is neither 1 nor that of [B, N, S, S]" in shapes["mask of another length"]
    assert "w_qkv has shape [128, 128]" in shapes["wrong weight"]
    assert "inputs; it has to have" in shapes["an input too few"]
    assert shapes["y_has_shape_of_x"]
    assert shapes["y_has_type_of_x"]


def test_head_size_without_a_kernel_is_refused_when_configured(answers: dict[str, Any]) -> None:
    assert "head_size is not 32, 64, 80, 96 or 128" in answers["head size 16"]


@pytest.mark.parametrize("variant", ["plain", "int8"])
def test_only_half_and_bf16_in_row_major_order_are_taken(answers: dict[str, Any], variant: str) -> None:
    formats = answers[f"formats_{variant}"]
    assert {name for name, is_taken in formats.items() if is_taken} == {"half", "bf16"}
    assert len(formats) == (8 if variant == "int8" else 7)


def test_tactics_are_the_launch_strategies(answers: dict[str, Any]) -> None:
    tactics = answers["tactics"]
    assert tactics["status"] == 0
    assert tactics["tactics"]
    assert len(set(tactics["tactics"])) == len(tactics["tactics"])
    assert all(tactic > 0 for tactic in tactics["tactics"])  # TensorRT takes no others
    assert tactics["set"] == [0] * len(tactics["tactics"])
    assert tactics["set_default"] == 0
    assert "tactic 99 is not one of this library" in tactics["unknown"]


def test_library_loads_into_the_registry_of_tensorrt_rtx(library: BuiltLibrary) -> None:
    """In a process of its own: a registry keeps what it loaded.

    Serialising is the C++ program's: the binding of get_fields_to_serialize takes no plugin that is not Python.
    """
    pytest.importorskip("tensorrt_rtx")
    code = """
import json, sys
import numpy as np
import tensorrt_rtx as trt
trt.Logger(trt.Logger.ERROR)
registry = trt.get_plugin_registry()
before = len(registry.all_creators)
assert registry.load_library(sys.argv[1]) is not None
creator = registry.get_creator("AttentionFFN_pre_relu_int8", "1", "trtforge")
kinds = {field.name: field.type for field in creator.field_names}
integer = trt.PluginFieldType.INT32
values = {name: np.array([2], np.int32 if kind == integer else np.float32) for name, kind in kinds.items()}
fields = [trt.PluginField(name, value, kinds[name]) for name, value in values.items()]
made = []
for phase in (trt.TensorRTPhase.BUILD, trt.TensorRTPhase.RUNTIME):
    plugin = creator.create_plugin("block", trt.PluginFieldCollection(fields), phase)
    core = plugin.get_capability_interface(trt.PluginCapabilityType.CORE)
    made.append([core.plugin_name, core.plugin_namespace, core.plugin_version])
refused = creator.create_plugin("block", trt.PluginFieldCollection(fields[1:]), trt.TensorRTPhase.BUILD)
print(json.dumps([len(registry.all_creators) - before, made, refused is None]))
"""
    done = subprocess.run(
        [sys.executable, "-c", code, library.path.absolute()], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    num_creators, made, is_refused = json.loads(done.stdout.splitlines()[-1])
    assert num_creators == len(all_variants())
    assert made == [["AttentionFFN_pre_relu_int8", DOMAIN, str(VERSION)]] * 2
    assert is_refused
    assert "attribute num_heads is missing" in done.stderr
