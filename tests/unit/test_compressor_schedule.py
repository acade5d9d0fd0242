"""schedule: its spec strings, its stages, and what it refuses; the exchange is in tests/parallel/test_schedule.py."""

import re

import pytest
import tensorflow as tf
from click.testing import CliRunner

import hvd_compress as hvdc
from hvd_compress.engine import progress
from hvd_compress.engine.settings import Settings
from hvd_compress.frontends import tape
from hvd_compress.tools.cli import main

schedule, parse = hvdc.Compression.schedule, hvdc.Compression.parse


class Own(hvdc.Compressor):
    """A user's compressor."""

    alignment = 24

    def __init__(self, scale=1.0):
        self.scale = scale


@pytest.mark.parametrize(
    ("spec", "phases", "counts"),
    [
        ("schedule:(0=int8|1000=int4)", {0: "int8", 1000: "int4"}, "steps"),
        ("schedule:(0=int8|2epochs=int4|3epochs=onebit)", {0: "int8", "2epochs": "int4", "3epoch": "onebit"}, "epochs"),
        (
            "schedule:(0=int8|30%=quantize:bits=6|60%=int4)",
            [("0%", "int8"), ("30.0%", hvdc.Compression.quantize(6)), ("60%", "int4")],
            "training",
        ),
        (
            "schedule:(0=none|0.5%=hybrid:ratio=0.1,bits=4|1%=quantize:bits=4,clip=99)",
            ["0=none", "5e-1%=hybrid:ratio=0.1,bits=4", "1%=quantize:bits=4,clip=99"],
            "training",
        ),
    ],
)
def test_spec_strings(spec, phases, counts):
    found = parse(spec)
    assert found == schedule(phases) and hash(found) == hash(schedule(phases))
    assert found.spec == str(found) == spec and found.counts == counts
    # Spaces, and the name of the list, make no difference.
    assert parse(spec.replace("(", " phases = ( ").replace("|", " | ").replace("=int", " = int")) == found


def test_a_list_may_stand_without_its_name():
    assert parse("auto:(none|int8),max_slowdown=0.1") == parse("auto:max_slowdown=0.1,candidates=(none|int8)")
    assert parse("schedule:(0=int8|50%=int4),steps=300").steps == 300


@pytest.mark.parametrize(
    ("phases", "steps", "starts"),
    [
        ("0=int8|1000=int4|1500=onebit", None, [(0, 0), (999, 0), (1000, 1), (1499, 1), (1500, 2), (10**9, 2)]),
        ("0=int8|2epochs=int4", None, [(0.0, 0), (1.0, 0), (2.0, 1), (3.0, 1)]),
        ("0=int8|30%=int4", None, [(0.0, 0), (0.2999, 0), (0.3, 1), (1.0, 1)]),
        ("0=int8|80%=int4", 10, [(sum([0.1] * 7), 0), (sum([0.1] * 8), 1)]),  # the last sum is 0.8 - 1e-16
    ],
)
def test_stages(phases, steps, starts):
    found = schedule(phases.split("|"), steps)
    for so_far, stage in starts:
        assert int(found.stage_at(tf.constant(so_far, tf.float64))) == stage
    assert [stage.spec for stage in found.stages][:2] == ["int8", "int4"]


def test_it_asks_for_what_any_of_its_compressors_needs():
    assert schedule({0: "none", 5: "int8"}).error_feedback and not schedule({0: "none", 5: "fp16"}).error_feedback
    assert schedule({0: "topk:ratio=0.1", 5: "topk:ratio=0.01"}).sparse
    assert not schedule({0: "topk:ratio=0.1", 5: "int8"}).sparse
    own = Own()
    mixed = schedule({0: own, 5: "hadamard"})
    assert mixed.alignment % 24 == 0 and mixed.alignment % parse("hadamard").alignment == 0
    assert mixed.stages == (own, parse("hadamard")) and mixed.spec == "schedule:(0=Own|5=hadamard)"
    assert schedule({0: "block_sparse:ratio=0.1,block=4", 5: "block_sparse:ratio=0.01,block=4"}).per_tensor
    assert schedule({0: "none", 5: "int4", 6: "int8", 7: "onebit"}).for_rows() == parse("int8")
    assert schedule({0: "none", 5: "topk:ratio=0.1"}).for_rows() == parse("none")
    assert schedule({0: "bf16", 5: "fp16"}).for_rows() == parse("bf16")  # the first of equals


