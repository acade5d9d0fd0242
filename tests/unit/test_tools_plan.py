"""`hvd-compress plan`: its numbers against sums by hand, its output, its exit status."""

import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import reference
import tensorflow as tf
import tensorflow.experimental.numpy as tnp
from click.testing import CliRunner

from hvd_compress import formats
from hvd_compress.auto import choices, policy
from hvd_compress.compressors.namespace import Compression
from hvd_compress.cost import Calibration, KernelCost, Link
from hvd_compress.cost.defaults import CPU
from hvd_compress.exchange import volume
from hvd_compress.formats.auto import CANDIDATES
from hvd_compress.tools import advice, bench, cli, options, prediction
from hvd_compress.tools.models import MODELS, of_size
from hvd_compress.tools.network import Network
from hvd_compress.tools.other_steps import other_steps
from hvd_compress.tools.prediction import noise_lost
from hvd_compress.tools.workload import Workload

ROOT = Path(__file__).resolve().parents[2]
PLAN = ["plan", "--params", "25.6M", "--ranks", "8,16", "--bandwidth", "10gbit", "--backward", "120ms"]


def invoke(*arguments):
    return CliRunner().invoke(cli.main, list(arguments))


def test_no_compression_by_hand():
    # Four equal matrices of 4 MB: four buckets, each ready after another quarter of the backward pass.
    work = Workload(((1024, 1024),) * 4, backward=0.04, rest=0.01)
    found = prediction.forecast("none", work, Network(1e9, 1e-4), 4)
    each = 2 * 3 * 1e-4 + 2 * 3 / 4 * 4 * 2**20 * 8e-9
    assert [size for size, _ in found.chosen] == [4 * 2**20] * 4
    assert found.exchange == pytest.approx(4 * each)
    assert found.step == pytest.approx(0.01 + reference.queue([0.01, 0.02, 0.03, 0.04], [each] * 4))
    assert found.exposed == pytest.approx(found.step - 0.05)
    assert found.sent == found.plain == round(1.5 * 4 * 4 * 2**20)
    # On a fast link all but the last bucket hide.
    fast = prediction.forecast("none", work, Network(100e9, 0.0), 4)
    assert fast.step == pytest.approx(0.05 + 1.5 * 4 * 2**20 * 8e-11)


def test_other_steps_by_hand():
    # One matrix of 4 MB takes 4.2 s on this link, and a fragment of a quarter 1.05 s. Training takes 1 s.
    work, network = Workload(((1024, 1024),), backward=0.75, rest=0.25), Network(8e6, 0.0)
    steps = {step.setting: step for step in other_steps(work, network, 2, ["none"], [4])}
    exchange, fragment = 4 * 2**20 * 1e-6, 2**20 * 1e-6
    assert steps[""].step == pytest.approx(1.0 + exchange)  # nothing hides: its only bucket is complete at the end
    assert steps["delay=1"].step == pytest.approx(exchange)
    assert steps["local_steps=4"].step == pytest.approx(1.0 + exchange / 4)
    assert steps["local_steps=4"].sent == 2**20
    stream = steps['local_steps=4, fragments="stream"']
    assert stream.step == pytest.approx(fragment, rel=1e-3) and stream.computing == pytest.approx(1 / 1.05, rel=1e-2)
    assert steps["local_steps=4"].progress == stream.progress == pytest.approx(4**-0.07)
    # What the processor does is not hidden.
    work = Workload(((1024, 1024),), backward=10.0)
    (delayed,) = (step for step in other_steps(work, network, 2, ["int8"], []) if step.setting == "delay=1")
    codec = prediction.forecast("int8", work, network, 2)
    assert delayed.step == pytest.approx(10.0 + codec.encode + codec.decode) and delayed.step > 10.0
    assert [step.setting for step in other_steps(work, network, 2, ["powersgd:rank=2"], [])] == [""]


