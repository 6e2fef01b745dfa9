import pytest

from trtforge.errors import InputError
from trtforge.loadtest.objective import Objective, parse_objectives


def test_units_and_several_objectives() -> None:
    found = parse_objectives(["p99=50ms, mean = 0.01s", "p99.9=2.5e5us"])
    assert found == (Objective("p99", 50.0), Objective("mean", 10.0), Objective("p99.9", 250.0))
    assert [str(objective) for objective in found] == ["p99=50ms", "mean=10ms", "p99.9=250ms"]


def test_what_is_printed_reads_back() -> None:
    (objective,) = parse_objectives(["p95=12.5ms"])
    assert parse_objectives([str(objective)]) == (objective,)


def test_met_at_the_limit_and_not_by_what_is_unknown() -> None:
    objective = Objective("p99", 50.0)
    assert objective.is_met({"p99": 50.0})
    assert not objective.is_met({"p99": 50.1})
    assert not objective.is_met({"p99": None})
    assert not objective.is_met({"p50": 1.0})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "STATISTIC=NUMBER"),
        ("50ms", "STATISTIC=NUMBER"),
        ("p99<50ms", "STATISTIC=NUMBER"),
        ("p99=50ms,", "STATISTIC=NUMBER"),
        ("p98=50ms", "known: p50, p90, p95, p99, p99.9, mean"),
        ("p99=50", "known: s, ms, us"),
        ("p99=50min", "known: s, ms, us"),
        ("p99=1.2.3ms", "positive number"),
        ("p99=0ms", "positive"),
        ("p99=1e999ms", "positive"),
        ("p99=50ms,p99=40ms", "one limit each"),
    ],
)
def test_what_is_no_objective_is_refused(text: str, why: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_objectives([text])
    assert why in caught.value.why
    assert caught.value.what.startswith("--slo")
