"""The report page as people meet it: what stands first, what is folded, what a screen reader and a keyboard get."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from aggcli.analysis.frames import read_frames
from aggcli.records import read_lines
from aggcli.report import page as page_module
from aggcli.report import style
from aggcli.report.findings import find
from aggcli.report.page_numbers import small_table
from tests.test_page import CORRECT, Page, report, write_trained
from tests.test_plot import write_comparison, write_lines

CSS = (Path(page_module.__file__).parent.parent / "data" / "report" / "page.css").read_text(encoding="utf-8")


class Outline(HTMLParser):
    """The headings in their order, as (level, text), and the tags with their attributes."""

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.headings: list[tuple[int, str]] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self._level = 0
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if re.fullmatch("h[1-6]", tag):
            self._level = int(tag[1])
            self.headings.append((self._level, ""))

    def handle_endtag(self, tag: str) -> None:
        if re.fullmatch("h[1-6]", tag):
            self._level = 0

    def handle_data(self, data: str) -> None:
        if self._level:
            level, text = self.headings[-1]
            self.headings[-1] = (level, text + data)


def with_gradients(comparison: Path) -> Path:
    """Replays whose gradients differ, of one batch: all that a replay's answer is made of."""
    modes = ("sample_mean", "prompt_mean", "token_mean", "constant")
    for nth, mode in enumerate(modes):
        directory = comparison / mode
        lines = [
            {**line, "tokens": 14, "total_weight": 1.0, "effective_tokens": 10 + nth, "grad_norm_log_probs": 1 / (1 + nth)}
            | {"gradient_ratio": 1 / (1 + nth), "gradient_cosine": 1 - nth / 10, "raw_reward": 0.5}
            for line in read_lines(directory / "metrics.jsonl")
        ]
        write_lines(directory / "metrics.jsonl", lines)
        manifest = json.loads((directory / "manifest.json").read_text())
        own = {"modes": list(modes), "max_response_length": 10}
        (directory / "manifest.json").write_text(json.dumps({**manifest, **own}))
    return comparison


# -- the order, and what is in it ---------------------------------------------------------------------------------------


def test_the_answer_comes_first_then_the_picture_the_small_table_the_figures_and_the_rest_is_folded(tmp_path: Path) -> None:
    comparison = write_trained(tmp_path / "c")
    source = report(comparison)
    answer = find(read_frames([comparison])).answer.sentences
    outline = Outline(source)
    assert outline.headings[0] == (1, answer[0])
    names = [text for _, text in outline.headings]
    assert names[1:3] == ["How far each mode is from sample_mean", "In numbers"]
    assert names[3] == "Figures"
    assert names.index("Everything else") > names.index("In every layout the ranks' shares add up to the same loss (step 9)")
    at = [source.index(text) for text in ("<h1>", 'id="figure-effects"', 'class="cards"', 'id="figures"', "<details")]
    assert at == sorted(at)
    assert source.count('<table class="sortable"') == source[source.index("<details") :].count('<table class="sortable"')
    assert "<details open" not in source
    for sentence in answer:
        assert sentence in Page(source).text


def test_a_replay_opens_with_its_answer_and_the_weights(tmp_path: Path) -> None:
    comparison = with_gradients(write_comparison(tmp_path / "c"))
    outline = Outline(report(comparison))
    level, said = outline.headings[0]
    assert level == 1
    assert said.startswith("constant: gradient norm 0.25x sample_mean's")
    assert outline.headings[1][1].startswith("How much one token counts, by the length of its response")


def test_the_small_table_has_six_figures_at_the_most_and_says_once_what_all_modes_share(tmp_path: Path) -> None:
    comparison = with_gradients(write_comparison(tmp_path / "c"))
    frames = read_frames([comparison])
    table, same = small_table(frames, find(frames))
    assert table is not None
    assert [row[0] for row in table.rows] == ["sample_mean", "prompt_mean", "token_mean", "constant"]
    assert 2 < len(table.heads) <= 7
    column = table.heads.index("gradient norm, over the baseline's")
    assert [row[column].value for row in table.rows] == [1, 1 / 2, 1 / 3, 1 / 4]  # pyright: ignore[reportAttributeAccessIssue]
    shared = "weight on more than 7 tokens 0 %, loss 0.375, total weight 1, KL(old || new) 0.125 nats, mean reward 0.5"
    assert same == [f"The same under every mode: {shared}."]
    by = "gradient norm, cosine: of the gradient by the trained tokens' log-probabilities"
    assert table.caption == f"Mean of {len(frames.steps)} steps; {by}."
    table, _ = small_table(read_frames([write_comparison(tmp_path / "none")]), find(read_frames([tmp_path / "none"])))
    assert table is None or "gradient" not in table.caption


