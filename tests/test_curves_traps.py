"""Traps of other trainers' logs: runs given twice, resumed, of different length, of one seed beside several, and terminals."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from aggcli.analysis.arms import read_arms
from aggcli.analysis.console_logs import printed_numbers
from aggcli.jobs.compare import ComparisonOptions, compare
from aggcli.jobs.curves import compare_curves
from aggcli.measurement.words import signed
from tests.cli import aggcli, refused
from tests.test_curves_of_trainers import NO_FIT, REWARDS, jsonl, numbers, own_records, put, trainer_state, written
from tests.test_results import write_run

TWICE = "are of one run, which would count twice; give its folder"


def rewards(folder: Path, name: str, values: dict[int, float]) -> Path:
    return put(folder / f"{name}.jsonl", "".join(json.dumps({"step": at, "reward": r}) + "\n" for at, r in values.items()))


# -- one run, once ------------------------------------------------------------------------------------------------------


def test_a_run_cannot_be_given_twice(tmp_path: Path, capsys) -> None:
    trainer_state(tmp_path, "grpo", "seed", 0)
    run = tmp_path / "grpo-seed0"
    for pattern in ("checkpoint-*", "checkpoint-*/trainer_state.json", "**"):
        said = refused(aggcli(capsys, "compare", "--curves", f"a={run}/{pattern}"))
        assert TWICE in said or "lies in" in said, said
    (tmp_path / "link").symlink_to(run)
    assert TWICE in refused(aggcli(capsys, "compare", "--curves", f"a={tmp_path}/*"))
    (tmp_path / "link").unlink()
    both = ("--curves", f"a={run}", "--curves", f"b={run}/checkpoint-4")
    assert "is a run of a already" in refused(aggcli(capsys, "compare", *both))
    file = rewards(tmp_path / "r", "x", {0: 1.0, 1: 2.0})
    line = refused(aggcli(capsys, "compare", "--curves", f"a={file.parent}", "--curves", f"b={file}"))
    assert f"{file} lies in {file.parent}, which is given too; a run counts once" in line
    assert aggcli(capsys, "compare", "--curves", f"a={run}/checkpoint-12", "--no-fit").code == 0


def test_copies_of_a_run_are_named(tmp_path: Path) -> None:
    """x and y are alike where both are known, also where both are blank; z differs at its last step."""
    values = {0: 0.5, 1: 0.25, 2: 0.75}
    x, y, z = (rewards(tmp_path, name, values | more) for name, more in (("x", {}), ("y", {3: 1.0}), ("z", {2: 0.5})))
    notes = read_arms([f"a={x}", f"b={tmp_path}/[yz].jsonl"]).notes
    said = [note for note in notes if "the same numbers" in note]
    whole = "in the one column and at all 3 steps that both have; if it is one run, give it once"
    assert said == [f"{y} holds the same numbers as {x} {whole}"]
    assert z.exists()
    for name, lr in (("lr", 0.5), ("other_lr", 0.25), ("no_lr", None)):  # a column that is not read as a measure
        rows = [{"step": at, "reward": r, **({} if lr is None else {"lr": lr / (at + 1)})} for at, r in values.items()]
        put(tmp_path / f"{name}.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    said = lambda one, other: [  # noqa: E731
        note for note in read_arms([f"{at}={tmp_path}/{at}.jsonl" for at in (one, other)]).notes if "same numbers" in note
    ]
    assert (len(said("lr", "no_lr")), said("lr", "other_lr")) == (1, [])
    (tmp_path / "copy.jsonl").write_text((tmp_path / "lr.jsonl").read_text())
    assert "in all 2 columns and at all 3 steps" in said("lr", "copy")[0]
    runs = Path(__file__).parent / "data" / "trl_runs"
    assert not [one for one in read_arms([f"{at}={runs}/{at}-*" for at in ("dapo", "dr_grpo")]).notes if "same numbers" in one]


def test_the_event_files_of_a_resumed_run_are_joined_by_step_and_the_later_number_counts(tmp_path: Path) -> None:
    from torch.utils.tensorboard.writer import SummaryWriter

    for start, value, suffix in ((0, 0.25, ".a"), (3, 0.75, ".b")):
        with SummaryWriter(str(tmp_path / "run"), filename_suffix=suffix) as writer:
            for at in range(start, start + 5):
                writer.add_scalar("train/reward", value, at)
    first, second = sorted((tmp_path / "run").iterdir(), key=lambda path: path.suffix)
    first.rename(first.with_name("events.out.tfevents.900000000.host.1.0"))  # as strings they sort the other way
    second.rename(second.with_name("events.out.tfevents.1700000000.host.2.0"))
    arms = read_arms([f"a={tmp_path}/run"])
    (run,) = arms.runs
    assert (run.steps.tolist(), run.measures["raw_reward"].tolist()) == ([*range(8)], [0.25] * 3 + [0.75] * 5)
    again = f"raw reward of {tmp_path}/run is logged again, with another number, at 2 steps (3, 4)"
    assert f"{again}, as by a run that was resumed; the later number counts" in arms.notes


# -- runs that are not alike ----------------------------------------------------------------------------------------------


def test_an_arm_of_one_run_beside_one_of_three_is_not_tested_and_has_no_interval(tmp_path: Path) -> None:
    curves = written(tmp_path, trainer_state)
    found = compare_curves([curves[0], f"dapo={tmp_path}/dapo-seed0"], (), NO_FIT)
    row = next(one for one in found.rows if (one.outcome, one.mode) == ("raw_reward", "dapo"))
    assert (row.n, row.low, row.difference_low, row.p) == (1, None, None, None)
    assert row.difference == pytest.approx((53 - (41 + 43 + 44) / 3) / 64)
    assert found.answer.sentences[0].startswith("dapo has one run: no interval and no test")
    assert any("the arms do not have the same seeds" in note for note in found.notes)
    (heading, (line,)) = found.study.verdict.lists[0]
    assert heading.startswith("raw reward in training rollouts, equal steps, step 11")
    assert line == f"dapo: not tested, {signed(row.difference or 0.0, 3)}, 1 run against 3: no interval and no test"


def test_runs_of_different_length_are_compared_where_all_of_them_are(tmp_path: Path) -> None:
    """20 steps against 12: the last tenth of the 12 common ones is step 11, whatever came later."""
    rows = lambda shift: lambda seed, at: {"reward": shift + seed / 8 + (9.0 if at > 11 else 0.0)}  # noqa: E731
    long = jsonl(tmp_path, "a", rows(0.0))
    for seed in range(3):
        rewards(tmp_path, f"b-seed{seed}", dict.fromkeys(range(12), 0.5 + seed / 8))
    found = compare_curves([long, f"b={tmp_path}/b-*"], (), NO_FIT)
    row = next(one for one in found.rows if (one.outcome, one.mode) == ("raw_reward", "b"))
    assert (row.difference, row.compared_where, row.baseline_pair_mean) == (0.5, "step 11", 0.125)
    assert "b and a: 12 common steps; 8 are missing in some run, left out" in found.notes
    rewards(tmp_path, "b-seed0", dict.fromkeys(range(9), 0.5))
    rewards(tmp_path, "a-seed0", dict.fromkeys(range(15), 0.5))
    notes = compare_curves([long, f"b={tmp_path}/b-*"], (), NO_FIT).notes
    for own in ("a: 15 common steps; 5 are", "b: 9 common steps; 3 are", "b and a: 9 common steps; 11 are"):
        assert f"{own} missing in some run, left out" in notes


def test_curves_are_fitted_by_steps_where_tokens_are_not_logged(tmp_path: Path) -> None:
    """R = 1 / (1 + (10 / C)^2): half of the gain at step 10."""
    curve = lambda seed, at: {"reward": 1 / (1 + (10 / max(at, 0.01)) ** 2) + 0.001 * seed * (-1) ** at}  # noqa: E731
    arm = jsonl(tmp_path, "a", curve)
    by_tokens = compare_curves([arm], (), ComparisonOptions())
    assert not any(row.outcome.startswith("curve/") for row in by_tokens.rows)
    assert any("the response tokens of this run were not recorded" in note for note in by_tokens.notes)
    by_steps = compare_curves([arm], (), ComparisonOptions(axis="steps"))
    (row,) = [one for one in by_steps.rows if one.outcome == "curve/midpoint"]
    assert (row.unit, row.mean) == ("rollout steps", pytest.approx(10, rel=0.02))


# -- terminals ------------------------------------------------------------------------------------------------------------


def test_what_verl_and_slime_print_of_a_step_is_read_and_nothing_else() -> None:
    text = (
        "\x1b[36m(TaskRunner pid=7)\x1b[0m step:3 - global_seqlen/min:5 - critic/score/mean:0.125 - actor/lr:1e-06\n"
        "Training Progress: 10%\rstep:4 - critic/score/mean:np.float64(-0.5) - val/x@1:nan - note:abc - timing_s/step:2.5\n"
        "my step:5 of it - critic/score/mean:9\n"
        "INFO rollout 6: {'rollout/raw_reward': 0.25, 'rollout/rewards': nan, 'ok': True, 'name': 'x'}\n"
        "INFO step 7: {'train/loss': 0.5}\n"
        "rollout 8: {'rollout/raw_reward': __import__('os')}\n"
    )
    found = [one for one in printed_numbers(text) if not math.isnan(one[2])]
    assert found == [
        ("global_seqlen/min", 3, 5.0),
        ("critic/score/mean", 3, 0.125),
        ("actor/lr", 3, 1e-06),
        ("critic/score/mean", 4, -0.5),
        ("timing_s/step", 4, 2.5),
        ("rollout/raw_reward", 6, 0.25),
    ]


@pytest.mark.parametrize("kind", ["verl", "slime"])
def test_the_verdict_of_terminals_is_that_of_our_own_records_of_the_same_numbers(tmp_path: Path, kind: str) -> None:
    """Sixty-fourths are printed in full. Neither prints tokens so far; of slime no tokens at all are known."""
    ours = compare(own_records(tmp_path / "own"), NO_FIT).as_json()
    for arm in REWARDS:
        for seed in range(3):
            lines = ["Loading checkpoint shards: 100%"]
            for at, (reward, length) in enumerate(numbers(arm, seed)):
                lines += [
                    f"step:{at} - critic/score/mean:{reward} - response_length/mean:{float(length)}"
                    " - perf/total_num_tokens:1024"
                    if kind == "verl"
                    else f"rollout {at}: {{'rollout/raw_reward': {reward}, 'rollout/response_len/mean': {length}}}"
                ]
            put(tmp_path / f"{arm}-seed{seed}.log", "\n".join(lines))
    found = compare_curves([f"{arm}={tmp_path}/{arm}-*" for arm in REWARDS], (), NO_FIT)
    theirs = found.as_json()
    if kind == "verl":
        assert (theirs["answer"], theirs["verdict"]) == (ours["answer"], ours["verdict"])
    drop = (
        "p_holm",
        "level",
        "sign_flip_p_holm",
        "shown",
        "head",
        "smallest_difference",
        "seeds_for_half",
    )  # of all tests together
    mine = {(row["outcome"], row["mode"]): row for row in ours["outcomes"]}
    for row in theirs["outcomes"]:
        assert {k: v for k, v in row.items() if k not in drop} == {
            k: v for k, v in mine[row["outcome"], row["mode"]].items() if k not in drop
        }
    assert {row["outcome"] for row in theirs["outcomes"]} >= {"raw_reward", "response_length"}
    assert sum(note.endswith("and 3 more have the digits that a terminal was given") for note in found.notes) == 1


def test_a_terminal_without_a_step_is_one_line(tmp_path: Path, capsys) -> None:
    path = put(tmp_path / "x.log", "nothing\n")
    assert "holds no line of a step as verl" in refused(aggcli(capsys, "compare", "--curves", f"a={path}"))
    given = ("--curves", f"a={path}", "--metric", "step=iteration")
    assert "are counted by their own step" in refused(aggcli(capsys, "compare", *given))


# -- what TRL itself wrote ------------------------------------------------------------------------------------------------

TRL = Path(__file__).parent / "data" / "trl_runs"
"""By experiments/07-curves-of-trl.py."""


def test_the_verdict_of_runs_that_trl_made_is_that_of_our_own_records_of_the_same_numbers(tmp_path: Path) -> None:
    """Entropy too: tokens so far are TRL's, those of prompts among them, so ours are made of their differences."""
    ours = []
    for place in sorted(TRL.iterdir()):
        arm, seed = place.name.split("-seed")
        history = json.loads((place / "trainer_state.json").read_text())["log_history"][:3]
        so_far = [0.0, *(row["num_tokens"] for row in history)]
        lines = [
            {"step": at, "rollout_step": at, "raw_reward": row["reward"], "response_length": row["completions/mean_length"]}
            | {"entropy_loss": row["entropy"], "response_tokens": so_far[at + 1] - so_far[at]}
            for at, row in enumerate(history)
        ]
        ours.append(write_run(tmp_path / place.name, arm, int(seed), lines))
    mine = compare(ours, NO_FIT).as_json()
    assert len(mine["outcomes"]) == 10
    states = compare_curves([f"{arm}={TRL}/{arm}-seed*" for arm in ("dapo", "dr_grpo")], (), NO_FIT).as_json()
    events = compare_curves([f"{arm}={TRL}/{arm}-seed*/events" for arm in ("dapo", "dr_grpo")], (), NO_FIT).as_json()
    assert states["paired"] is events["paired"] is True
    at_step_2 = lambda text: text.replace("step 3", "step 2")  # noqa: E731 (TRL counts from 1)
    assert [at_step_2(one) for one in states["answer"]] == mine["answer"]
    assert [at_step_2(row["text"]) for row in states["verdict"]["lines"]] == [row["text"] for row in mine["verdict"]["lines"]]
    for theirs, close in ((states, 1e-15), (events, 1e-6)):  # event files hold float32
        for row, own in zip(theirs["outcomes"], mine["outcomes"], strict=True):
            assert (row["outcome"], row["mode"], row["shown"]) == (own["outcome"], own["mode"], own["shown"])
            for name in ("mean", "low", "high", "difference", "difference_low", "p"):
                assert row[name] == (own[name] if own[name] is None else pytest.approx(own[name], rel=close, abs=1e-12)), name


def test_asymptotes_that_lie_apart_are_named_beside_the_exponents_that_are_compared_under_one(tmp_path: Path) -> None:
    """1 / (1 + (10 / C)^2), and twice as much: A is 1 and 2 to a few hundredths, and B is 2 in both."""

    def rising(top: float):
        return lambda seed, at: {"reward": top / (1 + (10 / max(at, 0.01)) ** 2) + 0.001 * (seed + 1) * (-1) ** at}

    arms = [jsonl(tmp_path, arm, rising(top)) for arm, top in (("a", 1.0), ("b", 2.0), ("c", 1.0))]
    found = compare_curves(arms, (), ComparisonOptions(axis="steps"))
    said = [note for note in found.notes if "which lie apart" in note]
    assert len(said) == 1
    assert said[0].startswith("b: its own A is 2")
    assert "and a's 1" in said[0] or "and a's 0.99" in said[0]
