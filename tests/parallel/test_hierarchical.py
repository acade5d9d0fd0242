"""The exchange in two levels, between two hosts of two workers, against simulations and sums in NumPy."""

import horovod.tensorflow as hvd
import introspect
import numpy as np
import pytest
import tensorflow as tf
from marks import slow

import hvd_compress as hvdc
from hvd_compress.auto import flat_or_hierarchical as levels
from hvd_compress.common import determinism
from hvd_compress.cost import Calibration, KernelCost, Link
from hvd_compress.cost.calibration import ACROSS, COLLECTIVES, INSIDE, Levels
from hvd_compress.engine.settings import Settings

pytestmark = pytest.mark.np4

SHAPES = [(100, 333), (512, 130), (300, 700), (7, 11)]


class HalfPrecision(hvdc.Compressor):
    """A user's own."""

    def compress(self, tensor):
        return tf.cast(tensor, tf.float16), tensor.shape

    def decompress(self, payload, ctx):
        return tf.reshape(tf.cast(payload, tf.float32), ctx)


def new_reducer(compressor, **settings):
    return introspect.new_reducer(compressor, **{"hierarchical": True, **settings})


def new_variables():
    return [tf.Variable(tf.zeros(shape)) for shape in SHAPES]


def draw(rank, step, shapes=SHAPES):
    rng = np.random.default_rng([rank, step])
    return [rng.standard_normal(shape).astype(np.float32) for shape in shapes]


def residuals_of(reducer):
    """Every gradient's residual, or zeros."""
    return introspect.residuals(introspect.plan_of(reducer))


def top(x, ratio):
    kept = np.argsort(-np.abs(x), kind="stable")[: int(np.ceil(ratio * x.size))]
    return np.where(np.isin(np.arange(x.size), kept), x, np.float32(0))


def signs(x):
    rows = x.reshape(-1, 1024)
    means = np.abs(rows.astype(np.float64)).mean(1, keepdims=True)
    return (np.where(rows < 0, -1.0, 1.0) * means).astype(np.float32).ravel()


def halves(x):
    return x.astype(np.float16).astype(np.float32)


