"""Responses that were cut at the response limit: counted, and masked where that is asked for."""

from __future__ import annotations

from typing import Any

from tests.cli import compared, per_layout, replay
from tests.fixtures import sample


def of_four(*statuses: str | None) -> list[dict[str, Any]]:
    """Lengths 8, 6, 4, 5; rewards 1, 0, 1, 0 in one group."""
    return [
        sample(length, group_index=0, reward=1 - at % 2, status=status)
        for at, (length, status) in enumerate(zip((8, 6, 4, 5), statuses, strict=True))
    ]


CUT = ("truncated", "truncated", "truncated", "completed")


def test_the_share_of_truncated_responses_is_three_of_four_under_every_layout_and_response_limit(tmp_path, capsys) -> None:
    for limit in ((), ("--max-response-length", 16)):
        told = compared(capsys, tmp_path, of_four(*CUT), "--layouts", "dp1,dp2:contiguous,dp4cp2", *limit)
        for mode in told.modes:
            assert per_layout(told, mode, "truncated") == [0.75] * 4
    layouts = told.modes["token_mean"]["layouts"]
    assert [rank["truncated"] for rank in layouts["dp2:contiguous"]["ranks"]] == [1.0, 0.5]
    for command in ("run", "compare"):
        printed = replay(capsys, tmp_path, of_four(*CUT), command=command).out.splitlines()
        assert ["truncated", "responses", "75", "%"] in [line.split() for line in printed]


def test_where_a_source_does_not_say_how_a_response_ended_it_is_in_no_share(tmp_path, capsys) -> None:
    told = compared(capsys, tmp_path, of_four("truncated", "aborted", None, None))
    assert told.modes["token_mean"]["truncated"] == 0.5
    assert "truncated" not in compared(capsys, tmp_path, of_four(None, None, None, None)).modes["token_mean"]
