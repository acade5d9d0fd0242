"""A long training: memory stays, nothing is traced again, and ranks have the same weights to the bit."""

import json

import pytest


@pytest.mark.timeout(620)
@pytest.mark.slow
def test_nothing_grows_and_nothing_drifts(horovodrun, tmp_path):
    result_file = tmp_path / "endurance.json"
    options = "--steps 1200 --check-every 50 --switch-every 25"
    result = horovodrun(2, ["benchmarks/endurance.py", *options.split(), "--json", str(result_file)], 600)
    assert result.returncode == 0, result.stderr[-3000:]
    found = json.loads(result_file.read_text())
    assert found["forced_switches"] == 48
    assert not found["drifted"]
    for rank in found["ranks"]:
        assert rank["traces"] == 1 and rank["plans"] == [[1, 0]]  # one graph, in which the plan is once
        samples = rank["samples"]
        assert len({sample["weights"] for sample in samples}) == len(samples)  # it trains
        # All candidates were in use by step 200. What a step left behind, be it a bucket's residual of 0.6 MB every
        # tenth step, would be 60 MB by the end.
        settled = next(sample["rss"] for sample in samples if sample["step"] == 200)
        assert samples[-1]["rss"] - settled < 16 * 2**20
