"""The machines of the parameter servers on a virtual network, with real tensors and optimizers."""

import server_faults
import torch
from server_world import ServerWorld
from torch import nn
from torch.nn import functional

from msrun.cluster.servers.events import Rules
from msrun.parallel.servers.recipe import recipe_of
from msrun.parallel.servers.routing import (
    gradients_of,
    place_rows,
    places_by_server,
    split_gradients,
)
from msrun.parallel.servers.rows import ServerRows, WorkerPush, cut, join

BATCH = 12


class ClickModel(nn.Module):
    """Bags of items and two users, of which the table is used twice."""

    def __init__(self, mode="sum", *, sparse=False):
        super().__init__()
        self.items = nn.EmbeddingBag(40, 4, mode=mode, sparse=sparse, padding_idx=1)
        self.users = nn.Embedding(30, 4, sparse=sparse, padding_idx=2)
        self.out = nn.Linear(8, 1)

    def forward(self, items, offsets, users, friends):
        both = self.users(users) * self.users(friends)
        return self.out(torch.cat([self.items(items, offsets), both], 1))[:, 0]


def batch(clock, part=0, parts=1):
    """Return some samples of a step: bags with duplicates and padding, and some empty ones."""
    draw = torch.Generator().manual_seed(clock)
    sizes = torch.randint(0, 5, (BATCH,), generator=draw)
    bags = [torch.randint(0, 40, (int(size),), generator=draw) for size in sizes]
    bags = [torch.cat([bag, bag[:1]]) for bag in bags]
    users, friends = torch.randint(0, 30, (2, BATCH), generator=draw)
    labels = torch.randint(0, 2, (BATCH,), generator=draw).float()
    chosen = torch.arange(BATCH).tensor_split(parts)[part].tolist()
    mine = [bags[each] for each in chosen]
    lengths = torch.tensor([0, *map(len, mine)])
    items = torch.cat([torch.zeros(0, dtype=torch.long), *mine])
    inputs = (items, lengths.cumsum(0)[:-1], users[chosen], friends[chosen])
    return inputs, labels[chosen]


def loss_of(model, inputs, labels):
    """Return the share of these samples in the mean loss of the whole batch."""
    if not len(labels):
        return sum(weight.sum() * 0 for weight in model.out.parameters())
    logits = model(*inputs)
    return functional.binary_cross_entropy_with_logits(logits, labels, reduction="sum") / BATCH


class Case:
    """A model, its optimizer, and the training of both in one process."""

    def __init__(self, optimizer, *, mode="sum", sparse=False, tables_only=False, decay=1.0):
        torch.manual_seed(7)
        self.mode, self.sparse = mode, sparse
        model = self.build()
        if tables_only:
            model.out.requires_grad_(requires_grad=False)
        self.start = {name: each.detach().clone() for name, each in model.named_parameters()}
        self.trained = [name for name, each in model.named_parameters() if each.requires_grad]
        self.decay = decay
        built = optimizer(model)
        names = {each: name for name, each in model.named_parameters()}
        self.recipe = recipe_of(built, names)
        self.model, self.optimizer = model, built

    def build(self):
        return ClickModel(self.mode, sparse=self.sparse)

    def batch(self, clock, part=0, parts=1):
        """Return inputs and labels of some samples of a step."""
        return batch(clock, part, parts)

    def loss_of(self, model, inputs, labels):
        """Return the share of some samples in the mean loss of the whole batch."""
        return loss_of(model, inputs, labels)

    def looked_up(self, inputs):
        """Return the rows of each table that these inputs need; of others they need all."""
        items, _, users, friends = inputs
        return {"items.weight": items, "users.weight": torch.cat([users, friends])}

    def options(self, clock):
        """Return what a scheduler would have made of the learning rates."""
        return {
            name: options | {"lr": options["lr"] * self.decay**clock}
            for name, options in self.recipe.options.items()
        }

    def single(self, steps):
        """Train in one process; return the losses and the weights."""
        losses = []
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for clock in range(steps):
            for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * self.decay**clock
            loss = self.loss_of(self.model, *self.batch(clock))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses, {name: each.detach() for name, each in self.model.named_parameters()}


