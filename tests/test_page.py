"""The report page: its numbers are the records', it is one well-formed file without a link outwards, and browsers show it."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from aggcli.analysis.frames import read_frames
from aggcli.cli.plot import plot
from aggcli.records import read_lines
from aggcli.report import style
from aggcli.report.figures import all_figures, picture
from aggcli.report.findings import find
from aggcli.report.origin import of_records
from aggcli.report.page import page as page_of
from aggcli.report.sizes import SIZES
from aggcli.report.verdicts import question
from tests.cli import aggcli, compared_directories
from tests.test_plot import write_comparison, write_lines, write_run

VOID = {"meta", "link", "br", "hr", "img", "wbr"}
CORRECT = {"sample_mean": (60, 62, 70), "token_mean": (60, 64, 68)}
"""Correct samples of 100 at the last step, a seed each: means 0.64 and 0.64, differences 0, +0.02, -0.02."""


class Page(HTMLParser):
    """Tables by their label, as rows of (text, data-value); refuses tags that do not match, and ids that repeat."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tables: dict[str, list[list[tuple[str, str | None]]]] = {}
        self.attributes: list[tuple[str, str]] = []
        self.said: list[str] = []
        self._cell: list[str] | None = None
        self._rows: list[list[tuple[str, str | None]]] = []
        self.feed(source)
        self.close()
        assert self.open == []
        ids = [value for name, value in self.attributes if name == "id"]
        assert len(ids) == len(set(ids))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        assert len(given) == len(attrs), f"an attribute of <{tag}> twice"
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self._rows = self.tables.setdefault(given["aria-label"] or "", [])
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._cell, self._value = [], given.get("data-value")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert "svg" in self.open, f"<{tag}/> outside SVG"
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open, tag
        assert self.open.pop() == tag
        if tag in ("td", "th") and self._cell is not None:
            self._rows[-1].append(("".join(self._cell), self._value))
            self._cell = None

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self.open):
            self.said.append(data)
        if self._cell is not None:
            self._cell.append(data)

    def table(self, start: str) -> list[dict[str, tuple[str, str | None]]]:
        """The rows of the one table whose label starts so, by the text of their heads."""
        (head, *body) = next(rows for label, rows in self.tables.items() if label.startswith(start))
        return [dict(zip((text for text, _ in head), row, strict=True)) for row in body]

    @property
    def text(self) -> str:
        return " ".join("".join(self.said).split())


def report(*directories: Path) -> str:
    frames = read_frames(directories)
    findings = find(frames)
    with style.drawn_at(replace(SIZES["column"], titled=False)):
        narrow = picture(frames, findings)
    return page_of(of_records(directories, frames), frames, findings, *all_figures(frames, findings=findings), narrow)


