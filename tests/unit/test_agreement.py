"""The one line that says in what ranks differ."""

import dataclasses

import horovod.tensorflow as hvd
import pytest
import tensorflow as tf
from tensorflow import keras

import hvd_compress as hvdc
from hvd_compress.engine import agreement
from hvd_compress.engine.settings import Settings
from hvd_compress.frontends.keras import optimizer_state

NONE, INT8 = hvdc.Compression.none, hvdc.Compression.int8
# Values of each setting that is not its default, and others that it needs.
OTHER = {
    "compressor": {"compressor": INT8},
    "name": {"name": "other"},
    "op": {"op": hvd.Sum},
    "gradient_predivide_factor": {"gradient_predivide_factor": 2.0},
    "groups": {"groups": [[tf.Variable(0.0)]]},
    "sparse_as_dense": {"sparse_as_dense": True},
    "scale_local_gradients": {"scale_local_gradients": False},
    "min_compress_size": {"min_compress_size": 3},
    "bucket_bytes": {"bucket_bytes": 3},
    "error_feedback": {"error_feedback": True},
    "residual_decay": {"residual_decay": 0.5},
    "residual_dtype": {"residual_dtype": "bfloat16"},
    "momentum_correction": {"compressor": hvdc.Compression.topk(0.1), "momentum_correction": 0.5},
    "policy": {"policy": (("*", INT8),)},
    "on_nonfinite": {"on_nonfinite": "skip"},
    "hierarchical": {"hierarchical": False},
    "backward_passes_per_step": {"backward_passes_per_step": 2},
    "average_aggregated_gradients": {"average_aggregated_gradients": True},
    "delay": {"delay": 1},
    "delay_warmup": {"delay": 1, "delay_warmup": 2},
    "adaptive": {"adaptive": False},
    "normalized": {"normalized": True},
    "local_steps": {"local_steps": 2},
    "outer": {"local_steps": 2, "outer": "nesterov"},
    "fragments": {"local_steps": 2, "fragments": "stream"},
    "alpha": {"local_steps": 2, "fragments": "stream", "alpha": 0.25},
    "local_warmup": {"local_steps": 2, "local_warmup": 3},
}
# Devices may differ, and those that disagree on the process set do not find each other.
NOT_COMPARED = {"device_dense", "device_sparse", "process_set"}


@pytest.mark.parametrize("field", sorted({field.name for field in dataclasses.fields(Settings)} - NOT_COMPARED))
def test_every_setting_is_compared(field):
    needed = {name: value for name, value in OTHER[field].items() if name != field}
    both = [Settings(**{"compressor": NONE, **needed}), Settings(**{"compressor": NONE, **OTHER[field]})]
    variables = [tf.Variable(0.0), *(OTHER[field].get("groups") or [[]])[0]]
    error = agreement.difference([agreement.of_plan("a", each, variables, variables) for each in both], [0, 1])
    assert error.startswith(f"ranks disagree on {'compression' if field == 'compressor' else field}: rank 0 has ")


def test_agreeing_ranks_have_no_difference():
    assert agreement.difference([{"a": "1"}] * 3, [0, 1, 2]) is None


@pytest.mark.parametrize(
    ("values", "who"),
    [
        ("xy", "rank 0 has x, rank 1 has y"),
        ("xyyy", "rank 0 has x, ranks 1-3 have y"),
        ("xyxyy", "ranks 0, 2 have x, ranks 1, 3-4 have y"),
        ("xyz", "rank 0 has x, rank 1 has y, rank 2 has z"),
    ],
)
def test_who_has_what(values, who):
    facts = [{"same": "1", "a": value, "later": value} for value in values]
    expected = f"ranks disagree on a: {who}; start all ranks with the same code and environment"
    assert agreement.difference(facts, range(len(values))) == expected


def test_what_a_rank_does_not_know_differs():
    """Another version may compare other things."""
    facts = [{"a": "1"}, {"a": "1", "new": "2"}]
    assert "disagree on new: rank 4 has nothing, rank 6 has 2" in agreement.difference(facts, [4, 6])


def test_packed_facts_of_different_lengths_come_back():
    facts = [{"a": "\u00e9" * i, "b": str(i)} for i in range(5)]
    joined = tf.concat([agreement._packed(each) for each in facts], 0)
    assert agreement._unpacked(joined.numpy().tobytes()) == facts


def test_what_ranks_compare_of_an_optimizer(monkeypatch):
    optimizer = keras.optimizers.AdamW(0.1, weight_decay=0.05)
    facts = optimizer_state.facts_of(optimizer)
    assert facts["the optimizer"] == "AdamW" and facts["the optimizer's weight_decay"] == "0.05"
    assert "the optimizer's learning_rate" not in facts
    monkeypatch.setenv("HOROVOD_ELASTIC", "1")  # a rank that joins has not seen what callbacks have set
    of_elastic = optimizer_state.facts_of(optimizer)
    assert set(of_elastic) <= {"the optimizer", "the optimizer's gradient_accumulation_steps"}
    assert of_elastic["the optimizer"] == "AdamW"
