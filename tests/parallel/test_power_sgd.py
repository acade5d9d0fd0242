"""powersgd between ranks, step by step against the paper's algorithm in NumPy."""

import horovod.tensorflow as hvd
import introspect
import numpy as np
import pytest
import tensorflow as tf
from marks import slow

import hvd_compress as hvdc
from hvd_compress.kernels import subspace

# The gradient of (2, 5, 8) is a matrix of 10 x 8; that of (30, 2) goes as it is if the rank is 2 or more.
SHAPES = [(3, 3, 8, 16), (20, 30), (20, 30), (30, 2), (17,), (2, 5, 8)]
SIDES = {0: (72, 16), 1: (20, 30), 2: (20, 30), 3: (30, 2), 5: (10, 8)}
SMALLEST = 40  # what is not compressed: (17,)


def draw(rank, step, scale=1.0):
    """Matrices with a few large singular values that stay from step to step, and noise."""
    fixed, noise = np.random.default_rng(rank), np.random.default_rng([rank, step])
    found = []
    for shape in SHAPES:
        rows = int(np.prod(shape[:-1]))
        steady = fixed.standard_normal((rows, 3)) @ fixed.standard_normal((3, shape[-1]))
        found.append((scale * (steady.reshape(shape) + noise.standard_normal(shape))).astype(np.float32))
    return found


class Simulation:
    """Vogels et al. 2019, Algorithms 1 and 2, of all ranks at once, in float64."""

    def __init__(self, ranks, spec, decay=1.0):
        self.compressor = hvdc.Compression.parse(spec)
        self.ranks, self.decay = ranks, decay
        members = [i for i in reversed(range(len(SHAPES))) if SHAPES[i] != (17,)]
        self.members = members
        self.right = self.cut(self.compressor.initial_factors([SHAPES[i] for i in members]).numpy())
        self.kept = {i: np.zeros((ranks, *sides)) for i, sides in SIDES.items()}

    def cut(self, factors):
        """The right factors, columns x rank, in float64, as they lie end to end: those of one shape together."""
        found, number = {}, self.compressor.rank
        for sides in dict.fromkeys(SIDES[i] for i in self.members):
            rows, columns = sides
            for i in self.members:
                if SIDES[i] == sides and number * (rows + columns) < rows * columns:
                    found[i], factors = factors[: number * columns], factors[number * columns :]
        assert factors.size == 0
        return {i: f.reshape(number, -1).T.astype(np.float64) for i, f in found.items()}

    def step(self, gradients):
        """What all ranks get of `gradients`, a list for each rank."""
        found = [np.mean([g[i].astype(np.float64) for g in gradients], 0) for i in range(len(SHAPES))]
        for i, right in self.right.items():
            brought = [g[i].reshape(SIDES[i]) + self.decay * old for g, old in zip(gradients, self.kept[i])]
            left, _ = np.linalg.qr(np.mean([m @ right for m in brought], 0))
            own = [m.T @ left for m in brought]
            self.right[i] = np.mean(own, 0)
            self.kept[i] = np.array([m - left @ q.T for m, q in zip(brought, own)])
            found[i] = (left @ self.right[i].T).reshape(SHAPES[i])
        return found


class Run:
    """The reducer's steps with such gradients."""

    def __init__(self, spec="powersgd:rank=2", **settings):
        self.reducer = introspect.new_reducer(spec, min_compress_size=SMALLEST, **settings)
        self.variables = [tf.Variable(tf.zeros(shape)) for shape in SHAPES]
        self._step = self._reduce

    def _reduce(self, *gradients):
        return self.reducer(list(gradients), self.variables)

    def shared(self):
        """Traced at once, so that many tests can begin with it as if it were new."""
        self._step = tf.function(self._reduce, autograph=False)
        self.rewind = introspect.rewinder(self._step, *map(tf.constant, draw(0, 0)))
        return self

    def step(self, gradients):
        return [t.numpy() for t in self._step(*map(tf.constant, gradients))]

    @property
    def plan(self):
        return introspect.plans_of(self.reducer)[-1]

    def residuals(self):
        return introspect.residuals(self.plan)

    def state(self):
        """Everything that is kept, as bytes."""
        kept = [*introspect.residual_variables(self.plan), *introspect.factor_variables(self.plan)]
        return [variable.numpy().tobytes() for variable in kept]


