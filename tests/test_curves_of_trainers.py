"""Runs that other trainers made: their logs, written by the real libraries where these are here, give the verdict that our own
records of the same numbers give; bad input is one line."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.special import stdtr, stdtrit

from aggcli.analysis.arms import read_arms
from aggcli.analysis.log_names import KNOWN, column_of
from aggcli.analysis.statistics import welch_test
from aggcli.jobs.compare import ComparisonOptions, compare
from aggcli.jobs.curves import compare_curves
from tests.cli import aggcli, refused
from tests.test_results import write_run

STEPS = 12
TOKENS = 1024
"""Tokens of every step."""
REWARDS = {"grpo": (40, 42, 43), "dapo": (52, 55, 54)}
"""Arm -> the reward of a seed's last steps, in 64ths, which float32 holds exactly."""


def numbers(arm: str, seed: int) -> list[tuple[float, float]]:
    """(reward, length) of each step of a run."""
    return [((REWARDS[arm][seed] + at % 2) / 64, 100 + 4 * seed + at + (arm == "dapo")) for at in range(STEPS)]


def own_records(folder: Path) -> list[Path]:
    return [
        write_run(
            folder / f"{arm}-seed{seed}",
            arm,
            seed,
            [
                {"step": at, "rollout_step": at, "raw_reward": reward, "response_length": length, "response_tokens": TOKENS}
                for at, (reward, length) in enumerate(numbers(arm, seed))
            ],
        )
        for arm in REWARDS
        for seed in range(3)
    ]


def logged(arm: str, seed: int) -> list[dict[str, Any]]:
    """The same numbers as TRL logs them."""
    return [
        {"step": at, "reward": reward, "completions/mean_length": length, "num_tokens": TOKENS * (at + 1)}
        for at, (reward, length) in enumerate(numbers(arm, seed))
    ]


def event_files(folder: Path, arm: str, name: str, seed: int) -> None:
    from torch.utils.tensorboard.writer import SummaryWriter

    with SummaryWriter(str(folder / f"{arm}-{name}{seed}")) as writer:
        for row in logged(arm, seed):
            for tag in row.keys() - {"step"}:
                writer.add_scalar(f"train/{tag}", row[tag], row["step"])


def trainer_state(folder: Path, arm: str, name: str, seed: int) -> None:
    for last in (4, STEPS):  # checkpoints: the last one has the whole history
        place = folder / f"{arm}-{name}{seed}" / f"checkpoint-{last}"
        place.mkdir(parents=True)
        state = {"global_step": last, "log_history": [*logged(arm, seed)[:last], {"step": last, "train_runtime": 1.5}]}
        (place / "trainer_state.json").write_text(json.dumps(state))


def wandb_history(folder: Path, arm: str, name: str, seed: int) -> None:
    """`run.history()` as CSV: a row a log call, whose `_step` is no step of the trainer; blank where a call had no number."""
    folder.mkdir(exist_ok=True)
    lines = ["_step,_runtime,train/global_step,train/reward,train/completions/mean_length,train/num_tokens"]
    for row in logged(arm, seed):
        at, tokens = row["step"], row["num_tokens"]
        lines += [
            f"{2 * at},{at}.5,{at},{row['reward']},,",
            f"{2 * at + 1},{at}.6,{at},,{row['completions/mean_length']},{tokens}",
        ]
    (folder / f"{arm}-{name}{seed}.csv").write_text("\n".join(lines) + "\n")


def verl_lines(folder: Path, arm: str, name: str, seed: int) -> None:
    folder.mkdir(exist_ok=True)
    rows = [
        {"step": row["step"], "data": {"critic/score/mean": row["reward"], "critic/rewards/mean": -1.0, "timing_s/step": 3.5}}
        for row in logged(arm, seed)
    ]
    for row, one in zip(rows, logged(arm, seed), strict=True):
        row["data"] |= {"response_length/mean": one["completions/mean_length"], "perf/total_num_tokens": TOKENS}
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / f"{arm}-{name}{seed}.jsonl").write_text(text + '{"step": 99, "da')  # a writer that was killed


