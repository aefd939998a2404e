"""Every table of every package, and the metadata that they join."""

from tunesmith.curriculum.tables import spends
from tunesmith.datasets.tables import datasets, heldout_cases, members
from tunesmith.deployment.tables import deployments, observations
from tunesmith.evaluation.tables import evaluations
from tunesmith.experience.tables import (
    assessments,
    corrections,
    erasures,
    experiences,
    feedback,
    reviews,
    shadow_answers,
    traffic,
)
from tunesmith.models.tables import adapters
from tunesmith.profiles.tables import campaigns, profiles
from tunesmith.programs.device.tables import hand_overs, servers
from tunesmith.runs.tables import attempts, checkpoints, requests, runs, scheduler_leases, switches, tasks, workers
from tunesmith.store.columns import metadata
from tunesmith.store.events import events

__all__ = [
    "adapters",
    "assessments",
    "attempts",
    "campaigns",
    "checkpoints",
    "corrections",
    "datasets",
    "deployments",
    "erasures",
    "evaluations",
    "events",
    "experiences",
    "feedback",
    "hand_overs",
    "heldout_cases",
    "members",
    "metadata",
    "observations",
    "profiles",
    "requests",
    "reviews",
    "runs",
    "scheduler_leases",
    "servers",
    "shadow_answers",
    "spends",
    "switches",
    "tasks",
    "traffic",
    "workers",
]
