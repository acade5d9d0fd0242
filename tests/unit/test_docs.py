"""The pages of the documentation: their code runs, and what they name exists."""

import ast
import json
import os
import pkgutil
import re
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests"))
from doc_blocks import PAGES, blocks, name, needs_ranks  # noqa: E402

TEXTS = {name(page): page.read_text(encoding="utf-8") for page in PAGES}
MADE_UP = {"train.py", "discover_hosts.py"}  # the reader's own


def prose(text):
    """The page without its code blocks."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.sub(r"^ {4}.*$", "", text, flags=re.MULTILINE)


def code_lines(text):
    """The lines of all blocks that are not Python, without comments; continued lines are joined."""
    text = re.sub(r"^```python\n.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    shell = re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    indented = "\n".join(line[4:] for line in text.splitlines() if line.startswith("    "))
    lines = "\n".join([*shell, indented]).replace("\\\n", " ").splitlines()
    return [re.sub(r"\s+#.*", "", line).strip() for line in lines]


def commands():
    """Page and words of each command of a shell block or in backquotes."""
    found = []
    start = re.compile(r"(sudo |[A-Z_]+=\S+ )*(hvd-compress|horovodrun|python|make|\.venv/bin/python) ")
    for page, text in TEXTS.items():
        for line in [*code_lines(text), *re.findall(r"`([^`\n]+)`", prose(text))]:
            if start.match(line) and "..." not in line:
                found.append((page, shlex.split(line)))
    return found


COMMANDS = commands()
OURS = [(page, words[words.index("hvd-compress") + 1 :]) for page, words in COMMANDS if "hvd-compress" in words]
PLANS = sorted({tuple(words[1:]) for _, words in OURS if words[:1] == ["plan"] and "--params" in words})


def slug(heading):
    """A heading's anchor, as GitHub and MkDocs make it."""
    text = re.sub(r"[^\w\s-]", "", heading.strip().lower())
    return re.sub(r"\s", "-", text)


def test_every_page_is_in_the_navigation():
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    for page in (ROOT / "docs").glob("*.md"):
        assert f": {page.name}\n" in nav, page.name


def test_the_reference_names_everything_public():
    import hvd_compress as hvdc

    listed = re.findall(r"^::: (\S+)$|^        - (\w+)$", TEXTS["docs/api.md"], re.MULTILINE)
    listed = [full or f"hvd_compress.frontends.keras.callbacks.{member}" for full, member in listed]
    objects = [pkgutil.resolve_name(path) for path in listed]  # raises where there is none
    modules = ("callbacks", "cost", "elastic", "loggers", "optimizers")
    public = {getattr(hvdc, each) for each in hvdc.__all__ if each != "__version__" and each not in modules}
    assert public <= {each for each in objects if callable(each)}
    base = pkgutil.resolve_name("hvd_compress.frontends.keras.callbacks.Callback")
    for each in vars(hvdc.callbacks).values():
        assert not isinstance(each, type) or not issubclass(each, base) or each in (base, *objects), each
    assert {getattr(hvdc.optimizers, each) for each in hvdc.optimizers.__all__} <= set(objects)
    assert {getattr(hvdc.loggers, each) for each in hvdc.loggers.__all__} <= set(objects)
    for each in hvdc.elastic.__all__:
        assert getattr(hvdc.elastic, each) in objects or each.endswith("Callback"), each
    assert "hvd_compress.frontends.elastic.callbacks" in listed


@pytest.mark.parametrize("page", sorted(TEXTS))
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)\s]+)\)", TEXTS[page])
    for target in targets:
        if target.startswith("http"):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / page).parent / path if path else ROOT / page
        assert file.exists(), target
        if page.startswith("docs/"):  # the site holds nothing else
            assert (ROOT / "docs") in file.resolve().parents, target
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in map(slug, headings), target


@pytest.mark.parametrize("page", sorted(TEXTS))
def test_files_that_are_named_exist(page):
    text = TEXTS[page]
    for path in re.findall(r"(?<![\w/.-])((?:tests|benchmarks|examples|scripts|docs)/[\w./*-]*\w)", text):
        assert any(ROOT.glob(path)), path
    for path in re.findall(r"`([\w/]+\.py)`", text):
        known = [ROOT / path, *(ROOT / "hvd_compress").rglob(path)]
        assert path in MADE_UP or any(file.exists() for file in known), path


