"""The progress that candidates make, against a simulation in NumPy."""

import numpy as np
import pytest
import tensorflow as tf

import hvd_compress as hvdc
from hvd_compress.auto import gradient_parts, progress
from hvd_compress.auto.progress import ROWS, Row
from hvd_compress.auto.progress_sample import ProgressSample
from hvd_compress.compressors.base import no_seeds

SHAPES = ((40, 64), (10,), (16, 48))  # no sample leaves anything out of so few elements


def sample_of(auto, shapes=SHAPES, decay=1.0, adaptive=True, normalized=False, columns=None):
    count = len(auto.candidates)
    columns = range(count) if columns is None else columns
    return ProgressSample(auto, dict(enumerate(shapes)), [decay] * count, adaptive, normalized, columns)


def gradients_of(steps, shapes=SHAPES, signal=0.3):
    """A constant gradient and noise."""
    random = np.random.default_rng(0)
    constant = [random.standard_normal(shape) for shape in shapes]
    return [[(signal * c + random.standard_normal(c.shape)).astype(np.float32) for c in constant] for _ in range(steps)]


def sums_of(gain, way, first, variance=0.0):
    """What may be measured, [ROWS, C]: without compression, the gain and the way are 8."""
    sums = np.zeros([ROWS, len(gain)])
    sums[Row.GAIN], sums[Row.WAY], sums[Row.OWN_GAIN], sums[Row.VARIANCE] = gain, way, first, variance
    sums[[Row.WHOLE_GAIN, Row.WHOLE_WAY, Row.ENERGY]] = 8.0
    return sums


def run(sample, gradients):
    """What the steps measure, [steps, ROWS, C]."""
    step = tf.function(lambda *g: sample.measure(no_seeds(), g), autograph=False)
    return np.array([step(*map(tf.constant, g)) for g in gradients])


@pytest.mark.parametrize("adaptive, normalized", [(True, False), (False, False), (True, True), (False, True)])
@pytest.mark.parametrize("decay", [1.0, 0.5, 0.0])
def test_measured_is_what_the_formulas_say(adaptive, normalized, decay):
    """Relative progress by its definition, with the residuals of error feedback and the mean square of gradients."""
    auto, gradients = hvdc.Compression.auto(candidates=["none", "topk:ratio=0.1"], probe_every=1), gradients_of(8)
    found = run(sample_of(auto, decay=decay, adaptive=adaptive, normalized=normalized), gradients)
    residual = mean_square = updates = 0.0
    sent = plain = np.zeros(sum(map(np.prod, SHAPES)))
    for i, step in enumerate(gradients):
        g = np.concatenate([x.ravel() for x in step]).astype(np.float64)
        mean_square = mean_square + (g**2 - mean_square) / (i + 1)
        metric = 1 / np.sqrt(mean_square) if adaptive else 1.0
        total = g + decay * residual
        c = np.where(np.abs(total) >= np.sort(np.abs(total))[-np.ceil(0.1 * g.size).astype(int)], total, 0.0)
        expected = {
            Row.GAIN: [np.sum(plain * g), np.sum(sent * g)],
            Row.WHOLE_GAIN: np.sum(plain * g),
            Row.VARIANCE: np.sum(g**2 * plain**2),
            Row.WAY: [np.sum(plain * metric * g), np.sum(sent * metric * g)],
            Row.WHOLE_WAY: np.sum(plain * metric * g),
            Row.LOST: [0.0, np.sum((total - c) ** 2)],
            Row.ENERGY: [np.sum(g**2), np.sum(total**2)],
        }
        residual, sent, plain = total - c, metric * c, metric * g
        if normalized:
            updates = 0.9 * updates + 0.1 * np.stack([sent, plain])
            norms = np.linalg.norm(updates / (1.0 - 0.9 ** (i + 1)), axis=1)
            sent, plain = sent / norms[0], plain / norms[1]
        expected[Row.OWN_GAIN] = np.sum(plain * g) if i else 0.0
        assert len(expected) == ROWS
        for row, values in expected.items():
            rtol, atol = (1e-4, 1e-6) if row in (Row.LOST, Row.ENERGY) else (1e-3, 1e-2)
            np.testing.assert_allclose(found[i, row], np.broadcast_to(values, 2), rtol=rtol, atol=atol)


