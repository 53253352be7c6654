"""Where copies go, and how likely a step is lost: against brute force, and against published and computed figures."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dtckpt.checkpoint.tiers.copy_hosts import CopyHosts


def of(num_hosts, copies, domain=lambda host: host):
    return CopyHosts.of({f"{host:04}": str(domain(host)) for host in range(num_hosts)}, copies)


@given(st.integers(1, 40), st.integers(1, 6))
def test_every_part_has_its_copies(num_hosts, copies):
    copy_hosts = of(num_hosts, copies)
    count = min(copies, num_hosts)
    held = dict.fromkeys(copy_hosts.domains, 0)
    for host in copy_hosts.domains:
        partners = copy_hosts.partners(host)
        assert len({host, *partners}) == count
        for partner in partners:
            held[partner] += 1
    assert set(held.values()) == {count - 1}, "no host holds more than another"


@given(st.integers(1, 9), st.integers(1, 4), st.integers(1, 9))
def test_the_probability_is_that_of_brute_force(num_hosts, copies, num_lost):
    copy_hosts = of(num_hosts, copies)
    sets = list(itertools.combinations(copy_hosts.domains, num_lost))
    fatal = sum(not copy_hosts.survives(lost) for lost in sets)
    assert math.isclose(copy_hosts.loss_probability(num_lost), fatal / len(sets) if sets else 0.0, abs_tol=1e-12)


@pytest.mark.parametrize(
    ("num_hosts", "copies", "num_lost", "percent"),
    [
        (16, 2, 2, 6.7),
        (16, 2, 4, 38.5),
        (16, 2, 8, 98.0),
        (16, 4, 4, 0.22),
        (64, 2, 16, 91.9),
        (63, 3, 8, 3.0),
        (512, 2, 8, 5.4),
        (2048, 2, 2, 0.049),
        (17, 2, 2, 7.4),
        (17, 3, 3, 1.3),
        (65, 2, 2, 1.6),
    ],
)
def test_known_figures(num_hosts, copies, num_lost, percent):
    """Figures that were computed independently."""
    found = 100 * of(num_hosts, copies).loss_probability(num_lost)
    assert found == pytest.approx(percent, rel=0.05)


@given(st.integers(2, 4), st.integers(2, 6), st.integers(1, 6))
def test_one_domain_takes_no_step(copies, num_domains, per_domain):
    """Equal domains, at least as many as copies: the loss of any one leaves each part somewhere."""
    num_domains = max(num_domains, copies)
    copy_hosts = of(num_domains * per_domain, copies, lambda host: host // per_domain)
    if len(copy_hosts.ring) == 0:
        assert copy_hosts.in_one_domain == []
        for domain in range(num_domains):
            assert copy_hosts.survives({host for host, its in copy_hosts.domains.items() if its == str(domain)})


def test_neighbours_do_not_hold_each_others_parts():
    copy_hosts = of(8, 2)
    assert copy_hosts.partners("0000") == ("0004",)
    racks = of(8, 2, lambda host: host // 4)
    assert racks.survives({"0000", "0001", "0002", "0003"})
    together = of(4, 2, lambda host: host == 3)
    assert together.in_one_domain == ["0000", "0002"] or together.in_one_domain, "three of four are in one domain"
