"""How the processes of a launcher become workers in lockstep of which some may be lost."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from headrace.collectives.base import HostMap
from headrace.collectives.views.hosts import HostViews
from headrace.collectives.views.mail import MemberMail
from headrace.collectives.views.membership import Marks, MembershipThread
from headrace.engine.torchrun.address import own_address
from headrace.engine.torchrun.elastic_workers.leader import StorePlace, ViewLeader
from headrace.engine.torchrun.elastic_workers.leader_file import TRAINS
from headrace.engine.torchrun.heartbeats import HeartbeatRelay
from headrace.engine.torchrun.key_value import copy_of
from headrace.engine.torchrun.secret import given_secret
from headrace.engine.torchrun.store import launched_secret, launched_store
from headrace.policies.views import Member, MemberView
from headrace.shared_memory.control_page import ControlPage
from headrace.worker.run_spec import RunSpec


def join_views(
    spec: RunSpec,
    me: Member,
    prefix: str,
    hosts: Sequence[str],
    page: ControlPage,
    relay: HeartbeatRelay | None,
    encrypt: bool,
    check_run: Callable[[], None],
) -> tuple[HostViews, ViewLeader]:
    """Returns the views of a worker, and what leads them; all workers call it, and one that comes back later.

    Args:
        prefix: of the group's keys in the store.
        hosts: by rank.
        relay: None where all are on one host.
        check_run: raises where the run has failed.
    """
    store, address = launched_store(), own_address() if relay else "127.0.0.1"
    mail = MemberMail(me, launched_secret(), address)
    rank, incarnation = me
    store.set(f"{prefix}/members/{rank}/{incarnation}", mail.address)
    workers = range(spec.plan.workers)
    if me == (0, 0):
        store.set(f"{prefix}/leader", json.dumps([*me, mail.address]))
    # One that comes back learns the others' addresses from the one that leads.
    first_rank, first_process, first_address = json.loads(store.get(f"{prefix}/leader"))
    addresses = {(first_rank, first_process): first_address}
    if not incarnation:
        addresses |= {(each, 0): store.get(f"{prefix}/members/{each}/0").decode() for each in workers}
    first = None if incarnation else MemberView(0, tuple((each, 0) for each in workers))
    marks = Marks(relay.own_marks, relay.take_marks) if relay else None
    membership = MembershipThread(me, mail, addresses, first, spec.timeout_s, marks, check_run)

    def home(ranks: Sequence[int]) -> HostMap:
        return HostMap(tuple(hosts[each] for each in ranks), address, encrypt, spec.timeout_s)

    view = first or MemberView(-1, (me,))
    views = HostViews(membership, page, me, view, home, spec.plan.min_workers, spec.timeout_s)
    # Now all have set what one that comes back asks for.
    place = StorePlace(address, launched_secret(), copy_of(store)) if relay and given_secret() else None
    if me == (0, 0):
        store.add(TRAINS, 1)
    return views, ViewLeader(spec, page, views, prefix, store.address, mail.address, relay, place)
