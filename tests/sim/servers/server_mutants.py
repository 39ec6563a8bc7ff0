"""Parameter servers with one rule left out."""

import msgspec
from server_world import ServersBuild

from msrun.cluster.servers.coordinator import CoordinatorState
from msrun.cluster.servers.messages import Adopted, Frozen, Measure, WorkerStep
from msrun.cluster.servers.server import ServerPhase, ServerState
from msrun.cluster.servers.worker import WorkerState


class AppliesTwice(ServerState):
    """Counts a push again that comes again."""

    def _is_next(self, worker, clock):
        return clock <= self.clocks[worker]


class AcceptsStaleEpochs(ServerState):
    """Accepts what was meant for the owners of another epoch."""

    def _hear(self, message, payload):
        super()._hear(msgspec.structs.replace(message, epoch=self.epoch), payload)


class AcksBeforeDurable(ServerState):
    """Says of a push in memory that it is on disk."""

    def _header(self, worker, kind, **more):
        header = super()._header(worker, kind, **more)
        return msgspec.structs.replace(header, durable=header.clock)


class OneTooStale(ServerState):
    """Lets workers be one step further ahead than the user said."""

    def _may_serve(self, pull):
        if self.rules.is_sync:
            return super()._may_serve(pull)
        return pull.clock - self._oldest() <= self.rules.staleness + 1


class ServesAnyStep(ServerState):
    """Answers a pull as soon as the worker's own pushes are here."""

    def _may_serve(self, pull):
        if self.rules.is_sync:
            return super()._may_serve(pull)
        return self.clocks[pull.worker] >= pull.clock


class LosesRows(ServerState):
    """Takes the slices of one earlier owner for those of all."""

    def _take(self, message, payload):
        if message.server in self._missing:
            self._missing = {message.server: message.slices}
        super()._take(message, payload)


class MixesCopies(ServerState):
    """Takes copies as they come, of whatever versions."""

    def _take_copies(self, message, payload):
        if message.now and self.ownership:
            copies = self._copies.items()
            version = message.now.version
            alike = {
                peer: (slices, now and msgspec.structs.replace(now, version=version))
                for peer, (slices, now) in copies
            }
            self._copies = alike
        super()._take_copies(message, payload)


class CopiesAnything(ServerState):
    """Lends copies of what it has not got back itself."""

    def _copy(self, asked):
        phase, self.phase = self.phase, ServerPhase.SERVING
        super()._copy(asked)
        self.phase = phase


class AddsAsTheyCome(ServerState):
    """Adds gradients in the order in which they come."""

    def _accept(self, worker, clock, payload):
        came = self.__dict__.setdefault("came", {})
        came[worker, clock] = len(came)
        super()._accept(worker, clock, payload)

    def _apply(self, pushes):
        came = self.__dict__.get("came", {})
        if self.rules.is_sync:
            pushes = tuple(sorted(pushes, key=lambda push: came[push[0], self.version]))
        super()._apply(pushes)


class DoesNotSettle(ServerState):
    """Does a step when it can, and not when all servers can."""

    def _is_settled(self, _workers, _version):
        return True


class DropsAllButOne(ServerState):
    """Keeps only its latest snapshot, whatever other servers have."""

    def _drop(self):
        self._safe = self.version
        super()._drop()


class ObeysLateOrders(ServerState):
    """Obeys orders that were overtaken by others."""

    def _receive(self, message, payload, now):
        self._order = (-1, -1)
        super()._receive(message, payload, now)


class ForgetsWhoLeft(ServerState):
    """Lets a worker go that no snapshot says has left."""

    def _header(self, worker, kind, **more):
        header = super()._header(worker, kind, **more)
        return msgspec.structs.replace(header, has_left=header.is_done)


class OpensAtOnce(CoordinatorState):
    """Has workers served when the first server has its rows."""

    def _note(self, message):
        super()._note(message)
        if isinstance(message, Adopted) and self.ownership:
            self._is_complete = self._is_complete or message.epoch == self.ownership.epoch


class DecidesByOldReports(CoordinatorState):
    """Takes what a server was for what it is."""

    def _is_answer(self, _server, _count):
        return True

    def _is_ordered(self, _goal):
        return True

    def _hear(self, message):
        if isinstance(message, Frozen):
            message = msgspec.structs.replace(message, term=self.term)
        super()._hear(message)


