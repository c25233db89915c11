"""The answer in words: what to do, what it costs, how sure that is, and what would change it."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.prediction.recommendation.offers import SLOWER_NETWORK, Offer
from headrace.prediction.recommendation.recommend import SHORT_S, WORTH, Recommendation
from headrace.report.format import duration, plural, short


def sentences(advice: Recommendation) -> Iterator[str]:
    """Yields the sentences of the paragraph."""
    yield from _what(advice)
    yield from _cost(advice)
    yield from _how_sure(advice)
    yield from _what_would_change_it(advice)


def place_of(offer: Offer) -> str:
    """Returns where an offer runs: "8 devices of 2 hosts"."""
    return f"{plural(offer.candidate.devices, 'device')} of {plural(len(offer.hosts), 'host')}"


def _what(advice: Recommendation) -> Iterator[str]:
    winner, alone = advice.winner, advice.alone
    trained = f"{advice.goal.examples:,} examples in rounds of {winner.prediction.global_batch_size:,}"
    if not advice.distribute:
        yield f"Do not distribute: one device trains {trained} in {duration(winner.seconds)},"
        fastest = _fastest(advice)
        if fastest.seconds * WORTH >= winner.seconds:
            yield f"and no other is faster by more than {WORTH - 1:.0%}."
            return
        yield f"before the deadline, and no other costs less. The fastest is {fastest.text} on {place_of(fastest)}:"
        yield f"{duration(fastest.seconds)}" + (f", for {_price(advice, fastest)}." if fastest.money else ".")
        return
    yield f"Take {place_of(winner)} with {winner.candidate.family}: {trained} take {duration(winner.seconds)}"
    if alone is None:
        yield "from the command to the end; the model does not fit on one device."
    else:
        yield f"from the command to the end, and {duration(alone.seconds)} on one device ({advice.speed_up:.2f} times)."
    yield f"Its bottleneck: {winner.prediction.bottleneck}."
    if len(winner.hosts) == 1 and any(len(offer.hosts) > 1 for offer in advice.offers) and winner.seconds < SHORT_S:
        yield f"One host trains it in less than {duration(SHORT_S)}; to start on several takes as long."


def _cost(advice: Recommendation) -> Iterator[str]:
    winner = advice.winner
    if winner.money:
        yield f"It costs {_price(advice, winner)} for the hosts, whole."
    if winner.kilowatt_hours:
        yield f"It takes {short(winner.kilowatt_hours)} kWh."
    failing = winner.prediction.reliability
    if failing is not None:
        saves = f", with a checkpoint every {duration(failing.save_every_s)}" if failing.save_every_s else ""
        yield f"A host fails every {short(failing.hours_between)} h{saves}: {failing.useful:.1%} of the time counts."
    if advice.deadline_s is not None and winner.seconds > advice.deadline_s:
        yield f"Nothing meets the deadline: this is {duration(winner.seconds - advice.deadline_s)} too late."


def _how_sure(advice: Recommendation) -> Iterator[str]:
    winner = advice.winner
    band = winner.prediction.band
    least, most = winner.expected_s
    yield f"Expect {duration(least)} to {duration(most)} ({band.where})."
    if winner.slow_s > winner.seconds:
        yield f"Where the network attains {SLOWER_NETWORK:g} of its rate, it is {duration(winner.slow_s)}."


def _what_would_change_it(advice: Recommendation) -> Iterator[str]:
    winner = advice.winner
    able = [offer for offer in advice.offers if not offer.refused]
    steadier = min((offer for offer in advice.best if not offer.refused), key=lambda offer: offer.slow_s)
    if steadier.slow_s * WORTH < winner.slow_s and steadier.candidate.as_one_device:
        yield f"On such a network {steadier.text} is faster: {duration(steadier.slow_s)}."
    same = [offer for offer in able if offer.candidate.as_one_device]
    cheapest = min(same, key=lambda offer: (offer.money, offer.seconds))
    if winner.money and cheapest.money * WORTH < winner.money:
        yield f"The cheapest is {cheapest.text} on {place_of(cheapest)}: {_price(advice, cheapest)},"
        yield f"in {duration(cheapest.seconds)}."
    if not advice.distribute:
        if _fastest(advice).seconds * WORTH >= winner.seconds:
            yield from _from_where_on(advice, same)
        return
    if winner.candidate.devices < advice.knee:
        return
    family = [offer for offer in able if offer.candidate.family == winner.candidate.family]
    if advice.knee < max(offer.candidate.devices for offer in family):
        yield f"From {advice.knee} devices on, more bring less than half of what they would at best."
    else:
        yield f"Up to these {advice.knee} devices, more bring at least half of what they would at best."


def _fastest(advice: Recommendation) -> Offer:
    able = [offer for offer in advice.offers if not offer.refused and offer.candidate.as_one_device]
    return min(able, key=lambda offer: offer.seconds)


def _from_where_on(advice: Recommendation, same: list[Offer]) -> Iterator[str]:
    """Says of a longer training from where on more devices pay."""
    alone = advice.winner
    found: list[tuple[float, Offer]] = []
    for offer in same:
        saved = _second_each(advice, alone) - WORTH * _second_each(advice, offer)
        if offer is not alone and saved > 0:
            found.append(((WORTH * offer.start_s - alone.start_s) / saved, offer))
    if found:
        examples, offer = min(found, key=lambda each: each[0])
        yield f"From {short(max(examples, advice.goal.examples))} examples on, {offer.text} is worth its start."


def _second_each(advice: Recommendation, offer: Offer) -> float:
    return (offer.seconds - offer.start_s) / advice.goal.examples


def _price(advice: Recommendation, offer: Offer) -> str:
    return f"{short(offer.money)} {advice.currency}".rstrip()
