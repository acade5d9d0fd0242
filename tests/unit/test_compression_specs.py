"""The `Compression` namespace, spec strings, and what `resolve` takes."""

import dataclasses
import math
import re

import horovod.tensorflow as hvd
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from specs import ALL, EXAMPLES

import hvd_compress as hvdc
from hvd_compress.compressors import registry
from hvd_compress.compressors.resolve import resolve
from hvd_compress.formats.registry import FORMATS

Compression = hvdc.Compression
parse = Compression.parse

ratios = st.floats(0.0, 1.0, exclude_min=True)
bits = st.integers(1, 8)
seeds = st.integers(-(2**31), 2**31 - 1)
BUILTIN = st.one_of(
    st.sampled_from([Compression.none, Compression.fp16, Compression.bf16, Compression.onebit]),
    st.sampled_from([Compression.int8, Compression.int4]),
    st.builds(
        Compression.quantize,
        bits=bits,
        rounding=st.sampled_from(["nearest", "stochastic"]),
        clip=st.none() | st.floats(0.0, 100.0, exclude_min=True) | st.integers(1, 100),
        seed=seeds,
    ),
    st.builds(Compression.topk, ratio=ratios),
    st.builds(Compression.randomk, ratio=ratios, unbiased=st.booleans(), seed=seeds),
    st.builds(Compression.block_topk, ratio=ratios),
    st.builds(Compression.block_sparse, ratio=ratios, block=st.integers(1, 10**6)),
    st.builds(Compression.hybrid, ratio=ratios, bits=bits),
    st.builds(Compression.powersgd, rank=st.integers(1, 32)),
)

phases = st.dictionaries(st.integers(0, 10**9), st.floats(0.0, 1.0), max_size=4)
AUTOS = st.builds(
    Compression.auto,
    candidates=st.lists(BUILTIN.filter(lambda c: not c.per_tensor), min_size=1, max_size=4),
    target=st.floats(0.0, 1.0),
    warmup_steps=st.integers(0, 10**9),
    phases=phases.map(lambda found: sorted(found.items())),
    max_slowdown=st.floats(0.0, 1.0),
    probe_every=st.integers(1, 10**9),
    local_steps=st.lists(st.integers(1, 10**6), max_size=3),
)

FLAT = BUILTIN.filter(lambda c: not c.per_tensor)
BEGINS = [
    st.integers(1, 10**12),
    st.integers(1, 10**6).map("{}epochs".format),
    st.floats(1e-300, 100.0, exclude_max=True).map("{}%".format),
]


@st.composite
def schedules(draw):
    begins = draw(st.sampled_from(BEGINS).flatmap(lambda begin: st.lists(begin, min_size=1, max_size=4, unique=True)))
    begins.sort(key=lambda begin: float(str(begin).rstrip("%epochs")))
    steps = draw(st.none() | st.integers(1, 10**9)) if str(begins[0]).endswith("%") else None
    return Compression.schedule([(begin, draw(FLAT)) for begin in [0, *begins]], steps)


@given(BUILTIN | AUTOS | schedules())
def test_every_spec_parses_back(compressor):
    again = parse(str(compressor))
    assert again == compressor and hash(again) == hash(compressor)
    assert str(again) == str(compressor) == compressor.spec
    assert "\n" not in compressor.spec


names = st.sampled_from(
    ["auto", "schedule", "topk", "quantize", "hybrid", "randomk", "block_sparse", "powersgd", "int8", "none", "onebit"]
)
keys = st.sampled_from(
    [
        "ratio",
        "bits",
        "candidates",
        "steps",
        "phases",
        "target",
        "clip",
        "seed",
        "rounding",
        "unbiased",
        "block",
        "probe_every",
    ]
)
values = st.text("0123456789.-+e(|):=,naif \n", max_size=12) | st.sampled_from(
    ["none", "nan", "inf", "true", "(int8|", "(0=int8|10%=int4)", "((0=int8)|5=none)", "(auto:(none|int8)|int4)"]
)
arguments = st.lists(st.builds("{}={}".format, keys, values), max_size=3).map(",".join)
GARBAGE = st.text(max_size=30) | st.builds("{}:{}".format, names, arguments | st.text(max_size=20))