def mlflow_history(folder: Path, arm: str, name: str, seed: int) -> None:
    """A metric history: a row a number."""
    folder.mkdir(exist_ok=True)
    lines = ["run_id,key,value,step,timestamp"]
    for row in logged(arm, seed):
        lines += [f"ab12,{key},{row[key]},{row['step']},1700000000000" for key in row.keys() - {"step"}]
    (folder / f"{arm}-{name}{seed}.csv").write_text("\n".join(lines) + "\n")


WRITERS: Sequence[Callable[[Path, str, str, int], None]] = (
    event_files,
    trainer_state,
    wandb_history,
    verl_lines,
    mlflow_history,
)


def written(folder: Path, writer: Callable[[Path, str, str, int], None], name: str = "seed") -> list[str]:
    """The arms of logs that a writer made, for `--curves`."""
    for arm in REWARDS:
        for seed in range(3):
            writer(folder, arm, name, seed)
    return [f"{arm}={folder}/{arm}-*" for arm in REWARDS]


NO_FIT = ComparisonOptions(fit=False)


@pytest.mark.parametrize("writer", WRITERS, ids=lambda writer: writer.__name__)
def test_the_verdict_of_logs_is_that_of_our_own_records_of_the_same_numbers(tmp_path: Path, writer) -> None:
    ours = compare(own_records(tmp_path / "own"), NO_FIT).as_json()
    theirs = compare_curves(written(tmp_path / "logs", writer), (), NO_FIT).as_json()
    assert [row["outcome"] for row in theirs["outcomes"]][::2] == [
        "raw_reward",
        "raw_reward_at_equal_tokens",
        "response_length",
        "tokens",
    ]
    heads = {row.pop("head") for found in (ours, theirs) for row in found["outcomes"] if row["outcome"] == "tokens"}
    assert heads == {"tokens trained on before the last common step", "tokens as logged before the last common step"}
    for name in ("answer", "verdict", "outcomes", "paired", "modes"):
        assert theirs[name] == ours[name], name
    assert theirs["answer"][0].startswith("2 of 4 differences from grpo under dapo are shown;")
    row = theirs["outcomes"][0]
    # the last tenth of 12 steps is step 11, an odd one: (41 + 43 + 44) / 3 / 64
    assert (row["outcome"], row["mode"], row["mean"]) == ("raw_reward", "grpo", pytest.approx(128 / 3 / 64, rel=1e-15))


def test_a_trainer_state_that_trl_wrote_is_read_under_trls_names() -> None:
    arms = read_arms([f"trl={Path(__file__).parent / 'data' / 'trl_trainer_state'}"])
    (run,) = arms.runs
    assert (run.label, run.mode, run.steps.tolist()) == ("", "trl", list(range(1, 9)))
    assert run.measures["raw_reward"][0] == 3.9375
    assert run.measures["response_length"][0] == 6.75
    assert run.measures["entropy_loss"][0] == 2.598130941390991
    assert np.isnan(run.measures["accuracy"]).all()
    assert run.tokens[:2].tolist() == [0, 43]  # num_tokens of the step before


# -- runs that are not paired -----------------------------------------------------------------------------------------


def test_welchs_test_is_the_formula() -> None:
    """Means 2 and 6, variances 1 and 4, so se^2 = 1/3 + 4/3 and by Welch and Satterthwaite 50/17 degrees of freedom."""
    found = welch_test([4, 6, 8], [1, 2, 3])
    se, freedom = math.sqrt(5 / 3), 50 / 17
    reach = float(stdtrit(freedom, 0.975)) * se
    assert found.p == pytest.approx(2 * stdtr(freedom, -4 / se), rel=1e-12)
    assert (found.difference.mean, found.runs, found.sign_flip) == (4, (3, 3), None)
    assert (found.difference.low, found.difference.high) == (pytest.approx(4 - reach), pytest.approx(4 + reach))
    assert found.std == pytest.approx(math.sqrt(2.5))
    alone = welch_test([4, 6, 8], [1])
    assert (alone.difference.mean, alone.difference.low, alone.p, alone.runs) == (5, None, None, (3, 1))


