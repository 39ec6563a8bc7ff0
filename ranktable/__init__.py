"""HCCL rank tables, versions 1.0 and 1.2: read, check, build, merge, convert and write them.

A rank table is the JSON file (often `hccl.json`) that tells Ascend's collective
library which device has which rank.  This package is pure: text in, values out;
it touches no file, socket or environment.

    table = parse_table(text)
    for rank, (server, device) in enumerate(table.by_rank()):
        print(rank, server.server_id, device.device_id)
"""

from ranktable.build import Inventory, InventoryDevice, build_table, convert_table, merge_tables
from ranktable.check import check_hccl, check_table
from ranktable.model import (
    RankTable,
    RankTableError,
    Server,
    SuperPod,
    TableDevice,
    TableProblem,
    TableStatus,
    UnknownVersionError,
    Version,
)
from ranktable.parse import parse_table
from ranktable.render import render_table

__all__ = [
    "Inventory",
    "InventoryDevice",
    "RankTable",
    "RankTableError",
    "Server",
    "SuperPod",
    "TableDevice",
    "TableProblem",
    "TableStatus",
    "UnknownVersionError",
    "Version",
    "build_table",
    "check_hccl",
    "check_table",
    "convert_table",
    "merge_tables",
    "parse_table",
    "render_table",
]
