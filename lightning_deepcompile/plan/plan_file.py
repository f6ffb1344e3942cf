"""Plans as files: a later run starts with the schedules, and the locations of states, of an earlier one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
from typing import Any

from lightning_deepcompile.plan.offload import StatePlaces
from lightning_deepcompile.plan.records import RecordError, kind_of, parse, read_record
from lightning_deepcompile.plan.settings import Rounding
from lightning_deepcompile.plan.tracing import Tracing
from lightning_deepcompile.program.schedule import Schedule, ScheduleError, check_schedule

PLAN_VERSION = 7
_AS_WRITTEN = Tracing()


class PlanFileError(ValueError):
    """A plan that cannot be read, or that was made for something else."""


class NoPlanError(PlanFileError):
    """A file of another kind."""


@dataclass(frozen=True)
class Setting:
    """The settings that a plan depends on, besides the programs.

    Args:
        world_size: Number of ranks.
        stage: ZeRO stage.
        device_type: ``"cuda"`` or ``"cpu"``.
        memory_budget: The user's, in any of its forms.
        rounding: Whether last bits may change.
    """

    world_size: int
    stage: int
    device_type: str
    memory_budget: int | float | str | None = None
    rounding: Rounding = "same"


@dataclass(frozen=True)
class Batches:
    """The batches of all ranks that a plan was made for; zeros if none was measured.

    Args:
        fewest: Elements of the smallest measured one.
        most: Elements of the largest measured one.
        largest: Elements of the largest one so far.
        longest: The longest dimension so far.
    """

    fewest: int = 0
    most: int = 0
    largest: int = 0
    longest: int = 0


_UNKNOWN = Batches()


@dataclass(frozen=True)
class Plan:
    """The contents of a plan file.

    Args:
        schedules: By content key of the program.
        states: The location of optimizer states; None if none may be offloaded.
        tracing: How the step is traced.
        batches: Those that it was made for.
    """

    schedules: Mapping[str, Schedule]
    states: StatePlaces | None
    tracing: Tracing
    batches: Batches


def write_plan(
    schedules: Sequence[Schedule],
    setting: Setting,
    states: StatePlaces | None = None,
    tracing: Tracing = _AS_WRITTEN,
    batches: Batches = _UNKNOWN,
) -> str:
    """Returns a plan as text that `read_plan` reads.

    Args:
        schedules: The schedules, each with its content key.
        setting: What they were made for.
        states: The location of optimizer states; None if none may be offloaded.
        tracing: How the step is traced.
        batches: Those that they were made for.
    """
    data = {
        "version": PLAN_VERSION,
        "setting": asdict(setting),
        "states": None if states is None else asdict(states),
        "tracing": asdict(tracing),
        "batches": asdict(batches),
        "programs": {schedule.content: asdict(schedule) for schedule in schedules},
    }
    return json.dumps(data, indent=1)


def read_plan(text: str, setting: Setting) -> Plan:
    """Reads a plan and checks that it is for `setting`.

    Args:
        text: What `write_plan` returned.
        setting: The setting of this run.

    Raises:
        PlanFileError: If the text is no plan, is damaged, is of another version or for another setting.
    """
    data = _parse(text)
    wanted = asdict(setting)
    if data["setting"] != wanted:
        raise PlanFileError(f"it was made for {data['setting']}, and this run has {wanted}")
    try:
        schedules = read_record(dict[str, Schedule], data["programs"], "programs")
        for key, schedule in schedules.items():
            if schedule.content != key:
                raise PlanFileError(f"the program {key!r} contains the name {schedule.content!r}")
            check_schedule(schedule)
        states = None if data["states"] is None else read_record(StatePlaces, data["states"], "states")
        if states is not None and (states.away < 0 or states.slots < 1):
            raise PlanFileError(f"it has optimizer states in {states}")
        tracing = read_record(Tracing, data["tracing"], "tracing")
        if min(tracing.uncheckpointed, tracing.chunked_losses, tracing.chunked_mlps) < 0:
            raise PlanFileError(f"it has a step traced by {tracing}")
        batches = read_record(Batches, data["batches"], "batches")
        if min(astuple(batches)) < 0:
            raise PlanFileError(f"it was made for {batches}")
    except KeyError as error:
        raise PlanFileError(f"it is damaged (there is no {error})") from error
    except (RecordError, ScheduleError) as error:
        raise PlanFileError(f"it is damaged ({error})") from error
    return Plan(schedules, states, tracing, batches)


def read_setting(text: str) -> Setting:
    """Reads the setting that a plan was made for.

    Raises:
        PlanFileError: If the text is no plan, is damaged, or is of another version.
    """
    try:
        return read_record(Setting, _parse(text)["setting"], "setting")
    except RecordError as error:
        raise PlanFileError(f"it is damaged ({error})") from error


def _parse(text: str) -> Mapping[str, Any]:
    try:
        data = parse(text)
    except RecordError as error:
        raise PlanFileError(f"it is {error}") from error
    if kind_of(data) == "a profile":
        raise NoPlanError("it is a profile: `python -m lightning_deepcompile simulate` and `report` read those")
    if not isinstance(data, Mapping) or not {"version", "setting", "programs"} <= data.keys():
        raise PlanFileError("it has no `version`, `setting` and `programs`")
    if data["version"] != PLAN_VERSION:
        raise PlanFileError(f"it has version {data['version']!r}, and this release reads version {PLAN_VERSION}")
    return data
