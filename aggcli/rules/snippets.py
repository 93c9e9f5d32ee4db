"""How to get a mode inside a framework: its own option where it has one, and the few lines that scale its advantages."""

from __future__ import annotations

import importlib.resources
from dataclasses import dataclass

from aggcli.errors import SettingError, nearest
from aggcli.rules.registry import RULES
from aggcli.rules.rule import Rule

_WRITTEN_FOR = '"prompt_mean"'
"""What the snippets ask for, which is replaced by the mode wanted."""


@dataclass(frozen=True)
class Snippet:
    """Where the factors of `aggcli.advantage_factors` go in a framework.

    `file`: in the package's data, blank where an option alone does it; `under`: the rule that the framework must run with;
    `where`: function and tensor; `needs`: what must be set, so that the samples it sees are one optimizer step; `limits`: what
    it does not do; `version`: where the places were read; `reducer`: a second file, by the mode it is for.
    """

    framework: str
    file: str
    under: str
    where: str
    needs: tuple[str, ...]
    limits: tuple[str, ...]
    version: str
    reducer: tuple[str, str] = ("", "")

    def code(self, mode: Rule) -> str:
        """The lines for this mode; blank where there are none."""
        wanted = f'"{mode.name}"' + (", divisor=L" if mode.needs_divisor else "")
        return _text(self.file).replace(_WRITTEN_FOR, wanted)

    def notes(self, mode: Rule) -> list[str]:
        """What to know of the mode and of these lines."""
        scale = "divided by N, so P/N times the strict mean over prompts, which prompt_mean_scale='prompts' gives"
        return [*([scale] if "prompt_mean_scale" in mode.settings and self.file else []), *self.limits]

    def reducer_code(self, mode: Rule) -> str:
        """The framework's own reducer hook for this mode; blank where it cannot express it or has none."""
        return _text(self.reducer[1]) if self.reducer[0] == mode.name else ""


_TERMS = "KL and entropy terms of the loss keep the framework's own aggregation"
SNIPPETS = {
    one.framework: one
    for one in (
        Snippet(
            "trl",
            "trl.txt",
            "trl:dr_grpo",
            "the advantages of a generation batch, when it has been shuffled and cut into micro-batches",
            ("any loss_type but bnpo", "steps_per_generation = gradient_accumulation_steps, as is the default"),
            (_TERMS, "the loss of an evaluation is not changed"),
            "1.16.0",
        ),
        Snippet(
            "verl",
            "verl.txt",
            "verl:seq-mean-token-sum",
            "an advantage estimator of your own, in a module that the process of RayPPOTrainer imports",
            (
                "algorithm.adv_estimator=grpo_aggregated",
                "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-sum",
                "actor_rollout_ref.actor.ppo_mini_batch_size equal to data.train_batch_size: one optimizer step an epoch of a"
                " batch",
            ),
            (_TERMS, "rollout correction that changes the response mask afterwards is not counted"),
            "0.9.1",
        ),
        Snippet(
            "openrlhf",
            "openrlhf.txt",
            "openrlhf:token",
            "experience.advantages, at the end of RemoteExperienceMaker.compute_advantages_and_returns, before the"
            " replay buffer",
            (
                "the token-level loss, which is the default",
                "--train.batch_size equal to --rollout.batch_size * --rollout.n_samples_per_prompt: one optimizer step a"
                " rollout batch",
            ),
            (_TERMS, "older versions write self.strategy.args.n_samples_per_prompt for self.args.rollout.n_samples_per_prompt"),
            "0.11.2; its aggregate_loss was run, its trainer was not",
        ),
        Snippet(
            "slime",
            "slime.txt",
            "slime:sample_mean",
            "--custom-reward-post-process-path module:aggregated, whose second list becomes the advantages of grpo",
            (
                "--advantage-estimator grpo, without --normalize-advantages and --calculate-per-token-loss",
                "--global-batch-size equal to --rollout-batch-size * --n-samples-per-prompt: one optimizer step a rollout",
                "one training sample a rollout",
            ),
            (
                _TERMS,
                "slime's custom reducer is called on each micro-batch with lengths and masks alone, without prompt groups,"
                " totals of the step or arguments: of the four modes only constant can be written in it. sample_mean is slime"
                " without it, token_mean is --calculate-per-token-loss, and prompt_mean has no reducer",
            ),
            "624b824a (2026-08-21), read and not run",
            ("constant", "slime-reducer.txt"),
        ),
        Snippet(
            "skyrl",
            "",
            "",
            "SkyRL scales the advantages itself, before the data are split; there is nothing to patch",
            (),
            ("its prompt_mean is the strict mean over prompts (--prompt-mean-scale prompts)", _TERMS),
            "a9564572 (2026-08-21), read and not run",
        ),
        Snippet(
            "nemo-rl",
            "nemo-rl.txt",
            "nemo-rl:token",
            "what GRPOAdvantageEstimator.compute_advantage returns, which becomes train_data['advantages']",
            (
                "loss_fn.token_level_loss=True, which is the default",
                "policy.train_global_batch_size equal to num_prompts_per_step * num_generations_per_prompt: one optimizer step",
                "different prompts, as rows of token ids",
            ),
            (_TERMS, "masks that change after the advantages (sequence log-probability errors) are not counted"),
            "main in 2026, read and not run",
        ),
        Snippet(
            "tinker",
            "tinker.txt",
            "tinker",
            "in the cookbook: datum.loss_fn_inputs['advantages'], between assemble_training_data and forward_backward",
            ("the data of one optim_step: num_substeps=1",),
            (
                "tinker's losses sum over tokens, so the factor is the weight of a token itself",
                "a KL penalty that the cookbook adds to the advantages afterwards is not scaled",
            ),
            "cookbook 0.6.1, tinker 0.38.0; its tensors were run, the service cannot be",
        ),
    )
}
"""By framework."""


def snippet_for(framework: str) -> Snippet:
    """Raises `SettingError` for a framework without one, with the nearest name."""
    if framework not in SNIPPETS:
        raise SettingError(f"--in {framework}: no snippet for it{nearest(framework, SNIPPETS)}")
    return SNIPPETS[framework]


def native(framework: str, mode: Rule) -> list[Rule]:
    """The framework's own rules that are the mode or come closest to it."""
    return [rule for rule in RULES.values() if rule.framework == framework and rule.mode == mode.name]


def _text(file: str) -> str:
    return (importlib.resources.files("aggcli") / "data" / "snippets" / file).read_text() if file else ""