def test_sizes_in_the_readme():
    from hvd_compress import formats

    rows = re.findall(r"^\| (`.+`[^|]*) \| [^|]+ \| ([\d., ]+) \|", TEXTS["README.md"], re.MULTILINE)
    checked = 0
    for names, sizes in rows:
        specs = re.findall(r"`([\w:=.,]+)`", names)
        sizes = [float(size) for size in sizes.split(",")]
        for spec, size in zip(specs, sizes * len(specs) if len(sizes) == 1 else sizes):
            found = formats.parse(spec).wire_bytes((4096, 4096)) / 4096**2
            assert found == pytest.approx(size, rel=0.03), spec
            checked += 1
    assert checked >= 11


def results(*names):
    """What benchmarks have written into these files of docs/results."""
    return [json.loads((ROOT / "docs" / "results" / f"{name}.json").read_text()) for name in names]


def trainings(names="train_*"):
    """The results of benchmarks/train.py in the files with these names."""
    return [json.loads(path.read_text()) for path in (ROOT / "docs" / "results").glob(f"{names}.json")]


def test_tables_of_trainings_are_those_of_the_measured_results():
    sys.path.insert(0, str(ROOT / "benchmarks"))
    import auto_results
    import switching
    from train_results import link_of, table

    shown = re.findall(r"<!-- table: (.+) -->\n\n((?:\|.*\n)+)\n<!-- end of table -->", TEXTS["docs/results.md"])
    measured = {f"{result['task']} {link_of(result)}": table(result) + "\n" for result in trainings()}
    measured["switching"] = switching.table(trainings()) + "\n"
    measured |= {name: text + "\n" for name, text in auto_results.tables(trainings("auto_*")).items()}
    assert {f"{task} {rate}" for task in ("gpt", "digits") for rate in ("100mbit", "1gbit", "10gbit")} <= set(measured)
    assert dict(shown) == measured


def test_the_table_of_optimizers_is_what_was_measured():
    files = results("optimizers_gpt_100mbit", "optimizers_gpt_1gbit")
    runs = [{run["method"]: run for run in file["runs"]} for file in files]
    for kind in ("AdamW", "LAMB", "Lion", "Muon"):
        for of_rate, rate in zip(runs, ("100 Mbit/s", "1 Gbit/s")):
            of_kind = [of_rate[f"{kind.lower()} {method}"] for method in ("none", "int4", "hadamard", "auto")]
            cells = " | ".join(f"{run['seconds']:.1f} ({run['steps']})" for run in of_kind)
            assert f"| {kind}, {rate} | {cells} |\n" in TEXTS["docs/results.md"]


def test_the_table_of_recommenders_is_what_was_measured():
    files = results(*(f"recommender_seeds_{rate}" for rate in ("100mbit", "1gbit", "10gbit")))
    of_rates = [file["runs"] for file in files]
    for method in ("none", "int4", "hadamard", "auto"):
        runs = [[run for run in of_rate if run["method"] == method] for of_rate in of_rates]
        cells = [" ".join(f"{run['seconds']:.1f}" for run in of_rate) for of_rate in runs]
        recall = statistics.mean(run["metric"] for run in runs[1] + runs[2])
        assert f"| {method} | {' | '.join(cells)} | {recall:.2f} |\n" in TEXTS["docs/results.md"]


def of_auto(table, cells):
    """The rows of a table about `auto`: task, rate and `cells`; and the runs that were measured, by task and rate."""
    shown = TEXTS["docs/results.md"].partition(f"<!-- table: {table} -->")[2].partition("<!--")[0]
    rows = re.findall(rf"^\| (\w+), (\w+) \| {cells} \|$", shown, re.MULTILINE)
    return rows, {(file["task"], file["rate"]): file["runs"] for file in trainings("auto_*")}


def test_the_table_of_auto_and_fixed_is_what_was_measured():
    rows, files = of_auto("auto and fixed", r"(.+?) \| (.+)")
    assert len(rows) == len({(*key, run["method"]) for key, runs in files.items() for run in runs})
    assert {(task, "100mbit") for task in ("gpt", "digits", "autoencoder", "mlp")} <= set(files)
    columns = {"seconds": ".1f", "steps": "d", "step_ms": ".0f", "first_step": ".1f", "metric": ".2f"}
    for task, rate, method, cells in rows:
        runs = sorted((run for run in files[task, rate] if run["method"] == method), key=lambda run: run["seed"])
        assert cells.split(" | ") == [" ".join(format(run[key], form) for run in runs) for key, form in columns.items()]


