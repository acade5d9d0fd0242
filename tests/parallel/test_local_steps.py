"""Local steps against an independent simulation in NumPy of all ranks, with different data on each."""

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf
from tensorflow import keras

import hvd_compress as hvdc

pytestmark = pytest.mark.usefixtures("fixed_costs")
STEPS, ROUND = 60, 5
LR, MOMENTUM = 0.1, 0.5  # of the inner optimizer
ROWS, COLUMNS = 40, 64
RATIO = 0.25
TOPK = f"topk:ratio={RATIO}"


def starts():
    """The initial matrix, bias and statistic."""
    rng = np.random.default_rng(5)
    return [rng.standard_normal(shape).astype(np.float32) for shape in ((ROWS, COLUMNS), (COLUMNS,), (COLUMNS,))]


def targets(rank):
    """What the matrix, the bias and the statistic are drawn to in each step: float32 [STEPS, ...]."""
    rng = np.random.default_rng(100 + rank)
    shapes = ((ROWS, COLUMNS), (COLUMNS,), (COLUMNS,))
    return [(1.0 + rank + rng.standard_normal((STEPS, *shape))).astype(np.float32) for shape in shapes]


# The simulation


def kept(x, lossy):
    """What a rank sends of x: everything, or the elements of a matrix of largest magnitude."""
    if not lossy or x.ndim < 2:
        return x
    k = int(np.ceil(RATIO * x.size - 1e-9))
    result = np.zeros(x.size)
    largest = np.argsort(-np.abs(x.ravel()), kind="stable")[:k]
    result[largest] = x.ravel()[largest]
    return result.reshape(x.shape)


class Simulation:
    """All ranks in float64: `local[rank][i]` are the values of matrix, bias and statistic."""

    def __init__(self, ranks, parts, outer, lossy, alpha=0.0, warmup=0):
        self.local = [[x.astype(np.float64) for x in starts()] for _ in range(ranks)]
        self.velocity = [[np.zeros(x.shape) for x in starts()[:2]] for _ in range(ranks)]
        self.synchronized = [x.astype(np.float64) for x in starts()]
        self.momentum = [np.zeros(x.shape) for x in starts()]
        self.residual = [[np.zeros(x.shape) for x in starts()] for _ in range(ranks)]
        self.targets = [targets(rank) for rank in range(ranks)]
        # Fragments: lists of (variable, rows).
        self.parts, self.outer, self.lossy, self.alpha, self.warmup = parts, outer, lossy, alpha, warmup
        self.steps = self.in_round = 0

    def movements(self, fragment):
        return [[self.synchronized[i][rows] - local[i][rows] for i, rows in fragment] for local in self.local]

    def exchange(self, fragment, movements, alpha, only_average=False):
        ranks = len(self.local)
        for p, (i, rows) in enumerate(fragment):
            total = np.zeros_like(movements[0][p])
            for residual, movement in zip(self.residual, movements):
                x = movement[p] + residual[i][rows]
                sent = kept(x, self.lossy)
                residual[i][rows] = x - sent
                total += sent
            delta = total / ranks
            if self.outer == "average" or only_average or i == 2:
                self.synchronized[i][rows] -= delta
            else:
                lr, factor = self.outer
                self.momentum[i][rows] = factor * self.momentum[i][rows] + delta
                self.synchronized[i][rows] -= lr * (delta + factor * self.momentum[i][rows])
            for local in self.local:
                local[i][rows] = alpha * local[i][rows] + (1 - alpha) * self.synchronized[i][rows]

    def step(self):
        before = self.movements(self.parts[self.in_round]) if len(self.parts) > 1 else None
        for rank, local in enumerate(self.local):
            for i in range(2):
                gradient = local[i] - self.targets[rank][i][self.steps]
                self.velocity[rank][i] = MOMENTUM * self.velocity[rank][i] - LR * gradient
                local[i] += self.velocity[rank][i]
            local[2] += 0.1 * (self.targets[rank][2][self.steps] - local[2])
        self.steps += 1
        if self.steps <= self.warmup:
            for fragment in self.parts:
                self.exchange(fragment, self.movements(fragment), 0.0, only_average=True)
            return
        if len(self.parts) > 1:
            self.exchange(self.parts[self.in_round], before, self.alpha)
        elif self.in_round == ROUND - 1:
            self.exchange(self.parts[0], self.movements(self.parts[0]), 0.0)
        self.in_round = (self.in_round + 1) % ROUND


