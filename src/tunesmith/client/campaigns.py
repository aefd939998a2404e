"""`client.campaigns`: a profile under way: overrides, rounds that open themselves, budget; pause, resume, archive."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tunesmith.core.errors import ConfigError, UsageError, did_you_mean, quoted
from tunesmith.core.ids import is_name
from tunesmith.profiles import queries as campaigns
from tunesmith.profiles.queries import Campaign, NewCampaign
from tunesmith.profiles.resolve import check_overrides
from tunesmith.profiles.rules.campaign import CampaignState
from tunesmith.profiles.sections.campaign import CampaignBudget
from tunesmith.runs.queries import profile_locks as profiles
from tunesmith.runs.session import Session

if TYPE_CHECKING:
    from tunesmith.orchestration.rounds.facts import RoundStatus
    from tunesmith.orchestration.rounds.history import Expectation, Round
    from tunesmith.orchestration.submit import Submitted

_MOST_CONSIDERED = 100
"""Rounds that the expectation of the next one is taken from."""


@dataclass(frozen=True)
class NextRound:
    """A campaign's next round: whether it is opened now and why not, and what may come of it."""

    status: RoundStatus
    expected: Expectation
    num_rounds: int
    """All that the campaign has had."""


class Campaigns:
    def __init__(self, session: Session) -> None:
        self._session = session

    def create(
        self,
        profile: str,
        *,
        overrides: Sequence[str] | Mapping[str, Any] = (),
        budget: Mapping[str, float] | None = None,
        name: str | None = None,
        description: str = "",
    ) -> Campaign:
        """Open an active campaign: its overrides hold for every run of the profile, and its rounds open themselves.

        `budget` replaces keys of `campaign.budget`: gpu_hours, money, gpu_hour_price.
        """
        from tunesmith.orchestration.check import check
        from tunesmith.programs.fingerprint import code_fingerprint

        session = self._session
        if name is not None and not is_name(name):
            raise UsageError(f"{quoted(name)} cannot name a campaign: use lower-case letters, digits, '.', '_' and '-'")
        flat = check_overrides(overrides)
        checked, _, _ = check(session.database, session.workspace, profile, overrides=flat, environ=session.environ)
        _check_budget(checked.profile.campaign.budget, budget or {})
        with session.database.write() as tx:
            profiles.lock(tx, profile, checked.lock, actor=session.actor)
            new = NewCampaign(
                profile,
                overrides=flat,
                budget=dict(budget or {}),
                code_version=code_fingerprint(),
                config_hash=checked.resolved.fingerprint,
                name=name,
                description=description,
            )
            return campaigns.add(tx, new, actor=session.actor)

    def list(self, profile: str | None = None) -> list[Campaign]:
        profile = self._session.known_profile(profile)
        with self._session.database.read() as tx:
            return campaigns.listing(tx, profile)

    def show(self, campaign_id: str) -> Campaign:
        """By id, by its beginning, or by name."""
        with self._session.database.read() as tx:
            return campaigns.find(tx, campaign_id)

    def next_round(self, campaign_id: str) -> NextRound:
        """Why the next round is opened now, or why not, with every condition; and what it may cost and gain."""
        from tunesmith.orchestration.rounds.facts import round_status
        from tunesmith.orchestration.rounds.history import expectation
        from tunesmith.runs.queries import rounds

        session, campaign = self._session, self.show(campaign_id)
        status = round_status(session.database, session.workspace, campaign, environ=session.environ)
        earlier = self.rounds(campaign.id, limit=_MOST_CONSIDERED)
        with session.database.read() as tx:
            return NextRound(status, expectation(earlier), rounds.number_of(tx, campaign.id))

    def rounds(self, campaign_id: str, limit: int = 50) -> Sequence[Round]:
        """What each round learnt from, scored and cost, and what became of it; the newest first."""
        from tunesmith.orchestration.rounds.history import history

        session, campaign = self._session, self.show(campaign_id)
        with session.database.read() as tx:
            return history(tx, campaign, self._price(campaign), limit)

    def trigger(self, campaign_id: str) -> Submitted:
        """Open a round now. Raises Refused with everything that a person may not waive either."""
        from tunesmith.orchestration.rounds.open import open_asked

        session, campaign = self._session, self.show(campaign_id)
        return open_asked(session.database, session.workspace, campaign, actor=session.actor, environ=session.environ)

    def pause(self, campaign_id: str) -> Campaign:
        """Open no rounds; its overrides still hold."""
        return self._move(campaign_id, CampaignState.PAUSED)

    def resume(self, campaign_id: str) -> Campaign:
        return self._move(campaign_id, CampaignState.ACTIVE)

    def archive(self, campaign_id: str) -> Campaign:
        return self._move(campaign_id, CampaignState.ARCHIVED)

    def _move(self, campaign_id: str, state: CampaignState) -> Campaign:
        actor = self._session.actor
        with self._session.database.write() as tx:
            campaign = campaigns.find(tx, campaign_id)
            if state is CampaignState.ARCHIVED and campaign.state is CampaignState.ACTIVE:
                campaigns.move(tx, campaign.id, CampaignState.PAUSED, actor=actor, reason=f"to be archived by {actor}")
            campaigns.move(tx, campaign.id, state, actor=actor, reason=f"{state} by {actor}")
            return campaigns.get(tx, campaign.id)

    def _price(self, campaign: Campaign) -> float:
        """Of a GPU hour; 0 where nobody has said one, or the profile cannot be read."""
        from tunesmith.orchestration.rounds.facts import policy_of
        from tunesmith.profiles.resolve import resolve

        session = self._session
        try:
            profile = resolve(
                campaign.profile,
                workspace=session.workspace,
                campaign_overrides=campaign.overrides,
                environ=session.environ,
            ).profile
        except ConfigError:
            return 0.0
        return policy_of(profile, campaign).budget.gpu_hour_price or 0.0


def _check_budget(said: CampaignBudget, budget: Mapping[str, float]) -> None:
    """The budget of a campaign together with that of its profile must be one."""
    from pydantic import ValidationError

    for key in budget:
        if key not in CampaignBudget.model_fields:
            raise ConfigError(f"budget.{key}: unknown key{did_you_mean(key, CampaignBudget.model_fields)}")
    try:
        CampaignBudget.model_validate({**said.model_dump(), **budget})
    except ValidationError as error:
        detail = error.errors()[0]
        key = ".".join(["budget", *map(str, detail["loc"])])
        raise ConfigError(f"{key}: {detail['msg'].removeprefix('Value error, ')}") from None
