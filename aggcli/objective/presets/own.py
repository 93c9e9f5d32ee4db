"""This project's four modes, written in the same facts as everybody else's."""

from __future__ import annotations

from aggcli.config import MODES
from aggcli.errors import SettingError, nearest
from aggcli.objective.presets.facts import Denominator, Preset


def own_preset(mode: str, prompt_mean_scale: str = "rollouts") -> Preset:
    """The mode as facts: all counts over the optimizer step, fully masked rollouts counted. Raises `SettingError`."""
    outer = "prompts" if prompt_mean_scale == "prompts" else "rollouts"
    counts = {
        "sample_mean": (Denominator("rollouts"), Denominator("tokens of the rollout")),
        "prompt_mean": (Denominator(outer), Denominator("tokens of the prompt")),
        "token_mean": (Denominator("tokens"),),
        "constant": (Denominator("rollouts"), Denominator("divisor")),
    }
    formulas = {
        "sample_mean": "1/N sum_r [ 1/n_r sum_(t in r) l_t ]",
        "prompt_mean": f"1/{outer[0].upper() if outer == 'prompts' else 'N'} sum_p [ 1/T_p sum_(t in p) l_t ]",
        "token_mean": "1/T sum_t l_t",
        "constant": "1/N sum_r [ 1/L sum_(t in r) l_t ]",
    }
    if mode not in counts:
        raise SettingError(f"unknown loss aggregation '{mode}'{nearest(mode, MODES)}")
    return Preset(
        name=mode,
        option=f"--loss-aggregation {mode}",
        version="this project",
        evidence="own",
        formula=formulas[mode],
        divides_by=counts[mode],
        divisor_is="--loss-aggregation-divisor L" if mode == "constant" else "",
        mode=mode,
    )