def test_local_steps_are_predicted_where_they_are_named():
    few = ["plan", "--params", "1M", "--ranks", "2,4", "--bandwidth", "20mbit", "--latency", "60ms"]
    result = invoke(*few, "--backward", "70ms", "--local-steps", "8,30")
    assert result.exit_code == 0 and result.output.count("exchanging less often") == 2
    assert 'local_steps=30, fragments="stream"' in result.output
    # Both tables say the same of the same step, and one of the compressors can be delayed.
    case, steps = (json.loads(invoke(*few, "--backward", "70ms", "--delay", "--json").output)[key][0] for key in
                   ("cases", "other_steps"))  # fmt: skip
    per_progress = {step["compressor"]: step["per_progress"] for step in steps if not step["setting"]}
    assert case["best"] in per_progress and "delay=1" in {step["setting"] for step in steps}
    of_case = {each["compressor"]: each["training"] for each in case["compressors"]}
    for spec, seconds in per_progress.items():
        assert case["compressors"][0]["step"] / seconds == pytest.approx(of_case[spec])
    assert len(per_progress) == 3
    found = json.loads(invoke(*few, "--backward", "70ms", "-c", "int4", "--local-steps", "8", "--json").output)
    assert {step["compressor"] for step in found["other_steps"][1]} == {"none", "int4"}
    assert "other_steps" not in json.loads(invoke(*few, "--json").output)
    assert "--local-steps needs --backward or --forward" in invoke(*few, "--local-steps", "8").output
    assert "local steps start from 2" in invoke(*few, "--backward", "70ms", "--local-steps", "1").output


def test_a_compressor_by_hand():
    # One matrix and one bias, which is not compressed and crosses before the last bucket.
    work = Workload(((256, 256), (256,)), backward=0.01)
    found = prediction.forecast("int8", work, Network(1e9, 1e-4), 2)
    assert found.chosen == ((1024, "none"), (2**18, "int8"))
    payload = 2**16 + 2**16 // 256 * 8
    cost = CPU.kernels["quantize"]
    dense = 2 * 1e-4 + 1024 * 8e-9
    wire = 1e-4 + payload * 8e-9
    encode = cost.call + 2**18 * cost.encode
    decode = cost.call + 2**18 * (cost.decode + 2 * cost.decode_rank)
    assert found.wire == pytest.approx(dense + wire)
    assert (found.encode, found.decode) == (pytest.approx(encode), pytest.approx(decode))
    ready = [0.01 * 256 / (2**16 + 256), 0.01]  # byte by byte, the last layer first
    assert found.step == pytest.approx(reference.queue(ready, [dense, encode + wire + decode]))
    assert found.sent == 1024 + payload // 64 * 64 + 64


def test_buckets_are_those_of_training():
    import horovod.tensorflow as hvd

    from hvd_compress.engine.model_layout import model_layout
    from hvd_compress.engine.plan import Plan
    from hvd_compress.engine.selector import FixedSelector
    from hvd_compress.engine.settings import Settings
    from hvd_compress.engine.state import new_state
    from hvd_compress.engine.transforms import Transform

    class Set(hvd.ProcessSet):
        def size(self):
            return len(self.ranks)

    shapes = [(700, 1000), (1000,), (1000, 3000), (3000,), (3000, 300), (300,)]
    variables = [tf.zeros(shape) for shape in shapes]
    for spec in (
        "none",
        "int4",
        "topk:ratio=0.01",
        "randomk:ratio=0.01",
        "block_sparse:ratio=0.1,block=4",
        "powersgd:rank=2",
    ):
        for ranks in (2, 4, 8):
            settings = Settings(Compression.parse(spec), process_set=Set(range(ranks)), bucket_bytes=2**22)
            layout = model_layout(settings, variables, variables)
            selectors = [FixedSelector(layout.group_of(b).compressor) for b in range(len(layout.buckets))]
            plan = Plan("p", settings, layout, new_state("p", settings, layout), selectors, Transform())
            found = prediction.forecast(spec, Workload(tuple(shapes), bucket_bytes=2**22), Network(1e9), ranks)
            assert (found.sent, found.plain) == plan.bytes_sent()
            expected = [4 * tensors.numel for tensors in layout.uncompressed] + [
                4 * sum(map(math.prod, layout.shapes_of(b))) for b in range(len(layout.buckets))
            ]
            assert sorted(size for size, _ in found.chosen) == sorted(expected)


def test_only_the_first_bucket_has_the_burst():
    work = Workload(((1024, 1024),) * 4)

    def step(burst):
        link = Link(1e-4, 8e-9, burst=burst)
        links = {name: link for name in ("allreduce", "allgather", "alltoall")}
        return prediction.forecast("none", work, Network(1e9, 1e-4, measured=links), 4).step

    assert step(0.0) - step(1e6) == pytest.approx(1e6 * 8e-9)
    assert step(0.0) - step(1e9) == pytest.approx(1.5 * 4 * 2**20 * 8e-9)


