"""The frame of every page: one file that is whole in itself, and whose content policy lets nothing be loaded."""

from __future__ import annotations

import base64
import hashlib
from importlib import resources

from trtforge.report.markup import NOTHING, Html, el


def document(title: str, style: str, body: Html, script: str = "") -> str:
    """The text of an HTML file, in UTF-8. Only the script that is given runs, even if markup got in.

    Args:
        title: of the window.
        style: CSS, written by us.
        body: what is seen.
        script: JavaScript, written by us; empty gives a page on which none runs.
    """
    head = el(
        "head",
        el("meta", charset="utf-8"),
        el("meta", http_equiv="Content-Security-Policy", content=_policy(script)),
        el("meta", name="viewport", content="width=device-width, initial-scale=1"),
        el("meta", name="color-scheme", content="light dark"),
        el("title", title),
        el("style", Html(style)),
    )
    end = el("script", Html(script)) if script else NOTHING
    return "<!doctype html>\n" + el("html", head, el("body", body, end), lang="en") + "\n"


def resource(name: str, package: str = "trtforge.report") -> str:
    """The text of a file that a package carries."""
    return resources.files(package).joinpath(name).read_text(encoding="utf-8")


def _policy(script: str) -> str:
    allowed = "style-src 'unsafe-inline'"
    if script:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        allowed += f"; script-src 'sha256-{digest}'"
    return f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'"
