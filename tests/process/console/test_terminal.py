"""A terminal: progress bars, colours, widths, prompts, debuggers, keys that make signals."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import termios

import pytest
from support import alive, environment, script, shell, until

from msrun.supervise import process

pytestmark = pytest.mark.process


@pytest.fixture
def gate(tmp_path):
    """A file that workers wait for by `gate()`; call it with a number to let them on."""
    path = tmp_path / "gate"
    os.mkfifo(path)
    descriptor = os.open(path, os.O_RDWR)
    yield lambda times=1: os.write(descriptor, b"g" * times)
    os.close(descriptor)


GATE = """
import os, sys
def gate():
    with open("gate", "rb", buffering=0) as file:
        file.read(1)
"""


def program(folder, text, name="program.py"):
    return script(folder, GATE + text, name)


BAR = """
sys.stdout.write("|")
for i in (1, 2, 3):
    sys.stdout.write(f"\\r{i} of 3")
    sys.stdout.flush()
    gate()
print()
"""


def test_a_progress_bar_moves_while_the_job_waits(at_terminal, terminal, tmp_path, gate):
    job = at_terminal(program(tmp_path, BAR))
    for state in (b"|\r1 of 3", b"\r2 of 3", b"\r3 of 3"):
        terminal.until_raw(state)
        gate()
    terminal.until_closed()

    assert job.wait() == 0
    # Byte for byte, but for the end of a line, which the terminal makes.
    assert b"|\r1 of 3\r2 of 3\r3 of 3\r\n" in terminal.raw
    assert (job.logs / "worker_0.log").read_bytes() == b"|\r1 of 3\r2 of 3\r3 of 3\n"


def test_a_progress_bar_moves_in_a_pipe(msrun, tmp_path, gate):
    reading, writing = os.pipe()
    job = msrun(program(tmp_path, BAR), stdout=writing)
    os.close(writing)
    seen = b""
    for state in (b"1 of 3", b"2 of 3", b"3 of 3"):
        while state not in seen:
            seen += os.read(reading, 4096)
        gate()
    while piece := os.read(reading, 4096):
        seen += piece
    os.close(reading)

    assert job.wait() == 0
    assert seen == b"[rank 0] |\r[rank 0] 1 of 3\r[rank 0] 2 of 3\r[rank 0] 3 of 3\n"


def test_bars_of_several_ranks_in_a_pipe_each_say_whose_they_are(msrun, tmp_path, gate):
    job = msrun("--workers-per-node", 2, program(tmp_path, BAR))
    gate(6)

    assert job.wait() == 0
    states = [f"[rank {rank}] {i} of 3" for rank in (0, 1) for i in (1, 2, 3)]
    lines = [line for line in job.out.splitlines() if "of" in line]
    assert sorted(lines) == states


def test_tqdm_draws_what_it_draws_at_a_terminal(at_terminal, terminal, tmp_path):
    pytest.importorskip("tqdm")
    text = """
        import sys
        from tqdm import tqdm

        for _ in tqdm(range(3), mininterval=0, dynamic_ncols=True):
            pass
    """
    job = at_terminal(script(tmp_path, text))
    terminal.until_closed()

    assert job.wait() == 0
    drawn = terminal.raw.replace(b"\r\n", b"\n")
    # In the width that tqdm takes of 300 columns, and with the blocks of a terminal.
    bar = max(re.findall(rb"\r(100%[^\r\n]*)", drawn), key=len).decode()
    assert "█" in bar
    assert len(bar) == 299
    log = (job.logs / "worker_0.log").read_bytes()
    assert log in drawn
    assert log.count(b"\r") > 3


# Of a terminal that calls itself dumb, rich does not ask the size.
RICH = """
    import os
    os.environ["TERM"] = "xterm"
    from rich.console import Console
    from rich.progress import track

    console = Console()
    print(console.is_terminal, console.width)
    for _ in track(range(3), "steps", console=console):
        pass
