"""The package's own interface: a notebook that uses nothing but `import aggcli`."""

from __future__ import annotations

import logging
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import aggcli
from aggcli.errors import RolloutError, SettingError
from tests.cli import aggcli as command
from tests.cli import strict_json, write_jsonl
from tests.fixtures import batch_of, fx_b

README = Path(__file__).parent.parent / "README.md"


def python_of_the_readme(said: str) -> str:
    """The block of Python in the README that says this, as it stands there."""
    (block,) = [text for text in README.read_text().split("```python\n")[1:] if said in text.split("```")[0]]
    return block.split("```")[0]


def test_the_script_of_the_readme_replays_audits_trains_compares_and_plots(tmp_path: Path) -> None:
    script = python_of_the_readme("import aggcli")
    assert len(script.splitlines()) < 25
    assert [line for line in script.splitlines() if "import" in line] == ["import aggcli"]
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "token_mean  invariant" in " ".join(done.stdout.split()).replace("token_mean invariant", "token_mean  invariant")
    assert "trl:bnpo varies" in " ".join(done.stdout.split())
    assert (tmp_path / "results" / "notebook" / "figures" / "report.html").stat().st_size > 10_000


def test_the_writer_of_the_readme_has_six_lines_and_what_it_writes_is_read_to_the_numbers_worked_out_by_hand(tmp_path) -> None:
    """FX-B without a deviation in the advantages: -0.025 and 2.75/16; a fully masked sample beside it, NaN under its mask,
    counts in N and gives nothing: 4/5 of -0.025."""
    script = python_of_the_readme("def write_rollouts")
    lines = [line for line in script.splitlines() if line and not line.startswith("import")]
    assert len(lines) == 6
    made: dict[str, Any] = {}
    exec(script, made)
    samples = [{"prompt": row["group_index"], "loss_mask": torch.ones(row["response_length"]), **row} for row in fx_b()]
    for sample in samples:
        sample["log_probs"] = torch.tensor(sample["log_probs"], dtype=torch.float64)
    made["write_rollouts"](tmp_path / "0.jsonl", samples)
    masked = {"prompt": 1, "reward": 0.5, "loss_mask": [0, 0], "log_probs": [math.nan] * 2, "old_log_probs": [0.0, 0.0]}
    made["write_rollouts"](tmp_path / "1.jsonl", [*samples, masked])
    found = aggcli.replay(tmp_path, ["sample_mean", "token_mean"], ["dp1"], advantages="mean_only")
    losses = found.metrics.pivot(index="step", columns="mode", values="pg_loss")
    assert losses.loc[0].to_dict() == pytest.approx({"sample_mean": -0.025, "token_mean": 0.171875}, rel=1e-12)
    assert losses.loc[1, "sample_mean"] == pytest.approx(-0.025 * 4 / 5, rel=1e-12)


def test_the_readme_opens_with_two_commands_of_which_the_second_runs_the_tests() -> None:
    commands = [line for line in README.read_text().splitlines() if line.startswith("    $ ")]
    assert len(commands) >= 2
    assert "/aggcli compare --rollouts example" in commands[0]
    assert "-m pytest" in commands[1]


def test_what_the_readme_shows_of_the_example_is_what_the_command_prints(tmp_path: Path, capsys, monkeypatch) -> None:
    """All from below the first command down to the second, but the sentences between: the beginning of what is printed."""
    monkeypatch.setenv("COLUMNS", "80")
    _, first, _ = README.read_text().split("    $ ", 2)
    shown = [line[4:] for line in first.splitlines()[1:] if line.startswith("    ") or not line]
    text = "\n".join(shown).strip()
    told = command(capsys, "compare", "--rollouts", "example", "--output", tmp_path / "o")
    printed = "\n".join(line.rstrip() for line in told.out.splitlines())
    assert len(text.splitlines()) > 20
    assert printed.startswith(text)


def test_importing_the_package_imports_neither_torch_nor_pandas() -> None:
    script = "import sys, aggcli; dir(aggcli); sys.exit(bool({'torch', 'pandas', 'matplotlib', 'rich'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
    with pytest.raises(AttributeError, match="has no attribute 'repaly'"):
        aggcli.repaly  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]


