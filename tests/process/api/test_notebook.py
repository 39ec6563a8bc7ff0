"""`msrun.launch` in a real Jupyter kernel."""

from __future__ import annotations

import json

import pytest

pytestmark = [pytest.mark.process, pytest.mark.slow]
pytest.importorskip("ipykernel")
pytest.importorskip("jupyter_client")
pytest.importorskip("cloudpickle")

# Runs cells in a kernel and prints, for each, its end and what it wrote, as a line of JSON.  In a
# process of its own, since jupyter_client leaves event loops behind.
DRIVER = """
    import json
    import sys
    import threading
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3")

    def run(cell):
        output = {"stdout": "", "stderr": "", "result": ""}

        def take(message):
            content = message["content"]
            if message["msg_type"] == "stream":
                output[content["name"]] += content["text"]
                if "begun" in content["text"]:
                    manager.interrupt_kernel()
            elif message["msg_type"] == "execute_result":
                output["result"] = content["data"]["text/plain"]

        reply = client.execute_interactive(cell, timeout=60, output_hook=take)["content"]
        print(json.dumps({"end": reply.get("ename", "ok"), **output}), flush=True)

    for cell in json.load(open("cells.json")):
        run(cell)
    client.stop_channels()
    # SIGKILL, while its last cell's job runs.
    manager.shutdown_kernel(now=True)
"""
DEFINITIONS = """
import os, time, msrun
scale = 10
class Point:
    def __init__(self, value):
        self.value = value
def train(first):
    print("trains")
    return Point(first + scale * int(os.environ["RANK"]))
def fails():
    raise ValueError("no luck")
def waits(word):
    print(word)
    time.sleep(300)
"""
CELLS = {
    "definitions": DEFINITIONS,
    "values": "p = msrun.launch(train, (1,), workers=2); [x.value for x in p], type(p[0]) is Point",
    "failure": "msrun.launch(fails, workers=2)",
    "interrupt": "msrun.launch(waits, ('begun',), workers=2, tail=0)",
    "afterwards": "msrun.launch(os.getpid, workers=1) == [os.getpid()]",
    "beside": "job = msrun.Job(waits, ('waits',), workers=2).start()",
    "its log": "while 'waits' not in job.logs(1): pass",
}


def test_a_notebook_launches_its_functions_is_interrupted_and_goes_on(said, tmp_path):
    (tmp_path / "cells.json").write_text(json.dumps(list(CELLS.values())))

    # That nothing is left of the last job is for the fixture to say.
    cells = dict(zip(CELLS, map(json.loads, said(DRIVER)), strict=True))

    assert {name: cell["end"] for name, cell in cells.items()} == dict.fromkeys(CELLS, "ok") | {
        "failure": "JobFailed",
        "interrupt": "KeyboardInterrupt",
    }
    assert cells["values"]["result"] == "([1, 11], True)"
    lines = sorted(cells["values"]["stdout"].splitlines())
    assert lines == ["[rank 0] trains", "[rank 1] trains"]
    assert "2/2 workers finished" in cells["values"]["stderr"]
    assert "ValueError: no luck" in cells["failure"]["stderr"]
    assert cells["afterwards"]["result"] == "False"
