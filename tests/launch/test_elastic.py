"""Elastic jobs: ranks join, leave and are killed; training goes on, and no residual is lost."""

import csv
import json
import re
import time

import pytest

# Three names of this machine: Horovod takes a host on which a worker died off its list.
HOSTS = ["localhost", "127.0.0.1", "127.1"]

TRAINING = """
import json, os, signal, sys, time, zlib
folder, package, options = sys.argv[1:]
import horovod.tensorflow.keras as hvd, numpy as np, tensorflow as tf
tf.config.threading.set_intra_op_parallelism_threads(1)
keras = __import__(package)
import hvd_compress as hvdc
from hvd_compress.frontends.residuals import states_of

hvd.init()
# A process that joins late has made fewer of them.
others = [hvdc.DistributedOptimizer(keras.optimizers.SGD(0.1))._hvdc for _ in range(hvd.size())]
keras.utils.set_random_seed(hvd.rank())
layers = [keras.layers.Dense(units) for units in (64, 48, 8)]
model = keras.Sequential([keras.layers.Input([32]), *layers])
optimizer = hvdc.DistributedOptimizer(keras.optimizers.SGD(0.02, momentum=0.5), **json.loads(options))
rounds = optimizer._hvdc.rounds
model.compile(optimizer, "mse", metrics=["mae"], jit_compile=False)
random = np.random.default_rng(os.getpid())
x = random.normal(size=[64, 32]).astype(np.float32)
y = x @ np.random.default_rng(0).normal(size=[32, 8]).astype(np.float32)


def mass():
    # A linear function of the residuals, summed over the ranks: the same where their sum is the same.
    total = np.zeros(2)
    for state in states_of(optimizer._hvdc.reducer, None):
        for i, residual in state.tensors.get("residuals", {}).items():
            weights = np.random.default_rng(i).normal(size=residual.shape)
            total += [np.sum(weights * residual), np.sum(np.square(residual, dtype=np.float64))]
    return hvd.allreduce(tf.constant(total), op=hvd.Sum, name="mass").numpy()


def checksum():
    return zlib.crc32(b"".join(np.asarray(w).tobytes() for w in model.get_weights()))


class Watch(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.01)
        if rounds is None:
            state.mass, state.step = mass().tolist(), int(optimizer.iterations)
        elif os.path.exists(f"{folder}/kill-{os.environ['HOROVOD_HOSTNAME']}"):
            _, steps, start = rounds._counts.numpy()
            # In the middle of a round. Its exchange is before the next commit: the others notice it there.
            if (steps - start, batch) == (2, 2):
                os.kill(os.getpid(), signal.SIGKILL)

    def on_epoch_end(self, epoch, logs=None):
        if rounds is not None:  # committed now
            state.mass, state.step = mass().tolist(), int(optimizer.iterations)
            rounds.show_synchronized()
            state.weights = checksum()
        open(f"{folder}/size-{hvd.size()}-after-{state.epoch}", "w").close()
        open(f"{folder}/host-{os.environ['HOROVOD_HOSTNAME']}-{os.getpid()}", "w").close()
        end = hvd.broadcast(tf.constant(os.path.exists(f"{folder}/stop")), 0, name="stop")
        model.stop_training = bool(end)
        print("epoch", state.epoch, hvd.size(), flush=True)


state = hvdc.elastic.KerasState(model, batch=0, epoch=0, mass=[0.0, 0.0], step=0, weights=0)


@hvdc.elastic.run
def train(state):
    now, weights = mass(), hvd.allgather(tf.constant([checksum()], tf.int64), name="weights").numpy()
    if hvd.rank() == 0:
        print("synced", hvd.size(), state.step, *state.mass, *now, flush=True)
        print("weights", state.weights, *weights, flush=True)
    callbacks = [
        Watch(),
        hvdc.elastic.UpdateBatchStateCallback(state),
        hvdc.elastic.UpdateEpochStateCallback(state),
        hvdc.elastic.CommitStateCallback(state, batches_per_commit=5 if rounds is None else 10**6),
    ]
    history = model.fit(x, y, batch_size=8, epochs=10**6, callbacks=callbacks, verbose=0, shuffle=False)
    return history.history["loss"][-1]


loss = train(state)
with open(f"{folder}/ended-{hvd.rank()}.part", "w") as file:
    print(hvd.rank(), hvd.size(), int(optimizer.iterations), checksum(), loss, file=file)
os.rename(file.name, file.name.removesuffix(".part"))
"""


