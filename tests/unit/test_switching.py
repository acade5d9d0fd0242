"""benchmarks/switching.py, on trainings whose oracle is known."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import switching


def training(method, seconds, losses):
    curve = [[20 * i, second, 0, loss] for i, (second, loss) in enumerate(zip(seconds, losses))]
    return {"method": method, "seed": 0, "curve": curve}


def test_levels_are_reached_between_evaluations():
    curve = training("none", [0.0, 10.0, 20.0, 30.0], [5.0, 4.0, 4.5, 2.0])["curve"]
    found = switching.seconds_at(curve, np.array([4.5, 4.0, 3.0, 2.0, 1.9]))
    np.testing.assert_allclose(found, [5.0, 10.0, 25.0, 30.0, np.inf], atol=1e-6)


def test_the_oracle_takes_the_fastest_part_of_each_training():
    """One is fast from 4 to 3, the other from 3 to 2; a third never gets there."""
    early = training("hadamard", [0.0, 10.0, 12.0, 30.0], [5.0, 4.0, 3.0, 2.0])
    late = training("int4", [0.0, 10.0, 24.0, 28.0], [5.0, 4.0, 3.0, 2.0])
    never = training("onebit", [0.0, 1.0, 2.0, 3.0], [5.0, 4.0, 3.0, 2.5])
    result = {"task": "gpt", "rate": "1gbit", "target": 2.0, "runs": [early, late, never]}
    best, fixed, oracle = switching.bound(result)
    assert best == "int4" and fixed == pytest.approx(28.0)
    # The step from one to the other is between two of the twelve levels.
    assert oracle == pytest.approx(16.0, abs=1.5) and oracle >= 16.0 - 1e-6
