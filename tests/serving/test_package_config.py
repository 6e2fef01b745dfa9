"""`config.pbtxt`: what Triton's own protobuf reads back."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from google.protobuf import text_format
from packaging_cases import BATCHES, DYNAMIC, PROFILES, SCALAR, SHAPES, Case, make_artifact, one_profile, span
from tritonclient.grpc import model_config_pb2

from trtforge.errors import InputError
from trtforge.manifest import IoInfo, Manifest, ProfileInfo
from trtforge.serving.artifact import Artifact
from trtforge.serving.batching import Batching, Observation
from trtforge.serving.graph_facts import GraphFacts, read_facts
from trtforge.serving.model_config import ModelConfig, TensorConfig, quote
from trtforge.serving.model_file import Kind
from trtforge.serving.model_folder import ServingOptions, make_config, make_model_file

NO_FACTS = GraphFacts((), (), has_qdq=False, integer_limits={})
LONG = one_profile("long", x=span((1, 4), (2, 4), (8, 4)))
SHAPE_PROFILE = ProfileInfo(
    name="default",
    inputs={"x": span((1, 4), (2, 4), (8, 4)), "size": span((2,), (2,), (2,))},
    values={"size": span((1, 4), (2, 4), (8, 4))},
)


def parsed(config: ModelConfig) -> Any:
    return text_format.Parse(config.to_text(), model_config_pb2.ModelConfig())


def config_of(
    manifest: Manifest, kind: Kind = "tensorrt", batch: int = 8, seen: Observation | None = None, **options: Any
) -> Any:
    artifact = Artifact(Path("nowhere"), manifest, NO_FACTS)
    batching = Batching(batch, "", (4,) if batch else ())
    model = make_model_file(artifact, kind, batching, seen or Observation({}))
    return parsed(make_config("m", model, batching, ServingOptions(**options)))


def shapes_of(ports: Any) -> dict[str, list[int]]:
    return {port.name: list(port.dims) for port in ports}


def test_a_batched_model_leaves_the_batch_out_of_its_dims(tmp_path: Path) -> None:
    config = config_of(make_artifact(tmp_path / "a", DYNAMIC))
    assert (config.name, config.backend, config.max_batch_size) == ("m", "tensorrt", 8)
    assert shapes_of(config.input) == {"x": [4]}
    assert shapes_of(config.output) == {"y": [3], "s": [1]}
    # One value per sample: one element for the client, no axis for the model.
    assert config.output[1].HasField("reshape")
    assert list(config.output[1].reshape.shape) == []
    assert not config.output[0].HasField("reshape")
    assert config.version_policy.latest.num_versions == 1


def test_dims_are_open_where_profiles_differ_and_fixed_where_they_do_not(tmp_path: Path) -> None:
    profiles = tuple(
        one_profile(name, ids=span((1, low), (2, low), (4, high)), attention_mask=span((1, 8), (2, 8), (4, 8)))
        for name, low, high in (("short", 1, 16), ("long", 16, 32))
    )
    config = config_of(make_artifact(tmp_path / "a", PROFILES, profiles=profiles), batch=4)
    assert shapes_of(config.input) == {"ids": [-1], "attention_mask": [8]}
    assert shapes_of(config.output) == {"y": [-1, 4]}


def test_a_model_that_is_not_batched_has_whole_dims(tmp_path: Path) -> None:
    config = config_of(make_artifact(tmp_path / "a", DYNAMIC), batch=0)
    assert config.max_batch_size == 0
    assert shapes_of(config.input) == {"x": [-1, 4]}
    assert shapes_of(config.output) == {"y": [-1, 3], "s": [-1]}
    assert not config.HasField("dynamic_batching")


def test_shape_tensors_are_marked_for_tensorrt_alone(tmp_path: Path) -> None:
    manifest = make_artifact(tmp_path / "a", SHAPES, profiles=(SHAPE_PROFILE,))
    marks = {
        kind: [port.is_shape_tensor for port in config_of(manifest, kind, batch=0).input]
        for kind in ("tensorrt", "onnxruntime")
    }
    assert marks == {"tensorrt": [False, True], "onnxruntime": [False, False]}
    assert shapes_of(config_of(manifest, batch=0).input) == {"x": [-1, 4], "size": [2]}


def test_a_scalar_is_one_element_and_tensorrt_refuses_it(tmp_path: Path) -> None:
    profile = one_profile(x=BATCHES.inputs["x"], factor=span((), (), ()))
    manifest = make_artifact(tmp_path / "a", SCALAR, profiles=(profile,))
    config = config_of(manifest, "onnxruntime", batch=0)
    assert shapes_of(config.input)["factor"] == [1]
    assert shapes_of(config.output)["total"] == [1]
    assert not config.input[1].HasField("reshape")
    with pytest.raises(InputError, match="input 'factor' has no axis"):
        config_of(manifest, "tensorrt", batch=0)


def test_a_dim_of_size_zero_is_open_for_triton(tmp_path: Path) -> None:
    profile = one_profile(x=span((1, 0), (4, 0), (8, 0)))
    config = config_of(make_artifact(tmp_path / "a", profiles=(profile,)))
    assert shapes_of(config.input) == {"x": [-1]}


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        ("float32", "FP32"),
        ("float16", "FP16"),
        ("bfloat16", "BF16"),
        ("int64", "INT64"),
        ("bool", "BOOL"),
        ("uint8", "UINT8"),
    ],
)
def test_types_are_those_of_the_engine(tmp_path: Path, dtype: str, name: str) -> None:
    io = (
        IoInfo(name="x", mode="input", dtype=dtype, shape=("batch", 4)),
        IoInfo(name="y", mode="output", dtype="float32", shape=("batch", 3), source_dtype="float64"),
    )
    manifest = make_artifact(tmp_path / "a", io=io)
    assert config_of(manifest).input[0].data_type == model_config_pb2.DataType.Value(f"TYPE_{name}")
    assert config_of(manifest).output[0].data_type == model_config_pb2.TYPE_FP32
    # The graph has the source's own type.
    assert config_of(manifest, "onnxruntime").output[0].data_type == model_config_pb2.TYPE_FP64


@pytest.mark.parametrize(
    ("dtype", "kind"), [("object", "onnxruntime"), ("float8_e4m3fn", "tensorrt"), ("uint16", "tensorrt")]
)
def test_a_type_that_cannot_be_served_is_refused(tmp_path: Path, dtype: str, kind: Kind) -> None:
    io = (IoInfo(name="x", mode="input", dtype=dtype, shape=("batch", 4)),)
    with pytest.raises(InputError, match=f"input 'x' has type {dtype}, which cannot be served"):
        config_of(make_artifact(tmp_path / "a", io=io), kind)


def test_an_output_of_unknown_rank_takes_what_a_run_showed(tmp_path: Path) -> None:
    io = (
        IoInfo(name="x", mode="input", dtype="float32", shape=("batch", 4)),
        IoInfo(name="y", mode="output", dtype="float32", shape=None),
    )
    manifest = make_artifact(tmp_path / "a", io=io)
    assert shapes_of(config_of(manifest, seen=Observation({"y": 3})).output) == {"y": [-1, -1]}
    with pytest.raises(InputError, match="the number of axes of output 'y' is not known"):
        config_of(manifest, seen=Observation({}, failure="it did not run"))


def test_each_tensorrt_instance_holds_every_profile(tmp_path: Path) -> None:
    manifest = make_artifact(tmp_path / "a", profiles=(BATCHES, LONG))
    (group,) = config_of(manifest, instances=2, gpus=(0, 1)).instance_group
    assert (group.kind, group.count, list(group.gpus), list(group.profile)) == (group.KIND_GPU, 2, [0, 1], ["0", "1"])
    (group,) = config_of(manifest, "tensorrt-rtx").instance_group
    assert (group.kind, list(group.profile)) == (group.KIND_GPU, [])
    (group,) = config_of(manifest, "onnxruntime", instances=3).instance_group
    assert (group.kind, group.count) == (group.KIND_CPU, 3)


def test_a_model_that_takes_some_profiles_of_a_plan_names_them(tmp_path: Path) -> None:
    manifest = make_artifact(tmp_path / "a", profiles=(LONG,))
    batching = Batching(8, "")
    model = make_model_file(Artifact(tmp_path / "a", manifest, NO_FACTS), "tensorrt", batching, Observation({}))
    # Without a name Triton takes the first.
    config = parsed(make_config("m", model, batching, ServingOptions(), engine_profiles=(1,)))
    assert list(config.instance_group[0].profile) == ["1"]
    assert list(parsed(make_config("m", model, batching, ServingOptions())).instance_group[0].profile) == []


@pytest.mark.parametrize("kind", ["onnxruntime", "tensorrt-rtx"])
def test_python_models_get_no_response_cache(tmp_path: Path, kind: Kind) -> None:
    with pytest.raises(InputError, match="--response-cache cannot be used with m, which runs in Triton's Python"):
        config_of(make_artifact(tmp_path / "a"), kind, response_cache=True)


def test_batching_and_queue_policies(tmp_path: Path) -> None:
    manifest = make_artifact(tmp_path / "a")
    batching = config_of(
        manifest, queue_delay_us=700, priority_levels=3, queue_timeout_us=5000, queue_size=9, response_cache=True
    )
    found = batching.dynamic_batching
    assert (list(found.preferred_batch_size), found.max_queue_delay_microseconds) == ([4], 700)
    assert (found.priority_levels, found.default_priority_level) == (3, 2)
    policy = found.default_queue_policy
    assert (policy.timeout_action, policy.default_timeout_microseconds, policy.max_queue_size) == (
        policy.REJECT,
        5000,
        9,
    )
    assert batching.response_cache.enable
    plain = config_of(manifest)
    assert not plain.response_cache.enable
    assert not plain.dynamic_batching.HasField("default_queue_policy")
    # A queue policy needs the scheduler, batches or not; there is nothing to wait for without batches.
    alone = config_of(manifest, batch=0, queue_size=9).dynamic_batching
    assert (list(alone.preferred_batch_size), alone.max_queue_delay_microseconds) == ([], 0)


def test_preferred_sizes_of_the_user_take_the_place_of_opt(tmp_path: Path) -> None:
    config = config_of(make_artifact(tmp_path / "a"), preferred_sizes=(2, 8))
    assert list(config.dynamic_batching.preferred_batch_size) == [2, 8]


def test_names_of_untrusted_models_cannot_break_out_of_the_text() -> None:
    hostile = 'x" } max_batch_size: 7 \\ \n é'
    config = parsed(ModelConfig(hostile, "python", 0, (TensorConfig(hostile, "float32", (1,)),), ()))
    assert config.name == hostile
    assert config.input[0].name == hostile
    assert config.max_batch_size == 0


@pytest.mark.parametrize("text", ["", "plain", '"', "\\", "\x00\x7f", "tab\t", "ü€"])
def test_quoted_strings_read_back(text: str) -> None:
    assert text_format.Parse(f"name: {quote(text)}", model_config_pb2.ModelConfig()).name == text


def test_facts_of_a_graph(tmp_path: Path) -> None:
    make_artifact(
        tmp_path / "a",
        PROFILES,
        profiles=(one_profile(ids=span((1, 1), (1, 1), (1, 1)), attention_mask=span((1, 1), (1, 1), (1, 1))),),
    )
    facts = read_facts(tmp_path / "a" / "model.onnx")
    assert (facts.has_qdq, dict(facts.integer_limits)) == (False, {"ids": 10})
    case = Case(
        """g (int64[n,2] ids) => (float[n,2,1,4] y, float[n,2,1,3] z) {
            u = Unsqueeze(ids, two)  c = Cast<to = 6>(u)  y = Gather(wide, c)  t = Gather<axis = 1>(narrow, ids)
            q = QuantizeLinear(t, scale, zero)  d = DequantizeLinear(q, scale, zero)  z = Reshape(d, shape)
        }""",
        {
            "two": np.array([2]),
            "wide": np.zeros((9, 4), np.float32),
            "narrow": np.zeros((3, 5), np.float32),
            "scale": np.array(1, np.float32),
            "zero": np.array(0, np.int8),
            "shape": np.array([-1, 2, 1, 3]),
        },
    )
    make_artifact(tmp_path / "b", case, profiles=(one_profile(ids=span((1, 2), (1, 2), (1, 2))),))
    facts = read_facts(tmp_path / "b" / "model.onnx")
    # Through Cast and Unsqueeze, and of two tables the smaller.
    assert (facts.has_qdq, dict(facts.integer_limits)) == (True, {"ids": 5})


def test_a_config_is_frozen() -> None:
    config = ModelConfig("m", "python", 0, (), ())
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.name = "n"  # type: ignore[misc]
