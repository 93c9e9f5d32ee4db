"""What aggregation modes do to a policy's parameters: the gradient of each on the same rollouts; nothing is trained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from aggcli.analysis.answer import Answer
from aggcli.config import RunConfig
from aggcli.errors import SettingError, some
from aggcli.jobs.listening import say
from aggcli.measurement.words import plural, short
from aggcli.report.notebook import Shown

if TYPE_CHECKING:
    import pandas as pd

    from aggcli.grid import Setup
    from aggcli.training.gradients import ModeGradients
    from aggcli.training.loop import Trainer


@dataclass(frozen=True)
class StepGradients:
    """One optimizer step: its number and name, rollouts (N) and trained tokens, and for each group of parameters, the whole
    first, each mode's gradient norm and the cosines between modes (None where one of the two is 0); `by_log_probs` the same of
    the gradients by the response tokens' log-probabilities."""

    step: int
    name: str
    rollouts: int
    tokens: int
    by_parameters: dict[str, dict[str, Any]]
    by_log_probs: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        return dict(vars(self))


@dataclass(frozen=True)
class GradientsResult(Shown):
    """`modes`: the baseline first; `trained`: numbers that a gradient has; `policy`: what has them, in words."""

    modes: tuple[str, ...]
    policy: str
    trained: int
    steps: list[StepGradients]

    @property
    def answer(self) -> Answer:
        """How far each mode's gradient is from the baseline's in the first step, by the parameters and by log-probabilities."""
        from aggcli.training.gradients import WHOLE

        first = self.steps[0]
        real, cheap = first.by_parameters[WHOLE], first.by_log_probs
        said = [
            f"{mode}: gradient norm {_times(real, at)} {self.modes[0]}'s, cosine {_cosine(real, at)}, by the"
            f" {self.trained:,} trained parameters of {self.policy}; {_times(cheap, at)} and {_cosine(cheap, at)} by the"
            " log-probabilities of the tokens."
            for at, mode in enumerate(self.modes)
            if at
        ]
        where = f"In {first.name}, {plural(first.rollouts, 'rollout')} of {plural(first.tokens, 'trained token')}:"
        if real["norm"][0] == 0:
            return Answer((f"{where} {self.modes[0]}'s gradient is 0, so no other is compared with it.",))
        return Answer((f"{where} {said[0]}", *said[1:])) if said else Answer((f"{where} one mode, so nothing is compared.",))

    @property
    def gradients(self) -> pd.DataFrame:
        """A row for each step, group of parameters and mode: `norm`, `norm_ratio` (over the baseline's) and `cosine` (to the
        baseline's gradient), missing where they are undefined."""
        import pandas as pd

        from aggcli.report.parameter_gradients import rows_of

        rows = [
            {
                "step": step.step,
                "parameters": group,
                "mode": mode,
                "norm": found["norm"][at],
                "norm_ratio": found["norm"][at] / found["norm"][0] if found["norm"][0] else None,
                "cosine": found["cosine"][at][0],
            }
            for step in self.steps
            for group, found in rows_of(step).items()
            for at, mode in enumerate(self.modes)
        ]
        return pd.DataFrame(rows).astype({"norm_ratio": "float64", "cosine": "float64"})

    def as_json(self) -> dict[str, Any]:
        """What `--json` prints."""
        head = {"schema": 1, "answer": list(self.answer.sentences), "modes": list(self.modes), "policy": self.policy}
        return {**head, "trained_parameters": self.trained, "steps": [step.as_json() for step in self.steps]}

    def tables(self) -> list[Any]:
        """What the terminal shows."""
        from aggcli.report.parameter_gradients import gradient_tables
        from aggcli.report.tables import answer_text

        return [answer_text(self.answer), *(table for step in self.steps for table in gradient_tables(self.modes, step))]


def _times(found: dict[str, Any], mode: int) -> str:
    return f"{short(found['norm'][mode] / found['norm'][0])}x" if found["norm"][0] else "undefined times"


def _cosine(found: dict[str, Any], mode: int) -> str:
    value = found["cosine"][mode][0]
    return "undefined" if value is None else short(value)


def gradients(config: RunConfig) -> GradientsResult:
    """Every mode's gradient on recorded rollouts, each file one step, or on the first rollouts that the policy samples.

    Raises `SettingError` and `RolloutError`.
    """
    from aggcli import grid
    from aggcli.errors import RolloutError
    from aggcli.objective.weights import need_groups
    from aggcli.world import ALONE

    if config.layout.dp * config.layout.cp > 1:
        raise SettingError("--gradients works in one process; leave --dp and --cp out")
    setup = grid.set_up(config)
    rules = config.compared
    if setup.recorded is not None:
        try:
            for batch in setup.recorded.batches:
                for rule in [rule for rule in rules if rule.needs_groups][:1]:
                    need_groups(batch, rule)
        except RolloutError as error:
            if config.modes is not None:
                raise
            say(f"{some(rule.name for rule in rules if rule.needs_groups)} is left out: {error}")
            rules = tuple(rule for rule in rules if not rule.needs_groups)
    runs = grid.runs_of(setup.config, rules, [setup.config.seed], setup.response_limit)
    for run in runs:
        if run.rule.divisor is not None and run.rule.takes_divisor:
            say(f"{run.rule.name} divides by {run.rule.divisor:g} tokens")
    with setup.start.threads():
        trainer = grid.trainer_of(setup, runs[:1], ALONE)
        steps = list(_steps(setup, trainer, runs))
    policy = config.training.model or "the small policy"
    return GradientsResult(tuple(run.mode for run in runs), policy, sum(trainer.policy.sizes().values()), steps)


def _steps(setup: Setup, trainer: Trainer, runs: list[Any]) -> Iterator[StepGradients]:
    from aggcli.rollouts.batch import distinct
    from aggcli.training.gradients import mode_gradients

    count = 1 if setup.recorded is None else len(setup.recorded.batches)
    number = 0
    for at in range(count):
        for step, tokens_SL, old_T, reference_T in trainer.parts(at):
            found = mode_gradients(
                trainer.policy, runs, step, tokens_SL, trainer.layout, setup.config.objective, old_T, reference_T
            )
            tokens = int(step.loss_mask_T.sum())
            yield _told(number, step.name, distinct(step.rollout_S), tokens, found)
            number += 1


def _told(number: int, name: str, rollouts: int, tokens: int, found: ModeGradients) -> StepGradients:
    from aggcli.training.gradients import cosines_of, norms_of

    def of(product_MM: Any) -> dict[str, Any]:
        return {"norm": norms_of(product_MM), "cosine": cosines_of(product_MM)}

    groups = {group: of(product_MM) for group, product_MM in found.by_parameters.items()}
    return StepGradients(number, name, rollouts, tokens, groups, of(found.by_log_probs_MM))
