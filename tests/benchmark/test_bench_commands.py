"""`trtforge bench` and the script for a GPU machine, as far as they go without a GPU."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import trtforge.benchmark
from trtforge.benchmark import gpu_check
from trtforge.benchmark.case import BlockCase
from trtforge.benchmark.gpu_check import check_correctness, find_sanitizer, run_sanitizers, summary_lines
from trtforge.benchmark.measure import Bench
from trtforge.benchmark.results import CaseResult, Measurement, ResultFile, case_line, read_lines
from trtforge.benchmark.session import Budget
from trtforge.cli.app import run
from trtforge.errors import UnavailableError
from trtforge.gpu import find_gpus
from trtforge.hashing import sha256_of_file
from trtforge.plugins.record import LibraryRecord
from trtforge.plugins.resources import KernelResources

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tests" / "device" / "run_on_gpu.py"
CASE = BlockCase(1, 8, 64, 2, 96)


@pytest.fixture(autouse=True)
def without_gpu() -> None:
    try:
        find_gpus()
    except UnavailableError:
        return
    pytest.skip("this machine has a GPU: tests/device/run_on_gpu.py measures on it")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, emulated: Path) -> Path:
    """A working directory whose emulator is compiled already."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "trtforge.benchmark.host.build_for_host",
        lambda folder: (folder.mkdir(parents=True, exist_ok=True), emulated)[1],
    )
    return tmp_path