def test_the_small_table_of_a_comparison_marks_exactly_what_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CORRECT, "token_mean", (80, 83, 90))
    for correct, mark in (((80, 83, 90), "*"), ((60, 64, 68), "~")):
        monkeypatch.setitem(CORRECT, "token_mean", correct)
        frames = read_frames([write_trained(tmp_path / mark.replace("*", "star"))])
        table, _ = small_table(frames, find(frames))
        assert table is not None
        column = next(
            at for at, head in enumerate(table.heads) if head.startswith("accuracy in training rollouts, equal steps")
        )
        base, other = (row[column] for row in table.rows)
        assert base.small.splitlines()[1:] == []  # pyright: ignore[reportAttributeAccessIssue]
        assert other.small.splitlines()[-1] == f"{'+0.203' if mark == '*' else '+0'} {mark}"  # pyright: ignore[reportAttributeAccessIssue]
        assert base.value == pytest.approx(0.64)  # pyright: ignore[reportAttributeAccessIssue]
    one = read_frames([write_trained(tmp_path / "one", seeds=1)])
    table, _ = small_table(one, find(one))
    assert table is not None
    assert "~" not in f"{table.caption}{[cell for row in table.rows for cell in row]}"


# -- for everybody ------------------------------------------------------------------------------------------------------


def test_headings_are_in_order_with_one_first_and_the_page_says_its_language(tmp_path: Path) -> None:
    for source in (report(write_trained(tmp_path / "c")), report(write_comparison(tmp_path / "d"))):
        outline = Outline(source)
        levels = [level for level, _ in outline.headings]
        assert levels[0] == 1
        assert levels.count(1) == 1
        assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
        assert all(text.strip() for _, text in outline.headings)
        assert ("html", {"lang": "en"}) in outline.tags


def test_every_figure_says_what_it_shows_to_those_who_do_not_see_it(tmp_path: Path) -> None:
    outline = Outline(report(write_comparison(tmp_path / "c")))
    drawn = [given for tag, given in outline.tags if tag == "svg"]
    assert drawn
    for given in drawn:
        assert given["role"] == "img"
        assert len(given["aria-label"] or "") > 60
    said = next(given["aria-label"] for given in drawn if "How much one token counts" in (given["aria-label"] or ""))
    assert "prompt_mean: equal within a prompt group, between groups up to 2.5 times apart" in (said or "")
    assert all(given.get("aria-label") for tag, given in outline.tags if given.get("role") == "region")


@pytest.mark.parametrize("theme", ["light", "dark", "print"])
def test_words_have_the_contrast_of_words_in_every_theme(theme: str) -> None:
    roots = re.findall(r":root \{([^}]*)\}", CSS)
    assert len(roots) == 3
    light, dark, printed = (dict(re.findall(r"--(\w+): (#\w+)", root)) for root in roots)
    colours = {"light": light, "dark": dark, "print": printed}[theme]
    words = [(colours[name], colours["paper"]) for name in ("ink", "soft", "mark", "warn")]
    words.append((colours["ink"], colours["shade"]))  # what is preformatted
    assert min(style.contrast(one, other) for one, other in words) >= 4.5
    assert style.contrast(colours["soft"], colours["paper"]) >= 4.5


