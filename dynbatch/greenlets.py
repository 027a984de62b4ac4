"""The greenlets that instances of maps run in: each runs one instance after another, of this map or a later one.

Starting a greenlet and ending it take as long as forty switches. The only module that needs the package greenlet.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from greenlet import getcurrent, greenlet

if TYPE_CHECKING:
    from dynbatch.fibers import Fiber

__all__ = ["Workers", "getcurrent", "workers"]

_MOST_IDLE = 1024  # each holds a frame and a few KiB of stack


class Workers(threading.local):
    """The greenlets of this thread.

    Attributes:
        idle: those that run no instance; dead ones among them, if an interrupt has ended them.
        entering: the instance that the next one to go on runs.
    """

    def __init__(self) -> None:
        self.idle: list[Any] = []
        self.entering: Fiber | None = None

    def take(self, parent: Any) -> Any:
        """A greenlet to enter an instance in; it gives control to ``parent`` when that has ended."""
        while self.idle:
            found = self.idle.pop()
            if not found.dead:
                found.parent = parent
                return found
        return greenlet(_work, parent)


workers = Workers()


def _work() -> None:
    while True:
        fiber, workers.entering = workers.entering, None
        assert fiber is not None
        fiber.run()
        del fiber  # nothing of the map is kept from here on
        if len(workers.idle) == _MOST_IDLE:
            return
        _rest(getcurrent())


def _rest(own: Any) -> None:
    """Wait for another instance. A greenlet whose frame had ``own`` would hold itself, and wait for the garbage
    collector once nobody needs it."""
    own.gr_context = None
    workers.idle.append(own)
    switch = own.parent.switch
    del own
    switch()
