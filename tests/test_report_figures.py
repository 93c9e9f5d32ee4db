"""The figures of a report: their points are the records', gaps stay gaps, and runs can be told apart."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from aggcli.analysis.frames import numbers, read_frames
from aggcli.analysis.histories import read_histories
from aggcli.analysis.settings import labelled
from aggcli.report import style
from aggcli.report.accuracy import accuracy_by_tokens
from aggcli.report.base import NothingToDraw
from aggcli.report.correct_ranks import correct_by_rank
from aggcli.report.curves import learning_curves
from aggcli.report.figures import all_figures, modes_over_steps, weight_shares
from aggcli.report.findings import find
from aggcli.report.gradients import mode_gradients
from aggcli.report.layout_deviation import layout_deviation, layout_deviations
from aggcli.report.ranks import pg_loss_by_rank
from aggcli.report.verdicts import layouts
from tests.test_page import write_trained
from tests.test_plot import layout, write_comparison, write_lines, write_run


def dots(axes) -> list[tuple[float, float]]:
    return [tuple(point) for drawn in axes.collections for point in np.ma.getdata(drawn.get_offsets()).tolist()]


def words(figure: Figure) -> str:
    legends = [text.get_text() for legend in figure.legends for text in (legend.get_title(), *legend.get_texts())]
    return " ".join([*(text.get_text() for text in figure.texts), *legends])


def test_25_runs_of_one_mode_differ_in_colour_or_dash_and_the_legend_is_beside_the_axes(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / f"run-{nth:02d}", steps=[{"pg_loss": 1.0}, {"pg_loss": 2.0 + nth}], samples=False)
        for nth in range(25)
    ]
    figure = modes_over_steps(read_frames(runs))
    lines = figure.axes[0].lines
    drawn = {str((line.get_color(), line._dash_pattern)) for line in lines}  # pyright: ignore[reportAttributeAccessIssue]
    assert len(drawn) == len(lines) == 25
    figure.canvas.draw()
    (legend,) = figure.legends
    assert len(legend.get_texts()) == 25
    assert legend.get_window_extent().y1 < figure.axes[0].get_window_extent().y0


def test_long_labels_are_shortened_and_stay_apart() -> None:
    class Run:
        def __init__(self, label: str) -> None:
            self.label, self.mode = label, "constant"

    shown = [look.shown for look in style.looks([Run("x" * 90 + end + "y" * 40) for end in "ab"])]
    assert len(set(shown)) == 2
    assert max(map(len, shown)) < 60
    assert style.looks([Run("constant")])[0].shown == "constant"


def test_the_accuracy_of_each_step_stands_at_the_tokens_trained_on_before_it(tmp_path: Path) -> None:
    runs = labelled(read_histories([write_trained(tmp_path / "c", seeds=1)])[0])
    axes = accuracy_by_tokens(runs).axes[0]
    first = dots(axes)[:10]
    expected = [(500.0 * step, (30 + 2 * step) / 100 if step < 9 else 0.6) for step in range(10)]
    np.testing.assert_allclose(first, expected, rtol=1e-12)
    assert axes.get_ylabel() == "accuracy [share of scored rollouts]"


def test_a_step_without_accuracy_is_a_gap_and_the_lone_point_beside_it_is_marked(tmp_path: Path) -> None:
    steps = [
        {"rollout_step": step, "response_tokens": 10, "correct/count": None if step in (1, 3) else 1, "incorrect/count": 1}
        for step in range(6)
    ]
    runs = labelled(read_histories([write_run(tmp_path / "run", steps=steps, samples=False)])[0])
    (line,) = accuracy_by_tokens(runs).axes[0].lines
    np.testing.assert_array_equal(np.isnan(np.asarray(line.get_ydata(), dtype=float)), [False, True, False, True, False, False])
    assert line.get_markevery() == [0, 2]


def test_fitted_curves_have_their_parameters_in_the_legend_and_refusals_a_reason(tmp_path: Path) -> None:
    found = find(read_frames([write_trained(tmp_path / "c", seeds=1)]))
    text = words(accuracy_by_tokens(found.trained, found.curves.fitted))
    assert "sample_mean: mean of 1 run, no curve fitted" in text
    assert "no curve for 1 run (seed 0: " in text


def test_gradient_ratios_and_cosines_are_the_records_and_what_was_not_measured_is_counted(tmp_path: Path) -> None:
    base = [{"gradient_ratio": 1.0, "gradient_cosine": 1.0}] * 2
    other = [{"gradient_ratio": 0.25, "gradient_cosine": None}, {"gradient_ratio": 0.75, "gradient_cosine": 0.5}]
    runs = [write_run(tmp_path / "a", steps=base), write_run(tmp_path / "b", "constant", other)]
    ratio, cosine = mode_gradients(read_frames(runs)).axes
    assert dots(ratio) == [(1, 0), (1, 0), (1, 0), (0.25, 1), (0.75, 1), (0.5, 1)]
    assert dots(cosine)[-1] == (0.5, 1)
    assert "(1 not measured)" in cosine.get_title(loc="left").replace("\n", " ")
    assert [text.get_text() for text in ratio.texts] == ["1", "0.5"]


def test_layout_deviations_are_relative_to_the_absolute_terms_and_zeros_are_counted(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", steps=[{"pg_loss": 0.25}] * 2)
    lines = [layout(step, "sample_mean", name) for step in range(2) for name in ("dp1:first-fit", "dp4:balanced")]
    lines[3]["pg_loss"] = 0.25 + 1.01e-7
    write_lines(run / "layouts.jsonl", lines)
    frames = read_frames([run])
    assert numbers(layout_deviations(frames), "deviation").tolist() == pytest.approx([0, 1.01e-7], rel=1e-5)
    figure = layout_deviation(frames)
    ((x, _),) = dots(figure.axes[0])
    assert x == pytest.approx(1.01e-7, rel=1e-5)
    assert figure.axes[0].get_xscale() == "log"
    said = " ".join(words(figure).split())
    assert "not drawn: 1 of 2 differences; these layouts have the same loss, to the last bit" in said
    assert "other layouts change the loss under sample_mean by up to 1.1e-05 % of its absolute terms" in said


def test_a_layout_without_a_loss_is_counted_and_equal_layouts_are_said_instead_of_drawn(tmp_path: Path) -> None:
    with pytest.raises(NothingToDraw, match="the same to the last bit in all 8 comparisons of layouts"):
        layout_deviation(read_frames([write_comparison(tmp_path / "c")]))
    run = write_run(tmp_path / "run")
    lines = [
        {**layout(0, "sample_mean", name), "pg_loss": loss} for name, loss in (("dp1:first-fit", 1.0), ("dp4:balanced", None))
    ]
    write_lines(run / "layouts.jsonl", lines)
    assert numbers(layout_deviations(read_frames([run])), "deviation").tolist() == [np.inf]


def test_the_ranks_correct_samples_are_the_records_and_a_rank_without_any_is_blank(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    one = layout(0, "sample_mean", "dp4:balanced")
    counts, lengths = [2, 1, 0, 0], [4.0, 7.0, None, None]
    for rank, count, length in zip(one["ranks"], counts, lengths, strict=True):
        rank.update({"correct/count": count, "correct/response_length": length})
    write_lines(run / "layouts.jsonl", [{**one, "correct/count": 3, "correct/response_length": 5.0}])
    figure = correct_by_rank(read_frames([run]))
    count, length = figure.axes
    assert [x for x, _ in dots(count) if x] == [2, 1]
    assert [x for x, _ in dots(length) if x] == [4, 7]
    assert [text.get_text() for text in count.texts] == ["3"]
    assert [text.get_text() for text in length.texts] == ["blank", "idle: no samples", "5"]
    assert length.get_xlabel() == "length of correct samples\n[tokens]"
    assert [tick.get_text() for tick in count.get_yticklabels()] == ["dp4:balanced", "rank 0", "rank 1", "rank 2", "rank 3"]
    rows_of = dict(zip([tick.get_text() for tick in count.get_yticklabels()], count.get_yticks(), strict=True))
    assert [y for x, y in dots(length) if x] == [rows_of["rank 0"], rows_of["rank 1"]]


def test_every_figure_of_trained_runs_is_made_and_none_is_of_pg_loss_alone(tmp_path: Path) -> None:
    figures, _ = all_figures(read_frames([write_trained(tmp_path / "c")]))
    assert list(figures) == ["pg_loss_by_rank", "effects", "accuracy_by_tokens", "learning_curves"]


# -- many modes, several directories, little data ----------------------------------------------------------------------


def write_arm(directory: Path, mode: str, rewards: Sequence[float], seed: int = 0, **settings: object) -> Path:
    """A trained run by hand: `rewards` at its steps."""
    steps = [
        {"rollout_step": step, "raw_reward": reward, "response_tokens": 10, "correct/count": 5 + step, "incorrect/count": 5}
        for step, reward in enumerate(rewards)
    ]
    write_run(directory, mode if mode in style.MODE_COLOURS else "constant", steps, samples=False)
    manifest = {"schema": 1, "mode": mode, "seed": seed, "settings": settings, "status": "done"}
    (directory / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    return directory


def curves(*directories: Path) -> Figure:
    frames = read_frames(directories)
    return learning_curves(frames, find(frames).compared)


def drawn_lines(figure: Figure) -> dict[str, list[float]]:
    lines = figure.axes[0].lines
    return {
        str(line.get_label()): np.asarray(line.get_ydata()).tolist()
        for line in lines
        if not str(line.get_label()).startswith("_")
    }


def test_learning_curves_have_a_line_for_each_setting_of_a_mode_and_none_for_replays(tmp_path: Path) -> None:
    slow = [write_arm(tmp_path / f"slow-{seed}", "constant", (0.1, 0.2 + seed / 10), seed, lr=0.1) for seed in (0, 1)]
    fast = [write_arm(tmp_path / f"fast-{seed}", "constant", (0.1, 0.8 + seed / 10), seed, lr=0.2) for seed in (0, 1)]
    replay = write_run(tmp_path / "replay", "constant", [{"raw_reward": 7.0}, {"raw_reward": 9.0}])
    figure = curves(*slow, *fast, replay)
    lines = drawn_lines(figure)
    assert list(lines) == ["constant (lr=0.1)", "constant (lr=0.2)"]
    assert lines["constant (lr=0.1)"] == pytest.approx([0.1, 0.25])
    assert lines["constant (lr=0.2)"] == pytest.approx([0.1, 0.85])
    assert figure.get_suptitle() == "Learning curves: 2 modes (settings in\nbrackets), 2 seeds each"
    assert "1 run is not drawn: on recorded rollouts, or recorded twice" in " ".join(words(figure).split())


def test_25_modes_differ_in_their_look_and_no_line_grows_with_their_number(tmp_path: Path) -> None:
    runs = [write_arm(tmp_path / f"r{nth:02}", f"lib:rule-{nth}", (0.1, 0.2 + nth / 50)) for nth in range(25)]
    figure = curves(*runs)
    lines = [line for line in figure.axes[0].lines if not str(line.get_label()).startswith("_")]
    seen = {(str(line.get_color()), line.get_marker(), str(line.get_linestyle())) for line in lines}
    assert len(lines) == len(seen) == 25
    assert max(line.get_linewidth() for line in lines) < 4.5
    assert len(figure.axes[0].collections) == 0  # no bands
    figure.canvas.draw()
    (legend,) = figure.legends
    assert legend.get_window_extent().y1 < figure.axes[0].get_window_extent().y0
    assert legend.get_window_extent().x1 <= figure.bbox.x1
    everything = style.looks(read_frames(runs).runs)
    assert len({(look.colour, look.marker) for look in everything}) == 25


def test_modes_whose_curves_coincide_in_every_panel_say_so_in_the_legend(tmp_path: Path) -> None:
    runs = [
        write_arm(tmp_path / name, f"lib:{name}", rewards)
        for name, rewards in (("a", (0.1, 0.2)), ("b", (0.1, 0.3)), ("c", (0.1, 0.2)))
    ]
    figure = curves(*runs)
    assert list(drawn_lines(figure)) == ["lib:a", "lib:b", "lib:c = lib:a"]
    assert "a = b: the lines of a are those of b in every panel" in " ".join(words(figure).split())


def test_modes_whose_points_coincide_say_so_beside_the_accuracy(tmp_path: Path) -> None:
    runs = [write_arm(tmp_path / name, f"lib:{name}", (0.1, 0.2)) for name in ("a", "b", "c")]
    lines = (runs[1] / "metrics.jsonl").read_text(encoding="utf-8")
    (runs[1] / "metrics.jsonl").write_text(lines.replace('"correct/count": 6', '"correct/count": 9'), encoding="utf-8")
    found = find(read_frames(runs))
    said = " ".join(words(accuracy_by_tokens(found.trained, found.curves.fitted)).split())
    assert "lib:c = lib:a: mean of 1 run" in said
    assert "lib:b: mean of 1 run" in said
    assert "a = b: the dots and the line of a are those of b" in said


def arms(folder: Path, modes: int, seeds: int) -> list[Path]:
    """All start at 0.1; at step 1 mode m has 0.2 + m/10, and 0.02 more for each further seed."""
    return [
        write_arm(folder / f"{mode}-{seed}", f"lib:rule-{mode}", (0.1, 0.2 + mode / 10 + seed / 50), seed)
        for mode in range(modes)
        for seed in range(seeds)
    ]


def bands(figure: Figure) -> list[dict[float, tuple[float, float]]]:
    """Of each band of the first panel, from where to where it reaches at each step."""
    found = []
    for drawn in figure.axes[0].collections:
        (path,) = drawn.get_paths()
        points = np.asarray(path.vertices)
        found.append({float(x): (points[points[:, 0] == x, 1].min(), points[points[:, 0] == x, 1].max()) for x in (0, 1)})
    return found


def test_a_band_is_the_students_t_interval_of_the_seeds(tmp_path: Path) -> None:
    """0.2, 0.22, 0.24 and 0.3, 0.32, 0.34: a deviation of 0.02, and the t of 2 degrees of freedom is 4.3027."""
    figure = curves(*arms(tmp_path, modes=2, seeds=3))
    reach = 4.302652729696142 * 0.02 / 3**0.5
    assert bands(figure) == [
        {0: pytest.approx((0.1, 0.1)), 1: pytest.approx((mean - reach, mean + reach))} for mean in (0.22, 0.32)
    ]
    assert "band: 95 % Student-t interval" in " ".join(words(figure).split())


@pytest.mark.parametrize(
    ("modes", "seeds", "said"),
    [(2, 2, "no bands below 3 seeds"), (5, 3, "no bands with more than 4 modes")],
)
def test_below_three_seeds_and_beyond_four_modes_there_is_no_band(tmp_path: Path, modes: int, seeds: int, said: str) -> None:
    figure = curves(*arms(tmp_path, modes, seeds))
    assert bands(figure) == []
    assert said in " ".join(words(figure).split())


def test_the_mean_accuracy_ends_where_the_shortest_run_does(tmp_path: Path) -> None:
    """5 steps of 10 tokens beside 3: beyond 20 tokens nobody knows what the second run would have been."""
    rights = ([1, 2, 3, 4, 5], [3, 4, 6])
    runs = [
        write_run(
            tmp_path / str(seed),
            "constant",
            [
                {"rollout_step": at, "seed": seed, "response_tokens": 10, "correct/count": right, "incorrect/count": 10 - right}
                for at, right in enumerate(rights[seed])
            ],
            samples=False,
        )
        for seed in (0, 1)
    ]
    (line,) = accuracy_by_tokens(labelled(read_histories(runs)[0])).axes[0].lines
    assert np.asarray(line.get_xdata()).tolist() == [0, 10, 20]
    assert np.asarray(line.get_ydata()).tolist() == pytest.approx([0.2, 0.3, 0.45])


def test_eight_modes_have_their_correct_samples_drawn_and_the_ninth_is_named(tmp_path: Path) -> None:
    runs = []
    for nth in range(9):
        for seed in (0, 1):
            runs.append(write_arm(tmp_path / f"r{nth}-{seed}", f"lib:rule-{nth}", (0.1, 0.2), seed))
            one = {**layout(1, "sample_mean", "dp4:balanced"), "correct/count": nth + seed}
            for rank in one["ranks"]:
                rank.update({"correct/count": nth})
            write_lines(runs[-1] / "layouts.jsonl", [one])
    figure = correct_by_rank(read_frames(runs))
    for nth, axes in enumerate(figure.axes):
        assert axes.get_title(loc="left").replace("\n", " ").startswith(f"lib:rule-{nth} (r{nth}-0), step 1"), nth
        ranks, reduced = axes.collections
        assert [segment[0][0] for segment in reduced.get_segments()] == [nth]  # pyright: ignore[reportAttributeAccessIssue]
        assert [x for x, _ in np.asarray(ranks.get_offsets()).tolist()] == [nth] * 4
    assert len(figure.axes) == 8
    said = " ".join(words(figure).split())
    assert "8 of 18 runs are shown, the first of each mode before the second of any, and none of lib:rule-8" in said


def test_every_mode_has_a_panel_before_any_has_a_second(tmp_path: Path) -> None:
    modes = ("sample_mean", "prompt_mean", "token_mean", "constant")
    runs = [
        write_arm(tmp_path / f"{lr}" / f"{mode}-{s}", mode, (1, 2), s, lr=lr)
        for lr in (1, 2)
        for mode in modes
        for s in range(4)
    ]
    figure = pg_loss_by_rank(read_frames(runs))
    titles = [axes.get_title(loc="left") for axes in figure.axes]
    assert len(titles) == 12
    for lr in (1, 2):
        for mode in modes:
            assert any(f"{mode}-0" in title and f"{lr}/" in title.replace("\n", "") for title in titles), (lr, mode)
    assert "12 of 32 runs are shown, the first of each mode before the second of any" in " ".join(words(figure).split())


def test_titles_and_notes_end_inside_the_figure(tmp_path: Path) -> None:
    long = [write_run(tmp_path / ("long" * 12 + str(nth)), samples=False) for nth in range(3)]
    for runs in (long[:1], long):
        figure = pg_loss_by_rank(read_frames(runs))
        figure.canvas.draw()
        texts = [*figure.texts, *([figure._suptitle] if figure._suptitle else [])]  # pyright: ignore[reportAttributeAccessIssue]
        assert max(text.get_window_extent().x1 for text in texts) <= figure.bbox.x1
        for axes in figure.axes[: len(runs)]:
            (found,) = [text for text in axes.get_children() if getattr(text, "get_text", str)() == axes.get_title(loc="left")]
            assert found.get_window_extent().x1 <= figure.bbox.x1


def test_runs_without_weight_shares_or_gradients_are_left_out_and_counted(tmp_path: Path) -> None:
    steps = [{"weight_share/correct": 0.5, "weight_share/incorrect": 0.5, "gradient_ratio": 1.0}]
    replay = write_run(tmp_path / "replay", "constant", steps)
    trained = [write_arm(tmp_path / f"t{seed}", "sample_mean", (0.1, 0.2, 0.3), seed) for seed in (0, 1)]
    frames = read_frames([*trained, replay])
    shares = weight_shares(frames)
    assert [tick.get_text() for tick in shares.axes[0].get_yticklabels()] == ["constant (n\u00a0=\u00a01)"]
    assert "2 runs without weight_share/* left out" in words(shares)
    gradients = mode_gradients(frames)
    assert [tick.get_text() for tick in gradients.axes[0].get_yticklabels()] == ["constant"]
    said = " ".join(words(gradients).split())
    assert str(gradients.get_label()).endswith("against that of constant (1 step of the same rollouts)")
    assert "the baseline mode, constant," in said
    assert "2 runs without a measured gradient left out" in said


def test_one_step_has_whole_steps_and_its_dots_are_inside_the_axes(tmp_path: Path) -> None:
    runs = [write_arm(tmp_path / f"r{seed}", "constant", (0.1 + seed,), seed) for seed in (0, 1)]
    figure = curves(*runs)
    low, high = figure.axes[0].get_xlim()
    assert [tick for tick in figure.axes[0].get_xticks() if low <= tick <= high] == [0]
    found = find(read_frames(runs))
    accuracy = accuracy_by_tokens(found.trained, found.curves.fitted)
    low, high = accuracy.axes[0].get_xlim()
    assert low < 0 < high
    assert accuracy.axes[0].get_xticks().tolist() == [0]
    said = " ".join(words(accuracy).split())
    assert "R_0" not in said
    assert "no curve for 2 runs (seed 0: 1 point; a curve needs at least 8; 1 more not shown)" in said


def test_the_counts_of_correct_samples_have_whole_ticks_even_where_all_are_0(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    one = layout(0, "sample_mean", "dp4:balanced")
    for rank in one["ranks"]:
        rank.update({"correct/count": 0})
    write_lines(run / "layouts.jsonl", [{**one, "correct/count": 0}])
    axes = correct_by_rank(read_frames([run])).axes[0]
    low, high = axes.get_xlim()
    assert [tick for tick in axes.get_xticks() if low <= tick <= high] == [0, 1]


def test_only_what_is_more_than_rounding_is_drawn_and_the_limit_is_the_verdicts(tmp_path: Path) -> None:
    """1e-7 of the absolute terms is a change in float64; 1e-12 is rounding, told in one line."""
    runs = [write_run(tmp_path / mode, mode) for mode in ("sample_mean", "constant")]
    for run, moved in zip(runs, (1e-7, 1e-12), strict=True):
        lines = [layout(0, run.name, name) for name in ("dp1:first-fit", "dp4:balanced")]
        lines[1]["pg_loss"] = 0.25 + moved
        write_lines(run / "layouts.jsonl", lines)
    frames = read_frames(runs)
    figure = layout_deviation(frames)
    assert [x for x, _ in dots(figure.axes[0])] == [pytest.approx(1e-7, rel=1e-5)]
    assert figure.axes[0].get_legend_handles_labels()[1] == ["sample_mean"]
    assert not figure.axes[0].lines
    said = " ".join(words(figure).split())
    assert "1 of 2 differences; these layouts differ by at most 1.0e-12 of the absolute terms of pg_loss, and up to" in said
    assert "1e-09 in float64 is taken for rounding" in said
    assert "of the sum of its absolute terms, where differences up to 1e-09 are taken for rounding in float64 (2 " in layouts(
        frames, find(frames)
    )
