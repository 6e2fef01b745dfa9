"""Builds with a stage cache: what is taken from it, what runs again, and that results are the same.

The builder, ONNX Runtime and the cache are the real ones. Stages are counted by what the build reports, never by time.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import onnx
import pytest
from encoder import WIDTH, save_profile, save_project, save_samples

import trtforge
from trtforge import reuse
from trtforge.cache.folder import EntryRecord
from trtforge.cache.store import Entry
from trtforge.errors import InputError
from trtforge.hashing import fingerprint
from trtforge.manifest import Manifest
from trtforge.progress import Event

ALL = {"normalise", "shapes", "regions", "calibrate", "lower", "verify", "build", "artifact"}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_project(tmp_path_factory.mktemp("project"))


@pytest.fixture(scope="module")
def plain(project: Path, tmp_path_factory: pytest.TempPathFactory) -> trtforge.BuildResult:
    """The INT8 artifact, without a cache."""
    return trtforge.build(project, precision="int8", output=tmp_path_factory.mktemp("plain") / "out")


@pytest.fixture(scope="module")
def first(project: Path, tmp_path_factory: pytest.TempPathFactory) -> trtforge.BuildResult:
    """The same with a cache, which is empty before; the cache lies beside the artifact."""
    folder = tmp_path_factory.mktemp("first")
    return trtforge.build(project, precision="int8", output=folder / "out", cache=folder / "cache")


@pytest.fixture
def cache(first: trtforge.BuildResult, tmp_path: Path) -> Path:
    """A copy of the cache that the first build filled."""
    return Path(shutil.copytree(first.directory.parent / "cache", tmp_path / "cache"))


@pytest.fixture
def again(project: Path, cache: Path, tmp_path: Path) -> Callable[..., Manifest]:
    """Builds the project once more with the filled cache, with other options."""

    def build(source: Path = project, **options: Any) -> Manifest:
        result = trtforge.build(source, **{"precision": "int8", "output": tmp_path / "again", "cache": cache} | options)
        assert not result.reused
        return result.manifest

    return build


def reused(manifest: Manifest) -> set[str]:
    return set(manifest.environment["cache"]["reused"])


def made(manifest: Manifest) -> set[str]:
    return set(manifest.environment["cache"]["made"])


def comparable(manifest: Manifest) -> str:
    """The manifest's text without times, places and the engine, which the builder makes anew each time."""
    content = manifest.model_dump(mode="json")
    for name in ("timings_s", "environment"):
        del content[name]
    del content["files"]["model.engine"]
    return json.dumps(content)


def test_an_empty_cache_changes_nothing(plain: trtforge.BuildResult, first: trtforge.BuildResult) -> None:
    for name in ("model.onnx", "calibration.json"):
        assert (first.directory / name).read_bytes() == (plain.directory / name).read_bytes()
    assert comparable(first.manifest) == comparable(plain.manifest)
    assert "cache" not in plain.manifest.environment
    assert (made(first.manifest), reused(first.manifest)) == (ALL, set())


def test_an_equal_build_takes_the_whole_artifact(
    plain: trtforge.BuildResult, first: trtforge.BuildResult, again: Callable[..., Manifest], tmp_path: Path
) -> None:
    manifest = again()
    assert (reused(manifest), made(manifest)) == ({"artifact"}, set())
    assert not {"normalise", "calibrate", "lower", "verify", "build"} & set(manifest.timings_s)
    names = {path.name for path in first.directory.iterdir()}
    assert {path.name for path in (tmp_path / "again").iterdir()} == names
    for name in names - {"manifest.json", "report.html"}:
        assert (tmp_path / "again" / name).read_bytes() == (first.directory / name).read_bytes()
    assert comparable(manifest) == comparable(plain.manifest)
    assert (tmp_path / "again" / "manifest.json").read_text() == manifest.to_json()


def test_an_equal_model_elsewhere_is_the_same_build(again: Callable[..., Manifest], tmp_path: Path) -> None:
    """Paths are no part of a key; the name is part of the manifest."""
    save_project(tmp_path / "moved")
    manifest = again(tmp_path / "moved" / "encoder.onnx")
    assert reused(manifest) == {"artifact"}
    assert manifest.environment["source"] == str(tmp_path / "moved" / "encoder.onnx")
    other = (tmp_path / "moved" / "encoder.onnx").rename(tmp_path / "moved" / "other.onnx")
    samples = tmp_path / "moved" / "calibration" / "encoder.npz"
    profile = tmp_path / "moved" / "profiles" / "encoder.yaml"
    manifest = again(other, calib=str(samples), profile=str(profile), output=tmp_path / "other")
    assert manifest.model.name == "other"
    assert (reused(manifest), made(manifest)) == (ALL - {"artifact"}, {"artifact"})