@given(GARBAGE)
def test_garbage_gives_one_line_or_a_compressor(spec):
    try:
        compressor = parse(spec)
    except ValueError as error:
        assert len(str(error).splitlines()) == 1 and str(error).isprintable()
    else:
        assert parse(str(compressor)) == compressor


@pytest.mark.parametrize("spec", [*ALL, "topk:ratio=0.01", "hybrid:ratio=0.01,bits=4"])
def test_specs_in_the_documentation_are_the_canonical_ones(spec):
    assert str(parse(spec)) == spec.replace("clip=99", "clip=99")


@pytest.mark.parametrize(
    ("spec", "compressor"),
    [
        ("int8", Compression.int8),
        ("quantize:bits=8", Compression.int8),
        (" topk : ratio = 0.01 ", Compression.topk(0.01)),
        ("topk:ratio=1", Compression.topk(1.0)),
        ("topk:ratio=1e-3", Compression.topk(0.001)),
        ("topk:ratio=0.01,", Compression.topk(0.01)),
        ("quantize:clip=none,rounding=nearest,bits=4", Compression.int4),
        ("randomk:ratio=0.1,unbiased=True", Compression.randomk(0.1, unbiased=True)),
        ("randomk:ratio=0.1,unbiased=false,seed=-3", Compression.randomk(0.1, seed=-3)),
    ],
)
def test_parse(spec, compressor):
    assert parse(spec) == compressor


def test_a_spec_takes_numpys_numbers():
    assert Compression.topk(np.float64(0.25)).spec == "topk:ratio=0.25"
    assert Compression.quantize(np.int64(3), clip=np.float64(99.5)).spec == "quantize:bits=3,clip=99.5"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("topkk", r"unknown compressor 'topkk': did you mean 'topk'\? Known are auto, bf16, "),
        ("INT8", r"did you mean 'int8'"),
        ("gzip", r"unknown compressor 'gzip': Known are"),
        ("", r"unknown compressor ''"),
        ("topk", r"'topk' needs ratio: for example 'topk:ratio=0.01'"),
        ("hybrid:ratio=0.1", r"'hybrid' needs bits"),
        ("hybrid", r"'hybrid' needs ratio, bits"),
        ("topk:rate=0.01", r"'topk' has no argument 'rate'.*it takes ratio"),
        ("topk:0.01", r"'topk' has no argument '0.01'"),
        ("onebit:bits=1", r"'onebit' has no argument 'bits'.*no arguments"),
        ("int8:bits=4", r"'int8' takes no arguments, got 'bits=4'"),
        ("topk:ratio=0.1,ratio=0.2", r"'ratio'.*stands twice"),
        ("topk:ratio", r"'ratio'.*has no value"),
        ("topk:ratio=", r"ratio must be a number above 0 and at most 1, got ''"),
        ("topk:ratio=much", r"ratio must be a number above 0 and at most 1, got 'much'"),
        ("quantize:bits=4,rounding=up", r"rounding must be 'nearest' or 'stochastic', got 'up'"),
        ("randomk:ratio=0.1,unbiased=no", r"unbiased must be true or false, got 'no'"),
        ("randomk:ratio=0.1,seed=x", r"seed must be a whole number"),
    ],
)
def test_parse_errors_say_what_to_write(spec, message):
    with pytest.raises(ValueError, match=message):
        parse(spec)


RATIO_TAKERS = [
    Compression.topk,
    Compression.randomk,
    Compression.block_topk,
    lambda ratio: Compression.block_sparse(ratio, 4),
    lambda ratio: Compression.hybrid(ratio, 4),
]


@pytest.mark.timeout(30)  # it took a minute where each comma was looked at again for each other one
@pytest.mark.parametrize("spec", ["topk:" + "," * 200_000, "auto:candidates=(" * 50_000, "int8" * 100_000])
def test_long_specs_are_refused_in_one_short_line(spec):
    with pytest.raises(ValueError) as info:
        hvdc.Compression.parse(spec)
    assert len(str(info.value)) < 1000 and "\n" not in str(info.value)


