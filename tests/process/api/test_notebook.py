"""`msrun.launch` in a real Jupyter kernel."""

from __future__ import annotations

import os
import threading

import pytest
from support import PATIENCE, alive, until

from msrun.supervise import process

pytestmark = [pytest.mark.process, pytest.mark.slow]
pytest.importorskip("ipykernel")
pytest.importorskip("cloudpickle")
manager = pytest.importorskip("jupyter_client.manager")


class Notebook:
    """Cells that a kernel runs."""

    def __init__(self, folder, runtime):
        env = {k: v for k, v in os.environ.items() if not k.startswith(("MSRUN_", "PET_"))}
        own = {"XDG_RUNTIME_DIR": str(runtime), "TMPDIR": str(folder), "IPYTHONDIR": str(folder)}
        mark = {"MSRUN_TESTS_SESSION": os.environ["MSRUN_TESTS_SESSION"]}
        self.manager, self._client = manager.start_new_kernel(
            kernel_name="python3", env={**env, **own, **mark}, cwd=str(folder)
        )
        self.output = []

    def run(self, code):
        """Run a cell; return its result, and have its output in `output`."""
        self.output = []
        reply = self._client.execute_interactive(
            code, timeout=3 * PATIENCE, output_hook=self._on_output, store_history=False
        )
        content = reply["content"]
        return content["status"] if content["status"] == "ok" else content["ename"]

    def _on_output(self, message):
        content = message["content"]
        name = {"stream": content.get("name"), "execute_result": "result"}.get(message["msg_type"])
        if name:
            text = content["data"]["text/plain"] if name == "result" else content["text"]
            self.output.append((name, text))

    def said(self, stream):
        return "".join(text for name, text in self.output if name == stream)

    def close(self):
        self._client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@pytest.fixture
def notebook(tmp_path, runtime):
    found = Notebook(tmp_path, runtime)
    yield found
    found.close()
    until(lambda: not alive(runtime), f"for {[process.command_line(p) for p in alive(runtime)]}")
    assert not list(tmp_path.glob("msrun-call-*"))


CELL = """
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
def sleeps():
    print("begun")
    time.sleep(300)
"""


@pytest.mark.filterwarnings("ignore")
def test_a_notebook_launches_its_functions_is_interrupted_and_goes_on(notebook):
    assert notebook.run(CELL) == "ok"
    cell = "p = msrun.launch(train, (1,), workers=2); [x.value for x in p], type(p[0]) is Point"
    assert notebook.run(cell) == "ok"
    assert notebook.said("result") == "([1, 11], True)"
    assert sorted(notebook.said("stdout").splitlines()) == ["[rank 0] trains", "[rank 1] trains"]
    assert "2/2 workers finished" in notebook.said("stderr")

    assert notebook.run("msrun.launch(fails, workers=2)") == "JobFailed"

    def interrupt():
        until(lambda: "begun" in notebook.said("stdout"), "for the workers")
        notebook.manager.interrupt_kernel()

    thread = threading.Thread(target=interrupt)
    thread.start()
    assert notebook.run("msrun.launch(sleeps, workers=2)") == "KeyboardInterrupt"
    thread.join()
    assert notebook.run("msrun.launch(os.getpid, workers=1) == [os.getpid()]") == "ok"
    assert notebook.said("result") == "False"

    # The kernel is killed while a job runs.
    assert notebook.run("job = msrun.Job(sleeps, workers=2).start()") == "ok"
    assert notebook.run("while 'begun' not in job.logs(1): pass") == "ok"