# -- in a browser -------------------------------------------------------------------------------------------------------

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no chromium is installed, so the page is not opened in a browser")
PROBE = """<!DOCTYPE html><iframe id="page" style="width:{width}px;height:800px;border:0"></iframe><pre id="told"></pre>
<script>
const frame = document.getElementById("page");
frame.onload = () => {{
  const page = frame.contentDocument, view = frame.contentWindow;
  const whole = page.documentElement;
  const seen = (what) => {{ const box = what.getBoundingClientRect(); return box.width > 0 && box.height > 0; }};
  const svgs = [...page.querySelectorAll("#picture svg")].filter(seen);
  const first = {{
    headline: page.querySelector("header").getBoundingClientRect().bottom,
    answer: page.querySelector("#answer").getBoundingClientRect().top,
    top: Math.min(...svgs.map((svg) => svg.getBoundingClientRect().top)),
    picture: Math.max(...svgs.map((svg) => svg.getBoundingClientRect().bottom)),
    right: Math.max(...svgs.map((svg) => svg.getBoundingClientRect().right)), shown: svgs.length,
  }};
  const cells = [...page.querySelectorAll(".cards td, .cards tbody th")];
  const right = (what) => what?.getBoundingClientRect().right ?? 0;
  const numbers = Math.max(...cells.map((cell) => Math.max(right(cell), right(cell.querySelector("span")))));
  const roles = [...page.querySelectorAll(".cards tr")].every((row) => row.getAttribute("role") === "row");
  const before = [...page.querySelectorAll("details")].filter((one) => one.open).length;
  view.dispatchEvent(new view.Event("beforeprint"));
  const printed = [...page.querySelectorAll("details")].filter((one) => !one.open).length;
  view.dispatchEvent(new view.Event("afterprint"));
  const after = [...page.querySelectorAll("details")].filter((one) => one.open).length;
  for (const one of page.querySelectorAll("details")) one.open = true;
  view.dispatchEvent(new view.Event("resize"));
  const table = page.querySelector("table[aria-label='The runs']");
  const head = table.querySelector("thead th:nth-child(5)"), button = head.querySelector("button");
  const rows = table.tBodies[0].rows;
  const column = () => [...rows].map((row) => row.cells[4].textContent);
  const unsorted = column();
  button.focus();
  const focused = page.activeElement === button;
  button.click(); const up = column(), sorted = head.getAttribute("aria-sort");
  button.click(); const down = column(); button.click();
  const restored = JSON.stringify(unsorted) === JSON.stringify(column());
  const names = [...page.querySelectorAll(".sortable td:first-child")];
  const widest = Math.max(...names.map((cell) => cell.getBoundingClientRect().width));
  const compared = [...page.querySelectorAll("table.sortable")].find((one) => one.querySelector("tr[data-group]"));
  compared.querySelector("thead th:nth-child(4) button").click();
  const groups = [...compared.tBodies[0].rows].map((row) => row.dataset.group);
  const hints = [...page.querySelectorAll(".scroll")].every((box) => {{
    const hint = (box.closest("figure") ?? box.previousElementSibling).querySelector(".swipe");
    return !hint || (hint.getClientRects().length > 0) === (box.scrollWidth > box.clientWidth && {width} <= 640);
  }});
  const requests = view.performance.getEntriesByType("resource").length;
  const told = {{first, numbers, roles, before, printed, after, focused, sorted, hints,
    scroll: whole.scrollWidth, client: whole.clientWidth, up, down, restored, widest, groups, requests}};
  document.getElementById("told").textContent = JSON.stringify(told);
}};
frame.srcdoc = {source};
</script>"""


def opened(folder: Path, source: str, width: int) -> tuple[dict[str, Any], str]:
    """What the probe says of a page in a frame of this width, and what the browser logged."""
    probe = folder / f"probe-{width}.html"
    probe.write_text(PROBE.format(width=width, source=json.dumps(source).replace("</", "<\\/")), encoding="utf-8")
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr"]
    place = [f"--user-data-dir={folder / 'profile'}", "--window-size=1400,900", "--virtual-time-budget=5000"]
    command = [str(CHROMIUM), *flags, *place, "--dump-dom", probe.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return json.loads(done.stdout.split('<pre id="told">')[1].split("</pre>")[0]), done.stderr


@pytest.mark.slow
@needs_browser
def test_in_chromium_the_first_screen_has_the_answer_and_the_picture_and_a_narrow_one_has_the_numbers(tmp_path: Path) -> None:
    long = write_comparison(tmp_path / ("long" * 30))
    sources = {"trained": report(write_trained(tmp_path / "c"), long), "replay": report(with_gradients(long))}
    for name, width in itertools.product(sources, (1280, 390)):
        if name == "replay" and width == 390:
            continue
        source = sources[name]
        if name == "replay":  # sorting keeps groups apart: only a comparison has any
            source = source.replace("<tbody>\n<tr>", '<tbody>\n<tr data-group="a">', 1)
        told, logged = opened(tmp_path, source, width)
        assert "CONSOLE" not in logged
        assert told["requests"] == 0
        assert told["scroll"] <= told["client"] == width
        assert told["first"]["shown"] == 1
        assert told["first"]["right"] <= width
        assert told["numbers"] <= width
        assert told["roles"]
        if width == 1280:
            assert 0 < told["first"]["headline"] <= told["first"]["answer"] < told["first"]["picture"] <= 800, name
        else:
            assert 0 < told["first"]["headline"] < told["first"]["top"] <= 600
            assert told["first"]["picture"] < told["first"]["answer"]
        assert (told["before"], told["printed"], told["after"]) == (0, 0, 0)
        assert told["focused"]
        assert told["sorted"] == "ascending"
        assert told["restored"]
        assert told["hints"]
        assert told["widest"] <= 0.4 * 390 or width > 640
        if name == "trained":
            changes = [a for a, b in zip(told["groups"], [None, *told["groups"]], strict=False) if a != b]
            assert len(changes) == len(set(told["groups"]))
            assert told["up"] == sorted(told["up"], key=lambda text: float(text.replace(",", "") or "inf"))
            assert [text for text in told["down"] if text] == [text for text in told["up"] if text][::-1]
