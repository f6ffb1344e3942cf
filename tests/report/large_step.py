"""A profile of many layers on GPUs, made up: what reports have to stay readable with."""

from __future__ import annotations

from lightning_deepcompile.plan.costs import Contention, Labels, Link, Profile, RegionCost, Resident
from lightning_deepcompile.program.schedule import Instruction, Schedule

MIB = 2**20


def large_profile(layers: int = 64, micro_batches: int = 1, **fields: object) -> Profile:
    """Of a model of `layers` equal layers between an embedding and a head, each gathered right before its use."""
    blocks = ["model.embed_tokens", *(f"model.layers.{k}" for k in range(layers)), "lm_head"]
    sizes = [500 * MIB, *[416 * MIB] * layers, 500 * MIB]
    parts, regions = {}, {}
    for kind, factor in (("forward", 1.0), ("backward", 2.0)):
        order = range(len(blocks)) if kind == "forward" else range(len(blocks) - 1, -1, -1)
        instructions: list[Instruction] = []
        for number, block in enumerate(order):
            one = (block,), (sizes[block],)
            compute = Instruction("compute", (block,), region=f"region_{number}")
            instructions += [Instruction("gather", *one), Instruction("wait", *one), compute]
            instructions.append(Instruction("release", *one))
            if kind == "backward":
                instructions.append(Instruction("reduce", *one, made=(compute.region,)))
            saved = (number + 1 if kind == "forward" else len(blocks) - number) * 300 * MIB
            held = 30_000 * MIB + saved
            cost = RegionCost(0.006 * factor, 0.0004, held, held + 800 * MIB, held)
            regions[f"frame0.{kind}/{compute.region}"] = cost
        if kind == "backward":
            instructions.append(Instruction("end"))
        parts[kind] = tuple(instructions)
    schedules = tuple(
        Schedule(f"frame0.{kind}", kind, 0, parts[kind], content=kind, structure=kind)
        for kind in ("forward", "backward")
    )
    labels = Labels(
        {str(k): block for k, block in enumerate(blocks)},
        {
            f"{schedule.name}/{i.region}": blocks[i.ids[0]]
            for schedule in schedules
            for i in schedule.instructions
            if i.region
        },
    )
    settings: dict[str, object] = {
        "contention": Contention(1.05, 1.05, shared_link=1.3),
        "optimizer_seconds": 0.03,
        "launch_seconds": 2e-5,
        "budget": 70_000 * MIB,
        "step_seconds": 1.35,
        "exposed_seconds": 0.1,
        "unexplained_seconds": 0.01,
        "labels": labels,
        "resident": Resident(shards=7_000 * MIB, states=20_000 * MIB),
        "micro_batches": micro_batches,
        **fields,
    }
    link = Link(2e-5, 300e9)
    return Profile(8, "cuda", schedules, regions, link, link, **settings)  # type: ignore[arg-type]
