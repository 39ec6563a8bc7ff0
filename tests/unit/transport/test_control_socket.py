"""Those who control a job, at the scheduler's socket: let in by a key of their own."""

import threading
from types import SimpleNamespace

import pytest
import zmq
from ports import free_port

from msrun.cluster.wire import codec, control_messages
from msrun.cluster.wire.control_messages import Answer, Done, GetStatus, Question
from msrun.cluster.wire.messages import Drained, Envelope
from msrun.transport.keys import key_pair
from msrun.transport.loop import new_context
from msrun.transport.sockets import (
    AgentSocket,
    ConnectionState,
    ControlSocket,
    SchedulerSocket,
    control_keys,
    endpoint,
    listen,
)

SECRET = bytes(range(32))
ENVELOPE = Envelope(job_id="j", node_id="a", incarnation=1, generation=0, body=Drained())
QUESTION = control_messages.encode(Question(question="j", request=GetStatus()))
ANSWER = control_messages.encode(Answer(answer=Done(sentence="yes")))
PATIENCE = 10.0


class Scheduler:
    """A scheduler's socket that answers every question, in a thread of its own."""

    def __init__(self, secret, port=0):
        self._context = new_context()
        listening = listen("127.0.0.1", port)
        self.port = listening.getsockname()[1]
        self._socket = SchedulerSocket(self._context, listening, secret)
        self.envelopes = []
        self.questions = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self):
        poller = zmq.Poller()
        poller.register(self._socket.socket, zmq.POLLIN)
        if gate := self._socket.gate:
            poller.register(gate.socket, zmq.POLLIN)
        while not self._over.is_set():
            ready = dict(poller.poll(20))
            if gate and gate.socket in ready:
                gate.answer()
            self.envelopes += self._socket.receive()
            for route, frame in self._socket.asked():
                self.questions.append(frame)
                self._socket.answer(route, ANSWER)
        self._context.destroy(linger=0)

    def close(self):
        self._over.set()
        self._thread.join()


@pytest.fixture
def start():
    started = []

    def start_scheduler(secret=SECRET, **options):
        started.append(Scheduler(secret, **options))
        return started[-1]

    yield start_scheduler
    for scheduler in started:
        scheduler.close()


@pytest.fixture
def connect():
    context = new_context()
    kept = []  # a socket that is dropped before it is closed is a warning

    def connect_to(scheduler, keys, kind=ControlSocket):
        kept.append(kind(context, endpoint("127.0.0.1", scheduler.port), keys))
        return kept[-1]

    yield connect_to
    context.destroy(linger=0)


@pytest.mark.parametrize("secret", [SECRET, None], ids=["with a key", "insecure"])
def test_a_question_is_answered(start, connect, secret):
    scheduler = start(secret)
    keys = control_keys(secret) if secret else None

    assert connect(scheduler, keys).ask(QUESTION, PATIENCE) == ANSWER
    assert (scheduler.questions, scheduler.envelopes) == ([QUESTION], [])


def test_what_an_agent_says_with_the_key_of_control_is_only_a_question(start, connect):
    scheduler = start()
    frame = codec.encode(ENVELOPE)

    assert connect(scheduler, control_keys(SECRET)).ask(frame, PATIENCE) == ANSWER
    assert (scheduler.questions, scheduler.envelopes) == ([frame], [])


def test_a_question_with_the_key_of_an_agent_is_nothing(start, connect):
    scheduler = start()
    agent = connect(scheduler, SECRET, AgentSocket)
    agent.socket.send(QUESTION)
    agent.send(ENVELOPE)
    control = connect(scheduler, control_keys(SECRET))

    assert control.ask(QUESTION, PATIENCE) == ANSWER
    assert scheduler.questions == [QUESTION]
    assert not agent.socket.poll(50)


def test_another_jobs_key_is_refused_at_once(start, connect):
    scheduler = start()
    keys = control_keys(bytes(32))._replace(scheduler=control_keys(SECRET).scheduler)

    assert connect(scheduler, keys).ask(QUESTION, PATIENCE) is ConnectionState.REJECTED
    assert scheduler.questions == []


def test_a_handshake_that_fails_after_an_answer_is_no_other_key(start, connect):
    first = start(port=free_port())
    control = connect(first, control_keys(SECRET))
    assert control.ask(QUESTION, PATIENCE) == ANSWER
    first.close()
    start(bytes(32), port=first.port)  # fails every handshake, as a scheduler that ends may

    assert control.ask(QUESTION, 1.5) is None


def test_the_keys_of_control_are_not_those_of_an_agent():
    keys = control_keys(SECRET)

    assert keys.secret.encode() != key_pair(SECRET, "agent").secret
    assert zmq.curve_public(keys.secret.encode()) == keys.public.encode()
    assert keys.scheduler.encode() == key_pair(SECRET, "scheduler").public


def test_who_gets_no_answer_waits_no_longer_than_that(connect):
    listening = listen("127.0.0.1", 0)
    nobody = SimpleNamespace(port=listening.getsockname()[1])

    assert connect(nobody, control_keys(SECRET)).ask(QUESTION, 0.1) is None
    listening.close()
