"""Load histories and traces: drift, prediction, synthetic loads, and trace files, whole and broken."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balancing.experts import LoadHistory, total_variation
from balancing.experts.load_history import drifted_loads
from balancing_tools.load_trace import LoadTrace, read_load_trace, write_load_trace
from benchmarks.experts.synthetic import drifted, sampled_load, zipf_popularity


class TestDrift:
    def test_total_variation(self):
        assert total_variation([[10, 0]], [[0, 5]]) == 1
        assert total_variation([[10, 10]], [[3, 3]]) == 0
        assert total_variation([[30, 10], [10, 30]], [[80, 0], [0, 0]]) == pytest.approx(0.5)
        assert total_variation([[0, 0]], [[0, 0]]) == 0
        assert total_variation([[0, 0]], [[0, 1]]) == 1
        assert total_variation(np.ones((3, 2, 4)), np.ones((3, 2, 4))).shape == (3,)


class TestDriftedLoads:
    @pytest.mark.parametrize("drift", [0.03, 0.1, 0.2, 0.3])
    def test_they_are_so_far_from_the_load(self, drift):
        load = sampled_load(np.full(128, 1 / 128), 16, 50_000, np.random.default_rng(1))
        one, other = drifted_loads(load, drift)
        for each in (one, other):
            assert total_variation(load, each) == pytest.approx(drift, rel=0.25)
            assert each.sum() == pytest.approx(load.sum(), rel=1e-3)
        assert total_variation(one, other) > 1.5 * drift, "in opposite directions"
        assert np.array_equal(drifted_loads(load, drift)[0], one)

    def test_without_drift_the_load_is_only_rounded(self):
        assert [each.tolist() for each in drifted_loads(np.array([[1.4, 2.6]]), 0.0)] == [[[1, 3]]]
        assert [each.tolist() for each in drifted_loads(np.zeros((1, 2)), 0.2)] == [[[0, 0]]] * 2


class TestHistory:
    def test_the_first_load_predicts_itself(self):
        history = LoadHistory()
        with pytest.raises(ValueError, match="no load is recorded"):
            history.predict()
        assert history.record([[3, 4], [5, 6]]) == 0
        assert history.predict().tolist() == [[3, 4], [5, 6]]

    def test_a_load_that_moves_on_is_predicted_from_the_last(self):
        """The hot expert changes every few steps: averages lag behind."""
        history = LoadHistory()
        for step in range(24):
            load = np.full((2, 8), 10)
            load[:, step // 4] = 500
            history.record(load)
        assert np.array_equal(history.predict(), load)

    def test_a_load_that_only_fluctuates_is_predicted_from_an_average(self):
        generator, history = np.random.default_rng(0), LoadHistory()
        popularity = zipf_popularity(32, 8, 2, generator)
        errors, last = {"predicted": [], "last": []}, None
        for step in range(60):
            load = sampled_load(popularity, 8, 40, generator)
            if step > 10:
                errors["predicted"].append(total_variation(history.predict(), load))
                errors["last"].append(total_variation(last, load))
            history.record(load)
            last = load
        assert np.mean(errors["predicted"]) < 0.9 * np.mean(errors["last"])

    def test_the_error_of_predictions_is_the_drift_that_no_predictor_foresees(self):
        generator, history = np.random.default_rng(0), LoadHistory()
        popularity = zipf_popularity(64, 8, 2, generator)
        assert history.error() == 0
        for step in range(40):
            history.record(sampled_load(popularity, 8, 100_000, generator))
            assert step or history.error() == 0, "one load has no drift"
            popularity = drifted(popularity, 0.15, generator)
        assert history.error() == pytest.approx(0.15, rel=0.25)

    def test_layers_are_predicted_each_in_its_own_way(self):
        generator, together, alone = np.random.default_rng(1), LoadHistory(), [LoadHistory(), LoadHistory()]
        popularity = zipf_popularity(16, 4, 2, generator)
        for step in range(30):
            moving = np.full((4, 16), 5)
            moving[:, step // 3] = 400
            layers = np.stack([moving, sampled_load(popularity, 4, 30, generator)])
            drift = together.record(layers)
            assert drift == pytest.approx([float(each.record(load)) for each, load in zip(alone, layers, strict=True)])
        assert np.array_equal(together.predict(), np.stack([each.predict() for each in alone]))
        assert np.array_equal(alone[0].predict(), moving), "this layer follows the last load"
        assert not np.array_equal(alone[1].predict(), layers[1]), "and this one an average"

    @pytest.mark.parametrize("load", [[1, 2], [[-1, 2]], [[np.nan, 1]]])
    def test_bad_loads(self, load):
        with pytest.raises(ValueError, match="source_rank, expert"):
            LoadHistory().record(load)

    def test_a_load_of_another_shape(self):
        history = LoadHistory()
        history.record(np.ones((2, 4)))
        with pytest.raises(ValueError, match=r"\(2, 8\) follows loads of shape \(2, 4\)"):
            history.record(np.ones((2, 8)))


class TestSynthetic:
    @settings(max_examples=30)
    @given(st.sampled_from([(16, 4), (64, 8), (128, 64)]), st.floats(1.0, 3.5), st.integers(0, 999))
    def test_imbalance_is_as_asked(self, shape, imbalance, seed):
        experts, ranks = shape
        popularity = zipf_popularity(experts, ranks, imbalance, np.random.default_rng(seed))
        assert popularity.sum() == pytest.approx(1) and popularity.min() >= 0
        assert popularity.reshape(ranks, -1).sum(1).max() * ranks == pytest.approx(imbalance, rel=1e-6)

    @settings(max_examples=30)
    @given(st.floats(1.0, 4), st.floats(0, 0.5), st.integers(0, 999))
    def test_drift_is_as_asked(self, imbalance, variation, seed):
        generator = np.random.default_rng(seed)
        popularity = zipf_popularity(64, 8, imbalance, generator)
        moved = drifted(popularity, variation, generator)
        assert total_variation(popularity[None], moved[None]) == pytest.approx(variation, abs=1e-6)

    def test_every_rank_has_as_many_tokens(self):
        load = sampled_load(zipf_popularity(16, 4, 2, np.random.default_rng(0)), 4, 123, np.random.default_rng(0))
        assert load.sum(1).tolist() == [123] * 4

    def test_bad_input(self):
        generator = np.random.default_rng(0)
        with pytest.raises(ValueError, match=r"rank_imbalance=0\.5"):
            zipf_popularity(16, 4, 0.5, generator)
        with pytest.raises(ValueError, match="rank_imbalance=4"):
            zipf_popularity(16, 4, 4, generator)
        with pytest.raises(ValueError, match=r"variation=1\.5"):
            drifted(np.ones(4) / 4, 1.5, generator)


class TestLoadTrace:
    trace = LoadTrace(np.arange(2 * 4 * 3 * 2 * 8).reshape(2, 4, 3, 2, 8), np.array([10, 20]), np.array([0, 2, 4]))

    def test_what_is_written_is_read(self, tmp_path):
        write_load_trace(self.trace, tmp_path / "loads.npz")
        found = read_load_trace(tmp_path / "loads.npz")
        assert np.array_equal(found.counts, self.trace.counts)
        assert found.iteration.tolist() == [10, 20] and found.layer.tolist() == [0, 2, 4]

    def test_sources_are_merged_or_split(self):
        merged, split = self.trace.on_ranks(2), self.trace.on_ranks(8)
        assert np.array_equal(merged[:, 0], self.trace.counts[:, 0] + self.trace.counts[:, 1])
        assert np.array_equal(split[:, 0::2] + split[:, 1::2], self.trace.counts)
        assert np.abs(split[:, 0::2] - split[:, 1::2]).max() <= 1
        with pytest.raises(ValueError, match="4 source ranks, not a multiple or a part of 6"):
            self.trace.on_ranks(6)

    def test_a_file_that_is_cut_short(self, tmp_path):
        path = tmp_path / "loads.npz"
        write_load_trace(self.trace, path)
        content = path.read_bytes()
        for length in (0, 50, len(content) // 2, len(content) - 1):
            path.write_bytes(content[:length])
            with pytest.raises(ValueError, match=r"loads\.npz"):
                read_load_trace(path)

    def test_files_with_other_contents(self, tmp_path):
        path = tmp_path / "loads.npz"
        cases = [
            ({"loads": np.ones(3)}, "no array 'counts'"),
            ({"counts": np.ones((2, 3), dtype=int)}, "must be whole numbers"),
            ({"counts": np.ones((1, 2, 1, 1, 4))}, "must be whole numbers"),
            ({"counts": np.full((1, 2, 1, 1, 4), -1)}, "negative"),
            ({"counts": np.ones((2, 2, 1, 1, 4), dtype=int), "iteration": np.arange(3)}, "iteration has shape"),
            ({"counts": np.ones((2, 0, 1, 1, 4), dtype=int)}, "must be whole numbers"),
            ({"counts": np.array([{}], dtype=object)}, "holds Python objects"),
        ]
        for content, named in cases:
            np.savez(path, **content)
            with pytest.raises(ValueError, match=named) as error:
                read_load_trace(path)
            assert str(path) in str(error.value) and "\n" not in str(error.value)
        path.write_text("not an archive")
        with pytest.raises(ValueError, match=r"loads\.npz"):
            read_load_trace(path)
        with pytest.raises(ValueError, match="No such file"):
            read_load_trace(tmp_path / "none.npz")
