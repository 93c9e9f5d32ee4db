"""What a command imports: help and completion nothing heavy, readers of records no torch, one run nothing of a comparison."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.cli import completed, environment, results_of

HEAVY = ("torch", "pandas", "matplotlib", "scipy", "pyarrow", "numpy", "rich", "jinja2")
"""Not pydantic: typer itself imports it for the options of a command, where it is installed."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return results_of("compare", "--rollouts=example", "--output", tmp_path_factory.mktemp("results") / "compare")


def _imported(*arguments: object, **variables: str) -> set[str]:
    """The modules that `aggcli` with these arguments has imported at its end, of whatever package."""
    program = (
        "import sys; from aggcli.cli.main import main; code = main(sys.argv[1:])\n"
        "print('IMPORTED', *sys.modules); sys.exit(code)"
    )
    told = completed("-c", program, *arguments, env=environment(**variables))
    assert told.returncode == 0, told.stderr
    return set(told.stdout.rpartition("IMPORTED")[2].split())


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [("--help",), ("compare", "--help"), ("run", "--help")], ids=" ".join)
def test_help_imports_nothing_heavy(arguments: tuple[str, ...]) -> None:
    found = _imported(*arguments)
    assert "typer" in found
    assert not found & set(HEAVY)


@pytest.mark.slow
def test_completion_imports_nothing_heavy() -> None:
    told = completed(
        *("-X", "importtime", "-m", "aggcli"),
        env=environment(_AGGCLI_COMPLETE="complete_bash", COMP_WORDS="aggcli comp", COMP_CWORD="1"),
    )
    imported = {line.rpartition("|")[2].strip() for line in told.stderr.splitlines()}
    assert told.stdout.split() == ["compare"]
    assert not {name.partition(".")[0] for name in imported} & set(HEAVY)
    assert "aggcli.cli.commands" in imported
    assert not imported & {"aggcli.cli.compare", "aggcli.config", "aggcli.rules"}, "commands are imported when they are run"


@pytest.mark.slow
def test_figures_and_comparisons_of_results_that_are_there_never_import_torch(results: Path, tmp_path: Path) -> None:
    for arguments in (
        ("plot", results, "--html", "--output", tmp_path / "figures"),
        ("compare", results),
        ("compare", results, "--format=json"),
        ("runs", "show", results),
    ):
        found = _imported(*arguments)
        assert "aggcli" in found
        assert "torch" not in found, arguments
    assert "torch" in _imported("compare", "--rollouts=example", "--output", tmp_path / "again")
    assert "torch" in sys.modules, "this process has it, so the others would have had it too"


_SMALL = ("--task=control", "--steps=1", "--seeds=1", "--rollout-batch-size=2", "--n-samples-per-prompt=2")


@pytest.mark.slow
def test_a_comparison_whose_runs_train_in_processes_leaves_torch_to_them(tmp_path: Path) -> None:
    small = (*_SMALL, "--evaluation-prompts=2", "--modes=token_mean,constant", "--workers=2")
    found = _imported("compare", *small, "--output", tmp_path / "apart")
    assert "torch" not in found
    assert json.loads((tmp_path / "apart" / "manifest.json").read_text())["shares"] == 2
    assert {"pandas", "matplotlib"} <= found


@pytest.mark.slow
def test_what_is_refused_where_a_comparison_is_prepared_is_raised_by_train_as_what_it_is(tmp_path: Path) -> None:
    program = (
        "import sys, aggcli\n"
        "try: aggcli.train(task='runing-sum', seeds=2, workers=2, output=sys.argv[1])\n"
        "except Exception as error: print(type(error) is aggcli.errors.SettingError, 'torch' in sys.modules, error)"
    )
    told = completed("-c", program, tmp_path / "out")
    assert told.stdout == "True False unknown task 'runing-sum'; did you mean 'running-sum'?\n", told.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_single_run_imports_nothing_that_only_comparisons_and_figures_need(tmp_path: Path) -> None:
    found = _imported("run", "--steps=1", "--rollout-batch-size=2", "--evaluation-prompts=2", "--output", tmp_path / "run")
    assert "torch" in found
    assert not found & {"pandas", "matplotlib", "jinja2"}
    assert "scipy.stats" not in found, "which takes a second, half of what torch does"


@pytest.mark.slow
def test_what_the_answer_and_the_curves_of_a_comparison_need_is_what_is_imported_while_it_trains(results: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from aggcli.jobs import training_words\n"
        "from threading import Event; training_words.import_what_follows(Event()); before = set(sys.modules)\n"
        "from aggcli.analysis.histories import read_histories; from aggcli.analysis.study import study\n"
        "from aggcli.report.training_tables import training_table\n"
        "directory = Path(sys.argv[1]); found = study(read_histories([directory])[0])\n"
        "print(training_words.draw_curves(directory, found))\n"
        "print('torch' in before, *set(sys.modules) - before)"
    )
    figure, imported = completed("-c", program, results).stdout.splitlines()
    had_torch, *later = imported.split()
    assert figure.startswith("figure: ")
    assert had_torch == "False"
    packages = {name.rpartition(".")[0] for name in later}
    assert not packages & {"scipy", "scipy.special", "matplotlib", "aggcli.report"}, later
    assert not {"pandas", "aggcli.analysis.study"} & set(later)


@pytest.mark.parametrize(
    ("begun", "offered"), [("run --recipe da", "dapo"), ("run --optimizer s", "sgd"), ("run --dtype b", "bfloat16")]
)
def test_the_shell_completes_the_values_of_a_setting_and_nothing_is_said(begun: str, offered: str) -> None:
    words = f"aggcli {begun}"
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    program = "import sys; sys.argv[0] = 'aggcli'; from aggcli.cli.main import main; sys.exit(main())"
    told = completed("-c", program, env=environment(_AGGCLI_COMPLETE="complete_bash", **asked))
    assert told.stdout.split() == [offered], told.stderr
    assert told.stderr == ""