def test_the_quotients_of_auto_are_those_of_medians():
    rows, files = of_auto("auto", r"[^|]+ \| ([^|]+) \| (.+)")
    assert len(rows) == len(files)
    for task, rate, fastest, cells in rows:
        seconds = {}
        for run in files[task, rate]:
            seconds.setdefault(run["method"], {}).setdefault(run["seed"], []).append(run["seconds"])
        flat = {method: [s for of_seed in seeds.values() for s in of_seed] for method, seeds in seconds.items()}
        ours, fixed = statistics.median(flat.pop("auto")), {m: statistics.median(each) for m, each in flat.items()}
        assert fixed[fastest] == min(fixed.values())
        expected = [f"{ours:.1f}", f"{fixed[fastest]:.1f}", f"{ours / fixed[fastest]:.2f}", "-"]
        if "none" in seconds:
            beside = [s for seed in seconds["none"] for s in seconds["auto"][seed]]
            expected[-1] = f"{statistics.median(beside) / fixed['none']:.2f}"
        assert cells.split(" | ") == expected


def step_ms(*names):
    """The ms per step of each method in files of docs/results."""
    return [{run["method"]: run["step_ms"] for run in file["runs"]} for file in results(*names)]


def test_the_tables_of_steps_with_less_exchange_are_what_was_measured():
    wan, delay = (
        step_ms("local_steps_gpt_50ms_10mbit", "local_steps_gpt_50ms_100mbit"),
        step_ms("delay_gpt_100mbit", "delay_gpt_1gbit"),
    )
    rows = [
        ("docs/local-steps.md", "ms per step without any exchange", wan, "none + local_steps=1000"),
        ("docs/local-steps.md", "ms per step with `local_steps=90`, `hadamard`", wan, "hadamard + local_steps=90"),
        ("docs/delay.md", "without any exchange", delay, "none + local_steps=1000"),
        ("docs/delay.md", "`int4`", delay, "int4 + sparse_as_dense=True"),
        ("docs/delay.md", "`int4`, `delay=1`", delay, "int4 + delay=1 sparse_as_dense=True"),
    ]
    for page, label, of_rates, method in rows:
        assert f"| {label} | {' | '.join(f'{each[method]:.1f}' for each in of_rates)} |\n" in TEXTS[page]
    shares = " | ".join(f"{each['none + local_steps=1000'] / each['hadamard + local_steps=90']:.0%}" for each in wan)
    assert f"| share of the time that is computing | {shares} |\n" in TEXTS["docs/local-steps.md"]


def test_the_table_of_progress_is_what_was_measured():
    cells: dict[str, list[str]] = {}
    for row in (row for result in results("progress_gpt", "progress_digits") for row in result["rows"]):
        estimates = [statistics.mean(row[when]) for when in ("after 49", "after 275")]
        cells.setdefault(row["compressor"], []).extend(f"{value:.2f}" for value in (*estimates, row["true"]))
    for compressor, numbers in cells.items():
        assert f"| `{compressor}` | {' | '.join(numbers)} |\n" in TEXTS["docs/auto.md"]
    of_lamb, of_muon, of_lion = (
        {row["compressor"]: row for row in result["rows"]}
        for result in results("progress_gpt_lamb", "progress_gpt_muon", "progress_gpt_lion")
    )
    (int4, int4_is), (hadamard, hadamard_is), (bits, bits_is) = (
        (f"{of_lamb[spec]['after 275'][0]:.2f}", f"{of_lamb[spec]['true']:.2f}")
        for spec in ("int4", "hadamard", "quantize:bits=2")
    )
    text = TEXTS["docs/auto.md"].replace("\n", " ")
    estimated = f"are {int4} for `int4`, {hadamard} for `hadamard` and {bits} for `quantize:bits=2`; true are "
    assert f"{estimated}{int4_is}, {hadamard_is} and {bits_is} (" in text
    (hadamard, hadamard_is), (hybrid, hybrid_is) = (
        (f"{of_muon[spec]['after 275'][0]:.2f}", f"{of_muon[spec]['true']:.2f}")
        for spec in ("hadamard", "hybrid:ratio=0.05,bits=4")
    )
    estimated = f"With Muon, they are {hadamard} for `hadamard` and {hybrid} for `hybrid:ratio=0.05,bits=4`; true are "
    assert f"{estimated}{hadamard_is} and {hybrid_is}." in text
    hadamard, hadamard_is = of_lion["hadamard"]["after 275"][0], of_lion["hadamard"]["true"]
    assert f"the lower bound counts: {hadamard:.2f} for `hadamard`, where {hadamard_is:.2f} is true (" in text


