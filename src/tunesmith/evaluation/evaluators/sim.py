"""The sim evaluator: scores as scripted by the sim trainer's adapter (`sim.json`), for drills. No torch, no model.

A subject of quality q has a held-out loss of about 2 − q on every case; the bare base has quality 0. Noise is a hash of
case and subject, so the same question always has the same answer.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tunesmith.core.files import json_lines, sha256_file, verify_folder, write_atomic
from tunesmith.profiles.base_model import base_digest
from tunesmith.profiles.settings import Phase
from tunesmith.programs.host import Program, ProgramFailure
from tunesmith.programs.protocol import REFERENCES, Artifact, CaseScore, Result, ResultStatus, Scores
from tunesmith.programs.readings import ProbeResult, References, choose_prompts
from tunesmith.runs.rules.task import ErrorClass
from tunesmith.runs.spec import AdapterRef, EvaluateSpec

MARKER = "sim.json"
_SCORES = "scores.json"


def is_simulated(spec: EvaluateSpec) -> bool:
    """Whether an adapter to score comes from the sim trainer."""
    return any(subject.adapter and (Path(subject.adapter.path) / MARKER).is_file() for subject in spec.subjects)


def evaluate(program: Program) -> Result:
    """Verify what a real evaluator would verify, then score each case by formula."""
    spec = program.evaluate_spec
    program.phase(Phase.HASH)
    cases_digest = sha256_file(Path(spec.cases.path))
    if cases_digest != spec.cases.digest:
        raise ProgramFailure(ErrorClass.DATA, "the cases changed since the evaluation was planned")
    case_ids = [case["id"] for case in json_lines(Path(spec.cases.path).read_bytes())]
    base = base_digest(Path(spec.base.path))
    digests: dict[str, str | None] = {}
    by_subject: dict[str, tuple[CaseScore, ...]] = {}
    program.phase(Phase.SCORE)
    for subject in spec.subjects:
        if _side(subject.adapter).get("eval_script") == "chatter":
            _chatter(program, len(case_ids))
        digests[subject.label] = _digest(subject.adapter)
        scores = [_score(case_id, subject.label, _side(subject.adapter), spec) for case_id in case_ids]
        by_subject[subject.label] = tuple(_scripted(scores, _side(subject.adapter).get("eval_script")))
        program.progress(len(by_subject) * len(case_ids), len(spec.subjects) * len(case_ids), "case")
        if program.terminating:
            return program.result(ResultStatus.INTERRUPTED)
    write_atomic(program.dir / _SCORES, Scores(by_subject=by_subject).model_dump_json())
    references = _refer(program, base)
    if any(_side(subject.adapter).get("eval_script") == "wrong_digest" for subject in spec.subjects):
        digests = dict.fromkeys(digests, "0" * 64)
    return program.result(
        ResultStatus.SUCCEEDED,
        base_digest=base,
        cases_digest=cases_digest,
        scores=Artifact(path=_SCORES, digest=sha256_file(program.dir / _SCORES)),
        references=references,
        detail={"subject_digests": digests},
    )


def _chatter(program: Program, num_cases: int) -> NoReturn:
    """Hangs, but says the same again and again."""
    while True:
        program.log("still scoring")
        program.progress(1, num_cases, "case")
        time.sleep(0.02)


def _refer(program: Program, base: str) -> Artifact | None:
    spec = program.evaluate_spec
    candidate = next((subject.adapter for subject in spec.subjects if subject.label == "candidate"), None)
    if candidate is None:
        return None
    cases = json_lines(Path(spec.cases.path).read_bytes())
    prompts = choose_prompts([case["messages"][:-1] for case in cases])
    references = References(
        adapter=candidate.digest,
        base=base,
        dtype="float32",
        max_tokens=1,
        readings=tuple(simulated_reading(candidate.digest, messages) for messages in prompts),
    )
    write_atomic(program.dir / REFERENCES, references.model_dump_json())
    return Artifact(path=REFERENCES, digest=sha256_file(program.dir / REFERENCES))


def simulated_reading(digest: str, messages: Sequence[Mapping[str, Any]]) -> ProbeResult:
    """What a simulated adapter makes of a prompt: one word, by its digest. A drill's target can say the same."""
    text = json.dumps(list(messages), ensure_ascii=False)
    word = int.from_bytes(hashlib.sha256(f"{digest}:{text}".encode()).digest()[:3], "big")
    return ProbeResult(
        messages=tuple(dict(message) for message in messages),
        prompt_text=text,
        prompt_ids=tuple(text.encode()),
        num_prompt=len(text.encode()),
        answer_ids=(word,),
        answer_text=str(word),
        log_probs=(-0.25,),
        margins=(1.0,),
        starts=(0,),
        finish="length",
    )


def _digest(adapter: AdapterRef | None) -> str | None:
    return verify_folder(Path(adapter.path), adapter.digest).digest if adapter else None


def _side(adapter: AdapterRef | None) -> dict[str, Any]:
    if adapter is None or not (Path(adapter.path) / MARKER).is_file():
        return {"quality": 0.0}
    side: dict[str, Any] = json.loads((Path(adapter.path) / MARKER).read_bytes())
    return side


def _score(case_id: str, label: str, side: dict[str, Any], spec: EvaluateSpec) -> CaseScore:
    quality = float(side["quality"])
    loss = 2.0 - quality + 0.2 * _noise(case_id) + 0.05 * _noise(f"{label}:{case_id}")
    values = {
        name: loss if name == "heldout_loss" else float(_noise(f"{name}:{case_id}") + 0.5 < quality)
        for name in spec.evaluation.metrics
    }
    return CaseScore(case_id=case_id, values=values)


def _scripted(scores: list[CaseScore], script: str | None) -> list[CaseScore]:
    match script:
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "nan":
            return [score.model_copy(update={"values": dict.fromkeys(score.values, float("nan"))}) for score in scores]
        case "partial":
            return scores[: len(scores) // 2]
        case "error":
            return [CaseScore(case_id=scores[0].case_id, error="scripted error"), *scores[1:]]
    return scores


def _noise(text: str) -> float:
    """Between −0.5 and 0.5, the same for the same text."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") / 2**64 - 0.5