@pytest.mark.parametrize("make", RATIO_TAKERS)
@pytest.mark.parametrize("ratio", [0, 0.0, 1.5, -1, math.nan, math.inf, True, False, "0.1", None])
def test_ratios_that_are_none(make, ratio):
    with pytest.raises(ValueError, match="ratio must be a number above 0 and at most 1"):
        make(ratio)


@pytest.mark.parametrize("make", [Compression.quantize, lambda bits: Compression.hybrid(0.1, bits)])
@pytest.mark.parametrize("bits", [0, 9, -1, "8", True, 4.5, 8.0, None, math.nan])
def test_bits_that_are_none(make, bits):
    with pytest.raises(ValueError, match="bits must be a whole number from 1 to 8"):
        make(bits)


@pytest.mark.parametrize("block", [0, -4, 2.5, "4", True])
def test_blocks_that_are_none(block):
    with pytest.raises(ValueError, match="block must be a whole number from 1 on"):
        Compression.block_sparse(0.1, block)


@pytest.mark.parametrize("rank", [0, 33, -1, 2.0, "2", True, None])
def test_ranks_that_are_none(rank):
    with pytest.raises(ValueError, match="powersgd: rank must be a whole number from 1 to 32"):
        Compression.powersgd(rank)


@pytest.mark.parametrize("clip", [0, -1, 100.1, math.nan, True, "99"])
def test_clips_that_are_none(clip):
    with pytest.raises(ValueError, match="clip must be None or a percentile above 0 and at most 100"):
        Compression.quantize(8, clip=clip)


@pytest.mark.parametrize(
    "make", [lambda s: Compression.quantize(8, seed=s), lambda s: Compression.randomk(0.1, seed=s)]
)
@pytest.mark.parametrize("seed", [2**31, -(2**31) - 1, 0.5, "1", True, None])
def test_seeds_that_are_none(make, seed):
    with pytest.raises(ValueError, match="seed must be a whole number"):
        make(seed)


@pytest.mark.parametrize("unbiased", [1, 0, "true", None])
def test_unbiased_is_true_or_false(unbiased):
    with pytest.raises(ValueError, match="unbiased must be true or false"):
        Compression.randomk(0.1, unbiased=unbiased)


def test_compressors_do_not_change():
    with pytest.raises(AttributeError):
        Compression.topk(0.1).ratio = 0.2


# the register


def test_every_format_has_examples_and_a_compressor():
    assert {FORMATS.parse(spec).name for spec in EXAMPLES} == set(FORMATS.classes)
    assert set(registry.COMPRESSORS.classes) == {*FORMATS.classes, "auto", "schedule"}


@pytest.mark.parametrize("spec", EXAMPLES)
def test_examples_are_canonical(spec):
    assert FORMATS.parse(spec).spec == parse(spec).spec == spec


def test_the_namespace_holds_what_is_registered():
    for name in Compression.__annotations__:
        assert getattr(Compression, name) in (
            registry.COMPRESSORS.instances.get(name),
            registry.COMPRESSORS.classes.get(name),
        )
    assert Compression.topk is type(parse("topk:ratio=0.1")) and Compression.int8 == Compression.quantize(8)
    assert {"none", "int4", "topk", "auto", "parse"} <= set(dir(Compression))
    with pytest.raises(AttributeError, match="type object 'Compression' has no attribute 'gzip'"):
        _ = Compression.gzip


def test_a_compressor_needs_no_more_than_to_register(monkeypatch):
    for field in ("classes", "instances"):
        monkeypatch.setattr(registry.COMPRESSORS, field, dict(getattr(registry.COMPRESSORS, field)))

    @registry.register
    @dataclasses.dataclass(frozen=True)
    class Best(Compression.topk):
        name = "best"
        short_names = {"best:ratio=0.5": "half"}  # noqa: RUF012

    assert parse("best:ratio=0.1") == Compression.best(0.1) and str(Compression.best(0.1)) == "best:ratio=0.1"
    assert parse("half") is Compression.half and Compression.half.spec == "half"
    with pytest.raises(ValueError, match="did you mean 'best'.*Known are auto, best, .*, half, "):
        parse("bests")
    with pytest.raises(ValueError, match="compressor 'half' takes no arguments, got 'ratio=0.2'"):
        parse("half:ratio=0.2")


