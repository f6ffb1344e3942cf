"""Small modules of every kind that users have; each is trained sharded and compared with training without sharding."""

from corpus import (
    adversarial,
    control,
    derivatives,
    generative,
    graphs,
    metric_learning,
    parameters,
    reinforcement,
    schedules,
    sequences,
    structure,
    vision,
)
from corpus.case import CASES, Case

__all__ = [
    "CASES",
    "Case",
    "adversarial",
    "control",
    "derivatives",
    "generative",
    "graphs",
    "metric_learning",
    "parameters",
    "reinforcement",
    "schedules",
    "sequences",
    "structure",
    "vision",
]
