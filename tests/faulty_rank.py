"""One rank of a training run, of which rank 1 measures its slice wrongly: `python -m tests.faulty_rank FAULT ARGUMENTS...`.

`slice`: the samples of rank 0; `entropy`: other entropies than the others add up; `token`: its last token is lost;
`none`: nothing is wrong.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Sequence
from typing import Any

from aggcli.cli.main import main
from aggcli.layout.schedule import Schedule
from aggcli.layout.views import LocalView, WholeStep
from aggcli.training import loop, report


def plant(fault: str) -> None:
    right_cut, right_gradient = report.cut_out, loop.step_gradient

    def cut_out(whole: WholeStep, schedules: Sequence[Schedule], cp: int, rank: int) -> LocalView:
        view = right_cut(whole, schedules, cp, 0 if fault == "slice" else rank)
        if fault == "token":
            mask_T = view.tokens["loss_mask"].clone()
            mask_T[-1] = False
            view = dataclasses.replace(view, tokens=view.tokens | {"loss_mask": mask_T})
        return view

    def step_gradient(*given: Any) -> Any:
        found = right_gradient(*given)
        return dataclasses.replace(found, own_entropy_T=found.own_entropy_T + (0.01 if fault == "entropy" else 0.0))

    report.cut_out, loop.step_gradient = cut_out, step_gradient


if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        plant(sys.argv[1])
    raise SystemExit(main(sys.argv[2:]))