def test_errors_cost_progress_where_an_update_has_a_fixed_norm():
    """A block's error is spread over its elements. Where gradients are small, the metric makes it large."""
    auto = hvdc.Compression.auto(candidates=["none", "hadamard"], probe_every=1)
    random = np.random.default_rng(0)
    scales = [np.exp(2.0 * random.standard_normal(shape)).astype(np.float32) for shape in SHAPES]
    gradients = [[g * scale for g, scale in zip(step, scales)] for step in gradients_of(60)]
    found = [run(sample_of(auto, normalized=is_lamb), gradients)[20:].sum(0) for is_lamb in (False, True)]
    of_adam, of_lamb = (sums[0] / sums[1] for sums in found)
    assert of_adam[0] == of_lamb[0] == 1.0
    assert of_lamb[1] < of_adam[1] - 0.2


def test_updates_begin_anew_with_each_time_of_measuring():
    auto, gradients = hvdc.Compression.auto(candidates=["none", "topk:ratio=0.1"], probe_every=60), gradients_of(24)
    found = run(sample_of(auto, adaptive=False, normalized=True), gradients + gradients_of(36) + gradients)
    np.testing.assert_allclose(found[60:], found[:24], rtol=1e-4)


def test_some_candidates_only():
    auto = hvdc.Compression.auto(candidates=["none", "topk:ratio=0.1", "int4", "powersgd:rank=2"], probe_every=1)
    gradients = gradients_of(5)
    every, some = run(sample_of(auto), gradients), run(sample_of(auto, columns=[1, 3]), gradients)
    np.testing.assert_allclose(some[:, :, [1, 3]], every[:, :, [1, 3]], rtol=1e-5)
    np.testing.assert_array_equal(some[:, :, [0, 2]], 0.0)


@pytest.mark.parametrize("normalized", [False, True])
def test_powersgd_is_simulated_on_several_matrices(normalized):
    """The sums over matrices, each simulated by itself."""
    auto, gradients = hvdc.Compression.auto(candidates=["powersgd:rank=2"], probe_every=1), gradients_of(8)
    found = run(sample_of(auto, normalized=normalized), gradients)
    singles = [run(sample_of(auto, [SHAPES[i]], normalized=normalized), [[g[i]] for g in gradients]) for i in (0, 2)]
    np.testing.assert_allclose(found, sum(singles), rtol=1e-4, atol=1e-3)
    assert all(np.abs(single[-1, 1]).max() > 0 for single in singles)


def test_ranks_of_powersgd_share_their_parts():
    auto, gradients = hvdc.Compression.auto(candidates=["powersgd:rank=4", "powersgd:rank=1"]), gradients_of(8)
    both, *alone = (run(sample_of(auto, columns=columns), gradients) for columns in ([0, 1], [0], [1]))
    np.testing.assert_allclose(both, sum(alone), rtol=1e-4, atol=1e-3)
    assert not np.allclose(both[:, Row.LOST, 0], both[:, Row.LOST, 1])


def test_matrices_are_chosen_by_their_sizes_and_parts_of_them_are_square():
    candidate = hvdc.Compression.parse("powersgd:rank=2")
    dense = {3: (64, 64), 4: (1024, 1536), 5: (1536,), 6: (1536, 1024), 7: (1024, 256), 8: (256,)}
    parts = [(4, (1024, 1536), (256, 256)), (6, (1536, 1024), (256, 256))]
    assert gradient_parts.matrices_of(candidate, dense) == parts
    deep = dict(enumerate([(128, 512)] * 96))
    assert [i for i, _, _ in gradient_parts.matrices_of(candidate, deep)] == [12, 36, 60, 84]
    convolutions = {0: (3, 3, 32, 64), 1: (9216, 128), 2: (128, 10)}
    assert gradient_parts.matrices_of(candidate, convolutions) == [(1, (9216, 128), (512, 128))]
    assert gradient_parts.matrices_of(candidate, {0: (40, 64), 1: (10,), 2: (16, 48)}) == [
        (0, (40, 64), (40, 64)),
        (2, (16, 48), (16, 48)),
    ]
    assert gradient_parts._part_shape(300, 100_000) == (256, 256)
    assert gradient_parts._part_shape(3, 100_000) == (3, 21845)
    assert gradient_parts.matrices_of(candidate, {0: (7,)}) == [(0, (1, 7), (1, 7))]