@pytest.fixture(scope="module")
def shared():
    return Run().shared()


@pytest.fixture
def run(shared):
    """Of rank 2, with no other settings."""
    shared.rewind()
    return shared


def close(mine, theirs, tolerance=1e-5):
    for a, b in zip(mine, theirs):
        assert np.linalg.norm(a - b) <= tolerance * np.linalg.norm(b)


def check_against_the_paper(run, spec, size, rank, gather, steps=12, **settings):
    """Each step from the state that the ranks have: rounding grows from step to step."""
    simulation = Simulation(size, spec, settings.get("residual_decay", 1.0))
    predivide = settings.get("gradient_predivide_factor", 1.0)  # of which residuals are kept
    for step in range(steps):
        gradients = [draw(r, step) for r in range(size)]
        close(run.step(gradients[rank]), simulation.step(gradients))
        everyone = [predivide * gather(residual) for residual in run.residuals()]
        right = simulation.cut(introspect.factor_variables(run.plan)[0].numpy())
        for i in simulation.right:
            kept = everyone[i].reshape(size, *SIDES[i])
            close(kept, simulation.kept[i])
            own, theirs = right[i], simulation.right[i]
            cosines = (own * theirs).sum(0) / np.linalg.norm(own, axis=0) / np.linalg.norm(theirs, axis=0)
            np.testing.assert_allclose(np.abs(cosines), 1.0, atol=1e-6)
            simulation.right[i], simulation.kept[i] = own, kept


@pytest.mark.parametrize("number", [2, *slow(1, 9)])
def test_each_step_is_that_of_the_paper(number, rank, size, gather, run):
    spec = f"powersgd:rank={number}"
    check_against_the_paper(run if number == 2 else Run(spec), spec, size, rank, gather)


@pytest.mark.np4
def test_each_step_is_that_of_the_paper_between_four(rank, size, gather, run):
    check_against_the_paper(run, "powersgd:rank=2", size, rank, gather)


def test_decay_and_predivide(rank, size, gather):
    settings = {"residual_decay": 0.9, "gradient_predivide_factor": 4.0}
    check_against_the_paper(Run(**settings), "powersgd:rank=2", size, rank, gather, 5, **settings)


def test_groups_cross_one_by_one(rank, size):
    run = Run(groups=2)
    for step in range(2):
        run.step(draw(rank, step))
    assert [len(group.factor_variables) for group in introspect.groups(run.plan)] == [1, 1]
    assert introspect.names_of_shared_state(run.plan) == ["factors_0", "factors_1", "step"]


def test_sum_is_as_many_averages(rank, size, run):
    average, total = run, Run(op=hvd.Sum)
    for step in range(3):
        mean = average.step(draw(rank, step))
        close(total.step(draw(rank, step)), [size * m for m in mean])


def test_without_residual_nothing_is_kept_but_the_factors(rank, size):
    run, simulation = Run(error_feedback=False), Simulation(size, "powersgd:rank=2", 0.0)
    for step in range(5):
        gradients = [draw(r, step) for r in range(size)]
        close(run.step(gradients[rank]), simulation.step(gradients))
    assert not introspect.residual_variables(run.plan)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_mass_is_conserved(dtype, rank, size, gather, run):
    run, old = run if dtype == "float32" else Run(residual_dtype=dtype), [np.zeros(shape) for shape in SHAPES]
    rounding = 1e-6 if dtype == "float32" else 2.0**-8
    for step in range(4):
        gradients = draw(rank, step)
        outputs = run.step(gradients)
        new = run.residuals()
        for output in outputs:
            everyone = gather(output)
            assert (everyone == everyone[0]).all()
        for g, before, output, after in zip(gradients, old, outputs, new):
            brought, left = gather(g + before).sum(0), gather(after).sum(0)
            limit = rounding * max(np.abs(gather(g + before)).max(), np.abs(left).max()) * size
            np.testing.assert_allclose(size * output + left, brought, atol=3 * limit)
        old = new