WHOLE = [[(i, slice(None)) for i in range(3)]]


def streamed():
    """Fragments of ROUND: rows belong where their middle is; a vector is never divided."""
    parts, total, offset = [[] for _ in range(ROUND)], ROWS * COLUMNS + 2 * COLUMNS, 0
    by_row = [int((row + 0.5) * COLUMNS / total * ROUND) for row in range(ROWS)]
    for f in range(ROUND):
        rows = [row for row in range(ROWS) if by_row[row] == f]
        if rows:
            parts[f].append((0, slice(rows[0], rows[-1] + 1)))
    for i in (1, 2):
        offset = ROWS * COLUMNS + (i - 1) * COLUMNS
        parts[int((offset + COLUMNS / 2) / total * ROUND)].append((i, slice(None)))
    return parts


# Training


class Training:
    """The same training with the package, in a custom loop."""

    def __init__(self, rank, **options):
        self.variables = [tf.Variable(x, name=name) for x, name in zip(starts(), ("kernel", "bias", "mean"))]
        self.variables[2]._trainable = False
        trained = self.variables[:2]
        self._optimizer = keras.optimizers.SGD(LR, momentum=MOMENTUM)
        self._optimizer.build(trained)
        self.sync = hvdc.LocalSteps(trained, averaged=self.variables[2:], **options)
        data = [tf.constant(x) for x in targets(rank)]
        self.traces = 0

        @tf.function(autograph=False)
        def step(t):
            self.traces += 1
            gradients = [v - x[t] for v, x in zip(trained, data)]
            self._optimizer.apply_gradients(list(zip(gradients, trained)))
            self.variables[2].assign_add(0.1 * (data[2][t] - self.variables[2]))
            self.sync()

        self._step = step

    def step(self, t):
        self._step(tf.constant(t))
        return [variable.numpy() for variable in self.variables]


NESTEROV = {"outer": "nesterov:lr=0.7,momentum=0.9"}
STREAM = {"fragments": "stream"}
CASES = {
    "average": ({}, {"outer": "average"}),
    "nesterov": (NESTEROV, {"outer": (0.7, 0.9)}),
    "nesterov after a warm-up": ({**NESTEROV, "local_warmup": 3}, {"outer": (0.7, 0.9), "warmup": 3}),
    "stream": (STREAM, {"outer": "average"}),
    "stream with nesterov, mixed, after a warm-up": (
        {**STREAM, **NESTEROV, "alpha": 0.5, "local_warmup": 3},
        {"outer": (0.7, 0.9), "alpha": 0.5, "warmup": 3},
    ),
}


@pytest.mark.parametrize("lossy", [False, True], ids=["none", "topk"])
@pytest.mark.parametrize("case", CASES)
def test_every_step_equals_the_simulation_of_all_ranks(rank, size, case, lossy):
    options, simulated = CASES[case]
    parts = streamed() if "fragments" in options else WHOLE
    simulation = Simulation(size, parts, lossy=lossy, **simulated)
    training = Training(rank, local_steps=ROUND, compression=TOPK if lossy else "none", min_compress_size=256, **options)
    for t in range(STEPS):
        values = training.step(t)
        simulation.step()
        for value, expected in zip(values, simulation.local[rank]):
            np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-5, err_msg=f"step {t}")
    assert training.traces == 1
    with training.sync.synchronized():
        for variable, expected in zip(training.variables, simulation.synchronized):
            np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-5, atol=1e-5)
    for variable, expected in zip(training.variables, simulation.local[rank]):
        np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-5, atol=1e-5)
