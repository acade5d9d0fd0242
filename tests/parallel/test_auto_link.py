"""`auto:link=`: a known bandwidth and latency in place of timed collectives before the first step."""

import introspect
import numpy as np
import pytest
from marks import slow
from reducer_training import ReducerTraining

import hvd_compress as hvdc
from hvd_compress.cost import Calibration, KernelCost
from hvd_compress.cost import calibrate as calibrations
from hvd_compress.cost.calibration import COLLECTIVES

SHAPES = [(700, 1000), (64,)]


def draw(rank, step):
    random = np.random.default_rng([rank, step])
    return [random.standard_normal(shape).astype(np.float32) for shape in SHAPES]


@pytest.fixture
def timed(monkeypatch):
    """The collectives that are timed from now on."""
    monkeypatch.delenv("HVD_COMPRESS_CALIBRATION", raising=False)
    names, measure = [], calibrations.estimate_link
    monkeypatch.setattr(
        calibrations, "estimate_link", lambda name, *a, **k: names.append(name) or measure(name, *a, **k)
    )
    return names


def test_without_it_collectives_are_timed(timed, rank):
    ReducerTraining(rank, draw, "auto:candidates=(none|int8)").step()
    assert timed == ["allreduce"]


@pytest.mark.parametrize(
    ("link", "first"),
    [
        ("10mbit+50us", "int8"),
        ("100gbit+1us", "none"),
        *slow((hvdc.Link.of_rate(1e7, 50e-6), "int8"), (hvdc.Link.of_rate(1e11, 1e-6), "none")),
    ],
)
def test_the_first_choice_follows_the_given_link(link, first, timed, rank, size, capfd):
    training = ReducerTraining(rank, draw, hvdc.Compression.auto(candidates=["none", "int8"], link=link))
    training.step()
    assert timed == []
    begun = [line for line in capfd.readouterr().err.splitlines() if "auto begins with" in line]
    assert len(begun) == (rank == 0) and all(f"): {first}, predicted" in line for line in begun)
    # What is predicted for the exchange itself is that of a ring of this link, and kernels are estimated as before.
    rate, latency = (1e7, 50e-6) if first == "int8" else (1e11, 1e-6)
    model = hvdc.CostModel(hvdc.Link.of_rate(rate, latency), size, kernels={"none": KernelCost(), "int8": KernelCost()})
    for b, nbytes in enumerate(introspect.selector_bytes(training.plan)):
        for candidate in introspect.bucket_reports(training.plan)[b].candidates:
            wire = model.predict(candidate.compressor, nbytes).wire
            if first == "int8" and candidate.compressor == "none":  # the link takes nearly all of the time
                assert candidate.predicted == pytest.approx(wire, rel=0.1)
            elif first == "int8":  # a busy machine may have slow kernels
                assert candidate.predicted >= 0.9 * wire
            elif candidate.compressor == "int8":  # the kernels take most of it
                assert candidate.predicted > 2 * wire


def test_a_calibration_file_beside_it_is_refused(timed, rank, size, tmp_path, monkeypatch):
    kernels = {spec: KernelCost() for spec in ("none", "int8")}
    calibration = Calibration(size, dict.fromkeys(COLLECTIVES, hvdc.Link(1e-4, 1e-9)), kernels)
    calibration.save(tmp_path / "link.json")
    monkeypatch.setenv("HVD_COMPRESS_CALIBRATION", str(tmp_path / "link.json"))
    with pytest.raises(ValueError, match=r"auto: link=1gbit\+50us and environment variable HVD_COMPRESS_CAL") as error:
        ReducerTraining(rank, draw, "auto:candidates=(none|int8),link=1gbit+50us").step()
    assert "\n" not in str(error.value)
