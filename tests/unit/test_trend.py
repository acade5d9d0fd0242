"""The rules of CompressionGuard against series with and without planted trouble."""

import math
import os

import numpy as np
import pytest

from hvd_compress.monitor.trend import BLOCK, Caution, loss_alarm, metric_alarm, noise, residual_alarm, rise

WINDOWS = 120
SEEDS = 100 if os.environ.get("HYPOTHESIS_PROFILE") == "deep" else 5


def healthy(kind, seed):
    """The mean losses of windows of batches in a run where nothing is wrong."""
    rng = np.random.default_rng([seed, 1])
    t = np.arange(WINDOWS)
    base = 2.3 * np.exp(-t / rng.uniform(5, 200)) + rng.uniform(0, 1)
    normal = rng.standard_normal(WINDOWS)
    drift = np.zeros(WINDOWS)
    for i in range(1, WINDOWS):
        drift[i] = 0.9 * drift[i - 1] + 0.03 * normal[i]
    spiked = np.where(np.arange(WINDOWS) % 17 == seed % 17, 10.0, 1.0)
    return {
        "falls": base,
        "noisy": base * (1 + rng.uniform(0.01, 0.3) * normal),
        "heavy tails": base + 0.1 * np.abs(rng.standard_t(2, WINDOWS)),
        "wanders": base * (1 + drift),
        "falls again": np.where(t < 60, base, base * 0.5) * (1 + 0.1 * normal),
        "higher at the end of each epoch": base * (1 + 0.3 * ((t % 20) / 20 - 0.5)) * (1 + 0.05 * normal),
        "hardly moves": 2.3 * (1 + 0.002 * normal),
        "constant": np.full(WINDOWS, 2.3),
        "goes to zero": np.exp(-t / 20) * np.exp(0.7 * normal),
        "below zero": -5.0 + base * (1 + 0.1 * normal),
        "single spikes": base * spiked,
        "warm restarts": 0.4 + 1.9 * np.exp(-t / 40) + 0.2 * np.cos(2 * np.pi * t / 60) + 0.02 * normal,
        "rises during the warm-up": base + 1.5 * np.exp(-((t - 4) ** 2) / 8) + 0.05 * normal,
    }[kind]


KINDS = (
    "falls", "noisy", "heavy tails", "wanders", "falls again", "higher at the end of each epoch", "hardly moves",
    "constant", "goes to zero", "below zero", "single spikes", "warm restarts", "rises during the warm-up",
)  # fmt: skip


def first_alarm(series):
    """The index of the first value with an alarm, and its text."""
    for end in range(1, len(series) + 1):
        alarm = loss_alarm(series[:end])
        if alarm:
            return end - 1, alarm
    return None


@pytest.mark.parametrize("kind", KINDS)
def test_healthy_losses_are_left_alone(kind):
    found = {seed: alarm for seed in range(SEEDS) if (alarm := first_alarm(healthy(kind, seed)))}
    assert not found


@pytest.mark.parametrize("kind", ["falls", "noisy", "wanders", "higher at the end of each epoch", "constant"])
@pytest.mark.parametrize("seed", range(3))
def test_a_jump_is_found_after_three_windows(kind, seed):
    series = healthy(kind, seed)
    series[60:] += 6.0 * series[0]
    at, alarm = first_alarm(series)
    assert at == 62 and "jumped" in alarm


@pytest.mark.parametrize("kind", ["falls", "wanders", "constant"])
@pytest.mark.parametrize("seed", range(3))
def test_a_slow_rise_is_found_before_all_is_lost(kind, seed):
    series = healthy(kind, seed) + 3.0 * np.maximum(np.arange(WINDOWS) - 60, 0) / 60
    at, _ = first_alarm(series)
    assert 60 < at < 105


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_loss_that_is_no_number_is_a_jump(value):
    series = healthy("noisy", 0)
    series[60:] = value
    assert first_alarm(series)[0] == 62


def test_before_there_is_a_trend_only_a_multiple_is_a_jump():
    assert loss_alarm([2.3, 4.0, 6.0, 7.0]) is None
    assert "jumped from 2.3 to 24" in loss_alarm([2.3, 24.0, 100.0, 1e5])
    assert loss_alarm([math.nan] * 5) is None and loss_alarm([]) is None and loss_alarm([0.0, 1.0, 1.0, 1.0]) is None


