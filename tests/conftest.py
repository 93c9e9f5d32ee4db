"""One torch thread for the whole suite: the tests are many small products, and two threads on busy cores only wait.

Tests marked `slow` run last, so that a fault shows soon; `pytest -m "not slow"` leaves them out.
"""

import pytest
import torch

torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("slow") is not None)
