"""A node in a pod waits until the pod of the scheduler is found by its name."""

from msrun.identity import step_options

NAME = "train-0.train"
OLD, NEW = "10.0.0.7", "10.0.0.8"


class Answers(dict):
    """A name server, whose answer for `NAME` changes with each question until the last."""

    def __init__(self, *answers):
        super().__init__()
        self.answers = list(answers)

    def get(self, name, default=()):
        if name != NAME:
            return default
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]


def pod(index):
    given = {
        "JOB_COMPLETION_INDEX": index,
        "MSRUN_POD_JOB": "train",
        "MSRUN_POD_NODES": "2",
        "MSRUN_POD_SCHEDULER": f"{NAME}:29500",
        "MSRUN_POD_ADDRESS": "10.0.0.1",
    }
    return {**given, **step_options(given)}


def test_an_address_of_an_earlier_pod_is_not_taken(msrun, system):
    """A name server that keeps what it knew gives the address of a pod that is gone."""
    system.names, system.silent = Answers((), (OLD,), (OLD,), (NEW,)), (OLD,)
    outcome = msrun("train.py", **pod("1"))

    assert (outcome.code, outcome.job.listen_host) == (0, NEW)
    assert len(system.paused) == 3
    assert outcome.err.count(f"waiting for the pod of the scheduler, {NAME}") == 1


def test_a_pod_that_is_found_at_once_is_not_waited_for(msrun, system):
    system.names = Answers((NEW,))
    outcome = msrun("train.py", **pod("1"))

    assert (outcome.code, outcome.err, system.paused) == (0, "", [])


def test_the_pod_of_the_scheduler_waits_for_nobody(msrun, system):
    system.names = Answers(())
    outcome = msrun("train.py", **pod("0"))

    assert (outcome.code, outcome.job.master_addr, system.paused) == (0, "10.0.0.1", [])


def test_what_is_said_when_nobody_answers(msrun, system):
    for names, silent, why in (
        (Answers(()), (), "has had no address for 3s"),
        (Answers((OLD,)), (OLD,), f"has not listened at {OLD} port 29500 for 3s"),
    ):
        system.names, system.silent = names, silent
        outcome = msrun("--join-timeout 3s train.py", **pod("1"))

        assert outcome.code == 121
        assert f"error: the pod of the scheduler, {NAME}, {why}" in outcome.err