@pytest.mark.parametrize(
    "compressor, lossy",
    [("topk:ratio=0.05", lambda x: top(x, 0.05)), ("onebit", signs), (HalfPrecision(), halves)],
    ids=["topk", "onebit", "half"],
)
def test_each_step_is_that_of_the_simulation(compressor, lossy, two_hosts, rank, size, gather):
    """Ranks 0 and 1 are on one host, 2 and 3 on the other, and chunks 0 and 1 those of even and odd ranks."""
    shape, half, decay = (2, 2**13), 2**13, 0.5
    reducer = new_reducer(compressor, residual_decay=decay)
    variable = tf.Variable(tf.zeros(shape))
    kept = {(host, chunk): np.zeros(half, np.float32) for host in range(2) for chunk in range(2)}
    for step in range(12):
        gradients = [draw(r, step, [shape])[0].reshape(2, half) for r in range(size)]
        (output,) = reducer([tf.constant(gradients[rank].reshape(shape))], [variable])
        expected = np.zeros([2, half], np.float32)
        for (host, chunk), left in kept.items():
            x = gradients[2 * host][chunk] + gradients[2 * host + 1][chunk] + np.float32(decay) * left
            sent = lossy(x)
            kept[host, chunk] = x - sent
            expected[chunk] += sent / 4
        np.testing.assert_allclose(output.numpy().reshape(2, half), expected, atol=1e-5)
        everyone = gather(output)
        assert (everyone == everyone[0]).all()
        mine = residuals_of(reducer)[0].reshape(2, half)
        np.testing.assert_allclose(mine[rank % 2], kept[rank // 2, rank % 2], atol=1e-5)
        assert not mine[1 - rank % 2].any()
    (group,) = introspect.groups(introspect.plan_of(reducer))
    assert list(group.shapes) == [(half,)] * 2


@pytest.fixture(params=["allgather", "scatter_reduce"])
def between(request, monkeypatch):
    """Both patterns between the hosts; of more than two the second one is usual."""
    if request.param == "scatter_reduce":
        introspect.prefer_scatter_reduce(monkeypatch, between_two=True)
    return request.param


def check_mass(reducer, gather, size, old, steps=3, scale=1.0, variables=None):
    """What comes in equals what goes out and what stays, each step, on ranks that all get the same."""
    variables = variables or new_variables()
    for step in range(steps):
        outputs = reducer([tf.constant(g) for g in draw(hvd.rank(), step)], variables)
        for output in outputs:
            everyone = gather(output)
            assert (everyone == everyone[0]).all()
        left = [gather(r).astype(np.float64).sum(0) for r in residuals_of(reducer)]
        came = [sum(parts).astype(np.float64) for parts in zip(*(draw(r, step) for r in range(size)))]
        for i, output in enumerate(outputs):
            np.testing.assert_allclose(scale * size * output.numpy() + left[i], came[i] + old[i], atol=3e-5)
        old = left
    return old


@pytest.mark.parametrize("compressor", ["int8", "topk:ratio=0.01", *slow(HalfPrecision())], ids=str)
def test_mass_is_conserved(compressor, between, two_hosts, gather, size):
    reducer = new_reducer(compressor, bucket_bytes=2**19)
    left = check_mass(reducer, gather, size, [np.zeros(shape) for shape in SHAPES])
    plan = introspect.plan_of(reducer)
    buckets = introspect.buckets(plan)
    assert len(buckets) > 1
    for bucket in buckets:
        assert introspect.crosses_in_two_levels(plan, bucket.compressor, bucket.shapes)
    feeds_back = introspect.keeps_residuals(plan, buckets[0].compressor)
    assert (max(np.abs(r).max() for r in left) > 0) == feeds_back


def test_a_schedule_conserves_mass(between, two_hosts, gather, size):
    """Also through a stage that is exchanged flat, as no compression is."""
    stages = {0: "int8", 2: "none", 3: "topk:ratio=0.01", 5: "int8"}
    reducer = new_reducer(hvdc.Compression.schedule(stages), bucket_bytes=2**19)
    old, largest, variables = [np.zeros(shape) for shape in SHAPES], [], new_variables()
    for _ in range(7):
        old = check_mass(reducer, gather, size, old, steps=1, variables=variables)
        largest.append(max(np.abs(r).max() for r in old))
    assert largest[2] == 0.0 and min(largest[:2] + largest[3:]) > 0.0
    plan = introspect.plan_of(reducer)
    bucket = introspect.buckets(plan)[0]
    hierarchical = [
        introspect.crosses_in_two_levels(plan, stage, bucket.shapes) for stage in introspect.stages_of(reducer)
    ]
    assert hierarchical == [True, False, True, True]


def test_what_another_pattern_has_left_is_sent(two_hosts, gather, size):
    """A checkpoint of a flat exchange: every rank has residuals of all chunks."""
    before = new_reducer("topk:ratio=0.01", hierarchical=False)
    nothing = [np.zeros(shape) for shape in SHAPES]
    old = check_mass(before, gather, size, nothing)
    reducer = new_reducer("topk:ratio=0.01", bucket_bytes=2**19)
    introspect.restore(reducer, [introspect.saved_state(introspect.plan_of(before))])
    old = check_mass(reducer, gather, size, old)
    # And back.
    after = new_reducer("topk:ratio=0.01", hierarchical=False)
    introspect.restore(after, [introspect.saved_state(introspect.plan_of(reducer))])
    check_mass(after, gather, size, old)


def flat(arrays):
    return np.concatenate([np.float64(array).ravel() for array in arrays])


def other_shares(plan, host):
    """For each bucket, the residual variables of what the other worker of this host carries between the hosts."""
    found = []
    for bucket in introspect.buckets(plan):
        residuals, half = bucket.residual_variables, len(bucket.chunks) // 2
        found.append(residuals[half:] if host.rank() == 0 else residuals[:half])
    return found


def is_zero(variables):
    return not any(variable.numpy().any() for variable in variables)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_residuals_of_other_shares_stay_zero_and_are_not_touched(dtype, two_hosts, gather, size):
    """In the steady state; what lies there all the same is sent as soon as it is said to be there."""
    decay, exact = 0.5, {"float32": 1e-4, "bfloat16": 0.5}[dtype]
    reducer = new_reducer("topk:ratio=0.01", bucket_bytes=2**19, residual_dtype=dtype, residual_decay=decay)
    variables = new_variables()
    came = np.sum([flat(draw(r, 0)) for r in range(size)], 0)

    def step():
        return size * flat(reducer([tf.constant(g) for g in draw(hvd.rank(), 0)], variables))

    def owed():
        return gather(flat(residuals_of(reducer))).sum(0)

    step()
    plan = introspect.plan_of(reducer)
    others = other_shares(plan, two_hosts.local)
    assert len(others) > 1
    for _ in range(3):
        before = owed()
        np.testing.assert_allclose(step() + owed(), came + decay * before, atol=exact)
        flags = introspect.other_share_variables(plan)
        for bucket, residuals, flag in zip(introspect.buckets(plan), others, flags):
            assert is_zero(residuals)
            assert not is_zero(bucket.residual_variables)
            assert not flag.numpy()

    before = owed()
    for variable in others[1]:
        variable.assign(tf.fill(variable.shape, tf.cast(64.0, variable.dtype)))
    strays = owed() - before
    assert strays.any()
    # They are not even looked at,
    np.testing.assert_allclose(step() + owed() - strays, came + decay * before, atol=exact)
    assert all((variable.numpy() == 64).all() for variable in others[1])
    # until it is said that they are there.
    before = owed()
    flags[1].assign(True)
    np.testing.assert_allclose(step() + owed(), came + decay * before, atol=exact)
    assert all(map(is_zero, others))
    assert not flags[1].numpy()


def test_each_step_may_cross_in_another_pattern(two_hosts, tmp_path, monkeypatch, gather, size):
    """`auto` with a candidate in one level and another in two, all buckets alike and mixed."""
    path = tmp_path / "link.json"
    calibration(1e9, 1e8).save(path)
    monkeypatch.setenv("HVD_COMPRESS_CALIBRATION", str(path))
    candidates = "auto:candidates=(int8|topk:ratio=0.01|none)"
    reducer = new_reducer(candidates, hierarchical="auto", bucket_bytes=2**19)
    variables = new_variables()
    old = [np.zeros(shape) for shape in SHAPES]
    old = check_mass(reducer, gather, size, old, steps=1, variables=variables)
    plan = introspect.plan_of(reducer)
    assert introspect.one_level_compressors(plan) == ["topk:ratio=0.01"]
    group = introspect.groups(plan)[0]
    in_two = {c.spec for c in group.compressor.candidates if introspect.crosses_in_two_levels(plan, c, group.shapes)}
    assert in_two - {"none"} == {"int8"}
    two, one, none = 0, 1, 2  # levels of these candidates
    for first, rest in [(two, two), (one, one), (two, two), (two, one), (one, two), (one, one), (none, two)]:
        choice = [first] + [rest] * (len(introspect.buckets(plan)) - 1)
        introspect.force_next_step(plan, choice)
        old = check_mass(reducer, gather, size, old, steps=1, variables=variables)
        for b, residuals in enumerate(other_shares(plan, two_hosts.local)):
            assert is_zero(residuals) == (choice[b] != one)
            assert introspect.other_share_variables(plan)[b].numpy() == (choice[b] == one)


@pytest.mark.parametrize("hierarchical", [*slow(True), "auto"])
def test_the_whole_model_in_one_level_between_buckets_in_two(
    hierarchical, two_hosts, tmp_path, monkeypatch, gather, size
):
    """powersgd among the candidates of `auto` leaves every rank something of all chunks."""
    path = tmp_path / "link.json"
    calibration(1e9, 1e8).save(path)
    monkeypatch.setenv("HVD_COMPRESS_CALIBRATION", str(path))
    candidates = "auto:candidates=(int8|powersgd:rank=2)"
    reducer = new_reducer(candidates, hierarchical=hierarchical, bucket_bytes=2**19)
    variables = new_variables()
    old = check_mass(reducer, gather, size, [np.zeros(s) for s in SHAPES], steps=1, variables=variables)
    plan = introspect.plan_of(reducer)
    for choice in (1, 1, 0, 0, 1, 0):
        introspect.force_next_step(plan, [choice] * len(introspect.buckets(plan)))
        old = check_mass(reducer, gather, size, old, steps=1, variables=variables)
        for b, residuals in enumerate(other_shares(plan, two_hosts.local)):
            assert is_zero(residuals) == (choice == 0)
            assert introspect.other_share_variables(plan)[b].numpy() == (choice == 1)
    sent, plain = introspect.bytes_sent(plan)
    assert 0 < sent < plain


def test_a_restore_in_the_middle_and_a_step_that_is_not_kept(two_hosts, gather, size):
    """What a flat exchange has left is not lost where two levels have been used already, nor in a step with NaN."""
    nothing = [np.zeros(shape) for shape in SHAPES]
    before = new_reducer("topk:ratio=0.01", hierarchical=False)
    old = check_mass(before, gather, size, nothing)
    reducer, variables = new_reducer("topk:ratio=0.01", bucket_bytes=2**19), new_variables()
    check_mass(reducer, gather, size, nothing, variables=variables)
    others = other_shares(introspect.plan_of(reducer), two_hosts.local)
    assert all(map(is_zero, others))
    introspect.restore(reducer, [introspect.saved_state(introspect.plan_of(before))])
    assert not any(map(is_zero, others))
    broken = reducer([tf.fill(shape, np.nan) for shape in SHAPES], variables)
    assert all(np.isnan(output).all() for output in broken)
    assert not any(map(is_zero, others))
    check_mass(reducer, gather, size, old, variables=variables)
    assert all(map(is_zero, others))


def test_sum_and_predivision(two_hosts, gather, size):
    nothing = [np.zeros(shape) for shape in SHAPES]
    check_mass(new_reducer("hybrid:ratio=0.05,bits=4", op=hvd.Sum), gather, size, nothing, scale=1 / size)
    for divided, usual in zip(
        new_reducer("quantize:bits=8,rounding=stochastic", gradient_predivide_factor=2.0)(
            list(map(tf.constant, draw(hvd.rank(), 0))), [tf.Variable(tf.zeros(s)) for s in SHAPES]
        ),
        [np.mean([draw(r, 0)[i] for r in range(size)], axis=0) for i in range(len(SHAPES))],
    ):
        np.testing.assert_allclose(divided, usual, atol=0.04)


@pytest.mark.parametrize("spec", ["int4", "bf16"])
def test_nan_reaches_all_and_leaves_no_trace(spec, between, two_hosts, rank, size):
    reducer = new_reducer(spec, groups=1, residual_dtype="bfloat16")
    variables = [tf.Variable(tf.zeros(s)) for s in SHAPES]
    reducer(list(map(tf.constant, draw(rank, 0))), variables)
    before = residuals_of(reducer)
    gradients = draw(rank, 1)
    for bad in range(size):
        for place in (0, -1):
            broken = [g.copy() for g in gradients]
            if rank == bad:
                broken[2].flat[place] = np.nan if place else np.inf
            outputs = reducer(list(map(tf.constant, broken)), variables)
            assert np.isnan(outputs[2].numpy()).all()
            for old, new in zip(before, residuals_of(reducer)):
                np.testing.assert_array_equal(old, new)
    assert all(np.isfinite(g).all() for g in reducer(list(map(tf.constant, gradients)), variables))


@pytest.mark.parametrize("spec", ["randomk:ratio=0.1", "block_sparse:ratio=0.1,block=2"])
def test_what_has_no_second_level_stays_flat(spec, two_hosts, gather, size):
    reducer = new_reducer(spec)
    check_mass(reducer, gather, size, [np.zeros(shape) for shape in SHAPES])
    plan = introspect.plan_of(reducer)
    assert not any(
        introspect.crosses_in_two_levels(plan, group.compressor, group.shapes) for group in introspect.groups(plan)
    )


def test_without_hosts_it_says_so(rank, process_sets, monkeypatch):
    variables, gradients = [tf.Variable(tf.zeros([64, 64]))], [tf.ones([64, 64])]
    with pytest.raises(
        ValueError, match="hierarchical=True needs .*hvdc.init\\(\\) was not called in place of hvd.init"
    ):
        new_reducer("int8")(gradients, variables)
    flat = new_reducer("int8", hierarchical="auto")
    flat(gradients, variables)
    assert not introspect.knows_hosts(introspect.plan_of(flat))
    with pytest.raises(ValueError, match="needs the global process set: leave process_set out"):
        new_reducer("int8", process_set=process_sets[rank % 2])


def test_sets_that_horovod_does_not_know_any_more_are_not_used(two_hosts, monkeypatch):
    assert introspect.hosts_now() is two_hosts
    stranger = hvd.ProcessSet(two_hosts.local.ranks)
    stranger.process_set_id = two_hosts.across.process_set_id
    introspect.set_hosts(monkeypatch, stranger, two_hosts.across)
    assert introspect.hosts_now() is None


def calibration(inside, across):
    """Of the same kernels, and links of so many bytes per second."""

    def link(rate):
        return Link(1e-5, 1.0 / rate)

    specs = ("none", "int8", "topk:ratio=0.01", "powersgd:rank=2")
    kernels = {spec: KernelCost(1e-5, 1e-10, 1e-11, 1e-11) for spec in specs}
    both = Levels(2, 2, dict.fromkeys(INSIDE, link(inside)), dict.fromkeys(ACROSS, link(across / 2)))
    return Calibration(4, dict.fromkeys(COLLECTIVES, link(across)), kernels, {}, both)


@pytest.mark.parametrize(
    "inside, across, two", [(1e10, 1e7, {"int8", "topk:ratio=0.01"}), (1e9, 1e8, {"int8"}), (1e8, 1e9, set())]
)
def test_the_faster_way_is_chosen(inside, across, two, two_hosts, rank, capfd):
    int8, topk, summed = map(hvdc.Compression.parse, ["int8", "topk:ratio=0.01", "none"])
    # Whatever the others believe, rank 0's numbers decide.
    own = calibration(inside, across) if rank == 0 else calibration(1.0, 1.0)
    buckets = [[(2**20,)] * 4] * 2
    flat = levels.flat_compressors([(c, buckets) for c in (int8, topk, summed)], own, Settings(int8), two_hosts)
    assert {"int8", "topk:ratio=0.01"} - {c.spec for c in flat} == two
    line = [line for line in capfd.readouterr().err.splitlines() if "between 2 hosts of 2 workers" in line]
    assert len(line) == (rank == 0)


def test_of_a_calibration_without_levels_nothing_is_concluded(two_hosts, rank, capfd):
    old = calibration(1e10, 1e7)
    old = Calibration(old.ranks, old.links, old.kernels)
    int8 = hvdc.Compression.int8
    settings = Settings(int8)
    assert levels.flat_compressors([(int8, [[(2**20,)] * 4])], old, settings, two_hosts) == [int8]
    assert ("make it anew" in capfd.readouterr().err) == (rank == 0)
    with pytest.raises(ValueError, match="was not made between 2 hosts of 2 workers after hvdc.init"):
        levels.check(old, two_hosts)


def test_where_operations_are_deterministic_no_times_decide(two_hosts, rank, monkeypatch):
    monkeypatch.setattr(determinism, "is_enabled", lambda: True)
    measured = introspect.collect_calibrations(monkeypatch)
    reducer = new_reducer("int8", hierarchical="auto")
    reducer(list(map(tf.constant, draw(rank, 0))), [tf.Variable(tf.zeros(s)) for s in SHAPES])
    assert not measured and not introspect.one_level_compressors(introspect.plan_of(reducer))
    assert introspect.knows_hosts(introspect.plan_of(reducer))


def test_links_are_measured_and_decide(two_hosts, rank, size, capfd, tmp_path, monkeypatch):
    measured = introspect.collect_calibrations(monkeypatch)
    reducer = new_reducer("int8", hierarchical="auto")
    reducer(list(map(tf.constant, draw(rank, 0))), [tf.Variable(tf.zeros(s)) for s in SHAPES])
    assert ("predicted" in capfd.readouterr().err) == (rank == 0)
    flat = hvd.allgather_object(introspect.one_level_compressors(introspect.plan_of(reducer)))
    assert flat == [flat[0]] * size

    (found,) = measured
    texts = hvd.allgather_object(str(found))
    assert texts == [str(found)] * size
    assert (found.levels.hosts, found.levels.workers) == (2, 2)
    assert all(link.alpha + link.beta > 0 for link in [*found.levels.inside.values(), *found.levels.across.values()])
    found.save(tmp_path / "link.json")
    assert Calibration.load(tmp_path / "link.json") == found
    predicted = [found.model().predict("int8", size, "two_level").total for size in (2**16, 2**20, 2**24)]
    assert 0 < predicted[0] < predicted[1] < predicted[2]


@pytest.mark.parametrize("hierarchical", [True, False])
@pytest.mark.parametrize("spec", ["int8", "none", "topk:ratio=0.05"])
def test_the_monitor_counts_the_bytes_that_leave_a_host(spec, hierarchical, two_hosts, rank):
    reducer = introspect.new_reducer(spec, watched=True, hierarchical=hierarchical)
    variables = new_variables()
    for t in range(2):
        reducer([tf.constant(g) for g in draw(rank, t)], variables)
    plan = introspect.plan_of(reducer)
    steps, (sent, stock) = introspect.recorded_steps(plan), introspect.bytes_sent(plan)
    assert steps.bytes[-1] == pytest.approx(sent, abs=64)  # a bucket counts its own rounding
    assert steps.buckets.uncompressed_bytes[-1].sum() == pytest.approx(stock, abs=64)
