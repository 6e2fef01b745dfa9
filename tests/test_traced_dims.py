from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import onnx
import pytest

from trtforge.cli.app import run
from trtforge.export_info import DimInfo
from trtforge.profile import DimFact, DimReport
from trtforge.tensor import TensorSpec
from trtforge.traced_dims import KEY, TracedDims, read_traced_dims, text_from_dims

SPECS = (TensorSpec("x", "float32", ("batch", "seq", 4)), TensorSpec("y", "float32", ("batch",)))
BATCH = '{"version": 1, "dims": {"batch": {"min": 1, "max": 3}}}'
MODEL = """
<ir_version: 10, opset_import: ["" : 20]>
g (float[batch, seq] x) => (float[batch, seq] y) { y = Relu(x) }
"""


def traced(text: str, *more: tuple[str, str]) -> TracedDims:
    return read_traced_dims([("author", "somebody"), (KEY, text), *more], SPECS)


def test_what_is_written_reads_back_and_only_bounds_are_written() -> None:
    dims = {"seq": DimInfo(min=2, max=None), "batch": DimInfo(min=1, max=3), "free": DimInfo(min=1, max=None)}
    text = text_from_dims(dims)
    assert text is not None
    found = traced(text)
    assert (found.dims, found.notes) == ({"batch": dims["batch"], "seq": dims["seq"]}, ())
    assert text == text_from_dims(dict(reversed(dims.items())))
    assert text_from_dims({"free": DimInfo(min=1, max=None)}) is None


def test_a_file_of_another_exporter_says_nothing() -> None:
    assert read_traced_dims([("author", "somebody")], SPECS) == TracedDims(SPECS)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[1, 2]", "found list"),
        ("{", "Expecting property name"),
        (BATCH.replace("1, ", "2, ", 1), "version: Input should be 1, not 2"),
        (BATCH.replace("version", "\\ud800"), "unable to parse raw data as a unicode string"),
        (BATCH.replace("3", "-1e400"), "dims.batch.max"),
        (BATCH.replace("3", "1" * 5000), "integer string conversion"),
        (BATCH.replace("batch", "b" * 2**16), "it has 65"),
        ("[" * 60000, "nested too deep|recursion"),
    ],
)
def test_text_that_is_no_such_entry_is_ignored_with_a_note(text: str, why: str) -> None:
    found = traced(text)
    assert not found.dims
    (note,) = found.notes
    assert note.encode("utf-8") and len(note) < 500
    assert re.search(why, note)


def test_an_entry_that_is_there_twice_is_ignored() -> None:
    found = traced(BATCH, (KEY, BATCH.replace("3", "9")))
    assert (found.dims, len(found.notes)) == ({}, 1)
    assert "the file has it 2 times" in found.notes[0]


def test_entries_that_cannot_hold_are_ignored_and_the_others_count() -> None:
    found = traced(
        '{"version": 1, "dims": {"batch": {"min": 1, "max": 3}, "rows": {"min": 1, "max": 2}, '
        '"seq": {"min": 4, "max": 2}}}'
    )
    assert found.dims == {"batch": DimInfo(min=1, max=3)}
    assert found.notes == (
        "metadata 'trtforge.dims' bounds 'rows', which no input has: ignored",
        "metadata 'trtforge.dims' bounds 'seq' to no size at all: ignored",
    )


@pytest.mark.parametrize(("low", "high"), [(2**31, "null"), (1, 2**31), (10**30, 10**40)])
def test_sizes_that_no_tensor_has_bound_nothing(low: int, high: object) -> None:
    found = traced(f'{{"version": 1, "dims": {{"batch": {{"min": {low}, "max": {high}}}}}}}')
    assert found.dims == {}
    assert found.notes == ("metadata 'trtforge.dims' bounds 'batch' to no size at all: ignored",)


