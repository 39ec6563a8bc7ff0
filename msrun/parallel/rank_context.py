"""One rank and its position on the mesh.

The features of the runtime take a `RankContext` and the configuration instead of the `Runtime`, so
that none of them depends on the others, and a test can make a context without `msrun.init`.  With
`mesh: auto` the first model decides the mesh: until then there is only a `Rank`.

Every rank imports this module, so its values are structs of msgspec: Python takes ten times as long
to make a dataclass.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence

import msgspec
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from msrun.errors import ConfigError, ModelError
from msrun.parallel import torch_compat
from msrun.parallel.config import ParallelConfig
from msrun.parallel.layout import resolve, root_axes, tokens_as_data
from msrun.parallel.notation.mesh_layout import EXPERT_AXIS, MeshLayout
from msrun.parallel.settings.plan_rules import CONTEXT_AXIS


class EpochEnd(msgspec.Struct, frozen=True):
    """The last batch of the loader in use, which is known before the first.

    Attributes:
        full: Samples of a rank in the other batches.
        least: Fewest samples of a rank in the last.
        most: Most samples of a rank in the last.
    """

    full: int
    least: int
    most: int

    @classmethod
    def divided(cls, samples: int, ranks: int, *, full: int) -> EpochEnd:
        """Return the last batch of so many `samples` of all `ranks`."""
        least, extra = divmod(samples, ranks)
        return cls(full=full, least=least, most=least + (extra > 0))


class LoaderUse(msgspec.Struct, eq=False):
    """One loop over a loader; others may run inside of it, such as an evaluation.

    Attributes:
        value: Samples of this rank's batch, times the number of ranks, divided by the samples of
            all ranks; 1 if all ranks have equally many.
        samples: Of this rank's batch; 0 before the first.
        tensors: Of this rank's batch, for as long as the script keeps them.
        is_due: Whether the last batch is uneven, and nothing has read the weight yet.
        end: Last batch.
        digest: Of the global batches so far, where all ranks read a whole stream.
    """

    value: float = 1.0
    samples: int = 0
    digest: int = 0
    tensors: Sequence[weakref.ref[Tensor]] = ()
    is_due: bool = False
    end: EpochEnd | None = None


class BatchWeight(msgspec.Struct, eq=False):
    """Weight of this rank's current batch in a mean over the job; shared by loader and step.

    Attributes:
        parts: Micro-batches of the running step; 1 outside of one.
        is_whole: Whether this rank computes the batch of all ranks, as `verify` does.
        scale: Factor of the gradients of the last step, once the terms of its loss were counted.
        uses: Loops over loaders that have not ended, that of the latest batch last.
    """

    parts: int = 1
    is_whole: bool = False
    scale: float = 1.0
    uses: list[LoaderUse] = msgspec.field(default_factory=list)

    @property
    def current(self) -> LoaderUse:
        """The loop whose batch is in use; with weight 1 without a loader."""
        return self.uses[-1] if self.uses else LoaderUse()

    @property
    def value(self) -> float:
        """Weight of the batch in use."""
        return self.current.value

    @property
    def end(self) -> EpochEnd | None:
        """Last batch of the loader in use; None without one."""
        return self.current.end

    def latest(self, use: LoaderUse) -> None:
        """Let the batch in use be that of `use`."""
        self.left(use)
        self.uses.append(use)

    def left(self, use: LoaderUse) -> None:
        """Note that a loop ended; the batch of the one around it is in use again."""
        if use in self.uses:
            self.uses.remove(use)

    def choose(self, tensors: Iterable[Tensor]) -> None:
        """Let the batch in use be that of which a step got some tensor.

        A script may hold two iterators, and train on the batch of the one that it asked first.
        """
        given = {id(tensor) for tensor in tensors} if len(self.uses) > 1 else set()
        for use in [*self.uses] if given else ():
            if any(id(reference()) in given for reference in use.tensors):
                self.latest(use)

    def read(self) -> float:
        """Return the weight to somebody who multiplies the loss by it."""
        self.current.is_due = False
        return self.value

    def check(self) -> None:
        """Refuse gradients of a plain loop that weights unequal parts of a batch equally.

        Raises:
            ModelError: Nobody has read the weight since the loader began.
        """
        if self.current.is_due:
            raise ModelError(
                "the last batch of rt.loader has unlike numbers of samples on the ranks, and this "
                "loop takes the mean of ranks",
                hint="multiply the loss by rt.batch_weight, or choose rt.step or drop_last=True",
            )


class Rank(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One rank whose mesh is not known yet, since `mesh: auto` chooses it with the first model.

    Attributes:
        rank: Global rank, 0 to `world_size` - 1.
        world_size: Ranks in the job.
        device: Device of this rank.
        batch: Weight of this rank's current batch.
    """

    rank: int
    world_size: int
    device: torch.device
    batch: BatchWeight

    def place(self, config: ParallelConfig) -> RankContext:
        """Make the process groups of the mesh of `config`; return this rank on that mesh.

        All ranks call it together.

        Raises:
            ConfigError: The mesh does not fit the number of ranks.
        """
        configured = resolve(config, self.world_size)
        mesh = self._mesh(configured)
        layout = tokens_as_data(configured)
        sequence, images = None, None
        if layout is not configured and configured.images:
            images = ImageRanks(layout=configured, mesh=mesh)
            mesh = self._mesh(layout)
        elif layout is not configured:
            sequence = SequenceRanks(
                layout=configured,
                mesh=mesh,
                group=mesh.get_group(CONTEXT_AXIS),
                index=configured.coordinate(self.rank)[CONTEXT_AXIS],
            )
            mesh = self._mesh(layout)
        axes = root_axes(config, layout)
        root = msgspec.structs.replace(layout, axes=axes, ep=0)
        # Exact dropout and searched plans compute with one random stream on all ranks, unless the
        # runtime is to run the plan.
        is_common = config.dropout == "exact" or (config.mode == "auto" and not config.decided)
        return RankContext(
            rank=self.rank,
            world_size=self.world_size,
            device=self.device,
            batch=self.batch,
            layout=layout,
            mesh=mesh,
            root_mesh=mesh if axes == layout.axes else self._mesh(root),
            stream=0 if is_common else (configured if images else layout).stream(self.rank),
            sequence=sequence,
            images=images,
        )

    def _mesh(self, layout: MeshLayout) -> DeviceMesh:
        """Return `layout` with process groups; all ranks call it together."""
        names, sizes = tuple(layout.axes), tuple(layout.axes.values())
        if not layout.ranks:
            return init_device_mesh(self.device.type, sizes, mesh_dim_names=names)
        groups = [
            torch_compat.ordered_group([*layout.groups(name)], f"mesh_{name}") for name in names
        ]
        ranks = torch.tensor(layout.ranks).view(sizes)
        own = groups if len(groups) > 1 else groups[0]
        return DeviceMesh.from_group(own, self.device.type, ranks, mesh_dim_names=names)

    def print(self, text: str) -> None:
        """Print on rank 0 alone."""
        if self.rank == 0:
            print(text, flush=True)  # noqa: T201 - a person waits for it

    def broadcast(self, content: bytes) -> bytes:
        """Return the `content` of rank 0 on every rank; all ranks call it together."""
        if self.world_size == 1:
            return content
        # The other ranks cannot know the size, and a broadcast needs equal ones.
        size = torch.tensor([len(content)], device=self.device)
        dist.broadcast(size, src=0)
        sent = torch.zeros(int(size), dtype=torch.uint8, device=self.device)
        if self.rank == 0:
            sent.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        dist.broadcast(sent, src=0)
        return bytes(sent.tolist())


