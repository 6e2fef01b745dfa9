from __future__ import annotations

from trtforge.graph.order import stable_order


def test_a_sorted_list_stays_as_it_is() -> None:
    assert stable_order([set(), {0}, {0}, {1, 2}]) == [0, 1, 2, 3]


def test_only_what_must_wait_moves_back() -> None:
    assert stable_order([{3}, set(), {1}, set()]) == [1, 2, 3, 0]


def test_what_lies_on_or_behind_a_cycle_is_missing() -> None:
    assert stable_order([set(), {2}, {1}, {2}, {0}]) == [0, 4]
