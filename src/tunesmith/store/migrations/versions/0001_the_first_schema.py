"""The first schema."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "events",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("entity", sa.Text(), nullable=False),
        sa.Column("entity_id", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("old_state", sa.Text(), nullable=True),
        sa.Column("new_state", sa.Text(), nullable=True),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.Column("at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_events")),
    )
    op.create_index("ix_events_entity", "events", ["entity", "entity_id", "seq"], unique=False)
    op.create_table(
        "profiles",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("lock", sa.JSON(), nullable=False),
        sa.Column("locked_at", sa.BigInteger(), nullable=False),
        sa.Column("num_versions", sa.Integer(), server_default="0", nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_profiles")),
    )
    op.create_table(
        "switches",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("is_on", sa.Boolean(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("moved_at", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("name", name=op.f("pk_switches")),
    )
    op.create_table(
        "workers",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("host", sa.Text(), nullable=False),
        sa.Column("process", sa.Text(), nullable=False),
        sa.Column("kinds", sa.JSON(), nullable=False),
        sa.Column("started_at", sa.BigInteger(), nullable=False),
        sa.Column("seen_clock", sa.Text(), nullable=False),
        sa.Column("seen_until", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_workers")),
    )
    op.create_table(
        "campaigns",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("profile", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("overrides", sa.JSON(), nullable=False),
        sa.Column("budget", sa.JSON(), nullable=False),
        sa.Column("code_version", sa.Text(), nullable=False),
        sa.Column("config_hash", sa.Text(), nullable=False),
        sa.Column("parent_id", sa.Text(), nullable=True),
        sa.Column("counters", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("state IN ('active', 'paused', 'archived')", name=op.f("ck_campaigns_state")),
        sa.ForeignKeyConstraint(["parent_id"], ["campaigns.id"], name=op.f("fk_campaigns_parent_id")),
        sa.ForeignKeyConstraint(["profile"], ["profiles.name"], name=op.f("fk_campaigns_profile")),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_campaigns")),
        sa.UniqueConstraint("id", name=op.f("uq_campaigns_id")),
    )
    op.create_index(
        "uq_campaigns_active",
        "campaigns",
        ["profile"],
        unique=True,
        sqlite_where=sa.text("state = 'active'"),
        postgresql_where=sa.text("state = 'active'"),
    )
    op.create_table(
        "datasets",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("profile", sa.Text(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("fingerprint", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("counts", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("reserved_until", sa.BigInteger(), nullable=True),
        sa.ForeignKeyConstraint(["profile"], ["profiles.name"], name=op.f("fk_datasets_profile")),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_datasets")),
        sa.UniqueConstraint("id", name=op.f("uq_datasets_id")),
    )
    op.create_index("ix_datasets_fingerprint", "datasets", ["profile", "fingerprint"], unique=False)
    op.create_table(
        "heldout_cases",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("profile", sa.Text(), nullable=False),
        sa.Column("case_id", sa.Text(), nullable=False),
        sa.Column("messages", sa.JSON(), nullable=False),
        sa.Column("dataset_id", sa.Text(), nullable=False),
        sa.Column("added_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["dataset_id"], ["datasets.id"], name=op.f("fk_heldout_cases_dataset_id")),
        sa.ForeignKeyConstraint(["profile"], ["profiles.name"], name=op.f("fk_heldout_cases_profile")),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_heldout_cases")),
        sa.UniqueConstraint("dataset_id", "case_id", name=op.f("uq_heldout_cases_dataset_id_case_id")),
    )
    op.create_index("ix_heldout_cases_profile", "heldout_cases", ["profile", "seq"], unique=False)
    op.create_table(
        "runs",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("profile", sa.Text(), nullable=False),
        sa.Column("campaign_id", sa.Text(), nullable=True),
        sa.Column("dataset_id", sa.Text(), nullable=False),
        sa.Column("parent_id", sa.Text(), nullable=True),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("automatic", sa.Boolean(), nullable=False),
        sa.Column("idempotency_key", sa.Text(), nullable=True),
        sa.Column("body_hash", sa.Text(), nullable=False),
        sa.Column("spec", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("created_by", sa.Text(), nullable=False),
        sa.Column("moved_at", sa.BigInteger(), nullable=False),
        sa.Column("finished_at", sa.BigInteger(), nullable=True),
        sa.CheckConstraint(
            "(finished_at IS NULL) = (state IN ('deploying', 'evaluating', 'held', 'paused', 'queued', 'shadowing', 'training', 'watching'))",
            name=op.f("ck_runs_finished"),
        ),
        sa.CheckConstraint(
            "state IN ('queued', 'training', 'paused', 'evaluating', 'shadowing', 'held', 'deploying', 'watching', 'deployed', 'completed', 'validated', 'rejected', 'rolled_back', 'failed', 'cancelled', 'skipped')",
            name=op.f("ck_runs_state"),
        ),
        sa.ForeignKeyConstraint(["campaign_id"], ["campaigns.id"], name=op.f("fk_runs_campaign_id")),
        sa.ForeignKeyConstraint(["dataset_id"], ["datasets.id"], name=op.f("fk_runs_dataset_id")),
        sa.ForeignKeyConstraint(["parent_id"], ["runs.id"], name=op.f("fk_runs_parent_id")),
        sa.ForeignKeyConstraint(["profile"], ["profiles.name"], name=op.f("fk_runs_profile")),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_runs")),
        sa.UniqueConstraint("id", name=op.f("uq_runs_id")),
        sa.UniqueConstraint("idempotency_key", name=op.f("uq_runs_idempotency_key")),
    )
    op.create_index("ix_runs_dataset", "runs", ["dataset_id"], unique=False)
    op.create_index("ix_runs_state", "runs", ["state", "seq"], unique=False)
    op.create_index(
        "ix_runs_unfinished",
        "runs",
        ["profile"],
        unique=False,
        sqlite_where=sa.text("finished_at IS NULL"),
        postgresql_where=sa.text("finished_at IS NULL"),
    )
    op.create_index(
        "uq_runs_one_automatic",
        "runs",
        ["campaign_id"],
        unique=True,
        sqlite_where=sa.text("automatic AND finished_at IS NULL"),
        postgresql_where=sa.text("automatic AND finished_at IS NULL"),
    )
    op.create_table(
        "adapters",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("profile", sa.Text(), nullable=False),
        sa.Column("version", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=True),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("base_digest", sa.Text(), nullable=False),
        sa.Column("metrics", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint(
            "state IN ('candidate', 'live', 'superseded', 'rolled_back', 'revoked')", name=op.f("ck_adapters_state")
        ),
        sa.ForeignKeyConstraint(["profile"], ["profiles.name"], name=op.f("fk_adapters_profile")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_adapters_run_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_adapters")),
        sa.UniqueConstraint("profile", "version", name=op.f("uq_adapters_profile_version")),
        sa.UniqueConstraint("run_id", name=op.f("uq_adapters_run_id")),
    )
    op.create_index(
        "uq_adapters_one_live",
        "adapters",
        ["profile"],
        unique=True,
        sqlite_where=sa.text("state = 'live'"),
        postgresql_where=sa.text("state = 'live'"),
    )
    op.create_table(
        "requests",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.BigInteger(), nullable=False),
        sa.Column("acknowledged_at", sa.BigInteger(), nullable=True),
        sa.Column("answer", sa.Text(), nullable=True),
        sa.CheckConstraint("kind IN ('pause', 'stop', 'cancel', 'skip', 'checkpoint')", name=op.f("ck_requests_kind")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_requests_run_id")),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_requests")),
        sa.UniqueConstraint("id", name=op.f("uq_requests_id")),
    )
    op.create_index(
        "uq_requests_open",
        "requests",
        ["run_id", "kind"],
        unique=True,
        sqlite_where=sa.text("acknowledged_at IS NULL"),
        postgresql_where=sa.text("acknowledged_at IS NULL"),
    )
    op.create_table(
        "tasks",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=True),
        sa.Column("profile", sa.Text(), nullable=True),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("payload", sa.JSON(), nullable=False),
        sa.Column("available_clock", sa.Text(), nullable=True),
        sa.Column("available_at", sa.Float(), nullable=True),
        sa.Column("lease_token", sa.Text(), nullable=True),
        sa.Column("lease_clock", sa.Text(), nullable=True),
        sa.Column("lease_until", sa.Float(), nullable=True),
        sa.Column("worker_id", sa.Text(), nullable=True),
        sa.Column("num_attempts", sa.Integer(), nullable=False),
        sa.Column("num_crashes", sa.Integer(), nullable=False),
        sa.Column("num_errors", sa.Integer(), nullable=False),
        sa.Column("num_shrinks", sa.Integer(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("(state = 'leased') = (lease_token IS NOT NULL)", name=op.f("ck_tasks_lease")),
        sa.CheckConstraint(
            "kind IN ('train', 'evaluate', 'deploy', 'watch', 'rollback', 'curriculum', 'prepare', 'export')",
            name=op.f("ck_tasks_kind"),
        ),
        sa.CheckConstraint(
            "state IN ('waiting', 'leased', 'done', 'parked', 'cancelled')", name=op.f("ck_tasks_state")
        ),
        sa.ForeignKeyConstraint(["profile"], ["profiles.name"], name=op.f("fk_tasks_profile")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_tasks_run_id")),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_tasks")),
        sa.UniqueConstraint("id", name=op.f("uq_tasks_id")),
    )
    op.create_index(
        "ix_tasks_leased",
        "tasks",
        ["lease_until"],
        unique=False,
        sqlite_where=sa.text("state = 'leased'"),
        postgresql_where=sa.text("state = 'leased'"),
    )
    op.create_index(
        "ix_tasks_run",
        "tasks",
        ["run_id"],
        unique=False,
        sqlite_where=sa.text("run_id IS NOT NULL"),
        postgresql_where=sa.text("run_id IS NOT NULL"),
    )
    op.create_index(
        "ix_tasks_waiting",
        "tasks",
        ["priority", "seq"],
        unique=False,
        sqlite_where=sa.text("state = 'waiting'"),
        postgresql_where=sa.text("state = 'waiting'"),
    )
    op.create_index(
        "uq_tasks_one_open_per_run",
        "tasks",
        ["run_id"],
        unique=True,
        sqlite_where=sa.text("state IN ('waiting', 'leased') AND run_id IS NOT NULL"),
        postgresql_where=sa.text("state IN ('waiting', 'leased') AND run_id IS NOT NULL"),
    )
    op.create_table(
        "attempts",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("task_id", sa.Text(), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("token", sa.Text(), nullable=False),
        sa.Column("error_class", sa.Text(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.Column("worker_id", sa.Text(), nullable=False),
        sa.Column("process", sa.Text(), nullable=True),
        sa.Column("started_at", sa.BigInteger(), nullable=False),
        sa.Column("ended_at", sa.BigInteger(), nullable=True),
        sa.Column("result", sa.JSON(), nullable=True),
        sa.CheckConstraint("(state = 'open') = (ended_at IS NULL)", name=op.f("ck_attempts_ended")),
        sa.CheckConstraint(
            "state IN ('open', 'succeeded', 'failed', 'stopped', 'interrupted', 'lost', 'cancelled')",
            name=op.f("ck_attempts_state"),
        ),
        sa.ForeignKeyConstraint(["task_id"], ["tasks.id"], name=op.f("fk_attempts_task_id")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_attempts")),
        sa.UniqueConstraint("task_id", "number", name=op.f("uq_attempts_task_id_number")),
    )
    op.create_index(
        "uq_attempts_one_open",
        "attempts",
        ["task_id"],
        unique=True,
        sqlite_where=sa.text("state = 'open'"),
        postgresql_where=sa.text("state = 'open'"),
    )
    op.create_table(
        "deployments",
        sa.Column("profile", sa.Text(), nullable=False),
        sa.Column("wanted_adapter_id", sa.Text(), nullable=True),
        sa.Column("previous_adapter_id", sa.Text(), nullable=True),
        sa.Column("flipped_at", sa.BigInteger(), nullable=False),
        sa.Column("flipped_by", sa.Text(), nullable=False),
        sa.Column("targets", sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ["previous_adapter_id"], ["adapters.id"], name=op.f("fk_deployments_previous_adapter_id")
        ),
        sa.ForeignKeyConstraint(["profile"], ["profiles.name"], name=op.f("fk_deployments_profile")),
        sa.ForeignKeyConstraint(["wanted_adapter_id"], ["adapters.id"], name=op.f("fk_deployments_wanted_adapter_id")),
        sa.PrimaryKeyConstraint("profile", name=op.f("pk_deployments")),
    )
    op.create_table(
        "evaluations",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("adapter_id", sa.Text(), nullable=False),
        sa.Column("baseline_adapter_id", sa.Text(), nullable=True),
        sa.Column("judged", sa.JSON(), nullable=False),
        sa.Column("scores_path", sa.Text(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["adapter_id"], ["adapters.id"], name=op.f("fk_evaluations_adapter_id")),
        sa.ForeignKeyConstraint(
            ["baseline_adapter_id"], ["adapters.id"], name=op.f("fk_evaluations_baseline_adapter_id")
        ),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_evaluations_run_id")),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_evaluations")),
        sa.UniqueConstraint("id", name=op.f("uq_evaluations_id")),
    )
    op.create_index("ix_evaluations_run", "evaluations", ["run_id", "seq"], unique=False)
    op.create_table(
        "experiences",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("profile", sa.Text(), nullable=False),
        sa.Column("natural_key", sa.Text(), nullable=False),
        sa.Column("messages", sa.JSON(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("dataset_id", sa.Text(), nullable=True),
        sa.Column("run_id", sa.Text(), nullable=True),
        sa.Column("adapter_id", sa.Text(), nullable=True),
        sa.Column("num_rejections", sa.Integer(), nullable=False),
        sa.Column("in_review", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.CheckConstraint(
            "(state IN ('reserved', 'consumed')) = (dataset_id IS NOT NULL)", name=op.f("ck_experiences_reservation")
        ),
        sa.CheckConstraint(
            "state IN ('collected', 'reserved', 'consumed', 'forgotten')", name=op.f("ck_experiences_state")
        ),
        sa.ForeignKeyConstraint(["adapter_id"], ["adapters.id"], name=op.f("fk_experiences_adapter_id")),
        sa.ForeignKeyConstraint(["dataset_id"], ["datasets.id"], name=op.f("fk_experiences_dataset_id")),
        sa.ForeignKeyConstraint(["profile"], ["profiles.name"], name=op.f("fk_experiences_profile")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_experiences_run_id")),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_experiences")),
        sa.UniqueConstraint("id", name=op.f("uq_experiences_id")),
        sa.UniqueConstraint("profile", "natural_key", name=op.f("uq_experiences_profile_natural_key")),
    )
    op.create_index("ix_experiences_dataset", "experiences", ["dataset_id"], unique=False)
    op.create_index("ix_experiences_state", "experiences", ["profile", "state"], unique=False)
    op.create_table(
        "observations",
        sa.Column("profile", sa.Text(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("observed_adapter_id", sa.Text(), nullable=True),
        sa.Column("synced_at", sa.BigInteger(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.ForeignKeyConstraint(
            ["observed_adapter_id"], ["adapters.id"], name=op.f("fk_observations_observed_adapter_id")
        ),
        sa.ForeignKeyConstraint(["profile"], ["profiles.name"], name=op.f("fk_observations_profile")),
        sa.PrimaryKeyConstraint("profile", "target", name=op.f("pk_observations")),
    )
    op.create_table(
        "checkpoints",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), autoincrement=True, nullable=False),
        sa.Column("run_id", sa.Text(), nullable=False),
        sa.Column("attempt_id", sa.Text(), nullable=False),
        sa.Column("step", sa.Integer(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("kinds", sa.JSON(), nullable=False),
        sa.Column("created_at", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(["attempt_id"], ["attempts.id"], name=op.f("fk_checkpoints_attempt_id")),
        sa.ForeignKeyConstraint(["run_id"], ["runs.id"], name=op.f("fk_checkpoints_run_id")),
        sa.PrimaryKeyConstraint("seq", name=op.f("pk_checkpoints")),
        sa.UniqueConstraint("attempt_id", "path", name=op.f("uq_checkpoints_attempt_id_path")),
    )
    op.create_index("ix_checkpoints_run", "checkpoints", ["run_id", "step"], unique=False)