def test_another_profile_is_checked_and_built_and_no_more(
    plain: trtforge.BuildResult, again: Callable[..., Manifest], tmp_path: Path
) -> None:
    profile = f"""\
dims: {{batch: {{min: 1, opt: 8, max: 24}}, seq: {{min: 4, opt: 16, max: 48}}}}
inputs: {{x: [batch, seq, {WIDTH}], attention_mask: [batch, seq]}}
"""
    manifest = again(profile=str(save_profile(tmp_path / "wide.yaml", profile)))
    assert reused(manifest) == {"normalise", "calibrate", "lower", "verify"}
    # The form of attention is chosen by building it, for these ranges.
    assert made(manifest) == {"shapes", "regions", "build", "artifact"}
    assert set(manifest.timings_s) == {"load", "cache", "specialise", "check shapes", "match", "choose fusion", "build"}
    assert manifest.profiles[0].inputs["x"].max == (24, 48, WIDTH)
    assert (tmp_path / "again" / "model.onnx").read_bytes() == (plain.directory / "model.onnx").read_bytes()
    assert manifest.parity == plain.manifest.parity


def test_another_batch_to_verify_at_is_verified(again: Callable[..., Manifest], tmp_path: Path) -> None:
    profile = f"""\
dims: {{batch: {{min: 1, opt: 4, max: 16}}, seq: {{min: 4, opt: 16, max: 32}}}}
inputs: {{x: [batch, seq, {WIDTH}], attention_mask: [batch, seq]}}
"""
    manifest = again(profile=str(save_profile(tmp_path / "small.yaml", profile)))
    assert made(manifest) == {"shapes", "regions", "verify", "build", "artifact"}
    assert [run.batch for run in manifest.parity.batches] == [4, 1]


def test_what_a_profile_decides_is_part_of_the_result(project: Path, cache: Path, tmp_path: Path) -> None:
    """A dim with one size becomes static, so this profile gives another graph than the one before."""
    profile = f"""\
dims: {{batch: {{min: 1, opt: 8, max: 16}}, seq: 16}}
inputs: {{x: [batch, seq, {WIDTH}], attention_mask: [batch, seq]}}
"""
    fixed = str(save_profile(tmp_path / "fixed.yaml", profile))
    trtforge.quantize(project, tmp_path / "plain.onnx", profile=fixed)
    quantize_with(project, cache, tmp_path / "open.onnx")
    ran = quantize_with(project, cache, tmp_path / "cached.onnx", profile=fixed)
    assert "normalise" not in ran
    assert "calibrate" in ran
    assert (tmp_path / "cached.onnx").read_bytes() == (tmp_path / "plain.onnx").read_bytes()
    assert (tmp_path / "cached.onnx").read_bytes() != (tmp_path / "open.onnx").read_bytes()


def test_another_budget_verifies_and_no_more(again: Callable[..., Manifest]) -> None:
    manifest = again(budget=0.98)
    assert (reused(manifest), made(manifest)) == (ALL - {"verify", "artifact"}, {"verify", "artifact"})
    assert manifest.parity.budget == 0.98


def test_a_budget_that_is_missed_searches_once(project: Path, cache: Path, tmp_path: Path) -> None:
    """The search is the longest stage of all."""
    first = quantize_with(project, cache, tmp_path / "first.onnx", budget=0.99999)
    second = quantize_with(project, cache, tmp_path / "second.onnx", budget=0.99999)
    assert "meet budget" in first - second
    assert (tmp_path / "first.onnx").read_bytes() == (tmp_path / "second.onnx").read_bytes()
    assert "meet budget" in quantize_with(project, cache, tmp_path / "third.onnx", budget=0.9999)


