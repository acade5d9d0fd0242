"""The page of a run: whole, self-contained, and with the run's own numbers."""

import json
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

from hvd_compress.tools import report, run_log
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


@pytest.mark.parametrize("name", ["healthy", "slow_rank", "flapping", "diverges"])
def test_the_page_is_whole_and_loads_nothing(name):
    text = report.page(run_log.load(str(RUNS / name)))
    page = Page(text)
    assert page.tags.count("svg") == 8 and page.tags.count("table") == 3
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