def test_messages_on_their_way_hide_the_next_bucket_s_encoding():
    shapes = ((2**10, 2**10),) * 4
    slow, fast = (
        prediction.forecast("int8", Workload(shapes, bucket_bytes=2**22), Network(1e9, latency), 2)
        for latency in (1.0, 0.0)
    )
    count = len(slow.chosen)
    assert count > 1
    encodes = [CPU.kernels["quantize"].call + nbytes * CPU.kernels["quantize"].encode for nbytes, _ in slow.chosen]
    assert slow.encode == pytest.approx(sum(encodes))
    # All but the first bucket's hide behind a second of latency, none behind nothing.
    assert slow.step == pytest.approx(fast.step + count * 1.0 - sum(encodes[1:]))
    assert fast.step == pytest.approx(fast.encode + fast.wire + fast.decode)
    assert slow.exchange == pytest.approx(slow.step)


@pytest.mark.parametrize("buckets", [1, 2, 7])
def test_the_queue_is_that_of_auto(buckets):
    waits, exchange = np.random.default_rng(buckets).exponential(1.0, (2, 50, buckets))
    found = choices.makespan(np, waits, exchange)
    theirs = choices.makespan(tnp, tf.constant(waits, tf.float32), tf.constant(exchange, tf.float32))
    np.testing.assert_allclose(found, theirs, rtol=1e-5)
    by_hand = [reference.queue_after(waits[i], exchange[i]) for i in range(50)]
    np.testing.assert_allclose(found, by_hand, rtol=1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_the_choice_is_that_of_auto(seed):
    random = np.random.default_rng(seed)
    b = int(random.integers(1, 9))
    seconds = random.exponential(1.0, (b, 4))
    waits = random.exponential(0.5, b)
    lost = np.array([0.0, 1e-4, 0.01, 0.92 if seed % 2 else 0.995])
    progress = np.array([1.0, 1.0, 0.99, 0.4 if seed % 2 else 0.2])
    nbytes = random.integers(1, 25, b) * 1e6
    plain, rest = [True, False, False, False], random.exponential(0.5)
    found = prediction.best(plain, waits, seconds, nbytes, rest, progress, lost)

    def f32(x):
        return tf.constant(x, tf.float32)

    costs = policy.Costs(f32(seconds), *(tf.zeros([b, 4]) for _ in range(3)))
    state = policy.initial(tf.zeros([b], tf.int32), 4)._replace(waits=f32(waits), rest=f32(rest))
    rules, value = policy.Rules(plain, [False] * 4, 0.02), policy.Value(f32(progress), f32(lost))
    theirs, _ = policy.best(rules, tf.constant([True] * 4), state, costs, value, f32(nbytes))
    np.testing.assert_array_equal(found, theirs)


@pytest.mark.parametrize("backward", [0.0, 0.12, 1.0])
@pytest.mark.parametrize("rate", [1e7, 1e8, 1e9, 1e10, 1e11])
def test_the_advice_and_auto_agree(rate, backward):
    work, network = Workload(tuple(MODELS["resnet50"]()), backward, backward / 2), Network(rate, 50e-6)
    forecasts = [prediction.forecast(spec, work, network, 2) for spec in options.SPECS]
    for each in forecasts:
        by_hand = each.step / each.progress * (1 + 0.02 * each.lost)
        assert each.per_progress == pytest.approx(by_hand)
        assert advice.best_of(forecasts).per_progress <= advice.LEAST_SPEEDUP * each.per_progress
    least = min(each.per_progress for each in forecasts if each.compressor in CANDIDATES)
    assert prediction.forecast_auto(work, network, 2).per_progress <= least


def test_all_candidates_of_auto_are_in_the_tables():
    assert set(CANDIDATES) <= set(options.SPECS)


def test_auto_may_take_powersgd():
    work, network = Workload(tuple(MODELS["resnet50"]())), Network(1e9, 50e-6)
    auto, alone = (prediction.forecast_auto(work, network, 2), prediction.forecast("powersgd:rank=4", work, network, 2))
    assert dataclasses.replace(auto, compressor="powersgd:rank=4") == alone


def test_the_usual_progress_is_that_of_the_trainings_in_the_docs():
    table = (ROOT / "docs" / "results.md").read_text().split("<!-- table: gpt 1gbit -->")[1].split("<!--")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")]
    of_seeds = {row[0]: row[3].split() for row in rows}
    steps = {name: statistics.median(map(int, each)) for name, each in of_seeds.items() if "".join(each).isdigit()}
    registry = formats.registry.FORMATS
    compared = [name for name in steps if name.partition(":")[0] in {*registry.classes, *registry.instances}]
    assert len(compared) > 10
    for name in compared:
        assert prediction.expected_progress(formats.parse(name)) == pytest.approx(steps["none"] / steps[name], abs=0.12)


def test_the_docs_say_what_plan_says():
    table = (ROOT / "docs" / "choosing.md").read_text().split("<!-- table: plan -->")[1].split("<!--")[0]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines() if line.startswith("|")][2:]
    assert len(rows) == 3
    command = ["plan", "--model", "resnet50", "--ranks", "2", "--backward", "120ms", "--forward", "60ms", "--json"]
    for rate, best, auto, training in rows:
        (case,) = json.loads(invoke(*command, "--bandwidth", rate.replace("/s", "").replace(" ", "")).output)["cases"]
        chosen = dict.fromkeys(b["compressor"] for b in case["auto"]["buckets"] if b["compressor"] != "none")
        found = {each["compressor"]: each["training"] for each in case["compressors"]}
        assert (best, auto) == (f"`{case['best']}`", ", ".join(f"`{spec}`" for spec in chosen or ["none"]))
        assert f"{found[case['best']]:.2g}" == training
        assert f"{rate}" in (ROOT / "README.md").read_text() and best in (ROOT / "README.md").read_text()