class KeepsAnotherCurve(WorkerState):
    """Sends gradients again that it computed beside other workers."""

    def _is_ahead(self, _version):
        return False


class ForgetsPushes(WorkerState):
    """Takes an acknowledged push for durable."""

    @property
    def _safe(self):
        return min((view.clock for view in self._views.values()), default=0)


class NeverAsksAgain(WorkerState):
    """Does not find out that a server was killed after it had answered."""

    def _wanted(self, server, view, now):
        wanted = super()._wanted(server, view, now)
        is_hello = wanted is not None and not isinstance(wanted, WorkerStep)
        return None if is_hello and server not in self._welcomes and self._is_under_way else wanted

    @property
    def _is_under_way(self):
        return self.phase.value in {"pulling", "pushing"}


class NormsOfSome(ServerState):
    """Takes the norm of the gradients that are here."""

    def _unmeasured(self, _clock, _given):
        return []


class MeasuresOnce(WorkerState):
    """Does not measure again for a server that was killed."""

    def _lacking(self, view):
        lacking = super()._lacking(view)
        is_measure = isinstance(lacking, Measure)
        return None if is_measure and self.phase.value != "measuring" else lacking


class KeepsOldNorms(WorkerState):
    """Clips by norms of the gradients of workers that are not there any more."""

    def _has_norms_since(self, _clock):
        return False


# Name -> what is wrong, and by how much the dice are loaded against it.  No name, nothing wrong.
SERVER_MUTANTS = {
    "": (ServersBuild(), {}),
    "twice": (ServersBuild(server=AppliesTwice), {"doubles": 0.3}),
    "staleepoch": (ServersBuild(server=AcceptsStaleEpochs), {"scales": 0.05, "delay": 3.0}),
    "ackbeforedurable": (ServersBuild(server=AcksBeforeDurable), {}),
    "onetoostale": (ServersBuild(server=OneTooStale), {}),
    # Of killed workers only the wire tells which pushes the rows hold.
    "servesanystep": (ServersBuild(server=ServesAnyStep), {"kills": 0.3, "victims": "worker"}),
    "losesrows": (ServersBuild(server=LosesRows), {"scales": 0.05}),
    "asarrived": (ServersBuild(server=AddsAsTheyCome), {"delay": 0.5}),
    "doesnotsettle": (ServersBuild(server=DoesNotSettle), {"kills": 0.2, "victims": "worker"}),
    "dropsallbutone": (ServersBuild(server=DropsAllButOne), {"kills": 0.2, "victims": "node"}),
    "lateorders": (
        ServersBuild(server=ObeysLateOrders),
        {
            "scales": 0.2,
            "delay": 3.0,
            "doubles": 0.3,
            "kills": 0.2,
            "victims": "server",
            "save_time": 3.0,
        },
    ),
    "forgetswholeft": (ServersBuild(server=ForgetsWhoLeft), {"kills": 0.2}),
    "opensatonce": (ServersBuild(coordinator=OpensAtOnce), {"scales": 0.1, "kills": 0.2}),
    "oldreports": (
        ServersBuild(coordinator=DecidesByOldReports),
        {"scales": 0.2, "kills": 0.1, "delay": 3.0, "doubles": 0.3},
    ),
    "othercurve": (
        ServersBuild(worker=KeepsAnotherCurve),
        {"scales": 0.1, "kills": 0.2, "victims": "node"},
    ),
    "forgetspushes": (ServersBuild(worker=ForgetsPushes), {}),
    "neverasksagain": (ServersBuild(worker=NeverAsksAgain), {"kills": 0.2, "victims": "server"}),
    "mixescopies": (
        ServersBuild(server=MixesCopies),
        {"replicas": 1, "kills": 0.1, "victims": "server"},
    ),
    "copiesanything": (
        ServersBuild(server=CopiesAnything),
        {"replicas": 1, "kills": 0.3, "victims": "server"},
    ),
    "normsofsome": (ServersBuild(server=NormsOfSome), {"rounds": 1}),
    "measuresonce": (
        ServersBuild(worker=MeasuresOnce),
        {"rounds": 1, "kills": 0.2, "victims": "server"},
    ),
    "oldnorms": (ServersBuild(worker=KeepsOldNorms), {"rounds": 1, "scales": 0.1}),
    "nolog": (ServersBuild(log=False), {"kills": 0.1, "victims": "head"}),
}