@pytest.mark.parametrize(
    ("fact", "info", "limits"),
    [
        (DimFact("batch", (("x", 0), ("y", 0)), "free"), DimInfo(min=1, max=3), "from 1 to 3"),
        (DimFact("n", (("y", 0),), "free", high=2, reason="table"), DimInfo(min=1, max=3), "from 1 to 2"),
        (DimFact("n", (("x", 0),), "free", low=2, high=8, reason="table"), DimInfo(min=4, max=None), "from 4 to 8"),
        # The graph was changed since: what it takes now counts, and the trace refuses the profile.
        (DimFact("n", (("x", 0),), "free", high=2, reason="table"), DimInfo(min=4, max=None), "from 1 to 2"),
        (DimFact("n", (("x", 0),), "fixed", 8, 8, suggestion=8), DimInfo(min=1, max=3), "8"),
        (DimFact("n", (("x", 1),), "free"), DimInfo(min=1, max=3), "from 1 on"),
    ],
)
def test_what_the_graph_takes_is_narrowed(fact: DimFact, info: DimInfo, limits: str) -> None:
    (narrowed,) = TracedDims(SPECS, {"batch": info}).narrow(DimReport((fact,), {})).dims
    assert narrowed.limits == limits
    assert ("traced for these sizes" in narrowed.reason) == (narrowed.limits != fact.limits)


def save_traced(path: Path, text: str) -> Path:
    model = onnx.parser.parse_model(MODEL)
    model.metadata_props.add(key=KEY, value=text)
    onnx.save(model, path)
    return path


def test_data_beyond_the_trace_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_traced(tmp_path / "m.onnx", '{"version": 1, "dims": {"seq": {"min": 2, "max": 5}}}')
    np.savez(tmp_path / "d.npz", x=np.zeros((9, 6), np.float32))
    command = ["build", str(model), "--calib", str(tmp_path / "d.npz"), "-o", str(tmp_path / "out")]
    assert run(command) == 2
    assert "gives dim 'seq' 6 to 6" in capsys.readouterr().err
    np.savez(tmp_path / "d.npz", x=np.zeros((9, 5), np.float32))
    assert run(["profile", str(model), "--data", str(tmp_path / "d.npz")]) == 0


def test_a_build_without_ranges_asks_for_those_that_the_trace_allows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["build", str(save_traced(tmp_path / "m.onnx", BATCH)), "-o", str(tmp_path / "out")]) == 2
    assert "batch: {min: 1, opt: ?, max: 3}  # from 1 to 3: the model was traced for" in capsys.readouterr().err


def test_an_entry_that_says_nothing_is_told_and_the_model_is_built(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = save_traced(tmp_path / "m.onnx", "not JSON")
    (tmp_path / "p.yaml").write_text("dims: {batch: {min: 1, opt: 1, max: 8}, seq: 9}\ninputs: {x: [batch, seq]}\n")
    assert run(["build", str(model), "--profile", str(tmp_path / "p.yaml"), "-o", str(tmp_path / "out")]) == 0
    assert "warning: metadata 'trtforge.dims', the sizes that the model was traced for" in capsys.readouterr().err
    assert run(["profile", str(model), "--profile", str(tmp_path / "p.yaml")]) == 0
    assert "note: metadata 'trtforge.dims'" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["lint", "--fix"], ["quantize", "--int8-weights"]])
def test_a_file_made_from_a_traced_one_keeps_the_entry(tmp_path: Path, command: list[str]) -> None:
    model = onnx.parser.parse_model(MODEL.replace("Relu(x)", "MatMul(x, w)").replace("[batch, seq] y", "[batch, 64] y"))
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(64, dtype=np.float32), "w"))
    for key, value in ((KEY, BATCH), ("author", "somebody")):
        model.metadata_props.add(key=key, value=value)
    onnx.save(model, tmp_path / "m.onnx")
    (tmp_path / "p.yaml").write_text("dims: {batch: {min: 1, opt: 1, max: 3}, seq: 64}\ninputs: {x: [batch, seq]}\n")
    options = ["--profile", str(tmp_path / "p.yaml")] if command[0] == "quantize" else []
    name, *flags = command
    assert run([name, str(tmp_path / "m.onnx"), *flags, *options, "-o", str(tmp_path / "new.onnx")]) == 0
    assert [(entry.key, entry.value) for entry in onnx.load(tmp_path / "new.onnx").metadata_props] == [(KEY, BATCH)]
