"""Tables of experience: interactions, assessments, feedback, corrections, erasures, mirrored answers, traffic."""

from __future__ import annotations

import sqlalchemy as sa

from tunesmith.experience.rules.experience import CorrectionState, ExperienceClass, ExperienceState, ReviewDecision
from tunesmith.experience.rules.shadow import ShadowOutcome
from tunesmith.store.columns import Instant, Sequence, metadata, one_of, ref, reference, seq_column, where

experiences = sa.Table(
    "experiences",
    metadata,
    sa.Column("seq", Sequence, primary_key=True, autoincrement=True),
    sa.Column("id", sa.Text, nullable=False, unique=True),
    ref("profiles.name"),
    sa.Column("natural_key", sa.Text, nullable=False),
    sa.Column("messages", sa.JSON, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    ref("datasets.id", nullable=True),
    sa.Column("run_id", sa.Text, sa.ForeignKey("runs.id")),
    sa.Column("adapter_id", sa.Text, sa.ForeignKey("adapters.id")),
    sa.Column("num_rejections", sa.Integer, nullable=False),
    sa.Column("in_review", sa.Boolean, nullable=False),
    sa.Column("created_at", Instant, nullable=False),
    sa.Column("source", sa.Text),
    sa.Column("session", sa.Text),  # the conversation it was part of, as the application calls it
    sa.Column("served_by", sa.Text),  # the adapter version that answered; `adapter_id` is the one that learnt from it
    sa.Column("template", sa.Text),
    sa.Column("task_type", sa.Text),
    sa.Column("reference", sa.Text),
    sa.Column("captured_at", Instant),  # when it happened; `created_at` is when we heard of it
    sa.Column("key_label", sa.Text),  # the API key that `tunesmith serve` gave this answer to; null: not served
    one_of("state", ExperienceState),
    sa.CheckConstraint("(state IN ('reserved', 'consumed')) = (dataset_id IS NOT NULL)", name="reservation"),
    sa.UniqueConstraint("profile", "natural_key"),
    sa.Index("ix_experiences_state", "profile", "state"),
    sa.Index("ix_experiences_dataset", "dataset_id"),
    sa.Index("ix_experiences_profile", "profile", "seq"),
    sa.Index("ix_experiences_session", "profile", "session", "seq", **where("session IS NOT NULL")),
    sa.Index("ix_experiences_in_review", "profile", "seq", **where("in_review")),
    sa.Index("ix_experiences_served_by", "profile", "served_by", "seq", **where("served_by IS NOT NULL")),
)
assessments = sa.Table(
    "assessments",
    metadata,
    sa.Column("seq", Sequence, primary_key=True, autoincrement=True),
    sa.Column("experience_id", sa.Text, sa.ForeignKey("experiences.id"), nullable=False, unique=True),
    ref("profiles.name"),
    sa.Column("class_name", sa.Text, nullable=False),
    sa.Column("reasons", sa.JSON, nullable=False),
    sa.Column("findings", sa.JSON, nullable=False),  # what each verifier said when it was written
    sa.Column("suspicions", sa.JSON, nullable=False),
    sa.Column("feedback", sa.JSON, nullable=False),  # the running aggregate
    sa.Column("review", sa.Text),  # the last decision of a person about its suspicions
    sa.Column("assessed_at", Instant, nullable=False),
    one_of("class_name", ExperienceClass),
    sa.Index("ix_assessments_class", "profile", "class_name", "seq"),
    # what waits for a reviewer is few among many; the inbox counts it at every look
    sa.Index("ix_assessments_waiting", "profile", "seq", **where("class_name = 'quarantined' AND review IS NULL")),
)
feedback = sa.Table(
    "feedback",
    metadata,
    sa.Column("seq", Sequence, primary_key=True, autoincrement=True),
    sa.Column("id", sa.Text, nullable=False, unique=True),
    ref("experiences.id"),
    sa.Column("rater", sa.Text, nullable=False),
    sa.Column("value", sa.Float),
    sa.Column("is_implicit", sa.Boolean, nullable=False),
    sa.Column("confidence", sa.Float, nullable=False),
    sa.Column("comment", sa.Text),
    sa.Column("correction", sa.Text),
    sa.Column("created_at", Instant, nullable=False),
    sa.Column("key_label", sa.Text),  # the API key it came with; null: not over HTTP
    sa.CheckConstraint("value IS NULL OR (value >= 0 AND value <= 1)", name="value"),
    sa.CheckConstraint("NOT is_implicit OR correction IS NULL", name="implicit"),  # a complaint is never an answer
    sa.CheckConstraint("value IS NOT NULL OR comment IS NOT NULL OR correction IS NOT NULL", name="says"),
    sa.Index("ix_feedback_experience", "experience_id", "seq"),
)

reviews = sa.Table(
    "reviews",
    metadata,
    seq_column(),
    sa.Column("id", sa.Text, nullable=False, unique=True),
    reference("experience_id", "experiences.id"),
    sa.Column("decision", sa.Text, nullable=False),
    sa.Column("reviewer", sa.Text, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),
    sa.Column("created_at", Instant, nullable=False),
    one_of("decision", ReviewDecision),
    sa.Index("ix_reviews_experience", "experience_id", "seq"),
)
corrections = sa.Table(
    "corrections",
    metadata,
    seq_column(),
    sa.Column("id", sa.Text, nullable=False, unique=True),
    reference("experience_id", "experiences.id"),
    reference("profile", "profiles.name"),
    sa.Column("number", sa.Integer, nullable=False),  # of the attempt at this experience, from 1
    sa.Column("teacher", sa.Text, nullable=False),
    sa.Column("state", sa.Text, nullable=False),
    sa.Column("reason", sa.Text, nullable=False),  # why it was accepted or not, for people
    sa.Column("answer", sa.Text),  # unset where the teacher gave none
    sa.Column("findings", sa.JSON, nullable=False),  # what each verifier said about the answer
    sa.Column("counts", sa.Boolean, nullable=False),  # against the attempts allowed; not where the teacher was down
    sa.Column("created_at", Instant, nullable=False),
    one_of("state", CorrectionState),
    sa.CheckConstraint("state <> 'accepted' OR answer IS NOT NULL", name="answer"),
    sa.UniqueConstraint("experience_id", "number"),
    sa.Index(
        "uq_corrections_accepted",
        "experience_id",
        unique=True,
        **where("state = 'accepted'"),
    ),
    sa.Index("ix_corrections_profile", "profile", "seq"),
)
erasures = sa.Table(
    "erasures",
    metadata,
    seq_column(),
    reference("experience_id", "experiences.id"),
    reference("dataset_id", "datasets.id"),
    sa.Column("requested_at", Instant, nullable=False),
    sa.Column("done_at", Instant),  # unset: a run still reads the dataset, its text goes when that has ended
    sa.Column("old_fingerprint", sa.Text, nullable=False),
    sa.Column("new_fingerprint", sa.Text),
    sa.Column("hashes", sa.JSON, nullable=False),  # of examples and texts: what is left to find them by
    sa.CheckConstraint("(done_at IS NULL) = (new_fingerprint IS NULL)", name="done"),
    sa.UniqueConstraint("experience_id", "dataset_id"),
    sa.Index(
        "ix_erasures_pending",
        "dataset_id",
        **where("done_at IS NULL"),
    ),
)

shadow_answers = sa.Table(
    "shadow_answers",
    metadata,
    sa.Column("seq", Sequence, primary_key=True, autoincrement=True),
    sa.Column("run_id", sa.Text, sa.ForeignKey("runs.id"), nullable=False),
    sa.Column("adapter_id", sa.Text, sa.ForeignKey("adapters.id"), nullable=False),
    sa.Column("response_id", sa.Text, nullable=False),  # of the live answer, by which its experience is found
    sa.Column("live_version", sa.Text, nullable=False),
    sa.Column("outcome", sa.Text, nullable=False),
    sa.Column("answer", sa.Text),
    sa.Column("error", sa.Text),
    sa.Column("seconds", sa.Float, nullable=False),
    sa.Column("live_seconds", sa.Float, nullable=False),
    sa.Column("flags", sa.JSON, nullable=False),  # what the profile's verifiers say against it
    sa.Column("live_flags", sa.JSON, nullable=False),
    sa.Column("observed_at", Instant, nullable=False),
    one_of("outcome", ShadowOutcome),
    sa.UniqueConstraint("run_id", "response_id"),
)

traffic = sa.Table(  # requests by version, counted in steps of time: no text, and nobody's name
    "traffic",
    metadata,
    sa.Column("profile", sa.Text, primary_key=True),  # also of one that has no row in `profiles` yet
    sa.Column("version", sa.Text, primary_key=True),
    sa.Column("begins_at", Instant, primary_key=True),
    sa.Column("range", sa.Integer, primary_key=True),  # of seconds, see `experience/rules/traffic.py`; -1: failed
    sa.Column("num", sa.BigInteger, nullable=False),
    sa.CheckConstraint("num > 0", name="num"),
    sa.Index("ix_traffic_begins_at", "begins_at"),
)
