"""Faults that tests are there for: each is put into a copy of the package, and the tests named for it must go red.

Run by hand, from the repository: `python -m tests.mutations [WORD...]`, where a WORD picks the faults whose line holds it. A
line says `killed`, `SURVIVED` (a test is missing) or `gone` (the text is no longer there, or there twice: find where it went).
The exit code is 1 unless every fault was killed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.cli import ROOT, environment


@dataclass(frozen=True)
class Mutation:
    """In `file` of the package, `old` becomes `new`; `tests`: what pytest is given."""

    fault: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTATIONS: tuple[Mutation, ...] = (
    # -- sentences --
    Mutation(
        "what layouts are apart at most is rounded to the nearest",
        "measurement/words.py",
        "digits, ROUND_CEILING)",
        "digits, None)",
        ("tests/test_terminal.py",),
    ),
    Mutation(
        "what a p cannot fall below is rounded to the nearest",
        "measurement/words.py",
        "digits, ROUND_FLOOR)",
        "digits, None)",
        ("tests/test_terminal.py",),
    ),
    # -- checks and what is drawn --
    Mutation(
        "the layout check of a replay looks at pg_loss alone",
        "measurement/comparison.py",
        "if metric == _NOT_COMPARED or",
        'if metric != "pg_loss" or',
        ("tests/test_normalisation.py",),
    ),
    Mutation(
        "training ends with exit code 0 where its layouts disagree",
        "jobs/training_words.py",
        '            return f"{where}{said}; layouts.jsonl holds them"',
        '            return ""',
        ("tests/test_training_layouts.py",),
    ),
    Mutation(
        "the band of the learning curves is ten times too wide",
        "report/curves.py",
        "        mean - reach,\n        mean + reach,\n",
        "        mean - 10 * reach,\n        mean + 10 * reach,\n",
        ("tests/test_report_figures.py",),
    ),
    Mutation(
        "the mean accuracy goes on to the end of the longest run",
        "report/accuracy.py",
        "end = min(",
        "end = max(",
        ("tests/test_report_figures.py",),
    ),
    Mutation(
        "a results directory that is given twice is read twice, to be compared and to be drawn",
        "analysis/reading.py",
        "found.setdefault(place.resolve(), place)",
        "found[place / str(len(found)) / '..'] = place",
        ("tests/test_results.py",),
    ),
    Mutation(
        "a copy of a run counts as another run",
        "analysis/study.py",
        "runs, notes = without_duplicates(labelled(sampled or read))",
        "runs, notes = labelled(sampled or read), []",
        ("tests/test_results.py",),
    ),
    Mutation(
        "a difference between layouts is measured against the number, which can cancel to 0",
        "measurement/comparison.py",
        "(report.sizes[rule].get(metric) for report in (first, other))",
        "()",
        ("tests/test_layout_differences.py",),
    ),
    Mutation(
        "nobody looks whether a rank holds the samples that the layout gives it",
        "measurement/step.py",
        "if whole.sums[HELD] != ",
        "if False and whole.sums[HELD] != ",
        ("tests/test_layout_differences.py",),
    ),
    Mutation(
        "nobody looks whether a layout holds every sample once",
        "measurement/step.py",
        "misplaced = _not_once(measured.schedule, inputs.step.num_samples)",
        "misplaced: list[str] = []",
        ("tests/test_layout_differences.py",),
    ),
    # -- objective --
    Mutation(
        "a group's deviation divides by n",
        "objective/advantages.py",
        "(squares_P / (count_P - 1).clamp(min=1))",
        "(squares_P / count_P.clamp(min=1))",
        ("tests/test_groups.py",),
    ),
    Mutation(
        "a rollout of several samples enters its group once a sample",
        "objective/advantages.py",
        "    first_S = is_first(rollout_S)",
        "    first_S = torch.ones_like(rollout_S, dtype=torch.bool)",
        ("tests/test_groups.py",),
    ),
    Mutation(
        "clipping is counted whatever the sign of the advantage",
        "objective/policy_loss.py",
        "(bound_T > free_T)",
        "(bound_T != free_T)",
        ("tests/test_metrics.py",),
    ),
    Mutation(
        "the dual clip caps the wrong sign",
        "objective/policy_loss.py",
        "caps_T = (advantage_T < 0)",
        "caps_T = (advantage_T > 0)",
        ("tests/test_metrics.py",),
    ),
    Mutation(
        "the unbiased KL estimate is not multiplied by the ratio",
        "objective/policy_loss.py",
        "return kl_T if ratio_T is None else ratio_T * kl_T",
        "return kl_T",
        ("tests/test_metrics.py",),
    ),
    Mutation(
        "prompt_mean divides by all rollouts though prompts are asked for",
        "rules/registry.py",
        'outer: dict[Counted, Counted] = {"rollouts": "prompts"}',
        'outer: dict[Counted, Counted] = {"rollouts": "rollouts"}',
        ("tests/test_formulas.py",),
    ),
    # -- layout --
    Mutation(
        "contiguous ranks drop what does not divide evenly",
        "layout/schedule.py",
        "starts = [rank * share + min(rank, extra) for",
        "starts = [rank * share for",
        ("tests/test_normalisation.py",),
    ),
    Mutation(
        "first-fit splits the first of two equally large micro-batches",
        "layout/schedule.py",
        "heap = [(-_tokens(pack, lengths), -at) for",
        "heap = [(-_tokens(pack, lengths), at - len(packs)) for",
        ("tests/test_golden.py",),
    ),
    Mutation(
        "a token is computed where it stands, not where the token before it does",
        "layout/context_parallel.py",
        "+ within_T - 1, 0)",
        "+ within_T, 0)",
        ("tests/test_formulas.py",),
    ),
    Mutation(
        "context parallelism deals its chunks in turn instead of zig-zag",
        "layout/context_parallel.py",
        "return np.minimum(chunk_T, 2 * cp - 1 - chunk_T)",
        "return chunk_T % cp",
        ("tests/test_formulas.py",),
    ),
    Mutation(
        "every context-parallel rank counts the samples",
        "layout/views.py",
        "[float(cp_rank == 0) for cp_rank in cp_ranks]",
        "[1.0 for _ in cp_ranks]",
        ("tests/test_layouts.py",),
    ),
    Mutation(
        "ranks that are measured together share their micro-batches",
        "layout/views.py",
        "share.micro_batch_S + start for",
        "share.micro_batch_S for",
        ("tests/test_pieces.py",),
    ),
    # -- measurement --
    Mutation(
        "a length on the boundary of a quarter counts in the upper one",
        "measurement/local.py",
        "((4 * length_S + max_response_length - 1) // max_response_length - 1)",
        "(4 * length_S // max_response_length)",
        ("tests/test_correct_samples.py",),
    ),
    Mutation(
        "groups without a scored rollout count as of equal rewards",
        "measurement/groups.py",
        "flat_P & scored_P,",
        "flat_P,",
        ("tests/test_groups.py",),
    ),
    Mutation(
        "groups without a scored rollout count as all wrong",
        "measurement/groups.py",
        "wrong_P = scored_P & (right_P == 0)",
        "wrong_P = right_P == 0",
        ("tests/test_groups.py",),
    ),
    Mutation(
        "the spread of the batch's rewards is over training samples",
        "measurement/groups.py",
        "_std(rollouts.reward_G[scored_G & (run_G == run)])",
        "_std(view.raw_reward_S[~view.raw_reward_S.isnan() & (view.run_S == run)])",
        ("tests/test_groups.py",),
    ),
    # -- training --
    Mutation(
        "rows with a KL term alone are taken to have no gradient",
        "training/step.py",
        "        moves_T |= given.kl_weight_T * given.kl_coef_T != 0\n",
        "        pass\n",
        ("tests/test_training_update.py",),
    ),
    Mutation(
        "a long prompt sees itself in none of its pieces",
        "policy/packing.py",
        "np.where(is_first_K[begins_K], 0, _only_seen(P))",
        "np.full(int(begins_K.sum()), _only_seen(P))",
        ("tests/test_policy.py",),
    ),
    Mutation(
        "the entropy bonus is a penalty",
        "training/step.py",
        "loss = loss - objective.entropy_coef *",
        "loss = loss + objective.entropy_coef *",
        ("tests/test_training_update.py",),
    ),
    Mutation(
        "training forgets the ratio of the unbiased KL estimate",
        "training/step.py",
        "ratio_T = terms.ratio_T if objective.kl_unbiased else None",
        "ratio_T = None",
        ("tests/test_training_update.py",),
    ),
    Mutation(
        "a context-parallel rank forgets what the others' tokens owe to its keys and values",
        "policy/context.py",
        "whole = ctx.world.add_up(gradients[0].contiguous().clone())",
        "whole = gradients[0].contiguous()",
        ("tests/test_training_ranks.py",),
    ),
    Mutation(
        "a gradient that is cut over ranks is averaged",
        "policy/sharded.py",
        "whole.set_gradient_divide_factor(1.0)",
        "whole.set_gradient_divide_factor(float(world.size))",
        ("tests/test_sharded.py",),
    ),
    Mutation(
        "each rank clips by the norm of its own part of the gradient",
        "policy/protocol.py",
        "return torch.linalg.vector_norm(torch.stack(self.world.tensors(norm_R)), dim=0)",
        "return norm_R",
        ("tests/test_sharded.py",),
    ),
    Mutation(
        "a gradient that is cut over ranks is summed once more",
        "policy/sharded.py",
        "        return gradient_RQ\n",
        "        return world.add_up(gradient_RQ)\n",
        ("tests/test_sharded.py",),
    ),
    Mutation(
        "the overlong penalty starts at the limit",
        "training/rollout.py",
        "(self.response_limit - buffer - length_S)",
        "(self.response_limit - length_S)",
        ("tests/test_training_recipes.py",),
    ),
    Mutation(
        "a refill samples the prompts of the round before again",
        "training/rollout.py",
        "first=number * G)",
        "first=0)",
        ("tests/test_training_stack.py",),
    ),
    Mutation(
        "a run that does not step counts a step of AdamW",
        "policy/weights.py",
        "            if steps:\n",
        "            self.taken[run] += not steps\n            if steps:\n",
        ("tests/test_training_update.py",),
    ),
    Mutation(
        "a run that does not step steps",
        "policy/weights.py",
        "            if steps:\n",
        "            if True:\n",
        ("tests/test_training_update.py",),
    ),
    Mutation(
        "a step without a trained token updates the parameters",
        "training/loop.py",
        "return finite_R & (tokens_R > 0)",
        "return finite_R",
        ("tests/test_training_input.py",),
    ),
)


def main(words: list[str]) -> int:
    chosen = [one for one in MUTATIONS if all(word in f"{one.fault} {one.file} {one.tests}" for word in words)]
    survived = 0
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("aggcli", "tests", "experiments"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", copy)
        for one in chosen:
            verdict = _verdict(copy, one)
            survived += verdict != "killed"
            print(f"{verdict:8}  {one.fault}  ({one.file}: {' '.join(one.tests)})", flush=True)
    return int(survived > 0)


def _verdict(copy: Path, one: Mutation) -> str:
    path = copy / "aggcli" / one.file
    right = path.read_text(encoding="utf-8")
    if right.count(one.old) != 1:
        return "gone"
    path.write_text(right.replace(one.old, one.new), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *one.tests]
    done = subprocess.run(command, cwd=copy, env=environment(PYTHONPATH=str(copy)), capture_output=True, text=True, check=False)
    path.write_text(right, encoding="utf-8")
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{one.fault}: pytest ended with {done.returncode}\n{done.stdout}{done.stderr}")
    return "killed" if done.returncode == 1 else "SURVIVED"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
