"""Loss outliers from the real command line: scored by a real base in its own process, shown, quarantined, released."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from support.forgotten import PARTED, a_dataset_of, as_member
from support.native import a_base_ref, a_micro_base, an_evaluate_spec, evaluate_here, quick_base, rows_of
from support.workspaces import PROFILE, a_jsonl, a_profile, a_workspace, cli
from tunesmith.cli.main import call
from tunesmith.client import Client
from tunesmith.core.errors import ProgramError, Refused, UsageError
from tunesmith.datasets import queries as datasets
from tunesmith.datasets.example import Split
from tunesmith.demo import dates
from tunesmith.evaluation.rules.outliers import Fit, find_loss_outliers
from tunesmith.evaluation.score_examples import Scored, scored

pytestmark = pytest.mark.extra  # every test starts a program that loads a model: minutes in all

NUM_GOOD, NUM_BAD = 120, 6
HOSTILE = "\x1b[2Jqx~ \u202ejj#%& ask eve.stone@gmail.com"
TINY = {"recipe": {"max_length": 256}}


def _rows(seed: int) -> list[dict[str, Any]]:
    """Good rows, then bad ones: four with the answer of another row, one garbled, one in another language."""
    questions = [row["messages"][0]["content"] for row in dates.words_rows(2, 900 + seed)]
    shuffled = dates.shuffled_answers(dates.words_rows(30, 500 + seed), seed)[:4]
    junk = "".join(chr(random.Random(seed).randrange(0x80, 0x250)) for _ in range(10))
    garbled = rows_of([(questions[0], junk + HOSTILE), (questions[1], "am siebten März neunzehnhundertneunzig")])
    return [*dates.words_rows(NUM_GOOD, 100 + seed), *shuffled, *garbled]


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with a_workspace(tmp_path) as client:
        a_profile(client.workspace.root, trainer="native", base={"path": str(quick_base())}, **TINY)
        yield client


def _prepared(client: Client, rows: list[dict[str, Any]]) -> str:
    source = client.workspace.root / "rows.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return client.datasets.prepare(PROFILE, [source], overrides=["data.screens=none"])[0].id


def test_outliers_are_shown_kept_aside_and_released(
    client: Client, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    root, rows = client.workspace.root, _rows(0)
    bad = set(range(NUM_GOOD + 1, NUM_GOOD + NUM_BAD + 1))
    dataset_id = _prepared(client, rows)
    folder = client.workspace.datasets_dir / dataset_id
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    shown = cli("dataset", "outliers", dataset_id, "--json", cwd=root)
    assert shown.code == 0, shown.err
    assert {each["line"] for each in shown.json["outliers"]} == bad  # recall 6 of 6, false positives 0 of 120
    assert (shown.json["fit"], shown.json["num_scored"], shown.json["made"]) == ("judged", len(rows), None)
    assert [each["loss"] for each in shown.json["outliers"]] == sorted(
        (each["loss"] for each in shown.json["outliers"]), reverse=True
    )
    assert len(client.datasets.list()) == 1

    monkeypatch.chdir(root)  # in this process, which never loads the model
    assert call(["dataset", "outliers", dataset_id, "--quarantine", "--limit", "5"]) == 0
    said = capsys.readouterr().out
    made = said.splitlines()[-1]
    assert "6 of 126 examples are outliers" in said
    assert "and 1 more" in said
    assert all(char.isprintable() or char == "\n" for char in said)
    assert "eve.stone" not in said
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert sorted(path.name for path in client.workspace.datasets_dir.iterdir()) == sorted([dataset_id, made])
    client.datasets.verify(made)
    assert sum(client.datasets.show(made)[0].counts.values()) == NUM_GOOD
    with client._session.database.read() as tx:
        judging = datasets.pool(tx, PROFILE, made, 1000)
    assert len(judging) == client.datasets.show(made)[0].counts["heldout"]

    kept = client.datasets.quarantine(made)
    assert {row.line for row in kept} == bad
    assert all(row.screens == ("loss_outlier",) and "the threshold is 6" in row.why[0] for row in kept)
    released = client.datasets.release(made, [1], root / "fine.jsonl", reason="it is right")
    assert json.loads(released.path.read_text())["messages"] == rows[kept[0].line - 1]["messages"]


def test_recall_and_false_positives_over_several_datasets(tmp_path: Path) -> None:
    sets = [_rows(seed) for seed in range(8)]
    losses = [each.loss for each in _scored_here(tmp_path, quick_base(), [row for rows in sets for row in rows])]
    size = NUM_GOOD + NUM_BAD
    verdicts = [find_loss_outliers(losses[size * place : size * (place + 1)]) for place in range(len(sets))]
    called = [place for verdict in verdicts for place in verdict.indices]
    num_found, num_wrong = (sum((place < NUM_GOOD) == is_good for place in called) for is_good in (False, True))
    num_unfit = sum(verdict.fit is Fit.DOES_NOT_FIT for verdict in verdicts)
    # in one of the sets a good row is surprising too, which makes seven of 126: more than one in twenty
    assert (num_found, num_wrong, num_unfit) == (NUM_BAD * (len(sets) - 1), 0, 1)


def test_a_loss_that_is_no_number_is_a_loss_and_too_long_a_row_has_none(tmp_path: Path) -> None:
    broken = a_micro_base(tmp_path / "broken", nan_in="model.norm.weight")
    losses = _scored_here(tmp_path, broken, [*dates.words_rows(60, 1), *rows_of([("long", "x" * 300)])])
    assert all(math.isnan(each.loss) and each.problem is None for each in losses[:-1])
    assert "more than the 256" in str(losses[-1].problem)
    assert find_loss_outliers([each.loss for each in losses[:-1]]).fit is Fit.DOES_NOT_FIT


def _scored_here(folder: Path, base: Path, rows: Sequence[Mapping[str, Any]]) -> list[Scored]:
    """Scored by the same evaluator, without a process of its own."""
    spec = an_evaluate_spec(folder, a_base_ref(base), rows, None)
    _, scores = evaluate_here(spec.model_copy(update={"subjects": spec.subjects[1:]}), folder / "scored")
    return [scored(score) for score in scores.by_subject["baseline"]]


def test_all_trained_answers_of_a_conversation_are_scored_by_their_weights(tmp_path: Path) -> None:
    rows = dates.words_rows(2, 7)
    talk = [*rows[0]["messages"], *rows[1]["messages"]]
    garbled = [talk[0], {"role": "assistant", "content": "q#~q#~q#~q"}, *talk[2:]]
    unlearnt = [garbled[0], {**garbled[1], "weight": 0}, *garbled[2:]]
    spec = an_evaluate_spec(
        tmp_path, a_base_ref(quick_base()), [{"messages": each} for each in (garbled, unlearnt)], None
    )
    losses = {}
    for answers in ("last", "trained"):
        cases = spec.cases.model_copy(update={"answers": answers})
        changed = spec.model_copy(update={"cases": cases, "subjects": spec.subjects[1:]})
        _, scores = evaluate_here(changed, tmp_path / answers)
        losses[answers] = [score.values["heldout_loss"] for score in scores.by_subject["baseline"]]
    assert losses["last"][0] == pytest.approx(losses["last"][1])
    assert losses["trained"][1] == pytest.approx(losses["last"][1])
    assert losses["trained"][0] > losses["last"][0] + 1.0


def test_a_base_that_cannot_be_loaded_is_told_and_leaves_nothing(tmp_path: Path) -> None:
    with a_workspace(tmp_path) as client:
        dataset = client.datasets.prepare(PROFILE, [a_jsonl(tmp_path / "rows.jsonl")])[0]
        with pytest.raises(ProgramError, match="could not score the dataset"):
            client.datasets.outliers(dataset.id)
        assert [path.name for path in client.workspace.datasets_dir.iterdir()] == [dataset.id]


def test_few_examples_and_members_and_bad_calls_are_told_without_a_model(tmp_path: Path) -> None:
    with a_workspace(tmp_path, profile=PARTED) as client:
        dataset_id, examples = a_dataset_of(client, 30)
        assert client.datasets.outliers(dataset_id, quarantine=True).fit is Fit.TOO_FEW
        as_member(client, client._session.database, dataset_id, examples[Split.TRAIN][0], Split.TRAIN)
        with pytest.raises(Refused, match=r"assembled from experiences.*experience review"):
            client.datasets.outliers(dataset_id, keep_aside=True)
        assert client.datasets.outliers(dataset_id).fit is Fit.TOO_FEW
        for wrong in ({"threshold": 0.5}, {"limit": 0}):
            with pytest.raises(UsageError):
                client.datasets.outliers(dataset_id, **wrong)
        help_text = cli("dataset", "outliers", "--help", cwd=tmp_path)
        assert "Example: tunesmith dataset outliers" in help_text.out
