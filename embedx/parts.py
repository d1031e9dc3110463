"""Files that are parts of one: rows in order, each part a whole embeddings file of its own."""

import abc
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from embedx import store
from embedx.errors import StoreError
from embedx.store import Embeddings, Writer

_BLOCK_BYTES = 2**24


def part_rows(number: int, *, n_parts: int, n_rows: int, block: int) -> range:
    """The rows of a part; parts are as equal as whole blocks allow.

    Args:
        number: Of the part, from 0.
        n_parts: How many there are.
        n_rows: Of all parts.
        block: Rows that stay together; a part begins at a multiple of it.
    """
    n_blocks = -(-n_rows // block)
    first, end = (at * n_blocks // n_parts * block for at in (number, number + 1))
    return range(min(first, n_rows), min(end, n_rows))


class Feed(abc.ABC):
    """What tells a process which parts to make, one after the other.

    Attributes:
        n_parts: How many there are in all.
        file_id: The id of the whole, as whoever asks for its parts knows it.
        identity: What decides its rows, to name a difference.
    """

    n_parts: int
    file_id: str
    identity: dict[str, Any]

    @abc.abstractmethod
    def next(self) -> int | None:
        """The part to make now; None when there is no more. The one before is made."""


class Engine(abc.ABC):
    """What has parts made by other processes.

    Attributes:
        silent_after_s: For how long a part may have no new row, or none be begun, before it is
            said.
    """

    silent_after_s: float = 600.0

    @property
    @abc.abstractmethod
    def n_workers(self) -> int:
        """How many work at once."""

    @abc.abstractmethod
    def run(
        self,
        parts: Sequence[int],
        *,
        about: dict[str, Any],
        ended: Callable[[int], None],
        tick: Callable[[Mapping[int, str]], None],
    ) -> dict[int, str]:
        """Have parts made, and leave no process behind, whatever happens.

        Args:
            parts: Their numbers.
            about: What a process has to know beside: ``n_parts``, ``file_id``, ``identity``.
            ended: Called with the number of each part that is made.
            tick: Called now and then with the parts under way, and who makes each; what it raises
                ends the run.

        Returns:
            Why parts failed, by their number.
        """


def append_parts(writer: Writer, parts: Iterable[Embeddings]) -> None:
    """Copy what is streamed of each row, part by part, and why rows failed.

    Args:
        writer: Of the file that has all rows, at row 0; its fields are among those of each part.
        parts: In order, one at a time; each row is held to its checksum first.

    Raises:
        StoreError: A row of a part does not match its checksum, or the disk refused.
    """
    before = 0
    block = max(1, _BLOCK_BYTES // sum(field.row_bytes for field in writer.fields))
    for part in parts:
        if bad := part.verify():
            raise StoreError(
                f"{part.path}: row {bad[0]} ({part.ids[bad[0]]}) does not match its checksum, and "
                "the parts cannot be joined; remove it to have it made anew, if it is of extract"
            )
        listed = store.read_reasons(part.path.with_name(store.EMBEDDINGS_NAME))
        reasons = {one["row"]: one["reason"] for one in listed}
        for start in range(0, part.n_rows, block):
            rows = slice(start, min(start + block, part.n_rows))
            writer.append(
                {field.name: np.array(part.streamed[field.name][rows]) for field in writer.fields},
                status=part.status[rows],
                reasons={
                    before + row: (part.ids[row], why)
                    for row, why in reasons.items()
                    if rows.start <= row < rows.stop
                },
            )
        before += part.n_rows