def test_a_part_has_rows_and_columns_from_everywhere():
    matrix = np.arange(700 * 1030, dtype=np.float32).reshape(700, 1030)
    part = gradient_parts.part_of(0, (700, 1030), (256, 256), [tf.constant(matrix.reshape(7, 100, 1030))])
    np.testing.assert_array_equal(part, matrix[: 2 * 256 : 2, : 4 * 256 : 4])


def test_what_powersgd_does_not_compress_makes_all_of_the_progress():
    auto = hvdc.Compression.auto(candidates=["powersgd:rank=2"], probe_every=1)
    found = run(sample_of(auto, [(7,), (9,)]), gradients_of(5, [(7,), (9,)]))
    np.testing.assert_allclose(found[1:, Row.GAIN], found[1:, Row.WHOLE_GAIN])
    assert (found[1:, Row.GAIN] != 0).all() and not found[:, Row.LOST].any()


@pytest.mark.parametrize("spec", ["int8", "topk:ratio=0.1", "powersgd:rank=2", "onebit"])
def test_a_constant_gradient_makes_no_candidate_late(spec):
    """Without noise, what is sent late is as good as new: once as much is sent as comes, progress is 1."""
    auto = hvdc.Compression.auto(candidates=["none", spec], probe_every=1)
    found = run(sample_of(auto, adaptive=False), [gradients_of(1)[0]] * 60)[30:].sum(0)
    assert found[0, 1] / found[1, 1] == pytest.approx(1.0, abs=0.1)


def test_noise_makes_no_progress():
    """What is late of pure noise is worth nothing, and neither is the new: the prior counts."""
    auto = hvdc.Compression.auto(candidates=["none", "topk:ratio=0.1"], probe_every=1)
    found = run(sample_of(auto), gradients_of(40, signal=0.0)).sum(0)
    assert abs(found[1, 1]) < 3 * np.sqrt(found[2, 1])
    rate = progress.rates(np, found, np.float32([1.0, 0.3]), [0])
    assert rate[1] < 0.8


def test_in_its_own_training_a_candidate_is_as_late_as_the_weights_are_slow():
    """Progress 1 / (1 + late * v) at speed v: whatever v it is simulated at, its own speed follows."""
    own, late = np.array([1.0, 0.8, 0.5, 0.1]), np.array([0.0, 0.25 / 0.8, 1.0 / 0.5, 9.0 / 0.1])
    np.testing.assert_allclose(1.0 / (1.0 + late * own), own)
    for speed in (1.0, 0.8, 0.3):
        np.testing.assert_allclose(progress.at_own_speed(np, 1.0 / (1.0 + late * speed), speed), own)


def test_what_is_in_use_makes_the_progress_that_is_measured():
    sums = sums_of(gain=[8.0, 6.0, 2.0], way=[8.0] * 3, first=80.0)
    for choice, expected in (([0], [1.0, 2 / (1 + np.sqrt(1 + 4 / 3))]), ([1, 1], [1.0, 0.75])):
        rates = progress.rates(np, sums, np.ones(3), choice)
        np.testing.assert_allclose(rates[:2], expected, rtol=1e-6)
    assert progress.rates(np, sums, np.ones(3), [2])[2] == pytest.approx(0.25)


@pytest.mark.parametrize(
    "first, expected",
    [
        (1e9, [0.5, 0.5, 0.5]),  # noise: the inner product counts
        (8.0, [0.5, 0.125, 0.5]),  # every gradient is as that before: the way counts, if it is shorter
        (32.0, [0.5, 0.5, 0.5]),
        (16.0, [0.5, np.sqrt(0.5 * 0.125), 0.5]),  # half of it is repeated
        (2.0, [0.5, 0.125, 0.5]),  # gradients grow
    ],
)
def test_the_way_counts_where_gradients_repeat(first, expected):
    sums = sums_of(gain=[4.0] * 3, way=[4.0, 1.0, 9.0], first=first)
    for c in range(3):
        assert progress.rates(np, sums, np.ones(3), [c])[c] == pytest.approx(expected[c])


