"""The pages whose code needs several ranks run under horovodrun, and the notebook, which starts ranks itself."""

import re
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "tests"))
from doc_blocks import PAGES, blocks, name, needs_ranks


@pytest.mark.timeout(640)
def test_pages_run_on_two_ranks(horovodrun, tmp_path):
    pages = [name(page) for page in PAGES if blocks(page) and needs_ranks(page)]
    assert pages
    result = horovodrun(2, ["tests/doc_blocks.py", str(tmp_path), *pages])
    assert result.returncode == 0, result.stderr[-3000:]
    for rank in range(2):
        ran = re.findall(rf"^\[{rank}\]<stdout>:ran \d+ blocks of (\S+)", result.stdout, re.MULTILINE)
        assert ran == pages

    # The script of the guide goes on where its newest checkpoint was made. (If no save of residuals were of the same
    # step, that would be an error.)
    guide = tmp_path / "keras-script"
    saved = sorted(path.name for path in (guide / "checkpoints").iterdir())
    assert len(saved) == 8
    (guide / "checkpoints" / saved[-1]).unlink()
    result = horovodrun(2, ["tests/doc_blocks.py", str(tmp_path), "docs/keras-script.md"])
    assert result.returncode == 0, result.stderr[-3000:]
    assert re.findall(r"Epoch (\d+)/8", result.stdout) == ["8"]
    assert sorted(path.name for path in (guide / "checkpoints").iterdir()) == saved


@pytest.mark.timeout(320)
@pytest.mark.slow
def test_the_notebook_runs(python, tmp_path):
    result = python(["tests/doc_blocks.py", str(tmp_path), "examples/quickstart.ipynb"])
    assert result.returncode == 0, result.stderr[-3000:]
    sent = re.findall(r"^(none|int8) +loss [\d.]+, ([\d,]+) bytes per step instead of ([\d,]+)$", result.stdout, re.M)
    (none, sent_plain, plain), (int8, sent_int8, _) = sent
    assert (none, int8) == ("none", "int8") and sent_plain == plain
    assert int(sent_int8.replace(",", "")) < 0.3 * int(plain.replace(",", ""))
