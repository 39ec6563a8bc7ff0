"""A mesh whose ranks have another order than their numbers."""

import json

MESH = """\
mesh of 4 ranks:
  axis  size
  dp    2
  tp    2

groups along dp:
  0,1
  3,2

groups along tp:
  0,3
  1,2

coordinates:
  rank  dp  tp
  0     0   0
  1     1   0
  2     1   1
  3     0   1
"""


def test_a_plan_shows_the_order_of_ranks(msrun, here):
    layout = {
        "device_matrix": [2, 2],
        "alias_name": ["dp", "tp"],
        "rank_list": [0, 3, 1, 2],
        "params": {"weight": ["tp", "None"]},
    }
    config = {"mesh": {"dp": 2, "tp": 2}, "plan": [{"match": "*", "layout": layout}]}
    (here / "p.yaml").write_text(json.dumps(config))

    assert msrun("plan --parallel p.yaml --worker-num 4").out == MESH
    found = json.loads(msrun("plan --json --parallel p.yaml --worker-num 4").out)["parallel"]
    assert found["groups"] == {"dp": [[0, 1], [3, 2]], "tp": [[0, 3], [1, 2]]}


def test_a_plan_shows_the_order_where_a_search_finds_the_mesh(msrun, here):
    config = {"mesh": "auto", "mode": "auto", "rank_list": [0, 3, 1, 2]}
    (here / "p.yaml").write_text(json.dumps(config))

    shown = "ranks in the order of the mesh:\n  0,3,1,2\n"
    assert msrun("plan --parallel p.yaml --worker-num 4").out == shown
    said = msrun("plan --parallel p.yaml --worker-num 2")
    assert said.err.startswith(
        "error: --parallel p.yaml: parallel.rank_list: [0, 3, 1, 2] has not each of the 2 ranks "
        "once\n"
    )
