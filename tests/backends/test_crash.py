"""What is said of a build process that dies; all deaths here are real."""

from __future__ import annotations

import os
import resource
import signal
import threading
from pathlib import Path

import numpy as np
import onnx
import pytest
from backend_cases import batch, model_from_text, profile_set

from trtforge.backends.base import BuildRequest
from trtforge.backends.crash import locate_death
from trtforge.backends.tensorrt_rtx import BACKEND
from trtforge.backends.trace import read_log
from trtforge.errors import BuildError, ChildDiedError
from trtforge.target import rtx_target_from_option

# TensorRT-RTX 1.7.1 divides by the block size.
FATAL = """g (float[b,8,1,1] x) => (float[p,q,r,s] y) {
    [start] a = Relu(x) [deep] c = DepthToSpace<blocksize = 0>(a) [end] y = Neg(c)
}"""


@pytest.fixture
def worker(tmp_path):
    with BACKEND.start_worker(tmp_path / "build.log") as child:
        yield child


def build(worker, folder, model, profile):
    path = folder / "model.onnx"
    onnx.save(model, path)
    request = BuildRequest(path, folder / "e", profile_set(profile), rtx_target_from_option("sm_86"))
    return BACKEND.build(request, worker)


def test_a_crash_of_the_parser_names_the_node_that_it_was_on(worker, tmp_path):
    model = model_from_text(FATAL)
    model.graph.node[1].name = "deep\x1b"
    with pytest.raises(ChildDiedError) as caught:
        build(worker, tmp_path, model, {"x": batch(8, 1, 1)})
    error = caught.value
    assert error.what == "the engine build process crashed with SIGFPE"
    assert error.why.startswith(
        "it was parsing node 'deep\\x1b' (DepthToSpace), which reads a float32[-1, 8, 1, 1]; native code failed"
    )
    assert "trtforge reduce MODEL" in error.fix
    found = error.diagnosis
    assert (found.cause, found.node, found.op) == ("crash", "deep\x1b", "DepthToSpace")
    assert found.shapes == ("a float32[-1, 8, 1, 1]",)
    assert not (tmp_path / "e").exists()


def test_a_killed_builder_names_a_node_of_what_it_was_building(worker, tmp_path):
    rng = np.random.default_rng(0)
    lines = [f"[mm{i}] h{i} = MatMul({f'r{i - 1}' if i else 'x'}, w) [act{i}] r{i} = Erf(h{i})" for i in range(200)]
    text = f"g (float[b,64] x) => (float[b,64] y) {{ {' '.join(lines)} [last] y = Neg(r199) }}"
    model = model_from_text(text, w=rng.normal(size=(64, 64)).astype(np.float32))
    building, over = threading.Event(), threading.Event()

    def kill_once_building():
        while not over.wait(0.01):
            trace, names = read_log(worker.log)
            if trace.mentioned in names.nodes:
                building.set()
                os.kill(worker.pid, signal.SIGKILL)
                return

    watcher = threading.Thread(target=kill_once_building)
    watcher.start()
    try:
        with pytest.raises(ChildDiedError) as caught:
            build(worker, tmp_path, model, {"x": batch(64)})
    finally:
        over.set()
        watcher.join()
    assert building.is_set()
    assert "was killed by signal 9 (SIGKILL)" in caught.value.what
    assert "it was building a group of nodes, last named was node '" in caught.value.why
    assert "usually the system ran out of memory" in caught.value.why
    assert caught.value.diagnosis.node in {node.name for node in model.graph.node}


def test_running_out_of_memory_names_the_node(worker, tmp_path):
    small = model_from_text("g (float[b,8] x) => (float[b,8] y) { y = Relu(x) }")
    build(worker, tmp_path, small, {"x": batch(8)})  # its libraries are loaded then
    pages = int(Path(f"/proc/{worker.pid}/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + 2**27
    resource.prlimit(worker.pid, resource.RLIMIT_AS, (limit, limit))
    rng = np.random.default_rng(0)
    model = model_from_text(
        "g (float[b,512] x) => (float[b,16384] y) { [first] a = MatMul(x, v) [big] y = MatMul(a, w) }",
        v=rng.normal(size=(512, 512)).astype(np.float32),
        w=rng.normal(size=(512, 16384)).astype(np.float32),
    )
    with pytest.raises((BuildError, ChildDiedError)) as caught:
        build(worker, tmp_path, model, {"x": batch(512)})
    assert "memory" in str(caught.value)
    assert caught.value.diagnosis.node in {"first", "big"}


def test_without_a_log_the_death_is_told_as_it_is():
    error = ChildDiedError("the engine build process died", "it was killed", "try again")
    assert locate_death(error, None) is error


def test_a_log_without_a_node_changes_nothing(tmp_path):
    error = ChildDiedError("the engine build process died", "it was killed", "try again")
    (tmp_path / "build.log").write_text("[I] hello\n")
    assert locate_death(error, tmp_path / "build.log") is error


LOG = """[N] node names in this log:
    n0 = "act"
    n1 = "end"
[V] Parsing node: n0 [Relu]
[V] Parsing node: n1 [Neg]
[V] n1 [Neg] inputs: [x -> (8)[FLOAT]],
[V] Marking y_0 as output: y
"""


@pytest.mark.parametrize("after", ["", "[V] Compiling n7\n"])
def test_a_death_behind_the_parser_blames_no_node_that_nothing_speaks_of(tmp_path, after):
    error = ChildDiedError("the engine build process died", "it was killed", "try again")
    (tmp_path / "build.log").write_text(LOG + after)
    assert locate_death(error, tmp_path / "build.log") is error
    (tmp_path / "build.log").write_text(f"{LOG}{after}[V] Compiling {{ForeignNode[n0...n1]}}\n")
    located = locate_death(error, tmp_path / "build.log")
    place = "it was building a group of nodes, last named was node 'end' (Neg), which reads x float32[8]"
    assert located.why == f"{place}; it was killed"
    assert located.fix == "try again; find the smallest part that fails with `trtforge reduce MODEL`"
