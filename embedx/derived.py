"""What is made of embeddings and lies beside them, and what tells it from files of others."""

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from embedx.errors import StoreError, listed
from embedx.layout import (
    FINDINGS_FORMAT,
    MAPS_FORMAT,
    NEIGHBORS_FORMAT,
    PROJECTION_FORMAT,
    Skeleton,
    Status,
    decoded,
    encode_texts,
    plain,
    read_arrays,
    reading,
    write_arrays,
)
from embedx.matrix import Array
from embedx.store import EMBEDDINGS_NAME, Embeddings, Parts, file_of_parts, find_embeddings
from embedx.unfinished import PARTS_MARK, errors_path

log = logging.getLogger("embedx")

MAPS_NAME = "maps.h5"


# -------------------------------------------------------- what is ours, and what goes with the rows


PICTURE_MARKS = {".png": b"Software\0embedx", ".svg": b"<dc:title>embedx</dc:title>"}
REPORT_MARK = b'<meta name="generator" content="embedx'
EXPORT_CONFIG = "projector_config.pbtxt"
EXPORT_MARK = "# Written by embedx; the next export to this folder replaces all of it.\n"
EXPORT_EVENTS = "events.out.tfevents.0.embedx"  # without one TensorBoard passes over a sub-folder
EXPORT_ROW = "embedx_row"  # the first column of a table: the row of the embeddings file, from 0
EXPORT_PARENT = "embedx_parent"  # what a parquet file calls the id of the embeddings
EXPORT_TABLES = ("atlas.parquet", "table.csv", "table.parquet", "embeddings.npz")


def foreign_in_export(folder: Path) -> set[str]:
    """Names in a folder that are no part of an export of embedx."""
    ours: set[str] = set()
    if (folder / EXPORT_CONFIG).is_file():
        text = (folder / EXPORT_CONFIG).read_text(encoding="utf-8", errors="replace")
        if text.startswith(EXPORT_MARK):
            ours = {EXPORT_CONFIG, EXPORT_EVENTS, *re.findall(r'_path: "([^"]*)"', text)}
    return {path.name for path in folder.iterdir() if path.name not in ours or not path.is_file()}


def require_ours(path: Path, mark: bytes | re.Pattern[bytes]) -> None:
    """Raise StoreError where there is a file that embedx did not write: it is not replaced.

    Args:
        path: The file to be.
        mark: What stands in the first 4 kB of each such file, or how these begin.
    """
    if not os.path.lexists(path):
        return
    with contextlib.suppress(OSError):
        if path.is_file() and not path.is_symlink():
            with path.open("rb") as opened:
                head = opened.read(4096)
                if mark.match(head) if isinstance(mark, re.Pattern) else mark in head:
                    return
    raise StoreError(
        f"{path} is there and was not written by embedx; move it, or choose another out=FOLDER"
    )


def require_own_beside(path: Path, *, has_config: bool) -> None:
    """Raise StoreError where what is written beside embeddings would replace a user's own.

    Args:
        path: The file of embeddings.
        has_config: Whether its settings are written, too.
    """
    require_ours(errors_path(path), re.compile(rb'(\{"row": \d+, "id": |$)'))
    if has_config:
        require_ours(path.with_name("config.yaml"), re.compile(rb"id: '?[0-9a-f]{64}'?\s"))


def is_export_table(path: Path) -> bool:
    """Whether a file is a table that an export of embedx wrote, and nobody changed since.

    Raises:
        OSError: It cannot be read.
    """
    if not path.is_file() or path.is_symlink() or not hash_path(path).is_file():
        return False
    lines = hash_path(path).read_text("ascii", "replace").splitlines()
    with path.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest() in {s[:64] for s in lines}


def hash_path(path: Path) -> Path:
    """Where the SHA-256 of a table lies as it was exported, and of the one that it replaces."""
    return path.with_name(f".{path.name}.sha256")


def remove_export(folder: Path) -> bool:
    """Remove an export of embedx; a folder that holds anything else stays as it is."""
    is_ours = folder.is_dir() and not folder.is_symlink() and not foreign_in_export(folder)
    if is_ours:
        shutil.rmtree(folder)
    return is_ours


