from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from shape_models import save_decoder, save_recurrent, save_u_net
from support import save_onnx

from trtforge.data import open_dataset
from trtforge.errors import InputError
from trtforge.graph.dims.report import report_dims
from trtforge.graph.load import load_model
from trtforge.graph.native import OnnxNative
from trtforge.graph.normalise import normalise
from trtforge.graph.signature import input_specs
from trtforge.limits import DEFAULT_LIMITS
from trtforge.profile import DimReport
from trtforge.profile_sources import ProfileFile, profiles_from_file
from trtforge.shape_check import Source, check_profiles, run_once
from trtforge.textfile import parse_yaml, validate


@pytest.fixture(scope="module")
def native() -> Iterator[OnnxNative]:
    with OnnxNative() as child:
        yield child


def check(native: OnnxNative, path: Path, text: str, asked: list[bool] | None = None) -> list[str]:
    """Check a profile given as YAML; what was noted. `asked` takes whether each examination was to find limits."""
    specs = input_specs(load_model(path).graph)
    content = validate(ProfileFile, parse_yaml(text, "profile", DEFAULT_LIMITS), "profile")
    profiles = profiles_from_file(content, specs, "profile")
    graph, _ = normalise(load_model(path).graph, native=native)
    notes: list[str] = []

    def dims_of(find_limits: bool) -> DimReport:
        if asked is not None:
            asked.append(find_limits)
        return report_dims(load_model(path).graph, find_limits=find_limits, native=native)

    check_profiles(Source(path, specs, None), graph, profiles, native, notes.append, dims_of)
    return notes


@pytest.mark.parametrize(
    ("save", "text", "what", "why", "fix"),
    [
        (
            save_u_net,
            "dims: {batch: 1, h: {min: 4, opt: 30, max: 64}, w: 32}",
            "axis 2 of input 'x' (dim h) is 30 at opt",
            "node 'skip' (Concat) fails with x [1, 3, 30, 32]",
            "give h a multiple of 4 from 4 on",
        ),
        (
            save_u_net,
            "dims: {batch: 1, h: 32, w: {min: 6, opt: 32, max: 64}}",
            "axis 3 of input 'x' (dim w) is 6 at min",
            "node 'skip' (Concat)",
            "give w a multiple of 4",
        ),
        (
            save_u_net,
            "dims: {batch: 1, h: 32, w: {min: 4, opt: 32, max: 65}}",
            "axis 3 of input 'x' (dim w) is 65 at max",
            "node 'skip' (Concat)",
            "give w a multiple of 4",
        ),
        (
            save_decoder,
            "dims: {batch: 1, seq: 3, past: {min: 0, opt: 8, max: 9}, total: {min: 3, opt: 12, max: 12}}",
            "axis 1 of input 'mask' (dim total) is 12 at opt",
            "(Add) fails with ids [1, 3], past_key [1, 2, 8, 16], mask [1, 12]",
            "write 11: it is seq + past",
        ),
        (
            save_decoder,
            "{dims: {batch: 2, seq: 3, past: 8, total: 11, other: 1},"
            " inputs: {past_key: [other, 2, past, 16], mask: [batch, total]}}",
            "axis 0 of input 'ids' (dim batch) is 2 and axis 0 of input 'past_key' is 1 at opt",
            "(Concat)",
            "give both one range",
        ),
    ],
    ids=["opt", "min", "max", "sum", "equal"],
)
def test_shapes_that_a_node_cannot_take_are_refused_with_what_to_write(
    native: OnnxNative,
    tmp_path: Path,
    save: Callable[[Path], Path],
    text: str,
    what: str,
    why: str,
    fix: str,
) -> None:
    with pytest.raises(InputError) as caught:
        check(native, save(tmp_path / "m.onnx"), text)
    assert caught.value.what == f"profile 'default' does not fit the model: {what}"
    assert why in caught.value.why
    assert fix in caught.value.fix


def test_the_profile_that_does_not_fit_is_named(native: OnnxNative, tmp_path: Path) -> None:
    text = "{dims: {batch: 1, h: 32, w: 32}, profiles: [{name: good}, {name: bad, dims: {h: 33}}]}"
    with pytest.raises(InputError, match="profile 'bad' does not fit the model"):
        check(native, save_u_net(tmp_path / "m.onnx"), text)


def test_shapes_that_fit_pass_with_nothing_to_tell(native: OnnxNative, tmp_path: Path) -> None:
    text = "dims: {batch: {min: 1, opt: 2, max: 4}, h: {min: 4, opt: 32, max: 64}, w: {min: 8, opt: 32, max: 64}}"
    assert check(native, save_u_net(tmp_path / "m.onnx"), text) == []


def test_limits_are_looked_for_only_where_a_shape_does_not_fit(native: OnnxNative, tmp_path: Path) -> None:
    asked: list[bool] = []
    check(native, save_u_net(tmp_path / "m.onnx"), "dims: {batch: 1, h: 32, w: 32}", asked)
    assert asked == []
    path = save_onnx(
        tmp_path / "v.onnx", "g (float[n] x, int64[2] s) => (float[a, b] y) { [target] y = Reshape(x, s) }"
    )
    text = "{{dims: {{n: {}}}, values: {{s: {{min: [3, 4], opt: [3, 4], max: [3, 4]}}}}}}"
    check(native, path, text.format(12), asked)
    assert asked == [False]
    with pytest.raises(InputError):
        check(native, path, text.format(13), asked)
    assert asked == [False, False, True]


