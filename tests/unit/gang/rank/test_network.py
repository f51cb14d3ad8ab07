"""The addresses by which hosts reach each other: the choice among those that were tried."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tritium.gang.rank import network
from tritium.gang.rank.network import HostAddresses, _best, _leads_to, _listening, _reached

HOSTS = [HostAddresses(rank, ("10.0.0.1", "10.1.0.1"), ("eth0", "eth1"), 1, "") for rank in (0, 2, 4)]


def test_the_first_address_that_all_others_reach_is_chosen() -> None:
    answers = [{"2": [0, 1], "4": [0]}, {"0": [0, 1], "4": [1]}, {"0": [1], "2": [0, 1]}]
    assert _best(HOSTS, answers) == {0: 1, 2: 0}, "rank 0 and 2 reach the last host at different ones only"
    assert _best(HOSTS, [{}, {}, {}]) == {}


def test_another_host_at_the_same_address_is_not_taken_for_this_one() -> None:
    with _listening() as (port, token):
        here = HostAddresses(3, ("127.0.0.1", "127.0.0.2"), ("lo", "lo"), port, token)
        assert _leads_to(here, "127.0.0.1")
        assert not _leads_to(replace(here, token="0" * len(token)), "127.0.0.1")
        assert _reached([here], 1) == {"3": [0]}
        assert _reached([here], None) == {"3": [0, 1]}
    assert not _leads_to(here, "127.0.0.1"), "nobody listens there after the block"


def test_an_address_that_does_not_answer_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "REACH_SECONDS", 0.2)
    assert not _leads_to(replace(HOSTS[0], port=9), "192.0.2.7")  # for documentation: nobody has it
