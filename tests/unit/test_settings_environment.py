"""Environment variables that stand for arguments."""

import pytest
import tensorflow as tf
from tensorflow import keras

import hvd_compress as hvdc
from hvd_compress.engine.settings import BUCKET_BYTES
from hvd_compress.frontends.environment import resolve_bucket_bytes, resolve_exchange


def test_the_environment_counts_where_nothing_is_said(monkeypatch):
    monkeypatch.delenv("HVD_COMPRESS_BUCKET_BYTES", raising=False)
    assert resolve_bucket_bytes(None) == BUCKET_BYTES == 25 * 2**20
    monkeypatch.setenv("HVD_COMPRESS_BUCKET_BYTES", " 4096 ")
    assert resolve_bucket_bytes(None) == 4096
    assert resolve_bucket_bytes(100) == 100
    monkeypatch.setenv("HVD_COMPRESS_BUCKET_BYTES", "")
    assert resolve_bucket_bytes(None) == BUCKET_BYTES


@pytest.mark.parametrize("text", ["0", "-1", "25MB", "1.5"])
def test_what_is_no_number_is_said(monkeypatch, text):
    monkeypatch.setenv("HVD_COMPRESS_BUCKET_BYTES", text)
    with pytest.raises(ValueError, match="HVD_COMPRESS_BUCKET_BYTES must be a whole number from 1 on, got"):
        resolve_bucket_bytes(None)


def test_the_exchange_of_tune_counts_where_nothing_is_said(monkeypatch):
    monkeypatch.delenv("HVD_COMPRESS_EXCHANGE", raising=False)
    assert resolve_exchange() == {}
    monkeypatch.setenv("HVD_COMPRESS_EXCHANGE", " delay=1 ")
    made = hvdc.DistributedOptimizer(keras.optimizers.SGD(1.0), compression="int8")
    assert made._hvdc.reducer.settings.delay == 1
    monkeypatch.setenv("HVD_COMPRESS_EXCHANGE", "local_steps=8")
    made = hvdc.DistributedOptimizer(keras.optimizers.SGD(1.0), compression="int8")
    assert made._hvdc.rounds.local_steps == 8
    for given in ({"local_steps": 2}, {"delay": 1}):
        made = hvdc.DistributedOptimizer(keras.optimizers.SGD(1.0), compression="int8", **given)
        settings = made._hvdc.reducer.settings
        assert (settings.local_steps, settings.delay) == (given.get("local_steps"), given.get("delay", 0))
    with pytest.raises(ValueError, match="DistributedGradientTape has no local_steps, use hvdc.LocalSteps"):
        hvdc.DistributedGradientTape(tf.GradientTape())


@pytest.mark.parametrize("text", ["8", "delay", "local_steps=-1", "local_steps=x", "fragments=2"])
def test_what_is_no_exchange_is_said(monkeypatch, text):
    monkeypatch.setenv("HVD_COMPRESS_EXCHANGE", text)
    with pytest.raises(ValueError, match="HVD_COMPRESS_EXCHANGE must be like 'delay=1' or 'local_steps=8', got"):
        resolve_exchange()


@pytest.mark.parametrize("spec", ["auto:local_steps=(1|8)", "auto"])
def test_an_exchange_that_the_script_cannot_have_names_the_variable(monkeypatch, spec):
    monkeypatch.setenv("HVD_COMPRESS_EXCHANGE", "local_steps=8")
    with pytest.raises(ValueError, match="^environment variable HVD_COMPRESS_EXCHANGE, local_steps=8: .*local_steps"):
        hvdc.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=spec)
    with pytest.raises(ValueError, match="^op currently only supports"):
        hvdc.DistributedOptimizer(keras.optimizers.SGD(1.0), compression=spec, op="mean")