def remove_derived(folder: Path, file_id: str, *, is_replaced: bool = True) -> None:
    """Remove what was made of the embeddings with this id, and nothing that somebody else made.

    What was removed is logged.

    Args:
        folder: Where they lie.
        file_id: Their id; empty of a file that is there no more, or cannot be read.
        is_replaced: Whether the file that lay there goes, and with it what does not say which
            embeddings it is of: pictures, exports.
    """
    removed: list[str] = []

    def remove(path: Path) -> None:
        path.unlink(missing_ok=True)  # another job of an array may do the same
        removed.append(path.name)

    for file in sorted((folder / "projections").glob("*.h5")):
        with contextlib.suppress(StoreError):
            if open_projection(file).attrs["parent"] == file_id:
                remove(file)
    for parts in sorted((folder / "projections").glob("*.parts")):  # of a map that was not ended
        if is_replaced and (parts / PARTS_MARK).is_file():
            shutil.rmtree(parts, ignore_errors=True)
            removed.append(parts.name)
    for file in sorted(folder.glob("neighbors-*.h5")):
        with contextlib.suppress(StoreError):
            if read_arrays(file, format=NEIGHBORS_FORMAT)[0]["parent"] == file_id:
                remove(file)
    scores = folder / "scores.json"
    with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, RecursionError):
        if scores.is_file() and json.loads(scores.read_bytes()).get("parent") == file_id:
            remove(scores)
    marked = [
        (path, mark)
        for kind in ("map-", "maps", "variance-")
        for suffix, mark in PICTURE_MARKS.items()
        for path in sorted(folder.glob(f"{kind}*{suffix}"))
    ]
    unnamed = [*marked, (folder / "report.html", REPORT_MARK)] if is_replaced else []
    for path, mark in unnamed:
        with contextlib.suppress(OSError), path.open("rb") as opened:
            if mark in opened.read(4096):
                remove(path)
    for findings in sorted((folder / "neighbors").glob("*.json")):
        of = findings_parent(findings)
        # Its table and picture do not say of which rows they are.
        if of == file_id or (of is not None and not file_id):
            for suffix in (".csv", ".png", ".json"):
                if findings.with_suffix(suffix).exists():
                    remove(findings.with_suffix(suffix))
    if is_replaced and remove_export(folder / "projector"):
        removed.append("projector")
    for table in map(folder.joinpath, EXPORT_TABLES if is_replaced else ()):
        with contextlib.suppress(OSError):
            if is_export_table(table):
                remove(table)
                hash_path(table).unlink(missing_ok=True)
    for name in ("projections", "neighbors"):
        with contextlib.suppress(OSError):  # not empty: it holds something of somebody else's
            (folder / name).rmdir()
    if removed:
        log.info("removed what was made of the rows that are replaced: %s", listed(removed))


def findings_parent(path: Path) -> str | None:
    """The id of the embeddings that a table of findings is of; None where it is no such table."""
    try:
        document = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    is_ours = isinstance(document, dict) and document.get("format") == FINDINGS_FORMAT
    return str(document.get("parent")) if is_ours else None


# --------------------------------------------------------------------------- projections


@dataclasses.dataclass(frozen=True)
class Projection:
    """A projection file.

    Attributes:
        path: The file.
        coords: Shape ``(n, m)`` float32, row-aligned with the parent; NaN for failed rows.
        ids: n texts, those of the parent.
        attrs: ``method``, ``layer``, ``parent``, ``seed``, every parameter, every score.
        state: Arrays of the fitted projection, by name.
        row_scores: Scores of each row, shape ``(n,)``, by name; NaN where there is none.
    """

    path: Path
    coords: Array
    ids: list[str]
    attrs: dict[str, Any]
    state: dict[str, Array]
    row_scores: dict[str, Array]

    def __repr__(self) -> str:
        return f"<Projection {self.path}: coords {self.coords.shape}>"

    @property
    def name(self) -> str:
        """Its slug, such as ``umap-1a2b3c``."""
        return self.path.stem


def write_projection(
    path: Path,
    *,
    coords: Array,
    ids: Sequence[str],
    attrs: Mapping[str, Any],
    state: Mapping[str, Array] | None = None,
    row_scores: Mapping[str, Array] | None = None,
) -> Path:
    """Write a projection file, whole or not at all.

    Args:
        path: Where to.
        coords: Shape ``(n, m)``.
        ids: n texts.
        attrs: Root attributes; ``id`` must be there.
        state: Arrays to keep for placing new rows.
        row_scores: Scores of each row, shape ``(n,)``.

    Raises:
        StoreError: The disk refused.
    """
    arrays = {
        "coords": np.asarray(coords, dtype=np.float32),
        "ids": encode_texts(ids, what="the id"),
        **{f"state/{name}": np.asarray(array) for name, array in (state or {}).items()},
        **{f"row_scores/{name}": array for name, array in (row_scores or {}).items()},
    }
    return write_arrays(path, format=PROJECTION_FORMAT, attrs=attrs, arrays=arrays)


