from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from mixed_cases import conv_net, dataset, graph_from, images, normal, prepare, session

from trtforge.data import Batch, Dataset
from trtforge.mixed.measure import Probe, Sensitivity
from trtforge.parity import ParityAccumulator
from trtforge.quantization import switches
from trtforge.quantization.regions import find_regions, find_sites
from trtforge.quantization.switches import plan_segments

LAYERS = 5


def measure(model, regions, sites, data: Dataset, work: Path, metric=None, chunk: int = 8):
    flops = dict.fromkeys(model.nodes, 1000)
    with Probe(model.base, model.quantized, sites, regions, flops, metric, work, lambda _: None) as probe:
        for start in range(0, len(data), chunk):
            probe.add(list(data.view(start, min(start + chunk, len(data))).batches(4)))
        return probe, probe.results()


@pytest.fixture
def case(tmp_path: Path, monkeypatch):
    # Several segments; the skip connection crosses every cut.
    monkeypatch.setattr(switches, "_REGIONS_PER_SEGMENT", 2)
    data = images(8)
    model = prepare(conv_net(bad=3, layers=LAYERS), data, tmp_path)
    sites = find_sites(model.base, model.quantized)
    return model, find_regions(model.base, sites, {}), sites, data


def brute_force(model, region, data: Dataset, work: Path) -> Sensitivity:
    """One region quantized in a graph made from scratch, run as a whole."""
    tapped = [node.outputs[0].name for node in model.base.nodes if node.name in region.nodes]
    outputs, nodes = ParityAccumulator(), ParityAccumulator()
    exact = session(model.base, tapped, work)
    alone = session(model.quantize(frozenset(region.nodes)), tapped, work)
    for batch in data.batches(4):
        expected, actual = exact(batch.feeds), alone(batch.feeds)
        outputs.add({"y": expected["y"]}, {"y": actual["y"]}, batch.feeds)
        nodes.add({t: expected[t] for t in tapped}, {t: actual[t] for t in tapped}, batch.feeds)
    by_node = dict(zip(region.nodes, (f.sqnr_db for f in nodes.result().values()), strict=True))
    return Sensitivity(outputs.result(), by_node, None)


def test_every_region_is_measured_as_if_alone_in_the_whole_model(case, tmp_path: Path) -> None:
    model, regions, sites, data = case
    assert len(plan_segments(model.base, regions, dict.fromkeys(model.nodes, 1000))) >= 3
    _, found = measure(model, regions, sites, data, tmp_path)
    assert list(found) == [region.name for region in regions]
    for region in regions:
        expected = brute_force(model, region, data, tmp_path)
        assert found[region.name].outputs == expected.outputs
        assert found[region.name].node_sqnr_db == pytest.approx(expected.node_sqnr_db, abs=1e-4)
    assert min(found, key=lambda name: found[name].output_sqnr_db) == "conv3"


def test_the_order_and_number_of_chunks_changes_nothing(case, tmp_path: Path) -> None:
    model, regions, sites, data = case
    _, together = measure(model, regions, sites, data, tmp_path)
    _, apart = measure(model, regions, sites, data, tmp_path, chunk=4)
    for name, entry in together.items():
        assert apart[name].outputs == entry.outputs
        assert apart[name].node_sqnr_db == pytest.approx(entry.node_sqnr_db, abs=1e-4)


def test_runs_are_one_per_region_and_segment_and_batch(case, tmp_path: Path) -> None:
    model, regions, sites, data = case
    segments = plan_segments(model.base, regions, dict.fromkeys(model.nodes, 1000))
    probe, _ = measure(model, regions, sites, data, tmp_path)
    assert probe.runs == 2 * (len(regions) + len(segments))
    assert probe.cost == pytest.approx(sum(s.share * (len(s.regions) + 1) for s in segments))
    assert probe.cost < len(regions) + 1


def test_the_metric_is_given_whole_chunks_and_its_loss_is_against_the_float_graph(case, tmp_path: Path) -> None:
    model, regions, sites, data = case
    seen = []

    def metric(outputs, reference, feeds):
        seen.append({name: array.shape for name, array in (outputs | feeds).items()})
        return {"closeness": 1.0 - float(np.abs(outputs["y"] - reference["y"]).mean()), "other": 0.0}

    _, found = measure(model, regions, sites, data, tmp_path, metric)
    assert {str(shapes) for shapes in seen} == {str({"y": (8, 16), "x": (8, 3, 8, 8)})}
    assert max(found, key=lambda name: found[name].metric_loss) == "conv3"
    assert all(entry.metric_loss > 0 for entry in found.values())
    _, apart = measure(model, regions, sites, data, tmp_path, metric, chunk=6)
    for name, entry in found.items():
        assert apart[name].metric_loss == pytest.approx(entry.metric_loss, rel=1e-4)


def test_a_metric_that_fails_on_spoilt_outputs_ranks_the_region_worst(case, tmp_path: Path) -> None:
    model, regions, sites, data = case

    def metric(outputs, reference, feeds):
        error = float(np.abs(outputs["y"] - reference["y"]).max())
        return float("nan") if error > 0.3 * float(np.abs(reference["y"]).max()) else 1.0

    _, found = measure(model, regions, sites, data, tmp_path, metric)
    assert [name for name, entry in found.items() if entry.metric_loss == np.inf] == ["conv3"]


def test_padding_is_left_out_of_a_nodes_error(tmp_path: Path) -> None:
    graph = graph_from(
        """g (float[n, 4, 32] x, int64[n, 4] attention_mask) => (float[n, 4, 32] y) {
            [one] a = MatMul(x, w1)
            [two] b = MatMul(a, w2)
            [cast] keep = Cast<to = 1>(attention_mask)
            [axes] last = Constant<value_ints = [2]>()
            [wide] k = Unsqueeze(keep, last)
            [mul] y = Mul(b, k)
        }""",
        w1=normal(32, 32),
        w2=normal(32, 32, seed=1),
    )
    mask = (np.arange(4) < 2).astype(np.int64)[None].repeat(4, 0)
    x = normal(4, 4, 32, seed=2)
    noisy = np.where(mask[..., None] == 0, 30.0 * x, x)
    found = []
    for values in (noisy, np.where(mask[..., None] == 0, 0.0, x).astype(np.float32)):
        data = dataset(Batch({"x": values.astype(np.float32), "attention_mask": mask}, None))
        model = prepare(graph, dataset(Batch({"x": noisy, "attention_mask": mask}, None)), tmp_path)
        sites = find_sites(model.base, model.quantized)
        _, result = measure(model, find_regions(model.base, sites, {}), sites, data, tmp_path)
        found.append(result)
    assert found[0]["one"].node_sqnr_db == pytest.approx(found[1]["one"].node_sqnr_db, abs=1e-3)
    assert found[0]["two"].outputs["y"].cosine == pytest.approx(found[1]["two"].outputs["y"].cosine)
