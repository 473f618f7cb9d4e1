"""Forecasts beside the emulated cluster: as close as the log says, without constants fitted to it."""

import numpy as np

from benchmarks.whatif.emulated import compare


def test_steps_are_within_ten_percent_of_the_emulated_cluster():
    rows = compare()
    errors = {row.name: max(map(abs, row.errors)) for row in rows}
    assert len(errors) == 17
    assert max(errors.values()) <= 0.1001, errors
    assert np.median([error for row in rows for error in map(abs, row.errors)]) < 0.03
    for row in rows:  # and the verdict is the same: worth it, or not
        ran, told = row.gains
        assert abs(told / ran - 1) < 0.12 and (ran > 1.2) == (told > 1.2), row.name