def test_a_rise_is_measured_from_the_best_level():
    rng = np.random.default_rng(0)
    values = [4.0] * BLOCK + [1.0] * BLOCK + [2.0] * 20
    found = rise(values, recent=3, share=0.3, sigmas=5.0)
    assert found == (1.0, 2.0)
    assert rise(values, recent=3, share=0.4, sigmas=5.0) is None  # it fell by 3 and rose by 1
    noisy = 1.0 + 0.1 * rng.standard_normal(4000)
    assert noise(noisy) == pytest.approx(0.1, rel=0.1)
    assert noise(noisy + np.linspace(0, 5, 4000)) == pytest.approx(0.1, rel=0.1)
    assert rise(values[: BLOCK + 2], recent=3, share=0.0, sigmas=0.0) is None  # too short


def test_a_contraction_never_leaves_too_much():
    """The bound of ||e|| holds for top-k, which converges, and not for signs of a wrong size, which does not."""
    rng = np.random.default_rng(0)

    def alarms(compress, steps=200):
        residual, total = np.zeros(1000), 0.0
        for step in range(steps):
            gradient = rng.standard_t(2, 1000)
            total += float(np.linalg.norm(gradient))
            x = gradient + residual
            residual = x - compress(x)
            if residual_alarm(float(np.linalg.norm(residual)), total):
                return step
        return None

    def top(x):
        return np.where(np.abs(x) >= np.sort(np.abs(x))[-10], x, 0.0)

    assert alarms(top) is None
    assert alarms(lambda x: 2.5 * x) < 20
    assert residual_alarm(0.0, 0.0) is None and residual_alarm(math.inf, 10.0)


@pytest.mark.parametrize("larger", [True, False])
def test_a_metric_that_falls_behind(larger):
    sign = 1.0 if larger else -1.0
    values = [sign * value for value in (0.1, 0.5, 0.7, 0.8, 0.82, 0.83, 0.82)]
    assert metric_alarm(values, "val_accuracy", larger) is None
    assert metric_alarm([*values, sign * 0.2], "val_accuracy", larger) is None  # once is not enough
    assert "val_accuracy fell behind" in metric_alarm([*values, sign * 0.2, sign * 0.3], "val_accuracy", larger)


def climb(caution, losses, gradients=1.0, residual=0.0):
    """The changes, by window of 10 batches."""
    seen = ((i, caution.see(loss, residual, gradients, 10)) for i, loss in enumerate(losses))
    return [(i, change.level) for i, change in seen if change]


def next_of(levels):
    return lambda level: level + 1 if level + 1 < levels else None


def test_a_guard_goes_back_and_waits_twice_as_long_the_next_time():
    caution = Caution(100, next_of(3))
    calm, trouble = [1.0] * 12, [9.0] * 3
    assert climb(caution, [*calm, *trouble]) == [(14, 1)]
    assert climb(caution, [1.0] * 12) == [(9, 0)]
    assert climb(caution, [*calm, *trouble]) == [(14, 1)]
    assert climb(caution, [1.0] * 30) == [(19, 0)]


def test_a_guard_goes_on_where_the_loss_does_not_come_back():
    caution = Caution(100, next_of(3))
    assert climb(caution, [*[1.0] * 12, *[9.0] * 3]) == [(14, 1)]
    assert climb(caution, [9.0] * 10) == [(9, 2)]
    assert climb(caution, [9.0] * 10) == [(9, 1)]  # without compression it is the same
    assert climb(caution, [1.0] * 20) == [(19, 0)]


def test_an_alarm_at_the_last_level_or_without_compression_changes_nothing():
    caution = Caution(100, next_of(1))
    assert climb(caution, [*[1.0] * 12, *[9.0] * 60]) == []
    caution = Caution(100, next_of(2))
    assert climb(caution, [1.0] * 3, residual=100.0) == [(0, 1)]
    assert climb(caution, [1.0] * 3, residual=100.0) == []
    assert caution.level == 1


def test_a_guard_without_losses_judges_the_residual_only():
    caution = Caution(20, next_of(2))
    assert climb(caution, [None] * 20) == []
    assert climb(caution, [None], residual=5.0) == [(0, 1)]
    assert climb(caution, [None] * 3) == [(1, 0)]


def test_a_metric_changes_the_level_as_well():
    caution = Caution(100, next_of(2))
    changes = [caution.see_metric(v, "accuracy", True) for v in (0.1, 0.5, 0.7, 0.8, 0.8, 0.2, 0.2)]
    assert changes[:-1] == [None] * 6 and changes[-1].level == caution.level == 1
