"""Where the thread of a script is, as another thread sees it.

`sys._current_frames` gives frames of a thread that runs, and to follow these while it does has
ended interpreters by a segmentation fault (Python 3.11, which profilers know).  `faulthandler`
walks them in C while no Python runs, as it does in a process that has crashed.
"""

from __future__ import annotations

import faulthandler
import os
import tempfile
import weakref

from msrun.cluster.liveness import stacks


class ScriptStack:
    """The stack of one thread.

    Args:
        thread: As `threading.get_ident` names it.
    """

    def __init__(self, thread: int) -> None:
        self._thread = thread
        with tempfile.TemporaryFile() as file:  # which has no name
            self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)

    def read(self) -> tuple[stacks.Frame, ...]:
        """Return the calls that the thread is in, innermost first; none once it has ended."""
        os.ftruncate(self._descriptor, 0)
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        faulthandler.dump_traceback(self._descriptor)
        text = os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0)
        return stacks.parse(text.decode(errors="replace"), self._thread)