def test_runs_that_tell_no_seed_are_compared_by_welchs_test_and_said_not_to_be_paired(tmp_path: Path, capsys) -> None:
    arms = written(tmp_path, trainer_state, name="")
    found = compare_curves(arms, (), NO_FIT)
    row = next(one for one in found.rows if (one.outcome, one.mode) == ("raw_reward", "dapo"))
    mine, base = ([(last + 1) / 64 for last in REWARDS[arm]] for arm in ("dapo", "grpo"))
    assert row.p == pytest.approx(welch_test(mine, base).p, rel=1e-12)
    assert (row.sign_flip_p, row.pairs) == (None, None)
    text = " ".join([*found.answer.sentences, *found.verdict, *found.notes, found.caption])
    for said in (
        "3 runs an arm",
        "they are not paired",
        "Welch t-test",
        "6 runs tell no seed by their paths",
        "3 runs against 3",
    ):
        assert said in text, said
    shown = " ".join([*found.answer.sentences, *found.verdict, found.caption]).replace("since their seeds are not known", "")
    for untrue in ("paired t-test", "paired by", "sign-flip", "Sign-flip", " seeds", "one seed", "One seed"):
        assert untrue not in shown, untrue
    told = aggcli(capsys, "compare", *[word for arm in arms for word in ("--curves", arm)], "--no-fit")
    assert (told.code, "minus grpo" in told.out) == (0, True)


def test_one_run_an_arm_is_no_test(tmp_path: Path) -> None:
    for arm in REWARDS:
        trainer_state(tmp_path, arm, "", 0)
    found = compare_curves([f"{arm}={tmp_path}/{arm}-0" for arm in REWARDS], (), NO_FIT)
    assert found.answer.sentences[0].startswith("grpo and dapo have one run each: no interval and no test")
    assert found.study.comparison.tests == 0


def test_the_caption_tells_of_differences_and_of_b_only_where_they_are(tmp_path: Path) -> None:
    arms = [jsonl(tmp_path, arm, good) for arm in ("a", "b")]
    alone, both = (compare_curves(given, (), NO_FIT).caption for given in (arms[:1], arms))
    assert ("differences are" in alone, "differences are paired by seed" in both) == (False, True)
    welch = compare_curves(written(tmp_path, trainer_state, name=""), (), NO_FIT)
    assert any(row.smallest_difference is not None for row in welch.rows)
    assert ("runs of each arm that half of it takes" in welch.caption, "of B a factor" in welch.caption) == (True, False)


def test_our_own_runs_are_an_arm_beside_those_of_another_trainer(tmp_path: Path) -> None:
    own_records(tmp_path / "own")
    curves = [f"ours={tmp_path}/own/grpo-*", written(tmp_path / "logs", trainer_state)[1]]
    found = compare_curves(curves, (), NO_FIT)
    whole = compare(own_records(tmp_path / "again"), NO_FIT)
    assert [row.difference for row in found.rows] == [row.difference for row in whole.rows]
    assert (found.study.comparison.labels, found.study.comparison.paired) == (("ours", "dapo"), True)
    assert not found.study.differing  # of the other's settings nothing is known


def test_a_panel_that_wandb_exported_holds_several_runs_of_an_arm(tmp_path: Path) -> None:
    for arm in REWARDS:
        heads = [f"{arm}-seed{seed} - {name}" for seed in range(3) for name in ("_step", "train/reward", "train/reward__MIN")]
        lines = [",".join(f'"{head}"' for head in ("Step", *heads))]
        for at in range(STEPS):
            cells = [f"{at},{numbers(arm, seed)[at][0]},0" for seed in range(3)]
            lines.append(f"{at},{','.join(cells)}")
        (tmp_path / f"{arm}.csv").write_text("\n".join(lines))
    arms = read_arms([f"{arm}={tmp_path}/{arm}.csv" for arm in REWARDS])
    assert (arms.paired, [run.seed for run in arms.runs]) == (True, [0, 1, 2, 0, 1, 2])
    assert [run.measures["raw_reward"][-1] for run in arms.runs[:3]] == [41 / 64, 43 / 64, 44 / 64]
    assert any(note.endswith("; tokens") for note in arms.notes)  # not there, so said to be missing


