"""`python -m msrun`, and the console script."""

import signal
from typing import NoReturn

# Ctrl-C while the rest is imported ends this process, without a traceback: there is nothing yet to
# clean up.  Not in `msrun.cli`, which other programs import.
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def console() -> NoReturn:
    """Be the process `msrun`."""
    from msrun.cli import main

    main.console()


if __name__ == "__main__":
    console()
