"""What is looked at before hours are spent: room on the disk, lengths, the vocabulary, what the bare base makes of it.

The base is asked for at most `_MAX_SAMPLED` conversations how likely it finds the tokens it is to learn.

*Sane loss.* Measured on SmolLM2-135M (ln V = 10.8): 2.2 on dates; 12 to 22 where answers are full of tokens that were
added to its tokenizer a moment ago; 28 with random layers, 84 with zeroed ones. On bases of the demo's size
(ln V = 5.6): 5.1 on a format they were not taught, 8.4 if they never saw a symbol of it. So what is above 2 · ln V + 3
is refused, and what is worse than an even guess is told: a wrong tokenizer stays there (11.5 and 10.9, permuted ids).

*New symbols.* By the probability of a token at the places where it is wanted, in units of an even guess (1 / V):

- A base of the demo's kind that never wrote `{`, `}`, `,`, `:` and `"` gives them at best 0.0017 to 0.36, and at no
  place of the sample more than 0.8. The demo's own base has copied them: 1.2 to 2.2 at best (0.04 in the full size),
  and 3 to 7 somewhere in the sample. It has no new symbols.
- SmolLM2 gives tokens that were added to its tokenizer at best 0.014, and nowhere more than 0.024 (initialised as the
  mean of all), or at best 1e-6 (at random). Of what it knows, the unlikeliest were `X` in an invented label, at best
  0.025 but 540 elsewhere, and `{"` in front of JSON, 2.4.

So a new symbol has at best 0.5 where it is wanted and nowhere more than 1, or at best 1e-4 where it is wanted. A bound
on the probability itself cannot tell them apart: that `{"` had 9e-5, the `{` that was never written 1e-4. A base with
random weights gives everything about 1 and has no new symbols.
"""

from __future__ import annotations

import math
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tunesmith.core.errors import ConfigError, DataError
from tunesmith.models.adapters import adapted_modules, read_config
from tunesmith.models.chat import ChatFormat, Tokenized
from tunesmith.models.loading import load_tokenizer
from tunesmith.profiles.architecture import adaptable_modules, read_tensor_shapes
from tunesmith.profiles.profile import Recipe
from tunesmith.profiles.rules.target_limits import without_embeddings
from tunesmith.programs.host import Program, ProgramFailure
from tunesmith.runs.rules.task import ErrorClass
from tunesmith.runs.spec import RunSpec

_MAX_SAMPLED = 64
_MAX_SAMPLED_TOKENS = 16_384
_MAX_PLACES = 512
"""Most places of one conversation at which the whole distribution is looked at: it has the vocabulary's width."""
_MIN_PLACES = 5
"""A symbol that is wanted less often in the sample is not judged."""
_UNLIKELY, _NEVER = math.log(0.5), math.log(1e-4)
"""Of an even guess."""
_NAMED = 8
_CHECKPOINTS_BESIDE = 3  # best, last, and the one being written


@dataclass(frozen=True)
class Preflight:
    """What the bare base made of a sample of the training conversations."""

    base_loss: float
    """Mean negative log-likelihood per trained token."""
    num_sampled: int
    new_symbols: tuple[str, ...]
    """Tokens of answers that the base (almost) never writes, as text for people; the most frequent first."""

    def as_json(self) -> dict[str, Any]:
        return {
            "base_loss": self.base_loss,
            "num_sampled": self.num_sampled,
            "new_symbols": list(self.new_symbols),
        }


@dataclass(frozen=True)
class EmbeddingsChoice:
    """What `recipe.train_embeddings` comes to, and why."""

    train: bool
    reason: str


def check_before_loading(program: Program, num_examples: int, lengths: Sequence[int]) -> None:
    """What can be known without the base's weights: something to train, context, room for the checkpoints."""
    run = program.train_spec.run
    if num_examples == 0:
        raise DataError(f"dataset {run.dataset.id} has nothing to train on; look at `tunesmith dataset show`")
    longest = max(lengths)
    if longest > run.base.context:
        raise ConfigError(
            f"recipe.max_length: an example has {longest} tokens, the base takes {run.base.context}; "
            f"set recipe.max_length: {run.base.context}"
        )
    needed = room_needed(run, lengths, with_embeddings=run.recipe.train_embeddings is True)
    check_room(program.dir, needed)