def test_a_new_object_in_each_step_of_a_tape_is_the_same_schedule():
    first, second, other = (tape._hashable(schedule({0: "int8", 5: Own(scale)})) for scale in (1.0, 1.0, 2.0))
    assert first == second and hash(first) == hash(second) and first != other


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("schedule", "schedule: name two compressors or more, such as"),
        ("schedule:(0=int8)", "schedule: name two compressors or more, such as"),
        ("schedule:phases=int8", "schedule: phases must be a list, got 'int8'"),
        ("schedule:(int8|30%=int4)", "schedule: a phase is written as 30%=int8, begin and compressor, got 'int8'"),
        ("schedule:(10%=int8|30%=int4)", "schedule: the first phase must begin at 0, got 10%"),
        ("schedule:(0=int8|0.3=int4)", "schedule: a phase begins at a step such as 1000, .*, got '0.3'"),
        ("schedule:(0=int8|-5=int4)", "schedule: a phase begins at a step such as 1000, .*, got '-5'"),
        ("schedule:(0=int8|1.5epochs=int4)", "schedule: a phase begins at a step such as 1000"),
        ("schedule:(0=int8|100%=int4)", "schedule: a phase must begin before the end of training, 100%, got '100%'"),
        ("schedule:(0=int8|30%=int4|30%=onebit)", "each phase must begin after the one before, got 0, 30%, 30%"),
        ("schedule:(0=int8|0=int4)", "each phase must begin after the one before, got 0, 0"),
        ("schedule:(0=int8|10=int4|30%=onebit)", "all phases after the first must begin .* got 10 and 30%"),
        ("schedule:(0=int8|10=int4),steps=100", "schedule: steps is the length of training .* 10 needs none"),
        ("schedule:(0=int8|10%=int4),steps=0", "schedule: steps must be a whole number from 1 on, got 0"),
        ("schedule:(0=int8|10%=int5)", r"schedule: at 10%: unknown compressor 'int5': did you mean 'int"),
        ("schedule:(0=int8|10%=topk:ratio=2)", "schedule: at 10%: topk: ratio must be a number above 0"),
        ("schedule:(0=int8|10%=auto)", "schedule: auto cannot be part of it, as it changes by itself"),
        ("schedule:(0=int8|10%=dgc)", "schedule: dgc cannot be part of it, as it brings momentum"),
        ("schedule:(0=powersgd:rank=2|10%=int8)", "schedule: powersgd:rank=2 cannot be part of it, as it exchanges"),
        ("schedule:(0=int8|10%=schedule:(0=int8|5=int4))", "cannot be part of it, as it has phases of its own"),
        ("schedule:(0=int8|10%=block_sparse:ratio=0.1,block=4)", "block_sparse.* needs each gradient in its own shape"),
        ("schedule:(0=int8|10%=int4", r"the parentheses in 'schedule:\(0=int8.* do not match"),
        ("schedule:(0=int8|10%=int4))", "the parentheses in .* do not match"),
        ("schedule:(0=int8|10%=int4),4", "compressor 'schedule' has no argument '4'"),
        ("auto:candidates=(none|schedule:(0=int8|5=int4))", "auto: schedule.* changes by itself"),
    ],
)
def test_what_is_refused_in_one_line(spec, message):
    with pytest.raises(ValueError, match=message) as error:
        parse(spec)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("begin", [True, None, 0.5, 2.0, (), "2 epochs 3", "epochs", "%", "1e400%"])
def test_begins_that_are_none(begin):
    with pytest.raises(ValueError, match="schedule: a phase (begins at|must begin before)"):
        schedule([(0, "int8"), (begin, "int4")])


def test_what_is_no_pair_of_begin_and_compressor():
    with pytest.raises(ValueError, match="schedule: a phase is a pair"):
        schedule([(0, "int8", "int4"), (5, "int4")])
    with pytest.raises(ValueError, match="schedule: the compressor at 5 is None: write 'none'"):
        schedule({0: "int8", 5: None})
    with pytest.raises(TypeError, match="schedule: at 5: compression must be a hvdc.Compressor"):
        schedule({0: "int8", 5: 4})