class Hosts:
    """The hosts that horovodrun finds."""

    def __init__(self, folder):
        self._list, self.script = folder / "hosts", folder / "discover.sh"
        self.script.write_text(f"#!/bin/sh\ncat {self._list}\n")
        self.script.chmod(0o755)

    def set(self, hosts):
        part = self._list.with_suffix(".part")
        part.write_text("".join(f"{host}:1\n" for host in hosts))
        part.rename(self._list)


def wait_for_any(folder, pattern, alive, seconds=150):
    deadline = time.time() + seconds
    while not list(folder.glob(pattern)):
        assert time.time() < deadline, f"{pattern} is not there"
        assert alive() or list(folder.glob(pattern)), f"the job ended without {pattern}"
        time.sleep(0.05)


def watched(run):
    """The numbers and the times of the steps that the first two ranks have recorded so far."""
    for rank in range(2):
        with open(run / f"rank-{rank}.csv", encoding="utf-8") as file:
            rows = list(csv.DictReader(line for line in file if line.endswith("\n")))  # the last may be incomplete
        yield [int(row["step"]) for row in rows], [float(row["time"]) for row in rows]


def wait_for_step(run, after, seconds=60):
    """Waits until one of the first two ranks has recorded a step that ended after this time."""
    deadline = time.time() + seconds
    while max((end for _, times in watched(run) for end in times[-1:]), default=0.0) <= after:
        assert time.time() < deadline, "no step is recorded"
        time.sleep(0.05)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "options, package, ending",
    [
        ({"compression": "hybrid:ratio=0.05,bits=4"}, "keras", "killed"),
        ({"compression": "int4", "local_steps": 5, "outer": "nesterov"}, "keras", "killed in a round"),
        pytest.param({"compression": "auto:candidates=(int8|int4)"}, "tf_keras", "removed", marks=pytest.mark.slow),
    ],
    ids=["killed", "killed in a round", "removed"],
)
def test_ranks_join_and_leave(background, tmp_path, options, package, ending):
    hosts = Hosts(tmp_path)
    hosts.set(HOSTS[:2])
    elastic = ["-np", "2", "--min-np", "1", "--max-np", "3", "--host-discovery-script", str(hosts.script)]
    command = ["python", "-c", TRAINING, str(tmp_path), package, json.dumps(options)]
    # In this time a worker that joins has to come up, and so long may it take until all see that one was killed.
    elastic += ["--network-interface", "lo", "--gloo-timeout-seconds", "60"]
    job = background([*elastic, *command], {"HVD_COMPRESS_MONITOR": str(tmp_path / "run")})
    try:
        wait_for_any(tmp_path, "size-2-after-*", job.alive)
        hosts.set(HOSTS)
        wait_for_any(tmp_path, "size-3-after-*", job.alive)
        for path in tmp_path.glob("size-2-*"):
            path.unlink()
        if ending == "killed":
            import psutil

            wait_for_any(tmp_path, f"host-{HOSTS[1]}-*", job.alive)
            (pid,) = [int(path.name.split("-")[-1]) for path in tmp_path.glob(f"host-{HOSTS[1]}-*")]
            psutil.Process(pid).kill()
        elif ending == "killed in a round":
            (tmp_path / f"kill-{HOSTS[1]}").touch()
        else:
            hosts.set([HOSTS[0], HOSTS[2]])
        wait_for_any(tmp_path, "size-2-after-*", job.alive)
        (tmp_path / "stop").touch()
        # Not for horovodrun to end: a worker that has lost another one may wait for Horovod when it exits.
        for rank in range(2):
            wait_for_any(tmp_path, f"ended-{rank}", job.alive)
        # One of the first two was there all the time: it is watched also after both resets. It writes the last steps
        # when its script has ended, which it may not have yet.
        changed = max(path.stat().st_mtime for path in tmp_path.glob("size-3-*"))
        wait_for_step(tmp_path / "run", changed)
    finally:
        result = job.end()
        print(result.stdout[-6000:], result.stderr[-6000:])
    synced = [list(map(float, line.split()[1:])) for line in re.findall(r"synced [^\n]*", result.stdout)]
    assert [int(line[0]) for line in synced] == [2, 3, 2]
    weights = [line.split()[1:] for line in re.findall(r"weights [^\n]*", result.stdout)]
    assert all(len(set(of_ranks)) == 1 for _, *of_ranks in weights), weights
    if "local_steps" in options:
        # When ranks leave or join as planned, the round ends with an exchange. A lost round is discarded.
        synced = synced[1:]
        assert weights[-1][0] == weights[-1][1], weights
    for _, _, committed, committed_squares, now, _ in synced[1:]:
        # The sum's rounding, in float32, of tensors whose elements' squares add up to that.
        assert abs(now - committed) <= 1e-5 * committed_squares**0.5
        assert committed_squares > 0
    ends = [(tmp_path / f"ended-{rank}").read_text().split() for rank in range(2)]
    assert [end[0] for end in ends] == ["0", "1"]
    assert {end[1] for end in ends} == {"2"}
    assert len({(end[2], end[3]) for end in ends}) == 1, ends  # steps, weights
    assert all(float(end[4]) < 10 for end in ends), ends
    if ending != "removed":
        assert "a worker was lost, or its host did not answer for HOROVOD_GLOO_TIMEOUT_SECONDS" in result.stderr
    for numbers, _ in watched(tmp_path / "run"):
        assert numbers == sorted(set(numbers))