@pytest.mark.parametrize("where", [0, 3, 4])  # in a matrix, in one that goes as it is, in a vector
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_reaches_all_and_leaves_no_trace(where, bad, rank, size, run):
    for step in [0, 1, 3]:
        untouched = run.step(draw(rank, step))
    run.rewind()
    for step in range(2):
        run.step(draw(rank, step))
    before = run.state()
    gradients = draw(rank, 9)
    if rank == size - 1:
        gradients[where].reshape(-1)[-1] = bad
    outputs = run.step(gradients)
    assert not np.isfinite(outputs[where]).any() or where == 4
    assert not np.isfinite(outputs[where].reshape(-1)[-1])
    if where != 4:
        assert all(np.isnan(outputs[i]).all() for i in range(len(SHAPES)) if i != 4)
    assert run.state() == before
    for mine, theirs in zip(run.step(draw(rank, 3)), untouched):
        np.testing.assert_array_equal(mine, theirs)


def test_zeros_change_nothing(rank, run):
    """Frozen layers, and steps without a gradient: the factors stay for the next one."""
    fresh = run.step(draw(rank, 0))
    run.rewind()
    zeros = [np.zeros(shape, np.float32) for shape in SHAPES]
    for output in run.step(zeros):
        np.testing.assert_array_equal(output, 0.0)
    for mine, theirs in zip(run.step(draw(rank, 0)), fresh):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.parametrize("number", [2, 4])
def test_matrices_of_lower_rank_are_exact(number, rank, size, run):
    """What is left of the factors is neither noise nor a part twice."""
    u, v = np.random.default_rng(0).standard_normal((2, 40, 1))
    run = run if number == 2 else Run(f"powersgd:rank={number}")
    for _ in range(3):
        gradients = [np.zeros(shape, np.float32) for shape in SHAPES]
        gradients[1] = ((rank + 1.0) * u[:20] @ v[:30].T).astype(np.float32)
        outputs = run.step(gradients)
        close([outputs[1]], [(size + 1) / 2 * u[:20] @ v[:30].T])
    assert max(np.abs(r).max() for r in run.residuals()) < 1e-5


def collectives(graph):
    kinds = [op.type for op in graph.get_operations() if op.type.startswith("Horovod")]
    return {kind: kinds.count(kind) for kind in kinds}


@pytest.mark.parametrize("shapes", [SHAPES, [(40, 50 + i % 2) for i in range(12)]])
def test_two_allreduces_for_the_whole_model(shapes):
    """And one for what is not compressed, if there is any."""
    reducer = introspect.new_reducer("powersgd:rank=2", bucket_bytes=4096, min_compress_size=SMALLEST)
    variables = [tf.Variable(tf.zeros(shape)) for shape in shapes]
    function = tf.function(lambda: reducer([v.value() for v in variables], variables), autograph=False)
    dense = {"HorovodGroupedAllreduce": 1} if shapes is SHAPES else {}
    assert collectives(function.get_concrete_function().graph) == {"HorovodAllreduce": 2, **dense}


def test_bytes_sent_are_those_of_the_factors(rank, size, run):
    run.step(draw(rank, 0))
    factors = 2 * sum(sum(sides) for i, sides in SIDES.items() if i != 3)
    sent, plain = introspect.bytes_sent(run.plan)
    each = 2 * (size - 1) / size * 4
    made_with = 4 * 2 * 2 * 2 + 1  # two matrices of rank x rank for each of the four, and a count
    assert sent == round(each * (factors + 60 + made_with)) + round(each * 17)
    assert plain == round(each * sum(map(np.prod, SHAPES)))
    (report,) = introspect.report_of(run.reducer).buckets
    assert "powersgd:rank=2" in str(report)


@pytest.mark.parametrize("number", [2, 9])
def test_ranks_that_round_differently_get_the_same(number, rank, gather, monkeypatch):
    """As two processes on one GPU did."""
    exact = subspace.orthonormal

    def rounded(factors):
        return [[(1.0 + 1e-6 * rank) * tensor for tensor in tensors] for tensors in exact(factors)]

    monkeypatch.setattr(subspace, "orthonormal", rounded)
    run = Run(f"powersgd:rank={number}")
    for step in range(3):
        for tensor in run.step(draw(rank, step)):
            everyone = gather(tensor)
            assert (everyone == everyone[0]).all()