"""


def test_rich_draws_what_it_draws_at_a_terminal(at_terminal, terminal, tmp_path):
    pytest.importorskip("rich")
    job = at_terminal(script(tmp_path, RICH))
    terminal.until_closed()

    assert job.wait() == 0
    log = (job.logs / "worker_0.log").read_bytes()
    assert log.startswith(b"True 300")
    assert b"100%" in log
    assert log.count(b"\x1b[") > 4  # colours, and the cursor that is hidden and shown again
    assert log in terminal.raw.replace(b"\r\n", b"\n")


def test_rich_draws_no_bar_in_a_pipe(msrun, tmp_path):
    pytest.importorskip("rich")
    job = msrun("--workers-per-node", 2, script(tmp_path, RICH))

    assert job.wait() == 0
    assert "\x1b" not in job.out
    for rank in (0, 1):
        assert f"[rank {rank}] False " in job.out


def test_the_shown_worker_is_at_a_terminal(at_terminal, terminal, tmp_path):
    text = """
        import os
        size = os.get_terminal_size() if os.isatty(1) else ()
        print(os.environ["RANK"], *map(os.isatty, (0, 1, 2)), *size)
    """
    job = at_terminal("--workers-per-node", 2, script(tmp_path, text))
    terminal.until_closed()

    assert job.wait() == 0
    assert job.log(0) == "0 True True True 300 40\n"
    assert job.log(1) == "1 False False False\n"


def test_a_new_size_of_the_terminal_reaches_the_worker(at_terminal, terminal, tmp_path):
    text = """
        import os, signal
        reading, writing = os.pipe()
        signal.signal(signal.SIGWINCH, lambda *_: os.write(writing, b"x"))
        print("ready")
        os.read(reading, 1)
        print("now", *os.get_terminal_size())
    """
    job = at_terminal(script(tmp_path, text))
    terminal.until_raw(b"ready")
    terminal.resize(20, 77)
    terminal.until_closed()

    assert job.wait() == 0
    assert job.log() == "ready\nnow 77 20\n"


def test_colours_reach_the_terminal_and_the_log(at_terminal, terminal):
    job = at_terminal(*shell(r"printf '\033[1;31mred\033[0m\n'"))
    terminal.until_closed()

    assert job.wait() == 0
    assert b"\x1b[1;31mred\x1b[0m\r\n" in terminal.raw
    assert job.log() == "\x1b[1;31mred\x1b[0m\n"


def test_much_output_at_a_terminal_is_whole_in_the_log(at_terminal, terminal):
    job = at_terminal(*shell("seq 1 100000"))
    terminal.until_closed()

    assert job.wait() == 0
    assert job.log() == "".join(f"{i}\n" for i in range(1, 100_001))


def test_a_restart_goes_on_at_the_terminal_and_in_the_log(at_terminal, terminal):
    job = at_terminal("--max-restarts", 1, *shell('echo up; [ "$MSRUN_GENERATION" = 1 ]'))
    terminal.until_closed()

    assert job.wait() == 0
    assert job.log() == "up\n[msrun] generation 1 starts here\nup\n"


# Standard input.

ASK = """
    import os
    if os.environ["RANK"] == "0":
        print("got", input("name? "))
