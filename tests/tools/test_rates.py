"""`Rates`: curves go through measured points, times grow with work, bad entries are refused by name."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balancing.cluster import PRESETS, Cluster
from balancing.cluster.presets import H100
from balancing.cluster.rates import (
    ACCURACY,
    TILE,
    AttentionCurve,
    AttentionPoint,
    ProductCurve,
    Rates,
    attention_curve,
    attention_rate,
    causal_pairs,
    product_curve,
    product_rate,
    tile_pairs,
)


def forward(raw: dict, kernel: str = "fa2") -> list:
    """The points of a kernel's forward pass in a file."""
    return raw["attention"][kernel]["forward"]


LENGTHS = st.sets(st.integers(1, 60), min_size=3, max_size=6).map(lambda tiles: [TILE * each for each in sorted(tiles)])
CURVES = st.builds(AttentionCurve, st.floats(1e12, 1e15), st.floats(0, 2000), st.floats(0, 1e6))


def points_of(rates: Rates) -> list[tuple[AttentionPoint, ...]]:
    return [way for _, kernel in rates.attention for way in (kernel.forward, kernel.backward)]


@pytest.mark.parametrize("preset", PRESETS)
def test_curves_of_presets_are_within_a_tenth_of_their_points(preset):
    rates = Cluster.preset(preset).rates
    for points in points_of(rates):
        found = [attention_rate(attention_curve(points), each.queries, each.keys) / each.flops for each in points]
        assert found == pytest.approx([1.0] * len(points), abs=ACCURACY)
    for _, ways in rates.products:
        found = [product_rate(product_curve(ways.rows), rows) / flops for rows, flops in ways.rows]
        assert found == pytest.approx([1.0] * len(found), abs=ACCURACY)


@pytest.mark.parametrize("preset", PRESETS)
def test_only_the_gpu_that_was_measured_says_so(preset):
    rates = Cluster.preset(preset).rates
    assert rates.measured == (preset == "h100-8x400g")
    assert "2026-11-26" in rates.source and ("not measured" in rates.source) == (
        preset[:4] not in ("h100", "h200", "h800")
    )
    h100 = Cluster.preset("h100-8x400g")
    ratio = rates.grouped.flops / h100.rates.grouped.flops
    assert ratio == pytest.approx(Cluster.preset(preset).flops / h100.flops)


@settings(max_examples=100)
@given(CURVES, LENGTHS)
def test_a_curve_is_found_again_from_its_points(curve, lengths):
    points = tuple(AttentionPoint(each, each, float(attention_rate(curve, each, each))) for each in lengths)
    found = attention_curve(points)
    for tokens in (*lengths, 100, 5000, 10**6):
        seconds = [each.seconds(tile_pairs(tokens, tokens), tokens, 1, 1.0) for each in (found, curve)]
        assert seconds[0] == pytest.approx(seconds[1], rel=1e-4)