LOST = """
import os, pathlib, signal, sys, time
folder = pathlib.Path(sys.argv[1])
import horovod.tensorflow.keras as hvd, keras, numpy as np
import hvd_compress as hvdc

(folder / f"here-{os.environ['HOROVOD_HOSTNAME']}").touch()
while len(list(folder.glob("here-*"))) < 3:
    time.sleep(0.02)
if os.environ["HOROVOD_RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
hvdc.init()
model = keras.Sequential([keras.layers.Input([32]), keras.layers.Dense(64), keras.layers.Dense(8)])
model.compile(hvdc.DistributedOptimizer(keras.optimizers.SGD(0.1), compression="int8"), "mse", jit_compile=False)


@hvdc.elastic.run
def train(state):
    model.fit(np.ones([64, 32]), np.ones([64, 8]), 8, verbose=0)


train(hvdc.elastic.KerasState(model, batch=0, epoch=0))
print("ended", hvd.rank(), hvd.size(), flush=True)
"""


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_worker_is_lost_while_horovod_connects_the_ranks(background, tmp_path):
    """The Horovod that `hvd-compress` builds survives it; the stock one ends all workers."""
    hosts = Hosts(tmp_path)
    hosts.set(HOSTS)
    elastic = ["-np", "3", "--min-np", "2", "--host-discovery-script", str(hosts.script), "--network-interface", "lo"]
    job = background([*elastic, "--gloo-timeout-seconds", "15", "python", "-c", LOST, str(tmp_path)])
    result = job.wait(300)
    assert sorted(re.findall(r"ended (\d) (\d)", result.stdout)) == [("0", "2"), ("1", "2")]
    assert "a rank was lost while Horovod connected the ranks" in result.stderr