def test_it_has_no_size_of_its_own():
    found = schedule({0: "int8", 5: "int4"})
    for call in (
        lambda: found.wire_bytes(100),
        lambda: found.compress(tf.ones([100])),
        lambda: found.stateless(),
        lambda: hvdc.CostModel(hvdc.Link(1e-4, 1e-9), 2).predict(found, 1e6),
        lambda: hvdc.compare([tf.ones([64, 64]).numpy()], found),
    ):
        with pytest.raises(ValueError, match="schedule .*(one of its compressors, such as 'int4'|name each of them)"):
            call()


def test_tools_ask_for_its_compressors():
    arguments = ["plan", "--params", "1M", "--ranks", "2", "--bandwidth", "1gbit", "-c", "schedule:(0=int8|5=int4)"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2
    assert "name each of them, such as 'int8'" in " ".join(re.sub("[│\n]", " ", result.output).split())


def test_what_is_said_if_nobody_counts():
    dgc, epochs = parse("dgc"), schedule({0: "topk:ratio=0.1", "2epochs": "topk:ratio=0.01"})
    training = schedule({0: "topk:ratio=0.1", "50%": "topk:ratio=0.01"})
    told = progress.epoch_of(1, None, None, None, [])
    for compressor, policy, epoch, text in (
        (dgc, (), None, "dgc: nobody says which epoch it is"),
        (dgc, (("*", training),), told, "schedule: nobody says how long training is"),
        (parse("dgc:warmup_epochs=0"), (("*", epochs),), None, "schedule: nobody says which epoch it is"),
        (epochs, (), None, "schedule: nobody says which epoch it is"),
        (training, (), None, "schedule: nobody says how long training is"),
    ):
        with pytest.raises(ValueError, match=text):
            progress.check(Settings(compressor, policy=policy), epoch)
    for compressor in (epochs, parse("dgc:steps_per_epoch=4"), schedule({0: "int8", 9: "int4"}), parse("int8")):
        progress.check(Settings(compressor), told)
    progress.check(Settings(training), progress.epoch_of(1, 10, None, None, []))
    progress.check(Settings(schedule({0: "int8", "50%": "int4"}, steps=10)), None)


@pytest.mark.parametrize(
    ("epoch", "epochs", "steps", "before", "saved", "expected"),
    [
        (2, 10, 50, None, [], (2, 0.2, 1 / 500, 0.3)),
        (2, 10, None, None, [], (2, 0.2, 0.0, 0.3)),  # a generator
        (2, None, None, None, [], (2, 0.0, 0.0, 0.0)),
        (0, 5, 10, (3, 0.6, 0.1, 0.8), [], (3, 0.0, 1 / 50, 0.2)),  # a second fit
        (2, 10, 50, None, [{"progress": 4.0, "progress_of_training": 0.25}], (4, 0.25, 1 / 500, 0.3)),
    ],
)
def test_what_a_rank_knows_of_an_epoch(epoch, epochs, steps, before, saved, expected):
    before = None if before is None else progress.Epoch(*before)
    assert progress.epoch_of(epoch, epochs, steps, before, saved) == pytest.approx(expected)


def test_settings():
    steps = [schedule({0: "int8", "50%": "int4"}, steps) for steps in (None, 10, 20)]
    with pytest.raises(ValueError, match="policy: the number of steps in training must be the same for all variables"):
        Settings(steps[1], policy=(("*", steps[2]),))
    with pytest.raises(ValueError, match="policy: the number of steps in training must be the same"):
        Settings(steps[0], policy=(("*", steps[2]),))
    others = ("b", schedule({0: "int8", 7: "int4"})), ("c", parse("auto"))
    assert Settings(steps[1], policy=(("a", steps[1]), *others)).steps_per("training") == 10
    sparse = schedule({0: "topk:ratio=0.1", 5: "topk:ratio=0.01"})
    Settings(sparse, momentum_correction=0.9)
    Settings(parse("dgc"), policy=(("*", sparse),))
    for first in ("int8", "none"):
        with pytest.raises(ValueError, match=r"momentum_correction needs a sparse compressor .*; schedule:\(0="):
            Settings(schedule({0: first, 5: "topk:ratio=0.1"}), momentum_correction=0.9)