# resolve


def test_none_means_the_environment_variable_or_no_compression(monkeypatch):
    monkeypatch.delenv("HVD_COMPRESS", raising=False)
    assert resolve(None) is Compression.none
    for empty in ("", "  "):
        monkeypatch.setenv("HVD_COMPRESS", empty)
        assert resolve(None) is Compression.none
    monkeypatch.setenv("HVD_COMPRESS", " topk:ratio=0.25 ")
    assert resolve(None) == Compression.topk(0.25)
    assert resolve("int8") is Compression.int8  # what is written in the program counts more


@pytest.mark.parametrize("spec", ["topkk", "topk:ratio=2", "topk"])
def test_an_error_in_the_environment_variable_names_it(monkeypatch, spec):
    monkeypatch.setenv("HVD_COMPRESS", spec)
    with pytest.raises(ValueError, match="environment variable HVD_COMPRESS: "):
        resolve(None)
    with pytest.raises(ValueError) as error:
        resolve(spec)
    assert "HVD_COMPRESS" not in str(error.value)


def test_horovods_own_compressors():
    assert resolve(hvd.Compression.none) is Compression.none
    assert resolve(hvd.Compression.fp16) is Compression.fp16


def test_a_compressor_is_itself():
    compressor = Compression.topk(0.1)
    assert resolve(compressor) is compressor


class Own(hvdc.Compressor):
    """A user's compressor without arguments."""


class NeedsArguments(hvdc.Compressor):
    """A user's compressor with one."""

    def __init__(self, rank):
        self.rank = rank


def test_a_class_stands_for_its_one_instance():
    assert isinstance(resolve(Own), Own)
    assert resolve(Own) is resolve(Own)


def test_a_class_that_needs_arguments_is_refused():
    with pytest.raises(TypeError, match=r"pass an instance, NeedsArguments\(\.\.\.\)"):
        resolve(NeedsArguments)
    with pytest.raises(TypeError, match=r"pass an instance, TopK\(\.\.\.\)"):
        resolve(Compression.topk)


@pytest.mark.parametrize("value", [7, 0.5, True, [], object(), int, hvd.Compression, lambda: None])
def test_anything_else_is_refused(value):
    with pytest.raises(TypeError, match="compression must be a hvdc.Compressor, a spec string"):
        resolve(value)


@pytest.mark.parametrize("text, seconds", [("50ms", 0.05), ("0.02", 0.02), ("250us", 250e-6), ("1.5s", 1.5)])
def test_the_budget_of_auto_has_a_unit_or_is_seconds(text, seconds):
    auto = Compression.parse(f"auto:budget={text}")
    assert auto.budget == pytest.approx(seconds)
    assert Compression.parse(auto.spec) == auto