def test_a_run_of_a_panel_whose_name_begins_like_anothers_has_its_own_numbers(tmp_path: Path) -> None:
    heads = "Step,grpo - train/reward,grpo - lr 1e-6 - train/reward"
    (tmp_path / "panel.csv").write_text(f"{heads}\n0,0.1,0.9\n1,0.2,0.8\n")
    runs = {run.source: run.measures["raw_reward"].tolist() for run in read_arms([f"a={tmp_path}/panel.csv"]).runs}
    assert runs == {f"{tmp_path}/panel.csv (grpo)": [0.1, 0.2], f"{tmp_path}/panel.csv (grpo - lr 1e-6)": [0.9, 0.8]}


def test_a_comma_at_the_end_of_a_row_shifts_no_column(tmp_path: Path) -> None:
    """Also beside a row without one, a cell of two lines, and one that is left out."""
    text = 'step,reward,response_length,notes\n1,1,101,,\n2,0.5,102,"one\ntwo",\n3,0.25\n'
    (tmp_path / "x.csv").write_text(text)
    (run,) = read_arms([f"a={tmp_path}/x.csv"]).runs
    assert (run.steps.tolist(), run.measures["raw_reward"].tolist()) == ([1, 2, 3], [1, 0.5, 0.25])
    np.testing.assert_array_equal(run.measures["response_length"], [101, 102, math.nan])


# -- what a number is called --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("columns", "key", "column"),
    [
        (("train/reward", "eval/accuracy", "mean_token_accuracy"), "accuracy", None),
        (("val-core/math/acc/mean@1", "critic/rewards/mean"), "reward", None),
        (("critic/rewards/mean", "critic/score/mean"), "reward", "critic/score/mean"),
        (("rollout/rewards", "rollout/raw_reward"), "reward", "rollout/raw_reward"),
        (("train/rewards/accuracy_reward/mean",), "accuracy", "train/rewards/accuracy_reward/mean"),
        (("ppo_kl", "actor/ppo_kl"), "kl", None),
    ],
)
def test_nothing_is_called_what_it_is_not(columns: Sequence[str], key: str, column: str | None) -> None:
    assert column_of(KNOWN[key], columns) == column


def test_the_notes_say_what_each_number_is_and_what_was_not_there(tmp_path: Path) -> None:
    curves = [written(tmp_path / "a", trainer_state)[0], written(tmp_path / "b", verl_lines)[1]]
    notes = read_arms(curves).notes
    assert "raw reward is reward in grpo and critic/score/mean in dapo" in notes[0]
    assert notes[1] == "tokens are counted as the trainers logged them, which may include those of prompts"
    assert notes[2] == "not found, so not compared: accuracy; entropy; KL divergence"
    given = read_arms([written(tmp_path / "c", verl_lines)[0]], ["reward=critic/rewards/mean"])
    assert given.runs[0].measures["raw_reward"].tolist() == [-1.0] * STEPS


def test_tokens_that_nothing_tells_are_not_made_up(tmp_path: Path) -> None:
    """A run that was resumed at step 50, and one that skips a step, of which nobody knows the tokens."""
    resumed = [{"step": at, "reward": 1.0, "num_tokens": 10 * at} for at in (50, 51, 52)]
    (tmp_path / "resumed.jsonl").write_text("".join(json.dumps(row) + "\n" for row in resumed))
    skips = [{"step": at, "data": {"critic/score/mean": 1.0, "perf/total_num_tokens": 10}} for at in (1, 2, 4, 5)]
    (tmp_path / "skips.jsonl").write_text("".join(json.dumps(row) + "\n" for row in skips))
    first, second = (read_arms([f"a={tmp_path}/{name}.jsonl"]).runs[0].tokens for name in ("resumed", "skips"))
    np.testing.assert_array_equal(first, [np.nan, 500, 510])
    np.testing.assert_array_equal(second, [0, 10, np.nan, np.nan])