def test_no_gain_and_no_way_leave_what_is_known():
    """Gradients that point against those before say nothing of the way, and no way nothing of the gain."""
    prior = np.array([0.9, 0.3])
    sums = sums_of(gain=[-8.0, 2.0], way=[8.0, 1.0], first=16.0, variance=4.0)
    sums[Row.WHOLE_GAIN] = -8.0
    assert progress.rates(np, sums, prior, [1])[1] == pytest.approx(0.3)
    sums = sums_of(gain=[8.0, 4.0], way=[-8.0, -8.0], first=8.0)
    sums[Row.WHOLE_WAY] = -8.0
    assert progress.rates(np, sums, prior, [1])[1] == pytest.approx(0.5)


def test_of_steady_gradients_a_sparse_candidate_sends_the_small_ones_late():
    """Gradients of very different sizes repeat. Most of the gain gets through, and little of the way."""
    auto = hvdc.Compression.auto(candidates=["none", "topk:ratio=0.05", "int8"], probe_every=1)
    random = np.random.default_rng(0)
    steady = [np.exp(2.0 * random.standard_normal(shape)).astype(np.float32) for shape in SHAPES]
    sums = run(sample_of(auto), [steady] * 48).sum(0)
    gain, way = (sums[row] / sums[whole] for row, whole in ((Row.GAIN, Row.WHOLE_GAIN), (Row.WAY, Row.WHOLE_WAY)))
    assert gain[1] > 0.6 and way[1] < 0.4 and min(gain[2], way[2]) > 0.97
    assert progress.rates(np, sums, np.ones(3), [1])[1] == pytest.approx(way[1], abs=0.02)


def test_a_gradient_that_is_not_finite_changes_nothing():
    auto, gradients = hvdc.Compression.auto(candidates=["none", "int4"], probe_every=1), gradients_of(6)
    broken = [g if i != 3 else [np.full_like(x, np.nan) for x in g] for i, g in enumerate(gradients)]
    found = run(sample_of(auto), broken)
    assert np.isfinite(found).all()
    assert not found[3, : Row.LOST].any()


def test_which_steps_are_measured():
    auto, gradients = hvdc.Compression.auto(candidates=["none", "int4"], probe_every=60), gradients_of(1) * 200
    measured = run(sample_of(auto), gradients)[:, Row.ENERGY, 0] > 0
    assert measured.tolist() == [i < 48 or i % 60 < 24 for i in range(200)]


@pytest.mark.parametrize("shapes", [[(1000, 700), (300,), (3, 3, 64, 128)], [(5,)], [(2**18,)] * 3])
def test_the_sample_is_a_part_of_each_gradient(shapes):
    auto = hvdc.Compression.auto(candidates=["none"], probe_every=1)
    values = [np.full(shape, i + 1, np.float32) for i, shape in enumerate(shapes)]
    (energy,) = run(sample_of(auto, shapes), [values])[:, Row.ENERGY, 0]
    stride = max(1, np.ceil(sum(map(np.prod, shapes)) / 2**16))
    counts = [256 * np.ceil(n // 256 / min(stride, n // 256)) if n >= 256 else n for n in map(np.prod, shapes)]
    assert energy == pytest.approx(sum((i + 1) ** 2 * n for i, n in enumerate(counts)), rel=1e-4)
    assert sum(counts) <= 2**16 + 256 * len(shapes)


def test_what_is_not_finite_in_one_step_does_not_stay():
    """A value that overflows in fp16, with an optimizer that keeps a running mean of what is sent."""
    auto, gradients = hvdc.Compression.auto(candidates=["none", "fp16"], probe_every=1), gradients_of(6)
    gradients[3][0][0, 0] = 1e6
    found = run(sample_of(auto, normalized=True), gradients)
    assert not np.isfinite(found[3, Row.LOST, 1])
    assert np.isfinite(found[:, :, 0]).all() and np.isfinite(found[[0, 1, 2, 4, 5]]).all()


def test_only_what_is_measured_lets_older_measurements_fade():
    sums, measured = np.ones([ROWS, 2], np.float32), np.ones([ROWS, 2], np.float32)
    measured[:, 1] = 0.0
    found = progress.add(np, sums, measured)
    np.testing.assert_allclose(found[:, 0], [1.97, 1.97, 1.0 + 0.97**2, *[1.97] * 5], rtol=1e-6)
    np.testing.assert_array_equal(found[:, 1], sums[:, 1])
