"""A program run by `main_module` cannot tell, nor can its user, that `python` did not run it."""

import signal

import pytest
from plain_python import OURS, end, run_both, start, write

pytestmark = pytest.mark.process

EXITS = {
    "none": (0, "import sys; sys.exit(None)"),
    "text": (1, "import sys; sys.exit('no data')"),
    "empty text": (1, "import sys; sys.exit('')"),
    "seven": (7, "import sys; sys.exit(7)"),
    "300": (44, "import sys; sys.exit(300)"),
    "minus one": (255, "import sys; sys.exit(-1)"),
    "256": (0, "import sys; sys.exit(256)"),
    "huge": (255, "import sys; sys.exit(2**80)"),
    "true": (1, "import sys; sys.exit(True)"),
    "a tuple": (1, "import sys; sys.exit(('a', 1))"),
    "system exit": (3, "raise SystemExit(3)"),
    "builtin": (4, "exit(4)"),
    "os._exit": (5, "import os; print('lost', end=''); os._exit(5)"),
    "end of file": (0, "print('done')"),
}


@pytest.mark.parametrize(("code", "source"), EXITS.values(), ids=EXITS)
def test_exit_codes_are_those_of_python(tmp_path, code, source):
    write(tmp_path, "x.py", source)
    plain, ours = run_both(tmp_path, "x.py")

    assert (ours[0], ours[2]) == (code, plain[2])
    assert plain[0] == code


PROGRAMS = {
    "an exception": "def f():\n    return 1 / 0\n\n\nf()\n",
    "an exception with a cause": """\
        try:
            {}["missing"]
        except KeyError as error:
            raise RuntimeError("two\\nlines") from error
        """,
    "an exception with a context": """\
        try:
            {}["missing"]
        except KeyError:
            raise ValueError
        """,
    "an exception group": "raise ExceptionGroup('several', [ValueError(1), TypeError('b')])",
    "an exception with notes": """\
        error = ValueError("bad")
        error.add_note("think")
        raise error
        """,
    "an exception that cannot be shown": """\
        class Odd(Exception):
            def __str__(self):
                raise TypeError

        raise Odd
        """,
    "a syntax error": "x = (1,\ny = 2\n",
    "a bad indentation": "if True:\nx = 1\n",
    "a failing import": "import no_such_module_anywhere",
    "a hook": """\
        import sys

        sys.excepthook = lambda *a: print("hook", a[0].__name__, a[2].tb_lineno)
        raise KeyError
        """,
    "a hook that exits": """\
        import sys

        sys.excepthook = lambda *a: sys.exit(9)
        raise KeyError
        """,
    "a hook that fails": """\
        import sys


        def hook(*a):
            raise ValueError("in the hook")


        sys.excepthook = hook
        raise KeyError("in the program")
        """,
    "last_value at exit": """\
        import atexit, sys

        atexit.register(lambda: print(sys.last_type, sys.last_value, sys.last_traceback.tb_lineno))
        raise KeyError("k")
        """,
    "exit functions": """\
        import atexit

        atexit.register(print, "first registered, last run")
        atexit.register(print, "last registered, first run")
        atexit.register(lambda: 1 / 0)
        print("end of program")
        """,
    "an exit function that exits": """\
        import atexit, sys

        def leave():
            sys.exit(5)


        atexit.register(print, "still run")
        atexit.register(leave)
        """,
    "threads are waited for before exit functions": """\
        import atexit, threading

        done = threading.Event()
        atexit.register(print, "exit function")
        threading.Thread(target=lambda: (done.wait(), print("thread"))).start()
        threading.Timer(0.05, done.set).start()
        print("main")
        """,
    "a daemon thread is not waited for": """\
        import threading

        threading.Thread(target=threading.Event().wait, daemon=True).start()
        print("main")
        """,
    "an exception in a thread": """\
        import threading

        def work():
            raise ValueError("in a thread")

        thread = threading.Thread(target=work, name="worker")
        thread.start()
        thread.join()
        """,
    "an unclosed file": """\
        file = open("out.txt", "w")
        file.write("kept")
        binary = open("out.bin", "wb")
        binary.write(b"kept")
        """,
    "an unclosed file in a function of a class": """\
        class Log:
            file = open("out.txt", "w")

        Log.file.write("kept")
        raise SystemExit(2)
        """,
    "finalizers find other globals": """\
        import os


        class Resource:
            def __del__(self):
                print("closed", os.path.basename("a/b"), NAME)


        NAME = "name"
        resource = Resource()
        """,
    "finalizers of objects in a cycle": """\
        class Node:
            def __del__(self):
                print("gone")


        a, b = Node(), Node()
        a.other, b.other = b, a
        """,
    "weakref.finalize": """\
        import weakref


        class Resource:
            pass


        resource = Resource()
        weakref.finalize(resource, print, "finalized")
        """,
    "a temporary directory": """\
        import os, tempfile

        directory = tempfile.TemporaryDirectory(dir=".")
        print(os.path.isdir(directory.name))
        """,
    "names of main": """\
        '''Documentation.'''
        import sys

        print(list(globals()))
        print(__name__, __doc__, __package__, __spec__, __file__, __cached__, __annotations__)
        print(type(__loader__).__name__, __loader__.name, __loader__.path, __builtins__)
        print(sys.modules["__main__"], sys.modules["__main__"].__dict__ is globals())
        """,
    "no future is inherited": "def f(a: int): pass\nprint(f.__annotations__)",
    "command line": """\
        import sys

        print(sys.argv, sys.path, sys.orig_argv[1:], sys.flags, sys.warnoptions)
        """,
    "inspect": """\
        import inspect


        class Model:
            pass


        print(inspect.getsource(Model), inspect.getfile(Model), inspect.stack()[0].lineno)
        """,
    "pickle": """\
        import pickle


        class Point:
            pass


        data = pickle.dumps(Point())
        print(data, type(pickle.loads(data)) is Point)
        """,
    "spawn": """\
        import multiprocessing


        def work(queue):
            queue.put((__name__, __file__))


        if __name__ == "__main__":
            context = multiprocessing.get_context("spawn")
            queue = context.SimpleQueue()
            child = context.Process(target=work, args=(queue,))
            child.start()
            print(queue.get())
            child.join()
            print(child.exitcode, __file__)
        """,
    "a fork that falls off the end": """\
        import os

        if os.fork() == 0:
            print("child", flush=True)
        else:
            os.wait()
            print("parent")
        """,
    "a signal handler that exits": """\
        import os, signal, sys

        signal.signal(signal.SIGTERM, lambda *a: sys.exit(6))
        os.kill(os.getpid(), signal.SIGTERM)
        """,
    "killed by sigterm": "import os; os.kill(os.getpid(), 15)",
    "standard streams": """\
        import sys

        print(sys.stdout.encoding, sys.stdout.errors, sys.stderr.errors, sys.stdout.name)
        print(sys.stdout.mode, sys.stdout.isatty(), sys.stdout.fileno(), sys.stderr.fileno())
        print(sys.stdout is sys.__stdout__, sys.stderr is sys.__stderr__, sys.stdin.read())
        sys.stdout.buffer.write(b"bytes\\n")
        sys.stderr.write("\\udcff\\n")
        """,
    "closed standard output": "import sys\nprint('shown')\nsys.stdout.close()\nraise KeyError",
    "c streams": """\
        import ctypes

        ctypes.CDLL(None).printf(b"from C\\n")
        """,
}