"""


@pytest.mark.parametrize("workers", [1, 3])
def test_rank_0_asks_at_the_terminal(at_terminal, terminal, tmp_path, workers):
    job = at_terminal("--workers-per-node", workers, script(tmp_path, ASK))
    terminal.until_raw(b"name? ")
    terminal.type(b"Ada\n")
    terminal.until_closed()

    assert job.wait() == 0
    assert job.log().endswith("got Ada\n")


@pytest.mark.parametrize("words", [(), ("--tail", "all"), ("--tee", "3"), ("-r", "3", "-t", "3")])
@pytest.mark.few(2)
def test_a_prompt_shows_however_the_console_is_chosen(at_terminal, terminal, tmp_path, words):
    job = at_terminal("--workers-per-node", 2, *words, script(tmp_path, ASK))
    terminal.until_raw(b"name? ")
    terminal.type(b"Ada\n")
    terminal.until_closed()

    assert job.wait() == 0
    assert b"got Ada\r\n" in terminal.raw


def test_the_end_of_input_at_the_terminal_is_one_for_rank_0(at_terminal, terminal, tmp_path):
    job = at_terminal(script(tmp_path, "import sys; print('ready'); print(repr(sys.stdin.read()))"))
    terminal.until_raw(b"ready")
    terminal.type(b"\x04")
    terminal.until_closed()

    assert job.wait() == 0
    assert job.log() == "ready\n''\n"


@pytest.mark.parametrize("workers", [1, 2])
def test_a_breakpoint_of_rank_0(at_terminal, terminal, tmp_path, workers):
    text = """
        import os
        secret = 6
        if os.environ["RANK"] == "0":
            breakpoint()
        print("on", secret)
    """
    job = at_terminal("--workers-per-node", workers, script(tmp_path, text))
    terminal.until_raw(b"(Pdb) ")
    terminal.type(b"p secret * 7\n")
    terminal.until_raw(b"42\r\n")
    terminal.type(b"secret = 8\n")
    terminal.type(b"c\n")
    terminal.until_closed()

    assert job.wait() == 0
    assert "on 8" in job.log(0)


def test_a_breakpoint_of_torch_distributed(at_terminal, terminal, tmp_path):
    pytest.importorskip("torch")
    text = """
        import torch.distributed as dist
        dist.init_process_group("gloo")
        dist.breakpoint(0)
        print("on", dist.get_rank())
        dist.destroy_process_group()
    """
    job = at_terminal("--workers-per-node", 2, script(tmp_path, text))
    terminal.until_raw(b"(Pdb) ")
    terminal.type(b"up\np dist.get_world_size() + 40\n")
    terminal.until_raw(b"42\r\n")
    terminal.type(b"c\n")
    terminal.until_closed()

    assert job.wait() == 0
    assert [job.log(rank).splitlines()[-1] for rank in (0, 1)] == ["(Pdb) on 0", "on 1"]


def test_control_c_at_a_prompt_ends_the_job_and_leaves_the_terminal_as_it_was(
    at_terminal, terminal, tmp_path
):
    before = terminal.modes()
    text = """
        import os, signal, termios
        if os.environ["RANK"] == "1":  # which has no terminal
            signal.pause()
        modes = termios.tcgetattr(0)
        modes[3] &= ~(termios.ECHO | termios.ICANON)
        termios.tcsetattr(0, termios.TCSANOW, modes)
        input("stuck? ")
    """
    job = at_terminal("--workers-per-node", 2, script(tmp_path, text))
    terminal.until_raw(b"stuck? ")
    assert not terminal.modes()[3] & termios.ECHO
    terminal.type(b"\x03")
    assert job.wait() == 130
    after = terminal.modes()

    assert after == before


EVERY_RANK_READS = """
    import os, sys
    print(os.environ["RANK"], repr(sys.stdin.read()))
