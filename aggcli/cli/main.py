"""The `aggcli` program: commands, exit codes, and errors as one line without a traceback."""

from __future__ import annotations

import atexit
import contextlib
import gc
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import typer

from aggcli.cli.commands import Commands
from aggcli.cli.completion import whole_words
from aggcli.cli.console import say_error, set_invocation
from aggcli.cli.live import Terminal
from aggcli.errors import DEBUG, ExitCode, print_traceback, told
from aggcli.interrupts import none_dropped
from aggcli.jobs.listening import heard_by
from aggcli.lifeline import started_here
from aggcli.version import __version__

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="How is the per-token policy loss averaged, and did my parallel layout change it?",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"aggcli {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="With an error, show where it happened.")] = False,
) -> None:
    """How is the per-token policy loss averaged, and did my parallel layout change it?"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the program; returns the exit code. Whatever happens is told in one line; `--debug` shows where it happened."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a terminal that lacks a character shows its number
    if arguments is None:
        atexit.register(gc.freeze)  # the end of a process would else look through all that torch has imported, for a second
    given = list(sys.argv[1:] if arguments is None else arguments)
    set_invocation(given)
    with _debugging("--debug" in given), _ended_by_sigterm(), heard_by(Terminal()), whole_words():
        try:
            with none_dropped(_interrupt_again):
                code = app([one for one in given if one != "--debug"], prog_name="aggcli", standalone_mode=False)
        except (KeyboardInterrupt, typer.Abort):
            return _interrupted()
        except typer.TyperException as error:
            say_error(error.format_message())
            return int(ExitCode.USER_INPUT)
        except (Exception, SystemExit) as error:
            if isinstance(error, SystemExit) and _is_completion(given):
                return int(error.code or ExitCode.DONE)
            if isinstance(error, BrokenPipeError) or isinstance(error.__context__, BrokenPipeError):
                return _unread()
            print_traceback(error)
            if isinstance(error, SystemExit):  # a reducer of the user's, or a library
                say_error(f"code that was called has ended the program (exit {error.code})")
                return int(ExitCode.USER_INPUT)
            number, text = told(error)
            if text:
                say_error(text)
            return number
    return _interrupted() if code == ExitCode.INTERRUPTED else int(code or ExitCode.DONE)


def _is_completion(given: Sequence[str]) -> bool:
    """Whether a shell asks, or is to be taught to: typer then ends the program itself."""
    return "_AGGCLI_COMPLETE" in os.environ or bool({"--show-completion", "--install-completion"}.intersection(given))


@contextlib.contextmanager
def _debugging(wanted: bool) -> Iterator[None]:
    """With --debug, for this process and those that it starts."""
    if not wanted:
        yield
        return
    before = os.environ.get(DEBUG)
    os.environ[DEBUG] = "1"
    try:
        yield
    finally:
        os.environ.pop(DEBUG) if before is None else os.environ.update({DEBUG: before})


@contextlib.contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM as Ctrl-C, so that what is half-written is removed; ranks are their launcher's, which tells by their exit code
    which of them it ended."""
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    if not ours or started_here():
        yield
        return

    def interrupt(number: int, frame: Any) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _interrupt_again() -> None:
    """As whoever is in charge of interrupts now has it; where Ctrl-C is ignored it was SIGTERM."""
    is_ignored = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    signal.raise_signal(signal.SIGTERM if is_ignored else signal.SIGINT)


def _unread() -> int:
    """Whoever read the data has seen enough (typer makes an exit of it, with the error behind it)."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return int(ExitCode.DONE)


def _interrupted() -> int:
    say_error("interrupted; what was recorded is kept")
    return int(ExitCode.INTERRUPTED)
