"""The page of a method table."""

from __future__ import annotations

import re

import pytest
from test_report import HOSTILE, SHOWN, Page

from trtforge.method_table import DataInfo, MethodRow, MethodTable
from trtforge.parity import OutputParity
from trtforge.recipe import QuantRecipe
from trtforge.report.methods import render_methods


def row(weights: str = "per_channel", smooth: str = "none", **changes: object) -> MethodRow:
    cosine, nan, error = changes.get("cosine", 0.99), changes.get("nan", False), changes.get("error", 0.5)
    sqnr = None if cosine == 1.0 else 21.04
    return MethodRow.model_validate(
        {
            "method": changes.get("method", "mse"),
            "weights": weights,
            "smooth": smooth,
            "outputs": {"y": OutputParity(cosine=cosine, cosine_min=0.9, sqnr_db=sqnr, max_abs_error=error, nan=nan)},
            "metrics": {"top1": 0.96875},
            "quantized_nodes": 6,
            "smoothed_tensors": 4 if smooth == "auto" else 0,
            "seconds": 0.25,
            "state_bytes": 140224,
        }
    )


ROWS = (row(), row(smooth="auto", cosine=0.999), row("per_tensor", cosine=0.9), row("per_tensor", "auto", cosine=0.95))


def table(**changes: object) -> MethodTable:
    values = {
        "model": "encoder",
        "model_sha256": "a" * 64,
        "recipe": QuantRecipe(exclude=("head*",)),
        "versions": {"trtforge": "0.1.0", "onnxruntime": "1.32"},
        "calibration": DataInfo(samples=256, sha256="b" * 64),
        "evaluation": DataInfo(samples=64, sha256="c" * 64),
        "batch": 8,
        "reference_metrics": {"top1": 1.0},
        "judged_by": "top1",
        "best": 1,
        "tensors": 4,
        "pass_seconds": 1.5,
        "peak_rss_bytes": 250_000_000,
        "rows": ROWS,
    }
    return MethodTable.model_validate(values | changes)


def bars(text: str) -> list[tuple[str, float]]:
    """Class and height of every bar, from left to right."""
    found = re.findall(r'<g class="(method [^"]+)">.*?<rect [^>]*height="([^"]+)"', text)
    return [(style, float(height)) for style, height in found]


def test_bars_stand_for_the_loss_on_a_logarithmic_axis() -> None:
    styles, heights = zip(*bars(render_methods(table())), strict=True)
    assert styles == ("method plain", "method smoothed best", "method plain", "method smoothed")
    assert heights[0] - heights[1] == pytest.approx(heights[2] - heights[0], abs=0.2), "a decade each"
    assert min(heights) > 0
    labels = re.findall(r"<text [^>]*>([^<]*)</text>", render_methods(table()))
    assert labels[:5] == ["0.0001", "0.001", "0.01", "0.1", "1 - cosine"], "whole decades around the losses"
    assert [label for label in labels if "e-" in label] == ["1.0e-02", "1.0e-03", "1.0e-01", "5.0e-02"]


def test_exact_and_not_finite_rows_have_no_bar() -> None:
    text = render_methods(table(rows=(row(cosine=1.0, error=0.0), row(smooth="auto", nan=True)), best=0))
    assert [height for _, height in bars(text)] == [0.0, 0.0]
    page = Page(text)
    assert "mse, per channel, plain: exact" in page.text and "mse, per channel, smoothed: NaN" in page.text
    assert [cells[3] for cells in page.cells if cells[0] == "mse"] == ["1.00000", "NaN"]


def test_every_row_is_listed_and_the_best_is_marked() -> None:
    page = Page(render_methods(table()))
    rows = [cells for cells in page.cells if cells[0] == "mse"]
    figures = ["0.99900", "0.90000", "21.0 dB", "96.87 %", "6", "4", "0.25", "140 kB", "best"]
    assert rows[1] == ["mse", "per channel", "smoothed", *figures]
    assert [cells[-1] for cells in rows] == ["", "best", "", ""]
    assert "Best by top1, then the worst output's cosine." in page.text
    assert "method: mse\nweights: per_channel\nsmooth: auto\nexclude:\n- head*" in page.text


def test_conditions_are_told() -> None:
    page = Page(render_methods(table()))
    assert page.row("Calibration data") == ["Calibration data", "256", "b" * 64]
    assert page.row("Evaluation data") == ["Evaluation data", "64", "c" * 64]
    assert "trtforge 0.1.0, onnxruntime 1.32" in page.text
    assert "exclude: ['head*']" in page.text and "Evaluated at batch 8." in page.text
    assert "250 MB" in page.text and "4 activations, 256 samples" in page.text


def test_a_cosine_decides_where_there_is_no_metric() -> None:
    rows = tuple(entry.model_copy(update={"metrics": {}}) for entry in ROWS)
    page = Page(render_methods(table(rows=rows, judged_by="cosine", reference_metrics={})))
    assert "Best by the worst output's cosine." in page.text and "Top-1" not in page.text


def test_the_page_loads_nothing_and_hostile_names_are_text() -> None:
    text = render_methods(table(model=HOSTILE, recipe=QuantRecipe(exclude=(HOSTILE,))))
    page = Page(text)
    assert page.text.count(SHOWN) >= 2
    assert "script" not in page.tags and "link" not in page.tags
    assert "default-src 'none'" in (page.values("content")[0] or "")
    assert not re.search(r"https?://|url\(|@import", text)
    assert render_methods(table()) == render_methods(table())
