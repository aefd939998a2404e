"""One resolved config: the strongest layer wins, and the origin of every key names who said it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.config import HEAD, a_workspace, write_profile
from tunesmith.core.errors import NotFound
from tunesmith.profiles.keys import schema_fields
from tunesmith.profiles.layers import Layer
from tunesmith.profiles.profile import Base, HardwareTier, Profile, Role
from tunesmith.profiles.resolve import Resolved, check_overrides, explain, resolve, resolve_settings, without_password
from tunesmith.profiles.settings import Phase, Settings

LAYERS = (Layer.PROFILE, Layer.CAMPAIGN, Layer.PROJECT, Layer.ENVIRONMENT, Layer.OVERRIDE)
KEYS = {
    "recipe.lr": (2e-4, [1e-5, 3e-5, 1e-4, 3e-4, 1e-3]),
    "recipe.lora_rank": (16, [1, 2, 4, 8, 32]),
    "recipe.packing": (True, [False, True, False, True, False]),
    "recipe.schedule": ("cosine", ["linear", "constant", "cosine", "linear", "constant"]),
    "gate.floors.heldout_loss": (None, [0.1, 0.2, 0.3, 0.4, 0.5]),
    "trainer.options.script.steps": (None, [1, 2, 3, 4, 5]),
}


def nested(values: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for key, value in values.items():
        *above, last = key.split(".")
        place = tree
        for part in above:
            place = place.setdefault(part, {})
        place[last] = value
    return tree


def as_yaml(values: dict[str, Any]) -> str:
    import yaml

    return yaml.safe_dump(nested(values)) if values else ""


def resolve_layers(said: dict[Layer, dict[str, Any]]) -> Resolved:
    """Say each layer's values where that layer is really said."""
    with tempfile.TemporaryDirectory() as folder:
        workspace = a_workspace(Path(folder), as_yaml(said[Layer.PROFILE]), project=as_yaml(said[Layer.PROJECT]))
        environ = {
            "TUNESMITH__" + key.upper().replace(".", "__"): str(value) for key, value in said[Layer.ENVIRONMENT].items()
        }
        return resolve(
            "dates",
            workspace=workspace,
            campaign_overrides=check_overrides(said[Layer.CAMPAIGN]),
            overrides=[f"{key}={value}" for key, value in said[Layer.OVERRIDE].items()],
            environ=environ,
        )


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(st.fixed_dictionaries({key: st.sets(st.sampled_from(LAYERS)) for key in KEYS}))
def test_precedence_any_subset_of_layers_the_strongest_wins_and_is_named(speakers: dict[str, set[Layer]]) -> None:
    said = {
        layer: {key: KEYS[key][1][number] for key, layers in speakers.items() if layer in layers}
        for number, layer in enumerate(LAYERS)
    }
    resolved = resolve_layers(said)
    for key, layers in speakers.items():
        if not layers:
            assert key not in resolved.origins or resolved.origins[key].layer is Layer.DEFAULT
            continue
        winner = max(layers, key=LAYERS.index)
        assert resolved.values[key] == said[winner][key]
        assert resolved.origins[key].layer is winner


def test_origin_of_each_layer_names_file_and_line_variable_or_flag(tmp_path: Path) -> None:
    workspace = a_workspace(
        tmp_path,
        "recipe:\n  lr: 1e-3\n  epochs: 2\n",
        project="# ours\nrecipe:\n  max_grad_norm: 0.5\nworker:\n  poll_s: 1\n",
    )
    resolved = resolve(
        "dates",
        workspace=workspace,
        campaign_overrides={"recipe.epochs": 5.0},
        environ={"TUNESMITH__RECIPE__PACKING": "0", "HOME": "/", "TUNESMITH_WORKSPACE": "/elsewhere"},
        overrides=["recipe.seed=7"],
    )
    origins = {key: str(origin) for key, origin in resolved.origins.items()}
    assert origins["recipe.lr"] == "profiles/dates.yaml:7"
    assert origins["recipe.epochs"] == "campaign"
    assert origins["recipe.max_grad_norm"] == "tunesmith.yaml:3"
    assert origins["recipe.packing"] == "environment TUNESMITH__RECIPE__PACKING"
    assert origins["recipe.seed"] == "--set"
    assert origins["recipe.warmup"] == "schema default"
    assert origins["worker.poll_s"] == "tunesmith.yaml:5"
    assert resolved.profile.recipe.epochs == 5.0
    assert resolved.settings.worker.poll_s == 1.0
    assert resolved.said() == {
        "name": "profiles/dates.yaml:1",
        "role": "profiles/dates.yaml:2",
        "base.path": "profiles/dates.yaml:4",
        "base.family": "profiles/dates.yaml:5",
        "recipe.lr": "profiles/dates.yaml:7",
        "recipe.epochs": "campaign",
        "recipe.max_grad_norm": "tunesmith.yaml:3",
        "recipe.packing": "environment TUNESMITH__RECIPE__PACKING",
        "recipe.seed": "--set",
    }


