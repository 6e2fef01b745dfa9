from __future__ import annotations

from trtforge.quantization.sites import (
    ActivationSite,
    Dependent,
    KeptFloat,
    Placement,
    ReusedSite,
    WeightSite,
    share_amax,
)


def placement_of(*nodes, **fields):
    """Each node reads `t_<node>` and has the weight `w_<node>`."""
    activations = tuple(ActivationSite(node, 0, f"t_{node}") for node in nodes)
    weights = tuple(WeightSite(node, 1, f"w_{node}", 0) for node in nodes)
    return Placement(activations, weights, (), **fields)


def test_nodes_with_a_weight_or_a_reused_pair_only_are_nodes_of_the_placement():
    placement = placement_of(
        "a", reused=(ReusedSite("b", 0, "x", "x_dequantized"),), shared=(), dependents=(), kept_quantized=()
    )
    assert placement.nodes == ("a", "b")
    assert placement.tensors == ("t_a",)
    assert placement.without({"b": "why"}).reused == ()


def test_a_node_goes_back_to_float_with_any_node_that_it_needs():
    placement = placement_of(
        "scores",
        "context",
        "out",
        "other",
        dependents=(
            Dependent("scores", ("context", "out")),
            Dependent("context", ("scores", "out")),
        ),
    )
    reduced = placement.without({"out": "too loud"})
    assert reduced.nodes == ("other",)
    assert reduced.kept_float == (
        KeptFloat("out", "too loud"),
        KeptFloat("scores", "it is quantized only together with 'out', which stays float"),
        KeptFloat("context", "it is quantized only together with 'scores', which stays float"),
    )
    assert reduced.dependents == ()


def test_dependence_is_followed_along_a_chain_in_any_order():
    placement = placement_of("a", "b", "c", dependents=(Dependent("a", ("b",)), Dependent("b", ("c",))))
    assert placement.without({"c": "why"}).nodes == ()


def test_a_node_that_others_need_may_stay_without_them():
    placement = placement_of("conv", "add", dependents=(Dependent("add", ("conv",)),))
    assert placement.without({"add": "why"}).nodes == ("conv",)


def test_groups_shrink_with_the_tensors_that_are_left():
    placement = placement_of("a", "b", "c", shared=(("t_a", "t_b", "t_c"),))
    assert placement.without({"b": "why"}).shared == (("t_a", "t_c"),)
    assert placement.without({"b": "why", "c": "why"}).shared == ()


def test_shared_tensors_get_the_largest_amax_and_others_keep_theirs():
    placement = placement_of("a", "b", "c", shared=(("t_a", "t_c"),))
    given = {"t_a": 1.0, "t_b": 9.0, "t_c": 3.0}
    assert share_amax(placement, given) == {"t_a": 3.0, "t_b": 9.0, "t_c": 3.0}
    assert given["t_a"] == 1.0
