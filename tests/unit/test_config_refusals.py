"""Every wrong setting is refused with one line: where it was said, which key, why, and what to do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from support.config import HEAD, a_workspace, write_profile
from tunesmith.core.errors import ConfigError, NotFound, UsageError, did_you_mean
from tunesmith.profiles.keys import schema_fields
from tunesmith.profiles.profile import Profile
from tunesmith.profiles.resolve import check_overrides, list_profiles, resolve, resolve_settings
from tunesmith.profiles.value_checks import _kinds


def refusal(tmp_path: Path, body: str | bytes = "", project: str | None = None, **layers: Any) -> str:
    workspace = a_workspace(tmp_path, project=project)
    write_profile(workspace, body)
    with pytest.raises(ConfigError) as caught:
        resolve("dates", workspace=workspace, **{"environ": {}, **layers})
    assert "Traceback" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("learning_rte", "1", "unknown key; did you mean 'lr'?"),
        ("learning_rate", "1", "unknown key; did you mean 'lr'?"),
        ("rank", "8", "unknown key; did you mean 'lora_rank'?"),
        ("r", "8", "unknown key; did you mean 'lora_rank'?"),
        ("alpha", "8", "unknown key; did you mean 'lora_alpha'?"),
        ("batch_size", "8", "unknown key; did you mean 'batch_tokens'?"),
        ("max_seq_length", "8", "unknown key; did you mean 'max_length'?"),
        ("LR", "1e-4", "unknown key; did you mean 'lr'?"),
        ("lora-rank", "8", "unknown key; did you mean 'lora_rank'?"),
        ("tier", "cpu", "unknown key; did you mean 'hardware.tier'?"),
        ("zzzz", "1", "unknown key; known: activation_checkpointing, batch_tokens, "),
        ("trust_remote_code", "true", "tunesmith never executes code that comes with a model"),
        ("lr", "'1e-4'", "'1e-4' is text; write the number without quotes"),
        ("lr", "fast", "'fast' is not a number > 0 and ≤ 1"),
        ("lr", "0", "0 is out of range; must be a number > 0 and ≤ 1"),
        ("lr", "-1", "-1 is out of range; must be a number > 0 and ≤ 1"),
        ("lr", "7", "7 is out of range; must be a number > 0 and ≤ 1"),
        ("lr", ".nan", "nan is not a finite number; must be a number > 0 and ≤ 1"),
        ("lr", ".inf", "inf is not a finite number"),
        ("lr", "1e999", "inf is not a finite number"),
        ("lr", "true", "true is not a number"),
        ("lr", "[1]", "the list [1] is not a number"),
        ("lr", "{a: 1}", "a mapping is not a number"),
        ("lora_rank", "0", "0 is out of range; must be a whole number ≥ 1 and ≤ 512"),
        ("lora_rank", "-1", "-1 is out of range"),
        ("lora_rank", "16.0", "16.0 is not a whole number"),
        ("lora_rank", "null", "is empty (null); must be a whole number"),
        ("seed", "4294967296", "must be a whole number ≥ 0 and < 4294967296"),
        ("packing", "yes", "'yes' is text; write true or false"),
        ("packing", "1", "1 is not true or false"),
        ("method", "stf", "'stf' is not one of auto, sft, dpo, orpo, kto; did you mean 'sft'?"),
        ("schedule", "exp", "'exp' is not one of cosine, linear, constant"),
        ("target_modules", "q_proj", "'q_proj' is not a list (each text) or all-linear"),
        ("target_modules", "[]", "name at least one module"),
        ("target_modules", "[q_proj, 3]", "is not a list (each text)"),
        ("target_modules", "['$(reboot)']", "a module's name holds only"),
    ],
)
def test_recipe_wrong_refused_on_its_line(tmp_path: Path, key: str, value: str, reason: str) -> None:
    message = refusal(tmp_path, f"recipe:\n  {key}: {value}\n")
    assert message.startswith(f"profiles/dates.yaml:7: recipe.{key}: ")
    assert reason in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("body", "key", "reason"),
    [
        ("lr: 1e-4", "lr", "did you mean 'recipe.lr'?"),
        ("learning_rte: 1", "learning_rte", "did you mean 'recipe.lr'?"),
        ("recipe.lr: 1e-4", "recipe.lr", "write one level per dot"),
        ("recip: {lr: 1}", "recip", "did you mean 'recipe'?"),
        ("trust_remote_code: true", "trust_remote_code", "never executes code"),
        ("recipe: fast", "recipe", "is a section, so it holds keys"),
        ("recipe: [1]", "recipe", "is a section, so it holds keys"),
        ("store: {url: 'sqlite:////x.db'}", "store.url", "belongs in tunesmith.yaml"),
        ("worker: {lease_s: 5}", "worker.lease_s", "belongs in tunesmith.yaml"),
        ("targets: [{knd: directory}]", "targets.0.knd", "did you mean 'kind'?"),
        ("targets: [{name: 'a; rm -rf /'}]", "targets.0.name", "use lower-case letters"),
        ("targets: [3]", "targets.0", "3 is not a mapping with name, kind, options"),
        ("targets: {kind: directory}", "targets", "a mapping is not a list"),
        ("targets: []", "targets", "name at least one target"),
        ("targets: [{name: a}, {name: a}]", "targets", "two targets have the same name"),
        ("gate: {floors: {exact_match_greedy: high}}", "gate.floors.exact_match_greedy", "'high' is not a number"),
        ("gate: {floors: {exact_match_greedy: .8}}", "gate.floors.exact_match_greedy", "not among evaluation.metrics"),
        ("gate: {floors: 3}", "gate.floors", "3 is not a mapping"),
        ("gate: {primary: exact_match_greedy}", "gate.primary", "is not among evaluation.metrics"),
        ("hardware: {tier: gpu}", "hardware.tier", "one of cpu, small-gpu, consumer-gpu, datacenter-gpu"),
        ("trainer: {options: {a: {b: .nan}}}", "trainer.options.a.b", "holds NaN or infinity"),
        ("trainer: {options: {a.b: 1}}", "trainer.options.a.b", "the name 'a.b' is empty or holds a dot"),
        ("data: {heldout_share: 0.8, validation_share: 0.3}", "data.heldout_share", "leaves nothing to train on"),
        ("data: {heldout_share: 0}", "data.heldout_share", "0 is out of range; must be a number > 0 and < 0.9"),
    ],
)
def test_profile_wrong_refused_on_its_line(tmp_path: Path, body: str, key: str, reason: str) -> None:
    message = refusal(tmp_path, body)
    assert message.startswith(f"profiles/dates.yaml:6: {key}: ")
    assert reason in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("head", "reason"),
    [
        (HEAD.replace("name: dates", "name: other"), "name: is 'other', but the file is dates.yaml"),
        (HEAD.replace("name: dates", "name: 'a b; rm'"), "name: use lower-case letters"),
        (HEAD.replace("name: dates\n", ""), "name: is required (text)"),
        (HEAD.replace("family: llama", "family: mixtral"), "base.family: 'mixtral' is not allowed for role extractor"),
        (HEAD.replace("family: llama", "family: lla"), "base.family: 'lla' is not allowed"),
        (HEAD.replace("  family: llama\n", ""), "base.family: is required (text): The model_type"),
        (HEAD.replace("extractor", "boss"), "role: 'boss' is not one of assistant, extractor"),
        (HEAD + "  trust_remote_code: true\n", "base.trust_remote_code: tunesmith never executes code"),
        (HEAD + "  context: 1\n", "base.context: 1 is out of range; must be a whole number ≥ 16"),
        (HEAD + "enabled: false\n", "disabled_reason: say why the profile is disabled"),
    ],
)
def test_profile_identity_wrong_refused(tmp_path: Path, head: str, reason: str) -> None:
    message = refusal(tmp_path, head.encode())
    assert message.startswith("profiles/dates.yaml")
    assert reason in message


@pytest.mark.parametrize(
    "content", ["SECRET and nothing else\n", "SECRET: 1\n", "- SECRET\n", "a: *SECRET\n", "'SECRET\n"]
)
def test_no_word_of_a_file_that_a_link_leads_to_is_repeated(tmp_path: Path, content: str) -> None:
    workspace = a_workspace(tmp_path / "ws")
    foreign = tmp_path / "foreign"
    foreign.write_text(content)
    profile = workspace.profiles_dir / "dates.yaml"
    profile.unlink()
    profile.symlink_to(foreign)
    for look in (lambda: resolve("dates", workspace=workspace, environ={}), lambda: list_profiles(workspace, {})):
        try:
            said = str(look())
        except ConfigError as error:
            said = error.message
        assert "SECRET" not in said
        assert "outside the workspace" in said
    workspace.project_file.unlink()
    workspace.project_file.symlink_to(foreign)
    with pytest.raises(ConfigError, match="outside the workspace") as caught:
        resolve_settings(workspace, {})
    assert "SECRET" not in caught.value.message


def test_a_single_value_in_place_of_a_profile_is_not_repeated(tmp_path: Path) -> None:
    assert "SECRET" not in refusal(tmp_path, b"SECRET and nothing else")


def test_empty_profile_lists_every_required_key(tmp_path: Path) -> None:
    lines = refusal(tmp_path, b"").splitlines()
    assert [line.split(": ")[1] for line in lines] == ["name", "role", "base.path", "base.family"]


def test_all_problems_of_all_layers_reported_at_once(tmp_path: Path) -> None:
    message = refusal(
        tmp_path,
        "recipe: {lr: 0, lora_rank: 0}",
        project="gate:\n  min_cases: 1\n",
        campaign_overrides={"recipe.epochs": 0},
        environ={"TUNESMITH__RECIPE__MAX_GRAD_NORM": "0"},
        overrides=["recipe.warmup=2"],
    )
    starts = [
        "profiles/dates.yaml:6: recipe.lr:",
        "profiles/dates.yaml:6: recipe.lora_rank:",
        "campaign: recipe.epochs:",
        "tunesmith.yaml:2: gate.min_cases:",
        "environment TUNESMITH__RECIPE__MAX_GRAD_NORM: recipe.max_grad_norm:",
        "--set recipe.warmup:",
    ]
    lines = message.splitlines()
    assert len(lines) == len(starts)
    assert all(line.startswith(start) for line, start in zip(lines, starts, strict=True))


def test_many_problems_are_cut_with_a_count(tmp_path: Path) -> None:
    message = refusal(tmp_path, "".join(f"bad{n}: 1\n" for n in range(500)))
    assert len(message.splitlines()) == 21
    assert message.endswith("… and 480 more")


@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("TUNESMITH__RECIPE__LRR", "1", "recipe.lrr: unknown key; did you mean 'lr'?"),
        ("TUNESMITH__RECIPEE__LR", "1", "recipee: unknown key; did you mean 'recipe'?"),
        ("TUNESMITH__", "1", "unknown key"),
        ("TUNESMITH__RECIPE__PACKING", "2", "recipe.packing: 2 is not true or false"),
        ("TUNESMITH__RECIPE__PACKING", "", "recipe.packing: is empty; must be true or false"),
        ("TUNESMITH__RECIPE__LR", "abc", "recipe.lr: 'abc' is not a number"),
        ("TUNESMITH__RECIPE__LR", "\udcff", "recipe.lr: holds characters that are not valid text"),
        ("TUNESMITH__RECIPE", "3", "recipe: is a section"),
        ("TUNESMITH__NAME", "x", "name: belongs in the profile's own file"),
        ("TUNESMITH__BASE__PATH", "/x", "base.path: belongs in the profile's own file"),
        ("TUNESMITH__WORKER__LEASE_S", "3", "worker.heartbeat_s: 10 must be less than half of worker.lease_s (3)"),
        ("TUNESMITH__WORKER__PHASE_DEADLINES_S__TRIAN", "3", "unknown key; did you mean 'train'?"),
    ],
)
def test_environment_wrong_refused_by_variable(tmp_path: Path, variable: str, value: str, reason: str) -> None:
    message = refusal(tmp_path, environ={variable: value})
    assert message.startswith(f"environment {variable}: ")
    assert reason in message
    assert "\n" not in message


@pytest.mark.parametrize("text", ["recipe.lr", "", "=1e-4", " =3"])
def test_set_without_key_and_value_is_a_usage_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(UsageError, match="write it as key=value"):
        resolve("dates", workspace=a_workspace(tmp_path), environ={}, overrides=[text])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("recipe.learning_rte=1", "recipe.learning_rte: unknown key; did you mean 'lr'?"),
        ("recipe.lr.x=1", "recipe.lr.x: unknown key; recipe.lr has nothing below it"),
        ("name=other", "name: cannot be overridden"),
        ("recipe=[1]", "recipe: is a section"),
        ("gate.floors=[1", "gate.floors: '[1' is not a mapping"),
        ("recipe.lora_rank=NaN", "recipe.lora_rank: 'NaN' is not a whole number"),
        ("recipe.lora_rank=1e999", "recipe.lora_rank: inf is not a finite number"),
        ("recipe..lr=1", "recipe.: unknown key"),
        ("rec\nipe.lr=1", "'rec\\nipe': unknown key; did you mean 'recipe'?"),
    ],
)
def test_set_wrong_refused_by_key(tmp_path: Path, text: str, reason: str) -> None:
    message = refusal(tmp_path, overrides=[text])
    assert message.startswith(f"--set {reason}")
    assert "\n" not in message


def test_store_url_with_password_is_never_repeated(tmp_path: Path) -> None:
    for value in ("mysql://me:hunter2@host/db", "3", "[hunter2]"):
        message = refusal(tmp_path / value.replace("/", "_"), overrides=[f"store.url={value}"])
        assert "hunter2" not in message
        assert message.startswith("--set store.url: must be")


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ({"recipe": {"learning_rte": 1}}, "campaign: recipe.learning_rte: unknown key; did you mean 'lr'?"),
        ({"recipe.learning_rte": 1}, "campaign: recipe.learning_rte: unknown key; did you mean 'lr'?"),
        ({"recipe.lr": "1e-4"}, "campaign: recipe.lr: '1e-4' is text"),
        ({"recipe.lr": 0}, "campaign: recipe.lr: 0 is out of range"),
        ({"store.url": "sqlite:///x"}, "campaign: store.url: belongs in tunesmith.yaml"),
        ({"name": "x"}, "campaign: name: belongs in the profile's own file"),
        ({"role": "coder"}, "campaign: role: belongs in the profile's own file"),
        ({"base": {"path": "elsewhere"}}, "campaign: base.path: belongs in the profile's own file"),
        ({"trainer.options.when": {1, 2}}, "campaign: trainer.options.when: holds something that cannot be written"),
        (["recipe.lr=0"], "--set recipe.lr: 0 is out of range"),
    ],
)
def test_campaign_overrides_wrong_refused_at_creation(overrides: Any, reason: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_overrides(overrides)
    assert caught.value.message.startswith(reason)


def test_campaign_overrides_from_nested_flat_and_text_are_stored_alike() -> None:
    flat = {"recipe.lr": 1e-4, "recipe.packing": False, "gate.floors.exact_match_greedy": 0.8}
    nested = {"recipe": {"lr": 1e-4, "packing": False}, "gate": {"floors": {"exact_match_greedy": 0.8}}}
    texts = ["recipe.lr=1e-4", "recipe.packing=0", "gate.floors.exact_match_greedy=0.8"]
    assert check_overrides(flat) == check_overrides(nested) == check_overrides(texts) == flat
    assert check_overrides(check_overrides(texts)) == flat


@pytest.mark.parametrize(
    ("project", "reason"),
    [
        ("workr: {lease_s: 3}", "tunesmith.yaml:1: workr: unknown key; did you mean 'worker'?"),
        ("worker: {leas_s: 3}", "tunesmith.yaml:1: worker.leas_s: unknown key; did you mean 'lease_s'?"),
        ("worker:\n  lease_s: 20\n", "tunesmith.yaml:2: worker.heartbeat_s: 10 must be less than half"),
        ("worker:\n  phase_deadlines_s:\n    trian: 3\n", "tunesmith.yaml:3: worker.phase_deadlines_s.trian: unknown"),
        ("worker:\n  phase_deadlines_s:\n    train: 0\n", "tunesmith.yaml:3: worker.phase_deadlines_s.train: 0 is out"),
        ("store:\n  url: mysql://x\n", "tunesmith.yaml:2: store.url: must begin with sqlite:/// or postgresql://"),
        ("name: x", "tunesmith.yaml:1: name: belongs in the profile's own file"),
        ("recipe: {learning_rte: 1}", "tunesmith.yaml:1: recipe.learning_rte: unknown key; did you mean 'lr'?"),
        ("- 1", "tunesmith.yaml: must be a mapping"),
    ],
)
def test_project_file_wrong_refused_for_settings_alone(tmp_path: Path, project: str, reason: str) -> None:
    workspace = a_workspace(tmp_path, project=project)
    with pytest.raises(ConfigError) as caught:
        resolve_settings(workspace, environ={})
    assert caught.value.message.startswith(reason)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("name", ["../dates", "", "data", "a" * 10_000, "x\x00y", "/etc/passwd", "dates.yaml", "a;b"])
def test_profile_name_unknown_or_hostile_is_not_found(tmp_path: Path, name: str) -> None:
    with pytest.raises(NotFound) as caught:
        resolve(name, workspace=a_workspace(tmp_path), environ={})
    assert "dates" in caught.value.message
    assert len(caught.value.message) < 300
    assert "\n" not in caught.value.message


def test_profile_list_shows_broken_ones_beside_good_ones(tmp_path: Path) -> None:
    workspace = a_workspace(tmp_path)
    write_profile(workspace, "recipe: {lr: 0}", head=HEAD.replace("dates", "broken"), name="broken")
    (workspace.profiles_dir / "Bad Name.yaml").write_text("name: x")
    entries = {entry.name: entry for entry in list_profiles(workspace, environ={})}
    assert set(entries) == {"dates", "broken", "Bad Name"}
    assert entries["dates"].profile is not None
    assert entries["dates"].error is None
    assert entries["broken"].profile is None
    assert "recipe.lr: 0 is out of range" in (entries["broken"].error or "")
    assert "lower-case" in (entries["Bad Name"].error or "")


@pytest.mark.parametrize("variable", ["TUNESMITH_RECIPE__LR", "TUNESMITH_RECIPE_LR", "tunesmith__recipe__lr"])
def test_variable_that_would_be_ignored_is_told(tmp_path: Path, variable: str) -> None:
    told = refusal(tmp_path, environ={variable: "1e-4", "TUNESMITH_DEBUG": "1", "TUNESMITH_OF_MY_OWN": "1"})
    assert told == f"environment {variable}: recipe.lr: would be ignored; write TUNESMITH__RECIPE__LR"


@pytest.mark.parametrize("text", ["", "  "])
def test_empty_text_is_not_null(tmp_path: Path, text: str) -> None:
    wanted = "recipe.lr: is empty; must be a number > 0 and ≤ 1 or null"
    assert wanted in refusal(tmp_path / "environment", environ={"TUNESMITH__RECIPE__LR": text})
    assert wanted in refusal(tmp_path / "flag", overrides=[f"recipe.lr={text}"])


def test_empty_text_stays_a_text(tmp_path: Path) -> None:
    workspace = a_workspace(tmp_path)
    write_profile(workspace, "")
    said = resolve("dates", workspace=workspace, environ={}, overrides=["description=", "recipe.lr=null"]).profile
    assert (said.description, said.recipe.lr) == ("", None)


@pytest.mark.parametrize("key", ["store.url=sqlite:///x.db", "worker.lease_s=9", "serve.port=1"])
def test_run_cannot_override_what_holds_for_the_workspace(tmp_path: Path, key: str) -> None:
    assert "holds for the whole workspace" in refusal(tmp_path, overrides=[key])


def _numbers() -> list[str]:
    return [
        key
        for key, place in schema_fields().items()
        if {int, float} & _kinds(place.info.annotation) and place.path[0] in Profile.model_fields
    ]


@pytest.mark.parametrize("value", ["1e308", "-1e308", "1e999", "1" + "0" * 40, "nan"])
def test_no_number_of_the_profile_may_be_absurd(tmp_path: Path, value: str) -> None:
    keys = _numbers()
    assert len(keys) > 50
    workspace = a_workspace(tmp_path)
    write_profile(workspace, "")
    for key in keys:
        with pytest.raises(ConfigError, match=re.escape(key)):
            resolve("dates", workspace=workspace, environ={}, overrides=[f"{key}={value}"])


def test_minus_zero_is_zero(tmp_path: Path) -> None:
    workspace = a_workspace(tmp_path)
    write_profile(workspace, "")
    one, other = (
        resolve("dates", workspace=workspace, environ={}, overrides=[f"recipe.warmup={text}"]) for text in ("0", "-0.0")
    )
    assert one.fingerprint == other.fingerprint


def test_names_that_look_alike_are_told_apart() -> None:
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    assert did_you_mean(decomposed, [composed]) == (
        f"; did you mean '{composed}' (there with U+00E9, here U+0065 U+0301)?"
    )
    assert did_you_mean("Dates", ["dates"]) == "; did you mean 'dates'?"
    assert did_you_mean("date", ["dates"]) == "; did you mean 'dates'?"
