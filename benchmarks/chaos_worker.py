"""One worker of chaos.py's elastic training of the language model. It writes what happens as lines of JSON."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import json
import os
import resource
import signal
import threading
import time
import warnings
import zlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

EPOCH = 50  # steps
KEEP = 2  # saves of the weights, as ResidualCheckpoint keeps of residuals
RATE = 1e-3


class Events:
    """The file of this worker's events."""

    def __init__(self, folder: Path, attempt: int) -> None:
        host, pid = os.environ["HOROVOD_HOSTNAME"], os.getpid()
        self._file = open(folder / f"events-{attempt}-{host}-{pid}.jsonl", "w", buffering=1)  # noqa: SIM115
        self._always = {"attempt": attempt, "host": host, "pid": pid}
        # The driver asks for it where the training seems to hang.
        self._stacks = open(folder / f"stacks-{attempt}-{host}-{pid}.txt", "w")  # noqa: SIM115
        faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True)

    def __call__(self, event: str, **values: Any) -> None:
        self._file.write(json.dumps({"event": event, "t": time.time(), **self._always, **values}) + "\n")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("folder", "checkpoints"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    names = ("attempt", "layers", "width", "context", "commit-every", "save-every", "steps", "training-seed")
    for name in names:
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--step-seconds", type=float, required=True)
    parser.add_argument("--spec", required=True)
    return parser.parse_args()


ARGS = arguments()
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # segmentation faults belong to the plan
ARGS.checkpoints.mkdir(exist_ok=True)
EVENTS = Events(ARGS.folder, ARGS.attempt)
EVENTS("hello")

# The driver must know of this process before these imports, which take seconds.
import horovod.tensorflow as hvd  # noqa: E402
import numpy as np  # noqa: E402
import tasks  # noqa: E402  # which finds the examples
import tensorflow as tf  # noqa: E402
from horovod.common.exceptions import HorovodInternalError  # noqa: E402
from keras_gpt import build_model  # noqa: E402
from tensorflow import keras  # noqa: E402

import hvd_compress as hvdc  # noqa: E402
from hvd_compress.frontends.residuals import states_of  # noqa: E402


def die_if_ordered(moment: str, usual_seconds: float) -> None:
    """Kills this process in a moment, if the driver has ordered its death during `moment`."""
    order = ARGS.folder / f"order-{os.environ['HOROVOD_HOSTNAME']}-{moment}"
    with contextlib.suppress(FileNotFoundError):
        fraction = float(order.read_text())
        order.unlink()
        EVENTS("obeyed", moment=moment)
        timer = threading.Timer(fraction * usual_seconds, os.kill, [os.getpid(), signal.SIGKILL])
        timer.daemon = True
        timer.start()


@cache
def directions(i: int, shape: tuple[int, ...]) -> np.ndarray:
    """The fixed numbers with which the residual of gradient i is weighted in `residual_sum`."""
    return np.random.default_rng(i).normal(size=shape)


def residuals_of(optimizer: Any) -> list[tuple[int, np.ndarray]]:
    """This rank's residuals."""
    states = states_of(optimizer._hvdc.reducer, None)
    return [item for state in states for item in state.tensors.get("residuals", {}).items()]


def residual_sum(optimizer: Any) -> list[float]:
    """A linear function of this rank's residuals, and their squares: added over ranks, they tell if any is lost."""
    total = np.zeros(2)
    for i, residual in residuals_of(optimizer):
        values = residual.astype(np.float64)
        total += [np.sum(directions(i, residual.shape) * values), np.sum(np.square(values))]
    return total.tolist()


def summed(values: list[float], name: str) -> list[float]:
    """The sum of the ranks' values."""
    return hvd.allreduce(tf.constant(values, tf.float64), op=hvd.Sum, name=name).numpy().tolist()


def checksum(arrays: Any) -> int:
    """The crc32 of all arrays, one after the other."""
    value = 0
    for array in arrays:
        value = zlib.crc32(np.ascontiguousarray(array).tobytes(), value)
    return value


class State(hvdc.elastic.KerasState):
    """Tells the driver of each commit and each reset, and dies in one if the driver says so."""

    commit_seconds = 0.05

    def save(self) -> None:
        start = time.time()
        die_if_ordered("commit", self.commit_seconds)
        stop = hvd.rank() == 0 and (ARGS.folder / "stop").exists()
        mine = [*residual_sum(self.optimizer), self.losses, self.batches, float(stop)]
        *self.residual_sum, losses, batches, stop = summed(mine, "chaos.commit")
        self.losses, self.batches = 0.0, 0
        self.step = int(self.optimizer.iterations)
        self.stopping = bool(stop) or 0 < ARGS.steps <= self.step
        super().save()
        self.commit_seconds = time.time() - start
        weights = checksum(self.model.get_weights())
        EVENTS(
            "commit", step=self.step, round=self.round, weights=weights, loss=losses / batches if batches else None,
            rank=hvd.rank(), size=hvd.size(), seconds=self.commit_seconds,
        )  # fmt: skip

    def restore(self) -> None:
        EVENTS("restore", trained=int(self.optimizer.iterations))
        die_if_ordered("reset", 1.0)
        super().restore()


class Watch(keras.callbacks.Callback):
    """Adds up the losses, and makes each step take as long as it would on the emulated accelerator."""

    def __init__(self, state: State) -> None:
        super().__init__()
        self.state, self._total, self._start = state, 0.0, time.time()

    def on_epoch_begin(self, epoch: int, logs: dict | None = None) -> None:
        self._total = 0.0

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        total = logs["loss"] * (batch + 1)  # Keras gives the mean of the epoch
        self.state.losses += total - self._total
        self.state.batches += 1
        self._total = total
        time.sleep(max(0.0, self._start + ARGS.step_seconds - time.time()))
        self._start = time.time()
        EVENTS("step", step=int(self.model.optimizer.iterations))


class Stop(keras.callbacks.Callback):
    """Ends the training on all ranks after the commit that says so."""

    def __init__(self, state: State) -> None:
        super().__init__()
        self.state = state

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        if self.state.stopping:
            self.model.stop_training = True


class Saves(hvdc.callbacks.ResidualCheckpoint):
    """Saves residuals, then the weights. Training goes on if there is no room for them."""

    def on_train_batch_end(self, batch: int, logs: dict | None = None) -> None:
        optimizer, step = self.model.optimizer, int(self.model.optimizer.iterations)
        if step % self.save_freq or hvd.size() == 1:  # a single rank has no residuals to resume with
            return
        total = summed(residual_sum(optimizer), "chaos.save")
        residuals = checksum(residual for _, residual in residuals_of(optimizer))
        ours = {"step": step, "rank": hvd.rank(), "size": hvd.size()}
        EVENTS("save_begins", **ours)
        try:
            self._save()
        except RuntimeError as error:  # the same one on all ranks
            if isinstance(error, HorovodInternalError):
                raise
            EVENTS("save_failed", text=str(error), **ours)
            return
        EVENTS("saved", residuals=residuals, sum=total, **ours)
        if hvd.rank() == 0:
            self._save_weights(step)

    def _save_weights(self, step: int) -> None:
        weights, path = checksum(self.model.get_weights()), weights_path(step)
        part = path.with_name(f"part-{path.name}")
        # First, as the process may be killed between the two.
        EVENTS("saved_weights", step=step, weights=weights)
        try:
            self.model.save_weights(part)
            os.replace(part, path)
        except OSError as error:
            EVENTS("save_failed", text=f"weights: {error}", step=step, rank=0, size=hvd.size())
            part.unlink(missing_ok=True)
            return
        for old in sorted(ARGS.checkpoints.glob("step-*.weights.h5"))[:-KEEP]:
            old.unlink()


def weights_path(step: int) -> Path:
    return ARGS.checkpoints / f"step-{step:07d}.weights.h5"


def resume(state: State) -> None:
    """Loads the newest checkpoint that all ranks can read. A collective call."""
    steps = sorted((int(path.name[5:12]) for path in ARGS.checkpoints.glob("step-*.weights.h5")), reverse=True)
    for step in hvd.broadcast_object(steps, 0, name="chaos.steps"):
        error = load(state, step)
        if not error:
            EVENTS(
                "loaded", step=step, weights=checksum(state.model.get_weights()), rank=hvd.rank(), size=hvd.size(),
                residuals=checksum(residual for _, residual in residuals_of(state.optimizer)),
                sum=summed(residual_sum(state.optimizer), "chaos.loaded"),
            )  # fmt: skip
            return
        EVENTS("refused", step=step, text=error)
        hvdc.elastic.KerasState.restore(state)  # a damaged file may have been read in part


def load(state: State, step: int) -> str:
    """Loads the checkpoint of a step. Returns why it cannot be used, on all ranks; "" if it can."""
    error = ""
    try:
        state.model.load_weights(weights_path(step))
    except Exception as raised:  # HDF5 raises many types for damaged files
        error = f"{weights_path(step).name}: {str(raised).splitlines()[0]}"
    error = next(filter(None, hvd.allgather_object(error, name="chaos.weights")), "")
    if error:
        return error
    residuals, variables = ARGS.checkpoints / "residuals", state.model.trainable_variables
    try:
        loaded = hvdc.load_residuals(state.optimizer, residuals, variables, step)
    except ValueError as raised:  # the same one on all ranks
        return str(raised)
    return "" if loaded == step or hvd.size() == 1 else f"no complete save of residuals of step {step}"


def batches(task: Any, step: int) -> Iterator[tuple[Any, Any]]:
    """The batches of this rank from a step on. Each depends on nothing but seed, step and rank."""
    while True:
        yield next(task.batches(np.random.default_rng([ARGS.training_seed, step, hvd.rank()])))
        step += 1


def main() -> None:
    tf.config.threading.set_intra_op_parallelism_threads(1)
    hvdc.init()
    keras.utils.set_random_seed(ARGS.training_seed)
    task = tasks.gpt(ARGS.context)
    model = build_model(ARGS.layers, ARGS.width, ARGS.context)
    optimizer = hvdc.DistributedOptimizer(keras.optimizers.Adam(RATE), compression=ARGS.spec)
    model.compile(optimizer, task.loss, jit_compile=False)
    state = State(
        model, batch=0, epoch=0, step=0, round=0, losses=0.0, batches=0, residual_sum=[0.0, 0.0], stopping=False,
        resumed=False,
    )  # fmt: skip
    lost: list[str] = []

    def heard(message: Any, *_: Any, **__: Any) -> None:
        if str(message).startswith(("elastic:", "residual checkpoint:")):
            EVENTS("warning", text=str(message))
            lost.extend([str(message)] * (" are lost: " in str(message)))

    warnings.simplefilter("always")
    warnings.showwarning = heard

    @hvdc.elastic.run
    def train(state: State) -> None:
        *now, losses = summed([*residual_sum(optimizer), float(len(lost))], "chaos.synced")
        lost.clear()
        state.round = this_round = hvd.broadcast_object(time.time_ns(), 0, name="chaos.round")
        EVENTS(
            "synced", step=state.step, round=state.round, committed=state.residual_sum, now=now, lost=losses > 0,
            rank=hvd.rank(), size=hvd.size(),
        )  # fmt: skip
        if not state.resumed:
            resume(state)
            state.round = this_round  # a damaged file brings back all attributes
            state.resumed = True
            state.save()
        callbacks = [
            Watch(state),
            Saves(ARGS.checkpoints / "residuals", ARGS.save_every, resume=False),  # `resume` has done it
            hvdc.elastic.UpdateBatchStateCallback(state),
            hvdc.elastic.UpdateEpochStateCallback(state),
            hvdc.elastic.CommitStateCallback(state, ARGS.commit_every),
            Stop(state),
        ]
        data = batches(task, int(optimizer.iterations))
        model.fit(data, steps_per_epoch=EPOCH, epochs=10**6, callbacks=callbacks, verbose=0)

    train(state)
    EVENTS("ended", step=state.step)


if __name__ == "__main__":
    main()
