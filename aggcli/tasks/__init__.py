"""Checkable tasks, by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from aggcli.errors import SettingError, nearest, some
from aggcli.tasks.control import Control
from aggcli.tasks.protocol import Prompts, SmallTask, Task, Verdict
from aggcli.tasks.running_sum import RunningSum
from aggcli.tasks.text import is_in_words

__all__ = ["TASKS", "Prompts", "SmallTask", "Task", "Verdict", "make_task"]

TASKS: dict[str, Callable[..., SmallTask]] = {"running-sum": RunningSum, "control": Control}
"""Every task in the box; call one with its settings."""


def make_task(name: str, **settings: object) -> SmallTask:
    """The task called `name`; raises `SettingError` for a name or a setting that does not exist."""
    if is_in_words(name):
        raise SettingError(f"--task {name}: is in words; give a language model with --model, or one of {some(TASKS)}")
    if name not in TASKS:
        raise SettingError(f"unknown task '{name}'{nearest(name, TASKS)}")
    known = inspect.signature(TASKS[name]).parameters
    for setting in settings:
        if setting not in known:
            what = nearest(setting, known) if known else "; it has none"
            raise SettingError(f"task {name} has no setting '{setting}'{what}")
    return TASKS[name](**settings)