def test_the_advice_of_bench():
    def row(name, step, progress, lost):
        per_progress = prediction.per_progress(step, progress, lost)
        return {
            "compressor": name, "step": step, "progress": progress, "per_progress": per_progress,
            "training": 0.9 / per_progress,
        }  # fmt: skip

    rows = [row("none", 0.9, 1.0, 0.0), row("randomk:ratio=0.01", 0.08, 0.19, 0.99), row("int4", 0.2, 1.0, 0.01)]
    result = {"compressors": rows, "backward": 0.0, "forward": 0.0, "auto": ["int4", "hadamard"]}
    first, second = bench.advice(result)
    assert first.startswith("Take int4") and "200 ms" in first and "4.5 times" in first and "--backward" in first
    assert second.startswith("auto would take int4 and hadamard")
    first, _ = bench.advice({**result, "compressors": [rows[0], row("int8", 0.88, 1.0, 0.0)], "backward": 0.1})
    assert first.startswith("None of these compressors makes training 5% faster") and "--backward" not in first


@pytest.mark.parametrize(
    "spec",
    [
        "int8", "int4", "onebit", "topk:ratio=0.01", "block_topk:ratio=0.01", "randomk:ratio=0.1",
        "hybrid:ratio=0.01,bits=8",
    ],
)  # fmt: skip
def test_what_noise_loses_is_what_the_compressor_loses(spec):
    compressor, noise = Compression.parse(spec), np.random.default_rng(1).standard_normal(2**17).astype(np.float32)
    error = noise - compressor.decompress(*compressor.compress(tf.constant(noise))).numpy()
    measured = np.sum(error**2) / np.sum(noise**2)
    assert noise_lost(formats.parse(spec)) == pytest.approx(measured, rel=0.05)
    assert compressor.noise_loss([(2**17,)]) == pytest.approx(measured, rel=0.05)


def test_the_last_layers_hide_and_the_crossover_is_where_it_is_said_to_be():
    work = Workload(tuple(of_size(25_600_000)), backward=0.12)
    network = Network(10e9, 50e-6)
    specs = ("none", "int8", "onebit")

    def at(rate):
        return tuple(prediction.forecast(spec, work, network, 8, rate) for spec in specs)

    ranges = advice.ranges(at)
    assert ranges[-1] == (None, "none")
    limit = advice.stops_paying(ranges)
    assert advice.best_of(at(limit * 1.01)).compressor == "none"
    assert advice.best_of(at(limit * 0.99)).compressor != "none"
    for (first, name), (_, after) in zip(ranges, ranges[1:]):
        assert advice.best_of(at(first * 0.999)).compressor == name
        assert advice.best_of(at(first * 1.001)).compressor == after


