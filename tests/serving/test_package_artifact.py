"""Artifacts whose manifests were changed by hand, or by somebody who means harm: refused before anything is written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_checks import Watch
from packaging_cases import DYNAMIC, SHAPES, Case, make_artifact, span

from trtforge.manifest import MANIFEST_NAME, ProfileInfo
from trtforge.serving.artifact import open_artifact

Change = Callable[[dict[str, Any]], None]
RANGE = {"min": [1, 4], "opt": [4, 4], "max": [8, 4]}


def set_range(**sizes: list[int]) -> Change:
    return lambda manifest: manifest["profiles"][0]["inputs"]["x"].update(sizes)


def set_port(index: int, **changes: object) -> Change:
    return lambda manifest: manifest["io"][index].update(changes)


def set_backend(**changes: str) -> Change:
    return lambda manifest: manifest["backend"].update(changes)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (set_range(min=[1], opt=[4], max=[8]), "input 'x' has 2 axes, and 1 in profile 'default'"),
        (set_range(max=[2**40, 4]), "axis 0 of input 'x' is 1 to 1099511627776 in profile 'default'"),
        (set_range(min=[-5, 4]), "axis 0 of input 'x' is -5 to 8 in profile 'default'"),
        (set_range(max=[8, 2**50]), "axis 1 of input 'x' is 4 to 1125899906842624 in profile 'default', and 4"),
        (set_port(0, name="q"), "profiles.default.inputs.q"),
        (set_port(1, name="q"), "not q float32 [batch, 3]"),
        (set_port(0, dtype="int32"), "its inputs are x float32 [batch, 4] in the graph, not x int32 [batch, 4]"),
        (set_port(1, shape=["batch"]), "not y float32 [batch], s float32 [batch]"),
        (set_port(0, shape=["batch", 5]), "not x float32 [batch, 5]"),
        (lambda manifest: manifest["io"].append(manifest["io"][0]), "not x float32 [batch, 4], x float32 [batch, 4]"),
        (lambda manifest: manifest["io"].pop(0), "not none"),
        (lambda manifest: manifest["profiles"][0]["inputs"].update(z=RANGE), "a range for 'z', which is no input"),
        (lambda manifest: manifest["profiles"][0]["values"].update(z=RANGE), "a range for 'z', which is no input"),
        (set_backend(name="other"), "nothing is known of a backend 'other'"),
        # It becomes a line of requirements.txt.
        (set_backend(version="1.7.1\n--index-url http://elsewhere"), "is no version"),
        (lambda manifest: manifest["files"].update({"../x": manifest["files"]["model.onnx"]}), "../x is not what"),
    ],
)
def test_a_manifest_that_contradicts_its_graph_is_refused(watch: Watch, change: Change, words: str) -> None:
    make_artifact(watch.folder / "a")
    path = watch.folder / "a" / MANIFEST_NAME
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    assert words in watch.refusal(["package", "a", "--triton", "models", "--cpu"])
    assert not (watch.folder / "models").exists()


def test_values_have_to_fill_their_input(watch: Watch) -> None:
    shapes = {"x": span((1, 4), (2, 4), (8, 4)), "size": span((2,), (2,), (2,))}
    profile = ProfileInfo(name="default", inputs=shapes, values={"size": span((4,), (4,), (4,))})
    make_artifact(watch.folder / "a", SHAPES, profiles=(profile,))
    message = watch.refusal(["package", "a", "--triton", "models", "--cpu"])
    assert "profile 'default' has 1 values for input 'size' of [2]" in message


def test_values_have_to_fill_the_largest_shape_of_their_input(watch: Watch) -> None:
    graph = Case("open (float[n,4] x, int64[k] size) => (float[a,b] y) { y = Reshape(x, size) }")
    shapes = {"x": span((1, 4), (2, 4), (8, 4)), "size": span((2,), (2,), (3,))}
    profile = ProfileInfo(name="default", inputs=shapes, values={"size": span((1, 4), (2, 4), (8, 4))})
    make_artifact(watch.folder / "a", graph, profiles=(profile,))
    message = watch.refusal(["package", "a", "--triton", "models", "--cpu"])
    assert "profile 'default' has 2 values for input 'size' of [3]" in message


def test_dims_may_have_other_names(tmp_path: Path) -> None:
    manifest = make_artifact(tmp_path / "a")
    io = tuple(port.model_copy(update={"shape": ("n", *(port.shape or ())[1:])}) for port in manifest.io)
    (tmp_path / "a" / MANIFEST_NAME).write_text(manifest.model_copy(update={"io": io}).to_json())
    assert open_artifact(tmp_path / "a", lambda _: None).manifest.io == io


def test_a_profile_that_no_request_can_fill_gets_no_warm_up(watch: Watch) -> None:
    graph = Case("wide (float[batch,n] x) => (float[batch,n] y) { y = Relu(x) }")
    profile = ProfileInfo(name="default", inputs={"x": span((1, 4), (4, 4), (8, 2**30))})
    make_artifact(watch.folder / "a", graph, profiles=(profile,))
    code, out, err = watch.run(["package", "a", "--triton", "models", "--cpu"])
    assert code == 0
    assert "inputs of [1, 1073741824] are 4.0 GiB, and a request has 2 at most" in err
    assert "warm-up   0 requests" in out


def test_a_fixed_input_that_no_request_can_fill_gets_no_warm_up(watch: Watch) -> None:
    graph = Case("wide (float[1073741824] x) => (float[1073741824] y) { y = Relu(x) }")
    profile = ProfileInfo(name="default", inputs={"x": span((2**30,), (2**30,), (2**30,))})
    make_artifact(watch.folder / "a", graph, profiles=(profile,))
    code, _, err = watch.run(["package", "a", "--triton", "models", "--cpu"])
    assert code == 0
    assert "m gets no warm-up: it did not run on made-up values (inputs of [1073741824] are 4.0 GiB" in err


def test_an_artifact_does_not_become_a_repository(watch: Watch) -> None:
    make_artifact(watch.folder / "a")
    make_artifact(watch.folder / "b", DYNAMIC)
    assert "it is an artifact" in watch.refusal(["package", "a", "--triton", "b", "--cpu"])
    assert {path.name for path in (watch.folder / "b").iterdir()} == {"manifest.json", "model.engine", "model.onnx"}
