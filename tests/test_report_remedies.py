from __future__ import annotations

from support import make_manifest

from trtforge.manifest import RemedyEntry
from trtforge.report import render_report


def test_the_report_lists_what_was_done_about_refused_nodes():
    entry = RemedyEntry(node="<up>", op="ConvTranspose", reason="it has no dilation", remedy="it was written out")
    text = render_report(make_manifest(remedies=(entry,)), None)
    assert "1 node not taken as written" in text
    assert "<code>&lt;up&gt;</code> (ConvTranspose): it has no dilation; it was written out" in text


def test_a_report_without_remedies_says_nothing_of_them():
    assert "not taken as written" not in render_report(make_manifest(), None)
