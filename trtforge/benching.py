"""Benchmarks of the plugin: measure on a GPU, or check without one; compare with an earlier run.

spec = PluginBench(grid=Grid(batches=(8,), sequences=(512,)), output=Path("h100.jsonl"))
result = bench_plugin(spec)
result.run.cases[0].speedup("eager", "graph")
"""

from __future__ import annotations

import dataclasses
import importlib.util
import time
from pathlib import Path

from trtforge.benchmark.case import Grid
from trtforge.benchmark.compilers import build_for_device
from trtforge.benchmark.device import Device, card_state
from trtforge.benchmark.history import Change, compare_runs, read_run
from trtforge.benchmark.host import HostCheck, check_on_host, sample_for_host
from trtforge.benchmark.kernels import STRATEGIES, BlockKernels
from trtforge.benchmark.measure import Bench, check_names, measure_case
from trtforge.benchmark.page import render_page
from trtforge.benchmark.results import PLUGIN, CaseResult, ResultFile, RunResult, merge
from trtforge.benchmark.session import Budget, Step, run_session
from trtforge.benchmark.timing import ColdTimer
from trtforge.benchmark.torch_peers import TORCH_PEERS
from trtforge.errors import InputError, UnavailableError
from trtforge.plugins.record import LibraryRecord, read_record
from trtforge.progress import Event, Reporter, Stopwatch, ignore

FOLDER = Path("build/bench")

__all__ = ["CaseResult", "Change", "Grid", "HostResult", "PluginBench", "PluginBenchResult", "read_run", "render_page"]


@dataclasses.dataclass(frozen=True, slots=True)
class PluginBench:
    """What to measure.

    Attributes:
        grid: the cases.
        names: implementations, of `measure.NAMES`; None means the plugin and every peer that is installed here.
        library: `libtrtforge_kernels.so`; None compiles one for the card.
        plugin_library: for TensorRT with the plugin.
        output: keeps results as lines while they come, and is continued where it exists.
        baseline: an earlier run.
        minutes: ends the run; None measures everything.
        seconds: for the samples of one measurement.
        folder: keeps what is compiled here.
    """

    grid: Grid = dataclasses.field(default_factory=Grid)
    names: tuple[str, ...] | None = None
    library: Path | None = None
    plugin_library: Path | None = None
    output: Path | None = None
    baseline: Path | None = None
    minutes: float | None = None
    seconds: float = 0.2
    folder: Path = FOLDER


@dataclasses.dataclass(frozen=True, slots=True)
class PluginBenchResult:
    """What a run gave.

    Attributes:
        run: conditions and every case.
        left_out: steps that time did not allow.
        changes: against the baseline; empty without one.
    """

    run: RunResult
    left_out: tuple[Step, ...]
    changes: tuple[Change, ...]

    @property
    def passed(self) -> bool:
        """Every result of the plugin is right, and none is slower than the baseline beyond the noise."""
        return not self.run.wrong and not any(change.is_regression for change in self.changes)


@dataclasses.dataclass(frozen=True, slots=True)
class HostResult:
    """What can be known without a GPU.

    Attributes:
        checks: cases on the emulator.
        record: of the library, for registers and spills; None where no library was built yet.
    """

    checks: tuple[HostCheck, ...]
    record: LibraryRecord | None

    @property
    def passed(self) -> bool:
        """Every case is right."""
        return all(check.verdict.is_right for check in self.checks)


def bench_plugin(spec: PluginBench, report: Reporter = ignore) -> PluginBenchResult:
    """Measure the plugin and its peers on the first GPU.

    Raises:
        InputError: sizes, names or files that cannot be used.
        UnavailableError: there is no GPU, or cupy or nvcc is missing.
    """
    cases, names = spec.grid.cases(), check_names(spec.names or _installed_names(spec))
    before = None if spec.baseline is None else read_run(spec.baseline)
    device = _find_device()
    watch = Stopwatch(report)
    with watch.stage("compile"):
        library = spec.library or build_for_device(spec.folder, device.size.compute_capability)[0]
    bench = Bench(device, BlockKernels(library, device.size), ColdTimer(device, spec.seconds), spec.plugin_library)
    conditions = device.conditions(library, spec.seconds)
    file = None if spec.output is None else ResultFile(spec.output, conditions)
    if file is not None:
        file.write({"kind": "state", **card_state()})
    budget = Budget(None if spec.minutes is None else 60 * spec.minutes, time.monotonic)

    def tell(done: int, total: int, step: Step) -> None:
        report(Event("measure", f"{step.case.key}: {', '.join(step.names)}", done=done, total=total))

    results, left_out = run_session(
        cases, names, lambda step: measure_case(bench, step.case, step.names), budget, file, tell
    )
    run = read_run(spec.output) if spec.output is not None else RunResult(conditions, merge(results))
    changes = () if before is None else compare_runs(run, before, str(spec.baseline))
    return PluginBenchResult(run, left_out, changes)


def check_plugin_on_host(
    grid: Grid, strategy: str = "auto", library: Path | None = None, folder: Path = FOLDER, report: Reporter = ignore
) -> HostResult:
    """Check a sample of the grid on the emulator, and read what the kernels of a library take. Measures no time.

    Args:
        grid: the cases, whose sizes are cut.
        strategy: see `kernels.STRATEGIES`.
        library: with its record; None reports no resources.
        folder: keeps the emulator's library.
        report: takes progress.

    Raises:
        InputError: sizes or a library that cannot be used.
        UnavailableError: g++ or CUDA's headers are missing, or the kernels refuse a case.
    """
    if strategy not in STRATEGIES:
        raise InputError(f"--strategy {strategy!r} is not known", f"known: {', '.join(STRATEGIES)}", "--strategy auto")
    record = None if library is None else read_record(library)
    cases = sample_for_host(grid.cases())
    return HostResult(check_on_host(cases, strategy, folder, Stopwatch(report)), record)


def _installed_names(spec: PluginBench) -> tuple[str, ...]:
    """The plugin and the peers whose packages are here."""
    has = {name: importlib.util.find_spec(name) is not None for name in ("torch", "tensorrt")}
    return (
        PLUGIN,
        *(TORCH_PEERS if has["torch"] else ()),
        *(("tensorrt",) if has["tensorrt"] else ()),
        *(("tensorrt+plugin",) if has["tensorrt"] and spec.plugin_library is not None else ()),
    )


def _find_device() -> Device:
    try:
        return Device()
    except UnavailableError as err:
        fix = f"{err.fix}; `--host` checks the kernels on this machine, without times"
        raise UnavailableError(f"the plugin cannot be measured: {err.what}", err.why, fix) from err
