"""What can be had without TensorFlow and Horovod, and what is said where they are needed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from specs import ONE_EACH

import hvd_compress as hvdc
from hvd_compress import formats
from hvd_compress.cost import CostModel, Link

ROOT = Path(__file__).resolve().parents[2]
# An import hook that finds none of these, as where they are not installed.
WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name in {names} else find(name, *rest)
"""


def python(code, names=("tensorflow", "horovod")):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", WITHOUT.format(names=set(names)) + code]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)


def test_predictions_without_tensorflow_equal_those_of_the_compressors():
    code = f"""
import json, hvd_compress as hvdc
from hvd_compress.cost import TwoLevel, simulate
found = {{}}
for spec in {ONE_EACH}:
    for ranks in (2, 4, 8):
        for size in (0, 4, 1000, 4 * 10**6):
            p = hvdc.CostModel(hvdc.Link(1e-4, 1e-9), ranks).predict(spec, size)
            found[f"{{spec}} {{ranks}} {{size}}"] = [p.compressor, p.pattern, p.payload, p.encode, p.wire, p.decode]
assert "tensorflow" not in sys.modules and "horovod" not in sys.modules
print(json.dumps(found))
"""
    result = python(code)
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert len(found) == len(ONE_EACH) * 3 * 4
    for key, values in found.items():
        spec, ranks, size = key.split(" ")
        compressor = hvdc.Compression.parse(spec)
        p = CostModel(Link(1e-4, 1e-9), int(ranks)).predict(compressor, int(size))
        assert [p.compressor, p.pattern, p.payload, p.encode, p.wire, p.decode] == values


@pytest.mark.parametrize("spec", ONE_EACH)
def test_a_format_is_the_compressor_without_tensors(spec):
    known, compressor = formats.parse(spec), hvdc.Compression.parse(spec)
    assert known.spec == compressor.spec == spec
    assert (known.alignment, known.summable) == (compressor.alignment, compressor.summable)
    for shape in [(1,), (64, 48), (3, 5, 7), (100_003,)]:
        sent = [(tuple(part.shape), part.dtype.name) for part in compressor.layout(shape)]
        assert [(part.shape, part.dtype) for part in known.parts(shape)] == sent
        assert known.wire_bytes(shape) == compressor.wire_bytes(shape)


def test_what_is_missing_is_said_first():
    for names, message in [
        (("tensorflow", "horovod"), "hvd_compress needs TensorFlow 2.15 or later: pip install tensorflow"),
        (("horovod",), "hvd_compress needs Horovod built for your TensorFlow"),
    ]:
        result = python("import hvd_compress as hvdc\nhvdc.DistributedOptimizer\n", names)
        assert result.returncode == 1
        assert result.stderr.strip().splitlines()[-1].startswith(f"ImportError: {message}")


def test_everything_public_is_there():
    code = """
import hvd_compress as hvdc
assert set(hvdc.__all__) <= set(dir(hvdc))
hvdc.set_verbosity("info")
assert hvdc.loggers.Prometheus("metrics.prom")
assert "tensorflow" not in sys.modules
for name in hvdc.__all__:
    getattr(hvdc, name)
import types
assert isinstance(hvdc.callbacks, types.ModuleType) and hvdc.callbacks.MetricAverageCallback
assert callable(hvdc.allreduce) and callable(hvdc.sensitivity) and callable(hvdc.calibrate)
"""
    result = python(code, names=["no_such_module"])
    assert result.returncode == 0, result.stderr


def test_what_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'hvd_compress' has no attribute 'Optimiser'"):
        _ = hvdc.Optimiser
