"""The example that goes on with other clients does what its page says."""

from __future__ import annotations

import pytest

from examples import resize


@pytest.mark.processes
def test_steps_are_lost_only_with_a_part_of_the_state(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    worlds = resize.main(["--checkpoints", str(tmp_path)])
    assert [(clients, lost) for clients, lost, _ in worlds] == [(4, 0), (3, 0), (4, 0), (3, 1)]
    losses = [losses for *_, losses in worlds]
    assert [list(each) for each in losses] == [[1, 2, 3], [4, 5], [6, 7], [7, 8, 9]]
    assert losses[3][7] == pytest.approx(losses[2][7], rel=1e-5)
    assert losses[3][9] < losses[0][1] / 2