def test_json_and_table_agree():
    result = invoke(*PLAN, "--json")
    assert result.exit_code == 0
    found = json.loads(result.output)
    assert [case["ranks"] for case in found["cases"]] == [8, 16]
    assert found["params"] == 25_600_000 and found["kernels"] == "defaults"
    none = found["cases"][0]["compressors"][0]
    work = Workload(tuple(of_size(25_600_000)), backward=0.12)
    assert none["step"] == prediction.forecast("none", work, Network(10e9, 50e-6), 8).step
    for case in found["cases"]:
        for each in (*case["compressors"], case["auto"]):
            assert each["speedup"] == case["compressors"][0]["step"] / each["step"]
            assert each["training"] == case["compressors"][0]["per_progress"] / each["per_progress"]
            assert each["step"] >= 0.12
        assert sum(bucket["bytes"] for bucket in case["auto"]["buckets"]) >= 4 * 25_600_000
    table = invoke(*PLAN)
    assert table.exit_code == 0
    assert "Compression pays up to" in table.output and "auto would take" in table.output
    # What is not known stands above the table.
    assert 0 < table.output.index("taken from one server core") < table.output.index("8 ranks, predicted")
    assert "Not given: --backward" not in table.output
    assert "Not given: --backward" in invoke(*PLAN[:-2]).output


def test_compression_is_not_advised_for_less_than_five_percent():
    options = ["plan", "--model", "resnet50", "--backward", "120ms", "--forward", "60ms"]
    result = invoke(*options, "--ranks", "64", "--bandwidth", "25gbit")
    assert "Do not compress at 25 Gbit/s: training would be less than 5% faster." in result.output
    case = json.loads(invoke(*options, "--ranks", "64", "--bandwidth", "25gbit", "--json").output)["cases"][0]
    assert case["best"] == "none" and max(each["training"] for each in case["compressors"]) > 1.0
    # Only what was named is judged.
    result = invoke(*options, "--ranks", "8", "--bandwidth", "4gbit", "-c", "topk:ratio=0.01")
    assert "Take none of these at 4 Gbit/s: training would be less than 5% faster." in result.output
    assert "These compressors pay up to" in result.output and "Do not compress" not in result.output


def test_two_levels_cost_less_than_one_ring():
    flat = json.loads(invoke(*PLAN, "-c", "none", "--json").output)
    options = ["--topology", "two-level", "--workers-per-host", "8"]
    two = json.loads(invoke(*PLAN, "-c", "none", *options, "--json").output)
    assert two["topology"] == "two-level"
    assert two["cases"][1]["compressors"][0]["exchange"] < flat["cases"][1]["compressors"][0]["exchange"]


def test_compressed_between_hosts_only():
    options = ["--topology", "two-level", "--workers-per-host", "8", "--hierarchical"]
    specs = ["-c", "int8", "-c", "randomk:ratio=0.1"]
    flat = json.loads(invoke(*PLAN, *specs, *options[:-1], "--json").output)["cases"]
    two = json.loads(invoke(*PLAN, *specs, *options, "--json").output)["cases"]
    assert [case["compressors"] for case in two[:1]] == [case["compressors"] for case in flat[:1]]  # one host
    (none, int8, randomk), (_, before, summed) = two[1]["compressors"], flat[1]["compressors"]
    # A ring leaves each host but once in any case.
    assert none == flat[1]["compressors"][0]
    assert randomk["exchange"] == pytest.approx(summed["exchange"], rel=0.05)
    # Each worker encodes an eighth, and sends that to the other host.
    nbytes, cost, buckets = 4 * 25_600_000, CPU.kernels["quantize"], len(two[1]["auto"]["buckets"])
    assert int8["encode"] == pytest.approx(buckets * cost.call + nbytes / 8 * cost.encode, rel=0.02)
    assert int8["sent"] == pytest.approx(nbytes / 8 / 4 * (1 + 8 / 256), rel=0.02)
    assert int8["step"] < before["step"]
    assert "compressed between them" in invoke(*PLAN, "-c", "int8", *options).output


def test_a_fat_tree_slows_what_crosses_its_core():
    def wires(*options):
        found = json.loads(
            invoke(*PLAN, "--ranks", "64", "-c", "int8", "-c", "randomk:ratio=0.1", *options, "--json").output
        )
        return [each["wire"] for each in found["cases"][0]["compressors"]]

    ring, tree = wires(), wires("--topology", "fat-tree", "--oversubscription", "4", "--ranks-per-leaf", "16")
    assert tree[0] == ring[0] and tree[2] == ring[2]  # allreduce: one flow leaves a leaf
    assert 1.5 * ring[1] < tree[1] < 2.5 * ring[1]  # the alltoall half of scatter-reduce: up to four times
    wide = wires("--topology", "fat-tree", "--oversubscription", "1")
    assert wide == pytest.approx(ring, rel=1e-9)