def test_a_number_that_no_arithmetic_can_hold_counts_as_not_measured(tmp_path: Path) -> None:
    rows = [{"step": at, "reward": value} for at, value in enumerate((0.25, 1e308, math.inf, math.nan, 10**400, 0.5))]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (run,) = read_arms([f"a={tmp_path}/x.jsonl"]).runs
    assert (run.steps.tolist(), run.measures["raw_reward"].tolist()) == ([0, 5], [0.25, 0.5])


# -- what was not measured ----------------------------------------------------------------------------------------------


def jsonl(folder: Path, arm: str, rows: Callable[[int, int], Mapping[str, float]], seeds: int = 3) -> str:
    """Runs of 20 steps, as an argument of `--curves`. `rows`: the numbers of a seed at a step."""
    for seed in range(seeds):
        own = [json.dumps({"step": at, **rows(seed, at)}) + "\n" for at in range(20)]
        (folder / f"{arm}-seed{seed}.jsonl").write_text("".join(own))
    return f"{arm}={folder}/{arm}-*"


def good(seed: int, at: int) -> Mapping[str, float]:
    return {"reward": 0.5 + 0.01 * seed * seed, "response_length": 100 + seed + at}


def test_a_diverged_arm_is_named_and_the_headline_says_what_was_not_tested(tmp_path: Path) -> None:
    gone = jsonl(tmp_path, "a", lambda seed, at: {**good(seed, at), "reward": math.nan if at >= 16 else 0.25})
    found = compare_curves([gone, jsonl(tmp_path, "b", good)], (), NO_FIT)
    assert found.answer.sentences[1] == (
        "Raw reward in training rollouts, equal steps, was not tested under b: a has no number of it in the last steps."
    )
    said = f"raw reward of {tmp_path}/a-seed1.jsonl is NaN, infinite or beyond 1e+150 from step 16 on, and left out there"
    assert said in found.notes


def test_a_column_that_ends_early_is_named_and_one_that_is_logged_seldom_is_not(tmp_path: Path) -> None:
    """The reward is blank from step 16 on; the entropy stands at every fifth step, last at step 15 of 19."""
    cells = [f"{at},{0.5 if at < 16 else ''},{100 + at},{1.0 if at % 5 == 0 else ''}" for at in range(20)]
    (tmp_path / "x.csv").write_text("\n".join(["step,reward,response_length,entropy", *cells]))
    notes = read_arms([f"a={tmp_path}/x.csv"]).notes
    assert [note for note in notes if "x.csv" in note] == [
        f"raw reward of {tmp_path}/x.csv has no number behind step 15, of 19"
    ]


def test_the_seeds_that_are_said_are_those_that_were_compared(tmp_path: Path) -> None:
    """Seed 2 of a has no reward in two of its steps and from 17 on: two seeds in reward, three in length."""
    gone = {5, 9, *range(17, 20)}
    lost = jsonl(tmp_path, "a", lambda s, at: {**good(s, at), **({"reward": math.inf} if s == 2 and at in gone else {})})
    found = compare_curves([lost, jsonl(tmp_path, "b", lambda s, at: {**good(s, at), "reward": 0.5})], (), NO_FIT)
    assert {row.outcome: row.pairs for row in found.rows if row.mode == "b"} == {"raw_reward": 2, "response_length": 3}
    assert any(line.startswith("2 to 3 seeds, by outcome and arm,") for line in found.answer.sentences)
    assert "80 % of such comparisons, each by the spread of its own seeds, would have shown" in found.caption
    assert any("a-seed2.jsonl is NaN, infinite or beyond 1e+150 at 5 steps (5, 9, 17 and 2 more)" in it for it in found.notes)


