"""Reading results again, speed-ups, comparison with an earlier run, and the page. The times here are made up."""

from __future__ import annotations

import dataclasses
import json
import re
import xml.dom.minidom
from pathlib import Path
from typing import Any

import pytest

from trtforge.benchmark.case import BlockCase
from trtforge.benchmark.history import compare_runs, read_run
from trtforge.benchmark.page import render_page
from trtforge.benchmark.results import CaseResult, Measurement, ResultFile, RunResult, case_line, merge
from trtforge.benchmark.torch_peers import TORCH_PEERS
from trtforge.errors import InputError

CASE = BlockCase(8, 128, 384, 12, 1536)
OTHER = dataclasses.replace(CASE, sequence=512)
PEAKS = {"fp16_tflops": 100.0, "int8_tops": None, "bandwidth_gbps": 1000.0, "source": "made up"}
CONDITIONS: dict[str, Any] = {"card": "Made-up card <1>", "num_multiprocessors": 4, "peaks": PEAKS}


def timed(name: str, median_us: float, mode: Any = "call") -> Measurement:
    samples = tuple(median_us * factor for factor in (0.98, 0.99, 1.0, 1.01, 1.02))
    return Measurement(name, mode, samples, 0.9, 1.1)


WRONG = Measurement("plugin", "graph", (), 2.0, 9.0, "wrong result: error 2.00 x", is_wrong=True)
RUN = RunResult(
    CONDITIONS,
    (
        CaseResult(CASE, (timed("plugin", 100.0), WRONG, timed("eager", 250.0), timed("eager", 200.0, "graph"))),
        CaseResult(OTHER, (timed("plugin", 400.0), Measurement("compile", "call", failure="RuntimeError: <no>"))),
    ),
)


def saved(path: Path, run: RunResult = RUN) -> Path:
    file = ResultFile(path, run.conditions)
    for result in run.cases:
        file.write(case_line(result))
    file.write({"kind": "state"})
    return path


def test_lines_and_document_read_back_as_they_were(tmp_path: Path) -> None:
    assert read_run(saved(tmp_path / "run.jsonl")) == RUN
    (tmp_path / "run.json").write_text(json.dumps(RUN.to_dict(), indent=1))
    assert read_run(tmp_path / "run.json") == RUN


def test_speedup_is_the_peers_time_over_the_plugins_in_the_same_mode() -> None:
    assert RUN.cases[0].speedup("eager", "call") == pytest.approx(2.5)
    assert RUN.cases[0].speedup("eager", "graph") is None  # the plugin has no time there
    assert RUN.cases[1].speedup("compile", "call") is None
    assert RUN.cases[1].speedup("eager", "call") is None


def test_only_the_plugins_wrong_results_count() -> None:
    assert RUN.wrong == (f"{CASE.key}, plugin, graph: wrong result: error 2.00 x",)
    peer = dataclasses.replace(WRONG, implementation="eager")
    refusal = Measurement("plugin (persistent)", "call", failure="the block was not launched")
    assert RunResult({}, (CaseResult(CASE, (peer, refusal)),)).wrong == ()
    for name, is_wrong in (("plugin (persistent)", True), ("plugin", False)):
        bad = dataclasses.replace(refusal, implementation=name, is_wrong=is_wrong)
        assert len(RunResult({}, (CaseResult(CASE, (bad,)),)).wrong) == 1


def test_of_two_measurements_the_later_counts() -> None:
    parts = [CaseResult(CASE, (timed("plugin", 1.0),)), CaseResult(CASE, (timed("eager", 2.0), timed("plugin", 3.0)))]
    (merged,) = merge(parts)
    assert merged.speedup("eager", "call") == pytest.approx(2 / 3)


def changed(measurement: Measurement) -> RunResult:
    return RunResult(CONDITIONS, (CaseResult(CASE, (measurement,)), RUN.cases[1]))


@pytest.mark.parametrize(
    ("now", "is_regression", "ratio"),
    [
        (timed("plugin", 100.0), False, 1.0),
        (timed("plugin", 110.0), True, 1.1),
        (timed("plugin", 102.0), False, 1.02),
        (timed("plugin", 50.0), False, 0.5),
        (Measurement("plugin", "call", (), 5.0, 5.0, "wrong result", is_wrong=True), True, None),
        (Measurement("plugin", "call", failure="the block was not launched"), True, None),
    ],
)
def test_a_regression_is_slower_beyond_noise_wrong_or_gone(
    now: Measurement, is_regression: bool, ratio: float | None
) -> None:
    change = compare_runs(changed(now), RUN, "before.jsonl")[0]
    assert change.is_regression is is_regression
    assert change.ratio == (None if ratio is None else pytest.approx(ratio))


