"""`ClientValues`: the values that the clients of a save passed as a `dtckpt.PerClient`, by client."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dtckpt.errors import TreeError


class ClientValues(dict[int, Any]):
    """The values of one piece of state that differs by client, such as a random state, by number of the client.

    A restore without a target gives them, and one whose target holds a plain value such as None. In a tree to be saved
    they are the values of all clients, so every client must pass the same; a client that knows only its own value
    passes a `dtckpt.PerClient`.

    Args:
        values: By number of the client, from 0, its value. Clients that passed none are left out.
        num_clients: The number of clients of the save; default: of the values.

    Raises:
        TreeError: A key is no number of a client.

    >>> ClientValues({0: "a", 1: "b"})
    ClientValues({0: 'a', 1: 'b'}, num_clients=2)
    """

    __slots__ = ("num_clients",)

    def __init__(self, values: Mapping[int, Any], num_clients: int | None = None) -> None:
        num_clients = len(values) if num_clients is None else num_clients
        if type(num_clients) is not int:
            raise TreeError(f"the number of clients must be an int; got {num_clients!r}")
        for client in values:
            if type(client) is not int or not 0 <= client < num_clients:
                raise TreeError(f"values of clients need keys from 0 to {num_clients - 1}; got {client!r}")
        super().__init__(values)
        self.num_clients = num_clients

    def __repr__(self) -> str:
        return f"ClientValues({super().__repr__()}, num_clients={self.num_clients})"
