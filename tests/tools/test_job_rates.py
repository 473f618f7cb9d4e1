"""Rates that a job has measured: fitted or scaled from its calls, with the rest as planners had it."""

import json
from dataclasses import replace

import numpy as np
import pytest

from balancing.cluster import Cluster
from balancing.cluster.job_rates import ENOUGH, Calls, measured_cluster
from balancing.cluster.presets import H100
from balancing.cluster.rates import AttentionCurve, ProductCurve, attention_curve

FLOPS = 2.0 * 32 * 256  # of a pair
SHEET, H100S = Cluster.sheet("h200-8x400g"), Cluster.preset("h100-8x400g")
WORK = [
    (pairs * 16384.0, rows * 128.0, float(pieces)) for pairs, rows, pieces in np.ndindex(20, 5, 3) if rows and pieces
]
WORK = [(pairs + 16384.0, rows, pieces) for pairs, rows, pieces in WORK]


def lines(curve: AttentionCurve, work=WORK, kernel: str = "fa2", times: int = 1, noise: float = 0.0) -> list[dict]:
    """Of calls that take what a curve says."""
    draw, found = np.random.default_rng(0), []
    for way, more in (("forward", 1.0), ("backward", 2.5)):
        for call in work:
            seconds = curve.seconds(*call, more * FLOPS) * (1 + noise * draw.uniform(-1, 1))
            found.append(Calls(kernel, way, FLOPS, [call] * times, [seconds] * times).line())
    return json.loads(json.dumps(found))  # as a log has them


def test_a_curve_is_fitted_to_calls_that_tell_it():
    curve = AttentionCurve(2e14, 500.0, 1e5)
    cluster, said = measured_cluster(SHEET, lines(curve, noise=0.05))
    found = cluster.rates.forward
    assert found.flops == pytest.approx(curve.flops, rel=0.1) and found.row == pytest.approx(curve.row, rel=0.3)
    assert cluster.rates.kernel == "fa2" and "attention by fa2 2" in said and not cluster.rates.measured
    assert cluster.flops == pytest.approx(found.flops / 0.6), "products follow attention where a sheet has one rate"
    assert Cluster.sheet("h200-8x400g").rates is None


@pytest.mark.parametrize("base", [SHEET, H100S], ids=["sheet", "rates"])
def test_calls_that_are_all_alike_scale_what_planners_had(base):
    before = AttentionCurve(base.flops * 0.6, 0, 0) if base.rates is None else base.rates.forward
    half = before._replace(flops=before.flops / 2)
    cluster, _ = measured_cluster(base, lines(half, WORK[-1:], times=100))
    assert cluster.rates.forward.flops == pytest.approx(half.flops, rel=1e-6)
    assert cluster.rates.forward.row == pytest.approx(half.row, rel=1e-6)
    if base.rates is not None:
        assert cluster.flops == base.flops and cluster.rates.products == base.rates.products
        assert dict(cluster.rates.attention)["cudnn"] == dict(base.rates.attention)["cudnn"]


def test_experts_are_measured_apart():
    curve, work = (
        ProductCurve(4e14, 900.0),
        [(100.0 * rows, float(groups)) for rows in range(1, 12) for groups in (4, 8)],
    )
    told = [Calls("experts", "forward", 1e8, [each] * 2, [curve.seconds(*each, 1e8)] * 2).line() for each in work]
    for base in (SHEET, H100S):
        cluster, said = measured_cluster(base, told)
        assert cluster.rates.grouped.flops == pytest.approx(4e14, rel=1e-3) and "experts 400" in said
        assert cluster.rates.grouped.group == pytest.approx(900, rel=1e-2)
        assert base.rates is None or cluster.rates.attention == base.rates.attention


def test_too_few_calls_tell_nothing():
    assert measured_cluster(SHEET, []) is None
    curve = AttentionCurve(2e14, 0.0, 0.0)
    assert measured_cluster(SHEET, lines(curve, WORK[:1], times=ENOUGH - 1)) is None
    assert measured_cluster(SHEET, lines(curve, WORK[:1], times=ENOUGH)) is not None
    forward = [line for line in lines(curve) if line["way"] == "forward"]
    assert measured_cluster(SHEET, forward) is None, "a kernel needs both directions"


def test_a_new_kernel_is_planned_with(tmp_path):
    """From the curve that planners had, and in a file that can be read."""
    cluster, _ = measured_cluster(H100S, lines(H100.forward, kernel="fa4"))
    assert cluster.rates.kernel == "fa4" and set(dict(cluster.rates.attention)) == {"fa2", "cudnn", "fa3", "fa4"}
    cluster.to_json(tmp_path / "cluster.json")
    assert Cluster.from_json(tmp_path / "cluster.json") == cluster


def test_a_line_tells_how_wrong_the_rates_were():
    fa2 = dict(H100S.rates.attention)["fa2"]
    curves = {"forward": attention_curve(fa2.forward), "backward": attention_curve(fa2.backward)}
    for way, flops in (("forward", FLOPS), ("backward", 2.5 * FLOPS)):
        seconds = [2 * curves[way].seconds(*call, flops) for call in WORK]
        calls = Calls("fa2", way, FLOPS, WORK, seconds)
        assert calls.line(H100S)["times"] == pytest.approx(2)
        assert "times" not in calls.line() and "times" not in calls.line(SHEET)
    rows = [(100.0, 4.0), (300.0, 8.0)]
    half = [H100S.rates.grouped.seconds(*each, 1e8) / 2 for each in rows]
    assert Calls("experts", "forward", 1e8, rows, half).line(H100S)["times"] == pytest.approx(0.5)


def test_a_line_is_short():
    many = Calls("fa2", "forward", FLOPS, [(float(n), 1.0, 1.0) for n in range(1, 1001)] * 2, [1e-3] * 2000)
    calls = many.line()["calls"]
    assert len(calls) == 8 and calls[0][0] == 1 and calls[-1][0] == 1000 and calls[0][-1] == 2


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"way": "sideways"}, "measured calls of fa2/sideways"),
        ({"flops": 0}, "measured calls of fa2/forward: way, flops or calls"),
        ({"calls": [[1, 2]]}, r"measured calls of fa2/forward\[0\]: \[1, 2\] must be 5 numbers above 0"),
        ({"calls": [[1, 1, 1, -1e-3, 1]]}, "must be 5 numbers above 0"),
        ({"calls": [[1, 1, 1, float("nan"), 1]]}, "must be 5 numbers above 0"),
    ],
)
def test_wrong_lines_are_refused_by_name(changes, says):
    line = lines(H100.forward)[0] | changes
    with pytest.raises(ValueError, match=says):
        measured_cluster(replace(SHEET), [line])