def test_peers_and_cases_that_were_not_measured_now_do_not_regress() -> None:
    now = RunResult(CONDITIONS, (CaseResult(CASE, (timed("plugin", 100.0), timed("eager", 900.0))),))
    changes = compare_runs(now, RUN, "before.jsonl")
    assert [(change.key, change.is_regression) for change in changes] == [(CASE.key, False)]


def test_runs_of_other_cards_or_cases_are_not_compared() -> None:
    with pytest.raises(InputError, match="cannot be compared"):
        compare_runs(dataclasses.replace(RUN, conditions={**CONDITIONS, "card": "another"}), RUN, "before.jsonl")
    elsewhere = RunResult(CONDITIONS, (CaseResult(dataclasses.replace(CASE, batch=1), (timed("plugin", 1.0),)),))
    with pytest.raises(InputError, match="no case of this run"):
        compare_runs(elsewhere, RUN, "before.jsonl")


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"schema_version": 2}, "schema_version"),
        ({"cases": [{"case": CASE.to_dict() | {"dtype": "fp8"}, "measurements": []}]}, "dtype"),
        ({"cases": [{"case": CASE.to_dict() | {"batch": -1}, "measurements": []}]}, "batch"),
        ({"cases": [{"case": CASE.to_dict() | {"batch": 2**70}, "measurements": []}]}, "batch"),
        ({"conditions": CONDITIONS | {"peaks": {"fp16_tflops": 1.0}}}, "peaks"),
        ({"conditions": CONDITIONS | {"peaks": PEAKS | {"bandwidth_gbps": 0.0}}}, "bandwidth_gbps"),
        ({"colour": "red"}, "unknown key 'colour'"),
    ],
)
def test_a_damaged_document_is_refused_with_the_place(tmp_path: Path, change: dict[str, Any], text: str) -> None:
    path = tmp_path / "run.json"
    path.write_text(json.dumps({**RUN.to_dict(), **change}))
    with pytest.raises(InputError) as caught:
        read_run(path)
    assert text in str(caught.value)


def test_a_file_of_half_a_first_line_holds_no_result(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text('{"kind": "run", "schema_ver')
    with pytest.raises(InputError, match="holds no result"):
        read_run(path)


@pytest.mark.parametrize("value", ["-1.0", "0", "1e999", "NaN", '"x"'])
def test_a_time_that_is_none_is_refused(tmp_path: Path, value: str) -> None:
    path = saved(tmp_path / "run.jsonl")
    path.write_text(path.read_text().replace("[98.0,", f"[{value},"))
    with pytest.raises(InputError):
        read_run(path)


def test_the_page_shows_every_figure_and_asks_for_nothing_else() -> None:
    page = render_page(RUN)
    assert "Made-up card &lt;1&gt;" in page
    assert "<1>" not in page
    assert "2.50 x" in page
    assert "RuntimeError: &lt;no&gt;" in page
    assert "Wrong results" in page
    assert TORCH_PEERS["eager"] in page
    assert not re.search(r"(src|href)=\"?(https?:)?//", page)
    assert "default-src 'none'" in page.replace("&#x27;", "'")


def test_the_charts_are_well_formed_and_hold_a_mark_for_each_time() -> None:
    page = render_page(RUN)
    charts = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    documents = [xml.dom.minidom.parseString(chart) for chart in charts]
    bars = sum(len(document.getElementsByTagName("rect")) for document in documents)
    points = sum(len(document.getElementsByTagName("circle")) for document in documents)
    assert bars == 4  # three times as called, one as a graph
    assert points == 2  # the plugin's, as called
    widths = [float(rect.getAttribute("width")) for rect in documents[0].getElementsByTagName("rect")]
    assert widths[1] / widths[0] == pytest.approx(2.5, rel=0.01)
    assert 600 < max(widths[:2]) <= 640  # the slowest of a case fills the plot


def test_a_page_without_peaks_or_times_is_still_one() -> None:
    empty = RunResult({"card": "c"}, (CaseResult(CASE, (Measurement("plugin", "call", failure="no"),)),))
    page = render_page(empty)
    assert "<svg" not in page
    assert "Not timed" in page