def check_base(program: Program, base: Any, chat: ChatFormat, examples: Sequence[Tokenized]) -> Preflight:
    """Ask the bare base, before an adapter is on it; raises what cannot be trained, with what to do."""
    run = program.train_spec.run
    found = examine(run, base, chat, examples, lambda done, total: program.progress(done, total, "preflight"))
    even = math.log(base.get_output_embeddings().weight.shape[0])
    if found.base_loss > even + 0.5:
        program.log(
            f"the base finds the answers less likely than an even guess over its vocabulary would (loss "
            f"{found.base_loss:.2f}, even guess {even:.2f}): check that its tokenizer and chat template are its own",
            "warning",
        )
    if embeddings_wanted(run, found):
        check_room(program.dir, room_needed(run, [len(example) for example in examples], with_embeddings=True))
    return found


def examine(
    run: RunSpec, base: Any, chat: ChatFormat, examples: Sequence[Tokenized], on_progress: Callable[[int, int], None]
) -> Preflight:
    """The same for everyone who asks with the same base, data and seed; takes nothing from torch's random numbers."""
    adapted_modules(base, run.recipe.target_modules)
    _check_examples(run, base, chat, examples)
    sample = _sample(examples, run.recipe.seed)
    total, num_places = 0.0, 0
    best: dict[int, float] = {}
    counts: dict[int, int] = {}
    for number, example in enumerate(sample, start=1):
        places = _thinned([place for place in range(1, len(example)) if example.loss_mask[place]])
        wanted = [example.ids[place] for place in places]
        for token, value in zip(wanted, _log_probs(base, example, places, wanted), strict=True):
            if not math.isfinite(value):
                raise ProgramFailure(
                    ErrorClass.NONFINITE,
                    f"the bare base's loss on example {example.id} is not a finite number: its weights hold NaN or are "
                    "broken; fetch the base again, then lock the profile again",
                )
            total += value
            best[token] = max(best.get(token, -math.inf), value)
            counts[token] = counts.get(token, 0) + 1
        num_places += len(places)
        on_progress(number, len(sample))
    loss = -total / max(1, num_places)
    even = math.log(base.get_output_embeddings().weight.shape[0])
    _refuse_absurd(loss, even)
    frequent = {token: value + even for token, value in best.items() if counts[token] >= _MIN_PLACES}
    never = {token for token, value in frequent.items() if value < _NEVER}
    unlikely = sorted(token for token, value in frequent.items() if _NEVER <= value < _UNLIKELY)
    if unlikely:
        peaks = _peaks(base, sample, unlikely)
        never |= {token for token, peak in zip(unlikely, peaks, strict=True) if peak + even < 0.0}
    by_count = sorted(never, key=lambda token: (-counts[token], token))
    return Preflight(loss, len(sample), _names(run, chat, by_count))


def embeddings_wanted(run: RunSpec, found: Preflight) -> bool:
    """Whether embeddings are trained; `choose_embeddings` says why."""
    return choose_embeddings(run, found).train


def choose_embeddings(run: RunSpec, found: Preflight) -> EmbeddingsChoice:
    """`recipe.train_embeddings`, resolved against what the run starts from, the targets and the new symbols."""
    said, symbols = run.recipe.train_embeddings, _listed(found.new_symbols)
    if run.recipe.tuning == "full":
        return EmbeddingsChoice(True, "recipe.tuning is full: every weight is trained")
    if said is True:
        return EmbeddingsChoice(True, "recipe.train_embeddings is true")
    if said is False:
        doubt = f"; symbols that the base never writes will be learnt badly: {symbols}" if symbols else ""
        return EmbeddingsChoice(False, f"recipe.train_embeddings is false{doubt}")
    unable = without_embeddings(run.targets)
    if run.start is not None:
        has = bool(read_config(Path(run.start.path)).get("modules_to_save"))
        if has and unable:
            raise ConfigError(
                f"adapter {run.start.id} that the run starts from has trained embeddings, which target "
                f"{unable[0]} cannot serve; start from the base"
            )
        return EmbeddingsChoice(
            has, f"the adapter that the run starts from has {'' if has else 'no '}trained embeddings"
        )
    if not symbols:
        return EmbeddingsChoice(False, "the base can write every symbol of the answers")
    if unable:
        return EmbeddingsChoice(
            False,
            f"the base never writes {symbols}, but target {unable[0]} cannot serve trained embeddings: these symbols "
            "will be learnt badly",
        )
    return EmbeddingsChoice(True, f"the base never writes {symbols}")


