"""Choose the copies that a host keeps of values that clients of other hosts save, too; pure.

Several hosts may have the same value, such as the weights of a norm, or every value under HSDP and DDP. One client
saves each chunk of the value, and its part is copied to partners like all parts. If only that client's host kept the
chunk, the other hosts would have to ask for it when the job comes back. So each host that has the value keeps a *near
copy* of the chunk, in the file of one of its clients, behind that client's part::

    host a    client 0   | part: w[0:4]  norm |                         norm is in the part of client 0
              client 1   | part: w[4:8]       |
    host b    client 2   | part: w[8:12]      |  near copies: norm |
              client 3   | part: w[12:16]     |

No host relies on the near copies of another host: clients do not send them to partners, and a step is whole without
them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from dtckpt.checkpoint.parts.records import NearCopies
from dtckpt.checkpoint.saving.plan import NO_CLIENT, CopyRule, SavePlan, TensorPlan
from dtckpt.layout.region import Region


@lru_cache(maxsize=4)
def near_copies(plan: SavePlan, client: int, neighbours: tuple[int, ...]) -> NearCopies:
    """Return the regions of which a client keeps near copies; a client of another host saves each of them.

    Args:
        plan: The plan of all clients.
        client: The client.
        neighbours: The clients of its host, ascending, with itself. The clients take turns.
    """
    on_host = frozenset(neighbours)
    # Tensors of the same layout and shape have the same holdings, as one object.
    boxes_of: dict[int, list[tuple[Region, tuple[int, ...]]]] = {}
    found: dict[str, tuple[Region, ...]] = {}
    for tensor in plan.tensors:
        # Every host gets the lowest client's copy back; the host's own copy may differ.
        if tensor.spec.copies is not CopyRule.EQUAL:
            continue
        holdings = tensor.spec.holdings
        boxes = boxes_of.get(id(holdings))
        if boxes is None:
            boxes = boxes_of[id(holdings)] = []
            for holding in holdings:
                own = tuple(each for each in holding.clients if each in on_host)
                if 0 < len(own) < len(holding.clients):
                    boxes.append((holding.region, own))
        regions = [
            region
            for box, own in boxes
            for number, region in _given_elsewhere(tensor, box, on_host)
            if own[number % len(own)] == client
        ]
        if regions:
            found[tensor.name] = tuple(regions)
    return found


def _given_elsewhere(tensor: TensorPlan, box: Region, on_host: frozenset[int]) -> Iterator[tuple[int, Region]]:
    """Yield the regions inside a box that clients of other hosts save, each with its chunk's number."""
    for index in tensor.grid.meeting(box):
        number = tensor.grid.number(index)
        owner = int(tensor.owners[number])
        if number in tensor.pieces:
            given = [(piece.region, piece.client) for piece in tensor.pieces[number]]
        else:
            given = [(tensor.grid.region(index), owner)]
        yield from (
            (number, region)
            for region, giver in given
            if giver != NO_CLIENT and giver not in on_host and box.contains(region)
        )