def test_without_a_gpu_it_says_so_and_offers_the_host(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "plugin", "-o", "results.jsonl", "--html", "page.html"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "the plugin cannot be measured: this machine has no GPU to use" in captured.err
    assert "`--host` checks the kernels on this machine, without times" in captured.err
    assert list(here.iterdir()) == []


def test_host_checks_types_masks_and_head_sizes_and_gives_no_time(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["bench", "plugin", "--host", "--hidden", "160", "--heads", "2", "--batch", "1", "--seq", "33"]
    assert run([*arguments, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["passed"] is True
    assert len(value["checks"]) == 12
    assert {(check["case"]["dtype"], check["case"]["mask"]) for check in value["checks"]} == {
        (dtype, mask) for dtype in ("fp16", "bf16", "int8") for mask in ("none", "causal", "lengths", "bias")
    }
    assert value["kernels"] is None
    assert not any(word in json.dumps(value) for word in ("_us", "tflops", "speed"))
    assert run([*arguments, "--dtype", "fp16", "--mask", "none"]) == 0
    out = capsys.readouterr().out
    assert "1 of 1 right on the emulator; times need a GPU" in out
    assert "give --library LIB" in out


def test_host_shows_what_the_kernels_of_a_library_take(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    library = here / "libtrtforge_kernels.so"
    library.write_bytes(b"made up")
    kernel = KernelResources(
        name="gemm_kernel<half>",
        architecture=90,
        registers=123,
        stack_bytes=0,
        spill_store_bytes=4,
        spill_load_bytes=8,
        static_shared_bytes=0,
    )
    record = LibraryRecord(
        kind="kernels",
        library_sha256=sha256_of_file(library),
        inputs_sha256="",
        sources_sha256="",
        architectures=(90,),
        cuda="13.0.88",
        tensorrt=None,
        kernels=(kernel,),
    )
    library.with_suffix(".json").write_text(record.model_dump_json())
    small = ["--hidden", "64", "--heads", "2", "--batch", "1", "--seq", "9", "--dtype", "fp16", "--mask", "none"]
    arguments = ["bench", "plugin", "--host", *small, "--library", str(library)]
    assert run(arguments) == 0
    assert re.search(r"gemm_kernel<half>\s+sm_90\s+123\s+12\s+0", capsys.readouterr().out)
    assert run([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kernels"][0]["registers"] == 123


def test_host_exits_1_where_a_case_is_wrong(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from trtforge.benchmark.host import HostCheck
    from trtforge.benchmark.reference import Verdict

    wrong = HostCheck(CASE, Verdict(9.0, 9.0, False))
    monkeypatch.setattr("trtforge.benching.check_on_host", lambda *_: (wrong,))
    assert run(["bench", "plugin", "--host"]) == 1
    out = capsys.readouterr().out
    assert "WRONG: error 9.00 x" in out
    assert "0 of 1 right" in out


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--seq", "x"], "--seq 'x' cannot be used"),
        (["--dtype", "fp8"], "--dtype 'fp8' is not known"),
        (["--mask", "banded"], "--mask 'banded' is not known"),
        (["--order", "both"], "--order 'both' is not known"),
        (["--order", "post,pre"], "--order 'post,pre' is not known"),
        (["--activation", "gelu,relu"], "--activation 'gelu,relu' is not known"),
        (["--strategy", "launches"], "--strategy is for --host"),
        (["--heads", "7"], "--heads 7 does not suit"),
        (["--peers", "cudnn"], "there is no implementation 'cudnn'"),
        (["--baseline", "missing.jsonl"], "result file missing.jsonl does not exist"),
        (["--host", "--html", "page.html"], "--host does not take --html"),
        (["--host", "--strategy", "fast"], "--strategy 'fast' is not known"),
        (["--host", "--library", "missing.so"], "plugin library missing.so does not exist"),
    ],
)
def test_bad_input_is_refused(here: Path, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "plugin", *arguments]) == 2
    assert text in capsys.readouterr().err


def saved(path: Path) -> Path:
    """Made-up results of one case."""
    file = ResultFile(path, {"card": "Made-up card", "num_multiprocessors": 4, "peaks": None})
    measurements = (Measurement("plugin", "call", (10.0, 11.0)), Measurement("eager", "call", (30.0, 33.0)))
    file.write(case_line(CaseResult(CASE, measurements)))
    return path


def test_report_shows_results_of_another_machine(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(here / "run.jsonl")
    assert run(["bench", "report", "run.jsonl", "--html", "page.html"]) == 0
    out = capsys.readouterr().out
    assert "Made-up card" in out
    assert "3.00 x" in out
    assert "attention unfused" in out
    assert "3.00 x" in (here / "page.html").read_text()
    assert run(["bench", "report", "run.jsonl", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cases"][0]["case"]["width"] == 64
    (here / "page.html").write_text("mine")
    assert run(["bench", "report", "run.jsonl", "--html", "page.html"]) == 2
    assert (here / "page.html").read_text() == "mine"


def test_report_of_a_run_that_measured_nothing_says_so(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    saved(here / "run.jsonl")
    first = (here / "run.jsonl").read_text().partition("\n")[0]
    (here / "run.jsonl").write_text(f"{first}\n")
    assert run(["bench", "report", "run.jsonl", "--html", "page.html"]) == 0
    assert "nothing was measured" in capsys.readouterr().out


def test_the_script_says_what_is_missing_and_writes_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "out/results.jsonl", "--folder", "kernels"],
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
        timeout=120,
    )
    assert done.returncode == 2
    assert "this machine has no GPU to use" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_script_needs_nothing_but_numpy_to_be_read() -> None:
    """A bare machine has numpy, cupy and torch: of trtforge's own dependencies nothing may be imported."""
    code = f"""
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {{"pydantic", "yaml", "onnx", "onnxruntime", "typer", "rich", "ml_dtypes",
                                      "onnx_graphsurgeon", "polygraphy", "tensorrt", "tensorrt_rtx"}}:
            raise ImportError("not on a bare machine: " + name)
sys.meta_path.insert(0, Refuse())
sys.path.insert(0, {str(SCRIPT.parent)!r})
import run_on_gpu
import trtforge.benchmark.sanitized
print(run_on_gpu.main(["results.jsonl"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.strip() == "2", done.stderr
    assert "no GPU to use" in done.stderr


def test_every_name_of_cupy_that_is_used_exists() -> None:
    cupy = pytest.importorskip("cupy")
    folder = Path(trtforge.benchmark.__file__).parent
    aliases = {"cuda.": "cuda.", "runtime.": "cuda.runtime."}
    prefixes = {"self.cupy.": "", "device.cupy.": "", "self.device.cupy.": "", **aliases}
    names = set()
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            text = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            for prefix, meant in prefixes.items():
                if text.startswith(prefix) and re.fullmatch(r"[\w.]+", text):
                    names.add(meant + text.removeprefix(prefix))
    assert {"cuda.runtime.memsetAsync", "cuda.get_elapsed_time", "cuda.runtime.getDeviceProperties"} <= names
    for name in names:
        value = cupy
        for part in name.split("."):
            value = getattr(value, part)


def test_correctness_counts_what_was_compared_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = tuple(dataclasses.replace(CASE, sequence=sequence) for sequence in (8, 16, 24, 32))
    seconds = 0.0

    def measured(_: Bench, case: BlockCase, names: tuple[str, ...]) -> CaseResult:
        nonlocal seconds
        seconds += 6.0
        refused = Measurement("plugin (persistent)", "call", failure="the block was not launched")
        failure = "wrong result: error 9.00 x" if case.sequence == 16 else None
        assert names == ("plugin", "plugin (launches)", "plugin (persistent)")
        return CaseResult(case, (refused, Measurement("plugin", "call", failure=failure, is_wrong=failure is not None)))

    monkeypatch.setattr(gpu_check, "measure_case", measured)
    bench: Any = Bench(None, None, None)  # type: ignore[arg-type]
    for expected in (
        [
            "WRONG b1-s16-h64-n2-f96-fp16-none-post-gelu, plugin, call: wrong result: error 9.00 x",
            "correctness: 2 cases left out for want of time",
            "correctness: 2 cases, 1 wrong",
        ],
        ["correctness: 4 cases, 1 wrong"],
    ):
        said: list[str] = []
        file = ResultFile(tmp_path / "results.jsonl", {"card": "c"})
        # A fifth of it is for correctness: 10 s, enough for two cases of 6 s.
        assert check_correctness(bench, cases, file, Budget(50.0, lambda: seconds), said.append) == 1
        assert said == expected


def say_nothing(_: str) -> None:
    pass


def test_a_machine_without_compute_sanitizer_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_check, "find_sanitizer", lambda: None)
    file = ResultFile(tmp_path / "results.jsonl", {"card": "c"})
    budget = Budget(100.0, lambda: 0.0)
    assert run_sanitizers(tmp_path / "lib.so", (CASE,), file, budget, say_nothing) == 0
    lines = [line for line in read_lines(file.path) if line["kind"] == "sanitizer"]
    assert [(line["tool"], line["status"]) for line in lines] == [("racecheck", "missing"), ("memcheck", "missing")]


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize(
    ("body", "status", "num_failed"),
    [
        ("exit 0", "passed", 0),
        ("echo ERROR: race in gemm; exit 86", "failed", 2),
        ("sleep 60 & echo $! >> pids; wait", "late", 0),
    ],
)
def test_what_a_sanitizer_says_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, status: str, num_failed: int
) -> None:
    program = tmp_path / "compute-sanitizer"
    program.write_text(f"#!/bin/sh\necho $@\n{body}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu_check, "_MIN_SANITIZER_S", 0.5 if status == "late" else 30)
    file = ResultFile(tmp_path / "results.jsonl", {"card": "c"})
    assert find_sanitizer() == program
    assert run_sanitizers(tmp_path / "lib.so", (CASE,), file, Budget(1.0, lambda: 0.0), say_nothing) == num_failed
    lines = [line for line in read_lines(file.path) if line["kind"] == "sanitizer"]
    assert [line["status"] for line in lines] == [status, status]
    if status == "late":
        pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
        assert len(pids) == 2
        until = time.monotonic() + 20  # they sleep for 60; a signal is on its way when kill returns
        while any(map(is_running, pids)) and time.monotonic() < until:
            time.sleep(0.01)
        assert not any(map(is_running, pids))
    else:
        assert "--tool racecheck --error-exitcode 86" in lines[0]["log"]
        assert f"-m trtforge.benchmark.sanitized {tmp_path / 'lib.so'} {CASE.key}" in lines[0]["log"]


def test_the_summary_names_the_speed_ups_that_were_measured() -> None:
    result = CaseResult(CASE, (Measurement("plugin", "call", (10.0,)), Measurement("sdpa", "call", (15.0,))))
    assert summary_lines([result]) == [f"{CASE.key} call: 10.0 us; faster than sdpa 1.50 x"]
    assert summary_lines([CaseResult(CASE, (Measurement("plugin", "call", failure="no"),))]) == []


def test_the_peers_that_are_installed_are_measured_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    from trtforge import benching

    installed: set[str] = set()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name if name in installed else None)
    spec = benching.PluginBench()
    assert benching._installed_names(spec) == ("plugin",)
    installed |= {"torch", "tensorrt"}
    names = benching._installed_names(spec)
    assert names == ("plugin", "eager", "sdpa", "cublaslt", "compile", "tensorrt")
    with_plugin = benching.PluginBench(plugin_library=Path("libtrtforge_plugin.so"))
    assert benching._installed_names(with_plugin) == (*names, "tensorrt+plugin")


def test_the_script_stops_within_a_step_that_takes_too_long(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = importlib.util.spec_from_file_location("run_on_gpu", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)

    def hang(*_: object) -> int:
        try:
            time.sleep(30)
        except Exception:  # what a measurement does with an error
            return 0
        return 0

    monkeypatch.setattr(script, "run", hang)
    started = time.monotonic()
    assert script.main(["results.jsonl", "--minutes", "0.005"]) == 4
    assert time.monotonic() - started < 10
    assert "all that was known before is in results.jsonl" in capsys.readouterr().err
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
