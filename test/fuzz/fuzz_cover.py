"""Runs in which every legal pair of values of a table of features occurs.

The package allpairspy was tried first: with the constraints of ``fully_shard`` it made three times as many runs, 74 of them
with pairs that are refused, since it cannot look ahead.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = ["RANDOM", "Cover", "Pair", "Rule", "find_rule"]

Pair = tuple[tuple[str, str], tuple[str, str]]
"""Two features, in the order of the table, with a value each."""
Run = dict[str, str]
RANDOM = 10_000
Rule = tuple[tuple[str, Any], tuple[str, Any], str]
"""Two features with a value or several values each, and why they do not come together."""


class Cover:
    """The pairs of a table, and runs that have them all.

    Args:
        features: the values of each feature; the first one is the plainest.
        why_not: why two values do not come together: ("refused", what is raised) or ("left out", the reason); None: they do.
        risky: features of which three values together are counted, too.
    """

    def __init__(
        self,
        features: Mapping[str, tuple[str, ...]],
        why_not: Callable[[Pair], tuple[str, str] | None],
        risky: tuple[str, ...] = (),
    ) -> None:
        self.features, self.why_not, self.risky = features, functools.cache(why_not), risky
        self._place = {name: index for index, name in enumerate(features)}

    def case(self, seed: int) -> dict[str, Any]:
        """Run number ``seed``: a value of each feature. From ``len(runs)`` on, one for each pair that is refused.

        Such a run has ``refused``, of which one is raised, and plain values of all other features. From :data:`RANDOM` on, runs
        are random ones of legal pairs, each around another triple of ``risky`` features.
        """
        if seed >= RANDOM:
            return {"seed": seed, **self._with_a_triple(seed)}
        if seed < len(self.runs):
            return {"seed": seed, **self.runs[seed]}
        pair, _ = self.refused[seed - len(self.runs)]
        run = self._plain_around(pair)
        errors = [why[1] for each in self.pairs_of(run) if (why := self.why_not(each)) and why[0] == "refused"]
        return {"seed": seed, **run, "refused": errors}  # Several, if no value of another feature fits to both.

    def every_pair(self) -> Iterator[Pair]:
        """Each two values of two features."""
        for (one, values), (other, others) in itertools.combinations(self.features.items(), 2):
            for value, another in itertools.product(values, others):
                yield (one, value), (other, another)

    @functools.cached_property
    def legal(self) -> set[Pair]:
        return {pair for pair in self.every_pair() if self.why_not(pair) is None}

    @functools.cached_property
    def refused(self) -> list[tuple[Pair, str]]:
        """Each pair that is an error, and what is raised."""
        return [(pair, why[1]) for pair in self.every_pair() if (why := self.why_not(pair)) and why[0] == "refused"]

    def pairs_of(self, run: Run) -> set[Pair]:
        """The pairs that occur in a run."""
        return set(itertools.combinations([(name, run[name]) for name in self.features], 2))

    @functools.cached_property
    def runs(self) -> list[Run]:
        """The same ones in each process. Each has a legal pair that no earlier one has, and as many others as fit."""
        rng, made, left = random.Random(0), list[Run](), set(self.legal)
        for pair in sorted(left):
            if pair in left:
                # The best of a few: features that are chosen first find more free places.
                best = max((self._filled(pair, left, rng) for _ in range(8)), key=lambda run: len(self.pairs_of(run) & left))
                made.append(best)
                left -= self.pairs_of(best)
        return made

    def _filled(self, pair: Pair, left: set[Pair], rng: random.Random) -> Run:
        """A legal run with ``pair``: of each other feature, the value that brings most of the pairs that are ``left``."""
        for _ in range(100):
            run = dict(pair)
            for name in rng.sample(sorted(set(self.features) - set(run)), len(self.features) - 2):
                new = {value: [self._pair((name, value), known) for known in run.items()] for value in self.features[name]}
                legal = {value: pairs for value, pairs in new.items() if not any(map(self.why_not, pairs))}
                if not legal:
                    break  # Two values that are there leave no value for this feature.
                # Else the plainest one: a failure then has less around it.
                run[name] = max(legal, key=lambda value: len(left.intersection(legal[value])))
            else:
                return {name: run[name] for name in self.features}
        raise AssertionError(f"{pair} has no place in any legal run: it is a pair to refuse, or to leave out with a reason")

    def _random(self, rng: random.Random, given: Run | None = None, tries: int = 10**9) -> Run | None:
        """Values drawn at random, of which no two exclude each other, with those that are given. None after so many tries."""
        for _ in range(tries):
            run: Run = dict(given or {})
            for name in rng.sample([name for name in self.features if name not in run], len(self.features) - len(run)):
                values = self.features[name]
                pairs = {value: [self._pair((name, value), known) for known in run.items()] for value in values}
                legal = [value for value in values if not any(map(self.why_not, pairs[value]))]
                if not legal:
                    break
                # Half of them the plainest: else most runs have all rare values at once, and few train undisturbed.
                run[name] = legal[0] if rng.random() < 0.5 else rng.choice(legal)
            else:
                return {name: run[name] for name in self.features}
        return None

    def triples_of(self, run: Run) -> set[tuple[tuple[str, str], ...]]:
        """The triples of risky features that occur in a run."""
        return set(itertools.combinations([(name, run[name]) for name in self.features if name in self.risky], 3))

    @functools.cached_property
    def triples(self) -> list[tuple[tuple[str, str], ...]]:
        """Each three values of risky features of which every two may come together, in a random order."""
        values = [[(name, value) for value in self.features[name]] for name in self.features if name in self.risky]
        every = (triple for three in itertools.combinations(values, 3) for triple in itertools.product(*three))
        found = [each for each in every if not any(map(self.why_not, itertools.combinations(each, 2)))]
        random.Random(1).shuffle(found)
        return found

    def _with_a_triple(self, seed: int) -> Run:
        """Run ``seed`` of the random ones: around the next triple, if three values leave some to all other features."""
        rng = random.Random(seed)
        while self.triples:
            triple = self.triples[(seed - RANDOM) * 65_537 % len(self.triples)]
            if (run := self._random(rng, dict(triple), 20)) is not None:
                return run
            seed += 1
        return self._random(rng) or {}

    def _plain_around(self, pair: Pair) -> Run:
        """``pair``, which is refused, and the first legal values of the other features."""
        run = dict(pair)
        for name, values in self.features.items():
            if name not in run:
                pairs = {value: [self._pair((name, value), known) for known in run.items()] for value in values}
                run[name] = next((value for value in values if not any(map(self.why_not, pairs[value]))), values[0])
        return {name: run[name] for name in self.features}

    def _pair(self, one: tuple[str, str], other: tuple[str, str]) -> Pair:
        return (one, other) if self._place[one[0]] < self._place[other[0]] else (other, one)


def find_rule(rules: list[Rule], pair: Pair) -> str | None:
    """What the first rule says that is of these two values."""

    def is_of(found: tuple[str, str], listed: tuple[str, Any]) -> bool:
        values = listed[1] if isinstance(listed[1], tuple) else (listed[1],)
        return found[0] == listed[0] and found[1] in values

    for one, other, why in rules:
        if any(is_of(first, one) and is_of(second, other) for first, second in (pair, pair[::-1])):
            return why
    return None