def write_trained(directory: Path, seeds: int = 3) -> Path:
    """A trained comparison by hand: 2 modes, 10 steps of 100 samples of 5 tokens."""
    names = [f"{mode}/seed-{seed}" for mode in CORRECT for seed in range(seeds)]
    for name in names:
        mode, seed = name.split("/")[0], int(name[-1])
        ends = CORRECT[mode][seed]
        steps = [
            {
                "rollout_step": step,
                "pg_loss": -1.0 if mode == "sample_mean" else 1.0,
                "samples": 100,
                "response_tokens": 500 + seed,
                "correct/count": (count := 30 + step * 2 if step < 9 else ends),
                "incorrect/count": 100 - count,
                "raw_reward": count / 100,
                "notes": ["a step's <note>"],
                "skipped": {"kl_loss": "needs ref_log_probs"},
            }
            for step in range(10)
        ]
        write_run(directory / name, mode, steps, samples=False)
        manifest = {"schema": 1, "mode": mode, "seed": seed, "settings": {"lr": 0.001}, "status": "done"}
        (directory / name / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    environment = {"git_commit": "c0ffee", "device": "cpu", "packages": {"torch": "2.13.0"}}
    arguments = ["compare", "--seeds", str(seeds), "--output", "a folder"]
    whole = {"schema": 1, "runs": names, "arguments": arguments, "environment": environment, "status": "done"}
    (directory / "manifest.json").write_text(json.dumps(whole), encoding="utf-8")
    return directory


# -- numbers and words --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_mean_of_a_replay_on_the_page_is_the_mean_of_the_records(tmp_path: Path) -> None:
    comparison = write_comparison(tmp_path / "c")
    lines = list(read_lines(comparison / "constant" / "metrics.jsonl"))
    write_lines(comparison / "constant" / "metrics.jsonl", [{**line, "pg_loss": line["pg_loss"] + 1} for line in lines])
    page = Page(report(comparison))
    found = {row["metric"][0]: row for row in page.table("Every metric that differs between the runs")}
    assert list(found) == ["pg_loss"]
    same = {row["metric"][0]: row for row in page.table("Metrics that are the same in all 4 runs")}
    assert list(same) == ["ppo_kl", *(f"weight_share/length_{bin_}" for bin_ in ("p25", "p50", "p75", "p100"))]
    for name, row in (found | same).items():
        for mode in ("sample_mean", "prompt_mean", "token_mean", "constant"):
            values = [line[name] for line in read_lines(comparison / mode / "metrics.jsonl") if line[name] is not None]
            text, value = row[mode] if name in found else row["all 4 runs"]
            assert float(value or "nan") == math.fsum(values) / len(values)
            assert text == f"{float(value or 'nan'):.4g}" + ("1 of 2 steps" if name == "ppo_kl" else "")
    assert found["pg_loss"]["unit, over what"][0] == "over trained tokens, by the mode's weights"


def test_the_comparison_of_trained_runs_has_the_means_differences_and_intervals_of_the_seeds(tmp_path: Path) -> None:
    page = Page(report(write_trained(tmp_path / "c")))
    one, other = [
        row
        for row in page.table("The comparison")
        if row["outcome"][0].startswith("accuracy in training rollouts, equal steps")
    ]
    assert float(one["mean"][1] or "nan") == pytest.approx(0.64)
    assert one["difference"] == ("", None)
    assert float(other["difference"][1] or "nan") == pytest.approx(0, abs=1e-12)
    reach = 4.302652729911275 * 0.02 / math.sqrt(3)  # t of 2 degrees of freedom; the differences' standard deviation is 0.02
    assert other["difference"][0] == f"+0[{-reach:.3g}, +{reach:.3g}]"
    assert other["sign-flip p"][0] == "1floor 0.25"
    runs = {row["run"][0]: row for row in page.table("The runs")}
    assert runs["token_mean (seed-2)"]["response tokens"] == ("5,020", "5020.0")
    assert [row["comparisons"] for row in page.table("pg_loss of each layout")] == [("60", "60")]


@pytest.mark.slow
def test_the_verdict_says_that_nothing_is_shown_and_never_ranks_by_pg_loss(tmp_path: Path) -> None:
    text = Page(report(write_trained(tmp_path / "c"))).text
    assert "No difference from sample_mean is shown under token_mean, in any of " in text
    assert "Accuracy in training rollouts, equal steps, step 9, against sample_mean (Holm over the " in text
    assert "token_mean: no difference shown, +" in text
    assert "Holm p = 1, sign-flip p = 1 (floor 0.25), 3 seeds" in text
    assert "the sign-flip p cannot fall below 0.25" in text
    assert "never by pg_loss" in text
    assert "The layout changes nothing: pg_loss is the same to the last bit (2 layouts, 60 comparisons)." in text


def test_a_difference_that_is_shown_is_said_with_its_interval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CORRECT, "token_mean", (80, 83, 90))
    text = Page(report(write_trained(tmp_path / "c"))).text
    assert "2 of 4 differences from sample_mean under token_mean are shown; the largest against its spread over seeds: " in text
    assert re.search(r"token_mean: higher, \+0\.203 \[\+0\.1\d+, \+0\.2\d+\], Holm p = 0\.0\d+, sign-flip p = 0\.25", text)


def test_one_seed_is_said_plainly_and_has_no_interval(tmp_path: Path) -> None:
    page = Page(report(write_trained(tmp_path / "c", seeds=1)))
    assert "One seed: no interval and no test, so no difference can be shown between sample_mean and" in page.text
    assert page.text.lower().count("give more seeds") == 1
    assert "Student-t" not in page.text
    cells = [text for row in page.table("The comparison") for text, _ in row.values()]
    assert not any("[" in text for text in cells)


@pytest.mark.slow
def test_recorded_rollouts_rank_no_mode_and_show_the_gradients_that_differ(tmp_path: Path) -> None:
    comparison = write_comparison(tmp_path / "c")
    page = Page(report(comparison))
    assert "Accuracy and length are properties of the recorded rollouts, and no mode can change them" in page.text
    assert "no mode can change them; what the modes change is the weight of each token" in page.text
    assert not any(label.startswith("The comparison") for label in page.tables)
    for mode, norm in (("sample_mean", 2.0), ("constant", 0.5)):
        steps = [
            {"pg_loss": 0.25, "grad_norm_log_probs": norm * (step + 1), "effective_tokens": 10 * norm} for step in range(2)
        ]
        write_lines(comparison / mode / "metrics.jsonl", [{"step": at, "mode": mode, **step} for at, step in enumerate(steps)])
    text = Page(report(comparison)).text
    assert "Against sample_mean, mean of 2 steps:" in text
    assert "constant: gradient norm 0.25x; effective sample size 5 tokens against 20" in text