def test_runs_of_unknown_tokens_that_reach_an_accuracy_are_not_said_not_to(tmp_path: Path) -> None:
    """Arm b lies at 0.62; of a, one run of three comes to the level that is asked for."""
    low = jsonl(tmp_path, "a", lambda seed, at: {"accuracy": 0.02 * at + 0.1 * (seed == 2)})
    high = jsonl(tmp_path, "b", lambda seed, at: {"accuracy": 0.62})
    notes = compare_curves([low, high], (), ComparisonOptions(fit=False, reach=0.45)).notes
    assert not any("no run reaches" in note for note in notes)
    assert "b: 3 of 3 runs reached an accuracy of 0.45; the tokens that it took are known of none" in notes
    assert "a: 1 of 3 runs reached an accuracy of 0.45; the tokens that it took are known of none" in notes
    never = compare_curves([low], (), ComparisonOptions(fit=False, reach=0.9)).notes
    assert "no run reaches an accuracy of 0.9" in never


def test_a_column_that_a_run_lacks_is_compared_over_the_others_and_one_that_an_arm_lacks_is_not(tmp_path: Path) -> None:
    some = jsonl(tmp_path, "a", lambda s, at: {**good(s, at), **({} if s == 2 else {"accuracy": 0.5, "entropy": 1.0})})
    other = jsonl(tmp_path, "b", lambda seed, at: {**good(seed, at), "accuracy": 0.5})
    notes = read_arms([some, other]).notes
    assert f"accuracy is missing in {tmp_path}/a-seed2.jsonl, so compared over the others" in notes
    assert "not found, so not compared: entropy of b; KL divergence; tokens" in notes
    assert not any("entropy is missing" in note for note in notes)


def test_a_difference_without_an_interval_has_the_digits_of_its_terms(tmp_path: Path, capsys) -> None:
    arms = [jsonl(tmp_path, arm, lambda *_, value=value: {"reward": value}) for arm, value in (("a", 59000), ("b", 41300))]
    out = aggcli(capsys, "compare", "--curves", arms[0], "--curves", arms[1], "--no-fit").out
    assert "minus a              -17700" in out
    assert "equal steps: -17700." in " ".join(out.split())
    assert "18000" not in out


def test_a_huge_number_is_short(tmp_path: Path, capsys) -> None:
    arms = [jsonl(tmp_path, arm, lambda s, at: {**good(s, at), "reward": 1e140 * (1 + s * s)}) for arm in "ab"]
    out = aggcli(capsys, "compare", "--curves", arms[0], "--curves", arms[1], "--no-fit").out
    assert "2.67e+140 ± 5.2e+140" in " ".join(out.split())  # (1 + 2 + 5) / 3; 4.3027 * 2.0817 / 3**0.5
    assert max(map(len, out.split())) < 40 + len(str(tmp_path))


# -- bad input ------------------------------------------------------------------------------------------------------