def room_needed(run: RunSpec, lengths: Sequence[int], *, with_embeddings: bool) -> int:
    """Bytes that the checkpoints and the artefact will take at most, from the shapes in the base's files."""
    trained, saved = _num_trained(run, with_embeddings)
    # the adapter, a copy of the best one, two moments of the optimizer; all in fp32
    checkpoint = 4 * (2 * saved + 2 * trained) + (64 << 10)
    recipe = run.recipe
    num_steps = 2 * math.ceil(sum(lengths) * recipe.epochs / recipe.batch_tokens) + 1  # batches are not always full
    num_kept = min(run.checkpoints.keep, num_steps, recipe.max_steps or num_steps)
    return checkpoint * (num_kept + _CHECKPOINTS_BESIDE)


def check_room(folder: Path, needed: int, free: int | None = None) -> None:
    """Refuse what the disk has no room for; `free` is asked from the disk unless given."""
    free = shutil.disk_usage(folder).free if free is None else free
    if needed > free:
        raise ProgramFailure(
            ErrorClass.DISK,
            f"the disk has no room for this training's checkpoints: {_size(needed)} needed, {_size(free)} free in "
            f"{folder}; free some, or lower checkpoints.keep or recipe.lora_rank",
        )


def _num_trained(run: RunSpec, with_embeddings: bool) -> tuple[int, int]:
    """How many numbers are trained, and how many an adapter's file holds: one matrix under two names counts twice."""
    shapes, recipe = read_tensor_shapes(Path(run.base.path)), run.recipe
    if recipe.tuning == "full":
        every = sum(math.prod(shape) for shape in shapes.values())
        return every, every
    vocabulary = {name for name in adaptable_modules(shapes) if shapes[f"{name}.weight"][0] == run.base.lock.vocab_size}
    lora = 0
    for name in adaptable_modules(shapes):
        outer, inner = shapes[f"{name}.weight"]
        if _is_target(name, recipe, vocabulary):
            lora += recipe.lora_rank * (outer + inner) + (outer if recipe.dora else 0)
    if not with_embeddings:
        return lora, lora
    matrix = run.base.lock.vocab_size * run.base.lock.hidden_size
    is_tied = len(vocabulary) == 1
    both = 2 if recipe.train_embeddings is True or is_tied else 1
    return lora + matrix * (1 if is_tied else both), lora + matrix * both


def _is_target(name: str, recipe: Recipe, vocabulary: set[str]) -> bool:
    if recipe.target_modules == "all-linear":
        return name not in vocabulary
    return any(name == target or name.endswith(f".{target}") for target in recipe.target_modules)


def _check_examples(run: RunSpec, base: Any, chat: ChatFormat, examples: Sequence[Tokenized]) -> None:
    """Every token has a row in the embeddings, and every example something to learn."""
    rows = min(base.get_input_embeddings().weight.shape[0], base.get_output_embeddings().weight.shape[0])
    used = {chat.pad_id: "padding"} | dict.fromkeys(sorted(chat.stop_ids), "the end of an answer")
    for token, where in used.items():
        _refuse_beyond(run, token, where, rows)
    for example in examples:
        _refuse_beyond(run, max(example.ids), f"example {example.id}", rows)
        if not any(example.loss_mask[1:]):
            raise DataError(f"{example.id}: no token of it would be trained; remove the example, or give it an answer")
        if len(example) > run.base.context:
            raise DataError(f"{example.id}: {len(example)} tokens do not fit into the base's {run.base.context}")


