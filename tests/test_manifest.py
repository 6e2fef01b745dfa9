from __future__ import annotations

import json
from pathlib import Path

import pytest
from support import make_manifest

from trtforge.errors import InputError
from trtforge.limits import Limits
from trtforge.manifest import MANIFEST_NAME, NodeError, ParityInfo, load_manifest
from trtforge.parity import OutputParity


def save(folder: Path, text: str) -> Path:
    (folder / MANIFEST_NAME).write_text(text)
    return folder


def changed(**changes: object) -> str:
    return json.dumps(json.loads(make_manifest().to_json()) | changes)


def test_a_manifest_reads_back_equal(tmp_path: Path) -> None:
    parity = ParityInfo(
        reference="the source model",
        candidate="the built graph in ONNX Runtime",
        verified=True,
        passed=False,
        budget=0.97,
        outputs={"y": OutputParity(cosine=0.9, cosine_min=0.5, sqnr_db=None, max_abs_error=1.5, nan=True)},
        metrics={"top1": {"fp32": 1.0, "candidate": 0.5}},
        worst_nodes=(NodeError(node="/head", sqnr_db=None),),
    )
    manifest = make_manifest(parity=parity, warnings=("größe",))
    assert load_manifest(save(tmp_path, manifest.to_json())) == manifest


def test_equal_manifests_have_equal_text_that_ends_in_a_newline() -> None:
    text = make_manifest().to_json()
    assert text == make_manifest().to_json()
    assert text.isascii()
    assert text.endswith("}\n")


def test_the_file_states_the_contracts_keys() -> None:
    keys = json.loads(make_manifest().to_json())
    contract = [
        "model",
        "backend",
        "targets",
        "precision",
        "fusion",
        "near_misses",
        "plan",
        "profiles",
        "io",
        "calibration",
    ]
    contract += ["parity", "files", "timings_s", "environment"]
    assert keys["schema_version"] == 1
    assert set(contract) <= set(keys)


def test_a_folder_without_a_manifest_is_no_artifact(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(InputError, match=r"is not a trtforge artifact\nwhy: it has no manifest\.json"):
            load_manifest(folder)


@pytest.mark.parametrize("version", [2, 0, "1", None])
def test_another_schema_version_is_refused(tmp_path: Path, version: object) -> None:
    with pytest.raises(InputError, match="has schema version") as caught:
        load_manifest(save(tmp_path, changed(schema_version=version)))
    assert repr(version) in caught.value.what
    assert "version 1" in caught.value.why


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "Expecting property name"),
        ("[]", "found list"),
        ("{}", "schema version None"),
        (changed(targets="sm_86"), "targets"),
        (changed(extra=1), "unknown key 'extra'"),
        (changed(files={"model.engine": {"sha256": "x"}}), "missing key 'files.model.engine.bytes'"),
        (changed().replace("1.5", "NaN"), "NaN is not a JSON number"),
    ],
)
def test_a_manifest_that_does_not_hold_is_refused(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(InputError) as caught:
        load_manifest(save(tmp_path, text))
    assert why in str(caught.value)
    assert MANIFEST_NAME in caught.value.what


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"files": {"model.engine": {"sha256": "x", "bytes": 1}}}, "lacks files.model.onnx"),
        ({"files": {}}, "lacks files.model.engine, files.model.onnx"),
        ({"files": {"model.engine": {"sha256": "x", "bytes": -1}}}, "greater than or equal to 0"),
        ({"profiles": []}, "lacks profiles"),
        ({"profiles": [{"name": "short", "inputs": {}}]}, "lacks profiles.short.inputs.x"),
        ({"profiles": [{"name": "p", "inputs": {"x": {"min": [2], "opt": [1], "max": [3]}}}]}, "min <= opt <= max"),
        ({"profiles": [{"name": "p", "inputs": {"x": {"min": [], "opt": [1], "max": [3]}}}]}, "differ in length"),
    ],
)
def test_a_manifest_without_what_its_readers_rely_on_is_refused(
    tmp_path: Path, changes: dict[str, object], why: str
) -> None:
    with pytest.raises(InputError) as caught:
        load_manifest(save(tmp_path, changed(**changes)))
    assert why in caught.value.why


def test_its_size_is_bounded(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is too large"):
        load_manifest(save(tmp_path, make_manifest().to_json()), Limits(text_bytes=100))