@pytest.mark.slow
def test_a_single_run_and_several_directories_have_a_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", samples=False)
    page = Page(report(run))
    assert "What does sample_mean make of the same rollouts" in page.text
    assert page.table("Every metric")[0]["sample_mean"] == ("0.25", "0.25")
    many = Page(report(run, write_trained(tmp_path / "c"), write_comparison(tmp_path / "d")))
    assert len(many.table("The runs")) == 1 + 6 + 4
    assert "aggcli plot --html" in many.text


@pytest.mark.slow
def test_only_what_differs_is_in_the_settings_and_more_than_the_mode_is_warned_about(tmp_path: Path) -> None:
    comparison = write_trained(tmp_path / "c")
    assert "No setting, version or device differs" in Page(report(comparison)).text
    for run in comparison.glob("token_mean/*/manifest.json"):
        run.write_text(run.read_text().replace("0.001", "0.003"))
    page = Page(report(comparison))
    assert [(row["setting"][0], row["value"][0]) for row in page.table("Only what differs")] == [
        ("lr", "0.001"),
        ("lr", "0.003"),
    ]
    assert "more than the mode differs" in page.text


@pytest.mark.slow
def test_commands_commit_notes_and_skipped_metrics_are_on_the_page(tmp_path: Path) -> None:
    text = Page(report(write_trained(tmp_path / "c"))).text
    assert "git checkout c0ffee aggcli compare --seeds 3 --output 'a folder' aggcli plot --html" in text
    assert "torch: 2.13.0" in text
    assert "kl_loss: needs ref_log_probs" in text
    assert "a step's <note> (60 recorded steps)" in text
    assert "no figure weight_by_length: no samples are recorded" in text


@pytest.mark.slow
def test_differences_are_signed_and_sorting_keeps_the_figures_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CORRECT, "sample_mean", (60, 62, 70, 61))
    monkeypatch.setitem(CORRECT, "token_mean", (80, 83, 90, 82))
    source = report(write_trained(tmp_path / "c", seeds=4))
    page = Page(source)
    rows = page.table("The comparison")
    _, other = [row for row in rows if row["outcome"][0].startswith("accuracy in training rollouts, equal steps")]
    assert re.fullmatch(r"\+0\.\d{3}\[\+0\.\d{3}, \+0\.\d{3}\]", other["difference"][0])
    assert other["IQM"][0] == "0.825"  # the middle half of 0.8, 0.82, 0.83, 0.9
    assert "IQM" in next(label for label in page.tables if label.startswith("The comparison"))
    assert 'data-group="accuracy"' in source


@pytest.mark.slow
def test_three_seeds_have_no_interquartile_mean_and_no_word_of_it(tmp_path: Path) -> None:
    page = Page(report(write_trained(tmp_path / "c")))
    assert "IQM" not in page.table("The comparison")[0]
    assert "IQM" not in page.text


@pytest.mark.slow
def test_the_figures_after_training_have_units_and_a_directory_only_among_several(tmp_path: Path) -> None:
    comparison = write_trained(tmp_path / "c")
    written = json.loads((comparison / "manifest.json").read_text(encoding="utf-8"))
    figure = {"n": 3, "mean": 0.5, "low": 0.4, "high": 0.6}
    modes = {"sample_mean": {"accuracy": figure, "response_length": figure}}
    written["final"] = {"baseline": "sample_mean", "modes": modes}
    (comparison / "manifest.json").write_text(json.dumps(written), encoding="utf-8")
    page = Page(report(comparison))
    assert [row["metric"][0] for row in page.table("After training")] == ["accuracy, share", "response_length, tokens"]
    (label,) = [label for label in page.tables if label.startswith("After training")]
    assert label.endswith("difference to sample_mean")
    several = Page(report(comparison, write_run(tmp_path / "run", samples=False)))
    assert any(label.startswith(f"After training of {comparison}, ") for label in several.tables)


