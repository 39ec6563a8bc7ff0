"""`msrun.launch` in scripts: functions of `__main__`, their values, failures, restarts, ends."""

from __future__ import annotations

import signal

import pytest
from ports import free_port
from support import alive, until

pytestmark = pytest.mark.process

RANK = 'int(os.environ["RANK"])'
SLOW = """
    import os, signal, threading, time
    import msrun

    def train(name):
        open(f"{name}_{os.environ['RANK']}", "w").close()
        time.sleep(300)

    def begin():
        while not all(os.path.exists(f"a_{rank}") for rank in range(2)):
            time.sleep(0.01)
        print("begun", flush=True)
"""


def test_a_function_of_the_script_returns_the_value_of_each_rank(said):
    lines = said(f"""
        import os, signal
        import msrun

        class Point:
            def __init__(self, value):
                self.value = value

        def train(first, *, scale):
            print("trains")
            return Point(first + scale * {RANK})

        if __name__ == "__main__":
            handlers = [signal.getsignal(n) for n in signal.valid_signals()]
            points = msrun.launch(train, (5,), {{"scale": 10}}, workers=3, start_method="fork")
            print([point.value for point in points], {{type(point) is Point for point in points}})
            print(handlers == [signal.getsignal(n) for n in signal.valid_signals()])
            print(signal.set_wakeup_fd(-1))
    """)

    assert lines == ["[5, 15, 25] {True}", "True", "-1"]


@pytest.mark.parametrize("method", ["fork", "exec"])
def test_a_script_that_is_a_module_is_imported_by_its_name(said, tmp_path, method):
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "__init__.py").touch()
    (tmp_path / "pack" / "near.py").write_text("VALUE = 7\n")
    text = f"""
        import os, sys
        import msrun
        from .near import VALUE

        calls = 0

        def train():
            global calls
            calls += 1
            return VALUE, sys.argv[1:], __name__, sys.modules["__main__"].calls

        if __name__ == "__main__":
            print(msrun.launch(train, workers=1, start_method="{method}"))
    """

    lines = said(text, "-m", "pack.main", "--lr", "1", name="pack/main.py")

    assert lines == ["[(7, ['--lr', '1'], '__mp_main__', 1)]"]


def test_a_failure_says_which_rank_and_why(said):
    lines = said(f"""
        import os, socket
        import msrun

        def train():
            if {RANK} == 1:
                raise ValueError("no luck")

        if __name__ == "__main__":
            try:
                msrun.launch(train, workers=2)
            except msrun.MsrunError as error:
                print(type(error).__name__, error.code, error.rank, error.error)
                print(error.node == socket.gethostname(), os.path.exists(error.log_file))
                print(error.message)
                print(error.traceback, *error.__notes__, sep="\\n", end="")
    """)

    assert lines[:2] == ["JobFailed 1 1 ValueError: no luck", "True True"]
    assert lines[2].startswith("rank 1 (node ")
    assert lines[2].endswith(": ValueError: no luck")
    traceback = [line.strip() for line in lines[3:]]
    assert traceback[0] == "Traceback (most recent call last):"
    # The first frame is the user's.
    assert traceback[1].endswith("line 7, in train")
    assert "in rank 1:" in traceback


def test_a_restart_calls_the_function_again(said):
    lines = said(f"""
        import os
        import msrun

        def train():
            generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
            if generation == 0 and {RANK} == 0:
                raise ValueError("once")
            return generation, {RANK}

        if __name__ == "__main__":
            print(msrun.launch(train, workers=2, max_restarts=2, restart_window="1h"))
    """)

    assert lines == ["[(1, 0), (1, 1)]"]


def test_an_elastic_line_returns_the_values_of_its_node(said):
    lines = said(f"""
        import os
        import msrun

        def train():
            return {RANK}, os.environ["WORLD_SIZE"]

        if __name__ == "__main__":
            print(msrun.launch(train, workers=2, nnodes="1:2", last_call=0.1,
                               rdzv_endpoint="localhost:{free_port()}"))
    """)

    assert lines == ["[(0, '2'), (1, '2')]"]


def test_a_closure_travels_by_value(said):
    pytest.importorskip("cloudpickle")
    lines = said(f"""
        import os
        import msrun

        def main():
            scale = 3
            print(msrun.launch(lambda x: x + scale * {RANK}, (1,), workers=2))

        main()
    """)

    assert lines == ["[1, 4]"]


SESSION = f"import os, msrun\ndef f(): return {RANK}\n"


def test_a_session_without_a_file_sends_its_functions_by_value(said):
    pytest.importorskip("cloudpickle")

    assert said("", "-c", f"{SESSION}print(msrun.launch(f, workers=2))") == ["[0, 1]"]


def test_a_session_without_cloudpickle_says_what_to_do(said):
    code = f"""import sys; sys.modules['cloudpickle'] = None
{SESSION}
try:
    msrun.launch(f)
except msrun.UsageError as error:
    print(error.message, error.hint, sep='; ')
"""

    assert said("", "-c", code) == [
        (
            "f or its arguments cannot be imported by workers: f is defined in this session alone; "
            "pip install cloudpickle sends it by value; or move it to a module"
        )
    ]


def test_a_worker_that_comes_to_launch_again_fails_with_a_hint(said):
    lines = said("""
        import msrun

        def train():
            return 1

        try:
            msrun.launch(train, workers=1)
        except msrun.JobFailed as error:
            print(error.error)
    """)

    assert lines == [
        (
            "msrun.errors.UsageError: a worker that imports the script came to msrun.launch or "
            "msrun.Job again"
        )
    ]