def _refuse_beyond(run: RunSpec, token: int, where: str, rows: int) -> None:
    if token >= rows:
        text = load_tokenizer(Path(run.base.path)).convert_ids_to_tokens(token)
        raise ConfigError(
            f"the base's tokenizer does not belong to its weights: {where} uses token {token} ({text!r}), but the "
            f"embeddings have {rows} rows; fetch tokenizer and weights from the same place, or resize the embeddings"
        )


def _refuse_absurd(loss: float, even: float) -> None:
    if loss > 2 * even + 3:
        raise ProgramFailure(
            ErrorClass.CONFIG,
            f"the bare base's loss on the training examples is {loss:.1f}; guessing evenly over its vocabulary would "
            f"give {even:.1f}: its weights are broken, or tokenizer and weights are not of the same model; fetch the "
            "base again",
        )


def _sample(examples: Sequence[Tokenized], seed: int) -> list[Tokenized]:
    """A fixed choice of the seed, small enough to be cheap on any machine that could train on the rest."""
    chosen: list[Tokenized] = []
    num_tokens = 0
    picks = random.Random(seed).sample(range(len(examples)), min(_MAX_SAMPLED, len(examples)))  # noqa: S311 (no secret)
    for index in picks:
        chosen.append(examples[index])
        num_tokens += len(examples[index])
        if num_tokens >= _MAX_SAMPLED_TOKENS:
            break
    return chosen


def _thinned(places: list[int]) -> list[int]:
    """Evenly spread, when there are too many."""
    if len(places) <= _MAX_PLACES:
        return places
    return [places[number * len(places) // _MAX_PLACES] for number in range(_MAX_PLACES)]


def _log_probs(base: Any, example: Tokenized, places: Sequence[int], wanted: Sequence[int]) -> list[float]:
    """Of each place, the log-probability of the token that is wanted there."""
    with torch.no_grad():
        logs = _distributions(base, example, places)
        picked = logs.gather(1, torch.tensor(wanted, device=logs.device).unsqueeze(1)).squeeze(1)
        return [float(value) for value in picked.tolist()]


def _peaks(base: Any, sample: Sequence[Tokenized], tokens: Sequence[int]) -> list[float]:
    """Of each token, its highest log-probability at any place of the sample, prompts included."""
    peaks = [-math.inf] * len(tokens)
    with torch.no_grad():
        for example in sample:
            logs = _distributions(base, example, _thinned(list(range(1, len(example)))))
            highest = logs[:, list(tokens)].max(dim=0).values.tolist()
            peaks = [max(pair) for pair in zip(peaks, highest, strict=True)]
    return peaks


def _distributions(base: Any, example: Tokenized, places: Sequence[int]) -> Any:
    """Log-probabilities of every token at each place; one conversation at a time, without padding."""
    device = next(base.parameters()).device
    columns = torch.tensor(places, device=device) - 1  # what stands in front predicts the place
    ids = torch.tensor([example.ids], device=device)
    logits = base(input_ids=ids, logits_to_keep=columns, use_cache=False).logits
    return torch.log_softmax(logits[0].float(), dim=-1)


def _names(run: RunSpec, chat: ChatFormat, tokens: Sequence[int]) -> tuple[str, ...]:
    """Tokens as text; special ones, and pieces of a character, as the tokenizer calls them."""
    texts = [chat.text_of([token]) for token in tokens]
    if all(text.strip() and "\ufffd" not in text for text in texts):
        return tuple(texts)
    tokenizer = load_tokenizer(Path(run.base.path))
    return tuple(str(tokenizer.convert_ids_to_tokens(token)) for token in tokens)


def _listed(symbols: Sequence[str]) -> str:
    shown = ", ".join(symbols[:_NAMED])
    return f"{shown} and {len(symbols) - _NAMED} more" if len(symbols) > _NAMED else shown


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:.1f} MiB"