def test_origins_cover_every_leaf_of_profile_and_settings(tmp_path: Path) -> None:
    resolved = resolve("dates", workspace=a_workspace(tmp_path), environ={})
    fields = {next(known for known in schema_fields() if f"{key}.".startswith(f"{known}.")) for key in resolved.origins}
    assert fields == set(schema_fields())
    assert set(resolved.values) == set(resolved.origins)


def test_nothing_said_equals_the_models_own_defaults(tmp_path: Path) -> None:
    resolved = resolve("dates", workspace=a_workspace(tmp_path), environ={})
    plain = Profile(name="dates", role=Role.EXTRACTOR, base=Base(path="models/tiny", family="llama"))
    assert resolved.profile == plain
    assert resolved.settings == Settings()


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("recipe.lr=2e-4", "recipe.lr", 2e-4),
        ("recipe.lr='2e-4'", "recipe.lr", 2e-4),
        ("recipe.lr = 2e-4", "recipe.lr", 2e-4),
        ("recipe.lr=null", "recipe.lr", None),
        ("recipe.packing=0", "recipe.packing", False),
        ("recipe.packing=true", "recipe.packing", True),
        ("recipe.target_modules=[q_proj,v_proj]", "recipe.target_modules", ["q_proj", "v_proj"]),
        ("recipe={lr: 3e-4, packing: false}", "recipe.lr", 3e-4),
        ("gate.floors.heldout_loss=0.8", "gate.floors.heldout_loss", 0.8),
        ("trainer.options.steps=3", "trainer.options.steps", 3),
        ("trainer.options.plan.fail_at=[1,2]", "trainer.options.plan.fail_at", [1, 2]),
        ("trainer.options.label='3'", "trainer.options.label", "3"),
        ("hardware.tier=small-gpu", "hardware.tier", "small-gpu"),
        ("description=dates: in words #2", "description", "dates: in words #2"),
        ("description='quoted # text'", "description", "quoted # text"),
        ("description=a=b", "description", "a=b"),
    ],
)
def test_set_reads_each_kind_of_value(tmp_path: Path, text: str, key: str, value: Any) -> None:
    resolved = resolve("dates", workspace=a_workspace(tmp_path), environ={}, overrides=[text])
    assert resolved.values[key] == value
    assert type(resolved.values[key]) is type(value)
    assert str(resolved.origins[key]) == "--set"


def test_set_said_twice_the_later_wins(tmp_path: Path) -> None:
    resolved = resolve(
        "dates", workspace=a_workspace(tmp_path), environ={}, overrides=["recipe.seed=1", "recipe.seed=2"]
    )
    assert resolved.profile.recipe.seed == 2


def test_overrides_as_mapping_are_typed_and_named_override(tmp_path: Path) -> None:
    overrides = {"recipe.seed": 3, "recipe": {"packing": False}}
    resolved = resolve("dates", workspace=a_workspace(tmp_path), environ={}, overrides=overrides)
    assert (resolved.profile.recipe.seed, resolved.profile.recipe.packing) == (3, False)
    assert str(resolved.origins["recipe.seed"]) == "override"


def test_mappings_of_layers_add_up_and_an_empty_one_clears(tmp_path: Path) -> None:
    body = "trainer:\n  options: {a: 1, deep: {x: 1, y: 2}}\n"
    workspace = a_workspace(tmp_path, body, project="trainer:\n  options: {b: 2, deep: {y: 3}}\n")
    resolved = resolve("dates", workspace=workspace, environ={})
    assert resolved.profile.trainer.options == {"a": 1, "b": 2, "deep": {"x": 1, "y": 3}}
    assert str(resolved.origins["trainer.options.deep.x"]) == "profiles/dates.yaml:7"
    assert str(resolved.origins["trainer.options.deep.y"]) == "tunesmith.yaml:2"
    cleared = resolve("dates", workspace=workspace, environ={}, overrides=["trainer.options={}"])
    assert cleared.profile.trainer.options == {}
    replaced = resolve("dates", workspace=workspace, environ={}, overrides=["trainer.options.deep=5"])
    assert replaced.profile.trainer.options["deep"] == 5


def test_lists_are_replaced_whole(tmp_path: Path) -> None:
    workspace = a_workspace(tmp_path, "targets:\n- name: one\n- name: two\n")
    resolved = resolve(
        "dates", workspace=workspace, environ={}, overrides=["targets=[{name: three, options: {path: out}}]"]
    )
    assert [target.name for target in resolved.profile.targets] == ["three"]
    assert resolved.profile.targets[0].options == {"path": "out"}


def test_fingerprint_follows_values_not_who_said_them(tmp_path: Path) -> None:
    workspace = a_workspace(tmp_path)
    plain = resolve("dates", workspace=workspace, environ={})
    same = resolve(
        "dates", workspace=workspace, environ={"TUNESMITH__RECIPE__LORA_RANK": "16"}, overrides=["recipe.epochs=3"]
    )
    other = resolve("dates", workspace=workspace, environ={}, overrides=["recipe.lora_rank=8"])
    settings_only = resolve("dates", workspace=workspace, environ={"TUNESMITH__WORKER__POLL_S": "9"})
    assert plain.fingerprint == same.fingerprint == settings_only.fingerprint
    assert other.fingerprint != plain.fingerprint
    assert len(plain.fingerprint) == 64


