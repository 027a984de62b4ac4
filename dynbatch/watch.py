"""Whether attributes are still the objects that they were; without a compiler, nothing is known of that.

`watch.pyx` is the compiled module of this name. It knows a short cut for what a guard's condition says in Python text;
here there is none, and conditions are evaluated at each call.
"""

from __future__ import annotations

from typing import Any


class Watch:
    """Watches ``owner.name is value`` for some facts ``(owner, name, value)``."""

    def __init__(self, facts: tuple[tuple[Any, str, Any], ...]) -> None:
        pass

    def unchanged(self) -> bool:
        """True only if all facts hold; False where that is not known."""
        return False