def test_a_new_plan_takes_factors_and_residuals_over(rank, size, run):
    """As after an elastic reset."""
    for step in range(2):
        run.step(draw(rank, step))
    state, new = introspect.saved_state(run.plan), Run()
    new.step(draw(rank, 0))  # what it has is forgotten
    assert "factors_0" in state.replicated_state
    introspect.restart_with(new.reducer, [state])
    for mine, theirs in zip(new.step(draw(rank, 2)), run.step(draw(rank, 2))):
        np.testing.assert_array_equal(mine, theirs)


@pytest.mark.np4
def test_process_sets_have_factors_of_their_own(process_sets, rank, size):
    own = process_sets[rank % 2]
    run, simulation = Run(process_set=own), Simulation(2, "powersgd:rank=2")
    for step in range(3):
        gradients = [draw(r, step) for r in own.ranks]
        close(run.step(gradients[own.rank()]), simulation.step(gradients))


def test_a_rank_alone_sends_nothing(process_sets, rank, size):
    if size != 2:
        pytest.skip("sets of one rank")
    gradients = draw(rank, 0)
    for mine, theirs in zip(Run(process_set=process_sets[rank]).step(gradients), gradients):
        np.testing.assert_array_equal(mine, theirs)


def test_other_compressors_for_some_variables(rank, size):
    """A policy: two matrices with powersgd, the others with int8; and the other way round from the environment."""
    variables = [tf.Variable(tf.zeros((40, 30)), name=name) for name in ("a", "b", "c")]
    gradients = [tf.constant(np.random.default_rng([rank, i]).standard_normal((40, 30)), tf.float32) for i in range(3)]
    policy = (("[ab]*", hvdc.Compression.powersgd(rank=1)),)
    reducer = introspect.new_reducer("int8", policy=policy, min_compress_size=0)
    outputs = reducer(gradients, variables)
    assert [np.linalg.matrix_rank(o.numpy(), 1e-4) for o in outputs] == [1, 1, 30]
    specs = sorted(group.compressor.spec for group in introspect.groups(introspect.plan_of(reducer)))
    assert specs == ["int8", "powersgd:rank=1"]


def test_stateless_allreduce_is_one_step_from_the_start(rank, size):
    compressor = hvdc.Compression.powersgd(2)
    gradients = [draw(r, 0) for r in range(size)]
    outputs = hvdc.grouped_allreduce([tf.constant(g) for g in gradients[rank]], compression=compressor, name="low")
    start = compressor.initial_factors(SHAPES).numpy().astype(np.float64)
    for i in (0, 1, 2, 5):
        rows, columns = SIDES[i]
        right, start = start[: 2 * columns].reshape(2, -1).T, start[2 * columns :]
        mean = np.mean([g[i].reshape(rows, columns) for g in gradients], 0)
        left, _ = np.linalg.qr(mean @ right)
        close([outputs[i].numpy().reshape(rows, columns)], [left @ left.T @ mean])
    close(
        [outputs[3].numpy(), outputs[4].numpy()],
        [np.mean([g[i] for g in gradients], 0) for i in (3, 4)],
        1e-6,
    )


def test_a_tape_trains(rank, monkeypatch):
    """With the compressor from the environment."""
    monkeypatch.setenv("HVD_COMPRESS", "powersgd:rank=2")
    rng = np.random.default_rng(0)
    goal = rng.standard_normal((40, 30)).astype(np.float32)  # of full rank: needs the residual
    x = np.random.default_rng([1, rank]).standard_normal((200, 40)).astype(np.float32)
    weight = tf.Variable(np.zeros((40, 30), np.float32), name="weight")
    losses = []

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.matmul(x, weight) - x @ goal) ** 2)
        (gradient,) = hvdc.DistributedGradientTape(tape).gradient(loss, [weight])
        weight.assign_sub(0.3 * gradient)
        return loss

    for _ in range(200):
        losses.append(float(step()))
    assert losses[-1] < 0.05 * losses[0]
