"""Membership: examples by hand, random histories of faults, and bugs that the histories must find."""

from __future__ import annotations

import itertools
import os
from typing import Any

import pytest

from headrace.policies import membership as module
from headrace.policies import views
from headrace.policies.membership import CommitStep, Decided, Depart, Enter, HoldsStep, Prepare, ViewAgreement
from headrace.policies.views import MemberState, MemberView, may_go_on, next_view
from parameter_server.worlds import mutated
from policies.members import Members, Violation, progress

HISTORIES = int(os.environ["HEADRACE_HISTORIES"])
A, B, C, D = ((rank, 0) for rank in range(4))


def test_of_two_halves_one_goes_on() -> None:
    for count in range(1, 7):
        members = [(rank, 0) for rank in range(count)]
        for size in range(count + 1):
            for half in itertools.combinations(members, size):
                assert may_go_on(members, half) + may_go_on(members, set(members) - set(half)) == 1


def test_a_step_that_one_may_have_committed_counts_in_the_next_view() -> None:
    base = MemberView(1, (A, B, C))
    held, begun, done = MemberState(4, True), MemberState(4, False), MemberState(5, False)
    assert next_view(base, {A: held, B: begun}) == MemberView(2, (A, B), 4)
    assert next_view(base, {A: held, C: held}) == MemberView(2, (A, C), 5)
    assert next_view(base, {A: done, B: held}) == MemberView(2, (A, B), 5)
    # Who has no state yet is asked again to take it, and who joins comes last.
    assert next_view(base, {C: begun, A: MemberState(-1, False)}, {D}) == MemberView(2, (C, A, D), 4, (A, D))
    assert next_view(base, {A: MemberState(-1, False), B: MemberState(-1, False)}) is None


def test_members_that_all_live_commit_every_step() -> None:
    members = Members(seed=0, count=3, faults=False)
    members.run(2000)
    assert min(len(process.applied) for process in members.processes.values()) > 10
    assert set(members.views) == {1}


@pytest.mark.parametrize("ranks", [*itertools.combinations(range(4), 1), *itertools.combinations(range(4), 2)])
def test_the_half_with_the_majority_or_the_lowest_rank_goes_on_and_the_other_ends(ranks: tuple[int, ...]) -> None:
    members = Members(seed=1, count=4, faults=False)
    members.run(200)
    cut_off = [rank for rank in range(4) if rank not in ranks]
    members.partition(list(ranks), cut_off)
    members.pass_time(30)
    goes_on = cut_off if len(ranks) < 2 or 0 not in ranks else list(ranks)
    assert [rank for rank, _ in members.live] == goes_on
    assert all("may go on without" in members.processes[rank, 0].why for rank in range(4) if rank not in goes_on)
    assert progress(members) > 0


@pytest.mark.one
@pytest.mark.slow
@pytest.mark.parametrize("count", range(2, 6))
def test_no_history_of_faults_commits_a_step_twice_and_who_is_left_goes_on(count: int) -> None:
    went_on = 0
    for seed in range(HISTORIES // 2):
        members = Members(seed, count)
        members.run(600)
        went_on += progress(members) > 0
    assert went_on > HISTORIES // 5


def test_what_was_told_is_told_again_where_it_was_lost() -> None:
    one, other = ViewAgreement(A, MemberView(1, (A, B))), ViewAgreement(B, MemberView(1, (A, B)))
    assert [*one.hold(), *other.hold()]
    (commit,) = one.receive(B, HoldsStep(1, 0))
    assert one.done == 1
    # The message of A is lost, and B asks.
    *_, question = other.tick()
    (answer,) = one.receive(B, question.message)  # type: ignore[union-attr]
    assert other.receive(A, answer.message) == [commit]  # type: ignore[union-attr]


def test_one_that_leaves_does_what_counts_and_not_what_was_done_again_without_it() -> None:
    for number, counts in ((2, True), (3, False)):
        leaver = ViewAgreement(B, MemberView(1, (A, B)))
        leaver.hold()
        actions = leaver.receive(A, Decided(MemberView(number, (A,), 1, left=(B,))))
        assert actions == [*([CommitStep(0)] if counts else []), Depart()]
        assert leaver.ended


def test_what_was_promised_is_not_taken_back() -> None:
    view = MemberView(1, (A, B, C))
    free, frozen = ViewAgreement(A, view), ViewAgreement(A, view)
    for member in (free, frozen):
        assert member.hold(silently=True) == []
    assert free.release()
    frozen.receive(C, Prepare(view, (1, C)))
    # The others may count on it by now.
    assert not frozen.release()
    after = MemberView(2, (A, C), 1)
    assert frozen.receive(C, Decided(after)) == [CommitStep(0), Enter(after)]


BUGS = {
    "a frozen member holds": ("if self.ended or self.frozen or self.view is", "if self.ended or self.view is"),
    "one that has promised promises less": ("Prepare(_, ballot) if ballot > self._promised:", "Prepare(_, ballot):"),
    "what was accepted is forgotten": ("view = max(accepted)[1] if accepted else", "view = None or"),
    "not all hold it": ("not self._held.issuperset(set(self.view.members) - {self.me})", "not self._held"),
    "a minority decides": ("or not may_go_on(proposal.base.members, proposal.accepted):", "or not proposal.accepted:"),
    "what counts is not counted": ("elif view.done == self.done + 1 and self._holds:", "elif False:"),
    "silence is not repeated": ("        if self._holds and self._told and not self.frozen:\n", "        if False:\n"),
    "the late are never told": ("actions = self._tell(At(self.view.number))", "actions: list[object] = []"),
}


def found(machine: Any) -> bool:
    for seed in range(500):
        try:
            members = Members(seed, 2 + seed % 4, machine)
            members.run(600)
            progress(members)
        except Violation:
            return True
    return False


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("bug", BUGS)
def test_the_histories_find_a_planted_bug(bug: str) -> None:
    assert found(mutated(module, "ViewAgreement", *BUGS[bug]))


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("2 * count > len(members) or", "2 * count >= len(members) or"),
        ("        done += 1\n", "        pass\n"),
        ("done = max(state.done", "done = min(state.done"),
    ],
)
def test_the_histories_find_a_wrong_rule(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "may_go_on" if "count" in old else "next_view"
    monkeypatch.setattr(module, name, mutated(views, name, old, new))
    assert found(ViewAgreement)
