"""Saves that can be put together from the parts left: random histories against a model that keeps every fact."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.shares import amount

from dtckpt.checkpoint.parts.records import HostParts, SaveId
from dtckpt.checkpoint.tiers.copy_hosts import CopyHosts
from dtckpt.checkpoint.tiers.holdings import HeldSave, copies_to_make, held_saves, hosts_to_ask, saves_to_keep

KEEP = 2


class World:
    """Hosts with parts, and the outcome of each save. The rules under test never see ``complete``."""

    def __init__(self, chance):
        self.chance = chance
        self.hosts = {}
        self.complete = set()
        self.number = 0
        self.names = 0
        self.parts = {}
        self.add_hosts(chance.randint(1, 6))

    def add_hosts(self, count):
        for _ in range(count):
            self.names += 1
            self.hosts[f"host{self.names}"] = str(self.chance.randint(0, 3))
            self.parts[f"host{self.names}"] = ({}, {})

    def view(self):
        return {
            host: HostParts({s: frozenset(c) for s, c in voted.items()}, {s: frozenset(c) for s, c in written.items()})
            for host, (voted, written) in self.parts.items()
        }

    def copy_hosts(self):
        return CopyHosts.of(self.hosts, 2)

    def save(self):
        """A save may die before the vote, between the vote and its notes, and amid the copies."""
        self.number += 1
        clients = list(self.hosts)
        save = SaveId(self.number, self.number * 10, len(clients), False, "00000000")
        written = [client for client in range(len(clients)) if self.chance.random() < 0.97]
        for client in written:
            self.parts[clients[client]][1].setdefault(save, set()).add(client)
        if len(written) < len(clients):
            if self.chance.random() < 0.5:  # all hear of it, and remove their parts
                for _, of_host in self.parts.values():
                    of_host.pop(save, None)
            return
        self.complete.add(save)
        noted = [client for client in range(len(clients)) if self.chance.random() < 0.95]
        for client in noted:
            self.note(clients[client], save, client)
        copy_hosts = self.copy_hosts()
        for client in noted:
            for host in copy_hosts.partners(clients[client]):
                if self.chance.random() < 0.9:
                    self.note(host, save, client)
        for voted, _ in self.parts.values():
            kept = saves_to_keep(voted, KEEP, None)
            for old in [each for each in voted if each not in kept]:
                del voted[old]

    def note(self, host, save, client):
        voted, written = self.parts[host]
        voted.setdefault(save, set()).add(client)
        written.get(save, set()).discard(client)

    def lose(self):
        host = self.chance.choice(list(self.hosts))
        if len(self.hosts) > 1:
            del self.hosts[host]
            del self.parts[host]

    def lose_a_file(self):
        host = self.chance.choice(list(self.hosts))
        for held in self.parts[host]:
            for save in list(held):
                if self.chance.random() < 0.2:
                    held[save].discard(self.chance.choice([*held[save], 0]))

    def restore(self):
        found = [held for held in held_saves(self.view()) if held.is_restorable]

        # By the model, not by the rules: the newest complete save all of whose parts are still somewhere.
        def parts_of(save):
            return {
                c for voted, written in self.parts.values() for held in (voted, written) for c in held.get(save, ())
            }

        def is_known(save):
            return any(voted.get(save) for voted, _ in self.parts.values())

        expected = [
            save
            for save in sorted(self.complete, reverse=True)
            if parts_of(save) == set(range(save.num_clients)) and is_known(save)
        ]
        assert [held.save for held in found] == expected
        assert all(held.save in self.complete for held in found)
        if found:
            copy_hosts = self.copy_hosts()
            for client, sender, receiver in list(copies_to_make(found[0], copy_hosts)):
                assert sender in found[0].holders[client]
                assert receiver not in found[0].holders[client]
                self.note(receiver, found[0].save, client)
            again = next(held for held in held_saves(self.view()) if held.save == found[0].save)
            assert again.num_copies >= min(2, len(self.hosts))


@pytest.mark.parametrize("part", range(10))
def test_random_histories(part):
    """Saves that die at any point, lost hosts, lost files, new hosts, renumbered clients, restores."""
    for number in range(amount(20, 1000)):
        chance = random.Random(f"{part} {number}")
        world = World(chance)
        for _ in range(30):
            event = chance.random()
            if event < 0.5:
                world.save()
            elif event < 0.6:
                world.lose()
            elif event < 0.7:
                world.lose_a_file()
            elif event < 0.8:
                world.add_hosts(chance.randint(1, 2))
            elif event < 0.85:
                hosts = list(world.hosts.items())
                chance.shuffle(hosts)
                world.hosts = dict(hosts)
            else:
                world.restore()
        world.restore()


saves = st.builds(
    SaveId, st.integers(0, 10**19), st.integers(0, 10**12), st.integers(1, 600), st.booleans(), st.just("0a1b2c3d")
)
clients = st.frozensets(st.integers(0, 600), max_size=40)


@given(saves)
def test_names_of_saves(save):
    assert SaveId.parse(save.name) == save


@pytest.mark.parametrize("name", ["", "spare", "1-2-3-0-00000000", "job.json", "00000000000000000001-1-1-2-00000000"])
def test_other_names(name):
    with pytest.raises(ValueError, match="no name of a local save"):
        SaveId.parse(name)


@given(st.dictionaries(saves, st.tuples(clients, clients), max_size=6))
def test_a_vote_says_what_a_host_holds(held):
    parts = HostParts({save: both[0] for save, both in held.items()}, {save: both[1] for save, both in held.items()})
    assert HostParts.from_text(parts.to_text(10**6)) == parts
    short = parts.to_text(1000)
    assert len(short) <= 1000
    kept = HostParts.from_text(short).voted
    assert sorted(kept) == sorted(held)[len(held) - len(kept) :], "the oldest are left out"


@given(st.sets(saves, max_size=8), st.integers(1, 4), st.data())
def test_what_is_kept(there, keep, data):
    protected = data.draw(st.none() | st.sampled_from(sorted(there)) if there else st.none())
    kept = saves_to_keep(there, keep, protected)
    assert set(sorted(there)[-keep:]) <= kept <= there
    assert protected is None or protected in kept
    assert len(kept) <= keep + 1


@pytest.mark.parametrize(
    ("order", "asked"),
    [
        (["a", "b", "c"], ["a", "b"]),
        (["c", "b", "a"], ["c", "b"]),
        (["b", "a", "c"], ["b", "a"]),
        (["a"], ["a"]),
        ([], []),
    ],
)
def test_hosts_are_asked_that_hold_what_is_not_known_yet(order, asked):
    held = HeldSave(SaveId(1, 1, 3, False, "ab", "cd"), {0: ("a", "c"), 1: ("b",), 2: ("b", "c")}, True)
    assert hosts_to_ask(held, order) == asked
