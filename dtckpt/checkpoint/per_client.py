"""`PerClient`: state that differs by client, such as a random state or the position of a data loader.

A save stores the value of each client, under the client's number. A restore gives each client its own, and follows a
rule of the caller where another number of clients restores.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Literal, NamedTuple

from dtckpt.errors import ConfigError, TensorNotFoundError, capped
from dtckpt.format.containers import ClientValues

ResizeRule = Literal["error", "keep", "modulo"] | Callable[[ClientValues, int, int], Any]


class ClientNumber(NamedTuple):
    """The place of a client among the clients that save or restore together.

    Args:
        number: From 0 on; in a job as a whole the client's id.
        num_clients: How many there are.
    """

    number: int
    num_clients: int

    @classmethod
    def among(cls, client: int, clients: Collection[int]) -> ClientNumber:
        """Return the place of a client, by its id, among others."""
        return cls(sorted(clients).index(client), len(clients))


class PerClient:
    """A value of a state tree that differs by client: any tree, and its tensors are this client's alone.

    All clients, or only some, pass a `PerClient` at the same place. Restored into a target, the value is filled as a
    separate target. If as many clients restore as saved, each gets its value back; else ``on_resize`` decides.
    A restore without a target, or with None in this place, gives the values of all clients, as `ClientValues`.

    Args:
        value: This client's value.
        on_resize: What to restore on a client if another number of clients saved, or this client saved no value:

            * ``"error"``: a `TensorNotFoundError`. The position of a loader means nothing else to other clients.
            * ``"keep"``: each client that saved a value gets it back; the others keep their present values. So no two
              clients get one random state.
            * ``"modulo"``: client i gets, of n values, the value at i modulo n.
            * A function of all values (`ClientValues`), the number of the client, and the number of clients now. Its
              result takes the place of the value; an object with ``load_state_dict()`` loads the result.

    Raises:
        ConfigError: There is no such rule.

    >>> import torch
    >>> state = {"rng": PerClient(torch.get_rng_state(), on_resize="keep")}
    """

    __slots__ = ("on_resize", "value")

    def __init__(self, value: Any, *, on_resize: ResizeRule = "error") -> None:
        if not callable(on_resize) and on_resize not in ("error", "keep", "modulo"):
            raise ConfigError(f"on_resize must be 'error', 'keep', 'modulo' or a function; got {on_resize!r}")
        self.value = value
        self.on_resize = on_resize

    def __repr__(self) -> str:
        return f"PerClient({self.value!r}, on_resize={self.on_resize!r})"

    def assign(self, value: Any) -> PerClient:
        """Replace the value; return the object."""
        self.value = value
        return self

    def source(self, saved: Collection[int], num_saved: int, client: ClientNumber, where: str) -> int | None:
        """Return the number of the client whose value a client takes; None if it takes none, or a function decides.

        Args:
            saved: Numbers of the clients whose values were saved.
            num_saved: How many clients saved.
            client: The client that restores.
            where: Path of the value in the tree, for messages.

        Raises:
            TensorNotFoundError: There is no rule for another number of clients.
        """
        if client.number in saved and (client.num_clients == num_saved or self.on_resize == "keep"):
            return client.number
        if self.on_resize == "modulo" and saved:
            return sorted(saved)[client.number % len(saved)]
        if self.on_resize == "keep" or callable(self.on_resize):
            return None
        raise TensorNotFoundError(
            f"the checkpoint has no value at {where!r} for client {client.number} of {client.num_clients}: it has one "
            f"each of clients {capped(sorted(saved)) or '(none)'}, of {num_saved} that saved; say what each takes by "
            "PerClient(value, on_resize=…), or restore without a target, which gives all values",
            name=where,
        )
