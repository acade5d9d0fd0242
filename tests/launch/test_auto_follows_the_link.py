"""Does `auto` notice when the link gets slower in the middle of training?"""

import re
import sys
import threading
import time

import pytest
from conftest import ROOT
from test_netlab import needs_root

sys.path.insert(0, str(ROOT / "benchmarks"))

TRAINING = """
import os, sys, time
import horovod.tensorflow as hvd, tensorflow as tf
tf.config.threading.set_intra_op_parallelism_threads(1)
hvd.init()
import hvd_compress as hvdc


class Slow(hvdc.Compressor):  # sends 8 bits in place of 32, and sleeps while it compresses
    def compress(self, tensor):
        scale = tf.reduce_max(tf.abs(tensor)) / 127
        [scale] = tf.py_function(lambda scale: (time.sleep(0.1), [scale])[1], [scale], [tf.float32])
        scale.set_shape([])
        return (tf.cast(tf.round(tf.math.divide_no_nan(tensor, scale)), tf.int8), scale), tensor.shape

    def decompress(self, payload, ctx):
        codes, scale = payload
        return tf.reshape(tf.cast(codes, tf.float32) * scale, ctx)


COMPRESSION = hvdc.Compression.auto(candidates=["none", Slow()])
variable = tf.Variable(tf.zeros([1000, 2000]))
loss_of = tf.random.stateless_normal([1000, 2000], [hvd.rank(), 0])

@tf.function
def step():
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(variable * loss_of)
    tape = hvdc.DistributedGradientTape(tape, compression=COMPRESSION)
    return tape.gradient(loss, [variable])[0]

for i in range(60):
    if i == 31:  # all ranks wait until the link is slow
        while hvd.rank() == 0 and not os.path.exists(sys.argv[1]):
            time.sleep(0.02)
        hvd.allreduce(tf.constant(0.0), name="wait")
    step()
    if hvd.rank() == 0:
        print("step", i, flush=True)
"""


# A bucket has 2 MB: the first link takes far less than the sleep, and the second one half a second.
@needs_root
@pytest.mark.slow
@pytest.mark.timeout(620)
def test_a_slower_link_is_followed_within_20_steps(tmp_path):
    from netlab import Netlab

    script, log, slow = tmp_path / "training.py", tmp_path / "log", tmp_path / "slow"
    script.write_text(TRAINING)
    with Netlab(2, "unshaped") as net:

        def slow_down():
            while not (log.exists() and "step 30\n" in log.read_text().replace("\r", "")):
                time.sleep(0.02)
            net.set_rate("30mbit")
            slow.touch()

        threading.Thread(target=slow_down, daemon=True).start()
        with log.open("w") as out:
            result = net.run([sys.executable, str(script), str(slow)], stdout=out, stderr=out, timeout=600, cwd=ROOT)
    text = log.read_text()
    assert result.returncode == 0, text[-3000:]
    lines = [line for line in text.splitlines() if re.search(r">:(step \d+$|hvd_compress: bucket)", line)]
    at = next(i for i, line in enumerate(lines) if line.endswith(":step 30"))
    later = lines[at:]
    switch = next((i for i, line in enumerate(later) if "none -> Slow; predicted " in line), None)
    assert switch is not None, text[-3000:]
    steps = sum(":step " in line for line in later[:switch])
    assert steps <= 20, text[-3000:]
    # And stays there.
    assert not any("Slow -> none" in line for line in later[switch:]), text[-3000:]
