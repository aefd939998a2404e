"""The model that the sim trainer's adapter describes (`sim.json`): losses and answers by formula. No torch, no model.

A subject of quality q has a held-out loss of about 2 − q on every case; the bare base has quality 0. Noise is a hash of
case and subject, so the same question always has the same answer. `eval_script` tells the program how to go wrong.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from tunesmith.core.files import sha256_text, write_atomic
from tunesmith.evaluation.evaluators.base import Answer, Case
from tunesmith.evaluation.evaluators.progress import CaseProgress
from tunesmith.profiles.settings import Phase
from tunesmith.programs.host import Program
from tunesmith.programs.protocol import Artifact, CaseScore, Result, ResultStatus, Scores
from tunesmith.programs.readings import ProbeResult, References, choose_prompts
from tunesmith.runs.spec import AdapterRef, EvaluateSpec, Subject

MARKER = "sim.json"


def is_simulated(spec: EvaluateSpec) -> bool:
    """Whether an adapter to score comes from the sim trainer."""
    return any(subject.adapter and (Path(subject.adapter.path) / MARKER).is_file() for subject in spec.subjects)


class SimBackend:
    def __init__(self, program: Program) -> None:
        self._program = program
        self._spec = program.evaluate_spec

    def case(self, case_id: str, messages: Sequence[Mapping[str, Any]]) -> Case:
        reference = str(messages[-1].get("content") or "") if messages else ""
        return Case(case_id, tuple(messages), reference)

    @contextmanager
    def loaded(self, subject: Subject, progress: CaseProgress) -> Iterator[SimModel]:
        self._program.phase(Phase.SCORE, subject.label)
        match _script(subject):
            case "chatter":
                _chatter(self._program, self._spec.cases.num)
            case "wait" if self._spec.attempt.number == 1:
                signal.pause()
        yield SimModel(self._spec, subject, progress)


class SimModel:
    model: Any | None = None
    tokenizer: Any | None = None

    def __init__(self, spec: EvaluateSpec, subject: Subject, progress: CaseProgress) -> None:
        self.spec, self.subject = spec, subject
        self._progress = progress
        self._quality = float(_side(subject.adapter)["quality"])

    def losses(self, cases: Sequence[Case]) -> list[float]:
        self._progress.advance(len(cases))
        return [
            2.0 - self._quality + 0.2 * _noise(case.id) + 0.05 * _noise(f"{self.subject.label}:{case.id}")
            for case in cases
        ]

    def answers(self, cases: Sequence[Case], *, sampled: bool = False) -> list[Answer]:
        """The reference, or something else: right as often as the quality says."""
        self._progress.advance(len(cases))
        key = "exact_match_sampled" if sampled else "exact_match_greedy"
        wrong = ["" if _noise(f"{key}:{case.id}") + 0.5 < self._quality else "not " for case in cases]
        return [Answer(f"{before}{case.reference}", finished=True) for before, case in zip(wrong, cases, strict=True)]

    def references(self, cases: Sequence[Case]) -> References | None:
        assert self.subject.adapter is not None
        digest = self.subject.adapter.digest
        prompts = choose_prompts([case.messages[:-1] for case in cases])
        return References(
            adapter=digest,
            base=self.spec.base.digest,
            dtype="float32",
            max_tokens=1,
            readings=tuple(simulated_reading(digest, messages) for messages in prompts),
        )


def as_scripted(program: Program, result: Result) -> Result:
    """An honest result, made wrong as the adapters' scripts say."""
    if result.status is not ResultStatus.SUCCEEDED or result.scores is None:
        return result
    scripts: dict[str, str] = {
        subject.label: script for subject in program.evaluate_spec.subjects if (script := _script(subject))
    }
    if not scripts:
        return result
    path = program.dir / result.scores.path
    honest = Scores.model_validate_json(path.read_bytes()).by_subject
    twisted = {label: tuple(_twisted(list(scores), scripts.get(label))) for label, scores in honest.items()}
    content = Scores(by_subject=twisted).model_dump_json()
    write_atomic(path, content)
    update: dict[str, Any] = {"scores": Artifact(path=path.name, digest=sha256_text(content))}
    if "wrong_digest" in scripts.values():
        update["detail"] = {"subject_digests": dict.fromkeys(result.detail["subject_digests"], "0" * 64)}
    return result.model_copy(update=update)


def _script(subject: Subject) -> str | None:
    script = _side(subject.adapter).get("eval_script")
    return None if script is None else str(script)


def _chatter(program: Program, num_cases: int) -> NoReturn:
    """Hangs, but says the same again and again."""
    while True:
        program.log("still scoring")
        program.progress(1, num_cases, "case")
        time.sleep(0.02)


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


def _side(adapter: AdapterRef | None) -> dict[str, Any]:
    if adapter is None or not (Path(adapter.path) / MARKER).is_file():
        return {"quality": 0.0}
    side: dict[str, Any] = json.loads((Path(adapter.path) / MARKER).read_bytes())
    return side


def _twisted(scores: list[CaseScore], script: str | None) -> list[CaseScore]:
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
