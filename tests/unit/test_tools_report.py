"""The page of a run: whole, self-contained, and with the run's own numbers."""

import json
import shutil
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from hvd_compress.tools import report, run_log, savings
from hvd_compress.tools.cli import main

RUNS = Path(__file__).resolve().parent.parent / "data" / "runs"
VOID = {"meta", "br", "img", "link"}


class Page(HTMLParser):
    """Checks that tags are closed in order; collects what a page would load, ids and text."""

    def __init__(self, text):
        super().__init__()
        self.open, self.links, self.ids, self.text, self.tags = [], [], [], [], []
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        attributes = dict(attrs)
        self.links += [v for k, v in attrs if k in ("src", "href", "xlink:href") and v]
        self.ids += [attributes["id"]] if "id" in attributes else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.mark.parametrize("name", ["healthy", "healthy_auto", "slow_rank", "flapping", "diverges"])
def test_the_page_is_whole_and_loads_nothing(name):
    text = report.page(run_log.load(str(RUNS / name)))
    page = Page(text)
    # Of a run with several compressors, the time line.
    assert page.tags.count("svg") == (9 if name in ("flapping", "healthy_auto") else 8)
    assert page.tags.count("table") == (4 if name == "healthy_auto" else 3)
    assert all(link.startswith("#") for link in page.links)
    assert len(page.ids) == len(set(page.ids))
    assert {link[1:] for link in page.links} <= set(page.ids)
    assert "script" not in page.tags and "@import" not in text
    for start in [i for i in range(len(text)) if text.startswith("<svg", i)]:
        ElementTree.fromstring(text[start : text.index("</svg>", start) + 6])


def test_findings_and_figures_are_on_it():
    text = "".join(Page(report.page(run_log.load(str(RUNS / "slow_rank")))).text)
    assert "slow rank" in text and "rank 1 takes" in text and "int8" in text
    assert "Nothing found." in report.page(run_log.load(str(RUNS / "healthy")))


def test_the_page_opens_with_what_was_saved():
    run = run_log.load(str(RUNS / "healthy_auto"))
    text = "".join(Page(report.page(run)).text)
    for sentence in savings.sentences(run):
        assert text.index(sentence) < text.index("Doctor")
    assert "trials of candidates" in text and "gained by auto" in text


def test_what_was_saved_by_hand(tmp_path):
    directory = tmp_path / "run"
    directory.mkdir()
    meta = {"format": 1, "ranks": 2, "settings": {"compression": "auto"}, "link": {"latency_ms": 1, "ns_per_byte": 8}}
    (directory / "run.json").write_text(json.dumps(meta))
    header = ",".join([*run_log.STEP_COLUMNS, "trial"])
    cells = dict.fromkeys(run_log.STEP_COLUMNS, "0") | {"encode_ms": "3", "decode_ms": "2", "bytes": "1000"}
    lines = [
        ",".join([*(cells | {"step": str(step), "ratio": ratio}).values(), trial])
        for step, ratio, trial in [(11, "4", "0"), (12, "8", "1"), (13, "4", "0"), (14, "4", "0")]
    ]
    (directory / "rank-0.csv").write_text("\n".join([header, *lines]) + "\n")
    # The run was resumed: its first step is the eleventh. Three steps count with the first lines, one with the last.
    (directory / "auto.csv").write_text(
        "step,compressor,step_ms,progress,ms_per_progress\n"
        "13,auto,40,0.8,50\n13,none,200,1,200\n13,fp16,100,1,100\n"
        "14,auto,10,1,10\n14,none,5,1,5\n14,fp16,6,1,6\n"
    )
    run = run_log.load(str(directory))
    gained = {one.compressor: one.seconds for one in savings.of_auto(run)}
    assert gained == {"auto": 0.0, "none": pytest.approx((2.4 * 150 - 5) / 1e3), "fp16": pytest.approx((120 - 4) / 1e3)}
    sent, wire, auto, trials = savings.sentences(run)
    assert sent == "Rank 0 sent 4 kB in place of 20 kB, 5 times less."
    assert "128 us on the wire" in wire and "took 20 ms" in wire
    assert auto == (
        "By its cost model, auto took 116 ms less than with fp16, 355 ms less than with the best fixed candidate, "
        "none, for the same progress."
    )
    assert trials.startswith("1 of 4 steps")
    assert [row[-1] for row in savings.table(run)] == ["gained by auto", "", "+0.355 s", "+0.116 s"]


def test_without_auto_or_compression_little_is_said():
    run = run_log.load(str(RUNS / "healthy_none"))
    assert savings.of_auto(run) == savings.table(run) == []
    (line,) = savings.sentences(run)
    assert line.endswith("nothing was compressed.")


def test_lines_of_auto_that_are_missing_or_double_do_not_matter(tmp_path):
    shutil.copytree(RUNS / "healthy_auto", tmp_path / "run")
    path = tmp_path / "run" / "auto.csv"
    *lines, last = path.read_text().splitlines()
    whole = savings.of_auto(run_log.load(str(tmp_path / "run")))
    path.write_text("\n".join(lines) + "\n")  # the last line was cut off
    cut = savings.of_auto(run_log.load(str(tmp_path / "run")))
    assert [one.compressor for one in cut] == [one.compressor for one in whole]
    assert sum(one != other for one, other in zip(cut, whole)) == 1
    path.write_text("\n".join([*lines, last, last]) + "\n")  # two candidates of one name
    assert savings.of_auto(run_log.load(str(tmp_path / "run"))) == whole


def test_what_a_run_contains_is_escaped(tmp_path):
    run = run_log.load(str(RUNS / "healthy"))
    run.settings["name"] = "<script>alert(1)</script>"
    assert "<script>" not in report.page(run)


def test_the_command_writes_it(tmp_path):
    path = tmp_path / "page.html"
    result = CliRunner().invoke(main, ["report", str(RUNS / "healthy"), "-o", str(path), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.output) == {"run": str(RUNS / "healthy"), "page": str(path), "findings": 0}
    Page(path.read_text())
    missing = CliRunner().invoke(main, ["report", str(RUNS / "healthy"), "-o", str(tmp_path / "no" / "x.html")])
    assert missing.exit_code == 2 and "cannot be written" in missing.output


@pytest.mark.parametrize("package", ["jinja2", "matplotlib"])
def test_a_package_that_is_missing_is_named_in_one_line(package, tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "hvd_compress.tools.run_plots", raising=False)
    monkeypatch.setitem(sys.modules, package, None)  # as if it were not installed
    path = tmp_path / "page.html"
    result = CliRunner().invoke(main, ["report", str(RUNS / "healthy"), "-o", str(path)])
    assert result.exit_code == 1 and not path.exists()
    assert f"Error: report needs {package}: pip install 'hvd_compress[tools]'" in result.output.splitlines()
