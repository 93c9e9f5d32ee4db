"""The fixtures through the command line: their closed-form value in every mode and layout."""

from __future__ import annotations

import pytest

from tests.cli import compared, exactly, per_layout, replay
from tests.fixtures import FX_B, LAYOUTS, MODES, fx_a, fx_b, fx_c


@pytest.mark.parametrize(
    ("samples", "expected"),
    [
        (fx_a(), {"sample_mean": 0.0, "prompt_mean": 5 / 24, "token_mean": 0.1875, "constant": 0.075}),
        (fx_b(), FX_B),
        (fx_c(), {"sample_mean": -0.125, "prompt_mean": -1 / 7, "token_mean": -1.5 / 13, "constant": -0.0375}),
    ],
    ids=["FX-A", "FX-B", "FX-C"],
)
def test_a_fixture_has_its_closed_form_value_in_every_mode_and_layout(tmp_path, capsys, samples, expected) -> None:
    told = compared(capsys, tmp_path, samples, "--layouts", LAYOUTS)
    for mode in MODES:
        assert per_layout(told, mode, "pg_loss") == [exactly(expected[mode])] * 11, mode


def test_the_total_weight_is_1_but_for_constant_which_has_its_tokens_over_n_times_its_divisor(tmp_path, capsys) -> None:
    told = compared(capsys, tmp_path, fx_b(), "--layouts", LAYOUTS)
    for mode, total in {"sample_mean": 1.0, "prompt_mean": 1.0, "token_mean": 1.0, "constant": 16 / 40}.items():
        assert per_layout(told, mode, "total_weight") == [exactly(total)] * 11, mode


def test_prompt_mean_over_rollouts_is_the_strict_mean_times_prompts_over_rollouts(tmp_path, capsys) -> None:
    told = replay(capsys, tmp_path, fx_b(), "--json")
    assert told.modes["prompt_mean"]["pg_loss"] == exactly(0.19375 * 2 / 4)
    assert told.modes["prompt_mean"]["total_weight"] == exactly(2 / 4)


def test_the_group_deviation_is_n_minus_1_over_rewards(tmp_path, capsys) -> None:
    """FX-B with advantages from rewards 1,0: ±0.5 / (0.70711 + 1e-6), so its values times 1.4142136 / (1 + 1.4e-6)."""
    samples = [{k: v for k, v in s.items() if k != "advantage"} for s in fx_b()]
    told = compared(capsys, tmp_path, samples)
    assert told.modes["token_mean"]["pg_loss"] == pytest.approx(0.243068, abs=1e-6)
    for mode, value in FX_B.items():
        assert told.modes[mode]["pg_loss"] == exactly(value / (0.5**0.5 + 1e-6))


def test_context_parallel_ranks_hold_the_response_tokens_of_their_zig_zag_chunks(tmp_path, capsys) -> None:
    """FX-F: 256 tokens, the last 16 the response: CP2 16 and 0, CP4 16,0,0,0. 16 tokens with 12 of response on CP2: 4 and 8."""
    long = {"response_length": 16, "total_length": 256, "advantage": -1, "group_index": 0}
    layouts = compared(capsys, tmp_path, [long], "--layouts", "dp1cp2,dp1cp4").modes["token_mean"]["layouts"]
    assert [layouts[name]["ranks"][0]["cp_tokens"] for name in ("dp1cp2", "dp1cp4")] == [[16, 0], [16, 0, 0, 0]]
    short = long | {"response_length": 12, "total_length": 16}
    layouts = compared(capsys, tmp_path, [short], "--layouts", "dp1cp2").modes["token_mean"]["layouts"]
    assert layouts["dp1cp2"]["ranks"][0]["cp_tokens"] == [4, 8]


def test_a_token_is_computed_where_the_token_before_it_stands(tmp_path, capsys) -> None:
    """4 tokens on CP2, one a chunk: rank 1 has places 1 and 2, and so the log-probabilities of the tokens at 2 and 3."""
    made = {"response_length": 2, "total_length": 4, "advantage": -1, "group_index": 0}
    layouts = compared(capsys, tmp_path, [made], "--layouts", "dp1cp2").modes["token_mean"]["layouts"]
    assert layouts["dp1cp2"]["ranks"][0]["cp_tokens"] == [0, 2]
