"""Workers of MindSpore on several nodes meet at the scheduler of the node of rank 0."""

import sys
from pathlib import Path

import pytest
from mindspores import install_fake, real_python
from support import script, shell

pytestmark = pytest.mark.process

MEET = """
    import os, sys
    from mindspore.communication import init
    init()
    print("MET", os.environ["MS_NODE_ID"], os.environ["MS_SCHED_HOST"], flush=True)
    sys.exit(os.environ["MSRUN_GENERATION"] + os.environ["RANK"] == FAILS)
"""
LOG = "mindspore_scheduler.log"


def meet(folder, fails="", name="program.py"):
    return script(folder, MEET.replace("FAILS", repr(fails)), name)


@pytest.fixture
def mindspore(lab_folder):
    return install_fake(lab_folder / "packages")


def assert_all_met(nodes, address, each=2):
    assert [node.wait(90) for node in nodes] == [0] * len(nodes)
    logs = [nodes[rank // each].log(rank) for rank in range(each * len(nodes))]
    assert [log.splitlines()[-1] for log in logs] == [
        f"MET {rank} {address}" for rank in range(len(logs))
    ]


def test_three_nodes_meet(lab, form, mindspore):
    words = "--workers-per-node", 2, meet(lab.folder)

    nodes = form(lab.hosts, *words, env=mindspore)

    assert_all_met(nodes, lab.host("a").ipv4)
    assert [(node.logs / LOG).exists() for node in nodes] == [True, False, False]


def test_after_a_failure_they_meet_again(new_lab, form, mindspore):
    lab = new_lab("a", "b")
    words = "--workers-per-node", 2, "--max-restarts", 1, meet(lab.folder, "03")

    nodes = form(lab.hosts, *words, env=mindspore)

    assert_all_met(nodes, lab.host("a").ipv4)
    assert (nodes[0].logs / LOG).read_text().count("all 4 are here") == 2


def test_commands_meet_if_the_framework_is_named(new_lab, form, mindspore):
    lab = new_lab("a", "b")
    python = f"exec {sys.executable} {meet(lab.folder)}"

    nodes = form(lab.hosts, "--framework", "mindspore", *shell(python), env=mindspore)

    assert_all_met(nodes, lab.host("a").ipv4, each=1)


def test_a_program_that_does_not_show_it_is_told_how_to(new_lab, form, mindspore):
    lab = new_lab("a", "b")
    meet(lab.folder, name="meet.py")
    hidden = script(lab.folder, "import importlib; importlib.import_module('meet')")

    nodes = form(lab.hosts, hidden, env=mindspore)

    assert [node.wait(60) for node in nodes] == [2, 2]
    assert "MindSpore's init(): on several nodes its scheduler needs --framework mindspore" in (
        nodes[0].err
    )


@pytest.mark.slow
def test_real_mindspore_reduces_over_two_nodes(new_lab, form):
    reducing = """
        import numpy as np
        import mindspore
        from mindspore import Tensor, ops
        from mindspore.communication import get_rank, init
        mindspore.set_context(device_target="CPU")
        init()
        total = ops.AllReduce()(Tensor(np.array([get_rank() + 1.0], np.float32)))
        print("TOTAL", get_rank(), total.asnumpy()[0], flush=True)
    """
    python, env = real_python(), {"PYTHONPATH": str(Path(__file__).parents[2]), "GLOG_v": "3"}
    lab = new_lab("a", "b")

    nodes = form(lab.hosts, script(lab.folder, reducing), python=python, env=env)

    assert [node.wait(110) for node in nodes] == [0, 0]
    for rank, node in enumerate(nodes):
        assert f"TOTAL {rank} 3.0" in node.log(rank).splitlines()