def test_the_table_of_a_wrong_estimate_is_what_was_measured():
    (found,) = results("autoencoder_100mbit")
    of_method = {run["method"]: run for run in found["runs"]}
    of_method["auto`, four candidates"] = of_method["auto:candidates=(none|int8|int4|hadamard)"]
    of_method |= {f"auto`, seed {run['seed']}": run for run in found["runs"] if run["method"] == "auto"}
    shown = re.search(r"### Where the estimate is wrong\n(.*?)\n## ", TEXTS["docs/auto.md"], re.DOTALL)[1]
    rows = re.findall(r"^\| `(.+?)`? \| (.+) \| (.+) \| (.+) \| (.+) \|$", shown, re.MULTILINE)
    assert len(rows) == len(found["runs"])
    assert found["target"] == 0.6 and of_method["none"]["steps"] == 220
    for method, *cells in rows:
        run = of_method[method]
        seconds = "-" if run["seconds"] is None else f"{run['seconds']:.1f}"
        assert cells == [seconds, str(run["steps"] or "-"), f"{run['step_ms']:.0f}", f"{run['metric']:.2f}"]


def test_the_table_of_the_soak_is_what_was_measured():
    (found,) = results("chaos_20s")
    for run in found["runs"]:
        training, goodput = run["training"], run["goodput"]
        faults, seconds = training["faults"], training["progress"]["seconds"]
        cells = [
            run["seed"], len(faults), f"{seconds / len(faults):.0f}", training["progress"]["steps"],
            f"{goodput['steps']:.2f}", f"{goodput['worker_steps']:.2f}", len(training["restarts"]),
            f"{max(fault['pause'] for fault in faults):.0f}", len(training["violations"]),
        ]  # fmt: skip
        assert f"| {' | '.join(map(str, cells))} |\n" in TEXTS["docs/reliability.md"]
    commits = sum(run["training"]["counts"]["commit"] for run in found["runs"])
    assert f"after each of {commits:,} commits" in TEXTS["docs/reliability.md"]


def test_what_is_said_of_a_gpu_is_what_was_measured():
    (found,) = results("gpu/train_gpt2_10gbit")
    runs = {run["method"]: run for run in found["runs"]}
    for method, run in runs.items():
        label = f"{method} ({run['chosen'].split(',')[0]})" if run["chosen"] else method
        each = run["bytes"] / run["curve"][-1][0] / 1e6
        row = f"{run['step_ms']:.0f} | {each:.0f} | {run['first_step']:.1f} | {run['steps']} | {run['seconds']:.1f}"
        assert f"| {label} | {row} |\n" in TEXTS["docs/results.md"]
    auto, stock = runs["auto"], runs["horovod none"]
    text = TEXTS["README.md"].replace("\n", " ")
    assert f"reaches a loss {stock['seconds'] / auto['seconds']:.1f} times as fast with `auto` as with Horovod" in text
    assert f"and {stock['seconds'] / runs['int4']['seconds']:.1f} times as fast with `int4`" in text
    assert f"a step of `auto` takes {auto['step_ms']:.0f} ms in place of {stock['step_ms']:.0f}" in text


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_numbers_that_open_a_page(page):
    text = TEXTS[page].replace("\n", " ")
    runs = {found["rate"]: found["runs"] for found in trainings() if found["task"] == "gpt" and not found["change"]}

    def median(rate, method, key):
        return statistics.median(run[key] for run in runs[rate] if run["method"] == method)

    def ratio(method, other, key, rate="100mbit"):
        return median(rate, method, key) / median(rate, other, key)

    for shown, value in [
        ("**{:.1f} times as fast** as with Horovod", ratio("horovod none", "auto", "seconds")),
        ("Horovod's fp16: {:.1f} times", ratio("horovod none", "horovod fp16", "seconds")),
        ("**{:.0f} times fewer bytes**", ratio("horovod none", "auto", "bytes")),
        ("**{:.1f}% higher** than with Horovod", 100 * ratio("auto", "horovod none", "metric") - 100),
        ("{:.1f}% higher than with this package's `none`", 100 * ratio("auto", "none", "metric") - 100),
        ("At 1 Gbit/s, it was {:.1f} times as fast, with `int4`", ratio("horovod none", "auto", "seconds", "1gbit")),
    ]:
        assert shown.format(value) in text, shown.format(value)
    found = {}  # the loss after equal steps, which does not depend on the link
    for result in results("auto_gpt_1gbit", "auto_gpt_10gbit"):
        found |= {(run["method"], run["seed"]): run["metric"] for run in result["runs"]}
    more = [100 * found["int2", seed] / found["none", seed] - 100 for seed in (1, 2, 3)]
    assert f"a loss {min(more):.1f} to {max(more):.1f}% higher than with `none`" in text


def test_plain_pages_run(tmp_path):
    pages = [name(page) for page in PAGES if blocks(page) and not needs_ranks(page)]
    assert pages
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, str(ROOT / "tests" / "doc_blocks.py"), str(tmp_path), *pages]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.findall(r"^ran \d+ blocks of (\S+)", done.stdout, re.MULTILINE) == pages