def test_a_script_that_ends_while_it_is_imported_is_a_failure(said):
    lines = said("""
        import sys
        import msrun

        def train():
            return 1

        if __name__ != "__main__":
            sys.exit(0)
        try:
            msrun.launch(train, workers=1)
        except msrun.JobFailed as error:
            print(error.error.replace(__file__, "FILE"))
    """)

    assert lines == [
        (
            "msrun.errors.UsageError: FILE called sys.exit(0) while a worker imported it, before "
            "train was called"
        )
    ]


def test_values_that_cannot_come_back_are_one_sentence(said):
    lines = said("""
        import os, sys, threading
        import msrun

        def lock():
            return threading.Lock()

        def leaves():
            sys.exit(0) if os.environ["RANK"] == "0" else os._exit(0)

        if __name__ == "__main__":
            print(msrun.launch(leaves, workers=2))
            try:
                msrun.launch(lock, workers=1)
            except msrun.UsageError as error:
                print(error.message)
            try:
                msrun.launch(leaves, (threading.Lock(),), workers=1)
            except msrun.UsageError as error:
                print(error.message)
    """)

    assert lines == [
        "[None, None]",
        (
            "the value of rank 0, a _thread.lock, cannot be pickled: TypeError: cannot pickle "
            "'_thread.lock' object"
        ),
        (
            "leaves or its arguments cannot be sent to workers: TypeError: cannot pickle "
            "'_thread.lock' object"
        ),
    ]


def test_a_worker_may_start_a_job_of_its_own(said):
    lines = said(f"""
        import os
        import msrun

        def inner(first):
            return first + {RANK}

        def outer(first):
            return msrun.launch(inner, (first,), workers=2, tail="none")

        if __name__ == "__main__":
            print(msrun.launch(outer, (5,), workers=1))
    """)

    assert lines == ["[[5, 6]]"]


def test_each_of_two_nodes_gets_the_values_of_its_own_ranks(said):
    lines = said(f"""
        import os
        from concurrent.futures import ThreadPoolExecutor
        import msrun

        def train():
            return {RANK}

        def node(rank):
            return msrun.launch(
                train, workers=2, nnodes=2, node_rank=rank, rdzv_endpoint="localhost:{free_port()}",
                job_id="two", log_dir=f"logs{{rank}}",
            )

        if __name__ == "__main__":
            with ThreadPoolExecutor(2) as pool:
                print(list(pool.map(node, range(2))))
    """)

    assert lines == ["[[0, 1], [2, 3]]"]


def test_threads_run_jobs_at_once_also_where_signals_are_blocked(said):
    lines = said("""
        import os, signal, threading
        from concurrent.futures import ThreadPoolExecutor
        import msrun

        def train(name, other):
            # Each waits for the other one, so both run at once.
            open(name, "w").close()
            while not os.path.exists(other):
                pass
            return name

        def run(names):
            signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
            return msrun.launch(train, names, workers=1)

        if __name__ == "__main__":
            for ignored in (signal.SIGINT, signal.SIGCHLD):
                signal.signal(ignored, signal.SIG_IGN)
            with ThreadPoolExecutor(2) as pool:
                print(list(pool.map(run, [("a", "b"), ("b", "a")])))
    """)

    assert lines == ["[['a'], ['b']]"]


@pytest.mark.parametrize("where", ["io.StringIO()", 'open("file", "w+")'])
def test_output_goes_where_the_program_has_redirected_it(said, where):
    lines = said(f"""
        import contextlib, io, os
        import msrun

        def train():
            print("from a worker: ü")

        if __name__ == "__main__":
            out = {where}
            with contextlib.redirect_stdout(out):
                msrun.launch(train, workers=1)
            out.seek(0)
            print(repr(out.read()))
    """)

    assert len(lines) == 1
    assert "from a worker: ü\\n" in lines[0]


def test_an_interrupt_ends_the_job_and_is_raised_again(program):
    started = program(
        SLOW
        + """
    if __name__ == "__main__":
        threading.Thread(target=begin).start()
        try:
            msrun.launch(train, ("a",), workers=2)
        except KeyboardInterrupt:
            print("interrupted", flush=True)
            print(msrun.launch(os.getpid, workers=1) != [])
    """
    )
    started.until_said("begun")
    started.process.send_signal(signal.SIGINT)

    assert started.wait() == 0
    assert [line for line in started.out.splitlines() if line[0] != "["][1:] == [
        "interrupted",
        "True",
    ]


@pytest.mark.parametrize("end", ["kill", "exit", "raise"])
def test_nothing_outlives_the_program(program, runtime, end):
    started = program(
        SLOW
        + f"""
    if __name__ == "__main__":
        job = msrun.Job(train, ("a",), workers=2)
        # A thread that ends at once, which must not end the job.
        starter = threading.Thread(target=job.start)
        starter.start()
        starter.join()
        begin()
        if "{end}" == "raise":
            raise ValueError("a mistake")
        if "{end}" == "kill":
            job.wait()
    """
    )
    started.until_said("begun")
    if end == "kill":
        started.process.kill()

    assert started.wait() == {"kill": -9, "exit": 0, "raise": 1}[end]
    if end != "kill":
        assert alive(runtime) == []
    until(lambda: not alive(runtime), "for the end of the job")


def test_functions_cannot_go_to_nodes_that_a_backend_starts(said):
    lines = said("""
        import os
        import msrun

        try:
            msrun.launch(os.getpid, launcher="ssh", nnodes=2)
        except msrun.UsageError as error:
            print(error.message)
    """)

    assert lines == ["getpid cannot be called on nodes that a backend starts"]
