"""Warm-up requests, and the values of requests that nobody sends."""

from __future__ import annotations

import numpy as np
import pytest
from packaging_cases import BATCHES, one_profile, span

from trtforge.manifest import ProfileInfo
from trtforge.serving import warmup
from trtforge.serving.model_file import ModelFile, Port
from trtforge.serving.model_folder import tensor_configs
from trtforge.serving.request_values import POINTS, profile_point, request_values
from trtforge.serving.warmup import make_warmup

IDS = Port(name="ids", dtype="int64", shape=(-1, -1))
MASK = Port(name="attention_mask", dtype="int64", shape=(-1, -1))


def model_of(*inputs: Port, profiles: tuple[ProfileInfo, ...] = (BATCHES,), batch: int = 8, **limits: int) -> ModelFile:
    return ModelFile(
        kind="onnxruntime",
        file="model.onnx",
        max_batch_size=batch,
        inputs=inputs,
        outputs=(),
        profiles=profiles,
        integer_limits=limits,
    )


def text_profile(name: str, low: int, opt: int, high: int) -> ProfileInfo:
    shapes = span((1, low), (4, opt), (8, high))
    return one_profile(name, ids=shapes, attention_mask=shapes)


def test_every_profile_is_warmed_at_min_opt_and_max_and_equal_shapes_once() -> None:
    profiles = (text_profile("short", 1, 8, 16), text_profile("same", 1, 8, 32))
    model = model_of(IDS, MASK, profiles=profiles, batch=6, ids=10)
    requests, files = make_warmup(model, tensor_configs(model.inputs, 6))
    assert [(request.name, request.batch_size) for request in requests] == [
        ("short min", 1),
        ("short opt", 4),
        ("short max", 6),
        ("same max", 6),
    ]
    assert [request.inputs[0].dims for request in requests] == [(1,), (8,), (16,), (32,)]
    # One sample each, which the server repeats.
    name = requests[1].inputs[0].file
    assert name is not None
    ids = np.frombuffer(files[name], np.int64)
    assert len(ids) == 8
    assert ids.min() >= 0 and ids.max() < 10 and len(set(ids.tolist())) > 1
    mask = requests[1].inputs[1].file
    assert mask is not None
    assert np.frombuffer(files[mask], np.int64).tolist() == [1] * 8


def test_without_batches_a_file_holds_the_whole_input() -> None:
    model = model_of(Port(name="x", dtype="float32", shape=(-1, 4)), batch=0)
    requests, files = make_warmup(model, tensor_configs(model.inputs, 0))
    assert [(request.batch_size, request.inputs[0].dims) for request in requests] == [
        (1, (1, 4)),
        (1, (4, 4)),
        (1, (8, 4)),
    ]
    assert [len(content) for content in files.values()] == [16, 64, 128]


def test_a_scalar_is_one_element_and_shape_values_are_the_profiles() -> None:
    profile = ProfileInfo(
        name="default",
        inputs={"size": span((2,), (2,), (2,)), "factor": span((), (), ())},
        values={"size": span((1, 4), (2, 4), (8, 4))},
    )
    ports = (Port(name="size", dtype="int32", shape=(2,)), Port(name="factor", dtype="float32", shape=()))
    model = model_of(*ports, profiles=(profile,), batch=0)
    requests, files = make_warmup(model, tensor_configs(model.inputs, 0))
    names = [request.inputs[0].file for request in requests]
    assert [np.frombuffer(files[name or ""], np.int32).tolist() for name in names] == [[1, 4], [2, 4], [8, 4]]
    assert requests[0].inputs[1].dims == (1,)


def test_a_point_with_an_empty_input_is_left_out() -> None:
    profile = one_profile(past=span((1, 0), (1, 16), (1, 32)))
    model = model_of(Port(name="past", dtype="float32", shape=(1, -1)), profiles=(profile,), batch=0)
    assert [request.name for request in make_warmup(model, tensor_configs(model.inputs, 0))[0]] == [
        "default opt",
        "default max",
    ]


def test_beyond_the_limit_values_are_zeros_without_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warmup, "LIMIT_BYTES", 100)
    model = model_of(Port(name="x", dtype="float32", shape=(-1, 4)), batch=0)
    requests, files = make_warmup(model, tensor_configs(model.inputs, 0))
    assert [request.inputs[0].file for request in requests] == ["profile0_min_0", "profile0_opt_0", None]
    assert sum(map(len, files.values())) == 80


def test_values_fit_their_type_and_are_the_same_for_a_seed() -> None:
    ports = tuple(
        Port(name=dtype, dtype=dtype, shape=(2, 3))
        for dtype in ("float32", "float16", "bfloat16", "bool", "uint8", "int8", "int64")
    )
    model = model_of(*ports, profiles=())
    shapes = {port.name: (2, 3) for port in ports}
    values = request_values(model, shapes, {})
    assert {name: array.dtype.name for name, array in values.items()} == {name: name for name in shapes}
    assert values["bool"].all()
    assert np.isin(values["int64"], (0, 1)).all()
    again, other = request_values(model, shapes, {}), request_values(model, shapes, {}, seed=1)
    assert all(np.array_equal(values[name], again[name]) for name in shapes)
    assert not np.array_equal(values["float32"], other["float32"])


def test_a_profile_gives_the_shapes_of_its_points() -> None:
    profile = text_profile("short", 1, 8, 16)
    shapes = [profile_point(profile, point)[0]["ids"] for point in POINTS]
    assert shapes == [(1, 1), (4, 8), (8, 16)]
