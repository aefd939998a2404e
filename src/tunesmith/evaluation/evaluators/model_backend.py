"""Loads the base once and applies adapters to it: batched losses and answers for the evaluators, by transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from tunesmith.core.errors import DataError
from tunesmith.evaluation.evaluators.base import Answer, Case
from tunesmith.evaluation.evaluators.probe import probe_prompts, shown_tokens
from tunesmith.evaluation.evaluators.progress import CaseProgress
from tunesmith.models.adapters import detach, load_adapter
from tunesmith.models.chat import ChatFormat, Tokenized
from tunesmith.models.generation import Sampling, answer_all
from tunesmith.models.loading import load_base, load_tokenizer, pick_device
from tunesmith.models.scoring import batches_by_count, mean_nlls
from tunesmith.profiles.architecture import read_architecture
from tunesmith.profiles.base_model import is_whole_model
from tunesmith.profiles.settings import Phase
from tunesmith.programs.host import Program, ProgramFailure
from tunesmith.programs.readings import MAX_TOKENS, References, choose_prompts
from tunesmith.runs.rules.task import ErrorClass
from tunesmith.runs.spec import EvaluateSpec, Subject


@dataclass(frozen=True)
class _Tokens:
    """A case as the model reads it."""

    conversation: Tokenized
    prompt: tuple[int, ...]


class ModelBackend:
    def __init__(self, program: Program) -> None:
        torch.use_deterministic_algorithms(True, warn_only=torch.cuda.is_available())
        program.phase(Phase.LOAD)
        self.program = program
        self.spec: EvaluateSpec = program.evaluate_spec
        self.tokenizer = load_tokenizer(Path(self.spec.base.path))
        self.chat = ChatFormat(self.tokenizer)
        self._tokens: dict[Case, _Tokens] = {}

    def case(self, case_id: str, messages: Sequence[Mapping[str, Any]]) -> Case:
        tokens = self._tokenized(case_id, messages)
        ids = zip(tokens.conversation.ids, tokens.conversation.loss_mask, strict=True)
        # What the model has to write: the same text as the content, or more where the answer calls a function.
        reference = self.chat.text_of(token for token, trained in ids if trained)
        case = Case(case_id, tuple(messages), reference)
        self._tokens[case] = tokens
        return case

    def tokens_of(self, case: Case) -> _Tokens:
        """Also of a case that an evaluator made; raises DataError where it does not fit."""
        if case not in self._tokens:
            self._tokens[case] = self._tokenized(case.id, case.messages)
        return self._tokens[case]

    @contextmanager
    def loaded(self, subject: Subject, progress: CaseProgress) -> Iterator[TransformersModel]:
        """The one loaded base with an adapter on it for a while, bare again afterwards; or a fully tuned model."""
        adapter = subject.adapter
        if adapter is None:
            yield TransformersModel(self, self._base, subject, progress)
            return
        if is_whole_model(Path(adapter.path)):
            if read_architecture(Path(adapter.path)) != self.spec.base.lock:
                raise ProgramFailure(
                    ErrorClass.MISMATCH, f"model {adapter.id} is of another architecture than the base"
                )
            yield TransformersModel(self, load_base(Path(adapter.path), pick_device()), subject, progress)
            return
        adapted = load_adapter(self._base, Path(adapter.path))
        try:
            yield TransformersModel(self, adapted.eval(), subject, progress)
        finally:
            detach(adapted)

    @cached_property
    def _base(self) -> Any:
        return load_base(Path(self.spec.base.path), pick_device())

    def _tokenized(self, case_id: str, messages: Sequence[Mapping[str, Any]]) -> _Tokens:
        plain = [dict(message) for message in messages]
        conversation = self.chat.tokenize(case_id, plain, final_only=self.spec.cases.answers == "last")
        prompt = self.chat.prompt(plain[:-1])
        if len(conversation) > self.spec.base.context:
            raise DataError(f"{len(conversation)} tokens are more than the {self.spec.base.context} the base may use")
        return _Tokens(conversation, prompt)


class TransformersModel:
    """One subject. What was computed for a case is computed once, whichever evaluator asks first."""

    def __init__(self, backend: ModelBackend, model: Any, subject: Subject, progress: CaseProgress) -> None:
        self.spec, self.subject, self.model, self.tokenizer = backend.spec, subject, model, backend.tokenizer
        self._backend, self._progress = backend, progress
        self._losses: dict[Case, float] = {}
        self._answers: dict[bool, dict[Case, Answer]] = {False: {}, True: {}}

    def losses(self, cases: Sequence[Case]) -> list[float]:
        missing = [case for case in cases if case not in self._losses]
        if missing:
            self._backend.program.phase(Phase.SCORE, self.subject.label)
            conversations = [self._backend.tokens_of(case).conversation for case in missing]
            batches = self._batches([len(one) for one in conversations])
            told = _differences(self._progress.advance)
            found = mean_nlls(self.model, conversations, self._backend.chat.pad_id, batches, told)
            self._losses |= zip(missing, found or (), strict=True)
        return [self._losses[case] for case in cases]

    def answers(self, cases: Sequence[Case], *, sampled: bool = False) -> list[Answer]:
        known = self._answers[sampled]
        missing = [case for case in cases if case not in known]
        if missing:
            how = "sampled" if sampled else "greedy"
            self._backend.program.phase(Phase.GENERATE, f"{self.subject.label} {how}")
            self._generate(missing, Sampling(self.spec.evaluation.temperature, self.spec.seed) if sampled else None)
        return [known[case] for case in cases]

    def references(self, cases: Sequence[Case]) -> References | None:
        assert self.subject.adapter is not None
        limit, chat = self.spec.base.context - MAX_TOKENS, self._backend.chat
        asked = [
            tuple(dict(message) for message in case.messages[:-1])
            for case in cases
            if len(self._backend.tokens_of(case).prompt) <= limit
        ]
        try:
            readings = tuple(probe_prompts(self.model, chat, choose_prompts(asked), MAX_TOKENS))
        except ValidationError:  # what is not a number cannot be compared, and the gate will say so
            return None
        return References(
            adapter=self.subject.adapter.digest,
            base=self.spec.base.digest,
            dtype="bfloat16" if next(self.model.parameters()).is_cuda else "float32",
            max_tokens=MAX_TOKENS,
            readings=readings,
            tokens=shown_tokens(chat, readings),
        )

    def _generate(self, cases: Sequence[Case], sampling: Sampling | None) -> None:
        prompts = [self._backend.tokens_of(case).prompt for case in cases]
        limit, known = self.spec.evaluation.max_new_tokens, self._answers[sampling is not None]
        for indices in self._batches([len(prompt) for prompt in prompts]):
            batch, keys = [prompts[index] for index in indices], [cases[index].id for index in indices]
            answers = answer_all(self.model, self._backend.chat, batch, limit, sampling=sampling, keys=keys)
            known |= zip([cases[index] for index in indices], answers, strict=True)
            self._progress.advance(len(indices))

    def _batches(self, lengths: Sequence[int]) -> list[list[int]]:
        return batches_by_count(lengths, self.spec.evaluation.batch_size)


def _differences(advance: Callable[[int], None]) -> Callable[[int], bool]:
    """For a caller that tells how many are done in all: advances by what is new, and goes on."""
    before = 0

    def told(done: int) -> bool:
        nonlocal before
        advance(done - before)
        before = done
        return True

    return told