def open_projection(path: str | os.PathLike[str]) -> Projection:
    """Open a projection file.

    Raises:
        StoreError: It is not there, damaged, or not a projection of embedx.
    """
    path = Path(path)
    with reading(path), Skeleton(path) as skeleton:
        attrs = _projection_attrs(skeleton)
        skeleton.expect("ids", (None,), "S")
        ids = decoded(skeleton.map("ids"))
        skeleton.expect("coords", (len(ids), None), "f", 4)
        coords = np.array(skeleton.map("coords"))
        state = {
            name.removeprefix("state/"): np.array(skeleton.map(name))
            for name in skeleton.names("state")
        }
        row_scores = {}
        for name in skeleton.names("row_scores"):
            skeleton.expect(name, (len(ids),), "f", 4)
            row_scores[name.removeprefix("row_scores/")] = np.array(skeleton.map(name))
    return Projection(
        path=path, coords=coords, ids=ids, attrs=attrs, state=state, row_scores=row_scores
    )


def _projection_attrs(skeleton: Skeleton) -> dict[str, Any]:
    attrs = skeleton.attrs(PROJECTION_FORMAT)
    texts = all(isinstance(attrs[key], str) for key in ("parent", "method", "layer"))
    score = attrs.get("trustworthiness", 0.0)
    if not texts or not isinstance(score, (int, float)):
        raise StoreError(
            f"{skeleton.path} is damaged: its attributes are of other types; make it anew"
        )
    return attrs


def _projection_files(embeddings: Embeddings) -> dict[str, Path]:
    """What lies in the folder of an embeddings file's projections, by name, sorted."""
    folder = embeddings.path.parent / "projections"
    return {path.stem: path for path in sorted(folder.glob("*.h5"))}


def projections_of(embeddings: Embeddings, chosen: Sequence[str] | None = None) -> list[Projection]:
    """The projections of an embeddings file: those chosen, or all below its folder.

    Args:
        embeddings: The opened file.
        chosen: Paths, or names such as ``umap-1a2b3c`` or ``umap``; None for all.

    Returns:
        Each file once: those chosen in the order of ``chosen``, else all of them sorted by name.

    Raises:
        StoreError: A chosen one is not there or belongs to other embeddings, or one is damaged.
    """
    found = _projection_files(embeddings)
    paths = list(found.values()) if chosen is None else []
    for name in chosen or ():
        matches = [p for stem, p in found.items() if name in (stem, stem.rsplit("-", 1)[0])]
        if not matches and Path(name).exists():
            matches = [Path(name)]
        if not matches:
            raise StoreError(
                f"there is no projection {name!r} of {embeddings.path}; there are: "
                + (", ".join(found) or "none yet, make one with: python -m embedx project")
            )
        paths += matches
    once: dict[Path, Path] = {}
    for path in paths:
        once.setdefault(path.resolve(), path)
    opened = []
    for path in once.values():
        projection = open_projection(path)
        is_own = embeddings.is_parent_of(projection.attrs)
        if not is_own and chosen is None:
            log.warning("%s was made of other embeddings: passed over", path)
            continue
        if not is_own or projection.ids != embeddings.ids:
            other = "has other rows" if is_own else "belongs to other embeddings"
            raise StoreError(
                f"{path} {other} than {embeddings.path}; project them anew with overwrite=true"
            )
        opened.append(projection)
    return opened


# --------------------------------------------------------------------------- maps


