"""`trtforge doctor`: what this machine can do."""

from __future__ import annotations

from trtforge.cli import options
from trtforge.cli.render import print_json, print_table

NAME = "doctor"


def command(as_json: options.AsJson = False) -> int:
    """Check the installation with a real build, and say what is missing and how to get it."""
    from trtforge.doctor import examine

    checks = examine()
    if as_json:
        print_json([check.to_dict() for check in checks])
    else:
        print_table(
            [(check.name, check.state, check.detail + (f" ({check.fix})" if check.fix else "")) for check in checks]
        )
    return 1 if any(check.state == "failed" for check in checks) else 0