class SequenceRanks(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The ranks that share each sequence, which the runtime counts as data-parallel ranks.

    Attributes:
        layout: The mesh as it is configured.
        mesh: That mesh with its process groups.
        group: The ranks of the axis `cp`.
        index: Of this rank among them.
    """

    layout: MeshLayout
    mesh: DeviceMesh
    group: dist.ProcessGroup
    index: int

    @property
    def size(self) -> int:
        """Number of these ranks."""
        return self.group.size()


class ImageRanks(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """The ranks that share each image, which the runtime counts as data-parallel ranks.

    They have equal samples, losses and random numbers.

    Attributes:
        layout: The mesh as it is configured.
        mesh: That mesh with its process groups.
    """

    layout: MeshLayout
    mesh: DeviceMesh


class RankContext(Rank, frozen=True, kw_only=True, eq=False):
    """One rank on its mesh, as `Rank.place` makes it.

    Attributes:
        layout: The mesh by arithmetic.
        mesh: The mesh with its process groups.
        root_mesh: The same mesh with axis `dp` split in two if ZeRO keeps several copies, or if
            its ranks share experts.
        stream: Number of this rank's random stream.  Stream 0 continues the numbers of rank 0, as
            one process would.
        sequence: Ranks of the axis `cp`, which `dp` of `layout` and `mesh` contains; None without.
        images: The mesh on which axes divide images, whose ranks `dp` contains; None without.
    """

    layout: MeshLayout
    mesh: DeviceMesh
    root_mesh: DeviceMesh
    stream: int
    sequence: SequenceRanks | None = None
    images: ImageRanks | None = None

    @property
    def configured(self) -> RankContext:
        """The same rank on the mesh as it is configured, on which `dp` divides samples alone."""
        inside = self.sequence or self.images
        if inside is None:
            return self
        return msgspec.structs.replace(
            self, layout=inside.layout, mesh=inside.mesh, sequence=None, images=None
        )

    @property
    def of_samples(self) -> RankContext:
        """The same rank on a mesh whose `dp` has ranks with other terms of the loss each.

        Ranks that share an image all have its whole loss.
        """
        return self.configured if self.images else self

    @property
    def coordinate(self) -> dict[str, int]:
        """Axis name -> this rank's index on it."""
        return self.layout.coordinate(self.rank)

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return the process group of this rank along `axis`.

        Raises:
            ConfigError: The mesh has no such axis.
        """
        if axis == EXPERT_AXIS and self.layout.ep:
            return self.root_mesh.get_group(axis)
        if axis not in self.layout.axes:
            raise ConfigError(f"axis {axis!r} is not in mesh ({', '.join(self.layout.axes)})")
        return self.mesh.get_group(axis)


def placed(rank: Rank, config: ParallelConfig) -> RankContext:
    """Return `rank` with its mesh.

    Raises:
        ConfigError: With `mesh: auto`, `Runtime.shard` was not called yet.
    """
    if not isinstance(rank, RankContext):
        resolve(config, rank.world_size)  # raises the ConfigError of `mesh: auto`
        raise TypeError("a rank whose mesh is known was never placed on it")
    return rank