@dataclasses.dataclass(frozen=True)
class Maps:
    """A file of maps of what the score of a class hangs on, for m samples.

    Attributes:
        path: The file.
        attrs: ``method``, ``model``, ``weights_sha256``, what the method was given, ...
        ids: m texts.
        rows: Number of each sample in its data, shape ``(m,)``.
        status: Shape ``(m,)`` uint8 of :class:`Status`.
        targets: The class, shape ``(m,)`` int32; -1 for failed rows.
        maps: Shape ``(m, h, w)`` or ``(m, c, h, w)`` float32, memory-mapped; NaN for failed rows.
        labels: Shape ``(m,)`` int32, -1 for none; None without labels.
        label_names: Names of the labels; empty where each is its own.
        columns: ``scores``, ``shares`` and further figures, shape ``(m,)``, by name.
    """

    path: Path
    attrs: dict[str, Any]
    ids: list[str]
    rows: Array
    status: Array
    targets: Array
    maps: Array
    labels: Array | None
    label_names: list[str]
    columns: dict[str, Array]

    def __repr__(self) -> str:
        return f"<Maps {self.path}: {self.attrs['method']} {self.maps.shape}>"

    @property
    def ok(self) -> npt.NDArray[np.bool_]:
        """Shape ``(m,)``: the rows that hold a map."""
        mask: npt.NDArray[np.bool_] = self.status == Status.OK
        return mask


def write_maps(
    path: Path,
    *,
    method: str,
    maps: Array,
    ids: Sequence[str],
    rows: Array,
    status: Array,
    targets: Array,
    columns: Mapping[str, Array],
    attrs: Mapping[str, Any],
    labels: Array | None = None,
    label_names: Sequence[str] = (),
) -> Path:
    """Write a file of maps, whole or not at all; the arguments are those of :class:`Maps`.

    Raises:
        StoreError: The disk refused.
    """
    arrays = {
        f"maps/{method}": np.asarray(maps, dtype=np.float32),
        "ids": encode_texts(ids, what="the id"),
        "rows": np.asarray(rows, dtype=np.int64),
        "status": np.asarray(status, dtype=np.uint8),
        "targets": np.asarray(targets, dtype=np.int32),
        **{f"columns/{name}": np.asarray(one, np.float32) for name, one in columns.items()},
    }
    if labels is not None:
        arrays["labels"] = np.asarray(labels, dtype=np.int32)
        if label_names:
            arrays["label_names"] = encode_texts(label_names, what="the label")
    return write_arrays(path, format=MAPS_FORMAT, attrs={**attrs, "method": method}, arrays=arrays)


def open_maps(path: str | os.PathLike[str]) -> Maps:
    """Open a file of maps.

    Raises:
        StoreError: It is not there, damaged, or no file of maps of embedx.
    """
    path = Path(path)
    with reading(path), Skeleton(path) as skeleton:
        attrs = skeleton.attrs(MAPS_FORMAT)
        name = f"maps/{attrs['method']}"
        skeleton.expect("ids", (None,), "S")
        ids = decoded(skeleton.map("ids"))
        n = len(ids)
        maps = skeleton.map(name)
        skeleton.expect(name, (n, *[None] * (3 if maps.ndim == 4 else 2)), "f", 4)
        skeleton.expect("rows", (n,), "i", 8)
        skeleton.expect("status", (n,), "u", 1)
        skeleton.expect("targets", (n,), "i", 4)
        labels, label_names = None, []
        if skeleton.has("labels"):
            skeleton.expect("labels", (n,), "i", 4)
            labels = np.array(skeleton.map("labels"))
            if skeleton.has("label_names"):
                skeleton.expect("label_names", (None,), "S")
                label_names = decoded(skeleton.map("label_names"))
        columns = {}
        for one in skeleton.names("columns"):
            skeleton.expect(one, (n,), "f", 4)
            columns[one.removeprefix("columns/")] = np.array(skeleton.map(one))
        return Maps(
            path=path,
            attrs=attrs,
            ids=ids,
            rows=np.array(skeleton.map("rows")),
            status=np.array(skeleton.map("status")),
            targets=np.array(skeleton.map("targets")),
            maps=maps,
            labels=labels,
            label_names=label_names,
            columns=columns,
        )


# ----------------------------------------------------------------------- what a file says of itself


