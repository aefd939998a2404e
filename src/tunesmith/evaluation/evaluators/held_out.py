"""Scores the base with and without adapters on held-out cases: loss of the reference answer, exact answers.

A case that cannot be scored is an error of that case, under its own name; it is never a number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from tunesmith.core.errors import ConfigError, DataError, TunesmithError
from tunesmith.core.files import json_lines, sha256_file, sha256_text, verify_folder, write_atomic
from tunesmith.evaluation.evaluators.probe import probe_prompts, shown_tokens
from tunesmith.models.adapters import detach, load_adapter
from tunesmith.models.chat import ChatFormat, Tokenized
from tunesmith.models.generation import Answer, Sampling, answer_all
from tunesmith.models.loading import load_base, load_tokenizer, pick_device
from tunesmith.models.scoring import batches_by_count, mean_nlls
from tunesmith.profiles.architecture import read_architecture
from tunesmith.profiles.base_model import base_digest, is_whole_model
from tunesmith.profiles.rules.lock import ArchitectureLock
from tunesmith.profiles.settings import Phase
from tunesmith.programs.host import Program, ProgramFailure
from tunesmith.programs.protocol import REFERENCES, Artifact, CaseScore, Result, ResultStatus, Scores
from tunesmith.programs.readings import MAX_TOKENS, References, choose_prompts
from tunesmith.runs.rules.task import ErrorClass
from tunesmith.runs.spec import AdapterRef, EvaluateSpec, Subject

LOSS, GREEDY, SAMPLED = "heldout_loss", "exact_match_greedy", "exact_match_sampled"
_MEASURED = (LOSS, GREEDY, SAMPLED)
_SCORES = "scores.json"


class _Terminated(Exception):
    """TERM arrived: nothing is kept, the evaluation is made again."""


@dataclass
class _Case:
    """One case, ready to be scored, or the reason why it cannot be."""

    id: str
    reference: str = ""
    tokens: Tokenized | None = None
    prompt: tuple[int, ...] = ()
    asked: tuple[dict[str, Any], ...] = ()
    """The messages in front of the answer."""
    error: str | None = None


@dataclass
class _Sheet:
    """What was measured of one subject, by case id."""

    values: dict[str, dict[str, float]] = field(default_factory=dict)
    answers: dict[str, dict[str, str]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def put(self, case: _Case, metric: str, value: float, answer: str | None = None) -> None:
        if not math.isfinite(value):
            self.errors[case.id] = f"{metric} is {value}"
        self.values.setdefault(case.id, {})[metric] = value
        if answer is not None:
            self.answers.setdefault(case.id, {})[metric] = answer

    def score(self, case: _Case) -> CaseScore:
        error = case.error or self.errors.get(case.id)
        answers = self.answers.get(case.id, {})
        if error is not None:
            return CaseScore(case_id=case.id, answers=answers, error=error)
        return CaseScore(case_id=case.id, values=self.values[case.id], answers=answers)


def evaluate(program: Program) -> Result:
    """Entry point, called by `tunesmith.evaluation.evaluators.main`."""
    spec = program.evaluate_spec
    unknown = sorted(set(spec.evaluation.metrics) - set(_MEASURED))
    if unknown:
        raise ConfigError(f"evaluation.metrics: {unknown[0]!r} is not measured here; known: {', '.join(_MEASURED)}")
    torch.use_deterministic_algorithms(True, warn_only=torch.cuda.is_available())
    program.phase(Phase.HASH)
    fields = _verified(spec)
    program.phase(Phase.LOAD)
    chat = ChatFormat(load_tokenizer(Path(spec.base.path)))
    cases = _read_cases(spec, chat)
    base = load_base(Path(spec.base.path), pick_device())
    rounds = _Rounds(program, chat, cases)
    by_subject: dict[str, tuple[CaseScore, ...]] = {}
    try:
        for subject in spec.subjects:
            with _wearing(base, subject.adapter, spec.base.lock) as model:
                by_subject[subject.label] = rounds.score(model, subject)
                if subject.label == "candidate" and subject.adapter is not None:
                    fields["references"] = rounds.refer(model, subject.adapter.digest)
    except _Terminated:
        return program.result(ResultStatus.INTERRUPTED, detail={"reason": "terminated"})
    content = Scores(by_subject=by_subject).model_dump_json()
    write_atomic(program.dir / _SCORES, content)
    return program.result(ResultStatus.SUCCEEDED, scores=Artifact(path=_SCORES, digest=sha256_text(content)), **fields)


def _verified(spec: EvaluateSpec) -> dict[str, Any]:
    """Digests of what is really there; the first difference from the spec ends the evaluation."""
    cases = sha256_file(Path(spec.cases.path))
    if cases != spec.cases.digest:
        raise ProgramFailure(ErrorClass.DATA, "the cases changed since the evaluation was planned; evaluate again")
    base = base_digest(Path(spec.base.path))
    if base != spec.base.digest:
        raise ProgramFailure(ErrorClass.MISMATCH, f"the base model in {spec.base.path} changed; lock the profile again")
    digests = {
        subject.label: verify_folder(Path(subject.adapter.path), subject.adapter.digest).digest
        if subject.adapter
        else None
        for subject in spec.subjects
    }
    return {"base_digest": base, "cases_digest": cases, "detail": {"subject_digests": digests}}


def _read_cases(spec: EvaluateSpec, chat: ChatFormat) -> list[_Case]:
    try:
        rows = json_lines(Path(spec.cases.path).read_bytes())
        if len(rows) != spec.cases.num:
            raise ProgramFailure(ErrorClass.DATA, f"{len(rows)} cases instead of {spec.cases.num}; evaluate again")
        return [_case(str(row["id"]), row["messages"], chat, spec) for row in rows]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{spec.cases.path}: not a file of cases ({type(error).__name__}: {error})") from None


def _case(case_id: str, messages: Sequence[dict[str, Any]], chat: ChatFormat, spec: EvaluateSpec) -> _Case:
    context = spec.base.context
    try:
        tokens = chat.tokenize(case_id, messages, final_only=spec.cases.answers == "last")
        prompt = chat.prompt(messages[:-1])
    except TunesmithError as error:
        return _Case(case_id, error=error.message)
    if len(tokens) > context:
        return _Case(case_id, error=f"{len(tokens)} tokens are more than the {context} the base may use")
    # What the model has to write: the same text as the content, or more where the answer calls a function.
    reference = chat.text_of(token for token, trained in zip(tokens.ids, tokens.loss_mask, strict=True) if trained)
    return _Case(case_id, reference, tokens, prompt, tuple(messages[:-1]))


@contextmanager
def _wearing(base: Any, adapter: AdapterRef | None, lock: ArchitectureLock) -> Iterator[Any]:
    """The one loaded base with an adapter on it for a while, bare again afterwards; or a fully tuned model."""
    if adapter is None:
        yield base
        return
    if is_whole_model(Path(adapter.path)):
        if read_architecture(Path(adapter.path)) != lock:
            raise ProgramFailure(ErrorClass.MISMATCH, f"model {adapter.id} is of another architecture than the base")
        yield load_base(Path(adapter.path), pick_device())
        return
    adapted = load_adapter(base, Path(adapter.path))
    try:
        yield adapted.eval()
    finally:
        detach(adapted)


class _Rounds:
    """All metrics of all subjects over the same cases, in the same batches."""

    def __init__(self, program: Program, chat: ChatFormat, cases: list[_Case]) -> None:
        self._program, self._chat, self._cases = program, chat, cases
        self._spec = program.evaluate_spec
        self._sound = [case for case in cases if case.error is None]
        self._done = 0
        self._total = len(self._sound) * len(self._spec.subjects) * len(set(self._spec.evaluation.metrics))

    def score(self, model: Any, subject: Subject) -> tuple[CaseScore, ...]:
        sheet, wanted = _Sheet(), self._spec.evaluation.metrics
        if LOSS in wanted:
            self._losses(model, subject, sheet)
        if GREEDY in wanted:
            self._exact(model, subject, sheet, GREEDY, None)
        if SAMPLED in wanted:
            sampling = Sampling(self._spec.evaluation.temperature, self._spec.seed)
            self._exact(model, subject, sheet, SAMPLED, sampling)
        return tuple(sheet.score(case) for case in self._cases)

    def refer(self, model: Any, digest: str) -> Artifact | None:
        """Write down what the adapter reads and answers here, for comparison with whoever will serve it."""
        context = self._spec.base.context - MAX_TOKENS
        asked = choose_prompts([case.asked for case in self._sound if len(case.prompt) <= context])
        try:
            readings = tuple(probe_prompts(model, self._chat, asked, MAX_TOKENS))
        except ValidationError:  # what is not a number cannot be compared, and the gate will say so
            return None
        references = References(
            adapter=digest,
            base=self._spec.base.digest,
            dtype="bfloat16" if next(model.parameters()).is_cuda else "float32",
            max_tokens=MAX_TOKENS,
            readings=readings,
            tokens=shown_tokens(self._chat, readings),
        )
        content = references.model_dump_json()
        write_atomic(self._program.dir / REFERENCES, content)
        return Artifact(path=REFERENCES, digest=sha256_text(content))

    def _losses(self, model: Any, subject: Subject, sheet: _Sheet) -> None:
        self._program.phase(Phase.SCORE, subject.label)
        tokens = [case.tokens for case in self._sound if case.tokens is not None]
        before = self._done
        batches = batches_by_count([len(one) for one in tokens], self._spec.evaluation.batch_size)
        losses = mean_nlls(model, tokens, self._chat.pad_id, batches, lambda done: self._told(before + done))
        for case, loss in zip(self._sound, losses or (), strict=True):
            sheet.put(case, LOSS, loss)

    def _exact(self, model: Any, subject: Subject, sheet: _Sheet, metric: str, sampling: Sampling | None) -> None:
        self._program.phase(Phase.GENERATE, f"{subject.label} {metric}")
        limit = self._spec.evaluation.max_new_tokens
        for indices in batches_by_count([len(case.prompt) for case in self._sound], self._spec.evaluation.batch_size):
            batch = [self._sound[index] for index in indices]
            prompts, keys = [case.prompt for case in batch], [case.id for case in batch]
            answers = answer_all(model, self._chat, prompts, limit, sampling=sampling, keys=keys)
            for case, answer in zip(batch, answers, strict=True):
                sheet.put(case, metric, float(_is_exact(answer, case.reference)), answer.text)
            self._told(self._done + len(batch))

    def _told(self, done: int) -> bool:
        self._done = done
        self._program.progress(done, self._total, "case")
        if self._program.terminating:
            raise _Terminated
        return True


def _is_exact(answer: Answer, reference: str) -> bool:
    """The same text, but for blanks around it; an answer that had to be cut off is not the answer."""
    return answer.finished and answer.text.strip() == reference.strip()
