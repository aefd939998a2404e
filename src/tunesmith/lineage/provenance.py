"""The provenance statement of a version: in-toto's Statement v1, with a predicate like that of SLSA. Not signed.

It names content by hashes only: no folder of this machine, nothing that anybody said.
"""

from __future__ import annotations

from importlib.metadata import version as package_version
from typing import Any

from tunesmith.core.files import canonical_json, sha256_text
from tunesmith.lineage.version_facts import VersionFacts, read_version
from tunesmith.runs.commit import COMMIT, DIRTY
from tunesmith.runs.session import Session

STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "urn:tunesmith:provenance:v1"
BUILD = "urn:tunesmith:run:v1"
VERSION_DIGEST, BASE_DIGEST, DATASET_DIGEST = "tunesmithManifest", "tunesmithBase", "tunesmithDataset"
EVALUATION_DIGEST = "tunesmithEvaluation"
"""Digests of something else than one file, so that none is called sha256; docs/lineage.md says over what each is."""


def statement_of(session: Session, name: str) -> dict[str, Any]:
    """The statement about a version; its files are hashed first, and refused where they changed."""
    facts = read_version(session, name)
    run = facts.run
    return {
        "_type": STATEMENT,
        "subject": [
            {"name": file, "digest": {"sha256": entry["sha256"]}}
            for file, entry in sorted(facts.manifest.files.items())
        ],
        "predicateType": PREDICATE,
        "predicate": {
            "version": facts.adapter.name,
            "versionId": facts.adapter.id,
            "versionDigest": {VERSION_DIGEST: facts.adapter.digest},
            "buildDefinition": {
                "buildType": BUILD,
                "externalParameters": {
                    "profile": run.profile,
                    "trainer": run.spec["trainer"],
                    "method": run.spec["method"],
                    "recipe": run.spec["recipe"],
                    "budgets": run.spec["budgets"],
                },
                "internalParameters": {
                    "configFingerprint": run.spec["fingerprints"]["config"],
                    "codeFingerprint": run.spec["fingerprints"]["code"],
                    "hardwareTier": run.spec["hardware_tier"],
                    "processes": run.spec.get("num_processes", 1),
                    "libraries": None if facts.libraries is None else dict(facts.libraries),
                },
                "resolvedDependencies": _materials(facts),
            },
            "runDetails": {
                "builder": {"id": "urn:tunesmith:worker", **_builder_version(facts)},
                "metadata": _metadata(facts),
                "byproducts": [_verdict(each, facts.baselines[each.id]) for each in facts.evaluations],
            },
        },
    }


def _materials(facts: VersionFacts) -> list[dict[str, Any]]:
    """Everything that the weights were made from."""
    spec = facts.run.spec
    base: dict[str, Any] = {"name": "base", "digest": {BASE_DIGEST: spec["base"]["digest"]}}
    about = {"name": facts.base.name, "revision": facts.base.revision, "license": facts.base.licence}
    base["annotations"] = {key: value for key, value in about.items() if value}
    dataset: dict[str, Any] = {
        "name": "dataset",
        "digest": {DATASET_DIGEST: spec["dataset"]["fingerprint"]},
        "annotations": {"id": facts.dataset.id, "kind": facts.dataset.kind, "trained": spec["dataset"]["num_train"]},
    }
    if facts.dataset.fingerprint != spec["dataset"]["fingerprint"]:
        dataset["annotations"]["rewrittenAs"] = facts.dataset.fingerprint  # without what was forgotten since
    found = [base, dataset]
    if facts.report is not None and facts.report.mix is None:
        found += [{"name": f"file:{each.name}", "digest": {"sha256": each.sha256}} for each in facts.report.sources]
    if facts.start is not None:
        start = {"version": facts.start.name, "id": facts.start.id}
        found.append({"name": "start", "digest": {VERSION_DIGEST: spec["start"]["digest"]}, "annotations": start})
    metadata = spec.get("metadata") or {}
    if COMMIT in metadata:
        workspace = {"digest": {"gitCommit": metadata[COMMIT]}, "annotations": {"dirty": metadata[DIRTY]}}
        found.append({"name": "workspace", **workspace})
    return found


def _builder_version(facts: VersionFacts) -> dict[str, Any]:
    """Known as long as the code is still that of the training, which its fingerprint tells."""
    return {} if facts.libraries is None else {"version": {"tunesmith": package_version("tunesmith")}}


def _metadata(facts: VersionFacts) -> dict[str, Any]:
    """What is not known is left out."""
    trained = facts.training
    times = {
        "submittedOn": facts.run.created_at,
        "startedOn": None if trained is None else trained.started_at,
        "finishedOn": None if trained is None else trained.ended_at,
    }
    known = {name: at.isoformat() for name, at in times.items() if at is not None}
    return {"invocationId": facts.run.id, "submittedBy": facts.run.created_by, **known}


def _verdict(evaluation: Any, baseline: str) -> dict[str, Any]:
    """An evaluation, by what its verdict is bound to."""
    return {
        "name": f"evaluation:{evaluation.id}",
        "digest": {EVALUATION_DIGEST: sha256_text(canonical_json(evaluation.judged))},
        "annotations": {
            "decision": evaluation.judged["verdict"]["decision"],
            "comparedWith": baseline,
            "at": evaluation.created_at.isoformat(),
            "evidence": {key: value for key, value in evaluation.judged["evidence"].items() if value is not None},
        },
    }
