"""Selection for scripts/conformance.py: one group of tests, one shard of it."""

from __future__ import annotations

import os
import re
from typing import Any

from .harness import GROUPS


def group_of(item: Any) -> str:
    """test_forward_ad_add_mybackend_float32 -> forward_ad."""
    matching = [group for group in GROUPS if re.match(rf"test_{group}(_|$)", item.name)]
    return max(matching, key=len, default="")


def pytest_collection_modifyitems(config: Any, items: list[Any]) -> None:
    wanted = os.environ.get("MYBACKEND_CONFORMANCE_GROUP")
    if wanted is None:
        return
    number, count = map(int, os.environ.get("MYBACKEND_CONFORMANCE_SHARD", "0/1").split("/"))
    chosen = [item for item in items if group_of(item) == wanted][number::count]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
    items[:] = chosen
