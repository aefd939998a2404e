"""The words of a model card: no markup and no HTML from names, honest limits, tables that stay tables."""

from __future__ import annotations

from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st

from tunesmith.lineage.rules.card import checks, code, comparisons, document, passes, plain, table, weights_in_words
from tunesmith.lineage.rules.limits import limits_of

RECIPE = {
    "tuning": "lora", "lora_rank": 16, "lora_alpha": 32.0, "lora_dropout": 0.0, "target_modules": "all-linear",
    "dora": False, "rslora": False, "quantize": "none", "train_embeddings": "auto",
}  # fmt: skip


def measured(**changes: Any) -> dict[str, Any]:
    values = {
        "metric": "heldout_loss", "better": "lower", "n": 60, "baseline": 1.0, "candidate": 0.5, "difference": 0.5,
        "low": 0.4, "high": 0.6, "problem": None,
    }  # fmt: skip
    return {**values, **changes}


def facts(*comparisons: dict[str, Any], **changes: Any) -> dict[str, Any]:
    report = {"num_cases": 500, "confidence": 0.95, "comparisons": list(comparisons), "established": measured()}
    values = {
        "report": report, "baseline": "support@v1", "decision": "promote", "is_forced": False, "min_cases": 50,
        "num_train": 1000, "members": None, "has_licence": True, "has_libraries": True, "dirty": "no",
        "forgotten_since": False, "data_is_there": True,
    }  # fmt: skip
    return {**values, **changes}


@given(st.text(max_size=80))
def test_plain_text_is_one_line_without_html_or_table_ends(text: str) -> None:
    shown = plain(text)
    assert "<" not in shown
    assert "\n" not in shown
    assert shown.isprintable()
    assert "|" not in shown.replace("\\|", "")


@given(st.text(min_size=1, max_size=80))
def test_code_span_cannot_be_ended_from_inside(text: str) -> None:
    shown = code(text)
    assert shown.count("`") == 2
    assert "|" not in shown
    assert "\n" not in shown


def test_links_and_images_of_a_description_are_shown_not_made() -> None:
    assert plain("![x](http://a/b) <img src=x> *b*") == r"![x\](http://a/b) &lt;img src=x&gt; \*b\*"
    assert (
        plain("improvement +3.86 [+3.33, +4.42] of heldout_loss") == "improvement +3.86 [+3.33, +4.42] of heldout_loss"
    )


def test_front_matter_is_yaml_whatever_a_name_holds() -> None:
    name = 'a: "b"\n---\nevil: yes # <script>'
    card = document({"base_model": name, "tags": ["tunesmith", name]}, [("Title", ["Words."])], "Last.")
    head = card.split("\n---\n")[0].removeprefix("---\n")
    assert yaml.safe_load(head) == {"base_model": name, "tags": ["tunesmith", name]}


def test_prose_wraps_and_tables_stay_whole() -> None:
    long = f"{'word ' * 50}`one command of several words` and {'more ' * 20}"
    card = document({}, [("Title", [long, *table(("a", "b"), [(long, "1")]), f"- {long}", "- two"])], "Last.")
    lines = card.splitlines()
    assert max(len(line) for line in lines if not line.startswith("|")) <= 100
    assert [line[:4] for line in lines if line.startswith("|")] == ["| a ", "|---", "| wo"]
    assert lines[lines.index("- two") - 1].startswith("  "), "one list"
    assert lines[-1] == "Last."
    assert card.count("`one command of several words`") == 3


def test_comparison_without_numbers_says_why() -> None:
    rows = comparisons({"comparisons": [measured(), measured(metric="em", candidate=None, problem="no score | x")]})
    assert rows[2] == "| `heldout_loss` | lower | 1 | 0.5 | +0.5 [+0.4, +0.6] | 60 |"
    assert r"no numbers: no score \| x" in rows[3]


def test_comparison_says_what_only_is_shown_and_how_many_cases_it_applies_to() -> None:
    rows = comparisons({"comparisons": [measured(shown_only=True, num_left_out=4)]})
    assert rows[2].startswith("| `heldout_loss`, shown only: it decides nothing | lower |")
    assert rows[2].endswith("| 60 (4 left out) |")


def test_checks_of_a_verdict_are_shown_where_it_has_them() -> None:
    check = {"name": "better than the baseline", "metric": "em", "actual": 0.5, "needs": "≥", "threshold": 0.0,
             "setting": "gate.min_gain", "origin": "default", "n": 60, "passed": True}  # fmt: skip
    rows = checks({"checks": [check, {**check, "metric": None, "actual": None, "passed": False}]})
    assert rows[2] == "| better than the baseline | `em` | 0.5 | ≥ 0 (`gate.min_gain`) | 60 | passed |"
    assert rows[3] == "| better than the baseline |  | no numbers | ≥ 0 (`gate.min_gain`) | 60 | **failed** |"
    assert checks({"decision": "promote", "reasons": []}) == []


def test_recipe_in_words() -> None:
    assert weights_in_words(RECIPE) == "LoRA of rank 16, alpha 32, dropout 0, on all linear layers."
    assert weights_in_words({**RECIPE, "tuning": "full"}) == "Every weight of the model was trained."
    told = weights_in_words({**RECIPE, "quantize": "nf4", "dora": True, "target_modules": ["q_proj", "v_proj"]})
    assert told == "DoRA of rank 16, alpha 32, dropout 0, on q_proj, v_proj over the base in 4 bits (nf4)."
    assert passes(1, None) == "1 pass over the training split"
    assert passes(3, 40) == "at most 40 steps, within 3 passes over the training split"


def test_good_evidence_leaves_only_what_nobody_measures() -> None:
    lines = limits_of(facts(measured()))
    assert len(lines) == 2
    assert lines[-1].startswith("Not measured: safety")


def test_every_weakness_is_admitted() -> None:
    weak = facts(
        measured(low=-0.1), measured(metric="em", high=-0.2), measured(metric="x", low=None, high=None, problem="none"),
        baseline="the bare base", decision="reject", is_forced=True, num_train=20, has_licence=False,
        has_libraries=False, dirty="yes", forgotten_since=True, data_is_there=False,
        members={"num": 30, "answered_by": {"support@v1": 20, "support@base": 5}},
    )  # fmt: skip
    weak["report"] = {**weak["report"], "num_cases": 60, "established": None}
    told = "\n".join(limits_of(weak))
    for words in (
        "Few cases: 60 held-out cases (its gate asked for 50)",
        "the bare base only",
        "No measurable difference in `heldout_loss`",
        "Measurably worse in `em`",
        "Without numbers: `x`",
        "Old skills were not measured",
        "past the gate",
        "rejected it",
        "Little data: 20 training examples",
        "25 of its 30 experiences",
        "forgotten later",
        "licence of the base is unknown",
        "library versions of the training are unknown",
        "uncommitted changes",
        "report cannot be read",
    ):
        assert words in told, words


def test_nothing_measured_is_said_first() -> None:
    assert limits_of(facts(report=None, baseline=None, decision=None))[0].startswith("Nothing was measured")
