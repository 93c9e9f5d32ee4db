"""cases/README.md, section 0: the shared fixtures through the command line, and how the other case tests call it.

Case values of prompt_mean are the strict mean over prompts, so every replay here asks for `--prompt-mean-scale prompts`, and
for a divisor of 10.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from aggcli.cli.main import main
from tests.fixtures import MODES, Sample, fx_a, fx_b, fx_c

LAYOUTS = "dp1,dp2:interleaved,dp2:contiguous,dp2:balanced,dp3,dp4:balanced,dp8,dp1cp2,dp2cp2:interleaved,dp1cp4"
ORDERS = ((0, 1, 2, 3), (3, 2, 1, 0), (0, 2, 1, 3), (1, 3, 0, 2))
FX_B = {"sample_mean": -0.025, "prompt_mean": 0.19375, "token_mean": 0.171875, "constant": 0.06875}


def strict(text: str) -> Any:
    """JSON as a strict reader takes it: NaN and Infinity are refused."""

    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON")

    return json.loads(text, parse_constant=refuse)


def records(path: Path) -> list[dict[str, Any]]:
    return [strict(line) for line in path.read_text().splitlines()]


@dataclass(frozen=True)
class Told:
    """What a command said: exit code, stdout, stderr, and its results directory."""

    code: int
    out: str
    err: str
    output: Path

    @property
    def steps(self) -> list[dict[str, Any]]:
        return strict(self.out)["steps"]

    @property
    def step(self) -> dict[str, Any]:
        (step,) = self.steps
        return step

    @property
    def modes(self) -> dict[str, dict[str, Any]]:
        return self.step["modes"]

    @property
    def refusal(self) -> str:
        """The one line of a refusal: exit code 2, no output, no traceback, nothing but notes before it."""
        *notes, line = self.err.splitlines()
        assert (self.code, self.out) == (2, ""), self.err
        assert all(note.startswith("note: ") for note in notes), self.err
        assert line.startswith("aggcli: ")
        assert "Traceback" not in self.err
        return line


class Cli:
    """`aggcli` in this process, writing into the test's own folder."""

    def __init__(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self._capsys, self._made = tmp_path, capsys, 0

    def file(self, samples: Iterable[Sample], name: str | None = None) -> Path:
        self._made += 1
        path = self.folder / (name or f"rollouts-{self._made}.jsonl")
        path.write_text("".join(json.dumps(s) + "\n" for s in samples))
        return path

    def __call__(self, *arguments: object, output: Path | None = None) -> Told:
        self._capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = self._capsys.readouterr()
        return Told(code, captured.out, captured.err, output or self.folder)

    def replay(self, rollouts: Path | str | Sequence[Sample], *flags: object, command: str = "compare") -> Told:
        """`compare` (or `run`) without judging its exit code; prints tables unless `flags` hold `--json`."""
        if not isinstance(rollouts, (Path, str)):
            rollouts = self.file(rollouts)
        self._made += 1
        output = self.folder / f"results-{self._made}"
        return self(command, "--rollouts", rollouts, "--output", output, *flags, output=output)

    def compare(self, rollouts: Path | str | Sequence[Sample], *flags: object) -> Told:
        """A `compare --json` of the case values, which must succeed."""
        scale = ("--prompt-mean-scale", "prompts", "--loss-aggregation-divisor", 10)
        told = self.replay(rollouts, "--json", *scale, *flags)
        assert told.code == 0, told.err
        return told


def per_layout(told: Told, mode: str, name: str) -> list[Any]:
    """A number under the layout in force and under each layout."""
    values = told.modes[mode]
    return [values[name], *(layout[name] for layout in values["layouts"].values())]


def exactly(value: float | None) -> Any:
    return pytest.approx(value, rel=1e-12, abs=1e-15)


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
    told = Cli(tmp_path, capsys).compare(samples, "--layouts", LAYOUTS)
    for mode in MODES:
        assert per_layout(told, mode, "pg_loss") == [exactly(expected[mode])] * 11, mode


def test_prompt_mean_over_rollouts_is_the_strict_mean_times_prompts_over_rollouts(tmp_path, capsys) -> None:
    told = Cli(tmp_path, capsys).replay(fx_b(), "--json")
    assert told.modes["prompt_mean"]["pg_loss"] == exactly(0.19375 * 2 / 4)
    assert told.modes["prompt_mean"]["total_weight"] == exactly(2 / 4)


def test_the_group_deviation_is_n_minus_1_over_rewards(tmp_path, capsys) -> None:
    """FX-B with advantages from rewards 1,0: ±0.5 / (0.70711 + 1e-6), so its values times 1.4142136 / (1 + 1.4e-6)."""
    samples = [{k: v for k, v in s.items() if k != "advantage"} for s in fx_b()]
    told = Cli(tmp_path, capsys).compare(samples)
    assert told.modes["token_mean"]["pg_loss"] == pytest.approx(0.243068, abs=1e-6)
    for mode, value in FX_B.items():
        assert told.modes[mode]["pg_loss"] == exactly(value / (0.5**0.5 + 1e-6))


def test_context_parallel_ranks_hold_the_response_tokens_of_their_zig_zag_chunks(tmp_path, capsys) -> None:
    """FX-F: 256 tokens, the last 16 the response: CP2 16 and 0, CP4 16,0,0,0. 16 tokens with 12 of response on CP2: 4 and 8."""
    cli = Cli(tmp_path, capsys)
    long = {"response_length": 16, "total_length": 256, "advantage": -1, "group_index": 0}
    layouts = cli.compare([long], "--layouts", "dp1cp2,dp1cp4").modes["token_mean"]["layouts"]
    assert [layouts[name]["ranks"][0]["cp_tokens"] for name in ("dp1cp2", "dp1cp4")] == [[16, 0], [16, 0, 0, 0]]
    short = long | {"response_length": 12, "total_length": 16}
    layouts = cli.compare([short], "--layouts", "dp1cp2").modes["token_mean"]["layouts"]
    assert layouts["dp1cp2"]["ranks"][0]["cp_tokens"] == [4, 8]