def test_python_is_fenced():
    """Indented Python would not be run."""
    for page, text in TEXTS.items():
        for line in code_lines(text):
            assert not re.match(r"(import|from) \w|\w+ = hvdc\.|print\(", line), (page, line)


def test_commands_parse():
    from click import BadParameter

    from hvd_compress.tools.cli import main

    assert {words[0] for _, words in OURS if words} >= set(main.commands)
    for page, words in OURS:
        if not words or words[0].startswith("-"):
            continue
        command = main.commands[words[0]]
        if words[1:]:
            try:
                command.make_context(words[0], words[1:])
            except BadParameter as error:  # files are the reader's
                assert "does not exist" in str(error), (page, words)


@pytest.mark.parametrize("arguments", PLANS, ids=" ".join)
def test_plans_run(arguments, tmp_path, monkeypatch):
    from click.testing import CliRunner

    from hvd_compress.tools.cli import main

    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["plan", *arguments])
    assert result.exit_code == 0, result.output
    assert "auto" in result.output


def planned(arguments):
    from click.testing import CliRunner

    from hvd_compress.tools.cli import main

    return json.loads(CliRunner().invoke(main, ["plan", *arguments, "--json"]).output)


def test_the_page_of_plan_shows_what_it_prints():
    text = TEXTS["docs/tools.md"]
    example = "--params 25.6M --ranks 8 --bandwidth 10gbit --latency 50us --backward 120ms"
    (case,) = planned(example.split())["cases"]
    for each in case["compressors"]:
        row = rf"│ {re.escape(each['compressor'])} +│[^│]*│[^│]*│ +{each['progress']:.0%} │"
        assert re.search(row, text), row
    (arguments,) = (plan for plan in PLANS if "8,30" in plan)
    (steps,) = planned(arguments)["other_steps"]
    fastest = min(steps, key=lambda step: step["per_progress"])
    said = (
        f"the model computes in {steps[0]['computing']:.0%} of the time with `{steps[0]['compressor']}` in each step, "
        f"and in {fastest['computing']:.0%} of the time with `{fastest['compressor']}` and `{fastest['setting']}`"
    )
    assert said in " ".join(text.split())


def test_scripts_and_their_options_exist():
    from horovod.runner import launch

    of_horovodrun = Path(launch.__file__).read_text(encoding="utf-8")
    checked = 0
    for page, words in COMMANDS:
        words = [word for word in words if word not in ("sudo", "--") and not re.match("[A-Z_]+=", word)]
        script = None
        for word in words:
            if word.endswith(".py"):
                script = ROOT / word
                assert word in MADE_UP or script.exists(), (page, word)
            elif word == "hvd-compress":
                break
            elif word.startswith("-") and script and script.exists():
                known = "".join(file.read_text(encoding="utf-8") for file in script.parent.glob("*.py"))
                assert f'"{word}"' in known, (page, word)
                checked += 1
            elif word.startswith("-") and not script and "horovodrun" in words:
                assert f"'{word}'" in of_horovodrun or f'"{word}"' in of_horovodrun, (page, word)
                checked += 1
    assert checked > 20


def test_make_targets_and_variables_exist():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for page, words in COMMANDS:
        if "make" in words:
            for word in words[words.index("make") + 1 :]:
                pattern = rf"^{word.split('=')[0]} \?=" if "=" in word else rf"^{word}:"
                assert re.search(pattern, makefile, re.MULTILINE), (page, word)


def test_environment_variables_exist():
    source = "".join(file.read_text(encoding="utf-8") for file in (ROOT / "hvd_compress").rglob("*.py"))
    for page, text in TEXTS.items():
        for variable in re.findall(r"\bHVD_\w+", text):
            assert f'"{variable}"' in source or f"{variable} " in source, (page, variable)


def literals():
    """The strings in the package's source, those of f-strings between what is put in."""
    for file in (ROOT / "hvd_compress").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) > 8:
                yield node.value


def test_messages_are_real():
    """Nearly all of each message is in the source: what is not has been put in."""
    known = set(literals())
    messages = re.findall(r"^```text\n(.*?)\n```$", TEXTS["docs/troubleshooting.md"], re.M | re.S)
    assert len(messages) > 20
    for message in messages:
        if any(message in literal for literal in known):  # the end of a long one may be left out
            continue
        covered = set()
        for literal in known:
            start = message.find(literal)
            covered.update(range(start, start + len(literal)) if start >= 0 else ())
        assert len(covered) > 0.6 * len(message), message