def test_efficiency_is_the_speed_alone_that_is_left():
    found = json.loads(invoke(*PLAN, "--forward", "60ms", "-c", "int8", "--json").output)
    for case in found["cases"]:
        for each in (*case["compressors"], case["auto"]):
            assert each["efficiency"] == pytest.approx(0.18 / each["step"])
    assert "efficiency" in invoke(*PLAN, "-c", "int8").output
    work = Workload(tuple(of_size(4_000_000)), backward=0.02, rest=0.01)
    for spec in ("none", "int8", "topk:ratio=0.01"):
        assert prediction.forecast(spec, work, Network(1e9, 1e-4), 1).step == pytest.approx(0.03)


def test_a_calibration_brings_links_and_kernels(tmp_path):
    path = tmp_path / "link.json"
    links = {"allreduce": Link(1e-3, 8e-9), "allgather": Link(2e-3, 16e-9), "alltoall": Link(1e-3, 8e-9)}
    Calibration(2, links, {"none": KernelCost(), "int8": KernelCost(0.0, 1e-9, 0.0, 0.0)}).save(path)
    result = invoke("plan", "--params", "4M", "--calibration", str(path), "-c", "int8", "-c", "int4", "--json")
    found = json.loads(result.output)
    assert found["bandwidth"] == pytest.approx(1e9) and found["topology"] == "measured"
    assert found["kernels_by_default"] == ["int4"]
    (case,) = found["cases"]
    assert case["ranks"] == 2
    int8 = case["compressors"][1]
    nbytes = sum(bucket["bytes"] for bucket in case["auto"]["buckets"])
    assert int8["encode"] == pytest.approx(nbytes * 1e-9, rel=0.01)
    # Each bucket is an allgather: its own link counts.
    assert int8["wire"] == pytest.approx(4 * 2e-3 + nbytes / 4 * (1 + 8 / 256) * 16e-9, rel=0.01)


def test_a_plot_is_drawn(tmp_path):
    path = tmp_path / "plan.png"
    result = invoke(*PLAN[:-2], "-c", "int8", "--plot", str(path))
    assert result.exit_code == 0, result.output
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("name", "message"),
    [("no/plan.png", "there is no directory"), ("", "is a directory"), ("plan", "does not end in one of .")],
)
@pytest.mark.parametrize("command", ["plan", "bench"])
def test_a_plot_that_cannot_be_written_is_said_before_the_work(command, name, message, tmp_path, monkeypatch):
    monkeypatch.setenv("HOROVOD_SIZE", "2")  # as bench would look at it: it does not come so far
    arguments = PLAN if command == "plan" else ["bench", "--params", "5M"]
    result = invoke(*arguments, "-c", "int8", "--plot", str(tmp_path / name))
    assert result.exit_code == 2 and "--plot" in result.output and message in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["calibrate", "bench"])
def test_only_the_rank_that_writes_looks_at_the_file(command, tmp_path, monkeypatch):
    arguments = [command, "-o", str(tmp_path / "no" / "x.json")]
    assert "there is no directory" in invoke(*arguments).output
    monkeypatch.setenv("HOROVOD_RANK", "1")
    assert "start at least two" in invoke(*arguments).output


