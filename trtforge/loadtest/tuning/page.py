"""The page of a search: every trial by throughput and latency, the Pareto front, the gain, and the settings."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Literal

from trtforge.loadtest import charts
from trtforge.loadtest.charts import Point, TrialMark
from trtforge.loadtest.objective import Statistic
from trtforge.loadtest.page_figures import milliseconds, per_second, pre, share
from trtforge.loadtest.tuning.candidate import DEFAULT, Candidate
from trtforge.loadtest.tuning.result import NamedGain, TuneResult
from trtforge.loadtest.tuning.trial import Probe, Trial, pareto_front
from trtforge.report.document import document, resource
from trtforge.report.figures import count
from trtforge.report.markup import NOTHING, Column, Html, code, el, long_table, note, section, table

_STYLES = {"BETTER": "good", "DEFAULT": "good", "NO GAIN": "unknown", "MISSED": "bad"}


def render_tuning(result: TuneResult) -> str:
    """The text of an HTML file, in UTF-8."""
    body = el(
        "main",
        _header(result),
        _key_figures(result),
        _warnings(result),
        _front(result),
        _confirmation(result),
        _settings(result),
        section("candidates", "What each candidate serves within the objective", _candidates(result)),
        section("trials", "Every trial", _trials(result)),
        section("conditions", "Conditions", _conditions(result)),
    )
    style = resource("style.css") + resource("loadtest.css", "trtforge.loadtest")
    return document(f"Tuning of {result.model}", style, body)


def _header(result: TuneResult) -> Html:
    word, meaning = result.verdict()
    conditions = result.conditions
    tags = [*map(str, result.objectives), f"triton {conditions['triton']}", str(conditions["cpu"])]
    tags.append("open loop: Poisson arrivals" if result.kind == "open" else "closed loop")
    return el(
        "header",
        el("p", f"trtforge {conditions['trtforge']} loadtest tune", class_="kicker"),
        el("h1", f"Batching of {result.model}"),
        el("p", *(el("span", tag, class_="tag") for tag in tags), class_="tags"),
        el("div", el("strong", word), el("div", el("p", meaning)), class_=f"verdict {_STYLES[word]}"),
    )


def _key_figures(result: TuneResult) -> Html:
    outcome = result.outcome
    cards = [("Triton's default", _rate(result, DEFAULT), "answers/s within the objective")]
    if outcome.best is not None:
        cards.append(("best settings", _rate(result, outcome.best), str(outcome.best)))
    cards += [(gain.name, gain.change_text, gain.noise_text) for gain in result.gains]
    cards.append(("trials", str(len(outcome.trials)), count(len(outcome.capacities), "configuration")))
    items = (el("div", el("dt", title), el("dd", value), el("dd", sub, class_="sub")) for title, value, sub in cards)
    return el("dl", *items, class_="key", style=f"--columns:{len(cards)}")


def _rate(result: TuneResult, candidate: Candidate) -> str:
    found = result.outcome.capacities.get(candidate)
    if found is None or not found.throughput:
        return "none"
    return per_second(found.throughput) if found.is_bounded else f"≥ {per_second(found.throughput)}"


def _warnings(result: TuneResult) -> Html:
    texts = result.warnings
    if not texts:
        return NOTHING
    title = count(len(texts), "warning")
    return el("aside", el("strong", title), el("ul", *(el("li", text) for text in texts)), class_="warnings")


def _front(result: TuneResult) -> Html:
    objective = result.objectives[0]
    found = [
        (trial, probe)
        for trial, probe in _probes(result)
        if objective.statistic in probe.statistics_ms and trial.stage != "idle"
    ]
    marks = [TrialMark(_point(trial, probe, objective.statistic), _mark(result, trial)) for trial, probe in found]
    front = pareto_front([probe for _, probe in found], objective)
    line = [Point(probe.throughput, probe.statistics_ms[objective.statistic], "") for probe in front]
    titles = ("right answers/s", f"{objective.statistic}, ms")
    kinds = (("Triton's default", "default"), ("best settings", "best"), ("other settings", "tried"))
    names = el("ul", *(el("li", el("i", class_=f"dot {kind}"), name) for name, kind in kinds), class_="legend")
    about = note(
        "Each dot is one load of one trial. The line joins those that no other beats in both: the Pareto front."
    )
    chart = charts.front_chart(marks, line, titles, objective.limit_ms)
    return section("front", "Throughput and latency", chart, names, about) if chart else NOTHING


def _confirmation(result: TuneResult) -> Html:
    rows = [
        [named.name, _repeats(named, named.gain.default), _repeats(named, named.gain.best), named.text]
        for named in result.gains
    ]
    about = note(
        "Measured anew after the search, default and best in turns, each time on a server of its own. The noise band "
        "is what the ratios of neighbours explain (99 %), at least 3 %."
    )
    columns = [Column("Figure"), Column("Default", "name"), Column("Best", "name"), Column("Change", "number")]
    return section("gain", "The gain, confirmed", table(columns, rows), about) if rows else NOTHING


def _settings(result: TuneResult) -> Html:
    """What changes in the repository."""
    if not result.diff:
        return NOTHING
    words = "These are in the repository now." if result.is_applied else "Not written: --apply does it."
    return section("settings", "Settings", note(words), pre(result.diff))


def candidate_rows(result: TuneResult) -> list[list[str]]:
    """Settings by the throughput within the objective, with what the server did at the highest load that met it."""
    rows = []
    capacities = result.outcome.capacities
    for candidate in sorted(capacities, key=lambda one: -capacities[one].throughput):
        probes = [probe for trial, probe in _probes(result) if trial.candidate == candidate and probe.is_met]
        at = max(probes, key=lambda probe: probe.throughput, default=None)
        figures = ["-"] * 4 if at is None else _figures(at)
        rows.append([str(candidate), _rate(result, candidate), *figures])
    return rows


def _candidates(result: TuneResult) -> Html:
    names = ("Answers/s", "Mean batch", "Queue", "Compute", "Padding")
    return long_table(
        [Column("Settings"), *(Column(name, "number") for name in names)], candidate_rows(result), keep=20
    )


def _trials(result: TuneResult) -> Html:
    statistic = result.objectives[0].statistic
    rows = [
        [
            f"{trial.stage} {trial.repeat}" if trial.stage == "confirm" else trial.stage,
            str(trial.candidate),
            probe.load.describe(),
            per_second(probe.throughput),
            milliseconds(probe.statistics_ms.get(statistic)),
            share(probe.error_share),
            *_figures(probe),
            el("span", "met" if probe.is_met else "missed", class_=f"mark {'good' if probe.is_met else 'bad'}"),
        ]
        for trial, probe in _probes(result)
    ]
    names = ("Answers/s", statistic, "Errors", "Mean batch", "Queue", "Compute", "Padding")
    columns = [Column("Stage"), Column("Settings", "name"), Column("Load")]
    return long_table([*columns, *(Column(name, "number") for name in names), Column("")], rows)


def _conditions(result: TuneResult) -> Html:
    rows = [[code(name), code(json.dumps(value))] for name, value in result.conditions.items()]
    return table([Column("What"), Column("Value", "name")], rows)


def _figures(probe: Probe) -> list[str]:
    batch = "-" if probe.mean_batch is None else f"{probe.mean_batch:.2f}"
    return [batch, milliseconds(probe.queue_ms), milliseconds(probe.compute_ms), share(probe.padding_share)]


def _probes(result: TuneResult) -> Iterator[tuple[Trial, Probe]]:
    for trial in result.outcome.trials:
        for probe in trial.probes:
            yield trial, probe


def _point(trial: Trial, probe: Probe, statistic: Statistic) -> Point:
    latency = probe.statistics_ms[statistic]
    about = f"{trial.candidate}, {probe.load.describe()}: {per_second(probe.throughput)} answers/s"
    return Point(probe.throughput, latency, f"{about}, {statistic} {milliseconds(latency)}")


def _mark(result: TuneResult, trial: Trial) -> Literal["tried", "default", "best"]:
    if trial.candidate == DEFAULT:
        return "default"
    return "best" if trial.candidate == result.outcome.best else "tried"


def _repeats(named: NamedGain, values: tuple[float, ...]) -> str:
    return ", ".join(per_second(value) if named.unit == "answers/s" else milliseconds(value) for value in values)