def test_the_users_metric_always_runs(again: Callable[..., Manifest], tmp_path: Path, monkeypatch: Any) -> None:
    """Nobody knows when its code, or what that reads, changes."""
    module = tmp_path / "own_metric.py"
    module.write_text(f"from pathlib import Path\nFILE = Path({str(tmp_path / 'figure')!r})\n")
    module.write_text(
        module.read_text() + "def figure(outputs, reference, feeds):\n    return float(FILE.read_text())\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for number in (0.5, 0.75):
        (tmp_path / "figure").write_text(str(number))
        manifest = again(metric="own_metric:figure", output=tmp_path / str(number))
        assert manifest.parity.metrics["metric"]["candidate"] == number
        assert reused(manifest) == ALL - {"verify", "artifact"}


@pytest.mark.parametrize("changed", ["model", "data", "recipe"])
def test_what_changes_the_ranges_runs_the_stages_again(cache: Path, tmp_path: Path, changed: str) -> None:
    source, recipe = save_project(tmp_path / "p"), tmp_path / "recipe.yaml"
    recipe.write_text("rounding: nearest\n")
    quantize_with(source, cache, tmp_path / "before.onnx", recipe)
    if changed == "model":
        source.write_bytes(source.read_bytes().replace(b"softmax", b"SOFTMAX"))
    elif changed == "data":
        save_samples(tmp_path / "p" / "calibration" / "encoder.npz", seed=1)
    else:
        recipe.write_text("rounding: nearest\nsmooth: none\n")
    ran = quantize_with(source, cache, tmp_path / "after.onnx", recipe)
    assert {"calibrate", "lower"} <= ran
    assert ("normalise" in ran) == (changed == "model")


def quantize_with(source: Path, cache: Path, output: Path, recipe: Path | None = None, **options: Any) -> set[str]:
    """The stages that ran."""
    ran: set[str] = set()
    trtforge.quantize(
        source,
        output,
        cache=cache,
        recipe=None if recipe is None else str(recipe),
        report=lambda event: ran.add(event.stage),
        **options,
    )
    return ran


def test_a_damaged_cache_gives_the_same_artifact(
    plain: trtforge.BuildResult, again: Callable[..., Manifest], cache: Path, tmp_path: Path
) -> None:
    told: list[str] = []
    for file in (cache / "files").iterdir():
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    manifest = again(report=lambda event: told.append(event.detail) if event.level == "warning" else None)
    assert made(manifest) == {"normalise", "calibrate", "lower", "build", "artifact"}  # the others have no files
    assert told
    assert all("is damaged" in text for text in told)
    assert manifest.warnings == ()
    assert comparable(manifest) == comparable(plain.manifest)
    assert (tmp_path / "again" / "model.onnx").read_bytes() == (plain.directory / "model.onnx").read_bytes()
    assert reused(again(output=tmp_path / "third")) == {"artifact"}


def test_what_the_user_was_told_is_told_again(project: Path, cache: Path, tmp_path: Path) -> None:
    """A table holds no activations, of which the stage that does not run again would warn."""
    (tmp_path / "table.json").write_text(trtforge.calibrate(project, cache=cache).to_json())
    told: list[list[str]] = []
    for name in ("first", "second"):
        events: list[Event] = []
        output, calib = tmp_path / f"{name}.onnx", str(tmp_path / "table.json")
        trtforge.quantize(project, output, calib=calib, cache=cache, report=events.append)
        told.append([event.detail for event in events if event.level == "warning"])
        assert ("round weights" in {event.stage for event in events}) == (name == "first")
    assert told[0] == told[1]
    assert "holds no activations" in told[0][0]


@pytest.mark.parametrize("precision", ["int8+bf16", "fp8", "int4", "int8-weights"])
def test_quantize_writes_the_same_file_from_the_cache(project: Path, tmp_path: Path, precision: str) -> None:
    cache = tmp_path / "cache"
    first = quantize_with(project, cache, tmp_path / "first" / "model.onnx", precision=precision)
    second = quantize_with(project, cache, tmp_path / "second" / "model.onnx", precision=precision)
    assert {"normalise", "calibrate"} <= first - second
    assert (tmp_path / "first" / "model.onnx").read_bytes() == (tmp_path / "second" / "model.onnx").read_bytes()


def test_a_table_from_the_cache_is_of_the_model_that_asks(project: Path, cache: Path, tmp_path: Path) -> None:
    """The key is the graph's content, which models of other bytes may share."""
    other = save_project(tmp_path / "p")
    model = onnx.load(str(other))
    model.producer_version = "another"
    onnx.save(model, str(other))
    ran: list[Event] = []
    trtforge.calibrate(project, cache=cache)
    found = trtforge.calibrate(other, cache=cache, report=ran.append)
    assert "calibrate" not in {event.stage for event in ran}
    assert found.to_json() == trtforge.calibrate(other).to_json()


def test_an_engine_of_other_types_is_damage(tmp_path: Path) -> None:
    value = {"engine_sha256": "a", "plan": {"layers": []}, "build_s": "soon", "backend_version": "1"}
    record = EntryRecord(stage="build", key=fingerprint("key"), value=value, warnings=(), files={})
    with pytest.raises(ValueError, match="build_s"):
        reuse.EngineCodec(tmp_path).load(Entry(record, tmp_path))


def test_calibrate_gives_the_same_table_from_the_cache(project: Path, tmp_path: Path) -> None:
    ran: list[Event] = []
    expected = trtforge.calibrate(project, cache=tmp_path / "cache")
    found = trtforge.calibrate(project, cache=tmp_path / "cache", report=ran.append)
    assert found.to_json() == expected.to_json()
    assert "calibrate" not in {event.stage for event in ran}


@pytest.mark.parametrize(("output", "cache"), [("a", "a"), ("a", "a/cache"), ("cache/a", "cache")])
def test_a_cache_shares_no_folder_with_the_artifact(project: Path, tmp_path: Path, output: str, cache: str) -> None:
    before = set(tmp_path.rglob("*"))
    with pytest.raises(InputError, match="cannot share a folder"):
        trtforge.build(project, precision="fp16", output=tmp_path / output, cache=tmp_path / cache)
    assert set(tmp_path.rglob("*")) == before


def test_two_builds_share_one_cache_at_once(project: Path, tmp_path: Path) -> None:
    def build(name: str) -> trtforge.BuildResult:
        return trtforge.build(project, precision="fp16", verify="off", output=tmp_path / name, cache=tmp_path / "cache")

    with ThreadPoolExecutor(2) as pool:
        one, two = pool.map(build, ("one", "two"))
    assert comparable(one.manifest) == comparable(two.manifest)
    third = build("three")
    assert reused(third.manifest) == {"artifact"}
    assert third.engine.read_bytes() in {one.engine.read_bytes(), two.engine.read_bytes()}
