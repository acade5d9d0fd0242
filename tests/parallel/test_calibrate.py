"""Calibration over real collectives."""

import horovod.tensorflow as hvd
import numpy as np
import pytest
import tensorflow as tf

import hvd_compress as hvdc
from hvd_compress.compressors.auto import CANDIDATES


def test_all_ranks_find_the_same(rank, size):
    calibration = hvdc.calibrate()
    texts = hvd.allgather_object(str(calibration))
    assert texts == [str(calibration)] * size
    assert calibration.ranks == size
    assert set(calibration.kernels) == set(CANDIDATES)
    assert all(link.alpha + link.beta > 0 for link in calibration.links.values())
    assert calibration.kernels["int8"].encode >= 0
    model = calibration.model()
    large = [model.predict(spec, 2**24).total for spec in CANDIDATES]
    small = [model.predict(spec, 2**12).total for spec in CANDIDATES]
    assert all(a >= b > 0 for a, b in zip(large, small))


@pytest.mark.slow
def test_compressors_of_ones_own(rank, size):
    class Half(hvdc.Compressor):
        def compress(self, tensor):
            return tf.cast(tensor, tf.float16), None

        def decompress(self, payload, ctx):
            return tf.cast(payload, tf.float32)

    calibration = hvdc.calibrate([Half(), "topk:ratio=0.01", "block_sparse:ratio=0.1,block=4"])
    assert list(calibration.kernels) == ["Half", "topk:ratio=0.01", "block_sparse:ratio=0.1,block=4"]
    times = [time for kernel in calibration.kernels.values() for time in (kernel.encode, kernel.decode_rank)]
    assert np.all(np.isfinite(times)) and min(times) >= 0.0


def test_who_is_not_there_cannot_measure(rank, process_sets):
    even = process_sets[0]
    if rank % 2 == 0:
        calibration = hvdc.calibrate(["int8"], process_set=even)
        assert calibration.ranks == even.size()
        predicted = calibration.model().predict("int8", 1e6).total
        assert predicted == 0.0 if even.size() == 1 else predicted > 0.0
    else:
        with pytest.raises(ValueError, match="not in the process set"):
            hvdc.calibrate(["int8"], process_set=even)