def test_values_that_no_shape_depends_on_are_refused(native: OnnxNative, tmp_path: Path) -> None:
    path = save_onnx(
        tmp_path / "m.onnx", "g (float[n] x, int64[2] s) => (float[n] y, int64[2] t) { y = Relu(x) t = Neg(s) }"
    )
    with pytest.raises(InputError, match="profile 'default' gives values for input 's'") as caught:
        check(
            native, path, "{dims: {n: {min: 1, opt: 2, max: 3}}, values: {s: {min: [1, 1], opt: [1, 1], max: [1, 1]}}}"
        )
    assert "(inputs where one does: none)" in caught.value.why
    assert caught.value.fix == "remove 's' from 'values:'"


def test_values_are_part_of_what_is_tried(native: OnnxNative, tmp_path: Path) -> None:
    path = save_onnx(
        tmp_path / "m.onnx",
        "g (float[n] x, int64[2] s) => (float[a, 4] y) { [target] r = Reshape(x, s) [bias] y = Add(r, b) }",
        b=np.ones(4, np.float32),
    )
    text = "{{dims: {{n: 12}}, values: {{s: {{min: [3, {0}], opt: [3, {0}], max: [3, {0}]}}}}}}"
    assert check(native, path, text.format(4)) == []
    with pytest.raises(InputError, match=r"node 'target' \(Reshape\) fails") as caught:
        check(native, path, text.format(5))
    assert "12 elements" in caught.value.why


def test_a_run_finds_what_inference_cannot_see(native: OnnxNative, tmp_path: Path) -> None:
    path = save_onnx(
        tmp_path / "m.onnx",
        "g (float[n] x) => (float[m] y) <int64[1] minus = {-1}> "
        "{ i = NonZero(x) f = Reshape(i, minus) g = Cast<to = 1>(f) [sum] y = Add(g, b) }",
        b=np.ones(4, np.float32),
    )
    assert check(native, path, "dims: {n: 4}") == []
    with pytest.raises(InputError, match=r"does not run at the opt shapes of profile 'default': x \[9\]") as caught:
        check(native, path, "dims: {n: 9}")
    assert "sum" in caught.value.why


def test_made_up_integers_refuse_nothing(native: OnnxNative, tmp_path: Path) -> None:
    path = save_onnx(
        tmp_path / "m.onnx",
        "g (float[n] x, int64[k] i) => (float[m] y) <int64[1] z = {0}> "
        "{ f = Cast<to = 1>(i) j = NonZero(f) c = Cast<to = 1>(j) l = Reshape(c, minus) [sum] y = Add(x, l) }",
        minus=np.array([-1]),
    )
    notes = check(native, path, "dims: {n: 4, k: 3}")
    assert len(notes) == 1
    assert "ONNX Runtime did not run the model on made-up integers at opt" in notes[0]


def test_samples_of_the_opt_shape_are_run_instead(tmp_path: Path) -> None:
    path = save_recurrent(tmp_path / "m.onnx")
    specs = input_specs(load_model(path).graph)
    np.savez(
        tmp_path / "d.npz",
        x=np.ones((1, 31), np.float32),
        state=np.ones((2, 1, 32), np.float32),
        rate=np.array(16000, np.int64),
    )
    data = open_dataset(tmp_path / "d.npz", specs)
    content = ProfileFile.model_validate({"dims": {"batch": 1, "n": 31}})
    profiles = profiles_from_file(content, specs, "profile")
    with pytest.raises(InputError, match="does not run at the opt shapes"):
        run_once(Source(path, specs, data), profiles.first, 0, lambda _: None)


def test_a_run_that_would_not_fit_into_memory_is_left_out(tmp_path: Path) -> None:
    path = save_u_net(tmp_path / "m.onnx")
    specs = input_specs(load_model(path).graph)
    profiles = profiles_from_file(ProfileFile.model_validate({"dims": {"batch": 1, "h": 4, "w": 4}}), specs, "profile")
    notes: list[str] = []
    run_once(Source(path, specs, None), profiles.first, 2**60, notes.append)
    assert notes[0].startswith("not run at opt: it may take 1073741824.0 GiB, above ")


def test_a_model_that_onnxruntime_cannot_load_is_not_run(tmp_path: Path) -> None:
    path = save_onnx(tmp_path / "m.onnx", "g (float[n] x) => (float[n] y) { y = Relu(x) }")
    specs = input_specs(load_model(path).graph)
    profiles = profiles_from_file(ProfileFile.model_validate({"dims": {"n": 4}}), specs, "profile")
    path.write_bytes(b"no model")
    notes: list[str] = []
    run_once(Source(path, specs, None), profiles.first, 0, notes.append)
    assert notes[0].startswith("not run at opt: ONNX Runtime cannot load m.onnx")
