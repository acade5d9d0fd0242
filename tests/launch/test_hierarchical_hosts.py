"""`hvdc.init()` under horovodrun: what it finds, what it says, and that training goes on with it."""

import pytest

pytestmark = pytest.mark.timeout(400)

SCRIPT = """
import sys
import time

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
import hvd_compress as hvdc
from hvd_compress.exchange import hosts

hvdc.init()
hvdc.init()  # once more: nothing happens
found = hosts.current()
levels = "flat" if found is None else f"{found.count}x{found.workers} {found.local.ranks} {found.across.ranks}"
variable = tf.Variable(tf.zeros([64, 64]))
try:
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(variable) * (hvd.rank() + 1.0)
    tape = hvdc.DistributedGradientTape(tape, compression="int8", hierarchical=sys.argv[1] == "True" or "auto")
    gradient = tape.gradient(loss, variable).numpy()
    assert (gradient == gradient[0, 0]).all()
    told = f"{gradient[0, 0]:.2f}"
except ValueError as error:
    told = str(error)
if found is not None:
    # A host that is late in what concerns it alone is waited for.
    time.sleep(2 * (hvd.rank() < 2))
    hvd.allreduce(tf.zeros([]), process_set=found.local)
print("told", hvd.rank(), levels, told, flush=True)
"""


@pytest.fixture
def run(background, tmp_path):
    """Runs the script on hosts, names of this machine; returns what each rank told, and our lines on standard error."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)

    def on(hosts, hierarchical="auto"):
        ranks = sum(int(host.partition(":")[2]) for host in hosts.split(","))
        job = background(["-np", str(ranks), "-H", hosts, "python", str(script), hierarchical])
        result = job.wait(300)
        assert result.returncode == 0
        told = sorted(line.partition("told ")[2] for line in result.stdout.splitlines() if "told " in line)
        assert len(told) == ranks
        lines = [line for line in result.stderr.splitlines() if "hvd_compress: " in line]
        return told, [line for line in lines if "; sent per step: " not in line]  # the summary at the end

    return on


@pytest.mark.slow
def test_two_hosts_of_two_workers(run):
    told, lines = run("localhost:2,127.0.0.1:2", "True")
    places = ["[0, 1] [0, 2]", "[0, 1] [1, 3]", "[2, 3] [0, 2]", "[2, 3] [1, 3]"]
    assert told == [f"{rank} 2x2 {place} 2.50" for rank, place in enumerate(places)]
    assert not lines


@pytest.mark.slow
def test_uneven_hosts_stay_flat_and_say_so_once(run):
    told, lines = run("localhost:2,127.0.0.1:1")
    assert told == [f"{rank} flat 2.00" for rank in range(3)]
    (line,) = lines
    assert line.startswith("[0]") and line.endswith("stays flat: hosts have different numbers of workers")


@pytest.mark.slow
def test_on_one_host_only_who_asks_for_two_levels_hears_of_it(run):
    told, lines = run("localhost:2", "True")
    why = "hvdc.init() in place of hvd.init(): there is one host, with 2 workers"
    assert len(told) == 2 and all(" flat " in line and line.endswith(why) for line in told)
    assert not lines
