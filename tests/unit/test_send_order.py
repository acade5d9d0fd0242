"""In which order TensorFlow encodes and sends, with one thread for all operations."""

import json
import os
import subprocess
import sys

SCRIPT = """
import json, sys
import numpy as np
import tensorflow as tf
tf.config.threading.set_inter_op_parallelism_threads(1)
from hvd_compress.engine import clock
from hvd_compress.exchange import send_order

BUCKETS = 4
order = []

def noted(what, b, x):
    order.append(f"{what}{b}")
    return x

def note(what, b, x):
    return tf.numpy_function(lambda x: noted(what, b, x), [x], tf.float32, stateful=False)

def make(options):
    @tf.function(autograph=False)
    def step(x, index):
        after, sent = [], []
        for b in range(BUCKETS):
            def exchange():
                encoded = note("encode", b, tf.identity(x))
                time = clock.stamp([encoded]) if "stamps" in options else encoded
                outgoing = send_order.send_first(tf.ensure_shape(encoded, [8]))
                go_on = send_order.next_can_start(time)
                return note("send", b, outgoing), tf.cast(tf.reshape(go_on, [-1])[0], tf.float32)
            with tf.control_dependencies(after):
                x = tf.identity(x)
            if "cond" in options:
                found, early = tf.switch_case(index, [exchange, lambda: (x, tf.constant(0.0))])
            else:
                found, early = exchange()
            sent.append(found)
            after = [tf.identity(early)]
        return tf.add_n(sent)
    return step

for options in sys.argv[1:]:
    step = make(options)
    for turn in range(150):  # after some steps TensorFlow takes what is quick for cheap
        order.clear()
        step(tf.ones([8]), tf.constant(0))
        if turn in (0, 149):
            print(json.dumps(order))
"""
IN_TURN = [f"{what}{b}" for b in range(4) for what in ("encode", "send")]


def test_each_bucket_is_sent_before_the_next_one_is_encoded():
    options = ["", "stamps", "cond", "stamps cond"]
    found = subprocess.run(
        [sys.executable, "-c", SCRIPT, *options],
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        check=True,
    )
    orders = [json.loads(line) for line in found.stdout.splitlines()]
    assert orders == [IN_TURN] * 2 * len(options)
