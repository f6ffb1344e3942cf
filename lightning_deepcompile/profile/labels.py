"""Names for what a profile has numbers for, taken from the programs."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_deepcompile.plan.costs import Labels
from lightning_deepcompile.program.program import LOCAL_ID, Program


def labels_of(programs: Iterable[Program]) -> Labels:
    """The blocks of parameters and of regions.

    Args:
        programs: Those that are profiled; all of one model.
    """
    parameters: dict[str, str] = {}
    regions: dict[str, str] = {}
    for program in programs:
        parameters |= {str(ds_id & LOCAL_ID): info.block for ds_id, info in program.params.items()}
        for name, region in program.regions.items():
            regions[f"{program.name}/{name}"] = ", ".join(region.info.blocks)
    return Labels(parameters, regions)
