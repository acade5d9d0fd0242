"""What `bench` sends: recorded gradients, in the shapes of any model."""

import numpy as np
import pytest

from hvd_compress.common import gradient_file
from hvd_compress.tools.models import MODELS
from hvd_compress.tools.recorded import FILE, gradients


def test_they_have_the_shapes_of_any_model_and_differ_between_ranks():
    shapes = [*MODELS["mnist"](), (40, 4, 10), (2, 3, 4, 5, 6), (7,)]
    ranks = [gradients(shapes, rank) for rank in range(3)]
    for i, shape in enumerate(shapes):
        values = [of_rank[i] for of_rank in ranks]
        assert all(v.shape == shape and v.dtype == np.float32 and np.isfinite(v).all() for v in values)
        assert not np.array_equal(values[0], values[1]) and not np.array_equal(values[0], values[2])
    for again, before in zip(gradients(shapes, 1), ranks[1]):
        np.testing.assert_array_equal(again, before)


def test_a_matrix_keeps_its_rank_and_its_values():
    matrices = {n: x for n, x in gradient_file.read(FILE)[0].items() if x.ndim == 2}
    largest = max(matrices.values(), key=np.size).astype(np.float32) / 1024
    rows, columns = largest.shape
    (made,) = gradients([(3 * rows, 2 * columns)], 0)
    # Factors of rows and columns are from 1 / 1.25 to 1.25 each.
    ratio = made[:rows, :columns][largest != 0] / largest[largest != 0]
    assert 0.63 < ratio.min() < 0.8 and 1.25 < ratio.max() < 1.57
    singular = np.linalg.svd(made.astype(np.float64), compute_uv=False)
    assert (singular[min(rows, columns) :] < 1e-5 * singular[0]).all()


@pytest.mark.parametrize("model", ["gpt", "resnet20"])
def test_the_file_is_small_and_holds_both_models(model):
    steps = gradient_file.read(FILE)
    assert len(steps) == 2 and FILE.stat().st_size < 5e6
    names = [name for name in steps[0] if name.startswith(f"{model}/")]
    assert sum(steps[0][name].size for name in names) > 250_000
    assert all(steps[0][name].dtype == np.float16 for name in names)
    # Real gradients: far from normal noise, whose kurtosis is 3.
    values = np.concatenate([steps[0][name].astype(np.float64).ravel() for name in names])
    assert np.mean(values**4) / np.mean(values**2) ** 2 > 10