class TensorWorld(ServerWorld):
    """A world in which rows are tensors, and steps are an optimizer's."""

    def __init__(self, case, slices, **words):
        shapes = {name: case.start[name].shape for name in case.trained}
        tables = [(name, shapes[name][0], min(slices, shapes[name][0])) for name in shapes]
        super().__init__(tables=tables, **words)
        self.case = case
        self.counts = {table.name: table.slices for table in self.tables}
        self.losses = {}
        self.weights = {}
        # How many steps of the slowest worker each pull's rows lacked.
        self.lags = []

    def batch(self, rank, clock):
        return self.case.batch(clock, rank, len(self.workers))

    def used(self, rank, clock):
        """Return the rows of each table that a worker needs."""
        known = self.case.looked_up(self.batch(rank, clock)[0])
        whole = {name: torch.arange(len(self.case.start[name])) for name in self.counts}
        return {name: known.get(name, whole[name]).unique() for name in self.counts}

    def ask(self, rank, clock):
        return self.used(rank, clock)

    def part(self, payload, ownership, rank):
        gradients, options = payload
        mine = {}
        for name, each in gradients.items():
            found = split_gradients(each, ownership.owners[name])
            if rank in found:
                mine[name] = found[rank]
        return WorkerPush(gradients=mine, options=options)

    def compute(self, rank, me):
        clock, model = me.state.clock, me.values
        loss = self.case.loss_of(model, *self.batch(rank, clock))
        loss.backward()
        self.losses[clock, rank] = loss.item()
        weights = dict(model.named_parameters())
        used = self.used(rank, clock)
        found = {name: gradients_of(weights[name], used[name]) for name in self.counts}
        return {k: v for k, v in found.items() if v is not None}, self.case.options(clock)

    def _DeliverRows(self, actor, action):  # noqa: N802
        """Fill a model whose other rows are no numbers."""
        me, rank = self.alive[actor], actor[1]
        model = self.case.build()
        weights = dict(model.named_parameters())
        for name, start in self.case.start.items():
            weights[name].data = start.clone()
            weights[name].requires_grad_(name in self.counts)
        ids = self.used(rank, action.clock)
        owners = me.state.ownership.owners
        for name in self.counts:
            weights[name].data.fill_(float("nan"))
            rows = {each: part[name] for each, part in action.rows.items() if name in part}
            place_rows(weights[name], ids[name], rows, owners[name])
        me.values = model
        me.computing += 1
        self.driver.computing(rank, self.lives[actor], me.computing)

    def _SendRows(self, actor, action):  # noqa: N802
        owners = self.machine(actor).ownership.owners
        rows = {}
        for name, ids in (action.ask or {}).items():
            places = places_by_server(ids, owners[name]).get(actor[1])
            if places is not None:
                rows[name] = self.alive[actor].rows.read(name, ids[places])
        self.lags.append(action.message.asked - action.message.oldest)
        self._post(("worker", action.message.worker), action.message, rows)

    def _ApplyStep(self, actor, action):  # noqa: N802
        self.alive[actor].rows.apply([push for _, push in action.pushes])

    def _LoadSnapshot(self, actor, action):  # noqa: N802
        self._replace(actor, self.disks[actor[1]].rows[action.epoch, action.version])

    def _replace(self, actor, contents):
        rows = self.alive[actor].rows = ServerRows(self.counts, self.case.recipe)
        rows.replace(dict(contents))

    def _AssembleSlices(self, actor, action):  # noqa: N802
        life, ownership = self.alive[actor], action.ownership
        disk = self.disks[actor[1]].rows.get((action.base, ownership.version), {})
        contents = {piece: disk[piece] for piece in action.own} | life.kept
        if action.base is None:
            for name, count in self.counts.items():
                contents |= cut(self.case.start[name], name, count)
        owned = ownership.slices_of(actor[1])
        self._replace(actor, {piece: contents[piece] for piece in owned})
        life.kept = {}

    def _SaveSnapshot(self, actor, action):  # noqa: N802
        snapshot, contents = action.snapshot, self.alive[actor].rows.contents()
        which = (snapshot.epoch, snapshot.version)
        self.driver.saving(actor[1], self.lives[actor], (which, snapshot, contents))

    def rest(self):
        ownership = self.decision.ownership
        waiting = [rank for rank in ownership.workers if rank not in self.left]
        self.require(not waiting, "S6 workers wait for ever", waiting)
        found = {}
        for rank in ownership.servers:
            disk = self.disks[rank]
            found |= disk.rows[max(each for each in disk.snapshots if each[0] == ownership.epoch)]
        self.weights = {name: join(found, name, count) for name, count in self.counts.items()}


class TensorChaos(server_faults.ServerChaos):
    """Trains a case on servers; with `odds` under faults, else in peace."""

    def __init__(self, case, *, servers, workers, steps, seed=0, staleness=0, **odds):
        peace = {"losses": 0.0, "doubles": 0.0, "delay": 0.01, "kills": 0.0, "scales": 0.0}
        peace |= {"pace": 0.1, "save_time": 0.01, "victims": "any"}
        super().__init__(seed, **peace | odds)
        self.heap, self.servers_most = [], servers
        self.world = TensorWorld(
            case,
            5,
            rules=Rules(staleness=staleness, every=3),
            servers=range(servers),
            workers=range(workers),
            lengths=dict.fromkeys(range(workers), steps),
            driver=self,
        )
        for actor in self._all():
            self.soon(0.1, "start", *actor)
        for rank in range(servers):
            self.soon(0.1, "start", "server", rank)
        self.at(0.5, "disturb")
        self.is_peaceful = not odds

    @property
    def is_calm(self):
        return self.is_peaceful or super().is_calm

    def on_disturb(self):
        if self.is_calm:
            super().on_disturb()
            return
        if self.random.random() < self.kills:
            self._kill()
        if self.random.random() < self.scales:
            servers = sorted(self.random.sample(range(4), self.random.randint(1, 4)))
            self.tell("scale", tuple(servers), self.world.workers)
            for rank in servers:
                self.soon(2.0, "start", "server", rank)
        self.soon(0.4, "disturb")

    def tell(self, verb, *words):
        self.world.do(self.now, verb, *words)
