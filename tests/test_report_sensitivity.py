"""The section of the report on the search for nodes to keep float, and verdicts of budgets on a metric."""

from __future__ import annotations

from support import make_manifest
from test_report import HOSTILE, SHOWN, Page, passed

from trtforge.manifest import PrecisionInfo
from trtforge.report import render_report
from trtforge.sensitivity import NodeSensitivity, SensitivityInfo, TriedSet

PRECISION = PrecisionInfo(
    requested="int8", nodes={}, gemm_flops_fraction={}, attention_flops_fraction={}, kept_float=()
)


def entry(node: str, loss: float, kept: bool = False, region: str = "") -> NodeSensitivity:
    return NodeSensitivity(
        node=node,
        region=region or node,
        flops_share=0.25,
        node_sqnr_db=21.04,
        output_sqnr_db=None,
        loss=loss,
        kept=kept,
        why=f"because of {node}",
    )


def story(**changes: object) -> SensitivityInfo:
    info = SensitivityInfo(
        number_format="int8",
        criterion="mean cosine of every output",
        budget=0.995,
        met=True,
        note="budget 0.995 met",
        measured_on="16 calibration samples",
        rank_correlation=0.97,
        ranked_by="mean cosine",
        chosen_on="64 calibration samples",
        confirmed_on="30 held-out samples",
        nodes=(entry("q", 0.001), entry("k", 0.001, region="q"), entry("up", 0.0002), entry("down", 0.004, kept=True)),
        tried=(
            TriedSet(kept=(), data="chosen", predicted=0.9931, measured=0.9929, lowered_flops_share=1.0, met=False),
            TriedSet(
                kept=("down",), data="confirmed", predicted=0.9961, measured=None, lowered_flops_share=0.75, met=True
            ),
        ),
    )
    return info.model_copy(update=changes)


def page(**changes: object) -> Page:
    return Page(render_report(make_manifest(**{"precision": PRECISION, "sensitivity": story()} | changes), None))


def test_regions_are_listed_by_what_they_cost_with_a_bar() -> None:
    found = page()
    rows = [row[0] for row in found.cells if len(row) == 8]
    assert rows == ["Nodes", "down", "qk", "up"]
    assert found.row("down") == ["down", "25.00 %", "21.0 dB", "-", "0.004", "", "kept float", "because of down"]
    assert found.row("qk")[1] == "50.00 %" and found.row("qk")[6] == "lowered"
    widths = [style for style in found.values("style") if style and style.startswith("width:")]
    assert widths[:3] == ["width:100.0%", "width:25.0%", "width:5.0%"]
    assert "kept" in found.values("class")
    assert "on 16 calibration samples; rank correlation 0.97 on doubling. Loss: what it takes off" in found.text


def test_every_set_that_was_tried_is_listed() -> None:
    found = page()
    assert found.row("0") == ["0", "100.00 %", "0.99310", "0.99290", "64 calibration samples", "missed"]
    assert found.row("1") == ["1", "75.00 %", "0.99610", "not finite", "30 held-out samples", "met"]


def test_a_search_that_int8_alone_ended_has_no_table_of_regions() -> None:
    found = page(sensitivity=story(nodes=(), tried=()))
    assert "budget 0.995 met" in found.text and "What each region costs" not in found.text


def test_without_a_search_there_is_no_section() -> None:
    assert "sensitivity" not in page(sensitivity=None).values("id")
    assert "sensitivity" in page().values("id")


def test_hostile_names_are_text() -> None:
    found = page(sensitivity=story(nodes=(entry(HOSTILE, 0.1),), note=HOSTILE))
    assert found.text.count(SHOWN) >= 3
    assert found.tags.count("script") == 1


def test_a_budget_on_a_metric_is_not_put_on_the_cosines() -> None:
    metrics = {"closeness": {"fp32": 1.0, "candidate": 0.9931}}
    found = page(parity=passed(budget=0.99, figure="closeness", metrics=metrics))
    assert "The budget is 0.99 on closeness, which is 0.9931." in found.text
    assert "PASSED" in found.text and "the mean decides" not in found.text
    assert "The budget is 0.99, on closeness." in found.text
    assert found.row("logits")[-1] == "-"
    failed = page(parity=passed(passed=False, budget=0.995, figure="closeness", metrics=metrics))
    assert "FAILED" in failed.text and "The budget is 0.995 on closeness, which is 0.9931." in failed.text
