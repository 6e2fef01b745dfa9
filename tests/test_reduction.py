"""The search alone: a chain of nodes, of which some sets fail."""

from __future__ import annotations

import pytest

from trtforge.reduction import Search


class Chain:
    """Nodes in a row; `glued` nodes bring the one before along."""

    def __init__(self, size, glued=()):
        self.size = size
        self.glued = set(glued)
        self.num_closed = 0

    def neighbours(self, nodes):
        return {near for node in nodes for near in (node - 1, node, node + 1) if 0 <= near < self.size}

    def close(self, nodes):
        self.num_closed += 1
        found = set(nodes)
        for node in sorted(found, reverse=True):
            while node in self.glued and node - 1 not in found:
                node -= 1  # noqa: PLW2901
                found.add(node)
        return sorted(found)


def search(culprits, size=200, blamed=None, glued=(), **options):
    asked = []

    def fails(nodes):
        asked.append(tuple(nodes))
        return culprits <= set(nodes)

    found = Search(Chain(size, glued), fails, **options)
    return found.run(size, blamed), found, asked


@pytest.mark.parametrize("culprits", [{0}, {199}, {77}, {20, 21}, {20, 150}, {3, 90, 171}])
def test_the_culprits_are_found_without_a_hint(culprits):
    nodes, found, asked = search(culprits)
    assert set(nodes) == culprits
    assert found.is_complete
    assert found.trials == len(asked) == len(set(asked)) <= 100


def test_a_right_hint_takes_one_trial():
    nodes, found, _ = search({77}, blamed=77)
    assert nodes == [77]
    assert found.trials == 1


def test_a_hint_beside_the_culprits_takes_a_few():
    nodes, found, _ = search({76, 78}, blamed=77)
    assert set(nodes) == {76, 78}
    assert found.trials < 12


def test_a_wrong_hint_costs_a_few_trials_only():
    nodes, _, _ = search({150}, blamed=3)
    assert nodes == [150]


def test_nodes_that_belong_together_stay_together():
    nodes, _, _ = search({60}, glued={59, 60})
    assert nodes == [58, 59, 60]


def test_a_failure_of_everything_stays_everything():
    nodes, found, _ = search(set(range(12)), size=12)
    assert nodes == list(range(12))
    assert found.is_complete


def test_a_search_that_runs_out_of_trials_says_so_and_gives_what_fails():
    nodes, found, asked = search({20, 150}, max_trials=9)
    assert not found.is_complete
    assert found.trials == 9
    assert {20, 150} <= set(nodes)
    assert len(nodes) < 200
    assert len(asked) == 9


def test_nothing_is_looked_at_once_the_trials_are_spent():
    chain = Chain(2000)
    found = Search(chain, lambda nodes: {20, 1500} <= set(nodes), max_trials=30)
    found.run(2000)
    assert not found.is_complete
    assert chain.num_closed <= 60
