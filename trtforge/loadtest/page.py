"""`report.html` of a load test: one page that is whole in itself, reads without scripts, and loads nothing."""

from __future__ import annotations

import json

from trtforge.loadtest import page_change, page_client, page_server
from trtforge.loadtest.compare import Comparison
from trtforge.loadtest.page_figures import (
    Names,
    error_share,
    meets,
    milliseconds,
    over_repeats,
    per_second,
    pre,
    share,
    statistic,
    throughput,
)
from trtforge.loadtest.results import Run, Step
from trtforge.report.document import document, resource
from trtforge.report.figures import count
from trtforge.report.markup import NOTHING, Column, Html, block, code, el, fold, section, table

_TITLES = {
    "comparison": "Against the baseline",
    "load": "Latency by load",
    "lengths": "Tail by length",
    "service-levels": "Service levels",
    "batches": "Batches",
    "server-time": "Server time",
    "time": "Over time",
    "streams": "Streamed answers",
    "tokens": "Tokens",
    "gpus": "GPUs",
    "errors": "Errors",
    "conditions": "Conditions",
}


def render_page(run: Run, comparison: Comparison | None = None) -> str:
    """The page of a run.

    Args:
        run: with at least one step.
        comparison: with a baseline.

    Returns:
        The text of an HTML file, in UTF-8.
    """
    sections = {
        "comparison": NOTHING if comparison is None else page_change.comparison(comparison),
        "load": page_client.load(run),
        "lengths": page_client.lengths(run),
        "service-levels": page_client.service_levels(run),
        "batches": page_server.batches(run),
        "server-time": page_server.server_time(run),
        "time": page_client.time(run),
        "streams": page_client.streams(run),
        "tokens": page_server.tokens(run),
        "gpus": page_server.gpus(run),
        "errors": page_client.errors(run),
        "conditions": _conditions(run),
    }
    links = (el("a", _TITLES[anchor], href=f"#{anchor}") for anchor, content in sections.items() if content)
    body = el(
        "main",
        _header(run, comparison),
        _key_figures(run),
        _warnings(run),
        el("nav", *links),
        *(sections.values()),
    )
    style = resource("style.css") + resource("loadtest.css", "trtforge.loadtest")
    return document(f"Load test of {run.model.name}", style, body)


def _header(run: Run, comparison: Comparison | None) -> Html:
    word, style, meaning = _verdict(run, comparison)
    tags = (
        run.protocol,
        f"{run.server.name} {run.server.version}",
        *(run.server.gpus or ("no GPU",)),
        count(len(run.steps), "step"),
        f"{run.traffic.duration_s:g} s each",
        *((count(run.repeats, "repeat"),) if run.repeats > 1 else ()),
        run.environment.started_at,
    )
    return el(
        "header",
        el("p", f"trtforge {run.environment.trtforge} load test", class_="kicker"),
        el("h1", f"{run.model.name} on {run.server.url}"),
        el("p", *(el("span", tag, class_="tag") for tag in tags), class_="tags"),
        el("div", el("strong", word), el("div", *(el("p", text) for text in meaning)), class_=f"verdict {style}"),
    )


def _verdict(run: Run, comparison: Comparison | None) -> tuple[str, str, list[str]]:
    """The word, its class in the style sheet, and what it means."""
    texts = _objective_texts(run)
    if comparison is not None:
        number = len(comparison.regressions)
        texts.append(
            f"{count(number, 'figure')} worse than the baseline beyond the noise."
            if number
            else "No figure is worse than the baseline beyond the noise."
        )
    if run.failure is not None:
        return "ENDED EARLY", "bad", [f"{run.failure}. What was measured until then is shown.", *texts]
    if comparison is not None and not comparison.passed:
        return "REGRESSION", "bad", texts
    if run.num_failed:
        failed = f"{run.num_failed:,} of {_num_requests(run):,} requests have no right answer."
        return "WITH ERRORS", "unknown", [failed, *texts]
    return "NO ERRORS", "good", texts or ["Every request was answered. No objective was given (--slo)."]


