"""`trtforge reduce`, with the real builder: what it writes fails like the whole model."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import psutil
import pytest
from support import DILATED_TWICE, save_onnx

import trtforge
from trtforge.backends.tensorrt_rtx import BACKEND
from trtforge.cli.app import run
from trtforge.errors import BuildError, ChildDiedError, Diagnosis, InputError
from trtforge.graph.cut import Scissors
from trtforge.graph.load import load_model
from trtforge.graph.native import OnnxNative
from trtforge.graph.normalise import normalise
from trtforge.profile import Profile, ProfileSet, ShapeRange
from trtforge.reducing import reduce_model
from trtforge.reduction import Search
from trtforge.spec import BuildSpec, Precision
from trtforge.target import rtx_target_from_option
from trtforge.trials import (
    ALL_BLAME_TRIALS,
    BLAME_TRIALS,
    Trials,
    find_part,
    is_same_failure,
    shape_table,
    with_culprit,
)


def ignore_note(detail, done=0, total=0, level="progress"):
    """The progress of a search that nobody watches."""


PROFILE = "dims: {b: {min: 1, opt: 4, max: 8}}\ninputs: {x: [b, 8]}\n"
LAYERS = 4


def chain(culprit):
    """MatMul-Relu layers with some nodes between h and j in the middle."""
    nodes, last = [], "x"
    for index in range(LAYERS):
        nodes.append(f"[mm{index}] m{index} = MatMul({last}, w) [act{index}] r{index} = Relu(m{index})")
        last = f"r{index}"
        if index == LAYERS // 2:
            nodes.append(f"[before] h = Neg({last}) {culprit} [after] k = Abs(j)")
            last = "k"
    return f"g (float[b,8] x) => (float[b,8] y) {{ {' '.join(nodes)} [end] y = Neg({last}) }}"


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder in which a failing model is written by its middle."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "profiles").mkdir()
    (tmp_path / "profiles" / "m.yaml").write_text(PROFILE)

    def write(culprit, **constants):
        weight = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
        return save_onnx(tmp_path / "m.onnx", chain(culprit), w=weight, **constants)

    return write


def spec_of(source, base="fp32"):
    return BuildSpec(source=source, precision=Precision(None, base), gpu="sm_86")


NO_KERNEL = """[up] u = Unsqueeze(h, place) [boxes] v = Slice(u, at0, at4, axis2)
    [scores] s = Slice(u, at4, at5, axis2) [t] st = Transpose<perm = [0,2,1]>(s)
    [nms] n = NonMaxSuppression(v, st, most, half, half) [cast] f = Cast<to = 1>(n) [sum] q = ReduceSum(f)
    [join] j = Add(h, q)"""
VALUES = {
    "place": np.array([0]),
    "at0": np.array([0]),
    "at4": np.array([4]),
    "at5": np.array([5]),
    "axis2": np.array([2]),
    "most": np.array(3),
    "half": np.float32(0.5),
}


def test_the_refused_node_alone_is_left(project):
    source = project(NO_KERNEL, **VALUES)
    events = []
    found = reduce_model(spec_of(source, "fp16"), Path("out/small.onnx"), events.append)
    assert found.nodes == ("nms",)
    assert found.num_nodes > 2 * LAYERS
    assert found.is_smallest
    assert found.error.diagnosis.cause == "no-kernel"
    model = onnx.load("out/small.onnx")
    onnx.checker.check_model(model)
    assert [node.op_type for node in model.graph.node] == ["NonMaxSuppression"]
    assert "reduce" in {event.stage for event in events}
    assert {path.name for path in Path("out").iterdir()} == {"small.onnx"}
    Path("small.yaml").write_text(found.profiles)
    assert run(["build", "out/small.onnx", "--profile", "small.yaml", "--gpu", "sm_86", "--no-verify"]) == 2


NESTED = """[most] m = ReduceMax<keepdims = 0>(h) [test] c = Greater(m, half)
    [outer] j = If(c) <then_branch = t () => (float[b,8] u) { u = If(c) <then_branch = t2 () => (float[b,8] u2)
    { u2 = Relu(h) }, else_branch = e2 () => (float[b,8] v2) { v2 = Neg(h) }> },
    else_branch = e () => (float[b,8] v) { v = Abs(h) }>"""


def test_a_failure_without_a_name_is_traced_to_the_nodes_that_fail_together(project):
    source = project(NESTED, half=np.float32(0.5))
    found = reduce_model(spec_of(source), Path("small.onnx"))
    assert "outer" in found.nodes
    assert len(found.nodes) <= 3
    assert found.error.diagnosis.node is None
    with pytest.raises(BuildError) as caught:
        trtforge.build(source, gpu="sm_86", output=Path("out"))
    assert caught.value.node == "outer"
    assert caught.value.diagnosis.cause == "internal-error"
    assert caught.value.what == "TensorRT-RTX refuses node 'outer' (If)"
    assert not Path("out").exists()


def test_a_crash_is_reduced_in_children_that_die(tmp_path):
    source = save_onnx(
        tmp_path / "m.onnx",
        """g (float[b,8] x) => (float[b,8] y) {
            [before] h = Neg(x) [four] p = Reshape(h, to4) [fatal] q = DepthToSpace<blocksize = 0>(p)
            [two] j = Reshape(q, to2) [after] y = Relu(j)
        }""",
        to4=np.array([-1, 8, 1, 1]),
        to2=np.array([-1, 8]),
    )
    graph, _ = normalise(load_model(source).graph)
    profiles = ProfileSet((Profile("p", {"x": ShapeRange((1, 8), (4, 8), (8, 8))}),), "file")
    # A build refuses the model before that, so the search is made by hand, and without the node that the log names.
    with OnnxNative() as native, Trials(BACKEND, rtx_target_from_option("sm_86"), tmp_path) as trials:
        whole = trials.failure(graph, profiles)
        scissors = Scissors(graph, shape_table(graph, profiles, native))

        def fails(nodes):
            part = scissors.cut(nodes)
            found = trials.failure(part.graph, part.profiles)
            return found is not None and is_same_failure(whole, found)

        search = Search(scissors, fails)
        nodes = search.run(len(graph.nodes))
        # The same with what the log names, and without it.
        named = find_part(graph, whole, profiles, trials, ignore_note, 20)
        whole.diagnosis = dataclasses.replace(whole.diagnosis, node=None)
        unnamed = find_part(graph, whole, profiles, trials, ignore_note, 20)
    assert isinstance(whole, ChildDiedError)
    assert [graph.nodes[index].name for index in nodes] == ["fatal"]
    assert search.trials < 8
    for part in (named, unnamed):
        assert [graph.nodes[index].name for index in part.nodes] == ["fatal"]
        assert part.is_smallest
    assert (named.trials, unnamed.trials) == (1, search.trials)


class Flaky(Trials):
    """Fails as the first part did, and then no more."""

    def failure(self, graph, profiles):
        return None


def test_what_does_not_fail_again_is_no_part(tmp_path):
    graph, profiles = unnamed_refusal(tmp_path)
    error = failure("unknown", message="it failed once")
    trials = Flaky(BACKEND, rtx_target_from_option("sm_86"), tmp_path)
    part = find_part(graph, error, profiles, trials, ignore_note, 20)
    assert len(part.nodes) == len(graph.nodes)
    assert part.error is error
    assert not part.is_smallest


def unnamed_refusal(folder):
    """A graph that the builder refuses without naming a node, and its profiles."""
    text = """g (float[1,4,8,8] x) => (float[1,4,a,b] y) { [before] h = ConvTranspose(x, w)
        [culprit] u = ConvTranspose<dilations = [2,2], strides = [2,2]>(h, w) [after] y = Relu(u) }"""
    source = save_onnx(folder / "m.onnx", text, w=np.ones((4, 4, 3, 3), np.float32))
    profiles = ProfileSet((Profile("p", {"x": ShapeRange(*[(1, 4, 8, 8)] * 3)}),), "static")
    return normalise(load_model(source).graph)[0], profiles


def test_the_trials_of_all_refusals_of_a_build_are_counted_together(tmp_path):
    graph, profiles = unnamed_refusal(tmp_path)
    with Trials(BACKEND, rtx_target_from_option("sm_86"), tmp_path) as trials:
        error = trials.failure(graph, profiles)
        assert error.node is None
        assert with_culprit(error, graph, profiles, trials, ignore_note).node == "culprit"
        taken = ALL_BLAME_TRIALS - trials.blame_left
        assert 0 < taken < BLAME_TRIALS
        trials.blame_left = 1
        assert with_culprit(error, graph, profiles, trials, ignore_note) is error
        assert trials.blame_left == 0
        assert with_culprit(error, graph, profiles, trials, ignore_note) is error


def test_a_model_that_builds_has_nothing_to_reduce(project):
    source = project("[middle] j = Neg(h)")
    with pytest.raises(InputError) as caught:
        reduce_model(spec_of(source), Path("small.onnx"))
    assert caught.value.what == f"{source} builds: there is nothing to reduce"
    assert not Path("small.onnx").exists()


def test_a_model_that_a_build_mends_has_nothing_to_reduce(tmp_path):
    """The builder names no node of it, so the remedies need the trials that a build makes."""
    source = save_onnx(tmp_path / "up.onnx", DILATED_TWICE, w=np.ones((4, 4, 3, 3), np.float32))
    events = []
    with pytest.raises(InputError) as caught:
        reduce_model(spec_of(source), tmp_path / "small.onnx", events.append)
    assert caught.value.what == f"{source} builds: there is nothing to reduce"
    told = [event.detail for event in events if event.level == "notice"]
    assert sorted(text.partition(":")[0] for text in told) == [
        "node 'first' (ConvTranspose)",
        "node 'second' (ConvTranspose)",
    ]


def test_a_model_that_only_the_linter_refuses_is_not_said_to_build(tmp_path):
    source = save_onnx(
        tmp_path / "m.onnx",
        """g (float[4,8] x) => (float[4,8] y) {
            [q] q = QuantizeLinear<axis = 1>(x, s, z) [dq] d = DequantizeLinear(q, one, zero) y = MatMul(d, w)
        }""",
        s=np.linspace(0.1, 0.2, 8, dtype=np.float32),
        z=np.zeros(8, np.int8),
        one=np.float32(0.1),
        zero=np.int8(0),
        w=np.eye(8, dtype=np.float32),
    )
    with pytest.raises(InputError) as caught:
        reduce_model(spec_of(source), tmp_path / "small.onnx")
    assert caught.value.diagnosis.cause == "activation-scale-per-channel"


def test_the_options_of_the_build_are_those_of_the_trials(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    weight = np.random.default_rng(0).normal(size=(32, 32)).astype(np.float32)
    text = "g (float[4,32] x) => (float[4,32] y) { [neg] h = Neg(x) [mm] m = MatMul(h, w) [end] y = Relu(m) }"
    save_onnx(tmp_path / "m.onnx", text, w=weight)
    assert run(["reduce", "m.onnx", "--gpu", "sm_86"]) == 2
    assert "m.onnx builds" in capsys.readouterr().err
    assert run(["reduce", "m.onnx", "--gpu", "sm_86", "--workspace", "4KiB", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert "mm" in found["nodes"]
    assert len(found["nodes"]) < 3
    assert found["diagnosis"]["cause"] == "workspace"


@pytest.mark.parametrize(
    ("options", "what"),
    [(["--fp8"], "--fp8 cannot be built for sm_86"), (["--refit"], "--refit cannot be used with tensorrt-rtx")],
)
def test_what_no_build_takes_is_refused_before_any_trial(project, capsys, options, what):
    project("[middle] j = Neg(h)")
    assert run(["reduce", "m.onnx", "--gpu", "sm_86", *options]) == 2
    assert f"error: {what}\n" in capsys.readouterr().err


def test_the_command_prints_the_part_and_its_failure(project, capsys):
    project(NO_KERNEL, **VALUES)
    assert run(["reduce", "m.onnx", "--gpu", "sm_86"]) == 0
    out = capsys.readouterr().out
    assert re.match(r"build/m-reduced.onnx\n  1 of \d+ nodes, after 1 trials\n    nms\n", out)
    assert "it fails like the whole: TensorRT-RTX refuses node 'nms' (NonMaxSuppression)" in out
    assert "    why: TensorRT-RTX has no kernel for NonMaxSuppression in this form" in out
    assert run(["reduce", "m.onnx", "--gpu", "sm_86"]) == 2
    assert "build/m-reduced.onnx exists" in capsys.readouterr().err
    assert run(["reduce", "m.onnx", "--gpu", "sm_86", "--force", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["nodes"] == ["nms"]
    assert value["diagnosis"]["cause"] == "no-kernel"
    assert value["is_smallest"] is True


def test_what_is_still_to_be_done_is_printed_without_what_was_done(project, capsys):
    project(NESTED, half=np.float32(0.5))
    assert run(["reduce", "m.onnx", "--gpu", "sm_86"]) == 0
    out = capsys.readouterr().out
    assert "\n    fix: build it in another precision or export it in another way\n" in out
    assert "trtforge reduce" not in out


def test_an_interrupted_reduce_leaves_nothing(project, tmp_path):
    project(NO_KERNEL, **VALUES)
    before = set(tmp_path.rglob("*"))
    code = "import sys; from trtforge.cli.app import main; sys.argv = ['trtforge', *sys.argv[1:]]; main()"
    command = subprocess.Popen(
        [sys.executable, "-c", code, "reduce", "m.onnx", "-o", "deep/small.onnx"],
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    process = psutil.Process(command.pid)
    while not process.children() and command.poll() is None:
        pass
    command.send_signal(signal.SIGINT)
    _, err = command.communicate(timeout=60)
    assert command.returncode == 130, err
    assert set(tmp_path.rglob("*")) == before


def failure(cause, op="Conv", message="", cls=BuildError):
    error = cls("w", "", "")
    error.diagnosis = Diagnosis(cause, "", "", "n", op, message=message)
    return error


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (failure("no-kernel"), failure("no-kernel"), True),
        (failure("no-kernel"), failure("no-kernel", op=""), True),
        (failure("no-kernel"), failure("no-kernel", op="MatMul"), False),
        (failure("no-kernel"), failure("mixed-types"), False),
        (failure("crash", cls=ChildDiedError), failure("crash"), False),
        (failure("crash", cls=ChildDiedError), failure("crash", cls=ChildDiedError), True),
        (
            failure("unknown", message="CHECK failed in reshape of t12 to [1,2]"),
            failure("unknown", message="CHECK failed in reshape of a to [4,2]"),
            True,
        ),
        (failure("unknown", message="CHECK failed in reshape"), failure("unknown", message="no such wire"), False),
        (BuildError("a"), BuildError("a"), True),
    ],
)
def test_failures_are_compared_by_kind(one, other, same):
    assert is_same_failure(one, other) is same
