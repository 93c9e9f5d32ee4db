"""`aggcli demo`: everything from nothing in a minute."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from aggcli.cli.console import out, say
from aggcli.cli.options import JsonOption, OverwriteOption
from aggcli.errors import printable

STEPS = 20
"""Steps of the training: enough for curves, and short."""


def demo(
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Folder (default: results/demo).", show_default=False)
    ] = Path("results/demo"),
    overwrite: OverwriteOption = False,
    json: JsonOption = False,
) -> None:
    """Replay the rollouts that ship with aggcli under every mode, train a small policy under each, and draw a page of either.

    The training is short (20 steps, 3 seeds): it shows what a comparison looks like, and settles nothing.
    """
    import aggcli
    from aggcli.report.folding import folded

    replayed, trained = output / "replay", output / "train"
    say(f"replaying the example: aggcli replay example --output {replayed}")
    example = aggcli.replay("example", output=replayed, overwrite=overwrite)
    say(f"training: aggcli train --steps {STEPS} --output {trained}")
    aggcli.train(steps=STEPS, output=trained, overwrite=overwrite)
    pages = {}
    for directory in (replayed, trained):
        say(f"drawing: aggcli plot --html {directory}")
        pages[directory.name] = aggcli.plot(directory, html=True).report
    compared = aggcli.compare(trained)
    if json:
        from aggcli.records import to_json

        shown = {name: str(page) for name, page in pages.items()}
        print(to_json({"schema": 1, "pages": shown, "replay": example.as_json(), "train": compared.as_json()}))
        return
    for name, page in pages.items():
        print(printable(f"{name}: {page}"))
    for answer in (example.answer.text, compared.answer.text):
        print(f"\n{folded(answer, out().width)}")