@settings(max_examples=100)
@given(st.sampled_from(points_of(H100)), st.integers(1, 9000), st.integers(0, 9000), st.integers(1, 500))
def test_time_grows_with_queries_and_with_keys(points, queries, before, more):
    curve = attention_curve(points)

    def seconds(queries: int, keys: int) -> float:
        rows = -(-queries // TILE) * TILE
        return float(curve.seconds(tile_pairs(queries, keys), rows, 1, 1.0))

    keys = queries + before
    least = seconds(queries, keys)
    assert 0 < least < math.inf
    assert least <= seconds(queries + more, keys + more), "a piece with more queries"
    assert least <= seconds(queries, keys + more), "a piece with more keys"
    last = queries // 2 // TILE * TILE + queries % TILE  # queries after a cut at whole tiles
    if 0 < last < queries:
        parts = seconds(queries - last, keys - last) + seconds(last, keys)
        assert least <= parts * (1 + 1e-12), "a piece in two parts"
    assert attention_rate(curve, keys, keys) <= attention_rate(curve, 2 * keys + 2 * TILE, 2 * keys + 2 * TILE) * 1.5


@settings(max_examples=50)
@given(st.floats(1e12, 1e15), st.floats(0, 5000), st.integers(1, 10**5), st.integers(1, 64))
def test_products_of_more_groups_take_longer(flops, group, rows, groups):
    curve = ProductCurve(flops, group)
    assert 0 < curve.seconds(rows, groups, 1.0) <= curve.seconds(rows, groups + 1, 1.0)
    assert product_rate(curve, rows) <= product_rate(curve, rows + 1) * (1 + 1e-12) <= flops * (1 + 1e-9)
    points = tuple((each, float(product_rate(curve, each))) for each in (128, 1024, 8192))
    assert product_curve(points).seconds(rows, groups, 1.0) == pytest.approx(curve.seconds(rows, groups, 1.0), rel=1e-4)


def test_tiles_are_those_with_a_pair():
    """Against a count, row by row of 128 queries, of tiles with a pair under the mask."""
    for queries, keys in ((1, 1), (128, 128), (130, 130), (10, 500), (300, 1000), (256, 256)):
        ends = [min(keys, first + TILE) for first in range(keys - queries, keys, TILE)]  # keys that a row sees
        assert tile_pairs(queries, keys) == sum(-(-end // TILE) for end in ends) * TILE**2
        assert causal_pairs(queries, keys) == sum(range(keys - queries + 1, keys + 1))


def test_json_round_trip_and_a_file_of_the_old_form(tmp_path, caplog):
    path, cluster = tmp_path / "cluster.json", Cluster.preset("h100-8x400g", nodes=2)
    cluster.to_json(path)
    assert Cluster.from_json(path) == cluster and not caplog.records
    assert hash(Cluster.from_json(path)) == hash(cluster)
    content = json.loads(path.read_text())
    del content["rates"]
    path.write_text(json.dumps(content))
    assert Cluster.from_json(path) == replace(cluster, rates=None)
    (record,) = caplog.records
    said = record.getMessage()
    assert "has no 'rates'" in said and "0.6 of flops" in said and "--measure" in said and "\n" not in said
    path.write_text(json.dumps(content | {"rates": None}))
    assert Cluster.from_json(path).rates is None and len(caplog.records) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda raw: forward(raw)[1].__setitem__(2, 0.0),
            r"attention.fa2.forward\[1\], FLOP/s: 0",
        ),
        (
            lambda raw: forward(raw, "cudnn")[0].__setitem__(2, math.nan),
            r"cudnn.forward\[0\], FLOP/s: nan",
        ),
        (
            lambda raw: forward(raw)[0].__setitem__(0, None),
            r"fa2.forward\[0\], queries: None",
        ),
        (
            lambda raw: forward(raw)[3].__setitem__(2, 1e14),
            r"fa2.forward: 1e\+14 .* 32768 tokens",
        ),
        (lambda raw: forward(raw).__delitem__(slice(1, 3)), r"fa2.forward has rates of 2"),
        (
            lambda raw: forward(raw).__delitem__(1),
            "fa2.forward has no rate between 128 and 8192",
        ),
        (lambda raw: raw["attention"]["fa2"].pop("backward"), "rates.attention.fa2.backward is missing"),
        (
            lambda raw: forward(raw)[0].__setitem__(0, 256),
            "256 queries are more than the 128 keys",
        ),
        (
            lambda raw: forward(raw).append([1, 2]),
            r"fa2.forward\[4\]: \[1, 2\] must be a list of 3",
        ),
        (
            lambda raw: raw["products"]["te"]["rows"][4].__setitem__(1, 4e14),
            r"rates.products.te: 4e\+14 FLOP/s at 8192 rows",
        ),
        (lambda raw: raw["products"]["te"]["rows"].clear(), "rates.products.te has rates of 0"),
        (lambda raw: raw["products"]["torch"].pop("group_seconds"), "rates.products.torch.group_seconds is missing"),
        (lambda raw: raw["products"].pop("te"), "rates.gemm='te' has no entry"),
        (lambda raw: raw.update(products=[[1, 2]]), "rates.group_seconds is missing"),
        (lambda raw: raw.update(products=None), "rates.products is missing"),
        (lambda raw: raw.update(kernel="fa9"), "rates.kernel='fa9' has no entry"),
        (
            lambda raw: raw.update(operation_seconds=-1e-6),
            "operation_seconds: -1e-06 must be a number of at least 0",
        ),
        (lambda raw: raw.update(copy_bandwidth=True), "rates.copy_bandwidth: True must be a number above 0"),
        (lambda raw: raw.update(extra=1), "unknown entry rates.extra"),
        (lambda raw: raw.pop("source"), "rates.source is missing"),
    ],
)
def test_bad_entries_are_refused_by_name(tmp_path, change, message):
    path = tmp_path / "cluster.json"
    Cluster.preset("h100-8x400g").to_json(path)
    content = json.loads(path.read_text())
    change(content["rates"])
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=message) as caught:
        Cluster.from_json(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_files_from_before_products_had_names_are_read(tmp_path):
    """They had one list for all products, and planned as if the host started those of each expert."""
    path, rows = tmp_path / "cluster.json", [[512, 4e14], [2048, 5e14], [8192, 6e14]]
    Cluster.preset("h100-8x400g").to_json(path)
    content = json.loads(path.read_text())
    del content["rates"]["gemm"]
    content["rates"] |= {"products": rows, "group_seconds": 5e-5}
    path.write_text(json.dumps(content))
    rates = Cluster.from_json(path).rates
    assert rates.gemm == "te" and rates.group_seconds == 5e-5
    assert {name: (each.rows, each.group_seconds) for name, each in rates.products} == {
        name: (tuple(map(tuple, rows)), seconds) for name, seconds in (("sequential", 5e-5), ("te", 5e-5), ("torch", 0))
    }


def test_rates_that_are_no_object_are_refused(tmp_path):
    path = tmp_path / "cluster.json"
    Cluster.preset("h100-8x400g").to_json(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rates": [1]}))
    with pytest.raises(ValueError, match="rates must be a JSON object"):
        Cluster.from_json(path)


def test_scaled_rates_keep_the_host():
    half = H100.times(0.5, "made up", attention=0.25)
    assert half.forward.flops == pytest.approx(H100.forward.flops / 4) and half.forward.row == pytest.approx(
        H100.forward.row
    )
    assert half.grouped.flops == pytest.approx(H100.grouped.flops / 2)
    assert half.operation_seconds == H100.operation_seconds and not half.measured
    assert np.isclose(half.backward.piece, H100.backward.piece)


def test_a_cluster_plans_with_the_kernel_that_it_is_told():
    cluster = Cluster.preset("h100-8x400g")
    assert cluster.with_kernel("cudnn").rates.forward.flops > 1.3 * cluster.rates.forward.flops
    assert cluster.with_kernel("cudnn").with_kernel("fa2") == cluster
    assert hash(cluster.with_kernel("cudnn")) != hash(cluster), "caches tell them apart"
    assert cluster.with_kernel("fa2", "cudnn", "another").rates.kernel == "cudnn", "the fastest"
    assert (
        cluster.with_kernel("another") == cluster == cluster.with_kernel()
        and Cluster.sheet("h100-8x400g").with_kernel("fa3").rates is None
    )
