"""Plans as files: a later run starts with the schedules that an earlier one found."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from lightning_deepcompile.plan.costs import schedule_from_dict
from lightning_deepcompile.program.schedule import Schedule, ScheduleError, check_schedule

__all__ = ["PLAN_VERSION", "PlanFileError", "Setting", "read_plan", "write_plan"]

PLAN_VERSION = 1


class PlanFileError(ValueError):
    """A plan that cannot be read, or that was made for something else."""


@dataclass(frozen=True)
class Setting:
    """What a plan depends on besides the programs.

    Args:
        world_size: Number of ranks.
        stage: ZeRO stage.
        device_type: ``"cuda"`` or ``"cpu"``.
    """

    world_size: int
    stage: int
    device_type: str


def write_plan(schedules: Sequence[Schedule], setting: Setting) -> str:
    """A plan as text that `read_plan` reads.

    Args:
        schedules: The schedules, each with its content key.
        setting: What they were made for.
    """
    programs = {schedule.content: asdict(schedule) for schedule in schedules}
    return json.dumps({"version": PLAN_VERSION, "setting": asdict(setting), "programs": programs}, indent=1)


def read_plan(text: str, setting: Setting) -> dict[str, Schedule]:
    """Reads a plan and makes sure that it is for `setting`.

    Args:
        text: What `write_plan` returned.
        setting: What the plan is wanted for.

    Returns:
        Schedules by content key of the program.

    Raises:
        PlanFileError: If the text is no plan, is damaged, is of another version or for another setting.
    """
    try:
        data = json.loads(text)
    except ValueError as error:
        raise PlanFileError(f"it is no JSON ({error})") from error
    if not isinstance(data, Mapping) or not {"version", "setting", "programs"} <= data.keys():
        raise PlanFileError("it has no `version`, `setting` and `programs`")
    if data["version"] != PLAN_VERSION:
        raise PlanFileError(f"it has version {data['version']!r}, and this release reads version {PLAN_VERSION}")
    wanted = asdict(setting)
    if data["setting"] != wanted:
        raise PlanFileError(f"it was made for {data['setting']}, and this run has {wanted}")
    try:
        plan = {key: schedule_from_dict(one) for key, one in data["programs"].items()}
        for key, schedule in plan.items():
            if schedule.content != key:
                raise PlanFileError(f"the program {key!r} calls itself {schedule.content!r}")
            check_schedule(schedule)
    except (AttributeError, KeyError, TypeError, ScheduleError) as error:
        raise PlanFileError(f"it is damaged ({type(error).__name__}: {error})") from error
    return plan