@pytest.mark.parametrize(
    "spec, message",
    [
        ("auto:budget=fast", "auto: budget must be seconds, such as 0.05 or '50ms', got 'fast'"),
        ("auto:budget=-1", "auto: budget must be a number from 0"),
        ("auto:warmup=int8", "auto: warmup needs warmup_steps, the number of steps that use it, such as 1000"),
        ("auto:warmup=auto,warmup_steps=9", "auto: warmup must be compressors, and auto itself is none"),
        ("auto:warmup_steps=9", "pass objective='step', or name a compressor as warmup"),
        ("auto:warmup=(int8|int4),warmup_steps=9", "auto: warmup must be one compressor, such as 'int8', got"),
        ("auto:warmup=best,warmup_steps=9", "unknown compressor 'best'"),
        ("auto:warmup=int8,warmup_steps=9,delay=1", "auto: delay and warmup cannot go together"),
        ("auto:min_progress=2", "auto: min_progress must be a number from 0 to 1"),
        ("auto:link=fast", "auto: link must be a rate and a latency, such as '1gbit+50us', or a hvdc.Link, got 'fast'"),
        ("auto:link=1000", "auto: link must be a rate and a latency, such as '1gbit+50us', or a hvdc.Link, got 1000"),
        ("auto:link=1gbit+50", "auto: link must be a rate and a latency"),
        ("auto:link=50us", "auto: link must be a rate and a latency"),
        ("auto:objective=speed", "auto: objective must be 'progress' or 'step', got 'speed'"),
        ("auto:objective=step,budget=50ms", "auto: budget needs objective='progress'"),
        ("auto:target=0.1", "auto: target needs objective='step'"),
        ("auto:warmup_steps=20", "auto: warmup_steps needs objective='step'"),
        ("auto:phases=(40:0.9)", "auto: phases needs objective='step'"),
    ],
)
def test_what_auto_cannot_look_for(spec, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Compression.parse(spec)


links = st.builds(hvdc.Link.of_rate, st.floats(1.0, 1e18), st.floats(0.0, 86400.0))


@pytest.mark.parametrize("warmup", ["none", "int8", "(hybrid:ratio=0.05,bits=4)", "fp16"])
def test_the_warm_up_of_auto_is_a_candidate(warmup):
    auto = Compression.parse(f"auto:candidates=(none|int8),warmup={warmup},warmup_steps=100")
    compressor = Compression.parse(warmup.strip("()"))
    assert auto.candidates[auto.warmup_position] == compressor
    assert [c.spec for c in auto.candidates] == ["none", "int8", *({compressor.spec} - {"none", "int8"})]
    assert Compression.parse(auto.spec) == auto
    assert Compression.auto(("none", "int8"), warmup=compressor, warmup_steps=100) == auto
    assert auto.target_at(0) == auto.target_at(100)  # that of objective="step", which has another warm-up


def test_targets_of_phases_that_begin_before_the_warm_up_ends():
    auto = Compression.parse("auto:objective=step,warmup_steps=1000,phases=(500:0.1|800:0.2|2000:0.3)")
    assert [auto.target_at(step) for step in (0, 999, 1000, 1999, 2000)] == [0.95, 0.95, 0.2, 0.2, 0.3]
    auto = Compression.parse("auto:objective=step,target=0.02,phases=(0:0.1|800:0.2)")
    assert [auto.target_at(step) for step in (0, 799, 800)] == [0.1, 0.1, 0.2]


@pytest.mark.parametrize("number", [np.float32, np.float64])
def test_a_link_of_numpy_numbers(number):
    auto = Compression.auto(link=hvdc.Link(number(5e-5), number(8e-9)))
    assert (auto.known_link.alpha, auto.known_link.beta) == pytest.approx((5e-5, 8e-9), rel=1e-6)


@given(links)
def test_the_link_of_auto_parses_back(link):
    auto = Compression.auto(link=link)
    assert parse(auto.spec) == auto
    found = parse(auto.spec).known_link
    # Text with a unit is rounded to a whole number that is this close.
    assert (found.alpha, found.beta) == pytest.approx((link.alpha, link.beta), rel=2e-6)


@pytest.mark.parametrize(
    ("text", "rate", "latency"),
    [
        ("1gbit+50us", 1e9, 50e-6),
        ("10gbit", 1e10, 50e-6),
        ("500 Mbit/s + 2ms", 5e8, 2e-3),
        ("1e+9bps+0", 1e9, 0.0),
        ("2.5Gb/s+1e-3s", 2.5e9, 1e-3),
    ],
)
def test_the_link_of_auto_as_text(text, rate, latency):
    auto = parse(f"auto:candidates=(none|int8),link={text},max_slowdown=0.1")
    assert (8.0 / auto.known_link.beta, auto.known_link.alpha) == pytest.approx((rate, latency), rel=1e-12)
    assert (
        auto.spec == f"auto:candidates=(none|int8),link={text.replace(' ', '')},max_slowdown=0.1"
        and parse(auto.spec) == auto
    )


def test_auto_measures_the_link_by_default():
    assert parse("auto").known_link is None and parse("auto:link=none") == parse("auto")


def test_links_that_auto_does_not_take():
    for link in (hvdc.Link(1e-4, 1e-9, gamma=1e-9), hvdc.Link(1e-4, 0.0)):
        with pytest.raises(ValueError, match="auto: link must have beta above 0 and no gamma, got Link"):
            Compression.auto(link=link)
