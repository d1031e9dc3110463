"""Files that are parts of one: rows in order, each part a whole embeddings file of its own."""

from collections.abc import Sequence

import numpy as np

from embedx import store
from embedx.errors import StoreError
from embedx.store import Embeddings, Writer

_BLOCK_BYTES = 2**24


def append_parts(writer: Writer, parts: Sequence[Embeddings]) -> None:
    """Copy what is streamed of each row, part by part, and why rows failed.

    Args:
        writer: Of the file that has all rows, at row 0; its fields are among those of each part.
        parts: In order; each row is held to its checksum first.

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