def describe(path: str | os.PathLike[str] | Embeddings, *, verify: bool = False) -> dict[str, Any]:
    """What a file of embedx holds, as plain values in the order to show them.

    Args:
        path: A file of embeddings, of a projection or of maps, a ``.partial`` file, the folder of a
            run or of an explanation, or an opened file, of which nothing is read again.
        verify: Check every row against its checksum; a projection and maps have one of the whole.

    Raises:
        StoreError: It is not a file of embedx, or holds pictures alone, or with ``verify`` rows do
            not match.
    """
    if not isinstance(path, Embeddings) and (unjoined := file_of_parts(Path(path))) is not None:
        path = Parts(unjoined)
    if isinstance(path, Embeddings):
        opened, path = path, path.path
    else:
        path = Path(path)
        if path.is_dir() or not path.exists():
            path = _find_described(path)
        with reading(path), Skeleton(path) as skeleton:
            kind = plain(skeleton._file.attrs.get("format"))
            is_whole = skeleton.is_as_laid_out  # else it would not have opened
        words = (
            "the checksum of the file matches"
            if is_whole
            else "no: the file has lost its checksum, another program opened it for writing"
        )
        verified = {"verified": words} if verify else {}
        if kind == PROJECTION_FORMAT:
            projection = open_projection(path)
            shape = list(projection.coords.shape)
            return {"file": str(path), **projection.attrs, "coords": shape} | {
                "file": str(path),
                **verified,
            }
        if kind == MAPS_FORMAT:
            maps = open_maps(path)
            held = {
                "rows": len(maps.ids),
                "failed_rows": int((~maps.ok).sum()),
                f"maps/{maps.attrs['method']}": f"{list(maps.maps.shape)} {maps.maps.dtype}",
            }
            return {"file": str(path), **held, **maps.attrs} | {
                "file": str(path),
                **held,
                **verified,
            }
        opened = Embeddings(path)
    about: dict[str, Any]
    failed = int((opened.status == Status.FAILED).sum())
    about = {
        "file": str(path),
        "complete": opened.complete,
        **({"parts": f"{opened.n_parts:,}, not joined"} if isinstance(opened, Parts) else {}),
        "rows": opened.n_rows,
        "rows_expected": int(opened.attrs["n_rows"]),
        "failed_rows": failed,
        "size_mb": round(opened.size_bytes / 1e6, 1),
    }
    for point, rows in opened.embeddings.items():
        about[f"embeddings/{point}"] = f"{list(rows.shape)} {rows.dtype}"
    for name, output in opened.outputs.items():
        about[f"outputs/{name}"] = f"{list(output.shape)} {output.dtype}"
    if opened.thumbnails is not None:
        about["thumbnails"] = f"{list(opened.thumbnails.shape)} {opened.thumbnails.dtype}"
    if opened.labels is not None:
        n_used = len(set(opened.label_texts() or ()) - {""})
        about["labels"] = f"{len(opened.label_names) or n_used} classes"
    about.update({f"metadata/{name}": len(col) for name, col in opened.metadata.items()})
    hidden = {"n_rows", "row_fields", *about}
    about.update({key: value for key, value in opened.attrs.items() if key not in hidden})
    about.update(_described_projections(opened))
    if verify:
        if bad := opened.verify():
            file = opened.row_file(bad[0])
            within = "" if file == path else f" in {file}"
            anew = "the file" if file == path else "that part"
            raise StoreError(
                f"{path}: {len(bad)} of {opened.n_rows} rows do not match their checksum, "
                f"first row {bad[0]} ({opened.ids[bad[0]]}){within}; make {anew} anew"
            )
        about["verified"] = f"all {opened.n_rows} checksums match"
    return about


def _find_described(path: Path) -> Path:
    """The file that a folder stands for, which may be that of an explanation.

    Raises:
        StoreError: There is none.
    """
    if (path / EMBEDDINGS_NAME).exists() or not path.is_dir():
        return find_embeddings(path)
    if (path / MAPS_NAME).exists():
        return path / MAPS_NAME
    if (path / "config.yaml").is_file() and (n_pictures := len(list(path.glob("*.png")))):
        raise StoreError(
            f"{path} holds {n_pictures} pictures of feature maps and no file of numbers; look at "
            "them, their settings are in its config.yaml"
        )
    if explained := sorted(one.parent for one in path.glob("explain/*/config.yaml")):
        raise StoreError(
            f"{path} holds no {EMBEDDINGS_NAME}, and explanations: "
            f"{listed([str(one) for one in explained])}; name one of them"
        )
    return find_embeddings(path)


def _described_projections(embeddings: Embeddings) -> dict[str, list[str]]:
    """The names of the projections beside an embeddings file, those that are damaged apart."""
    own, damaged = [], []
    for name, path in _projection_files(embeddings).items():
        try:
            with reading(path), Skeleton(path) as skeleton:
                attrs = _projection_attrs(skeleton)
        except StoreError as error:
            damaged.append(f"{name} ({error})")
            continue
        if embeddings.is_parent_of(attrs):
            own.append(name)
        else:
            log.warning("%s was made of other embeddings: passed over", path)
    return {"projections": own, **({"damaged projections": damaged} if damaged else {})}
