"""The `aggcli` program: commands, exit codes, and errors as one line without a traceback."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

import aggcli
from aggcli.cli.audit import audit
from aggcli.cli.compare import compare
from aggcli.cli.console import say_error, set_invocation
from aggcli.cli.convert import convert
from aggcli.cli.env import env
from aggcli.cli.inspect import inspect
from aggcli.cli.modes import modes
from aggcli.cli.options import GroupedCommand
from aggcli.cli.plot import plot
from aggcli.cli.run import run
from aggcli.cli.runs import runs
from aggcli.errors import AggcliError, ExitCode

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="How is the per-token policy loss averaged, and did my parallel layout change it?",
    context_settings={"help_option_names": ["-h", "--help"]},
)
for command in (run, compare, plot, audit, inspect, convert, modes, env):
    app.command(cls=GroupedCommand)(command)
app.add_typer(runs, name="runs")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"aggcli {aggcli.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """How is the per-token policy loss averaged, and did my parallel layout change it?"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that lacks a character shows its number
    given = list(sys.argv[1:] if arguments is None else arguments)
    set_invocation(given)
    try:
        code = app(given, standalone_mode=False)
    except AggcliError as error:
        if str(error):
            say_error(str(error))
        return int(error.exit_code)
    except typer.TyperException as error:
        say_error(error.format_message())
        return int(ExitCode.USER_INPUT)
    except (KeyboardInterrupt, typer.Abort):
        return _interrupted()
    except (BrokenPipeError, SystemExit):  # whoever read the data has seen enough; typer makes an exit of it
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(ExitCode.DONE)
    except OSError as error:
        say_error(f"{error.filename or 'output'}: {error.strerror or error}")
        return int(ExitCode.USER_INPUT)
    except MemoryError:
        say_error("not enough memory for this many rollouts or ranks; split the files or ask for less")
        return int(ExitCode.USER_INPUT)
    return _interrupted() if code == ExitCode.INTERRUPTED else int(code or ExitCode.DONE)


def _interrupted() -> int:
    say_error("interrupted; what was recorded is kept")
    return int(ExitCode.INTERRUPTED)