def test_a_large_model():
    result = invoke("plan", "--params", "3G", "--ranks", "64", "--bandwidth", "10gbit", "--json")
    found = json.loads(result.stdout)
    # A ring of 64 sends 63/32 of the gradient.
    assert found["cases"][0]["compressors"][0]["sent"] == pytest.approx(4 * found["params"] * 63 / 32, rel=1e-6)
    assert found["params"] == pytest.approx(3e9, rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan"], "Give --params (25.6M) or --model (resnet50), and --ranks (8,16,64) and --bandwidth (10gbit)"),
        (["plan", "--params", "5M", "--model", "resnet50"], "Give either --params or --model."),
        (["plan", "--params", "5M"], "Give --ranks (8,16,64) and --bandwidth (10gbit), or --calibration (link.json)."),
        (["plan", "--params", "5M", "--bandwidth", "1gbit"], "Give --ranks (8,16,64), or --calibration (link.json)."),
        (["plan", "--bandwidth", "1gbit", "--ranks", "8"], "Give --params (25.6M) or --model (resnet50)."),
        ([*PLAN, "--bandwidth", "10GB"], "'10GB' is not a rate in bits per second"),
        ([*PLAN, "-c", "int9"], "unknown compressor 'int9': did you mean 'int8'?"),
        ([*PLAN, "-c", "auto"], "auto is no compressor"),
        ([*PLAN, "-c", "auto:objective=step"], "auto is no compressor"),
        ([*PLAN, "-c", "schedule"], "a schedule uses one compressor after the other"),
        ([*PLAN, "--ranks", "1"], "ranks start from 2"),
        ([*PLAN, "--calibration", "nowhere.json"], "the calibration nowhere.json cannot be read"),
        ([*PLAN, "--topology", "two-level"], "--topology two-level and --workers-per-host go together."),
        ([*PLAN, "--topology", "two-level", "--workers-per-host", "3"], "8 ranks do not fill hosts of 3 workers"),
        ([*PLAN, "--ranks", "1e30"], "ranks are more than there can be: give at most 1M"),
        ([*PLAN, "--params", "1e15"], "'1e15' is more than a worker holds: give at most 100G"),
        ([*PLAN, "--bandwidth", "1e-300bit"], "'1e-300bit' is not a rate of a network"),
        ([*PLAN, "--latency", "1e200h"], "'1e200h' is longer than 24h"),
        ([*PLAN, "--hierarchical"], "--hierarchical needs --topology two-level."),
        ([*PLAN, "--topology", "fat-tree"], "--topology fat-tree and --oversubscription go together."),
        ([*PLAN, "--oversubscription", "4"], "--topology fat-tree and --oversubscription go together."),
        ([*PLAN, "--topology", "fat-tree", "--oversubscription", "0.5"], "oversubscription must be a number from 1 on"),
        ([*PLAN, "--topology", "fat-tree", "--oversubscription", "0"], "oversubscription must be a number from 1 on"),
        (["bench"], "hvd-compress bench -np 2"),
        (["calibrate"], "hvd-compress calibrate -np 2"),
        (["plan", "--no-such"], "--no-such"),
    ],
)  # fmt: skip
def test_wrong_usage_is_status_2_and_one_clear_line(arguments, message, monkeypatch):
    monkeypatch.delenv("HOROVOD_SIZE", raising=False)
    result = invoke(*arguments)
    assert result.exit_code == 2
    errors = [line for line in result.output.splitlines() if line.startswith("Error:")]
    assert len(errors) == 1 and message in errors[0]


# `horovod`, which works without click, has a help of its own.
@pytest.mark.parametrize("command", [command.name for command in cli.COMMANDS if command.name != "horovod"])
def test_help_has_an_example(command):
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert f"hvd-compress {command}" in result.output and "--json" in result.output


def test_plan_starts_without_what_is_slow_to_import():
    code = f"""
import sys
from hvd_compress.tools.cli import main
try:
    main({PLAN!r}, prog_name="hvd-compress")
except SystemExit as stop:
    assert stop.code == 0
assert not [name for name in sys.modules if name.partition(".")[0] in ("tensorflow", "horovod", "keras", "optuna")]
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_models():
    assert of_size(10) == [(10,)]
    assert sum(math.prod(shape) for shape in MODELS["resnet50"]()) == 25_557_032
    assert abs(sum(math.prod(shape) for shape in of_size(25_600_000)) - 25_600_000) < 1024


def test_a_hundred_billion_parameters_between_a_million_ranks(monkeypatch):
    # One shape of all chunks, however many: no list of a million of them, for each of a thousand predictions.
    numbers, looked_at, slice_of = set(), [], volume.Alike.__getitem__

    def counted_slice(self, index):
        numbers.add(self.number)
        return slice_of(self, index)

    def counted(self):
        for _ in range(self.number):
            looked_at.append(self.shape)
            assert len(looked_at) < 10_000, "chunks are looked at one by one"
            yield self.shape

    monkeypatch.setattr(volume.Alike, "__getitem__", counted_slice)
    monkeypatch.setattr(volume.Alike, "__iter__", counted)
    result = invoke("plan", "--params", "100G", "--ranks", "1M", "--bandwidth", "10gbit", "--json")
    assert result.exit_code == 0, result.output
    assert max(numbers) >= 10**6  # so they were not put into a list before