def test_a_replay_gives_the_numbers_of_the_command_line_and_those_worked_out_by_hand(tmp_path: Path, capsys) -> None:
    """FX-B: -0.025 and 2.75/16; trl:bnpo under two ranks (0,2) and (1,3) is -0.025."""
    path = write_jsonl(tmp_path / "dump.jsonl", fx_b())
    found = aggcli.replay(path, ["sample_mean", "token_mean", "trl:bnpo"], ["dp1", "dp2:interleaved"])
    table = found.metrics.set_index("mode")["pg_loss"]
    assert table.to_dict() == pytest.approx({"sample_mean": -0.025, "token_mean": 0.171875, "trl:bnpo": 0.171875}, rel=1e-12)
    assert found.failure == ""
    assert found.directory is None
    assert not (tmp_path / "results").exists()
    asked = ("--modes", "sample_mean,token_mean,trl:bnpo", "--layouts", "dp1,dp2:interleaved")
    told = strict_json(command(capsys, "compare", path, *asked, "--output", tmp_path / "o", "--json").out)
    assert told["steps"] == found.as_json()["steps"]
    assert "trl:bnpo varies with the layout" in " ".join(found.between_layouts)
    assert "trl:bnpo" in found._repr_html_()


def test_batches_of_ones_own_are_replayed_and_audited_as_files_are(tmp_path: Path) -> None:
    batch = batch_of(fx_b())
    (one,) = aggcli.replay(batch, ["prompt_mean"], prompt_mean_scale="prompts").metrics["pg_loss"]
    assert one == pytest.approx(0.19375, rel=1e-12)
    read = list(aggcli.read_rollouts(write_jsonl(tmp_path / "dump.jsonl", fx_b())))
    assert len(aggcli.replay([*read, batch], ["token_mean"]).metrics) == 2
    rules = aggcli.audit([batch], ["token_mean", "trl:bnpo"], ["dp1", "dp2:interleaved"], search=False).rules.set_index("rule")
    assert rules["verdict"].to_dict() == {"token_mean": "invariant", "trl:bnpo": "varies"}
    assert rules.loc["token_mean", "pg_loss"] == pytest.approx(0.171875, rel=1e-12)


def test_an_audit_beyond_the_limit_fails_in_words_and_without_one_does_not() -> None:
    assert aggcli.audit(rules=["trl:bnpo"], search=False).failure == ""
    failed = aggcli.audit(rules=["trl:bnpo", "token_mean"], search=False, limit=1e-6)
    assert failed.failure == "trl:bnpo vary with the layout by more than 1e-06"
    assert "varies" in failed._repr_html_()


def test_what_a_job_has_to_say_goes_to_the_logger(tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd) -> None:
    with caplog.at_level(logging.INFO, logger="aggcli"):
        aggcli.replay(write_jsonl(tmp_path / "dump.jsonl", fx_b()))
    assert any("constant divides by 8" in record.message for record in caplog.records)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: aggcli.replay("no/such.jsonl"), RolloutError, "no/such.jsonl: no such file or folder"),
        (lambda: aggcli.replay("example", ["token_maen"]), SettingError, "did you mean 'token_mean'"),
        (lambda: aggcli.replay("example", eps_clp=0.1), SettingError, "unknown setting 'eps_clp'; did you mean 'eps_clip'"),
        (lambda: aggcli.replay("example", dp=2), SettingError, "real ranks are started by the command line"),
        (lambda: aggcli.replay([]), SettingError, "rollouts: must be paths, or batches"),
        (lambda: aggcli.replay([1, 2]), SettingError, "rollouts: must be paths, or batches"),  # pyright: ignore
        (lambda: aggcli.compare("no/such", wndow=1), SettingError, "unexpected keyword argument 'wndow'"),
    ],
)
def test_what_cannot_be_used_is_refused_in_words(call, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text.replace("(", r"\(")):
        call()
