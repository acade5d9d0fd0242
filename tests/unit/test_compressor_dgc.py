"""dgc: its densities, its arguments, and what it asks of settings and optimizers; the exchange is in tests/parallel."""

import math

import numpy as np
import pytest
import tensorflow as tf
from reference import index_bytes

import hvd_compress as hvdc
from hvd_compress import formats
from hvd_compress.engine import transforms
from hvd_compress.engine.settings import Settings

dgc, parse = hvdc.Compression.dgc, hvdc.Compression.parse


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [
        (0.001, [1 / 4, 1 / 16, 1 / 64, 1 / 256, 0.001]),  # the paper's
        (0.01, [1 / 4, 1 / 16, 1 / 64, 0.01]),
        (0.02, [1 / 4, 1 / 16, 0.02]),
        (0.0625, [1 / 4, 0.0625]),
        (0.3, [0.3]),
        (1.0, [1.0]),
    ],
)
def test_density_falls_by_quarters_and_ends_with_the_ratio(ratio, expected):
    assert dgc(ratio).densities == expected
    assert [stage.ratio for stage in dgc(ratio).stages] == expected
    assert dgc(ratio, warmup_epochs=0).densities == [ratio]
    assert formats.parse(f"dgc:ratio={ratio}").densities == expected  # without TensorFlow


@pytest.mark.parametrize(
    ("warmup", "first"), [(None, [0, 1, 2, 3, 4]), (8, [0, 2, 4, 6, 8]), (1, [0, 0.25, 0.5, 0.75, 1])]
)
def test_stages_are_spread_over_the_warmup(warmup, first):
    compressor = dgc(warmup_epochs=warmup)
    for stage, epoch in enumerate(first):
        assert int(compressor.stage_at(tf.constant(epoch, tf.float64))) == stage
        if epoch:
            assert int(compressor.stage_at(tf.constant(epoch - 1e-3, tf.float64))) == stage - 1
    assert int(compressor.stage_at(tf.constant(1e6, tf.float64))) == 4


@pytest.mark.parametrize("steps", [3, 7, 10, 1251, 40037])
def test_steps_add_up_to_whole_epochs(steps):
    """In float64, as in training."""
    compressor = dgc(steps_per_epoch=steps)
    done = np.cumsum(np.full(4 * steps, 1.0 / steps))
    for epoch in range(1, 5):
        assert int(compressor.stage_at(tf.constant(done[epoch * steps - 1]))) == epoch
        assert int(compressor.stage_at(tf.constant(done[epoch * steps - 2]))) == epoch - 1


def test_specs():
    assert dgc().spec == "dgc" and parse("dgc") == dgc() == dgc(0.001, momentum=0.9)
    full = dgc(0.01, momentum=0.5, clipnorm=2, warmup_epochs=3, steps_per_epoch=100)
    assert parse(full.spec) == full and formats.parse(full.spec).spec == full.spec
    assert hash(parse(full.spec)) == hash(full)
    assert all(parse(stage.spec) == stage and stage.stages == (stage,) for stage in full.stages)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ("ratio=0", "dgc: ratio must be a number above 0"),
        ("momentum=1", "dgc: momentum must be from 0 to below 1, got 1"),
        ("momentum=much", "dgc: momentum must be a number, got 'much'"),
        ("clipnorm=0", "dgc: clipnorm must be above 0"),
        ("clipnorm=nan", "dgc: clipnorm must be a number"),
        ("warmup_epochs=-1", "dgc: warmup_epochs must be from 0 on"),
        ("steps_per_epoch=0", "dgc: steps_per_epoch must be a whole number from 1 on"),
        ("steps_per_epoch=1.5", "dgc: steps_per_epoch must be a whole number from 1 on"),
    ],
)
def test_bad_arguments_are_named(arguments, match):
    with pytest.raises(ValueError, match=match) as error:
        parse(f"dgc:{arguments}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("n", [10, 5000, 70000])
def test_wire_bytes_are_those_of_the_final_ratio(n):
    k = math.ceil(n / 1000)
    assert dgc().wire_bytes(n) == 4 * k + index_bytes(n, k)


def test_the_cost_model_takes_top_ks_kernels():
    model = hvdc.CostModel(hvdc.Link(5e-5, 1e-9), 4)
    assert model.cost_of("dgc") == model.cost_of("topk:ratio=0.001")
    assert model.predict("dgc", 10**6).payload == model.predict("topk:ratio=0.001", 10**6).payload


def test_settings_take_its_momentum():
    assert Settings(dgc(momentum=0.7)).momentum_correction == 0.7
    assert Settings(parse("none"), policy=(("*", dgc()),)).momentum_correction == 0.9
    assert Settings(dgc(), momentum_correction=0.9).momentum_correction == 0.9
    with pytest.raises(ValueError, match="are the same thing: leave momentum_correction out"):
        Settings(dgc(), momentum_correction=0.5)
    with pytest.raises(ValueError, match="momentum of dgc must be the same for all variables"):
        Settings(dgc(), policy=(("*", dgc(momentum=0.5)),))
    with pytest.raises(ValueError, match="the momentum of dgc needs a sparse compressor.*int8"):
        Settings(parse("int8"), policy=(("*", dgc()),))
    with pytest.raises(ValueError, match="auto: dgc brings momentum"):
        hvdc.Compression.auto(candidates=["none", "dgc"])


def test_without_state_it_is_top_k():
    assert dgc(0.25).stateless() == hvdc.Compression.topk(0.25)
    assert parse("int8").stateless() == parse("int8")


def test_clipping_scales_all_gradients_together():
    rng = np.random.default_rng(0)
    dense, rows = (
        rng.standard_normal((5, 6)).astype(np.float32),
        rng.standard_normal((2, 3)).astype(np.float32),
    )
    gradients = [
        tf.constant(dense), None, tf.IndexedSlices(tf.constant(rows), [0, 4], [7, 3]), tf.constant([3, 4]),
    ]  # fmt: skip
    norm = math.sqrt(np.sum(dense.astype(float) ** 2) + np.sum(rows.astype(float) ** 2))
    for limit in (norm / 3, 2 * norm):
        factor = min(1.0, limit / norm)
        found = transforms.Clip(limit).prepare(gradients)
        np.testing.assert_allclose(found[0], factor * dense, rtol=1e-6)
        np.testing.assert_allclose(found[2].values, factor * rows, rtol=1e-6)
        assert found[1] is None and found[3].numpy().tolist() == [3, 4]
    np.testing.assert_array_equal(transforms.Clip(1.0).prepare([tf.zeros(3)])[0], np.zeros(3))
    for bad in (math.inf, math.nan):
        assert not np.isfinite(transforms.Clip(1.0).prepare([tf.constant([1.0, bad])])[0]).all()