def put(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def lines(steps: Sequence[int], axis: str = "step", name: str = "reward") -> str:
    return "".join(json.dumps({axis: at, name: 0.5}) + "\n" for at in steps)


@pytest.mark.parametrize(
    ("files", "arguments", "said"),
    [
        ({}, ("--curves", "a={}/b-*"), "nothing matches"),
        ({"x.jsonl": lines([1])}, ("--curves", "{}/x.jsonl"), "must be NAME=PATTERN"),
        ({"x.jsonl": lines([1])}, ("--curves", "a={}/x.jsonl", "--curves", "a={}/x.jsonl"), "a is named twice"),
        ({"x.jsonl": lines([1])}, ("--curves", "a={}/x.jsonl", "--curves", "b={}/*.jsonl"), "is a run of a already"),
        ({"x.csv": "epoch,reward\n1,2\n"}, ("--curves", "a={}/x.csv"), "has no column of steps; it has epoch, reward"),
        ({"x.csv": "step,reward\n0.5,2\n"}, ("--curves", "a={}/x.csv"), "step holds 0.5, and steps are whole numbers"),
        (
            {"x.jsonl": '{"step": "1", "reward": 1}\n'},
            ("--curves", "a={}/x.jsonl"),
            "step holds the text '1', and steps are whole numbers",
        ),
        ({"x.csv": "step,reward\n1,2,\n2,3,4\n"}, ("--curves", "a={}/x.csv"), "row 3 has 3 cells, and the header names 2"),
        ({"x.csv": "step,reward,reward\n1,2,3\n"}, ("--curves", "a={}/x.csv"), "has several columns named reward"),
        (
            {"x.csv": "step,reward,response_length\n1,2,-3\n"},
            ("--curves", "a={}/x.csv"),
            "response_length lies below 0, so it is no response length",
        ),
        (
            {
                "x.csv": "step,reward\n1,NaN\n",
            },
            ("--curves", "a={}/x.csv"),
            "holds no number over steps",
        ),
        ({"x.csv": "step,reward,lr\n1,inf,1\n"}, ("--curves", "a={}/x.csv"), "reward: no finite number below 1e+150"),
        ({"x.csv": ""}, ("--curves", "a={}/x.csv"), "is no CSV table"),
        ({"x.jsonl": "{}\nno\n{}\n"}, ("--curves", "a={}/x.jsonl"), "line 2 is no JSON"),
        ({"trainer_state.json": "{}"}, ("--curves", "a={}/trainer_state.json"), "no JSON object with a log_history"),
        ({"x.jsonl": lines([1], name="los")}, ("--curves", "a={}/x.jsonl"), "nearest: los; name it with --metric reward="),
        (
            {"x.jsonl": lines([1], name="rewrd")},
            ("--curves", "a={}/x.jsonl", "--metric", "reward=reward"),
            "has no reward for --metric reward; did you mean 'rewrd'?",
        ),
        ({"x.jsonl": lines([1], name="accuracy").replace("0.5", "50")}, ("--curves", "a={}/x.jsonl"), "so it is no accuracy"),
        (
            {"x.jsonl": lines([1, 2]), "y.jsonl": lines([1, 2], axis="_step")},
            ("--curves", "a={}/x.jsonl", "--curves", "b={}/y.jsonl"),
            "arms of different x-axes: step in a and _step in b",
        ),
        (
            {"x.jsonl": lines([1, 3, 5]), "y.jsonl": lines([2, 4])},
            ("--curves", "a={}/x.jsonl", "--curves", "b={}/y.jsonl"),
            "arms of different x-axes:",
        ),
        ({"x.jsonl": lines([1]), "y.jsonl": lines([1])}, ("--curves", "a={}"), "holds 2 logs (x.jsonl, y.jsonl)"),
        ({"x.jsonl": lines([1])}, ("--metric", "reward=x"), "--metric: names a column"),
        ({"x.jsonl": lines([1])}, ("--curves", "a={}/x.jsonl", "--dry-run"), "nothing is run when logs are compared"),
        ({"x.jsonl": lines([1])}, ("--curves", "a={}/x.jsonl", "--axis", "seconds"), "are not read"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, capsys, files: Mapping[str, str], arguments: Sequence[str], said: str) -> None:
    for name, text in files.items():
        put(tmp_path / name, text)
    line = refused(aggcli(capsys, "compare", *(word.replace("{}", str(tmp_path)) for word in arguments)))
    assert said in line


def test_an_event_file_without_the_tag_names_the_nearest_and_a_truncated_one_where_it_ends(tmp_path: Path, capsys) -> None:
    curves = written(tmp_path, event_files)
    words = [word for arm in curves for word in ("--curves", arm)]
    line = refused(aggcli(capsys, "compare", *words, "--metric", "reward=train/rewards"))
    assert "grpo-seed0: has no train/rewards for --metric reward; did you mean 'train/reward'?" in line
    (file,) = (tmp_path / "grpo-seed1").iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:-20])
    assert f"{file}: is truncated or damaged behind step 11; copy it again" in refused(aggcli(capsys, "compare", *words))
    file.write_bytes(whole[:-20] + b"\0" + whole[-19:])
    assert f"{file}: is truncated or damaged behind step 11" in refused(aggcli(capsys, "compare", *words))