def test_tokens_to_half_of_the_gain_are_response_tokens_as_in_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = [
        {
            "rollout_step": step,
            "response_tokens": 100,
            "correct/count": (count := round(1000 * (0.1 + 0.7 / (1 + (7 / max(step, 1e-9)) ** 3)))),
            "incorrect/count": 1000 - count,
        }
        for step in range(30)
    ]
    runs = [write_run(tmp_path / mode, mode, steps, samples=False) for mode in ("sample_mean", "token_mean")]
    for mode, directory in zip(("sample_mean", "token_mean"), runs, strict=True):
        manifest = {"schema": 1, "mode": mode, "seed": 0, "settings": {}, "status": "done"}
        (directory / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    out, _ = compared_directories(capsys, runs, "json", fit=True)
    assert "response tokens to half of the gain" in out
    heads = [row["outcome"][0] for row in Page(report(*runs)).table("The comparison")]
    assert any(head.startswith("response tokens to half of the gain") for head in heads)


@pytest.mark.slow
def test_captions_of_the_layouts_do_not_promise_one_sum_and_names_break_at_their_joints(tmp_path: Path) -> None:
    source = report(write_comparison(tmp_path / "c"))
    assert "and whether the sum is the same in every layout" in source
    assert "the same number down a column, unless the rule varies with the layout" in source
    assert "<td>weight_<wbr>share/<wbr>length_<wbr>p25</td>" in source


def test_of_many_modes_the_heading_names_four(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / f"r{nth}", f"lib:rule-{nth}", samples=False) for nth in range(9)]
    frames = read_frames(runs)
    asked = question(frames, find(frames))
    assert asked.startswith("What do lib:rule-0, lib:rule-1, lib:rule-2, lib:rule-3 and 5 others make of the same rollouts")


# -- one file -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_page_refers_to_nothing_outside_itself(tmp_path: Path) -> None:
    source = report(write_trained(tmp_path / "c"), write_comparison(tmp_path / "d"))
    assert re.search(r"https?://|//[a-z]|@import|<(iframe|object|embed|base|form)\b", source.replace("// Tables", "")) is None
    assert all(target.startswith("#") for target in re.findall(r"url\(([^)]*)\)", source))
    page = Page(source)
    assert not [value for name, value in page.attributes if name in ("src", "srcset", "action")]
    targets = [value for name, value in page.attributes if name.endswith("href")]
    assert all(target.startswith(("#", "data:")) for target in targets)
    ids = {value for name, value in page.attributes if name == "id"}
    assert {target[1:] for target in targets if target.startswith("#")} <= ids
    assert "default-src 'none'" in source


def test_hostile_names_and_notes_are_text(tmp_path: Path) -> None:
    attack = "<script>alert(1)<!--&amp;\"'$title"
    run = write_run(tmp_path / attack, steps=[{"pg_loss": 0.25, "notes": [attack + "\x00]]>"]}], samples=False)
    other = write_run(tmp_path / "other", samples=False)
    write_lines(other / "metrics.jsonl", [{"step": 0, "pg_loss": 0.5, "skipped": {attack: attack}}])
    source = report(run, other)
    page = Page(source)
    assert source.count("<script") == 1
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert page.text.count(attack) >= 4
    assert "\x00" not in source


def test_no_script_may_run_but_the_pages_own(tmp_path: Path) -> None:
    source = report(write_run(tmp_path / "a", samples=False))
    (script,) = re.findall(r"<script>(.*?)</script>", source, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = next(part for part in source.split('content="') if part.startswith("default-src")).split('"')[0]
    assert f"script-src 'sha256-{digest}';" in policy
    assert "unsafe-inline" not in policy.split("script-src")[1]


@pytest.mark.slow
def test_the_same_records_give_the_same_bytes(tmp_path: Path) -> None:
    comparison = write_trained(tmp_path / "c")
    assert report(comparison) == report(comparison)


@pytest.mark.slow
def test_it_is_written_beside_the_figures_and_named_in_the_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    comparison = write_comparison(tmp_path / "c")
    plot([comparison], html=True)
    assert capsys.readouterr().out.splitlines()[-1] == str(comparison / "figures" / "report.html")
    plot([comparison], html=True, json_=True)
    assert json.loads(capsys.readouterr().out)["report"] == str(comparison / "figures" / "report.html")


def test_a_comparison_whose_last_runs_have_not_begun_is_compared_and_drawn_and_says_so(tmp_path: Path, capsys) -> None:
    """What a comparison that was stopped leaves: names in its manifest whose folders are not there yet."""
    directory = write_trained(tmp_path / "c")
    shutil.rmtree(directory / "token_mean" / "seed-2")
    told = aggcli(capsys, "compare", directory)
    assert told.code == 0, told.err
    assert f"{directory / 'token_mean' / 'seed-2'}" in " ".join((told.out + told.err).split())
    assert "no steps are recorded, left out" in " ".join((told.out + told.err).split())
    assert aggcli(capsys, "runs", "show", directory).code == 0
    drawn = aggcli(capsys, "plot", directory, "--html", "--output", tmp_path / "figures")
    assert drawn.code == 0, drawn.err
    assert "no steps are recorded; left out" in (tmp_path / "figures" / "report.html").read_text()
