"""What the help of each command shows first: its line in `aggcli --help`, the options most used, and how to begin.

The one place that says which options are at the front; all others are under --help-all.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Screen:
    """The help of one command, a screen of it: options by use, each by the name of its parameter."""

    about: str
    """What the command does, in a line of `aggcli --help`."""
    front: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """Heading -> parameters, in the order shown. Empty: all options, which are few."""
    examples: tuple[str, ...] = ()
    """Command lines to begin with."""


_LOSS = ("eps_clip", "eps_clip_high", "kl_coef", "loss_aggregation_divisor")
_TRAINED = ("recipe", "task", "model", "steps", "seeds", "lr")
_OUTPUT = ("output", "overwrite", "config", "json")

SCREENS: dict[str, Screen] = {
    "demo": Screen(
        "From nothing, in a minute: a replay, a training, figures, a page",
        examples=("aggcli demo",),
    ),
    "inspect": Screen(
        "What a rollout file holds, and what is missing from it",
        {
            "Rollouts": ("rollouts", "rollout_format", "group_size", "reward_key", "tokenizer", "unsafe_load"),
            "Output": ("groups", "correct_threshold", "json"),
        },
        ("aggcli inspect dumps/*.pt", "aggcli inspect completions/ --groups"),
    ),
    "replay": Screen(
        "The same recorded rollouts under several modes and parallel layouts",
        {
            "Rollouts": ("paths", "group_size", "reward_key", "drop_zero_variance", "mask_truncated"),
            "Modes and loss": ("modes", "advantages", *_LOSS),
            "Layout": ("layouts", "global_batch_size", "max_tokens_per_gpu"),
            "Output": _OUTPUT,
        },
        ("aggcli replay dumps/*.pt", "aggcli replay example --modes token_mean,trl:bnpo --layouts dp1,dp4"),
    ),
    "audit": Screen(
        "Which rules change with the layout, and why; your own reducer too",
        {
            "Rollouts": ("paths", "group_size", "reward_key"),
            "Rules": ("rules", "framework", "reducer", "reducer_signature", "reducer_ranks", "divisor", "advantages"),
            "Layouts": ("layouts", "global_batch_size", "max_tokens_per_gpu", "fail_on_variance"),
            "Output": ("config", "json"),
        },
        ("aggcli audit --framework trl", "aggcli audit --reducer my.module:fn --fail-on-variance 1e-6"),
    ),
    "train": Screen(
        "Modes x seeds of a small policy, with everything else the same",
        {
            "What to train": ("paths", "modes", *_TRAINED),
            "Loss": _LOSS,
            "Machine": ("device", "launcher", "workers", "dp"),
            "Output": ("output", "overwrite", "resume", "config", "json"),
        },
        ("aggcli train --modes sample_mean,token_mean --seeds 5", "aggcli train --recipe dapo --steps 60"),
    ),
    "run": Screen(
        "One mode, step by step: train a small policy, or replay rollouts",
        {
            "What to run": ("paths", "loss_aggregation", "recipe", "task", "steps", "seed"),
            "Loss": _LOSS,
            "Layout": ("dp", "cp", "layouts", "max_tokens_per_gpu", "global_batch_size"),
            "Output": ("log_correct_samples", "output", "overwrite", "resume", "config", "dry_run", "json"),
        },
        ("aggcli run --recipe dapo", "aggcli run example --loss-aggregation prompt_mean --dp 2"),
    ),
    "compare": Screen(
        "Modes side by side: results directories, rollouts, or trained here",
        {
            "What to compare": ("paths", "curves", "modes", "recipe", "task", "steps", "seeds"),
            "With results directories": ("baseline", "reach", "plan", "format"),
            "Loss and layout, where something is run": ("eps_clip", "loss_aggregation_divisor", "layouts", "global_batch_size"),
            "Output": (*_OUTPUT, "resume"),
        },
        ("aggcli compare results/a results/b", "aggcli compare --seeds 5"),
    ),
    "plot": Screen(
        "Figures, and one page to send, from results directories",
        examples=("aggcli plot --html results/compare", "aggcli plot results/a results/b --format pdf --output figures"),
    ),
    "runs": Screen("Results directories: list, show, diff, rm, schema"),
    "runs list": Screen("Results directories under a folder, a line each", examples=("aggcli runs list",)),
    "runs show": Screen("Settings, environment, status, files and last numbers", examples=("aggcli runs show results/run",)),
    "runs diff": Screen("What differs between two of them", examples=("aggcli runs diff results/a results/b",)),
    "runs rm": Screen("Remove some, after asking", examples=("aggcli runs rm results/old",)),
    "runs schema": Screen("Every field of their files", examples=("aggcli runs schema --format json",)),
    "convert": Screen(
        "Rollouts of any format as plain JSONL or Parquet, or slime's dumps",
        {
            "Rollouts": ("rollouts", "out", "rollout_format", "group_size", "reward_key", "tokenizer", "unsafe_load"),
            "Output": ("to", "overwrite", "schema", "format"),
        },
        ("aggcli convert dumps/ plain/", "aggcli convert --schema"),
    ),
    "modes": Screen(
        "Formula, papers, traps, and each framework's name of a mode",
        examples=("aggcli modes prompt_mean", "aggcli modes --map verl:token-mean"),
    ),
    "env": Screen("Versions and devices, for bug reports", examples=("aggcli env",)),
}
"""Every command, in the order of `aggcli --help`."""

PANELS: dict[str, tuple[str, ...]] = {
    "Begin": ("demo",),
    "Rollouts that you have": ("inspect", "replay", "audit", "convert"),
    "Runs and comparisons": ("run", "train", "compare"),
    "Results": ("plot", "runs"),
    "Look up": ("modes", "env"),
}
"""The headings of `aggcli --help`, each with its commands."""
