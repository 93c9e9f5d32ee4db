"""Figures for a paper and for a screen: nothing leaves them at any width, no line is wider than another, words can be read."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from aggcli.analysis.frames import read_frames
from aggcli.cli.plot import plot
from aggcli.measurement.catalogue import METRICS
from aggcli.report import style
from aggcli.report.curves import learning_curves
from aggcli.report.effects import effects
from aggcli.report.figures import all_figures, modes_over_steps, weight_shares
from aggcli.report.findings import find
from aggcli.report.sizes import SIZES
from tests.cli import aggcli, refused
from tests.test_page import CORRECT, write_trained
from tests.test_plot import write_comparison, write_lines, write_run


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """A replay whose layouts, gradients and correct samples differ, and a trained comparison."""
    folder = tmp_path_factory.mktemp("figures")
    replay = write_comparison(folder / "replay")
    for nth, mode in enumerate(("sample_mean", "prompt_mean", "token_mean", "constant")):
        lines = [
            {
                "step": at,
                "mode": mode,
                "pg_loss": 0.25 * at + nth,
                "pg_clipfrac": 0.1 * at,
                "ppo_kl": 0.001 * at * nth,
                "raw_reward": 0.5,
                "gradient_ratio": 1 / (1 + nth),
                "gradient_cosine": 1 - 0.1 * nth,
                "weight_share/correct": 0.5 + 0.1 * (nth % 3),
                "weight_share/incorrect": 0.5 - 0.1 * (nth % 3),
            }
            for at in range(2)
        ]
        write_lines(replay / mode / "metrics.jsonl", lines)
        ranks = [{"rank": at, "pg_loss": 0.25, "partition": [at], "correct/count": at, "correct/entropy": 0.1} for at in (0, 1)]
        layouts = [
            {
                "step": at,
                "layout": name,
                "mode": mode,
                "pg_loss": 0.5 + 0.01 * nth * (name != "dp1:first-fit"),
                "sizes": {"pg_loss": 1.0},
                "correct/count": 1,
                "correct/entropy": 0.1,
                "ranks": ranks,
            }
            for at in range(2)
            for name in ("dp1:first-fit", "dp2:contiguous:mb4")
        ]
        write_lines(replay / mode / "layouts.jsonl", layouts)
    return {"replay": [replay], "trained": [write_trained(folder / "trained")]}


@pytest.mark.slow
@pytest.mark.parametrize("size", list(SIZES))
@pytest.mark.parametrize("kind", ["replay", "trained"])
def test_every_word_is_inside_its_figure_and_no_heading_runs_into_the_next(
    directories: dict[str, list[Path]], kind: str, size: str
) -> None:
    with style.drawn_at(SIZES[size]):
        figures, _ = all_figures(read_frames(directories[kind]))
    assert len(figures) == (7 if kind == "replay" else 4)
    for name, figure in figures.items():
        if SIZES[size].width is not None:
            assert figure.get_figwidth() == SIZES[size].width
        with style.context():
            figure.canvas.draw()
        drawn, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
        assert min(drawn.x0, drawn.y0, width - drawn.x1, height - drawn.y1) > -0.02, (name, drawn, width, height)
        headings = [(axes._left_title, axes) for axes in figure.axes]  # pyright: ignore[reportAttributeAccessIssue]
        boxes = [text.get_window_extent() for text, _ in headings if text.get_text()]
        assert not [1 for one, other in itertools.combinations(boxes, 2) if one.overlaps(other)], name


@pytest.mark.parametrize("kind", ["replay", "trained"])
def test_titles_and_headings_are_words_and_name_no_field_of_the_records(directories: dict[str, list[Path]], kind: str) -> None:
    figures, _ = all_figures(read_frames(directories[kind]))
    fields = {name for name in METRICS if "_" in name or "/" in name}
    for figure in figures.values():
        said = [figure.get_label(), *(axes.get_title(loc="left") for axes in figure.axes)]
        assert str(figure.get_label())
        assert not [name for name in fields for text in said if name in str(text).replace(",", " ").split()]


def test_no_line_is_wider_than_another_and_each_mode_has_its_own_dash(directories: dict[str, list[Path]]) -> None:
    frames = read_frames(directories["replay"])
    lines = modes_over_steps(frames).axes[0].lines
    assert {line.get_linewidth() for line in lines} == {style.LINE}
    trained = read_frames(directories["trained"])
    drawn = learning_curves(trained, find(trained).compared).axes[0].lines
    assert {line.get_linewidth() for line in drawn if not str(line.get_label()).startswith("_")} == {style.LINE}
    looks = style.looks(frames.runs)
    assert len({str(look.dash) for look in looks}) == len({look.marker for look in looks}) == 4


def test_what_all_modes_have_in_common_is_drawn_once_and_said(directories: dict[str, list[Path]]) -> None:
    frames = read_frames(directories["replay"])
    panels = {axes.get_ylabel(): axes for axes in modes_over_steps(frames).axes}
    assert len(panels["pg_loss"].lines) == 4
    assert len(panels["raw_reward [reward]"].lines) == len(panels["pg_clipfrac [share]"].lines) == 1
    said = panels["raw_reward [reward]"].get_title(loc="left")
    assert "the same in all 4 runs" in said.replace("\n", " ")
    assert "the same in all" not in panels["pg_loss"].get_title(loc="left").replace("\n", " ")
    rows = [tick.get_text().replace("\n", " ") for tick in weight_shares(frames).axes[0].get_yticklabels()]
    assert rows == [
        "sample_mean and constant (n\u00a0=\u00a02)",
        "prompt_mean (n\u00a0=\u00a02)",
        "token_mean (n\u00a0=\u00a02)",
    ]


def test_the_size_and_the_title_are_the_users(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run")
    for size, pixels in (("column", 510), ("page", 1050)):  # 3.4 and 7 inches of 150 dots
        plot([run], tmp_path / size, size=size)
        for file in (tmp_path / size).glob("*.png"):
            assert int.from_bytes(file.read_bytes()[16:20], "big") == pixels
    plot([run], tmp_path / "bare", formats=["svg"], no_title=True)
    plot([run], tmp_path / "whole", formats=["svg"])
    name = "weight_by_length.svg"
    assert (tmp_path / "whole" / name).read_text().count('<g id="text_') == 1 + (tmp_path / "bare" / name).read_text().count(
        '<g id="text_'
    )
    told = refused(aggcli(capsys, "plot", run, "--size", "colum", "-o", tmp_path / "no"))
    assert "--size colum: is none of column, page or screen" in told


def test_a_page_has_figures_for_a_screen_whatever_the_files_are_for(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    plot([run], tmp_path / "a", html=True, size="column", no_title=True)
    plot([run], tmp_path / "b", html=True)
    assert (tmp_path / "a" / "report.html").read_bytes() == (tmp_path / "b" / "report.html").read_bytes()


def test_an_effect_stands_at_the_mean_of_the_paired_differences_and_is_filled_where_it_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """0.80, 0.83, 0.90 against 0.60, 0.62, 0.70: differences 0.20, 0.21, 0.20, of mean 0.2033 and standard error 0.00333."""
    monkeypatch.setitem(CORRECT, "token_mean", (80, 83, 90))
    comparison = find(read_frames([write_trained(tmp_path / "c")])).comparison
    assert comparison is not None
    figure = effects(comparison)
    axes = next(
        axes
        for axes in figure.axes
        if "accuracy in training rollouts, equal steps" in axes.get_title(loc="left").replace("\n", " ")
    )
    line, dot = axes.collections
    ((x, _),) = np.asarray(dot.get_offsets()).tolist()
    assert x == pytest.approx(0.61 / 3)
    low, high = (float(point[0]) for point in line.get_segments()[0])  # pyright: ignore[reportAttributeAccessIssue]
    reach = 4.302652729911275 * (0.01 / 3**0.5) / 3**0.5
    assert (low, high) == pytest.approx((0.61 / 3 - reach, 0.61 / 3 + reach))
    assert tuple(np.asarray(dot.get_facecolor())[0][:3]) == pytest.approx(to_rgb(style.MODE_COLOURS["token_mean"]))
    assert [text.get_text() for text in axes.texts] == ["+0.203"]
    assert figure.get_label() == "How far each mode is from sample_mean"
    monkeypatch.setitem(CORRECT, "token_mean", (60, 64, 68))
    null = find(read_frames([write_trained(tmp_path / "d")])).comparison
    assert null is not None
    (_, dot) = effects(null).axes[0].collections
    assert tuple(np.asarray(dot.get_facecolor())[0][:3]) == (1, 1, 1)


def test_words_in_a_modes_colour_have_the_contrast_of_words_on_white() -> None:
    class Run:
        def __init__(self, mode: str) -> None:
            self.label = self.mode = mode

    looks = style.looks([Run(mode) for mode in (*style.MODE_COLOURS, *(f"lib:{nth}" for nth in range(8)))])
    assert min(style.contrast(look.ink, "white") for look in looks) >= 4.5
    assert style.contrast("black", "white") == pytest.approx(21)
    assert style.contrast("#777777", "white") == pytest.approx(4.48, abs=0.01)  # as the criterion's own example has it


def test_a_title_is_left_out_of_a_figure_and_kept_as_its_label(directories: dict[str, list[Path]]) -> None:
    with style.drawn_at(replace(SIZES["screen"], titled=False)):
        figure = weight_shares(read_frames(directories["replay"]))
    assert figure.get_suptitle() == ""
    assert figure.get_label() == "Where each mode puts its weight"