@pytest.mark.parametrize("source", PROGRAMS.values(), ids=PROGRAMS)
@pytest.mark.few(12)
def test_a_program_does_what_it_does_under_python(tmp_path, source):
    write(tmp_path, "folder/x.py", source)
    plain, ours = run_both(tmp_path, "folder/x.py", "--flag", "a b", "")

    assert ours == plain


@pytest.mark.parametrize(
    "source", ["an unclosed file", "an unclosed file in a function of a class"]
)
def test_what_a_program_left_unwritten_is_written(tmp_path, source):
    write(tmp_path, "x.py", PROGRAMS[source])
    end(start([*OURS, "script", "x.py"], tmp_path))

    assert (tmp_path / "out.txt").read_text() == "kept"


def test_a_keyboard_interrupt_ends_as_under_python(tmp_path):
    source = """\
        import atexit, os, signal

        atexit.register(print, "exit function")
        file = open("out.txt", "w")
        file.write("kept")
        os.kill(os.getpid(), signal.SIGINT)
        """
    write(tmp_path, "x.py", source)
    plain, ours = run_both(tmp_path, "x.py")

    assert ours == plain
    assert ours[0] == -signal.SIGINT


def test_an_interrupted_program_writes_its_files(tmp_path):
    source = "file = open('out.txt', 'w')\nfile.write('kept')\nraise KeyboardInterrupt"
    write(tmp_path, "x.py", source)
    end(start([*OURS, "script", "x.py"], tmp_path))

    assert (tmp_path / "out.txt").read_text() == "kept"


def test_an_interrupt_while_threads_are_waited_for_skips_nothing(tmp_path):
    source = """\
        import atexit, os, signal, sys, threading

        def work():
            main.join(0.05)
            os.kill(os.getpid(), signal.SIGTERM)

        signal.signal(signal.SIGTERM, lambda *a: sys.exit(6))
        atexit.register(print, "exit function")
        file = open("out.txt", "w")
        file.write("kept")
        main = threading.current_thread()
        threading.Thread(target=work).start()
        """
    write(tmp_path, "x.py", source)
    plain, ours = run_both(tmp_path, "x.py")

    assert ours[:2] == plain[:2] == (0, "exit function\n")
    assert (tmp_path / "out.txt").read_text() == "kept"


def test_a_finalizer_runs_though_something_else_holds_the_globals(tmp_path):
    source = """\
        import textwrap


        class Resource:
            def __del__(self):
                print("closed")


        def function():
            pass


        textwrap.kept_by_another_module = function
        resource = Resource()
        """
    write(tmp_path, "x.py", source)
    plain, ours = run_both(tmp_path, "x.py")

    assert ours == plain == (0, "closed\n", "")
