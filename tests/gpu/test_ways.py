"""How several NCCL ranks share one GPU."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.gpu.conftest import Ways


@pytest.mark.needs(seconds=30, cuda=True)
def test_ranks_with_their_own_hosts_share_a_gpu(ways: Ways, note: Any) -> None:
    note(way=ways.found.name)
    done = ways.tried["own hosts"]
    assert done.code == 0, done.last


@pytest.mark.needs(seconds=5, cuda=True)
def test_nccl_refuses_ranks_of_one_host_on_one_gpu(ways: Ways) -> None:
    """The control: else the other test would prove nothing."""
    assert ways.refused is not None
    assert ways.refused.code != 0
    assert re.search("Duplicate GPU|same GPU", ways.refused.text)
