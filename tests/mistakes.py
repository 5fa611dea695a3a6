"""What a refusal must name: the key or file, the value, and what is allowed or nearest. The rest of
its wording is free. tests/test_mistakes.py has the table of command lines."""

from collections.abc import Callable
from typing import Any

import pytest

from lingua.base.errors import UserError


def refused(work: Callable[[], Any], *names: object) -> str:
    """The message of the UserError that `work` raises, which contains each of `names`. Programs
    print it without a traceback and leave with code 2 (tests/parallel/test_launch.py)."""
    with pytest.raises(UserError) as caught:
        work()
    message = str(caught.value)
    missing = [name for name in names if str(name) not in message]
    assert not missing, f"not named: {missing} in: {message}"
    return message
