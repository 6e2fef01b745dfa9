from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from trtforge.errors import BuildError, ChildDiedError, Diagnosis, InputError, InternalError
from trtforge.isolation import Child, _error_from_meta

SERVICE = "isolation_service:SERVICE"


@pytest.fixture(autouse=True)
def _service_path(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.fixture
def child():
    with Child(SERVICE, purpose="test service") as running:
        yield running


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def wait_until(condition, seconds=10):
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


@pytest.mark.parametrize(
    "dtype",
    ["bool", "int8", "uint64", "float16", "float64", "complex64", *(
        getattr(ml_dtypes, name) for name in ("bfloat16", "float8_e4m3fn", "int4", "uint4", "float4_e2m1fn")
    )],
)  # fmt: skip
def test_arrays_of_every_type_cross_both_ways_unchanged(child, dtype):
    sent = {
        "x": np.arange(6).astype(dtype).reshape(2, 3),
        "scalar": np.ones((), dtype),
        "none": np.zeros((0, 4), dtype),
    }
    _, received = child.call("echo", {}, sent)
    for name, array in sent.items():
        assert received[name].dtype == array.dtype
        assert received[name].shape == array.shape
        assert received[name].tobytes() == array.tobytes()


def test_strided_and_big_endian_arrays_arrive_with_the_same_values(child):
    sent = {"strided": np.arange(24).reshape(4, 6).T[::2], "big": np.arange(3, dtype=">i4")}
    _, received = child.call("echo", {}, sent)
    assert (received["strided"] == sent["strided"]).all()
    assert (received["big"] == sent["big"]).all()


def test_arrays_larger_than_a_pipe_cross(child):
    sent = np.random.default_rng(0).integers(0, 256, 5_000_000, dtype=np.uint8)
    assert (child.call("echo", {}, {"x": sent})[1]["x"] == sent).all()


def test_meta_keeps_text_that_is_hostile(child):
    meta = {"name": 'a\nName: fake\x1f]}"\ud800', "number": 2**70, "nested": [{"x": None}]}
    assert child.call("echo", meta)[0] == meta


def test_an_object_array_is_refused_and_the_child_stays_usable(child):
    with pytest.raises(TypeError, match="array 'x' of object cannot cross to another process"):
        child.call("echo", {}, {"x": np.array([object()])})
    with pytest.raises(InternalError) as caught:
        child.call("return_objects", {})
    assert "cannot cross" in caught.value.why
    assert child.call("echo", {"a": 1})[0] == {"a": 1}


def test_module_state_lives_between_calls(child):
    assert [child.call("count", {})[0]["calls"] for _ in range(3)] == [1, 2, 3]


def test_progress_arrives_in_order_before_the_result(child):
    seen = []
    child.call("report", {}, on_progress=seen.append)
    assert seen == [{"phase": "tactics", "step": step} for step in range(3)]


def test_child_imports_from_the_parents_path_and_has_its_environment():
    with Child(SERVICE, env={"TRTFORGE_TEST": "set"}) as child:
        found = child.call("environment", {})[0]
    assert found["path"] == sys.path
    assert found["variable"] == "set"
    assert found["null_stdin"]
    assert found["oom_score_adj"] == "500"
    assert "TRTFORGE_TEST" not in os.environ


def test_child_does_not_import_from_the_current_directory(tmp_path, monkeypatch):
    (tmp_path / "planted_module.py").write_text("SERVICE = {}")
    (tmp_path / "json.py").write_text("raise SystemExit(7)")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    with Child("planted_module:SERVICE") as child, pytest.raises(InternalError) as caught:
        child.call("anything", {})
    assert "No module named 'planted_module'" in caught.value.why


def test_an_error_of_ours_crosses_with_its_class_and_text(child):
    with pytest.raises(BuildError) as caught:
        child.call("raise", {"kind": "build"})
    error = caught.value
    assert (error.what, error.why, error.fix, error.node) == ("no kernel", "the op is new", "update", "conv_7")
    assert error.diagnosis == Diagnosis(
        "no-kernel", "the op is new", "update", "conv_7", "Conv", ("x float32[1]",), "no runner"
    )
    with pytest.raises(InputError) as caught:
        child.call("raise", {"kind": "subclass"})
    assert str(caught.value) == "bad\nwhy: because\nfix: mend it"


def test_any_other_exception_becomes_an_internal_error_with_the_childs_traceback(child):
    with pytest.raises(InternalError) as caught:
        child.call("raise", {"kind": "other"})
    assert caught.value.what == "isolation_service:SERVICE raise failed with ZeroDivisionError"
    assert caught.value.why == "deep inside"
    assert "in _raise" in caught.value.detail


@pytest.mark.parametrize(
    ("sent", "received"),
    [
        (None, None),
        ("text", None),
        ({}, Diagnosis("", "", "")),
        ({"cause": 1, "node": 2, "shapes": "abc"}, Diagnosis("1", "", "", "2")),
        ({"cause": "c", "shapes": [1, None]}, Diagnosis("c", "", "", shapes=("1", "None"))),
    ],
)
def test_a_diagnosis_of_a_child_that_was_taken_over_is_text_and_nothing_else(sent, received):
    error = _error_from_meta({"class": "BuildError", "what": "w", "diagnosis": sent})
    assert error.diagnosis == received


@pytest.mark.parametrize("kind", ["memory", "mmap"])
def test_a_memory_error_says_that_memory_ran_out(child, kind):
    with pytest.raises(ChildDiedError) as caught:
        child.call("raise", {"kind": kind})
    assert caught.value.what == "the test service process ran out of memory"
    assert "use a machine with more memory" in caught.value.fix
    assert not is_running(child.pid)


def test_a_segmentation_fault_is_reported_with_progress_and_log_and_the_parent_lives(tmp_path):
    log = tmp_path / "build.log"
    with Child(SERVICE, purpose="engine build", log=log) as child, pytest.raises(ChildDiedError) as caught:
        child.call("crash", {})
    assert caught.value.what == "the engine build process crashed with SIGSEGV"
    assert "last progress: parsing weights" in caught.value.why
    assert "build.log ends: " in caught.value.why
    assert "python says hello" in log.read_text()
    assert "native says hello" in log.read_text()


@pytest.mark.parametrize(
    ("number", "what", "why"),
    [
        (signal.SIGKILL, "was killed by signal 9 (SIGKILL)", "usually the system ran out of memory"),
        (signal.SIGTERM, "was ended by signal 15 (SIGTERM)", "another program asked it to end"),
        (signal.SIGABRT, "crashed with SIGABRT", "native code failed"),
        (signal.SIGRTMIN + 1, f"crashed with signal {signal.SIGRTMIN + 1}", "native code failed"),
    ],
)
def test_death_by_a_signal_names_it(child, number, what, why):
    with pytest.raises(ChildDiedError) as caught:
        child.call("signal", {"signal": int(number)})
    assert caught.value.what == f"the test service process {what}"
    assert why in caught.value.why


def test_an_exit_without_an_answer_names_the_code(child):
    with pytest.raises(ChildDiedError, match="the test service process exited with 3"):
        child.call("exit", {"code": 3})


def test_a_call_after_the_death_says_that_the_process_was_stopped(child):
    child.close()
    with pytest.raises(ChildDiedError, match="the test service process was stopped"):
        child.call("echo", {})


def test_the_child_ignores_interrupts(child):
    assert child.call("signal", {"signal": int(signal.SIGINT)})[0] == {"alive": True}


def test_an_interrupt_while_waiting_kills_the_child_and_is_raised_again(child):
    def interrupt(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        child.call("sleep", {}, on_progress=interrupt)
    assert not is_running(child.pid)


def test_kill_from_another_thread_ends_a_waiting_call(child):
    with pytest.raises(ChildDiedError, match="was stopped"):
        child.call("sleep", {}, on_progress=lambda _: threading.Thread(target=child.kill).start())


def test_a_call_that_takes_too_long_kills_the_child(child):
    child.call("echo", {})
    with pytest.raises(ChildDiedError) as caught:
        child.call("sleep", {}, timeout_s=0.2)
    assert caught.value.what == "the test service process did not answer within 0.2 s"
    assert caught.value.why == "last progress: asleep"
    assert not is_running(child.pid)


def frame(header, body=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


def result(*arrays):
    return frame({"kind": "result", "meta": {}, "arrays": list(arrays)})


@pytest.mark.parametrize(
    ("raw", "why"),
    [
        ((2**63).to_bytes(8, "little"), "a header of 9223372036854775808 bytes"),
        (frame(b"{not json"), "a header that is not ours"),
        (frame(b"[" * 100_000), "a header that is not ours"),
        (frame({"kind": "result", "meta": [], "arrays": []}), "a header that is not ours"),
        (frame({"kind": "run", "meta": {}, "arrays": []}), "a frame of kind 'run'"),
        (result(["x", "object", [1]]), "element type 'object'"),
        (result(["x", "O8", [1]]), "element type 'O8'"),
        (result(["x", "int8", [-1]]), "an array of shape (-1,)"),
        (result(["x", "int8", [1] * 65]), "an array of shape"),
        (result(["x", "int8", [2**40]]), "arrays of more than 17179869184 bytes"),
        (result(["x", "int8", [0, 2**61, 2**61]]), "arrays of more than 17179869184 bytes"),
    ],
)
def test_an_answer_that_is_malformed_or_too_large_is_refused_and_the_child_killed(child, raw, why):
    with pytest.raises(ChildDiedError) as caught:
        child.call("write_raw", {}, {"raw": np.frombuffer(raw, np.uint8)})
    assert caught.value.what == "the test service process sent an answer that trtforge does not accept"
    assert why in caught.value.why
    assert not is_running(child.pid)


def test_a_log_that_cannot_be_opened_is_named(tmp_path):
    with pytest.raises(ChildDiedError) as caught:
        Child(SERVICE, log=tmp_path / "missing" / "build.log")
    assert caught.value.what == "the isolation_service process cannot be started"
    assert "No such file or directory" in caught.value.why


def test_no_file_handles_and_no_zombies_are_left(tmp_path):
    def held():
        children = Path(f"/proc/self/task/{threading.get_native_id()}/children").read_text()
        return [fd.name for fd in sorted(Path("/proc/self/fd").iterdir())], children

    before = held()
    for _ in range(2):
        with Child(SERVICE) as child:
            child.call("echo", {})
        with Child(SERVICE), contextlib.suppress(ChildDiedError):
            Child(SERVICE, log=tmp_path / "missing" / "log")
        with Child(SERVICE) as dead, pytest.raises(ChildDiedError):
            dead.call("exit", {"code": 1})
    assert held() == before


PARENT = """
import sys, threading
sys.path.insert(0, sys.argv[1])
from trtforge.isolation import Child
def work():
    child = Child("isolation_service:SERVICE")
    child.call(sys.argv[2], {}, on_progress=lambda _: print(child.pid, flush=True))
if sys.argv[3] == "thread":
    thread = threading.Thread(target=work); thread.start(); thread.join()
else:
    work()
"""


@pytest.mark.parametrize("thread", ["main", "thread"])
@pytest.mark.parametrize("method", ["sleep", "hold_interpreter_lock"])
def test_the_child_ends_when_the_parent_is_killed(method, thread):
    arguments = [sys.executable, "-c", PARENT, str(Path(__file__).parent), method, thread]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(entry for entry in sys.path if entry)}
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        pid = int(parent.stdout.readline())
        assert is_running(pid)
        parent.kill()
    assert wait_until(lambda: not is_running(pid))


def test_the_child_outlives_the_thread_that_made_it():
    made = []

    def make():
        made.append(Child(SERVICE))
        made[0].call("echo", {})

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    with made[0] as child:
        time.sleep(0.1)
        assert child.call("echo", {"a": 1})[0] == {"a": 1}


def test_a_callers_failure_in_progress_kills_the_child_and_is_raised(child):
    def fail(_):
        raise EOFError("the caller's own")

    with pytest.raises(EOFError, match="the caller's own"):
        child.call("sleep", {}, on_progress=fail)
    assert not is_running(child.pid)


@pytest.mark.parametrize("closed", [[0], [1], [2], [0, 1, 2]])
def test_a_caller_that_closed_its_standard_streams_gets_answers(tmp_path, closed):
    code = f"""
import os, pathlib, sys
for fd in {closed}:
    os.close(fd)
sys.path.insert(0, {str(Path(__file__).parent)!r})
from trtforge.isolation import Child
with Child({SERVICE!r}, log=pathlib.Path("log")) as child:
    answer, _ = child.call("echo", {{"text": "hello"}})
pathlib.Path("answer").write_text(answer["text"])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "answer").read_text() == "hello"
