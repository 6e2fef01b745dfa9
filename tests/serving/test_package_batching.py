"""How far Triton may batch: names, ranges, and what ONNX Runtime shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from packaging_cases import ABSENT, BATCHES, DYNAMIC, Case, make_artifact, one_profile, span
from support import make_manifest

from trtforge.errors import InputError
from trtforge.manifest import IoInfo, ProfileInfo
from trtforge.serving.artifact import Artifact
from trtforge.serving.batching import Observation, find_obstacle, plan_batching, relative_error
from trtforge.serving.draft import observe
from trtforge.serving.graph_facts import read_facts

SEEN = Observation({"y": 2})
IO = (
    IoInfo(name="x", mode="input", dtype="float32", shape=("batch", 4)),
    IoInfo(name="y", mode="output", dtype="float32", shape=("batch", 3)),
)


def port(name: str, *shape: int | str | None, mode: Any = "input") -> IoInfo:
    return IoInfo(name=name, mode=mode, dtype="float32", shape=shape)


def plan_of(
    profiles: tuple[ProfileInfo, ...], seen: Observation = SEEN, limit: int | None = None, **changes: Any
) -> Any:
    return plan_batching(make_manifest(**{"io": IO, "profiles": profiles} | changes), seen, limit)


def observed(folder: Path, case: Case, **changes: Any) -> Observation:
    manifest = make_artifact(folder, case, **changes)
    return observe(Artifact(folder, manifest, read_facts(folder / "model.onnx")))


def test_the_smallest_maximum_of_the_profiles_is_the_largest_batch() -> None:
    long = one_profile("long", x=span((1, 4), (2, 4), (3, 4)))
    batching = plan_of((BATCHES, long))
    assert batching.max_batch_size == 3
    assert batching.reason == "profile 'long' takes at most 3"


def test_preferred_sizes_are_the_opt_batches_within_the_largest_and_never_one() -> None:
    profiles = tuple(one_profile(str(opt), x=span((1, 4), (opt, 4), (8, 4))) for opt in (1, 2, 6))
    assert plan_of(profiles).preferred == (2, 6)
    assert plan_of(profiles, limit=4).preferred == (2, 4)


@pytest.mark.parametrize(
    ("io", "profile", "reason"),
    [
        ((port("x", 2, 4), IO[1]), one_profile(x=span((2, 4), (2, 4), (2, 4))), "axis 0 of input 'x' is fixed at 2"),
        ((port("x"), IO[1]), one_profile(x=span((), (), ())), "input 'x' has no axis"),
        (
            (port("x", "n", 4), port("z", "m", 4), IO[1]),
            one_profile(x=BATCHES.inputs["x"], z=BATCHES.inputs["x"]),
            "axis 0 is not the same dim everywhere: 'n' of input 'x', 'm' of input 'z'",
        ),
        (
            (port("x", None, 4), port("z", None, 4), IO[1]),
            one_profile(x=BATCHES.inputs["x"], z=span((1, 4), (2, 4), (8, 4))),
            "axis 0 has different ranges in the inputs of profile 'default'",
        ),
        (
            (IO[0], IO[1]),
            one_profile(x=span((2, 4), (4, 4), (8, 4))),
            "profile 'default' takes no batch below 2, and requests come one by one",
        ),
        ((IO[0], port("y", mode="output")), BATCHES, "output 'y' has no axis"),
        ((IO[0], port("y", 1, 3, mode="output")), BATCHES, "axis 0 of output 'y' is fixed at 1"),
        (
            (port("x", "batch", "seq"), port("y", "seq", "batch", mode="output")),
            BATCHES,
            "axis 0 of output 'y' is the dim 'seq'",
        ),
        (
            IO,
            ProfileInfo(name="default", inputs=dict(BATCHES.inputs), values={"x": span((1,), (2,), (3,))}),
            "the values of input 'x' become shapes, so requests cannot share them",
        ),
    ],
)
def test_what_is_no_batch_is_not_batched_and_the_reason_is_told(
    io: tuple[IoInfo, ...], profile: ProfileInfo, reason: str
) -> None:
    assert find_obstacle(make_manifest(io=io, profiles=(profile,))) == reason
    batching = plan_of((profile,), io=io)
    assert (batching.max_batch_size, batching.reason, batching.preferred) == (0, reason, ())
    with pytest.raises(InputError, match="--max-batch 2 cannot be had: the model has no batch dim") as caught:
        plan_of((profile,), io=io, limit=2)
    assert caught.value.why == reason


def test_a_limit_above_the_profiles_is_refused_with_the_profile() -> None:
    assert plan_of((BATCHES,), limit=8).max_batch_size == 8
    with pytest.raises(InputError, match="--max-batch 9 is more than the engine takes") as caught:
        plan_of((BATCHES,), limit=9)
    assert caught.value.why == "profile 'default' takes a batch of 8 at most"


def test_samples_that_change_beside_others_are_no_batch(tmp_path: Path) -> None:
    seen = observed(tmp_path / "a", ABSENT)
    assert "axis 0 does not count samples" in seen.mixes
    assert plan_of((BATCHES,), seen).max_batch_size == 0


def test_samples_that_do_not_change_beside_others_are_a_batch(tmp_path: Path) -> None:
    assert observed(tmp_path / "a", DYNAMIC) == Observation({"y": 2, "s": 1})


def test_an_output_that_joins_the_samples_is_no_batch(tmp_path: Path) -> None:
    case = Case("g (float[batch,4] x) => (float[rows,2] y) { y = Reshape(x, s) }", {"s": np.array([-1, 2])})
    assert observed(tmp_path / "a", case).mixes == "output 'y' has shape [6, 2] for a batch of 3"


def test_values_are_compared_by_the_precision_of_the_graph(tmp_path: Path) -> None:
    # Each sample gets a hundredth of the others' mean: far beyond fp32's rounding, within that of low precisions.
    case = Case(
        """g (float[batch,4] x) => (float[batch,4] y) {
            mean = ReduceMean<keepdims = 1>(x, axis)  part = Mul(mean, share)  y = Add(x, part)
        }""",
        {"axis": np.array([0]), "share": np.array(0.01, np.float32)},
    )
    manifest = make_manifest()
    exact = manifest.precision.model_copy(update={"requested": "fp32"})
    assert "axis 0 does not count samples" in observed(tmp_path / "exact", case, precision=exact).mixes
    assert observed(tmp_path / "low", case).mixes == ""


def test_a_model_that_does_not_run_is_batched_by_its_names_alone() -> None:
    failed = Observation({}, failure="it takes other values")
    assert plan_of((BATCHES,), failed).max_batch_size == 8
    io = (port("x", None, 4), port("y", None, 3, mode="output"))
    batching = plan_of((BATCHES,), failed, io=io)
    assert batching.max_batch_size == 0
    assert batching.reason == "nothing shows that axis 0 counts samples: it takes other values"


def test_values_outside_what_a_model_takes_are_told_as_the_failure(tmp_path: Path) -> None:
    case = Case(
        "g (float[batch,4] x, int64[batch,2] start) => (float[batch,4] y) { r = ReduceMax<keepdims = 0>(start) "
        "i = Sub(r, far)  p = Gather<axis = 1>(x, i)  u = Unsqueeze(p, one)  y = Mul(x, u) }",
        {"far": np.array(100), "one": np.array([1])},
    )
    profile = one_profile(x=BATCHES.inputs["x"], start=span((1, 2), (4, 2), (8, 2)))
    seen = observed(tmp_path / "a", case, profiles=(profile,))
    assert "Gather" in seen.failure
    assert seen.ranks == {}


def test_relative_errors() -> None:
    one = np.array([3.0, 4.0])
    assert relative_error(one, one * 1.1) == pytest.approx(0.1)
    assert relative_error(one, np.array([np.nan, 4.0])) == float("inf")
    assert relative_error(np.array([1, 2, 3, 4]), np.array([1, 2, 3, 5])) == 0.25
    assert relative_error(np.zeros(2), np.zeros(2)) == 0.0