def _objective_texts(run: Run) -> list[str]:
    """Up to which load the objectives are met."""
    if not run.objectives:
        return []
    named = " and ".join(run.objectives)
    met = _best_step(run)
    if met is None:
        return [f"No step meets {named}."]
    return [f"{named}: met with at most {per_second(throughput(met))} answers/s, at {Names(run).step(met)}."]


def _best_step(run: Run) -> Step | None:
    """The step with the highest throughput of those that meet every objective."""
    meeting = [step for step in run.steps if step.measurements and meets(step)]
    return max(meeting, key=throughput, default=None)


def _key_figures(run: Run) -> Html:
    steps = [step for step in run.steps if step.measurements]
    if not steps:
        return NOTHING
    names, fastest = Names(run), max(steps, key=throughput)
    cards = [
        ("highest throughput", per_second(throughput(fastest)), names.step(fastest)),
        ("answers/s within the objective", *_within(run)) if run.objectives else None,
        *(_tail_card(step, names) for step in (steps[0], steps[-1])[: len(steps)]),
        ("without a right answer", share(run.num_failed / max(_num_requests(run), 1)), f"of {_num_requests(run):,}"),
        _batch_card(fastest, names),
    ]
    shown = [card for card in cards if card is not None]
    items = (el("div", el("dt", title), el("dd", value), el("dd", sub, class_="sub")) for title, value, sub in shown)
    return el("dl", *items, class_="key", style=f"--columns:{len(shown)}")


def _within(run: Run) -> tuple[str, str]:
    step = _best_step(run)
    if step is None:
        return "none", "no step meets it"
    return per_second(throughput(step)), Names(run).step(step)


def _tail_card(step: Step, names: Names) -> tuple[str, str, str] | None:
    found = over_repeats(step, statistic("p99"))
    return None if found is None else ("p99 latency", milliseconds(found[0]), names.step(step))


def _batch_card(step: Step, names: Names) -> tuple[str, str, str] | None:
    """The mean batch of the model that runs the most batches: behind a text front that is one of its buckets."""
    works = [work for one in step.measurements for work in one.server.models if work.executions]
    if not works:
        return None
    busiest = max(works, key=lambda work: work.executions)
    return "mean batch", f"{busiest.inferences / busiest.executions:.2f}", f"{busiest.name}, {names.step(step)}"


def _num_requests(run: Run) -> int:
    return sum(one.requests for step in run.steps for one in step.measurements)


def _warnings(run: Run) -> Html:
    """What makes figures doubtful."""
    names = Names(run)
    saturated = [names.step(step) for step in run.steps if any(one.client.is_saturated for one in step.measurements)]
    texts = page_server.missing(run)
    if saturated:
        texts.append(f"The client was at its limit with {', '.join(saturated)}: latencies hold its own delay.")
    failing = [f"{names.step(step)} ({share(error_share(step))})" for step in run.steps if error_share(step) > 0]
    if failing:
        texts.append(f"Requests without a right answer with {', '.join(failing)}.")
    if not texts:
        return NOTHING
    title = count(len(texts), "warning")
    return el("aside", el("strong", title), el("ul", *(el("li", text) for text in texts)), class_="warnings")


def _conditions(run: Run) -> Html:
    environment = run.environment.model_dump(mode="json")
    server = run.server.model_dump(mode="json")
    model = run.model.model_dump(mode="json", exclude={"config"})
    facts = [*environment.items(), *((f"server {k}", v) for k, v in server.items())]
    facts += [(f"model {name}", value) for name, value in model.items()]
    facts += [("traffic_sha256", run.traffic_sha256)]
    rows = [[code(name), code(value if isinstance(value, str) else json.dumps(value))] for name, value in facts]
    traffic = json.dumps(run.traffic.model_dump(mode="json", exclude_defaults=True), indent=1)
    definitions = [[name, text] for name, text in run.definitions.items()]
    return section(
        "conditions",
        "Conditions",
        block("What the figures mean", table([Column("Figure"), Column("Definition", "name")], definitions)),
        block("Traffic", pre(traffic)),
        block("Environment", table([Column("What"), Column("Value", "name")], rows)),
        page_server.model_config(run),
        fold("raw data", el("p", "Everything on this page, and every histogram, is in ", code("run.json"), ".")),
    )