"""


def test_piped_input_is_rank_0s(msrun, tmp_path):
    """torchrun lets all ranks read from one pipe, which then take bytes from each other."""
    reading, writing = os.pipe()
    os.write(writing, b"x\n")
    os.close(writing)
    job = msrun("--workers-per-node", 2, script(tmp_path, EVERY_RANK_READS), stdin=reading)
    os.close(reading)

    assert job.wait() == 0
    assert sorted(job.out.splitlines()) == ["[rank 0] 0 'x\\n'", "[rank 1] 1 ''"]


@pytest.mark.parametrize("redirection", ["<&-", "< /dev/null"])
def test_without_input_nothing_waits(tmp_path, runtime, redirection):
    words = [sys.executable, "-m", "msrun", "--workers-per-node", "2"]
    command = ["sh", "-c", f'exec "$@" {redirection}', "sh", *words]
    ended = subprocess.run(
        [*command, script(tmp_path, EVERY_RANK_READS)],
        cwd=tmp_path,
        env=environment(runtime),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert ended.returncode == 0
    assert sorted(ended.stdout.splitlines()) == ["[rank 0] 0 ''", "[rank 1] 1 ''"]


# Job control, by a real shell.


@pytest.fixture
def at_shell(tmp_path, runtime, terminal):
    """Start an interactive shell."""
    env = environment(runtime) | {"TERM": "dumb", "PS1": "$$$ ", "HISTFILE": ""}
    command = ["setsid", "--ctty", "bash", "--norc", "--noprofile", "--noediting", "-i"]
    ends = dict.fromkeys(("stdin", "stdout", "stderr"), terminal.theirs)
    shell = subprocess.Popen(command, cwd=tmp_path, env=env, **ends)
    terminal.started()
    yield shell
    if shell.poll() is None:
        shell.kill()
        shell.wait()
    until(lambda: not alive(runtime), "for all of the shell to end")


def test_control_z_stops_the_workers_and_fg_lets_them_go_on(at_shell, terminal, tmp_path):
    text = """
        import os
        print("up", os.getpid(), flush=True)
        print("name", input("name? "))
    """
    terminal.type(f"{sys.executable} -m msrun {script(tmp_path, text)}\n".encode())
    terminal.until_raw(b"name? ")
    pid = int(re.findall(rb"up (\d+)", terminal.raw)[-1])
    terminal.type(b"\x1a")
    terminal.until_raw(b"Stopped")
    until(lambda: process.state(pid) == "T", "for the worker to stop")
    terminal.type(b"fg\n")
    until(lambda: process.state(pid) != "T", "for the worker to go on")
    terminal.type(b"Ada\n")
    terminal.until_raw(b"name Ada")
    terminal.until_raw(b"1/1 workers finished")
    terminal.type(b"exit\n")
    terminal.until_closed()

    assert at_shell.wait(10) is not None


@pytest.mark.usefixtures("at_shell")
def test_a_job_in_the_background_takes_no_keys(terminal, tmp_path):
    text = "import sys; print('read', repr(sys.stdin.read()))"
    terminal.type(f"{sys.executable} -m msrun {script(tmp_path, text)} &\n".encode())
    terminal.until_raw(b"read ''")
    terminal.until_raw(b"1/1 workers finished")
    terminal.type(b"echo s'till' here\n")
    terminal.until_raw(b"still here")
    terminal.type(b"exit\n")
    terminal.until_closed()


@pytest.mark.usefixtures("at_shell")
def test_control_c_ends_a_job_that_was_stopped_before(terminal):
    command = f"{sys.executable} -m msrun --no-python sh -c 'echo up $$; exec sleep 600'\n"
    terminal.type(command.encode())
    terminal.until_raw(b"1/1 after")
    terminal.until_raw(b"\r\nup ")
    pid = int(re.findall(rb"up (\d+)\r\n", terminal.raw)[-1])
    terminal.type(b"\x1a")
    terminal.until_raw(b"Stopped")
    until(lambda: process.state(pid) == "T", "for the worker to stop")
    terminal.type(b"fg\n")
    until(lambda: process.state(pid) != "T", "for the worker to go on")
    terminal.type(b"\x03")
    terminal.until_raw(b"error: stopped by SIGINT")
    terminal.type(b"exit\n")
    terminal.until_closed()


def test_without_a_shell_nothing_is_stopped(at_terminal, terminal):
    """A process group that no shell controls cannot be stopped: the job goes on."""
    job = at_terminal(*shell("echo up; read go; echo went $go"))
    terminal.until_raw(b"up\r\n")
    os.kill(job.pid, signal.SIGTSTP)
    terminal.type(b"on\n")
    terminal.until_raw(b"went on")
    terminal.until_closed()

    assert job.wait() == 0
