"""How the workers of one job divide their work: the mesh of `--parallel` over their number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from msrun.cli.options.settings import Given
from msrun.errors import UsageError

if TYPE_CHECKING:
    from msrun.parallel.config import ParallelConfig
    from msrun.parallel.notation.mesh_layout import MeshLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallel:
    """How the workers of one job divide their work.

    Args:
        config: As it was given.
        layout: The mesh over all of them, None while their number is unknown.
        text: The configuration or its file, as it was given.
    """

    config: ParallelConfig
    layout: MeshLayout | None
    text: str

    def translations(self) -> list[tuple[str, str]]:
        """Return MindSpore's words in the configuration, each with ours."""
        from msrun.cli.options.parallel import translations

        return translations(self.text)

    def render(self) -> str:
        """Return the configuration as a worker reads it."""
        from msrun.parallel.config_file import render_config

        return render_config(self.config)


def fit_parallel(given: Given[ParallelConfig] | None, world_size: int | None) -> Parallel | None:
    """Return what `given` makes of `world_size` workers; None when nothing is given.

    Without a number, or with `mesh: auto`, the mesh is not known before the job forms.

    Raises:
        UsageError: It does not fit them.
    """
    if given is None:
        return None
    if world_size is None:
        return Parallel(config=given.value, layout=None, text=given.text)
    from msrun.parallel.layout import check_world

    try:
        layout = check_world(given.value, world_size)
    except UsageError as error:
        raise UsageError(f"{given.cite()}: {error.message}", hint=error.hint) from None
    return Parallel(config=given.value, layout=layout, text=given.text)
