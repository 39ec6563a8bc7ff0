"""Merge rank tables as MindSpore's merge_hccl.py does, with its arguments.

    python scripts/merge_hccl.py hccl_8p_01234567_10.0.0.1.json hccl_8p_01234567_10.0.0.2.json

The file `hccl_<servers>s_<ranks>p.json` is written into the working directory.  Unlike the
original's, its ranks are strings, as MindSpore's scheduler needs them, and tables that do
not fit together are refused.  `msrun ranktable merge` does the same.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # from a checkout, too

from msrun.errors import UsageError
from msrun.rank_table.file import merge_files, write_table


def main(argv: Sequence[str] | None = None) -> int:
    """Write the table and return the exit code."""
    parser = argparse.ArgumentParser(description="Merge rank tables, in the order given.")
    parser.add_argument("file_list", nargs="+", metavar="FILE", help="Rank table of a server.")
    files = parser.parse_args(argv).file_list
    try:
        table = merge_files(files)
        path = Path.cwd() / f"hccl_{len(table.server_list)}s_{table.world_size}p.json"
        write_table(table, str(path))
    except UsageError as error:
        print(error.render(), file=sys.stderr)
        return error.exit_code
    print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
