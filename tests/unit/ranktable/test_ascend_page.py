"""The rank table of docs/how-to/ascend.md is one that msrun reads and would write."""

import re
from pathlib import Path

from ranktable import parse_table, render_table

PAGE = Path(__file__).parents[3] / "docs/how-to/ascend.md"


def test_the_table_of_the_page_is_as_msrun_writes_it():
    (text,) = re.findall(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL)

    table = parse_table(text)

    assert render_table(table) == text
    assert [len(server.device) for server in table.server_list] == [2, 2]
