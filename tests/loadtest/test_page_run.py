"""The page of a run: what must be on it, and that nothing of a stranger's can run in it."""

import re
from html.parser import HTMLParser

import pytest
from run_cases import make_run

from trtforge.loadtest.compare import compare_runs
from trtforge.loadtest.page import render_page
from trtforge.loadtest.page_figures import milliseconds, per_second, share
from trtforge.loadtest.plot import scale_of
from trtforge.loadtest.results import Run

HOSTILE = "<script>alert(1)</script>\"'&\n\u202e"


class Reader(HTMLParser):
    """Text by section, tags, and whether every element is closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.sections: dict[str, str] = {"": ""}
        self.section = ""
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "br"):
            self.open.append(tag)
        if tag == "section":
            self.section = dict(attrs)["id"] or ""
            self.sections[self.section] = ""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag
        if tag == "section":
            self.section = ""

    def handle_data(self, data: str) -> None:
        self.sections[self.section] += f" {data}"


def without_server(run: Run) -> Run:
    side = {"models": (), "seconds": (), "tokens": None, "missing": "no metrics at http://x/metrics"}
    steps = []
    for step in run.steps:
        measured = [one.model_copy(update={"server": one.server.model_copy(update=side)}) for one in step.measurements]
        steps.append(step.model_copy(update={"measurements": tuple(measured)}))
    return run.model_copy(update={"steps": tuple(steps)})


def test_page_has_every_section_with_its_figures() -> None:
    run = make_run(repeats=3, objectives=["p99=100ms"], error_share=0.01)
    before = make_run(repeats=3, seed=1, objectives=["p99=100ms"])
    page = Reader(render_page(run, compare_runs(run, before, "base/run.json")))
    expected = "comparison load lengths service-levels batches server-time time tokens gpus errors conditions"
    assert " ".join(name for name in page.sections if name) == expected
    throughput = [one.throughput for one in run.steps[0].measurements]
    assert per_second(sum(throughput) / 3) in page.sections["load"]
    assert "8-32" in page.sections["lengths"]
    assert "timeout" in page.sections["errors"]
    assert "21.7 % padding" in page.sections["tokens"]
    assert "base/run.json" in page.sections["comparison"]
    assert "coordinated omission" in page.sections["conditions"]


def test_page_loads_nothing_and_runs_nothing() -> None:
    page = render_page(make_run())
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page)
    assert policy is not None
    assert policy[1].startswith("default-src &#x27;none&#x27;; style-src")
    assert "script-src" not in policy[1]
    assert not re.search(r"<(script|link|img|iframe)|url\(|@import", page)
    assert re.findall(r'(?:href|src)="(?!#)[^"]*"', page) == []


def test_names_of_strangers_are_shown_not_run() -> None:
    run = make_run(objectives=["p99=100ms"], error_share=0.1)
    model = run.model.model_copy(update={"name": HOSTILE, "config": {HOSTILE: HOSTILE}})
    hostile = run.model_copy(update={"model": model, "failure": HOSTILE, "environment": run.environment})
    page = render_page(hostile)
    assert "script" not in Reader(page).tags
    assert "\u202e" not in page
    assert "\\u202e" in page


@pytest.mark.parametrize(("failure", "error_share", "word"), [(None, 0.0, "NO ERRORS"), (None, 0.05, "WITH ERRORS")])
def test_verdict_of_complete_runs(failure: str | None, error_share: float, word: str) -> None:
    page = Reader(render_page(make_run(users=(1,), error_share=error_share, failure=failure)))
    assert word in page.sections[""]


def test_run_that_ended_early_says_why_even_without_steps() -> None:
    run = make_run(users=(1,), failure="the server died: signal 9")
    assert "ENDED EARLY" in Reader(render_page(run)).sections[""]
    empty = run.model_copy(update={"steps": ()})
    assert "the server died: signal 9" in Reader(render_page(empty)).sections[""]


def test_page_without_the_servers_figures_says_so_and_has_no_empty_section() -> None:
    page = Reader(render_page(without_server(make_run())))
    assert "no metrics at http://x/metrics" in page.sections[""]
    assert {"batches", "server-time", "tokens", "gpus"}.isdisjoint(page.sections)


def test_step_without_any_right_answer_is_drawn_as_missing() -> None:
    page = Reader(render_page(make_run(users=(1, 4), error_share=1.0, objectives=["p99=100ms"])))
    assert "100 %" in page.sections["errors"]
    assert "lengths" not in page.sections


def test_equal_runs_give_equal_pages() -> None:
    assert render_page(make_run()) == render_page(make_run())


def test_scales_show_every_value_and_few_ticks() -> None:
    for values in ([0.0, 0.3], [5.0], [1, 2, 4, 8, 16, 32], [0.001, 4000], [7.0, 7.0], [-3.0, 2.0], [99.5, 100.5]):
        scale = scale_of(values, 0, 500)
        assert scale.low <= min(values) and max(values) <= scale.high
        assert 2 <= len(scale.ticks) <= 9
        places = [scale.place(value) for value in sorted(values)]
        assert places == sorted(places)
        assert places[0] >= 0
        assert places[-1] <= 500


def test_figures_are_written_with_three_digits() -> None:
    assert [milliseconds(value) for value in (None, 0.4249, 12.34, 99.96, 999.6, 125_000.0)] == [
        "-", "0.425 ms", "12.3 ms", "100 ms", "1 s", "125 s",
    ]  # fmt: skip
    assert [per_second(value) for value in (4.212, 84.31, 1250.4)] == ["4.21", "84.3", "1,250"]
    assert [share(value) for value in (None, 0.0, 0.00123, 0.5, 0.99999, 1.0)] == [
        "-", "0 %", "0.12 %", "50.0 %", "99.99 %", "100 %",
    ]  # fmt: skip