def test_settings_alone_need_no_profile(tmp_path: Path) -> None:
    workspace = a_workspace(
        tmp_path, project="worker:\n  lease_s: 3\n  heartbeat_s: 1\n  phase_deadlines_s:\n    train: 9\n"
    )
    (workspace.profiles_dir / "dates.yaml").write_text("broken: [")
    found = resolve_settings(workspace, environ={"TUNESMITH__STORE__URL": "sqlite:////tmp/x.db"})
    assert found.store.url == "sqlite:////tmp/x.db"
    assert found.worker.lease_s == 3.0
    assert found.worker.phase_deadlines_s[Phase.TRAIN] == 9.0
    assert found.worker.phase_deadlines_s[Phase.SAVE] == 300.0


def test_enum_values_from_text_become_members(tmp_path: Path) -> None:
    workspace = a_workspace(tmp_path, "hardware: {tier: consumer-gpu}\n")
    assert resolve("dates", workspace=workspace, environ={}).profile.hardware.tier is HardwareTier.CONSUMER_GPU


def test_explain_lists_every_key_with_value_origin_and_doc(tmp_path: Path) -> None:
    resolved = resolve("dates", workspace=a_workspace(tmp_path), environ={}, overrides=["recipe.lr=2e-4"])
    rows = {row.key: row for row in explain(resolved)}
    assert list(rows) == list(resolved.origins)
    assert all(row.doc for row in rows.values())
    assert (rows["recipe.lr"].value, str(rows["recipe.lr"].origin)) == (2e-4, "--set")


def test_explain_one_key_or_one_section(tmp_path: Path) -> None:
    resolved = resolve("dates", workspace=a_workspace(tmp_path), environ={}, overrides=["trainer.options.a.b=1"])
    assert [row.key for row in explain(resolved, "recipe.lr")] == ["recipe.lr"]
    assert {row.key.partition(".")[0] for row in explain(resolved, "recipe")} == {"recipe"}
    assert [row.key for row in explain(resolved, "trainer.options")] == ["trainer.options.a.b"]
    with pytest.raises(NotFound, match=r"recipe\.learning_rte: unknown key; did you mean 'lr'\?"):
        explain(resolved, "recipe.learning_rte")


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://me:s3cret@host/db", "postgresql://me:…@host/db"),
        ("postgresql://me:s3@cr:et@host/db", "postgresql://me:…@host/db"),
        ("postgresql://host/db?user=me&password=s3cret&x=1", "postgresql://host/db?user=me&password=…&x=1"),
        ("postgresql://me@host/db", "postgresql://me@host/db"),
        ("sqlite:////data/store.db", "sqlite:////data/store.db"),
        (None, None),
    ],
)
def test_explain_hides_the_stores_password(tmp_path: Path, url: str | None, shown: str | None) -> None:
    assert without_password(url) == shown
    if url is not None:
        resolved = resolve("dates", workspace=a_workspace(tmp_path), environ={"TUNESMITH__STORE__URL": url})
        assert [row.value for row in explain(resolved, "store.url")] == [shown]


def test_profile_said_in_profile_file_of_other_name_is_its_own(tmp_path: Path) -> None:
    workspace = a_workspace(tmp_path)
    write_profile(workspace, "recipe: {seed: 9}\n", head=HEAD.replace("dates", "other"), name="other")
    assert resolve("other", workspace=workspace, environ={}).profile.recipe.seed == 9
    assert resolve("dates", workspace=workspace, environ={}).profile.recipe.seed == 1


def test_same_words_are_resolved_once_and_every_change_counts_at_once(tmp_path: Path) -> None:
    """Every captured answer asks for the rules of its profile."""
    workspace = a_workspace(tmp_path)
    first = resolve("dates", workspace=workspace, environ={})
    assert resolve("dates", workspace=workspace, environ={"HOME": "/elsewhere"}) is first
    by_campaign = resolve("dates", workspace=workspace, campaign_overrides={"recipe.seed": 5}, environ={})
    assert (first.profile.recipe.seed, by_campaign.profile.recipe.seed) == (1, 5)
    assert resolve("dates", workspace=workspace, environ={"TUNESMITH__RECIPE__SEED": "6"}).profile.recipe.seed == 6
    assert resolve("dates", workspace=workspace, overrides=["recipe.seed=7"], environ={}).profile.recipe.seed == 7
    before = workspace.project_file.read_text()
    workspace.project_file.write_text(before + "recipe: {seed: 8}\n")
    assert resolve("dates", workspace=workspace, environ={}).profile.recipe.seed == 8
    workspace.project_file.write_text(before)
    assert resolve("dates", workspace=workspace, environ={}) is first
    write_profile(workspace, "recipe: {seed: 9}\n")
    assert resolve("dates", workspace=workspace, environ={}).profile.recipe.seed == 9
